"""bench/bench_float8.py runs, and measures the error of float8."""

from __future__ import annotations

import json
import sys

from paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import bench_float8


def test_the_script_runs_on_a_cpu(tmp_path, capsys):
    result = tmp_path / "float8.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--points", "causal", "--json", str(result)]
    assert bench_float8.main(arguments) == 0
    rows = json.loads(result.read_text())["rows"]
    assert [row["name"] for row in rows] == ["D64 S64 causal", "D128 S64 causal"]
    for row in rows:
        assert set(row["tflops"]) == {"float8", "bf16"} and min(row["tflops"].values()) > 0
        assert 1e-4 < row["error"] < 4e-3, "that of out, which is rounded to bf16"
    assert "D128 S64 causal" in capsys.readouterr().out


def test_float8_tensors_have_a_factor_per_head():
    import torch

    x = torch.randn(2, 8, 3, 16) * torch.tensor([1.0, 50.0, 1e-3])[:, None]
    q, factor = bench_float8.quantized(x)
    assert factor.shape == (2, 3)
    again = q.float() * factor[:, None, :, None]
    assert ((again - x).abs() <= 0.07 * x.abs() + 1e-3 * factor[:, None, :, None]).all()
