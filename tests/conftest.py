"""Makes tests/ importable (the oracle), and says what the run could not cover."""

from __future__ import annotations

import os

import pytest

# The oracle multiplies small matrices, in several test processes at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which instruction sets the numerical tests ran on, and which they could not."""
    import capi  # beside the tests, importable once they are collected

    try:
        ran, missing = capi.instruction_sets()
    except OSError:  # no library: whatever ran did not need it
        return
    terminalreporter.write_line(f"instruction sets tested: {', '.join(ran)}")
    if missing:
        terminalreporter.write_line(f"NOT tested, this machine lacks them: {', '.join(missing)}")
