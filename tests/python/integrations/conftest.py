"""Fixtures of the tests of integrations."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture
def active() -> Iterator[None]:
    """PyTorch's switch between implementations of attention is set to Tilewise."""
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        activate_flash_attention_impl("tilewise")
    yield
    restore_flash_attention_impl(_raise_warn=False)
