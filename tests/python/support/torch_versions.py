"""Tests that depend on the version of PyTorch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def require_switch() -> None:
    """Skips the module or test without PyTorch's switch between implementations of attention."""
    attention = pytest.importorskip("torch.nn.attention")
    if not hasattr(attention, "restore_flash_attention_impl"):
        pytest.skip("needs PyTorch 2.11 or newer", allow_module_level=True)


def at_least(major: int, minor: int) -> bool:
    """Whether PyTorch has this version or a newer one."""
    import torch

    return tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (major, minor)


def assert_refused_or_right(call: Callable[[], Any], want: Any, sentence: str) -> None:
    """Either the call has these results, or it raises a RuntimeError with this sentence: newer
    versions compute what older ones cannot.
    """
    import torch

    try:
        found = call()
    except RuntimeError as error:
        assert re.search(sentence, str(error)), error
    else:
        torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
