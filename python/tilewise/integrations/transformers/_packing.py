"""Sequences packed into one row of a batch, which only ``position_ids`` tell apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_forwards = 0  # masks made so far: every forward makes its own, ahead of its first layer
_found: Any = WeakTensorKeyDictionary()  # position_ids: (state when looked at, boundaries)


def blind(*tensors: Any) -> bool:
    """Whether values must not be looked at: while a graph is traced or captured."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


def begin_forward() -> None:
    """What was found in tensors that do not count their changes is to be found anew."""
    global _forwards
    if not torch.compiler.is_compiling():
        _forwards += 1


def packed_boundaries(position_ids: Any, rows: int, remembers: bool) -> Tensor | None:
    """cu_seqlens of sequences packed into one row; None: it is one sequence, or nobody may look.

    Transformers' own FlashAttention looks in each layer, and waits for the GPU each time; here the
    first layer of a forward looks for all of them.

    Args:
        position_ids: [1, rows], beginning anew with each sequence; no other shape is looked at.
        rows: Of queries, and of keys.
        remembers: Whether the layer has a mask, which tells one forward from the next.

    Returns:
        int32 [sequences + 1].
    """
    if not isinstance(position_ids, Tensor) or tuple(position_ids.shape) != (1, rows):
        return None
    if blind(position_ids):
        return None
    version = None if position_ids.is_inference() else position_ids._version
    state = (_forwards, version)
    known = _found.get(position_ids)
    if known is not None and known[0] == state and (remembers or version is not None):
        boundaries: Tensor | None = known[1]
        return boundaries
    boundaries = _look(position_ids[0], rows)
    _found[position_ids] = (state, boundaries)
    return boundaries


def _look(position: Tensor, rows: int) -> Tensor | None:
    """As ``modeling_flash_attention_utils`` does: a sequence starts at the smallest position."""
    first = position.min()
    index = torch.arange(rows, device=position.device)
    if not bool((position != index + first).any()):
        return None
    starts = ((position == first) | (index == 0)).nonzero().flatten()
    if len(starts) == 1:
        return None
    return torch.cat([starts, starts.new_full((1,), rows)]).to(torch.int32)
