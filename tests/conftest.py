"""Makes tests/ importable (for the oracle) and reports what the run did not cover."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# The oracle multiplies small matrices, in several test processes at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def one_torch_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restrict torch to one thread. Tests of the C ABI use torch to fill and compare small buffers,
    and torch's waiting threads would compete with the library's: the tests would take five times as
    long."""
    if not hasattr(request.module, "capi") and not hasattr(request.module, "Case"):
        yield
        return
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which devices and instruction sets the numerical tests ran on, and which were
    missing."""
    try:
        import capi  # lies beside the tests: importable once they are collected
        import devices

        ran, missing = capi.instruction_sets()
        tested = devices.selected()
    except (ImportError, OSError, ValueError):  # the tests that ran needed no library
        return
    say = terminalreporter.write_line
    say(f"devices tested: {', '.join(tested)}")
    for name in devices.ALL:
        if name not in tested:
            say(f"NOT tested: {name}, {devices.missing().get(name, 'not selected')}")
    if "cpu" in tested:
        say(f"instruction sets tested: {', '.join(ran)}")
        if missing:
            say(f"NOT tested, this machine lacks them: {', '.join(missing)}")
