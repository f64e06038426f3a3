"""bench/bench_masks.py: its masks show what FlexAttention's rules show, and the script runs."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch

from paths import ROOT

sys.path.insert(0, str(ROOT / "bench"))

import bench_masks

ROWS = 1024


@pytest.mark.parametrize("named", bench_masks.named_masks(ROWS), ids=lambda named: named.name)
def test_a_mask_shows_what_its_rule_shows(named):
    rows = torch.arange(ROWS)
    blocks = named.mask.on_host()
    blocks = blocks if hasattr(blocks, "bits") else blocks.blocks(ROWS, ROWS)
    strips = [blocks._strip(ROWS)(0, 0, begin, begin + 128) for begin in range(0, ROWS, 128)]
    shown = named.sees(rows[:, None], rows[None, :]).numpy()
    assert np.array_equal(np.concatenate(strips).astype(bool), shown)
    assert 0.02 < shown.mean() < 0.6


def test_unknown_masks_are_refused(capsys):
    with pytest.raises(SystemExit):
        bench_masks.run(["--device", "cpu", "--filter", "spiral"])
    assert "--filter is 'spiral', but must be part of one of documents" in capsys.readouterr().err


def test_the_script_runs_on_a_cpu(tmp_path, capsys):
    result = tmp_path / "masks.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--filter", "documents", "--json", str(result)]
    assert bench_masks.run(arguments) == 0
    assert "fwd documents of 125 rows" in capsys.readouterr().out
    rows = json.loads(result.read_text())["rows"]
    assert [r["direction"] for r in rows] == ["fwd", "bwd"]
    assert all(r["tflops"]["tilewise"] > 0 for r in rows)


def test_dense_forms_show_the_same_pairs(tmp_path, capsys):
    result = tmp_path / "masks.json"
    arguments = ["--device", "cpu", "--rounds", "1", "--filter", "spans", "--dense"]
    assert bench_masks.run([*arguments, "--head-dim", "64", "--json", str(result)]) == 0
    found = json.loads(result.read_text())
    assert found["head_dim"] == 64
    assert all(r["tflops"][name] > 0 for r in found["rows"] for name in ("bias", "SDPA"))
    assert found["rows"][0]["from_bool_ms"] > 0 and "from_bool" in capsys.readouterr().out
    (named,) = (x for x in bench_masks.named_masks(ROWS) if "spans" in x.name)
    problem = bench_masks.problem_of(named, "cpu", ROWS, peers=False, dense=True)
    for direction in bench_masks.DIRECTIONS:
        calls = problem.calls(direction)
        for name in ("bias", "SDPA"):
            torch.testing.assert_close(calls[name](), calls["tilewise"](), atol=2e-2, rtol=2e-2)
