"""Dense bool masks as ``tilewise.masks.Blocks``, where that saves time.

As a bias, a mask of rows x keys is read in full by every head, and nothing is skipped. In a mask of
blocks the hidden ones cost nothing. Reading a mask once into blocks costs about as much as a third
of a head, and the blocks are kept as long as the mask exists and does not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise import masks
from tilewise._block_lists import BLOCK, blocks_of
from tilewise._mask_fields import host

from ._masks import prefers_masks

MIN_ROWS = 1024  # below, a call takes less time than looking at its mask may save

# Nanoseconds a pair on one core of a Zen 5: conversion, 2.0 (blocks all full or hidden) to 3.2
# (all partial) per matrix; attention in fp32 with heads of 64, 8.2 per head with a bias, and 6.5
# per head with blocks if all are partial. Attention takes longer with more head dimensions and in
# a backward, so that the rule below is careful. Finding the visible blocks takes 0.05.
_CONVERT, _WITH_BIAS, _WITH_BLOCKS = 3.2, 8.2, 6.5

_known: Any = WeakTensorKeyDictionary()  # mask: (its version, heads per matrix, Blocks or None)


def as_blocks(mask: Tensor, batch: int, heads: int) -> masks.Blocks | None:
    """The blocks of a bool mask, or None if it should stay a bias.

    The result is kept with the mask, and made again after an operation has written to it. Writes
    that have no version, by NumPy or through ``.data``, are not noticed.

    Args:
        mask: bool, up to four dimensions [batch or 1, heads or 1, rows, keys], True for the pairs
            that are seen.
        batch: Sequences of the call.
        heads: Query heads.

    Returns:
        Blocks if the device prefers masks, the mask has at least ``MIN_ROWS`` rows and so few
        blocks are visible that converting it costs less than this call alone saves.
    """
    if not 2 <= mask.dim() <= 4 or mask.shape[-2] < MIN_ROWS or not prefers_masks(mask.device):
        return None
    if mask.numel() == 0:
        return None
    version = None if mask.is_inference() else mask._version
    four = mask[(None,) * (4 - mask.dim())]
    # Expanded dimensions repeat one matrix.
    matrices = four[: 1 if four.stride(0) == 0 else None, : 1 if four.stride(1) == 0 else None]
    shared_by = batch * heads / (matrices.shape[0] * matrices.shape[1])
    cached = _known.get(mask)
    if cached is not None and version is not None and cached[:2] == (version, shared_by):
        blocks: masks.Blocks | None = cached[2]
        return blocks
    saved = shared_by * (_WITH_BIAS - _WITH_BLOCKS * _visible_share(matrices))
    blocks = masks.from_bool(matrices) if saved > _CONVERT else None
    if version is not None:
        _known[mask] = (version, shared_by, blocks)
    return blocks


def _visible_share(matrices: Tensor) -> float:
    """The share of the blocks of 128 x 128 pairs in which a pair is visible."""
    batch, heads, rows, keys = matrices.shape
    dense, found = host(matrices), 0
    starts = np.arange(blocks_of(keys)) * BLOCK
    for b, h, block in np.ndindex(batch, heads, blocks_of(rows)):
        columns = dense[b, h, block * BLOCK : (block + 1) * BLOCK].any(axis=0)
        found += int(np.logical_or.reduceat(columns, starts).sum())
    return found / (batch * heads * blocks_of(rows) * blocks_of(keys))
