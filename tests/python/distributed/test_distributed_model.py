"""The prediction of scaling: the committed numbers follow from the committed inputs."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch")

sys.path.append(str(ROOT / "bench"))

import distributed_model as model
from tilewise.distributed.cost import GPU

INPUTS = json.loads((model.RESULTS / "distributed-links.json").read_text())
COMMITTED = json.loads((model.RESULTS / "distributed-prediction.json").read_text())


@pytest.fixture(scope="module")
def machine() -> model.Machine:
    """From the inputs without the points that were measured on several GPUs."""
    return model.machine_of({name: x for name, x in INPUTS.items() if name != "measured"})


def test_committed_predictions_follow_from_the_inputs(machine):
    some = [p for p in COMMITTED["points"] if p["gpus"] in (4, 16) or
            (p["gpus"], p["seqlen"]) == (64, 2**20)]  # fmt: skip
    assert len(some) == 8 + 2 * (6 + 2)
    for p in some:
        problem = model.Problem(p["seqlen"], p["causal"], p["heads"], p["heads_kv"])
        assert model.point(problem, p["gpus"], p["island"], machine) == p
    assert list(model.compared(INPUTS, machine)) == COMMITTED["compared"]
    rows = json.loads((model.RESULTS / COMMITTED["measured"]).read_text())["rows"]
    assert list(model.compared_now(rows, machine)) == COMMITTED["compared_now"]


def test_points_on_two_gpus_are_predicted():
    """Within 7 % by copies; messages, whose kernels occupy SMs, are up to 15 % slower."""
    assert len(COMMITTED["compared_now"]) == 16
    for row in COMMITTED["compared_now"]:
        assert row["predicted"] / row["copies"] == pytest.approx(1, abs=0.07)
        assert 0.93 < row["predicted"] / row["messages"] < 1.15


def test_more_gpus_and_fewer_rows_are_less_efficient():
    best = {
        (p["heads"], p["island"], p["seqlen"], p["gpus"]): p["efficiency"][p["best"]]
        for p in COMMITTED["points"] if p["causal"]
    }  # fmt: skip
    for (heads, island, seqlen, gpus), value in best.items():
        assert 0 < value <= 1
        assert value >= best.get((heads, island, seqlen, 2 * gpus), 0)
        assert value <= best.get((heads, island, 8 * seqlen, gpus), 1)
        assert value <= best.get((heads, 72, seqlen, gpus), 1)


def test_the_choice_uses_the_same_speeds(machine):
    assert GPU.bytes == machine.nvlink and GPU.message == machine.message
    assert GPU.host == machine.host
    assert GPU.flops == pytest.approx(machine.flops["16 over 16", True], rel=0.01)
