"""Diffusers models on Tilewise.

    import tilewise.integrations.diffusers
    from diffusers import attention_backend

    model.set_attention_backend("tilewise")
    # or, for every model within the block:
    with attention_backend("tilewise"):
        ...

Importing this module registers the backend "tilewise", also for context parallelism (ring and
Ulysses). Nothing changes before the backend is chosen.

Diffusers lists its backends in an Enum and has no function that adds one. This module therefore
adds a member to ``AttentionBackendName`` by itself, and then registers the backend as Diffusers
registers its own.
"""

from __future__ import annotations

from typing import Any

from tilewise._requirements import require

require("tilewise.integrations.diffusers", "torch", "diffusers")

import torch
from diffusers.models import attention_dispatch
from torch import Tensor

from tilewise import _ops, _torch
from tilewise._options import WANT_QKV
from tilewise._request import Request
from tilewise.integrations._masks import as_bias

NAME = "tilewise"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention with the arguments of Diffusers' backends.

    Args:
        query: [batch, rows, heads, head_dim].
        key: [batch, keys, heads, head_dim].
        value: [batch, keys, heads, head_dim].
        attn_mask: Boolean (True: the key is seen) or added to the scores; broadcastable to [batch,
            heads, rows, keys], or [batch, keys].
        dropout_p: Probability of dropping a weight.
        is_causal: Row i sees key j if j <= i.
        scale: Factor of the scores; None is 1 / sqrt(head_dim).
        enable_gqa: Ignored: grouped heads follow from the shapes.
        return_lse: Return (out, lse); lse is float32 [batch, rows, heads].
        _parallel_config: Diffusers' context parallelism.

    Returns:
        out [batch, rows, heads, head_dim]; 0 in a row that sees no key.
    """
    if _parallel_config is not None:
        return attention_dispatch._templated_context_parallel_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            forward_op=_forward_op, backward_op=_backward_op, _parallel_config=_parallel_config,
        )  # fmt: skip
    out, lse = _ops.forward(*_prepared(query, key, value, attn_mask, dropout_p, is_causal, scale))
    return (out, lse.transpose(1, 2)) if return_lse else out


def _prepared(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float,
    is_causal: bool, scale: float | None,
) -> _torch.Prepared:  # fmt: skip
    if is_causal and query.shape[1] != key.shape[1]:
        raise NotImplementedError(
            f"is_causal with {query.shape[1]} rows and {key.shape[1]} keys, but Tilewise aligns "
            "causality with the last row and Diffusers with the first: pass a mask"
        )
    request = Request(
        causal=is_causal, scale=scale, dropout_p=dropout_p, bias=_bias(attn_mask, query, key)
    )
    return _torch.prepare_dense(query, key, value, "bshd", request)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    if mask is None:
        return None
    if mask.shape == (query.shape[0], key.shape[1]):  # [batch, keys]
        mask = mask[:, None, None]
    return as_bias("attn_mask", mask, query)


# --- context parallelism: the forward and the backward of one rank's rows and some keys -----------


def _forward_op(
    ctx: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    _enable_gqa: bool = False,
    return_lse: bool = False,
    _save_ctx: bool = True,
    _parallel_config: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    if dropout_p:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}, but must be 0 with Diffusers' context parallelism"
        )
    if attn_mask is not None and _parallel_config.context_parallel_config.ring_degree > 1:
        raise NotImplementedError(
            "attn_mask is given, but must be None with ring attention: Diffusers passes the same "
            "mask with the keys of every rank"
        )
    prepared = _prepared(query, key, value, attn_mask, 0.0, is_causal, scale)
    out, lse = torch.ops.tilewise.forward(*prepared[:3], *prepared[3])
    lse = lse.transpose(1, 2)
    if _save_ctx:
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.options = attn_mask, 0.0, is_causal, scale
    return (out, lse) if return_lse else out


def _backward_op(
    ctx: Any,
    grad_out: Tensor,
    *_arguments: Any,
    query: Tensor | None = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, ...]:
    given = query, key, value, out, lse  # the ring's keys and total results; None: those saved
    query, key, value, out, lse = (
        saved if x is None else x for x, saved in zip(given, ctx.saved_tensors, strict=True)
    )
    q, k, v, options = _prepared(query, key, value, *ctx.options)
    grad_out, out = (_ops.contiguous_columns(x) for x in (grad_out, out))
    lse = lse.float().transpose(1, 2).contiguous()
    grads = torch.ops.tilewise.backward(grad_out, None, q, k, v, out, lse, *options, WANT_QKV)
    return grads[:3]


def register() -> None:
    """Adds "tilewise" to Diffusers' attention backends."""
    names = attention_dispatch.AttentionBackendName
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_map_[NAME.upper()] = member
        names._member_names_.append(NAME.upper())
        names._value2member_map_[NAME] = member
    attention_dispatch._AttentionBackendRegistry.register(
        names(NAME),
        constraints=[attention_dispatch._check_device],
        supports_context_parallel=True,
    )(attention)


register()
