"""Makes tests/ importable (the oracle), and says what the run could not cover."""

from __future__ import annotations

import pytest


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
