"""Attention of new queries to a key/value cache, with the append in the same call."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _check, _ops
from ._ops import Options
from ._request import Request
from ._torch import score_options


class NewKeys(NamedTuple):
    """What is to be written to a cache before attention, and how it is rotated."""

    k: Tensor | None = None  # [B, Snew, Hkv, D], or [Tnew, Hkv, D] with cu_seqlens
    v: Tensor | None = None
    lengths: Tensor | None = None  # [B] int32: keys already in the cache
    rotary_cos: Tensor | None = None  # [positions, rotary_dim / 2]
    rotary_sin: Tensor | None = None
    rotary_interleaved: bool = True
    rotary_lengths: Tensor | None = None  # [B] int32: positions instead of lengths
    cu_seqlens: Tensor | None = None  # [B + 1] int32


def index_tensor(x: Tensor | None, device: torch.device) -> Tensor | None:
    """An optional index tensor as the kernels read it."""
    return None if x is None else x.to(device=device, dtype=torch.int32).contiguous()


def cache_lengths(
    cache_seqlens: int | Tensor | None, batch: int, device: torch.device
) -> Tensor | None:
    """cache_seqlens as an int32 tensor [batch] on the device."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        return torch.full((batch,), int(cache_seqlens), dtype=torch.int32, device=device)
    _check.shape("cache_seqlens", cache_seqlens, (batch,), "one length per sequence")
    return index_tensor(cache_seqlens, device)


def split_count(num_splits: int) -> int:
    """A number >= 0; 0 leaves the choice to the planner."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits is {num_splits!r}, but must be an integer")
    if num_splits < 0:
        raise ValueError(f"num_splits is {num_splits}, but must be >= 0 (0: chosen by shape)")
    return num_splits


def check_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, packed: int | None
) -> int:
    """Refuses what attention would refuse only after the append has written to the caches.

    Args:
        packed: number of sequences when q is [T, Hq, D], None when it is [B, Sq, Hq, D].

    Returns:
        The number of sequences.
    """
    rank = "[batch or pages, rows, heads_kv, head_dim]"
    _check.shape("k_cache", k_cache, (None,) * 4, rank)
    _check.shape("v_cache", v_cache, (*k_cache.shape[:3], None), "k_cache's, then head_dim_v")
    head_dim = k_cache.shape[3]
    if packed is None:
        _check.shape("q", q, (None, None, None, head_dim), "[batch, seqlen, heads, head_dim]")
    else:
        _check.shape("q", q, (None, None, head_dim), "[total rows, heads, head_dim]")
    heads, batch = q.shape[-2], q.shape[0] if packed is None else packed
    if not k_cache.shape[2] or not heads or heads % k_cache.shape[2]:
        raise ValueError(
            f"q has {heads} heads, but must have a multiple of the {k_cache.shape[2]} of k_cache"
        )
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {cache.dtype}, but must have {q.dtype} like q")
        if cache.device != q.device:
            raise ValueError(f"{name} is on {cache.device}, but must be on {q.device} like q")
    if block_table is not None:
        _check.shape("block_table", block_table, (batch, None), "[batch, pages of a sequence]")
    return batch


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: Options,
    new: NewKeys,
    single_position: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) after writing the new keys; the caches have been checked by ``check_cache``.

    single_position: all rows of q are rotated alike; by default if nothing limits what they see.
    """
    q, options = append(q, k_cache, v_cache, options, new, single_position)
    return _ops.forward(q, k_cache, v_cache, options)


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: Options,
    new: NewKeys,
    single_position: bool | None = None,
) -> tuple[Tensor, Options]:
    """Writes the new keys; returns q, rotated if asked for, and options with all keys in use."""
    if (new.k is None) != (new.v is None):
        missing = "v" if new.v is None else "k"
        raise ValueError(f"{missing} is None, but k and v must be given together")
    if (new.rotary_cos is None) != (new.rotary_sin is None):
        missing = "rotary_sin" if new.rotary_sin is None else "rotary_cos"
        raise ValueError(f"{missing} is None, but rotary_cos and rotary_sin must be given together")
    rotates = new.rotary_cos is not None
    if new.k is None:
        if rotates:
            raise ValueError("rotary_cos is given without k, but rotates only q and new keys")
        return q, options._replace(seqused_k=new.lengths)
    if new.lengths is None:
        raise ValueError("cache_seqlens is None, but must say where k and v are written")
    positions = new.rotary_lengths
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
        new.k,
        new.v,
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
    )
    count = new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()
    return rotated if rotates else q, options._replace(seqused_k=new.lengths + count)


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
    scale: float | Tensor | None = None,
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
        cache_batch_idx: [B] int: sequence b uses row ``cache_batch_idx[b]`` of the caches.
        cache_leftpad: [B] int: first key of each sequence; those before it are not seen.
        block_table: [B, pages of a sequence] int: page of each run of page_size keys.
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
        ValueError, TypeError, RuntimeError: naming the argument, what was given, what is allowed.
    """
    batch = check_cache(q, k_cache, v_cache, block_table, packed=None)
    request = Request(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    options = score_options(q, batch, request)._replace(
        kv_batch_idx=index_tensor(cache_batch_idx, q.device),
        leftpad_k=index_tensor(cache_leftpad, q.device),
        block_table=index_tensor(block_table, q.device),
        num_splits=split_count(num_splits),
    )
    new = NewKeys(
        k=k,
        v=v,
        lengths=cache_lengths(cache_seqlens, batch, q.device),
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
    )
    out, lse = attend(q, k_cache, v_cache, options, new)
    return (out, lse) if return_lse else out
