"""Attention of this rank's rows over the keys and values of all ranks, which each rank gathers.

Causal masks and windows are aligned bottom-right, so a run of consecutive rows is an ordinary call
over the keys up to that of its last row. A rank has at most two runs. Every row sees all of its
keys in one call, so no partial outputs are merged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .layout import Run, Runs, gather, length, scatter_sum
from .problem import Problem
from .ranks import Ranks, sum_dtype
from .ulysses import call


class Span(NamedTuple):
    """The keys that a run of rows may see, and the window that limits each row to its own keys."""

    begin: int
    end: int
    window: tuple[int | None, int | None]


def span_of(run: Run, size_q: int, size_k: int, window: tuple[int | None, int | None]) -> Span:
    """The keys of a run of rows.

    Row i of the whole sequence is aligned with key i + size_k - size_q. In a call over the keys
    before `end`, the last row of the run is aligned with key end - 1, which is `shift` keys too
    far, so the window moves back by as many.
    """
    left, right = window
    aligned = run[1] + size_k - size_q  # the end for which shift is 0
    end = size_k if right is None else min(size_k, aligned + right)
    if end <= 0 or run[0] == run[1]:
        return Span(0, 0, (None, None))
    shift = end - aligned
    begin = 0 if left is None else max(0, run[0] + size_k - size_q - left)
    return Span(
        min(begin, end),
        end,
        (None if left is None else left + shift, None if right is None else right - shift),
    )


class Plan(NamedTuple):
    """How keys are gathered and which of them each run of this rank's rows sees."""

    keys: list[Runs]
    spans: tuple[Span, ...]
    ranks: Ranks


class GatherSpans(torch.autograd.Function):
    """The spans of k, then those of v, as views of the tensors gathered from all ranks.

    The backward adds the gradients of the spans in float32 or wider before it exchanges them, and
    those of the ranks in rank order.
    """

    @staticmethod
    def forward(ctx: Any, plan: Plan, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Gathers k and v."""
        ctx.plan = plan
        results: list[Tensor] = []
        for x, what in ((k, "k"), (v, "v")):
            whole = gather(x, 1, plan.keys, plan.ranks, what)
            results += [whole[:, span.begin : span.end] for span in plan.spans]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Adds the gradients of this rank's keys."""
        plan, runs = ctx.plan, len(ctx.plan.spans)
        size = sum(length(keys) for keys in plan.keys)
        results: list[Tensor | None] = [None]
        for at, what in ((0, "k"), (1, "v")):
            if not ctx.needs_input_grad[1 + at]:
                results.append(None)
                continue
            own = grads[at * runs : (at + 1) * runs]
            batch, _, heads, columns = own[0].shape
            dtype = own[0].dtype
            # Rows come first, because the exchange sends runs of them.
            whole = own[0].new_zeros((size, batch, heads, columns), dtype=sum_dtype(dtype))
            for span, grad in zip(plan.spans, own, strict=True):
                whole[span.begin : span.end] += grad.transpose(0, 1)
            total = scatter_sum(whole, 0, plan.keys, plan.ranks, f"the gradient of {what}")
            results.append(total.to(dtype).transpose(0, 1))
        return tuple(results)


def why_not(p: Problem) -> str:
    """The argument that this method cannot compute exactly, or an empty string."""
    if p.request.alibi_slopes is not None and p.request.window[1] != 0:
        # The penalty counts from the aligned key, which moves with the end of the keys.
        return "alibi_slopes is given without causal=True"
    return ""


def attend(p: Problem) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, lse [B, Hq, rows]."""
    runs = p.rows[p.ranks.rank]
    spans = tuple(span_of(run, p.size_q, p.size_k, p.request.window) for run in runs)
    parts = GatherSpans.apply(Plan(p.keys, spans, p.ranks), p.k, p.v)
    bias = p.bias
    if bias is not None and bias.shape[3] == 1:
        bias = bias.expand(*bias.shape[:3], p.size_k)
    results, at = [], 0
    for index, (run, span) in enumerate(zip(runs, spans, strict=True)):
        rows = slice(at, at + run[1] - run[0])
        at = rows.stop
        own_bias = None
        if bias is not None:
            own_bias = bias[:, :, rows] if p.bias_has_rows else bias
            own_bias = own_bias[..., span.begin : span.end]
        request = p.request._replace(window=span.window, bias=own_bias)
        keys, values = parts[index], parts[len(runs) + index]
        results.append(call(p.q[:, rows], keys, values, request))
    out = torch.cat([result[0] for result in results], 1)
    if not p.request.return_lse:
        return out, None
    return out, torch.cat([result[1] for result in results], 2)
