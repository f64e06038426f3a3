"""The functions of ``flash_attn.flash_attn_interface``, implemented by Tilewise's kernels.

The options mean the same in all functions. Rows and keys are aligned bottom-right: row i sees key j
if ``i + Sk - Sq - window_size[0] <= j <= i + Sk - Sq + window_size[1]``, where -1 means no limit;
causal sets the right side to 0. Scores are multiplied by softmax_scale (None: 1 / sqrt(head_dim)),
capped by softcap, and lowered by ``alibi_slope * |i + Sk - Sq - j|``. k and v may have fewer heads
than q. Invalid arguments raise ValueError, TypeError or RuntimeError with the argument's name.

With ``return_attn_probs=True`` a function returns ``(out, softmax_lse, S_dmask)``. softmax_lse is
the log-sum-exp in fp32, [B, H, Sq] or [H, T]. S_dmask is empty without dropout. With dropout it
holds the probabilities [B, H, Sq, Sk] (variable length: [B, H, max_seqlen_q, max_seqlen_k]),
negated where dropout removed them.
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import Optional, Union

import torch

from tilewise import kvcache
from tilewise.compat._calls import (
    check_room,
    lengths_of,
    maybe_contiguous,
    round_multiple,
    scale_for,
    slopes_of,
    softcap_of,
    splits_of,
    unpacked,
    window_of,
)
from tilewise.compat.flash_attn._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    dense,
    varlen,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]


# The original package wraps these functions as PyTorch operators under the following names.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _result(results, return_attn_probs):
    out, lse, probabilities, _ = results
    return (out, lse, probabilities) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of qkv [B, S, 3, H, D] with out [B, S, H, D]; options: see the module docstring."""
    q, k, v = unpacked("qkv", qkv, 2, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q [B, Sq, Hq, D] to kv [B, Sk, 2, Hkv, D] with out [B, Sq, Hq, D]."""
    k, v = unpacked("kv", kv, 2, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q [B, Sq, Hq, D] to k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv].

    Args:
        dropout_p: Probability of dropping a weight; must be 0 in evaluation.
        alibi_slopes: [Hq] or [B, Hq] fp32.
        deterministic: Compute bitwise equal gradients in every run.

    Returns:
        out [B, Sq, Hq, Dv], or (out, softmax_lse, S_dmask) as in the module docstring.
    """
    results = dense(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )
    return _result(results, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention within the sequences of qkv [T, 3, H, D] with out [T, H, D].

    The boundaries of the sequences are cu_seqlens [B + 1] int32.
    """
    q, k, v = unpacked("qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
):
    """Attention of q [Tq, Hq, D] to kv [Tk, 2, Hkv, D] per sequence, with out [Tq, Hq, D]."""
    k, v = unpacked("kv", kv, 1, 2)
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """Attention of q [Tq, Hq, D] to k [Tk, Hkv, D] and v [Tk, Hkv, Dv] per sequence.

    Args:
        cu_seqlens_q, cu_seqlens_k: [B + 1] int32, boundaries of the sequences.
        max_seqlen_q, max_seqlen_k: Upper bounds of the lengths.
        block_table: [B, pages of a sequence] int32. With it, k and v are [pages, page_size, Hkv, D
            or Dv] with any page size, and cu_seqlens_k gives the lengths.

    Returns:
        out [Tq, Hq, Dv], or (out, softmax_lse, S_dmask) as in the module docstring.
    """
    results = varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        return_attn_probs,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        block_table=block_table,
    )
    return _result(results, return_attn_probs)


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    rotary_cos=None,
    rotary_sin=None,
    cache_seqlens: Optional[Union[int, torch.Tensor]] = None,
    cache_batch_idx: Optional[torch.Tensor] = None,
    cache_leftpad: Optional[torch.Tensor] = None,
    block_table: Optional[torch.Tensor] = None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    rotary_interleaved=True,
    alibi_slopes=None,
    num_splits=0,
    return_softmax_lse=False,
):
    """Appends k and v to the caches in place and attends to all keys in the caches.

    The arguments are those of ``tilewise.attention_with_kvcache``; options: see the module
    docstring.

    Returns:
        out [B, Sq, Hq, D], or (out, softmax_lse [B, Hq, Sq] fp32) with return_softmax_lse.
    """
    if block_table is None and cache_batch_idx is None:
        # A cache may have room for more sequences than the batch has.
        k_cache, v_cache = k_cache[: q.shape[0]], v_cache[: q.shape[0]]
    lengths = lengths_of(cache_seqlens, q.shape[0])
    if block_table is not None:
        check_room(block_table, k_cache.shape[1], lengths, 0 if k is None else k.shape[1])
    return kvcache.attention_with_kvcache(
        maybe_contiguous(q),
        k_cache,
        v_cache,
        maybe_contiguous(k),
        maybe_contiguous(v),
        cache_seqlens=lengths,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        block_table=block_table,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        causal=bool(causal),
        window=window_of(window_size),
        scale=scale_for(q, softmax_scale),
        softcap=softcap_of(softcap),
        alibi_slopes=slopes_of(alibi_slopes),
        num_splits=splits_of(num_splits),
        return_lse=bool(return_softmax_lse),
    )
