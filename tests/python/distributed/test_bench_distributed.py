"""bench/bench_distributed.py on two gloo ranks with tiny sizes, and the stage of gpu-check around
it with stubs instead of processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import torch_versions
from paths import ROOT

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

sys.path += [str(ROOT / "bench"), str(ROOT / "tools")]

import bench_distributed as bench  # noqa: E402
from gpu_check import distributed as stage  # noqa: E402
from gpu_check import suite  # noqa: E402
from gpu_check.processes import Ended  # noqa: E402
from gpu_check.setup import Setup  # noqa: E402

RANKS = 2

POINT = bench.Point(64, True, 4, 2)


def place_of(group) -> bench.Place:
    rank = torch.distributed.get_rank(group)
    return bench.Place(rank, 2, torch.device("cpu"), group)


def measure(group, point):
    names = (*bench.METHODS, *bench.COPIES, *bench.PEERS)
    return bench.measured(point, place_of(group), names, 1)


def test_rows_have_what_was_measured_and_what_was_not(pool):
    for point in (POINT, POINT._replace(causal=False), POINT._replace(documents=True)):
        row, other = pool.run(2, measure, point)
        assert row == other
        for method in bench.METHODS:
            milliseconds = row["milliseconds"][method]
            assert row["efficiency"][method] == row["alone_ms"] / (2 * milliseconds) > 0
            assert 0 < row["host_ms"][method] <= milliseconds
        assert set(row["left_out"]) == {*bench.COPIES, *bench.PEERS}
        json.dumps(row)


def ring(group, causal):
    """Times PyTorch's ring over the functions of the switch, as on GPUs."""
    from test_distributed_models import switched

    point = POINT._replace(causal=causal)
    with switched(), bench.ring(point, place_of(group), "tilewise") as (call, tensors):
        taken = bench.timed(call, tensors, 2, place_of(group), apart=False)
        return (
            len(taken.whole),
            [list(x.shape) for x in tensors],
            all(x.grad is not None for x in tensors),
        )


def test_pytorchs_ring_is_timed(pool):
    torch_versions.require_switch()
    for causal in (True, False):
        for count, shapes, differentiated in pool.run(2, ring, causal):
            assert count == 2 and differentiated
            assert shapes == [[1, 4, 32, 128], [1, 2, 32, 128], [1, 2, 32, 128]]


def test_points_and_documents():
    points = bench.points([32768, 131072])
    assert len({p.name for p in points}) == len(points) == 10
    ends = points[-1].ends()
    assert ends[0] == 0 and ends[-1] == 131072 and len(ends) == bench.DOCUMENTS + 1
    assert ends == sorted(ends)


def test_results_of_contestants_are_joined():
    row = {"name": "a", "gpus": 2, "host_ms": {}, "efficiency": {}, "peak_mb": {}, "left_out": {}}
    rows = [row | {"milliseconds": {"x": 1}}], [row | {"milliseconds": {"y": 2}}]
    (both,) = bench.merged([{"rows": x} for x in rows])
    assert both["milliseconds"] == {"x": 1, "y": 2}
    other = row | {"gpus": 4, "milliseconds": {"x": 3}}
    assert [x["gpus"] for x in bench.merged([{"rows": rows[0]}, {"rows": [other]}])] == [2, 4]


# --- the stage ------------------------------------------------------------------------------------


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose commands succeed: `found` is what it has, `fail` the tests that fail."""
    there = {"found": {"gpus": 2, "copies": True}, "fail": set(), "env": {}, "bench": 0}

    def run_shares(shares, **_limits):
        for share in shares:
            there["env"][share.name] = share.env
            for test in ("a::x", "a::y"):
                share.tests.append(test)
                share.outcomes[test] = ("failed" if test in there["fail"] else "passed", "")

    def run(command, _limit, log, _env):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(json.dumps(there["found"]) if "-c" in command else "2 GPUs: ulysses 0.9")
        if "-c" in command:
            return Ended(0, 1.0, log)
        rows = {"rows": [{"efficiency": {"ulysses": 0.9}}], "not_measured": ["a point"]}
        if there["bench"] < 2:
            Path(command[command.index("--json") + 1]).write_text(json.dumps(rows))
        return Ended(there["bench"], 1.0, log)

    monkeypatch.setattr(suite, "run_shares", run_shares)
    monkeypatch.setattr(stage, "run", run)
    there["run"] = lambda: stage.distributed(Setup(tmp_path, 4, "90"), 100)
    return there


def test_one_gpu_is_not_enough(machine):
    machine["found"]["gpus"] = 1
    report = machine["run"]()
    assert not report["passed"] and not machine["env"]
    assert report["not_run"] == "PyTorch sees 1 GPU: attention over several GPUs needs two or more"


def test_both_transports_are_tested_and_timed(machine):
    report = machine["run"]()
    assert report["passed"] and report["gpus"] == 2
    assert report["messages"]["passed"] == report["copies"]["passed"] == 2
    assert report["results"]["rows"][0]["efficiency"] == {"ulysses": 0.9}
    assert report["left_out"] == ["a point"]
    for name, env in machine["env"].items():
        assert env["TILEWISE_TEST_DISTRIBUTED"] == "cuda" and env["TILEWISE_TEST_DEVICES"] == "cpu"
        assert (env.get("TILEWISE_DISTRIBUTED_TRANSPORT") == "copies") == (name == "copies")


def test_missing_packages_and_failures_are_reported(machine):
    machine["found"]["copies"] = False
    report = machine["run"]()
    assert report["passed"] and "cuda-bindings" in report["left_out"][0]
    assert set(machine["env"]) == {"messages"}
    machine["fail"] = {"a::x"}
    report = machine["run"]()
    assert not report["passed"] and report["messages"]["failures"][0]["test"] == "a::x"
    machine["fail"], machine["bench"] = set(), 1  # a method has failed; its rows are kept
    report = machine["run"]()
    assert not report["passed"] and report["results"]["rows"]
    machine["bench"] = 2
    report = machine["run"]()
    assert not report["passed"] and report["why"] == "status 2"
