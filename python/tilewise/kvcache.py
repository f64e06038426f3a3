"""Attention of new queries to a key/value cache, with the append in the same call."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import _check, _ops


class Appended(NamedTuple):
    """What ``append`` leaves: queries (rotated if asked for) and keys in use of each sequence."""

    q: Tensor
    seqused_k: Tensor | None


def int32_on(x: Tensor, device: torch.device) -> Tensor:
    """X as the kernels read index tensors."""
    return x.to(device=device, dtype=torch.int32)


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    block_table: Tensor | None = None,
    batch: int | None = None,
) -> None:
    """Refuses what attention would refuse only after the append has written to the caches."""
    rank = "[batch or pages, rows, heads_kv, head_dim]"
    _check.shape("k_cache", k_cache, (None,) * 4, rank)
    _check.shape("v_cache", v_cache, (*k_cache.shape[:3], None), "k_cache's, then head_dim_v")
    head_dim = k_cache.shape[3]
    if batch is None:
        _check.shape("q", q, (None, None, None, head_dim), "[batch, seqlen, heads, head_dim]")
        batch = q.shape[0]
    else:
        _check.shape("q", q, (None, None, head_dim), "[total rows, heads, head_dim]")
    heads = q.shape[-2]
    if not k_cache.shape[2] or heads % k_cache.shape[2]:
        raise ValueError(
            f"q has {heads} heads, but must have a multiple of the {k_cache.shape[2]} of k_cache"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {cache.dtype}, but must have {q.dtype} like q")
        if cache.device != q.device:
            raise ValueError(f"{name} is on {cache.device}, but must be on {q.device} like q")
    if alibi_slopes is not None:
        _check.alibi(alibi_slopes, batch, heads)
    if sinks is not None:
        _check.shape("sinks", sinks, (heads,), "one logit per head")
    if block_table is not None:
        _check.shape("block_table", block_table, (batch, None), "[batch, pages of a sequence]")


def lengths_of(
    cache_seqlens: int | Tensor | None, batch: int, device: torch.device
) -> Tensor | None:
    """cache_seqlens as an int32 tensor [batch] on the device."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        return torch.full((batch,), int(cache_seqlens), dtype=torch.int32, device=device)
    _check.shape("cache_seqlens", cache_seqlens, (batch,), "one length per sequence")
    return int32_on(cache_seqlens, device)


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor | None,
    *,
    single_position: bool,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_new: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
) -> Appended:
    """Writes k and v behind the first ``lengths`` keys of the caches and rotates k and q.

    The index tensors are int32 on q's device. Without k nothing happens.
    """
    if (k is None) != (v is None):
        missing = "v" if v is None else "k"
        raise ValueError(f"{missing} is None; k and v are given together")
    if (rotary_cos is None) != (rotary_sin is None):
        missing = "rotary_sin" if rotary_sin is None else "rotary_cos"
        raise ValueError(f"{missing} is None; rotary_cos and rotary_sin are given together")
    if k is None or v is None:
        if rotary_cos is not None:
            raise ValueError("rotary_cos needs new keys: without k the cache holds rotated ones")
        return Appended(q, lengths)
    if lengths is None:
        raise ValueError("cache_seqlens is None; it says where k and v are written")
    if rotary_cos is not None and cache_leftpad is not None and rotary_seqlens is None:
        # Positions count from the start of the cache row, as in the FlashAttention packages, whose
        # prefill rotates that way. (Distances, all that the scores see, are the same either way.)
        rotary_seqlens = lengths
    rotated = torch.ops.tilewise.append_kv(
        k_cache,
        v_cache,
        None if rotary_cos is None else q,
        k,
        v,
        lengths,
        cu_seqlens_q,
        cu_seqlens_new,
        rotary_seqlens,
        block_table,
        cache_batch_idx,
        cache_leftpad,
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
        single_position,
    )
    new = k.shape[1] if cu_seqlens_new is None else cu_seqlens_new.diff()
    return Appended(q if rotary_cos is None else rotated, lengths + new)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    band: tuple[int, int],
    scale: float | None,
    softcap: float = 0.0,
    seqused_k: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of q against the first ``seqused_k`` keys of dense or paged caches."""
    options = _ops.Options(
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        block_table=block_table,
        kv_batch_idx=cache_batch_idx,
        leftpad_k=cache_leftpad,
        scale=1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale),
        window_left=band[0],
        window_right=band[1],
        softcap=float(softcap),
        num_splits=int(num_splits),
    )
    return _ops.forward(q, k_cache, v_cache, options)


@torch.no_grad()
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    causal: bool = False,
    window: _check.Window = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends new keys and values to a cache in place, then attends to all of it.

    For inference: no gradient flows through it. Nothing is written when an argument is refused.

    Args:
        q: [B, Sq, Hq, D], fp32, fp16 or bf16.
        k_cache, v_cache: [cache batch, capacity, Hkv, D] and [..., Dv]; with block_table
            [pages, page_size, Hkv, D] and [..., Dv], any page size.
        k, v: new keys [B, Snew, Hkv, D] and values [B, Snew, Hkv, Dv], written to
            ``cache_seqlens[b] .. cache_seqlens[b] + Snew - 1``.
        cache_seqlens: int or [B]: keys already in the cache, left padding included. None (allowed
            without k): the caches are full.
        cache_batch_idx: [B] int32: sequence b uses row ``cache_batch_idx[b]`` of the caches.
        cache_leftpad: [B] int32: first key of each sequence; those before it are not seen.
        block_table: [B, pages of a sequence] int32: page of each run of page_size keys.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in q's dtype; need k. Row r of k is
            rotated at ``cache_seqlens[b] + r``; so is row r of q if causal or a window is given,
            otherwise all of its rows are rotated at ``cache_seqlens[b]``.
        rotary_interleaved: pairs (2i, 2i + 1) (GPT-J), else (i, i + rotary_dim / 2) (GPT-NeoX).
        causal, window, scale, softcap, alibi_slopes, sinks: as in ``tilewise.attention``; the last
            query is aligned with the last key.
        num_splits: key splits worked on at once; 0: chosen by shape. Changes rounding only.
        return_lse: also return lse.

    Returns:
        out [B, Sq, Hq, Dv], or (out, lse [B, Hq, Sq] fp32).

    Raises:
        ValueError, TypeError: naming the argument, what was given and what is allowed.
    """
    check_cache(q, k_cache, v_cache, alibi_slopes, sinks, block_table)
    device = q.device
    indices = {
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
    }
    indices = {n: None if x is None else int32_on(x, device) for n, x in indices.items()}
    band = _check.window_bounds(causal, window)
    softcap = _check.softcap(softcap)
    q, seqused_k = append(
        q,
        k_cache,
        v_cache,
        k,
        v,
        lengths_of(cache_seqlens, q.shape[0], device),
        single_position=band == (-1, -1),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        **indices,
    )
    out, lse = attend(
        q,
        k_cache,
        v_cache,
        band=band,
        scale=scale,
        softcap=softcap,
        seqused_k=seqused_k,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        num_splits=num_splits,
        **indices,
    )
    return (out, lse) if return_lse else out
