"""Sequences that are packed into one row of a batch and that only ``position_ids`` separate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# Stands for the latest forward, of any thread; each makes a mask before its first layer. It is an
# object and not a number because threads that count together may repeat a number.
_forward = object()
_cache: Any = WeakTensorKeyDictionary()  # position_ids: (its state when read, its boundaries)


def values_are_unavailable(*tensors: Any) -> bool:
    """Whether values must not be read, because a graph is being traced or captured."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def begin_forward() -> None:
    """Invalidates the boundaries of tensors that have no version counter."""
    global _forward
    if not torch.compiler.is_compiling():
        _forward = object()


def packed_boundaries(position_ids: Any, rows: int, has_mask: bool) -> Tensor | None:
    """cu_seqlens of sequences packed into one row; None for one sequence or unavailable values.

    Transformers' own FlashAttention finds the boundaries in each layer and waits for the GPU each
    time; here the first layer of a forward finds them for all layers.

    Args:
        position_ids: [1, rows], which start again with each sequence; other shapes are ignored.
        rows: Number of queries and of keys.
        has_mask: Whether the layer has a mask, so that this forward has called ``begin_forward``.

    Returns:
        int32 [sequences + 1], or None.
    """
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) != (1, rows):
        return None
    if values_are_unavailable(position_ids):
        return None
    version = None if position_ids.is_inference() else position_ids._version
    state = (_forward, version)
    cached = _cache.get(position_ids)
    if cached is not None and cached[0] == state and (has_mask or version is not None):
        boundaries: Tensor | None = cached[1]
        return boundaries
    boundaries = _find_boundaries(position_ids[0], rows)
    _cache[position_ids] = (state, boundaries)
    return boundaries


def _find_boundaries(position: Tensor, rows: int) -> Tensor | None:
    """The boundaries as in ``modeling_flash_attention_utils``: a sequence starts at the minimum."""
    first = position.min()
    index = torch.arange(rows, device=position.device)
    if not bool((position != index + first).any()):
        return None
    starts = ((position == first) | (index == 0)).nonzero().flatten()
    if len(starts) == 1:
        return None
    return torch.cat([starts, starts.new_full((1,), rows)]).to(torch.int32)
