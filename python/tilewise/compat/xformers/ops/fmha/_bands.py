"""The band of each mask of xFormers, by the name of its class and the names of its fields.

So the masks of xFormers itself are understood as well as those of ``attn_bias``.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from tilewise.compat.xformers.ops.fmha._lengths import Device


class Band(NamedTuple):
    """Row i sees the keys from i - left to i + right, where None means no limit.

    The diagonal j = i starts at the first row and key (top_left), or ends at the last ones.
    """

    left: Optional[int] = None
    right: Optional[int] = None
    top_left: bool = False


_TOP_LEFT = frozenset({
    "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "BlockDiagonalCausalMask",
    "BlockDiagonalCausalLocalAttentionMask",
})  # fmt: skip
_BOTTOM_RIGHT = frozenset({
    "LowerTriangularFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask",
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask",
})  # fmt: skip
_NOT_CAUSAL = frozenset({
    "LocalAttentionFromBottomRightMask", "BlockDiagonalMask", "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask", "BlockDiagonalGappyKeysMask",
    "PagedBlockDiagonalPaddedKeysMask", "PagedBlockDiagonalGappyKeysMask",
})  # fmt: skip


def band_of(mask: Any) -> Band:
    """The band of a mask of ``attn_bias`` or of xFormers itself.

    Raises:
        TypeError: the class of the mask is unknown.
        ValueError: its window is negative or empty.
    """
    name = type(mask).__name__
    if name in _NOT_CAUSAL:  # with or without a window
        for side in ("window_left", "window_right"):
            check_at_least(side, getattr(mask, side, None), 0)
        return Band(getattr(mask, "window_left", None), getattr(mask, "window_right", None))
    if name not in _TOP_LEFT and name not in _BOTTOM_RIGHT:
        known = ", ".join(sorted(_TOP_LEFT | _BOTTOM_RIGHT | _NOT_CAUSAL))
        raise TypeError(f"attn_bias is a {name}, but must be None, a tensor or one of: {known}")
    size = getattr(mask, "_window_size", None)
    check_at_least("window_size", size, 1)
    return Band(None if size is None else size - 1, 0, name in _TOP_LEFT)


def check_at_least(name: str, value: Optional[int], least: int) -> None:
    """Refuses smaller numbers: the kernels would take a negative bound as no limit."""
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}, but must be at least {least}")


def matrix_of(band: Band, rows: int, keys: int, device: Device) -> Tensor:
    """0 where a row sees a key and -inf elsewhere, float32 [rows, keys]."""
    diagonal = torch.arange(rows, device=device).unsqueeze(1)
    if not band.top_left:
        diagonal = diagonal + keys - rows
    key = torch.arange(keys, device=device)
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=device)
    if band.left is not None:
        hidden |= key < diagonal - band.left
    if band.right is not None:
        hidden |= key > diagonal + band.right
    return torch.zeros(rows, keys, device=device).masked_fill(hidden, -math.inf)
