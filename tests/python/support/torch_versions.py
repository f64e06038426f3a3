"""Tests that need more of PyTorch than the oldest supported version has."""

from __future__ import annotations

import pytest


def require_switch() -> None:
    """Skips the module or test without PyTorch's switch between implementations of attention."""
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("needs PyTorch 2.11 or newer", allow_module_level=True)
