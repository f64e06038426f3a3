"""Attention over all rows for some of the heads on each rank (DeepSpeed-Ulysses, arXiv 2309.14509).

An all-to-all exchange turns "some rows of all heads" into "all rows of some heads", and another one
turns the result back. Attention itself is one ordinary call, so every option keeps its meaning.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import api
from .._request import Request
from .layout import Gather, Runs, cut, join, length
from .problem import Problem
from .ranks import Ranks, all_to_all, sum_dtype

Heads: TypeAlias = tuple[int, ...]


def query_heads(heads: int, world: int) -> list[Heads]:
    """The query heads of each rank: consecutive, as even as possible, maybe none."""
    starts = [rank * heads // world for rank in range(world + 1)]
    return [tuple(range(starts[rank], starts[rank + 1])) for rank in range(world)]


def key_heads(own: Heads, group: int) -> Heads:
    """The key/value heads that a rank needs for its query heads, `group` of which share one.

    Each of the heads returned serves equally many consecutive query heads, as attention requires. A
    head is repeated if the rank's first or last group is incomplete: query heads of the groups 0,
    0, 1 need the key heads 0, 0, 1.
    """
    of_query = [head // group for head in own]
    shared = math.gcd(*(of_query.count(head) for head in set(of_query)))
    return tuple(of_query[::shared]) if own else ()


class Exchange(NamedTuple):
    """How one tensor [B, rows, heads, columns] is exchanged."""

    rows: list[Runs]  # of each rank
    heads: list[Heads]  # of each rank; a head may occur several times
    total: int  # how many different heads there are
    what: str


def rows_to_heads(x: Tensor, plan: Exchange, ranks: Ranks) -> Tensor:
    """Exchanges this rank's rows of all heads for all rows of this rank's heads."""
    pieces = [x[:, :, list(heads)] for heads in plan.heads]
    own = len(plan.heads[ranks.rank])
    shapes = [(x.shape[0], length(rows), own, x.shape[3]) for rows in plan.rows]
    return join(all_to_all(pieces, shapes, ranks, plan.what), 1, plan.rows)


def heads_to_rows(y: Tensor, plan: Exchange, ranks: Ranks) -> Tensor:
    """Exchanges all rows of this rank's heads for this rank's rows of all heads.

    Pieces that several ranks send for the same head are added in float32 or wider, in rank order.
    """
    pieces = [cut(y, 1, rows) for rows in plan.rows]
    rows = length(plan.rows[ranks.rank])
    shapes = [(y.shape[0], rows, len(heads), y.shape[3]) for heads in plan.heads]
    parts = all_to_all(pieces, shapes, ranks, plan.what)
    if [head for heads in plan.heads for head in heads] == list(range(plan.total)):
        return torch.cat(parts, 2)
    shape = (y.shape[0], rows, plan.total, y.shape[3])
    total = y.new_zeros(shape, dtype=sum_dtype(y.dtype))
    for heads, part in zip(plan.heads, parts, strict=True):
        for at, head in enumerate(heads):
            total[:, :, head] += part[:, :, at]
    return total.to(y.dtype)


class ToHeads(torch.autograd.Function):
    """``rows_to_heads`` of several tensors, whose backwards run together and in one order."""

    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, plans: tuple[Exchange, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """See ``rows_to_heads``."""
        ctx.plan = ranks, plans
        return tuple(rows_to_heads(x, plan, ranks) for x, plan in zip(tensors, plans, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """See ``heads_to_rows``."""
        ranks, plans = ctx.plan
        results: list[Tensor | None] = [None, None]
        for needed, grad, plan in zip(ctx.needs_input_grad[2:], grads, plans, strict=True):
            plan = plan._replace(what=f"the gradient of {plan.what}")
            results.append(heads_to_rows(grad, plan, ranks) if needed else None)
        return tuple(results)


class ToRows(torch.autograd.Function):
    """``heads_to_rows`` of out and, if there is one, of lse [B, rows, heads, 1]."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, plan: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See ``heads_to_rows``."""
        ctx.plan = ranks, plan
        return tuple(heads_to_rows(x, plan, ranks) for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """See ``rows_to_heads``. Gradients that are not given are exchanged as zeros."""
        ranks, plan = ctx.plan
        plan = plan._replace(what=f"the gradient of {plan.what}")
        return None, None, *(rows_to_heads(grad, plan, ranks) for grad in grads)


def attend(p: Problem) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, lse [B, Hq, rows]."""
    ranks = p.ranks
    heads_q, heads_kv = p.heads
    of_q = query_heads(heads_q, ranks.world)
    of_kv = [key_heads(own, heads_q // heads_kv) for own in of_q]
    own = of_q[ranks.rank]
    plans = (
        Exchange(p.rows, of_q, heads_q, "q"),
        Exchange(p.keys, of_kv, heads_kv, "k"),
        Exchange(p.keys, of_kv, heads_kv, "v"),
    )
    bias = None if p.bias is None else _bias(p, p.bias, of_q)
    q, k, v = ToHeads.apply(ranks, plans, p.q, p.k, p.v)
    first, last = (own[0], own[-1] + 1) if own else (0, 0)
    slopes, sinks = p.request.alibi_slopes, p.request.sinks
    request = p.request._replace(
        bias=bias,
        sinks=None if sinks is None else sinks[first:last],
        alibi_slopes=None if slopes is None else slopes[..., first:last],
    )
    if own:
        results = call(q, k, v, request)
    else:
        results = _nothing((q, k, v), request)
    plan = Exchange(p.rows, of_q, heads_q, "out")
    if not request.return_lse:
        return ToRows.apply(ranks, plan, results[0])[0], None
    lse = results[1].transpose(1, 2).unsqueeze(3)
    out, lse = ToRows.apply(ranks, plan, results[0], lse)
    return out, lse.squeeze(3).transpose(1, 2)


def call(
    q: Tensor, k: Tensor, v: Tensor, request: Request, layout: str = "bshd"
) -> tuple[Tensor, ...]:
    """``tilewise.attention`` as a tuple of out and, if requested, lse."""
    options = request._asdict()
    del options["check"]  # an option of attention_varlen
    result = api.attention(q, k, v, **options, layout=layout)
    return result if request.return_lse else (result,)


def _nothing(tensors: tuple[Tensor, ...], request: Request) -> tuple[Tensor, ...]:
    """The results of a rank without heads, which still takes part in the exchanges of the backward.

    Their sum with the empty inputs connects them with the inputs' graph.
    """
    q, _, v = tensors
    batch, rows = q.shape[:2]
    inputs = (*tensors, request.bias, request.sinks, request.scale)
    connected = sum(x.sum() for x in inputs if isinstance(x, Tensor))
    out = (v.new_zeros((batch, rows, 0, v.shape[3])) + connected).to(v.dtype)
    lse = (q.new_zeros((batch, 0, rows), dtype=torch.float32) + connected).float()
    return (out, lse) if request.return_lse else (out,)


def _bias(p: Problem, bias: Tensor, of_q: list[Heads]) -> Tensor:
    """The bias of all rows and of this rank's heads."""
    by_head = bias.shape[1] > 1
    if not p.bias_has_rows:
        own = of_q[p.ranks.rank]
        return bias[:, own[0] : own[-1] + 1] if own and by_head else bias
    if not by_head:
        return Gather.apply(bias, 2, p.rows, p.ranks, "bias")
    plan = Exchange(p.rows, of_q, bias.shape[1], "bias")
    (whole,) = ToHeads.apply(p.ranks, (plan,), bias.transpose(1, 2))
    return whole.transpose(1, 2)
