"""pytest plugin of a test process: selects the process's share of the tests and records each start
and end, so that the parent process knows what hangs, what has crashed and what remains.

GPU_CHECK_SHARE is the share, such as 2/8. GPU_CHECK_EVENTS is a file of JSON lines; a test
whose end an earlier process of the share has recorded there does not run again.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

EVENTS = Path(os.environ.get("GPU_CHECK_EVENTS", os.devnull))
SHARE, _, SHARES = os.environ.get("GPU_CHECK_SHARE", "0/1").partition("/")


def note(**event: Any) -> None:
    """Appends one line to the events."""
    with EVENTS.open("a") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def ended() -> set[str]:
    """Tests that an earlier process of this share has finished."""
    if not EVENTS.is_file():
        return set()
    events = (json.loads(line) for line in EVENTS.read_text().splitlines())
    return {e["test"] for e in events if e["event"] == "end"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Selects every n-th test, except finished ones."""
    items_of_share = items[int(SHARE) :: int(SHARES)]
    done = ended()
    note(event="collected", tests=[item.nodeid for item in items_of_share])
    items[:] = [item for item in items_of_share if item.nodeid not in done]


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Reports a module that cannot be imported as a failed test."""
    if report.failed and SHARE == "0" and report.nodeid not in ended():
        note(event="end", test=report.nodeid, outcome="failed", text=str(report.longrepr)[-1500:])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Records the start before anything of the test runs."""
    note(event="start", test=nodeid)


# Random problems of a test: how many of them each kernel has run (record_property).
SERVED = "served"
_served: dict[str, dict[str, int]] = {}
_failed: dict[str, str] = {}
_skipped: dict[str, str] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps errors of any phase, and the test's counts."""
    for name, value in report.user_properties:
        if name == SERVED:
            _served[report.nodeid] = dict(value)  # type: ignore[call-overload]
    if report.failed:
        _failed.setdefault(report.nodeid, str(report.longrepr)[-1500:])
    elif report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        _skipped[report.nodeid] = str(reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Records the end after all phases."""
    outcome = "failed" if nodeid in _failed else "skipped" if nodeid in _skipped else "passed"
    text = _failed.get(nodeid) or _skipped.get(nodeid) or ""
    served = _served.get(nodeid, {})
    note(event="end", test=nodeid, outcome=outcome, text=text, served=served)
