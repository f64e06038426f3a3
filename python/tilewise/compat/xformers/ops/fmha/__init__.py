"""``memory_efficient_attention`` of xFormers.

The masks of ``attn_bias`` become a window, a shift of the diagonal and variable lengths, so no
matrix of them is ever stored.
"""

from __future__ import annotations

from typing import Any, Optional, Union

import torch
from torch import Tensor

from tilewise import _ops
from tilewise._check import is_one_or
from tilewise._request import Request, Sequences, Shard
from tilewise._torch import Prepared, as_array, prepare_dense, prepare_varlen
from tilewise.compat._calls import maybe_contiguous
from tilewise.compat.xformers.ops.fmha._bands import band_of
from tilewise.compat.xformers.ops.fmha.attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMask,
)

__all__ = [
    "AttentionBias",
    "BlockDiagonalMask",
    "LowerTriangularMask",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]

Bias = Union[None, Tensor, AttentionBias, Any]  # Any: a mask of xFormers itself


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """Exact attention, differentiable.

    Args:
        query: [B, Mq, H, K]; [B, Mq, K] means one head; [B, Mq, G, H, K] means G groups of H heads.
        key: [B, Mk, H, K], or with the other dimensions of query. Heads that ``expand`` has
            repeated are read once.
        value: [B, Mk, H, Kv], likewise.
        attn_bias: None; a tensor that is added to the scores [B, H, Mq, Mk] ([B, Mq, Mk] for three
            dimensions, [B, G, H, Mq, Mk] for five); or a mask of ``attn_bias``, ours or xFormers'.
            Block-diagonal masks need B = 1.
        p: Probability of dropping a weight, in [0, 1).
        scale: Factor of the scores; None is 1 / sqrt(K).
        op: Ignored: Tilewise chooses the kernel.
        output_dtype: dtype of the result; None is that of query.

    Returns:
        [B, Mq, H, Kv], or with the dimensions of query. Rows that see no key give 0.

    Raises:
        TypeError: an argument has the wrong type or dtype, or the mask is of an unknown class.
        ValueError: an argument has the wrong shape, device or range.
    """
    return _attend(query, key, value, attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> Tensor:
    """``memory_efficient_attention`` without a gradient."""
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, output_dtype)[0]


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias = None,
    p: float = 0.0,
    scale: Optional[float] = None,
    *,
    op: Any = None,
    output_dtype: Optional[torch.dtype] = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse), both without a gradient; lse is float32 [B, H, Mq], or [B, G, H, Mq]."""
    with torch.no_grad():
        return _attend(query, key, value, attn_bias, p, scale, output_dtype)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Bias,
    p: float,
    scale: Optional[float],
    output_dtype: Optional[torch.dtype],
) -> tuple[Tensor, Tensor]:
    q = _with_heads("query", query, query)
    k, v = _heads_of_keys(_with_heads("key", key, query), _with_heads("value", value, query))
    request = Request(scale=scale, dropout_p=p, bias=_tensor_bias(attn_bias, query))
    if attn_bias is None or isinstance(attn_bias, Tensor):
        prepared = prepare_dense(q, k, v, "bshd", request)
    elif hasattr(attn_bias, "q_seqinfo"):
        prepared = _packed(q, k, v, attn_bias, request)
    else:
        band = band_of(attn_bias)
        rows, keys = q.shape[1], k.shape[1]
        diagonal = None
        if band.top_left and rows != keys:
            diagonal = q.new_full((q.shape[0],), rows - keys, dtype=torch.int32)
        request = request._replace(window=(band.left, band.right), shard=Shard(diagonal))
        prepared = prepare_dense(q, k, v, "bshd", request)
    out, lse = _ops.forward(*prepared)
    out = out.reshape(*query.shape[:-1], value.shape[-1])
    lse = lse.reshape(query.shape[0], *query.shape[2:-1], query.shape[1])
    return out if output_dtype is None else out.to(output_dtype), lse


def _with_heads(name: str, x: Tensor, query: Tensor) -> Tensor:
    """The tensor with one dimension for the heads, or two for groups and heads."""
    rank = as_array("query", query).dim()
    if rank not in (3, 4, 5) or as_array(name, x).dim() != rank:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but must be [B, M, K], [B, M, H, K] or "
            "[B, M, G, H, K], with as many dimensions as query"
        )
    if x.shape[2:-1] != query.shape[2:-1]:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, but must have the heads of query, "
            f"{list(query.shape[2:-1])}: repeat them with expand, which copies nothing"
        )
    if rank == 3:
        return maybe_contiguous(x).unsqueeze(2)
    return maybe_contiguous(x).flatten(2, 3) if name == "query" and rank == 5 else x


def _heads_of_keys(*tensors: Tensor) -> list[Tensor]:
    """Keys and values [B, M, heads, K]; of heads that ``expand`` has repeated, only one."""
    repeated = all(x.stride(-2) == 0 for x in tensors)
    once = [x[..., :1, :] if repeated else x for x in tensors]
    return [maybe_contiguous(x.flatten(2, 3) if x.dim() == 5 else x) for x in once]


def _tensor_bias(attn_bias: Bias, query: Tensor) -> Optional[Tensor]:
    """The tensor of a bias, broadcastable to [B, heads, Mq, Mk]."""
    bias = attn_bias if isinstance(attn_bias, Tensor) else getattr(attn_bias, "_bias", None)
    if bias is None:
        return None
    if query.dim() == 3 and bias.dim() == 3:
        return bias.unsqueeze(1)
    if query.dim() == 5 and bias.dim() == 5:
        groups, heads = query.shape[2:4]
        if not (is_one_or(bias.shape[1], groups) and is_one_or(bias.shape[2], heads)):
            raise ValueError(
                f"attn_bias has shape {list(bias.shape)}, but must be broadcastable to [B, G, H, "
                f"Mq, Mk] with G = {groups} and H = {heads}"
            )
        return bias.expand(-1, groups, heads, -1, -1).flatten(1, 2)
    return bias


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Any, request: Request) -> Prepared:
    """The problem of a block-diagonal mask: sequences of different lengths, packed end to end."""
    q_info, k_info = mask.q_seqinfo, mask.k_seqinfo
    if q.shape[0] != 1 or k.shape[0] != 1:
        raise ValueError(
            f"query has {q.shape[0]} and key {k.shape[0]} batch rows, but a block-diagonal mask "
            "needs 1: its sequences lie end to end in the second dimension"
        )
    if q.shape[1] != q_info.seqstart_py[-1]:
        raise ValueError(
            f"query has {q.shape[1]} rows, but the mask has sequences of {q_info.seqstart_py[-1]} "
            "rows in all"
        )
    band = band_of(mask)
    diagonal = None
    if band.top_left and k_info is not q_info:
        diagonal = q_info.seqstart.diff() - k_info.seqstart.diff()
    request = request._replace(window=(band.left, band.right), shard=Shard(diagonal))
    q, k, v = q[0], k[0], v[0]
    used: Any = getattr(k_info, "seqlen", None)
    table = getattr(mask, "block_tables", None)
    if table is None:
        starts, first = k_info.seqstart, k_info.seqstart_py[0]
        if first:  # keys before the first sequence
            starts, k, v = starts - first, k[first:], v[first:]
        sequences = Sequences(
            q_info.seqstart, starts, q_info.max_seqlen, k_info.max_seqlen, seqused_k=used
        )
        return prepare_varlen(q, k, v, sequences, request)
    if k.shape[0] % mask.page_size:
        raise ValueError(
            f"key has {k.shape[0]} rows, but the mask has pages of {mask.page_size}: there must be "
            "a whole number of pages"
        )
    k, v = (x.unflatten(0, (-1, mask.page_size)) for x in (k, v))
    sequences = Sequences(
        q_info.seqstart, None, q_info.max_seqlen, seqused_k=used, block_table=table.int()
    )
    q, k, v, options = prepare_varlen(q, k, v, sequences, request)
    if not hasattr(k_info, "padding"):  # the keys in use start anywhere, and seqlen is their end
        options = options._replace(leftpad_k=k_info.seqstart[: used.shape[0]])
    return q, k, v, options
