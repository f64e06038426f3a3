"""bench/bench_derivatives.py: both backends compute the same calls, and the script runs."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import bench_derivatives


def results(name: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, 33, 2, 16, generator=generator) for _ in range(7)]
    leaves = [x.requires_grad_() for x in drawn[:3]]
    found = []
    for call in bench_derivatives.calls_of(bench_derivatives.BACKENDS[name], leaves, drawn[3:]):
        result = call()
        found += [result] if isinstance(result, torch.Tensor) else result
    return found


def test_both_backends_compute_the_same_calls():
    ours, others = results("tilewise"), results("MATH")
    assert len(ours) == 1 + 2 + 3 + 4
    for a, b in zip(ours, others, strict=True):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-4)


def test_the_script_runs_on_a_cpu(tmp_path, capsys):
    result = tmp_path / "derivatives.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--filter", "D64 S256", "--json", str(result)]
    assert bench_derivatives.run(arguments) == 0
    assert "fp32 D64 S256" in capsys.readouterr().out
    (row,) = json.loads(result.read_text())["rows"]
    assert set(row["milliseconds"]) == {"tilewise", "MATH"} and not row["left_out"]
    assert all(x > 0 for times in row["milliseconds"].values() for x in times)


def test_unknown_shapes_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_derivatives.run(["--device", "cpu", "--filter", "D65"])
    assert "fp32 D64 S256" in capsys.readouterr().err


def test_a_backend_without_memory_is_left_out(monkeypatch, capsys):
    def fails(q, k, v):
        raise torch.OutOfMemoryError("out of memory\nand more")

    monkeypatch.setitem(bench_derivatives.BACKENDS, "MATH", fails)
    assert bench_derivatives.run(["--device", "cpu", "--rounds", "1", "--filter", "D64 S256"]) == 0
    assert "MATH was left out: out of memory\n" in capsys.readouterr().out
