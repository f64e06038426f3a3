"""The private functions of ``flash_attn``; those that other packages call have its signatures.

Context-parallel packages run ``_flash_attn_forward`` and ``_flash_attn_backward`` (and the
variable-length pair) on shards of the keys and merge the results by ``softmax_lse``.
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor

from tilewise._torch import as_array, batch_of
from tilewise.compat._calls import (
    attend,
    attention_probabilities,
    backward,
    bound,
    int32,
    new_dropout_state,
    options_of,
    scalar,
    splits_of,
)


def dense(
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
    return_probabilities,
    dropout_state=None,
):
    """(out, lse, S_dmask, rng_state) of equal-length sequences."""
    dropout_p = scalar(dropout_p)
    if dropout_state is None:
        dropout_state = new_dropout_state(dropout_p, q.device)
    options = options_of(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_state=dropout_state,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    out, lse = attend(q, k, v, options)
    probabilities = q.new_empty(0)
    if return_probabilities and dropout_p > 0:
        probabilities = attention_probabilities(q.detach(), k.detach(), options, k.shape[1])
    return out, lse, probabilities, dropout_state


def _varlen_options(
    q,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    block_table=None,
    leftpad_k=None,
    seqused_k=None,
    num_splits=0,
    **common,
):
    batch = batch_of(cu_seqlens_q)
    options = options_of(q, batch=batch, **common)._replace(
        cu_seqlens_q=int32("cu_seqlens_q", cu_seqlens_q),
        leftpad_k=int32("leftpad_k", leftpad_k),
        max_seqlen_q=bound("max_seqlen_q", max_seqlen_q),
        num_splits=splits_of(num_splits),
    )
    if block_table is None:
        return options._replace(
            cu_seqlens_k=int32("cu_seqlens_k", cu_seqlens_k),
            seqused_k=int32("seqused_k", seqused_k),
            max_seqlen_k=bound("max_seqlen_k", max_seqlen_k),
        )
    # The keys of sequence b are the first keys of its pages; cu_seqlens_k gives only their number.
    lengths = as_array("cu_seqlens_k", cu_seqlens_k).diff() if seqused_k is None else seqused_k
    return options._replace(
        block_table=int32("block_table", block_table), seqused_k=int32("seqused_k", lengths)
    )


def _padded_probabilities(q, k, options, max_seqlen_q, max_seqlen_k):
    """[B, H, max_seqlen_q, max_seqlen_k] from the packed rows; 0 past the end of a sequence."""
    rows = attention_probabilities(q.detach(), k.detach(), options, max_seqlen_k)
    starts = options.cu_seqlens_q.tolist()
    padded = rows.new_zeros((len(starts) - 1, rows.shape[0], max_seqlen_q, max_seqlen_k))
    for b, (first, last) in enumerate(pairwise(starts)):
        padded[b, :, : last - first] = rows[:, first:last]
    return padded


def varlen(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    return_probabilities,
    dropout_state=None,
    **rest,
):
    """(out, lse, S_dmask, rng_state) of packed sequences."""
    dropout_p = scalar(dropout_p)
    if dropout_state is None:
        dropout_state = new_dropout_state(dropout_p, q.device)
    options = _varlen_options(
        q,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p=dropout_p,
        dropout_state=dropout_state,
        **rest,
    )
    out, lse = attend(q, k, v, options)
    probabilities = q.new_empty(0)
    if return_probabilities and dropout_p > 0:
        if options.block_table is not None:
            raise NotImplementedError(
                "return_attn_probs is True and dropout_p > 0, but block_table must then be None"
            )
        lengths = int(max_seqlen_q), int(max_seqlen_k)
        probabilities = _padded_probabilities(q, k, options, *lengths)
    return out, lse, probabilities, dropout_state


def _dropout_state(dropout_p, rng_state):
    """The state that the forward returned as rng_state; None without dropout."""
    if scalar(dropout_p) == 0:
        return None
    if rng_state is None:
        raise ValueError(
            f"rng_state is None, but dropout_p is {dropout_p}: the backward needs the rng_state "
            "that the forward returned"
        )
    return rng_state


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    return_softmax: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse [B, H, Sq], S_dmask, rng_state), not differentiable."""
    with torch.no_grad():
        window = (window_size_left, window_size_right)
        *results, state = dense(
            q,
            k,
            v,
            dropout_p,
            softmax_scale,
            causal,
            window,
            softcap,
            alibi_slopes,
            False,
            return_softmax,
        )
    return (*results, _rng_state(state, q))


def _rng_state(state: Optional[Tensor], q: Tensor) -> Tensor:
    if state is None:
        return torch.zeros(2, dtype=torch.int64, device=q.device)
    return state


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[torch.Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    seqused_k: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, softmax_lse [H, T], S_dmask, rng_state), not differentiable.

    ``zero_tensors`` changes nothing: rows that belong to no sequence are always 0.
    """
    with torch.no_grad():
        *results, state = varlen(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            return_softmax,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=(window_size_left, window_size_right),
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            block_table=block_table,
            leftpad_k=leftpad_k,
            seqused_k=seqused_k,
            num_splits=num_splits,
        )
    return (*results, _rng_state(state, q))


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Writes dq, dk and dv where given; returns the row sums of dout * out, fp32 [B, H, Sq].

    ``out`` and ``softmax_lse`` may belong to a softmax over more keys than k.
    """
    options = options_of(
        q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_state=_dropout_state(dropout_p, rng_state),
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: Optional[torch.Tensor],
    dk: Optional[torch.Tensor],
    dv: Optional[torch.Tensor],
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Optional[torch.Tensor],
    deterministic: bool,
    rng_state: Optional[torch.Tensor] = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Writes dq, dk and dv where given; returns the row sums of dout * out, fp32 [H, T]."""
    options = _varlen_options(
        q,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_state=_dropout_state(dropout_p, rng_state),
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
    )
    return backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), options)
