"""The functions of FlashAttention-3's ``flash_attn_interface``, implemented by Tilewise's kernels.

The options mean the same in all functions. Rows and keys are aligned bottom-right: row i sees key j
if ``i + Sk - Sq - window_size[0] <= j <= i + Sk - Sq + window_size[1]``, where -1 means no limit;
causal sets the right side to 0. With ``attention_chunk``, a row sees only keys of its own chunk.
``qv`` adds qv . v to q . k (then head_dim + head_dim_v may be at most 576; on a GPU 512 in fp32 and
with gradients); it copies k and v unless the columns of k follow those of v in one tensor. The
functions are differentiable, and so is the log-sum-exp, fp32 [B, H, Sq] or [H, T], which
``return_attn_probs`` adds.

In a forward without ``qv``, k and v may have dtype torch.float8_e4m3fn, and q fp16, bf16 or that
dtype, which gives an out of bf16. Values of fp8 are multiplied by ``q_descale``, ``k_descale`` and
``v_descale``, fp32 [B or 1, Hkv or 1]; new keys and values of a cache, of 16 bits, are divided by
them. ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are hints to the original kernels; they
are ignored.
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor

from tilewise.compat._calls import (
    backward,
    bound,
    int32,
    maybe_contiguous,
    options_of,
    round_multiple,
    scalar,
    write_to,
)
from tilewise.compat._fa3 import attend_cached, attend_dense, attend_varlen

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "maybe_contiguous",
    "round_multiple",
    "round_up_headdim",
]


def round_up_headdim(head_size: int) -> int:
    """The head dimension itself, because kernels here support every one up to 512, some to 576."""
    return head_size


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_new: Optional[torch.Tensor] = None,
    v_new: Optional[torch.Tensor] = None,
    qv: Optional[torch.Tensor] = None,
    out_: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    seqused_q: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    page_table: Optional[torch.Tensor] = None,
    kv_batch_idx: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    rotary_cos: Optional[torch.Tensor] = None,
    rotary_sin: Optional[torch.Tensor] = None,
    seqlens_rotary: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[torch.Tensor] = None,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse, out_accum, softmax_lse_accum), not differentiable; the last two are empty.

    k and v are caches if k_new, page_table, kv_batch_idx or leftpad_k is given.
    """
    common = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=(window_size_left, window_size_right),
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    cached = any(x is not None for x in (k_new, page_table, kv_batch_idx, leftpad_k))
    with torch.no_grad():
        if cached:
            _refuse_with_cache(seqused_q=seqused_q, cu_seqlens_k=cu_seqlens_k)
            common |= dict(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
            common |= dict(rotary_seqlens=seqlens_rotary, rotary_interleaved=rotary_interleaved)
            common |= dict(cache_seqlens=seqused_k, cache_batch_idx=kv_batch_idx)
            common |= dict(cache_leftpad=leftpad_k, page_table=page_table)
            common |= dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new)
            out, lse = attend_cached(q, k, v, k_new, v_new, max_seqlen_q=max_seqlen_q, **common)
        else:
            common |= dict(seqused_q=seqused_q, seqused_k=seqused_k)
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            out, lse = _attend(q, k, v, *lengths, **common)
    if out_ is not None:
        out = write_to("out_", out_, out)
    empty = q.new_empty(0, dtype=torch.float32)
    return out, lse, empty, empty.clone()


def _refuse_with_cache(**arguments):
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is given, but must be None with a key/value cache")


def _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return attend_dense(q, k, v, **options)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise NotImplementedError(f"{missing} is None, but q and k must both be packed, or neither")
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend_varlen(q, k, v, *lengths, **options)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k: Optional[torch.Tensor] = None,
    sequed_q: Optional[torch.Tensor] = None,
    sequed_k: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    dq: Optional[torch.Tensor] = None,
    dk: Optional[torch.Tensor] = None,
    dv: Optional[torch.Tensor] = None,
    softmax_scale: Optional[float] = None,
    is_causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> torch.Tensor:
    """Writes dq, dk and dv where given; returns the row sums of dout * out, fp32 in lse's shape.

    ``out`` and ``softmax_lse`` may belong to a softmax over more keys than k.
    """
    options = options_of(
        q,
        softmax_scale=softmax_scale,
        causal=is_causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        deterministic=deterministic,
    )._replace(
        cu_seqlens_q=int32("cu_seqlens_q", cu_seqlens_q),
        cu_seqlens_k=int32("cu_seqlens_k", cu_seqlens_k),
        seqused_q=int32("sequed_q", sequed_q),
        seqused_k=int32("sequed_k", sequed_k),
        max_seqlen_q=bound("max_seqlen_q", max_seqlen_q),
        max_seqlen_k=bound("max_seqlen_k", max_seqlen_k),
    )
    return backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


def _split_qkv(qkv: Tensor, num_heads_q: Optional[int]) -> tuple[Tensor, ...]:
    """q, k and v of [B, S, 3, H, D] or [B, S, Hq + 2 * Hkv, D]."""
    if qkv.ndim == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {list(qkv.shape)}, but dimension 2 must be 3")
        return qkv.unbind(dim=2)
    num_heads_q = scalar(num_heads_q)
    if qkv.ndim != 4 or num_heads_q is None:
        raise ValueError(
            f"qkv has shape {list(qkv.shape)} and num_heads_q is {num_heads_q}, but must be "
            "[batch, seqlen, 3, heads, head_dim], or have 4 dimensions and num_heads_q"
        )
    heads_kv, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or heads_kv < 1:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, but the {qkv.shape[2]} heads of qkv must be "
            "num_heads_q + 2 * num_heads_k"
        )
    return qkv.split((num_heads_q, heads_kv, heads_kv), dim=2)


def flash_attn_qkvpacked_func(
    qkv,
    softmax_scale=None,
    causal=False,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    deterministic=False,
    num_heads_q=None,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of qkv [B, S, 3, H, D], or [B, S, Hq + 2 * Hkv, D] with num_heads_q = Hq.

    Returns:
        out [B, S, Hq, D], or (out, softmax_lse [B, Hq, S] fp32) with return_attn_probs.
    """
    q, k, v = _split_qkv(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=0,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of q [B, Sq, Hq, D] to k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

    Args:
        qv: [B, Sq, Hq, Dv].
        num_splits: Number of key splits; 0 chooses it by shape.

    Returns:
        out [B, Sq, Hq, Dv], or (out, softmax_lse [B, Hq, Sq] fp32) with return_attn_probs.
    """
    out, lse = attend_dense(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    qv=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    sm_margin=0,
    return_attn_probs=False,
):
    """Attention of q [Tq, Hq, D] to k and v [Tk, Hkv, ...] per sequence.

    Args:
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, boundaries of the sequences.
        max_seqlen_q, max_seqlen_k: Upper bounds of the lengths.
        seqused_q, seqused_k: [B] int32, rows and keys in use; unused rows of out are 0.

    Returns:
        out [Tq, Hq, Dv], or (out, softmax_lse [Hq, Tq] fp32) with return_attn_probs.
    """
    out, lse = attend_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        num_splits=num_splits,
        deterministic=deterministic,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Merges the results of attention to disjoint sets of keys.

    Args:
        out_partial: [splits, ..., H, Dv], usually fp32.
        lse_partial: [splits, ..., H] fp32.
        out: Tensor that the result is written to, if given.
        out_dtype: Dtype of the result; by default that of out, or else of out_partial.

    Returns:
        (out [..., H, Dv], lse [..., H] fp32). A row without a key has out = 0 and lse = -inf.
    """
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial has shape {list(lse_partial.shape)}, but must be "
            f"{list(out_partial.shape[:-1])}: that of out_partial without its last dimension"
        )
    lse_partial = lse_partial.float()
    lse = torch.logsumexp(lse_partial, dim=0)
    weights = torch.where(lse_partial == -torch.inf, 0.0, torch.exp(lse_partial - lse))
    # The out of a split without keys may have any value, even NaN, and 0 * NaN would be NaN.
    outs = torch.where((weights == 0.0).unsqueeze(-1), 0.0, out_partial.float())
    merged = (weights.unsqueeze(-1) * outs).sum(dim=0)
    if out_dtype is None:
        out_dtype = out_partial.dtype if out is None else out.dtype
    merged = merged.to(out_dtype)
    return merged if out is None else write_to("out", out, merged), lse


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_table: Optional[torch.Tensor] = None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[torch.Tensor] = None,
    q_descale: Optional[torch.Tensor] = None,
    k_descale: Optional[torch.Tensor] = None,
    v_descale: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    softcap=0.0,
    rotary_interleaved=True,
    scheduler_metadata=None,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
    return_softmax_lse=False,
):
    """Appends k and v to the caches in place and attends to all keys in the caches; for inference.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] with cu_seqlens_q and max_seqlen_q.
        k_cache, v_cache: [cache batch, capacity, Hkv, D or Dv]; with page_table
            [pages, page_size, Hkv, D or Dv], for any page size.
        k, v: [B, Snew, Hkv, D or Dv], or [Tnew, ...] with cu_seqlens_k_new.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2], by which k and q are rotated as in
            FlashAttention-2.
        rotary_seqlens: [B] int32, positions to count rotations from, instead of cache_seqlens.
        cache_seqlens: int or [B], keys already in the cache.
        cache_batch_idx: [B] int32, row of the cache (or of page_table) for each sequence.
        cache_leftpad: [B] int32, first key of each sequence.
        page_table: [B, pages of a sequence] int32.

    Returns:
        out, or (out, softmax_lse, out_accum, softmax_lse_accum) with return_softmax_lse. The last
        two are the partial results of splits in the original, and empty here.
    """
    out, lse = attend_cached(
        q,
        k_cache,
        v_cache,
        k,
        v,
        qv=qv,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    if not return_softmax_lse:
        return out
    empty = q.new_empty(0, dtype=torch.float32)
    return out, lse, empty, empty.clone()


def get_scheduler_metadata(
    batch_size,
    max_seqlen_q,
    max_seqlen_k,
    num_heads_q,
    num_heads_kv,
    headdim,
    cache_seqlens: torch.Tensor,
    qkv_dtype=torch.bfloat16,
    headdim_v=None,
    cu_seqlens_q: Optional[torch.Tensor] = None,
    cu_seqlens_k_new: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    page_size: Optional[int] = None,
    max_seqlen_k_new=0,
    causal=False,
    window_size=(-1, -1),
    attention_chunk=0,
    has_softcap=False,
    num_splits=0,
    pack_gqa=None,
    sm_margin=0,
):
    """An empty int32 tensor, because schedules follow from the shapes and need no preparation."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
