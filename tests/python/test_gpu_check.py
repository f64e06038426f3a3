"""The driver of the proof on a GPU, with tests that nobody runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from gpu_check import stages, suite


@pytest.fixture
def started(monkeypatch):
    """What would have been started: every test passes but those in `fail`."""
    calls = {"arguments": {}, "fail": set()}

    def run_shares(shares, **_limits):
        for s in shares:
            calls["arguments"].setdefault(s.name, s.arguments)
            tests = [a for a in s.arguments if "::" in a] or ["a::x", "a::y", "a::z"]
            for test in tests[s.index :: s.of]:
                s.tests.append(test)
                s.outcomes[test] = ("failed" if test in calls["fail"] else "passed", "")

    monkeypatch.setattr(suite, "run_shares", run_shares)
    return calls


def setup(tmp_path, **earlier) -> stages.Setup:
    return stages.Setup(tmp_path, 4, "80", earlier={"tests": earlier} if earlier else {})


def table(passed: int, failed: tuple[str, ...] = (), not_run: int = 0) -> dict:
    failures = [{"test": t, "text": ""} for t in failed]
    return {"passed": passed, "failed": len(failed), "skipped": 5, "not_run": not_run,
            "failures": failures, "skips": {}}  # fmt: skip


def test_a_first_run_runs_everything(tmp_path, started):
    report = stages.tests(setup(tmp_path), 10)
    assert report["passed"]
    assert set(started["arguments"]) == {"native", "forced-80", "forced-75"}
    assert all("tests/python" in arguments for arguments in started["arguments"].values())


def test_a_resumed_run_runs_what_failed_and_adds_up(tmp_path, started):
    earlier = {"native": table(7, ("a::x",)), "forced-80": table(4), "forced-75": table(3, (), 2)}
    report = stages.tests(setup(tmp_path, passed=False, **earlier), 10)
    assert started["arguments"]["native"] == ["a::x"]
    assert "forced-80" not in started["arguments"]
    assert "tests/python" in started["arguments"]["forced-75"]  # who knows what did not run
    assert report["native"]["passed"] == 8
    assert report["native"]["run_again"] == 1
    assert report["forced-80"] == earlier["forced-80"]
    assert report["passed"]


def test_what_fails_again_fails(tmp_path, started):
    started["fail"] = {"a::x"}
    earlier = {"native": table(7, ("a::x",)), "forced-80": table(4), "forced-75": table(3)}
    report = stages.tests(setup(tmp_path, passed=False, **earlier), 10)
    assert not report["passed"]
    assert report["native"]["passed"] == 7
    assert [f["test"] for f in report["native"]["failures"]] == ["a::x"]
