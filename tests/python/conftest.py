"""What the Python tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers whichever tests ran before it."""
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(20)
