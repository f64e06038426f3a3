"""The stage of attention over several GPUs: its tests over NCCL, then its speed."""

from __future__ import annotations

import json
import time
from typing import Any

from . import suite
from .processes import PYTHON, run, say
from .setup import Report, Setup, failed

TESTS = [
    f"tests/python/distributed/test_distributed{name}.py"
    for name in (
        "",
        "_masks",
        "_float8",
        "_out_dtype",
        "_precise",
        "_cache",
        "_cache_masks",
        "_eight",
    )
]
# By transport: the variable that selects it.
TRANSPORTS: dict[str, dict[str, str]] = {
    "messages": {"TILEWISE_DISTRIBUTED_TRANSPORT": "messages"},
    "copies": {"TILEWISE_DISTRIBUTED_TRANSPORT": "copies"},
}
PROBE = """
import importlib.util, json, torch
packages = all(importlib.util.find_spec(name) for name in ("cuda", "cuda.bindings"))
print(json.dumps({"gpus": torch.cuda.device_count(), "copies": packages}))
"""


def found(setup: Setup) -> dict[str, Any]:
    """How many GPUs PyTorch sees, and whether the transport "copies" has the package it needs."""
    ended = run([PYTHON, "-c", PROBE], 60, setup.logs / "distributed" / "found.log", setup.python())
    if ended.status != 0:
        return {"gpus": 0, "copies": False}
    return json.loads(ended.tail(1)[0])


def tests(setup: Setup, transports: list[str], limit: float) -> Report:
    """The outcomes of the tests by transport. Each run uses all GPUs."""
    shares = []
    for name in transports:
        env = setup.python() | TRANSPORTS[name]
        # The problems and the oracle are on the CPU; the ranks move their parts to their GPUs.
        env |= {"TILEWISE_TEST_DEVICES": "cpu", "TILEWISE_TEST_DISTRIBUTED": "cuda"}
        # The other files differ in what is moved, not in how.
        files = TESTS if name == "messages" else TESTS[:1]
        share = suite.Share(name, 0, 1, setup.logs / "distributed", env, files)
        # One after the other: kernels of NCCL spin, and GPUs share their time among processes.
        suite.run_shares([share], limit=limit / len(transports), each=limit)
        shares.append(share)
    report: Report = {}
    for share in shares:
        outcomes = suite.counts([share])
        say(f"  {share.name}: {suite.summary(outcomes)}")
        report[share.name] = {n.replace(" ", "_"): count for n, count in outcomes.items()}
        report[share.name]["failures"] = suite.failures([share])
        report[share.name]["skips"] = suite.skips([share])
        for failure in report[share.name]["failures"][:12]:
            say(f"    FAILED {failure['test']}")
    return report


def distributed(setup: Setup, limit: float) -> Report:
    """Runs the tests of ``tilewise.distributed`` with a GPU per rank, and times its methods beside
    PyTorch's context_parallel. It is not run on one GPU.
    """
    begin = time.monotonic()
    machine = found(setup)
    if machine["gpus"] < 2:
        why = f"PyTorch sees {machine['gpus']} GPU: attention over several GPUs needs two or more"
        say(f"  {why}")
        return {"passed": False, "not_run": why}
    transports = [name for name in TRANSPORTS if name != "copies" or machine["copies"]]
    report = tests(setup, transports, limit * 0.4)
    passed = all(
        report[name].get("passed", 0) > 0
        and not report[name].get("failed")
        and not report[name].get("not_run")
        for name in transports
    )
    report |= {"gpus": machine["gpus"], "left_out": []}
    if not machine["copies"]:
        report["left_out"].append("the transport 'copies', which needs cuda-bindings")
    result = setup.logs / "distributed" / "bench.json"
    result.unlink(missing_ok=True)
    left = max(60, limit - (time.monotonic() - begin) - 30)
    command = [PYTHON, "bench/bench_distributed.py", "--json", str(result)]
    command += ["--time-limit", str(int(left * 0.8))]
    ended = run(command, left, setup.logs / "distributed" / "bench.log", setup.python())
    for line in ended.tail(40):
        say(f"  {line}")
    if not result.is_file():
        return failed(ended, 6) | report | {"passed": False}
    results = json.loads(result.read_text())
    report["left_out"] += results["not_measured"]
    return {"passed": passed and ended.status == 0, **report, "results": results}
