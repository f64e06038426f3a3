"""Makes tests/ importable (the oracle), and says what the run could not cover."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which instruction sets the numerical tests ran on, and which they could not."""
    import capi

    if not capi.loaded():
        return
    ran, missing = capi.instruction_sets()
    terminalreporter.write_line(f"instruction sets run: {', '.join(ran)}")
    if missing:
        terminalreporter.write_line(f"NOT run, this machine lacks them: {', '.join(missing)}")
