"""PyTorch's operators ``aten::_flash_attention_*`` on Tilewise.

``torch.nn.attention.varlen`` and nested tensors call them. Tensors are [batch, rows, heads,
head_dim], or packed [rows of all sequences, heads, head_dim] if there is a ``cum_seq_q``. Causality
and windows are aligned bottom-right, as in FlashAttention-2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import _ops, _torch
from tilewise._options import WANT_QKV
from tilewise._request import Request, Sequences, Shard


class Call(NamedTuple):
    """The arguments that an operator and its backward share."""

    cum_seq_q: Tensor | None  # int32 [sequences + 1]; None: equal lengths
    cum_seq_k: Tensor | None
    max_q: int
    max_k: int
    dropout_p: float
    is_causal: bool
    scale: float | None = None
    window_size_left: int | None = None  # None or -1: no limit
    window_size_right: int | None = None


class Cache(NamedTuple):
    """The arguments that only a forward has."""

    seqused_k: Tensor | None = None  # int32 [sequences]
    alibi_slopes: Tensor | None = None  # float32 [heads] or [sequences, heads]
    block_table: Tensor | None = None  # int32 [sequences, width]; then key and value are pages
    num_splits: int | None = None  # 1: results do not depend on the rest of the batch


def forward(
    query: Tensor, key: Tensor, value: Tensor, call: Call, cache: Cache
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention without a derivative of its own.

    Returns:
        out with the shape and order of query; lse, float32 [batch, heads, rows] or [heads, rows];
        the seed and offset of the dropout bits, int64 [2] (0 without dropout).
    """
    q, k, v, options = _prepared(query, key, value, call, cache)
    out, lse = torch.ops.tilewise.forward(q, k, v, *options)
    state = options.dropout_state
    if state is None:
        state = torch.zeros(2, dtype=torch.int64, device=query.device)
    return _stored(out, query), lse, state


def backward(
    dout: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    state: Tensor, call: Call,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv) from the arguments and results of ``forward``."""
    q, k, v, options = _prepared(query, key, value, call, Cache(), state.view(torch.int64))
    dout, out = (_ops.contiguous_columns(x) for x in (dout, out))
    grads = torch.ops.tilewise.backward(
        dout, None, q, k, v, out, lse.contiguous(), *options, WANT_QKV
    )
    return tuple(_stored(*pair) for pair in zip(grads, (query, key, value), strict=False))


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, call: Call, cache: Cache,
    state: Tensor | None = None,
) -> _torch.Prepared:  # fmt: skip
    request = Request(
        causal=call.is_causal,
        window=(call.window_size_left, call.window_size_right),
        scale=call.scale,
        alibi_slopes=cache.alibi_slopes,
        dropout_p=call.dropout_p,
        batch_invariant=cache.num_splits == 1,
        shard=Shard(dropout_state=state if call.dropout_p else None),
    )
    if value.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"value has head dimension {value.shape[-1]}, but must have {query.shape[-1]} like "
            "query: PyTorch's operators return an output of the shape of query"
        )
    if call.cum_seq_q is None:
        for name, given in (
            ("cum_seq_k", call.cum_seq_k),
            ("seqused_k", cache.seqused_k),
            ("block_table", cache.block_table),
        ):
            if given is not None:
                raise ValueError(f"{name} is given, but must be None without cum_seq_q")
        return _torch.prepare_dense(query, key, value, "bshd", request)
    starts_k, used = call.cum_seq_k, cache.seqused_k
    if cache.block_table is not None:
        used = starts_k.diff() if used is None and starts_k is not None else used
        starts_k = None
    sequences = Sequences(
        call.cum_seq_q, starts_k, call.max_q, call.max_k, seqused_k=used,
        block_table=cache.block_table,
    )  # fmt: skip
    return _torch.prepare_varlen(query, key, value, sequences, request)


def _stored(x: Tensor, like: Tensor) -> Tensor:
    """The tensor in the order of PyTorch's own results, which compiled graphs rely on."""
    expected = torch.empty_like(like)
    return x if x.stride() == expected.stride() else expected.copy_(x)


# --- the operators --------------------------------------------------------------------------------


def forward_operator(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None,
    max_q: int, max_k: int, dropout_p: float, is_causal: bool, _return_debug_mask: bool, *,
    scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """``aten::_flash_attention_forward``."""
    call = Call(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left,
        window_size_right,
    )  # fmt: skip
    cache = Cache(seqused_k, alibi_slopes, block_table, num_splits)
    out, lse, state = forward(query, key, value, call, cache)
    unused = torch.empty((), dtype=torch.uint64, device=query.device)
    no_mask = torch.empty(0, dtype=query.dtype, device=query.device)
    return out, lse, state.view(torch.uint64), unused, no_mask


def forward_into_operator(
    out: Tensor, query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    _return_debug_mask: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:  # fmt: skip
    """``aten::_flash_attention_forward_no_dropout_inplace``."""
    if dropout_p:
        raise ValueError(f"dropout_p is {dropout_p}, but must be 0: the operator has no dropout")
    call = Call(
        cum_seq_q, cum_seq_k, max_q, max_k, 0.0, is_causal, scale, window_size_left,
        window_size_right,
    )  # fmt: skip
    cache = Cache(seqused_k, alibi_slopes, block_table, num_splits)
    if out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(
            f"out has shape {list(out.shape)} and dtype {out.dtype}, but must have those of query, "
            f"{list(query.shape)} and {query.dtype}"
        )
    result, lse, _ = forward(query, key, value, call, cache)
    out.copy_(result)
    return lse


def backward_operator(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float,
    is_causal: bool, rng_state: Tensor, _unused: Tensor, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``aten::_flash_attention_backward``."""
    call = Call(
        cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale, window_size_left,
        window_size_right,
    )  # fmt: skip
    return backward(grad_out, query, key, value, out, logsumexp, rng_state, call)
