"""Makes tests/ importable (the oracle), and says what the run could not cover."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# The oracle multiplies small matrices, in several test processes at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def one_torch_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests over the C ABI use torch to fill and compare small buffers: its waiting threads would
    take the processors from the library's own, and the tests five times as long."""
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
    """Print which instruction sets the numerical tests ran on, and which they could not."""
    try:
        import capi  # beside the tests, importable once they are collected

        ran, missing = capi.instruction_sets()
    except (ImportError, OSError):  # whatever ran needed no library
        return
    terminalreporter.write_line(f"instruction sets tested: {', '.join(ran)}")
    if missing:
        terminalreporter.write_line(f"NOT tested, this machine lacks them: {', '.join(missing)}")
