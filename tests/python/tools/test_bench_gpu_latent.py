"""The benchmark of latent caches without a GPU: its points, and one run on the CPU."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "bench"))

import bench_gpu_latent as bench


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "main_cases", lambda: [bench.Case(2, 128, 4, rows=2)])
    monkeypatch.setattr(bench, "COPIES_BYTES", 1)


def test_points(capsys):
    assert bench.main(["--list", "--points", "B64 S16384", "--points", "B1 S1024 16 heads"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "B1 S1024 16 heads 1 rows", "B64 S16384 16 heads 1 rows", "B64 S16384 128 heads 1 rows",
        "B64 S16384 64 heads 1 rows",
    ]  # fmt: skip
    case = bench.Case(1, 1024, 16)
    assert case.bytes == 1024 * 1152 and case.products == 2 * 16 * 1024 * 1088


def test_the_script_runs_on_a_cpu(small, tmp_path, capsys):
    result = tmp_path / "latent.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--quick", "--json", str(result)]
    assert bench.main(arguments) == 0
    assert "B2 S128 4 heads 2 rows" in capsys.readouterr().out
    [row] = json.loads(result.read_text())["rows"]
    assert set(row["us"]) == set(row["errors"]) == {"dense", "lengths", "page64"}
    assert not row["left_out"]


def test_wrong_results_fail(small, monkeypatch, capsys):
    monkeypatch.setattr(bench, "WRONG", 0.0)
    assert bench.main(["--device", "cpu", "--rounds", "1", "--quick"]) == 1
    assert "WRONG results: B2 S128 4 heads 2 rows dense" in capsys.readouterr().out
