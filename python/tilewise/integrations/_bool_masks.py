"""Dense bool masks as ``tilewise.masks.Blocks``, where that saves time.

As a bias, a mask of rows x keys is read in full by every head, and nothing is skipped. In a mask of
blocks the hidden ones cost nothing. On a CPU, reading a mask once into blocks costs about as much
as a third of a head. The blocks are kept as long as the mask exists and does not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise import masks
from tilewise._block_tensors import visible_share

from ._masks import prefers_masks

MIN_ROWS = 1024  # below, a call takes less time than looking at its mask may save


class _Costs(NamedTuple):
    """Nanoseconds. A decision by them is careful: attention takes longer in a backward, and the
    blocks of a mask that several layers share are made once.
    """

    convert: float  # a pair of a matrix, at most
    with_bias: float  # a pair of a head
    with_blocks: float  # a pair of a head, if all blocks are partial
    latency: float = 0.0  # a conversion of any size


# One core of a Zen 5: conversion, 2.0 (blocks all full or hidden) to 3.2 (all partial); attention
# in fp32 with heads of 64.
_ON_CPU = _Costs(3.2, 8.2, 6.5)
# An H200 (docs/results/bench-h200-masks.json): conversion without partial blocks; PyTorch's own
# attention in bf16 with heads of 128, and ours with the masks of documents.
_ON_HOPPER = _Costs(0.02, 1.6e-3, 1.5e-3, 3e5)
# The same GPU with the kernels for Ampere, and half of the pairs visible.
_ON_AMPERE = _Costs(0.02, 1.6e-3, 3e-3, 3e5)

_known: Any = WeakTensorKeyDictionary()  # mask: (its version, heads per matrix, Blocks or None)


def as_blocks(mask: Tensor, batch: int, heads: int) -> masks.Blocks | None:
    """The blocks of a bool mask, or None if it should stay a bias.

    The result is kept with the mask, and made again after an operation has written to it. Writes
    that have no version, by NumPy or through ``.data``, are not noticed. A captured CUDA graph gets
    None: it reads what the mask holds when it is replayed.

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
    if mask.numel() == 0 or (mask.is_cuda and torch.cuda.is_current_stream_capturing()):
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
    blocks = masks.from_bool(matrices) if _pays(matrices, shared_by) else None
    if version is not None:
        _known[mask] = (version, shared_by, blocks)
    return blocks


def _pays(matrices: Tensor, shared_by: float) -> bool:
    """Whether a call in which so many heads share each matrix saves more than converting costs."""
    costs, pairs = _costs(matrices.device), matrices.numel()
    most = shared_by * costs.with_bias * pairs
    converting = costs.convert * pairs + costs.latency
    if most <= converting:
        return False
    saved = most - shared_by * costs.with_blocks * pairs * visible_share(matrices)
    return saved > converting


def _costs(device: torch.device) -> _Costs:
    if device.type == "cpu":
        return _ON_CPU
    return _ON_HOPPER if torch.cuda.get_device_capability(device) == (9, 0) else _ON_AMPERE
