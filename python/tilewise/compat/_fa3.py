"""Attention with the arguments of FlashAttention-3, shared by the functions of its interface."""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from collections.abc import Callable
from typing import Optional, Union

import torch
from torch import Tensor

from tilewise import _cache, _check, _kvcache_torch, _plain
from tilewise._check import is_float8, max_forward_head_dim
from tilewise._ops import Options
from tilewise._request import Request
from tilewise._torch import batch_of, check_tensors, with_descale
from tilewise.compat._calls import (
    attend,
    bound,
    int32,
    lengths_of,
    maybe_contiguous,
    options_of,
    scalar,
    splits_of,
)
from tilewise.compat._chunks import Sequence, split_cache, split_packed

Factors = tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]  # of q, k and v


def _with_factors(options: Options, q: Tensor, k: Tensor, batch: int, factors: Factors) -> Options:
    """The options with q_descale, k_descale and v_descale [B, Hkv]."""
    q_descale, k_descale, v_descale = factors
    request = Request(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    return with_descale(options, q, k, request, batch)


def _with_chunk_factors(options: Options, repeat: Callable[[Tensor], Tensor]) -> Options:
    """The options with the factors of each sequence repeated for each of its chunks."""
    q_descale, k_descale, v_descale = (
        None if x is None else repeat(x)
        for x in (options.q_descale, options.k_descale, options.v_descale)
    )
    return options._replace(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)


def _chunk_of(attention_chunk) -> int:
    """The number of keys of a chunk; 0 switches chunks off."""
    chunk = _check.integer("attention_chunk", scalar(attention_chunk), "an integer")
    if chunk < 0:
        raise ValueError(f"attention_chunk is {chunk}, but must be >= 0 (0: off)")
    return chunk


def scale_of(
    q: Tensor, qv: Optional[Tensor], softmax_scale: Union[float, Tensor, None]
) -> Union[float, Tensor]:
    """softmax_scale, by default 1 / sqrt(number of products in a score)."""
    if softmax_scale is not None:
        return softmax_scale
    return (q.shape[-1] + (0 if qv is None else qv.shape[-1])) ** -0.5


def _check_qv(q: Tensor, v: Tensor, qv: Optional[Tensor]) -> None:
    if qv is None:
        return
    for name, x in (("v", v), ("q", q)):
        if is_float8(x.dtype):
            raise NotImplementedError(
                f"qv is given, but must be None with {name} of {x.dtype}: there is no kernel for it"
            )
    wanted = [*q.shape[:-1], v.shape[-1]]
    if list(qv.shape) != wanted:
        raise ValueError(
            f"qv has shape {list(qv.shape)}, but must be {wanted}: that of q with the columns of v"
        )
    limit = max_forward_head_dim(q)
    if q.shape[-1] + v.shape[-1] > limit:
        raise NotImplementedError(
            f"qv makes a score of {q.shape[-1]} + {v.shape[-1]} products, but kernels of "
            f"{q.device.type} support at most {limit} in {q.dtype}"
        )


def _absorb(q: Tensor, k: Tensor, v: Tensor, qv: Optional[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """New q and k, whose product is q . k + qv . v, and v as the first columns of this k.

    Kernels read keys from one tensor. In a latent cache the columns of k follow those of v, and
    nothing is copied; otherwise v and k are.
    """
    _check_qv(q, v, qv)
    if qv is None:
        return q, k, v
    keys = _latent_keys(k, v)
    keys = torch.cat((v, k), dim=-1) if keys is None else keys
    return torch.cat((qv, q), dim=-1), keys, keys[..., : v.shape[-1]]


def _latent_keys(k: Tensor, v: Tensor) -> Optional[Tensor]:
    """A view of the columns of v and k if they are neighbours in the rows of one tensor.

    It has no gradient.
    """
    records = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    if records or not _plain.is_eager():
        return None
    if (
        k.dtype != v.dtype
        or v.stride(-1) != 1
        or k.shape[:-1] != v.shape[:-1]
        or k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
        or k.storage_offset() != v.storage_offset() + v.shape[-1]
    ):
        return None
    for size, stride_k, stride_v in zip(k.shape, k.stride(), v.stride(), strict=True):
        if size > 1 and stride_k != stride_v:
            return None
    return v.as_strided((*v.shape[:-1], v.shape[-1] + k.shape[-1]), v.stride())


def _values(x: Optional[Tensor], default: list[int]) -> list[int]:
    return default if x is None else x.tolist()


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    window_size=(-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    deterministic: bool = False,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Hq, Sq]) of q [B, Sq, Hq, D], k and v [B, Sk, Hkv, ...]."""
    common = dict(
        softmax_scale=scale_of(q, qv, softmax_scale),
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    q, k, v = _absorb(q, k, v, qv)
    factors = (q_descale, k_descale, v_descale)
    options = _with_factors(options_of(q, **common), q, k, q.shape[0], factors)._replace(
        num_splits=splits_of(num_splits),
        seqused_q=int32("seqused_q", seqused_q),
        seqused_k=int32("seqused_k", seqused_k),
    )
    chunk = _chunk_of(attention_chunk)
    if chunk == 0:
        return attend(q, k, v, options)
    batch, rows, keys = q.shape[0], q.shape[1], k.shape[1]
    used_q, used_k = _values(seqused_q, [rows] * batch), _values(seqused_k, [keys] * batch)
    sequences = [Sequence(rows, keys, used_q[b], used_k[b]) for b in range(batch)]
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = _attend_chunks(q, k, v, options, sequences, chunk)
    lse = lse.unflatten(1, (batch, rows)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, rows)), lse


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    window_size=(-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 0,
    deterministic: bool = False,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, Hq, Dv], lse [Hq, T]) of packed sequences.

    With attention_chunk, the lengths are read on the host.
    """
    common = dict(
        softmax_scale=scale_of(q, qv, softmax_scale),
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        deterministic=deterministic,
    )
    q, k, v = _absorb(q, k, v, qv)
    factors, batch = (q_descale, k_descale, v_descale), batch_of(cu_seqlens_q)
    options = _with_factors(options_of(q, **common), q, k, batch, factors)
    options = options._replace(num_splits=splits_of(num_splits))
    chunk = _chunk_of(attention_chunk)
    if chunk > 0:
        rows, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        used = _values(seqused_q, rows), _values(seqused_k, keys)
        sequences = [Sequence(*lengths) for lengths in zip(rows, keys, *used, strict=True)]
        return _attend_chunks(q, k, v, options, sequences, chunk)
    options = options._replace(
        cu_seqlens_q=int32("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k=int32("cu_seqlens_k", cu_seqlens_k),
        max_seqlen_q=bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=bound("max_seqlen_k", max_seqlen_k),
        seqused_q=int32("seqused_q", seqused_q),
        seqused_k=int32("seqused_k", seqused_k),
    )
    return attend(q, k, v, options)


def _attend_chunks(
    q: Tensor, k: Tensor, v: Tensor, options: Options, sequences: list[Sequence], chunk: int
) -> tuple[Tensor, Tensor]:
    cu_seqlens_q, cu_seqlens_k, owners = split_packed(sequences, chunk, q.device)
    options = _with_chunk_factors(options, lambda x: x[owners])._replace(
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=None, seqused_k=None
    )
    return attend(q, k, v, options)


@torch.no_grad()
def attend_cached(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    *,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Union[int, Tensor, None] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size=(-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) after appending k and v; the arguments are those of flash_attn_with_kvcache."""
    batch = q.shape[0] if cu_seqlens_q is None else batch_of(cu_seqlens_q)
    if page_table is None and cache_batch_idx is None:
        # A cache may have room for more sequences than the batch has.
        k_cache, v_cache = k_cache[:batch], v_cache[:batch]
    q, k, v, qv = (maybe_contiguous(x) for x in (q, k, v, qv))
    packed = None if cu_seqlens_q is None else batch
    check_tensors(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    page_table, cache_batch_idx = _pages_of(page_table, cache_batch_idx, batch)
    _cache.check_cache(q, k_cache, v_cache, page_table, cache_batch_idx, packed)
    chunk = _chunk_of(attention_chunk)
    options = options_of(
        q,
        softmax_scale=scale_of(q, qv, softmax_scale),
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )._replace(
        num_splits=splits_of(num_splits),
        cu_seqlens_q=int32("cu_seqlens_q", cu_seqlens_q),
        block_table=page_table,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=int32("cache_leftpad", cache_leftpad),
    )
    factors = (q_descale, k_descale, v_descale)
    options = _with_factors(options, q, k_cache, batch, factors)
    new = _cache.NewKeys(
        k=k,
        v=v,
        lengths=_kvcache_torch.cache_lengths(lengths_of(cache_seqlens, batch), batch, q.device),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        # As in the original, these are ignored without tables or without new keys.
        rotary_lengths=None if rotary_cos is None else int32("rotary_seqlens", rotary_seqlens),
        cu_seqlens=None if k is None else int32("cu_seqlens_k_new", cu_seqlens_k_new),
    )
    _check_qv(q, v_cache, qv)
    q, options = _kvcache_torch.append(
        q, k_cache, v_cache, options, new, single_position=False if chunk else None
    )
    q, keys, values = _absorb(q, k_cache, v_cache, qv)
    if chunk == 0:
        return attend(q, keys, values, options)
    return _attend_cache_chunks(q, keys, values, options, chunk, batch, max_seqlen_q)


def _pages_of(
    page_table: Optional[Tensor], cache_batch_idx: Optional[Tensor], batch: int
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """page_table and cache_batch_idx as int32, of which at most one is not None.

    If both are given, sequence b has the pages of row ``cache_batch_idx[b]`` of the table, and the
    returned table has these rows. An index out of range gives a row of pages -1.
    """
    table = int32("page_table", page_table)
    index = int32("cache_batch_idx", cache_batch_idx)
    if table is None or index is None:
        return table, index
    _check.shape("page_table", table, (None, None), "[cache batch, pages of a sequence]")
    _check.shape("cache_batch_idx", index, (batch,), "one row of page_table per sequence")
    rows = table.shape[0]
    inside = (index >= 0) & (index < rows)
    if rows == 0 or (index.device.type == "cpu" and _plain.is_eager() and not inside.all()):
        wrong = [i for i in index.tolist() if not 0 <= i < rows]
        raise ValueError(
            f"cache_batch_idx has {wrong[:1]}, but page_table has {rows} rows: only indices of "
            "its rows are allowed"
        )
    chosen = table.index_select(0, index.clamp(0, rows - 1))
    return torch.where(inside.unsqueeze(1), chosen, -1), None


def _check_bound(rows: Tensor, max_rows: int) -> None:
    """Refuses a max_seqlen_q below the longest sequence, which would get too few chunks.

    Lengths on a GPU are not checked.
    """
    if rows.device.type != "cpu" or rows.numel() == 0 or torch.compiler.is_compiling():
        return
    _cache.check_max_rows(max_rows, int(rows.max()))


def _attend_cache_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    chunk: int,
    batch: int,
    max_seqlen_q: Optional[int],
) -> tuple[Tensor, Tensor]:
    device = q.device
    dense_rows = q.shape[1] if options.cu_seqlens_q is None else None
    if options.cu_seqlens_q is None:
        rows = torch.full((batch,), q.shape[1], dtype=torch.int32, device=device)
        max_rows = q.shape[1]
        q = q.flatten(0, 1)
    else:
        rows = options.cu_seqlens_q.diff()
        max_rows = bound("max_seqlen_q", max_seqlen_q) or q.shape[0]
        _check_bound(rows, max_rows)
    keys = options.seqused_k
    if keys is None:
        width = 1 if options.block_table is None else options.block_table.shape[1]
        keys = torch.full((batch,), width * k.shape[1], dtype=torch.int32, device=device)
    chunks = split_cache(rows, max_rows, keys, options.leftpad_k, chunk)

    def repeat(x: Tensor) -> Tensor:
        return x.repeat_interleave(chunks.chunks_per_sequence, dim=0)

    table, index = options.block_table, options.kv_batch_idx
    if table is None and index is None:
        index = torch.arange(batch, dtype=torch.int32, device=device)
    options = _with_chunk_factors(options, repeat)._replace(
        cu_seqlens_q=chunks.cu_seqlens_q,
        seqused_k=chunks.seqused_k,
        leftpad_k=chunks.leftpad_k,
        block_table=None if table is None else repeat(table),
        kv_batch_idx=None if index is None else repeat(index),
    )
    out, lse = attend(q, k, v, options)
    if dense_rows is None:
        return out, lse
    lse = lse.unflatten(1, (batch, dense_rows)).transpose(0, 1).contiguous()
    return out.unflatten(0, (batch, dense_rows)), lse
