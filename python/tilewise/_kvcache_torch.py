"""Attention to a key/value cache on PyTorch tensors: append, then attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _check, _ops, _plain, kvcache
from ._ops import Options
from ._request import Request
from ._torch import (
    batch_of,
    check_new_rows,
    check_tensors,
    contiguous_columns,
    integers,
    score_options,
    with_descale,
)
from .kvcache import (
    Entries,
    NewKeys,
    Where,
    check_cache,
    check_entries,
    check_new,
    check_pages,
    common_length,
)

# From now on decoding without an append takes the short way.
kvcache._indexed = _plain.indexed

_WIDE = (torch.int64, torch.uint32, torch.uint64)


def index_tensor(name: str, x: Any, device: torch.device) -> Tensor | None:
    """An optional index tensor as the kernels read it; numbers out of range stay so."""
    x = integers(name, x)
    if x is None:
        return None
    if x.dtype in _WIDE:
        x = x.to(torch.int64).clamp(*_check.INT32)
    return x.to(device=device, dtype=torch.int32).contiguous()


def cache_lengths(cache_seqlens: Any, batch: int, device: torch.device) -> Tensor | None:
    """cache_seqlens, an int or a tensor, as an int32 tensor [batch] on the device."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        length = common_length(cache_seqlens)
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    _check.shape("cache_seqlens", cache_seqlens, (batch,), "one length per sequence")
    return index_tensor("cache_seqlens", cache_seqlens, device)


def _has_values() -> bool:
    """Whether the entries of tensors can be looked at."""
    return not torch.compiler.is_compiling() and not _plain.is_transformed()


def _appends(new: NewKeys, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: int) -> bool:
    """Whether there are new keys; refuses what does not go with q and the caches."""
    for name in ("k", "v", "rotary_cos", "rotary_sin"):
        check_new_rows(name, getattr(new, name), q)
    if not check_new(new):
        return False
    rows: tuple[int | None, ...] = (batch, None)
    meaning = "[batch, new keys, heads_kv, columns] of the caches"
    if new.cu_seqlens is not None:
        rows, meaning = (None,), "[new keys, heads_kv, columns] of the caches"
    _check.shape("k", new.k, (*rows, *k_cache.shape[2:]), meaning)
    _check.shape("v", new.v, (*new.k.shape[:-2], *v_cache.shape[2:]), "as many rows as k")
    return True


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: Options,
    new: NewKeys,
    single_position: bool | None = None,
) -> tuple[Tensor, Options]:
    """Writes the new keys; returns q, rotated if asked for, and options with all keys in use.

    The caches have been checked by ``check_cache``. single_position: all rows of q are rotated
    alike; by default if nothing limits what they see.
    """
    batch = q.shape[0] if options.cu_seqlens_q is None else batch_of(options.cu_seqlens_q)
    if not _appends(new, q, k_cache, v_cache, batch):
        return q, options._replace(seqused_k=new.lengths)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not torch.compiler.is_compiling() and cache.is_neg():
            raise ValueError(
                f"{name} is a negative view (torch.Tensor.is_neg), but k and v are to be written "
                "to it: only a tensor that holds its own numbers is allowed"
            )
    count = new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()
    seqused_k = new.lengths + count
    table = options.block_table
    if table is not None and table.device.type == "cpu" and _has_values():
        check_pages(torch, table, k_cache, seqused_k, options.leftpad_k)
    rotates, positions = new.rotary_cos is not None, new.rotary_lengths
    if rotates and positions is None and options.leftpad_k is not None:
        # Positions count from the start of the cache row, as in the FlashAttention packages, whose
        # prefill rotates that way. (Distances, all that the scores see, are the same either way.)
        positions = new.lengths
    if single_position is None:
        single_position = options.window_left < 0 and options.window_right < 0
    rotated = torch.ops.tilewise.append_kv(
        k_cache,
        v_cache,
        q if rotates else None,
        contiguous_columns(new.k),
        contiguous_columns(new.v),
        new.lengths,
        options.cu_seqlens_q,
        new.cu_seqlens,
        positions,
        options.block_table,
        options.kv_batch_idx,
        options.leftpad_k,
        new.rotary_cos,
        new.rotary_sin,
        new.rotary_interleaved,
        single_position,
        options.k_descale,
        options.v_descale,
    )
    return rotated if rotates else q, options._replace(seqused_k=seqused_k)


def _numbers(x: Tensor | None) -> Any:
    return None if x is None else x.tolist()


def _entries(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options, new: NewKeys
) -> Entries:
    """On the host; the shapes of index tensors are checked first, as the operators do."""
    batch, table = q.shape[0], options.block_table
    for name, index in (
        ("cache_batch_idx", options.kv_batch_idx),
        ("cache_leftpad", options.leftpad_k),
    ):
        if index is not None:
            _check.shape(name, index, (batch,), "one number per sequence")
    _appends(new, q, k_cache, v_cache, batch)
    rows, page_size = k_cache.shape[:2]
    capacity = page_size if table is None else table.shape[1] * page_size
    count = 0 if new.k is None else new.k.shape[1]
    rotated = 0
    if new.rotary_cos is not None:
        all_alike = options.window_left < 0 and options.window_right < 0
        rotated = max(count, min(q.shape[1], 1) if all_alike else q.shape[1])
    return Entries(
        lengths=[capacity] * batch if new.lengths is None else _numbers(new.lengths),
        appended=count,
        capacity=capacity,
        leftpad=_numbers(options.leftpad_k),
        batch_idx=_numbers(options.kv_batch_idx),
        cache_batch=rows,
        table=_numbers(table),
        pages=rows,
        page_size=page_size,
        rotated=rotated,
        rotary_rows=0 if new.rotary_cos is None else new.rotary_cos.shape[0],
    )


def prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, request: Request, where: Where
) -> Options:
    """Checks a problem but for its new keys: the options, seqused_k being those before them."""
    check_tensors(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    table = index_tensor("block_table", where.block_table, q.device)
    batch = check_cache(q, k_cache, v_cache, table, where.cache_batch_idx, packed=None)
    return with_descale(score_options(q, batch, request), q, k_cache, request)._replace(
        seqused_k=cache_lengths(lengths, batch, q.device),
        kv_batch_idx=index_tensor("cache_batch_idx", where.cache_batch_idx, q.device),
        leftpad_k=index_tensor("cache_leftpad", where.cache_leftpad, q.device),
        block_table=table,
        num_splits=_check.split_count(where.num_splits),
    )


@torch.no_grad()
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, new: NewKeys, request: Request, where: Where
) -> tuple[Tensor, Tensor]:
    """(out, lse); see ``tilewise.attention_with_kvcache``."""
    options = prepare(q, k_cache, v_cache, new.lengths, request, where)
    new = new._replace(lengths=options.seqused_k)
    if _check.flag("check", where.check):
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "check is True while the stream is being captured, but it waits for the GPU: only "
                "False is allowed"
            )
        check_entries(_entries(q, k_cache, v_cache, options, new))
    try:
        rotated, grown = append(q, k_cache, v_cache, options, new)
        return _ops.forward(rotated, k_cache, v_cache, grown)
    except ValueError:
        if q.device.type == "cpu" and _plain.is_eager():
            _refuse_by_our_names(q, k_cache, v_cache, options, new)
        raise


def _refuse_by_our_names(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options, new: NewKeys
) -> None:
    """The library's sentence about an entry has the names of the C interface."""
    try:
        check_entries(_entries(q, k_cache, v_cache, options, new))
    except ValueError as error:
        raise error from None
