"""Masks of calls on PyTorch tensors: their arrays as options of the operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _ops, _plain
from ._cache import NewKeys
from ._options import Options


def with_mask(
    options: Options, q: Tensor, batch: int, mask: Any, lengths: tuple[int, int] | None
) -> Options:
    """The options with the arrays of a mask; ``lengths`` are the rows and keys if all sequences
    have the same.
    """
    from . import masks

    masks.check(mask, batch, q.shape[-2], lengths)
    return _with_arrays(options, _tensors(mask, q), mask.numbers())


def with_mask_of_cache(
    options: Options, q: Tensor, k_cache: Tensor, mask: Any, new: NewKeys
) -> Options:
    """The options, which do not count the new keys, with the mask of a call with a cache."""
    from . import masks

    starts, table = options.cu_seqlens_q, options.block_table
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    batch = _batch(options, q)
    if not isinstance(mask, masks.Tree):
        lengths = None if starts is not None else (q.shape[1], capacity)
        return with_mask(options, q, batch, mask, lengths)
    import numpy as np

    from . import _mask_tree

    on_host = _plain.is_eager() and q.device.type == "cpu"
    rows = q.shape[1] if starts is None else starts.diff()
    longest: Any = rows
    if starts is not None:  # a GPU would have to be waited for
        longest = int(rows.max()) if on_host and batch > 0 else None
    _mask_tree.check(mask, batch, longest, starts is not None)
    (bits,) = _tensors(mask, q)
    used = options.seqused_k
    older = q.new_full((batch,), capacity, dtype=torch.int32) if used is None else used
    if new.k is not None:
        older = older + (new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff())
    if options.leftpad_k is not None:
        older = older - options.leftpad_k
    older = older - rows
    if not on_host:
        return _with_arrays(options, *_mask_tree.as_blocks(torch, bits, older, capacity))
    # In the memory of tensors, and in half the time: an operation of NumPy costs less to call.
    arrays, sizes = _mask_tree.as_blocks(np, bits.numpy(), older.numpy(), capacity)
    return _with_arrays(options, [torch.from_numpy(x) for x in arrays], sizes)


def check_entries(options: Options, q: Tensor) -> None:
    """Refuses entries of a mask that are out of range: a call without rows and keys. On a GPU they
    are not read, and hide pairs.
    """
    if q.device.type != "cpu":
        return
    batch = _batch(options, q)
    empty = q.new_empty((batch, 0, q.shape[-2], 1))
    fields = ("mask_first", "mask_entries", "mask_bits", "mask_heads", "mask_rows", "mask_keys")
    mask = {name: getattr(options, name) for name in fields}
    _ops.forward_alone(empty, empty, empty, Options(**mask))


def _batch(options: Options, q: Tensor) -> int:
    return q.shape[0] if options.cu_seqlens_q is None else options.cu_seqlens_q.shape[0] - 1


def _tensors(mask: Any, q: Tensor) -> list[Tensor]:
    """The arrays of a mask, which must be on the device of q."""
    from ._mask_fields import as_tensor

    arrays = [as_tensor(x).contiguous() for x in mask.arguments()]
    if arrays[0].device != q.device:
        raise ValueError(
            f"mask is on {arrays[0].device}, but must be on {q.device} like q: pass "
            "mask.to(q.device)"
        )
    return arrays


def _with_arrays(options: Options, arrays: list[Tensor], numbers: dict[str, Any]) -> Options:
    return options._replace(
        mask_first=arrays[0],
        mask_entries=arrays[1],
        mask_bits=arrays[2] if numbers else None,
        **numbers,
    )
