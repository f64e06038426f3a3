"""Attention of this rank's rows over the keys and values of all ranks, which travel in groups of
heads: while one group is computed, the keys of the next one come, and gradients of keys go back.

A rank receives only keys that its rows see. Every row sees all of its keys in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._options import WANT_K, WANT_Q, WANT_V, Options, out_dtype_of
from .core import Gradients, Local, Result, add_bias, add_of_heads, no_sums, of_heads
from .exchange import BufferShape, Exchange, Transport, overlapped, rows_first
from .keys import Call, KeyPlan, Sums, flop_of, groups_of, place
from .layout import length
from .ranks import Ranks, sum_dtype


def groups(
    pairs: int, batch: int, heads: tuple[int, int], columns: tuple[int, int], device: torch.device
) -> int:
    """Into how many groups the heads are cut; `pairs` are those that the rows of a rank see."""
    return groups_of(heads[1], flop_of(pairs, batch, heads[0], columns), device)


class AllGather:
    """See ``core.Method``; `pairs` are the most that the rows of a rank see, and `local` computes
    the plan's calls.
    """

    def __init__(
        self, ranks: Ranks, pairs: int, plan: KeyPlan, local: Sequence[Local], transport: Transport
    ) -> None:
        self._ranks, self._pairs, self._plan = ranks, pairs, plan
        self._local, self._transport = local, transport

    def _groups(self, q: Tensor, k: Tensor, v: Tensor) -> int:
        heads, columns = (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3])
        return groups(self._pairs, q.shape[0], heads, columns, q.device)

    def _loader(self, k: Tensor, v: Tensor, count: int, what: str) -> Any:
        """Starts to gather the keys and values of one group: [B, keys, heads, columns]."""
        each, keys = k.shape[2] // count, length(self._plan.intervals)

        def views(group: int) -> list[Tensor]:
            heads = slice(group * each, (group + 1) * each)
            return [x[:, :, heads].transpose(0, 1).unsqueeze(0) for x in (k, v)]

        most = [self._plan.most_keys] * 2
        published = self._transport.publish(self._plan.gather, views, count, most, what)

        def load(group: int) -> tuple[Exchange, tuple[Tensor, ...]]:
            received = [x.new_empty((keys, x.shape[0], each, x.shape[3])) for x in (k, v)]
            return published.take(group, received), tuple(x.transpose(0, 1) for x in received)

        return load

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """See ``Method``."""
        batch, rows, heads, _ = q.shape
        count = self._groups(q, k, v)
        each, each_kv = heads // count, k.shape[2] // count
        out = q.new_empty((batch, rows, heads, v.shape[3]), dtype=out_dtype_of(q, options))
        lse = q.new_empty((batch, heads, rows), dtype=torch.float32)
        parts: list[Tensor] = []  # lse as the backward takes it, per group and call

        def compute(group: int, gathered: tuple[Tensor, ...]) -> None:
            begin, end = group * each, (group + 1) * each
            part = of_heads(options, begin, end, range(group * each_kv, (group + 1) * each_kv))
            for call, local in zip(self._plan.calls, self._local, strict=True):
                keys, values = (x[:, self._keys(call)] for x in gathered)
                own = slice(*call.rows)
                result = local.forward(q[:, own, begin:end], keys, values, part, max_logits)
                out[:, own, begin:end] = result.out
                lse[:, begin:end, own] = result.lse
                parts.append(result.state[-1])

        overlapped(count, self._loader(k, v, count, "k and v"), compute, lambda *_: None)
        return Result(out, lse, [q, k, v, out, *parts])

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """See ``Method``."""
        q, k, v, out, *parts = state
        count, calls = self._groups(q, k, v), self._plan.calls
        each, each_kv = q.shape[2] // count, k.shape[2] // count
        results = no_sums(options, wanted)
        for at, x, bit in ((0, q, WANT_Q), (1, k, WANT_K), (2, v, WANT_V)):
            if wanted & bit:
                results[at] = torch.empty_like(x, memory_format=torch.contiguous_format)
        dq = results[0]
        moving = wanted & (WANT_K | WANT_V)

        shapes = [
            (x.shape[0], each_kv, x.shape[3] if wanted & bit else 0)
            for x, bit in ((k, WANT_K), (v, WANT_V))
        ]

        def compute(group: int, gathered: tuple[Tensor, ...]) -> tuple[Exchange, Any] | None:
            begin, end = group * each, (group + 1) * each
            sent: list[Tensor] = []
            part = of_heads(options, begin, end, range(group * each_kv, (group + 1) * each_kv))
            for number, (call, local) in enumerate(zip(calls, self._local, strict=True)):
                keys, values = (x[:, self._keys(call)] for x in gathered)
                own = slice(*call.rows)
                state = local.state_of(
                    q[:, own, begin:end], keys, values, out[:, own, begin:end],
                    parts[group * len(calls) + number],
                )  # fmt: skip
                own_dlse = None if dlse is None else dlse[:, begin:end, own]
                grads = local.backward(state, dout[:, own, begin:end], own_dlse, part, wanted)
                if dq is not None:
                    dq[:, own, begin:end] = grads[0]
                add_of_heads(results, grads, begin, end)
                add_bias(local, results[3], grads[3], begin, end)
                for x in grads[1:3]:  # one that is not wanted has no columns, so nothing moves
                    size = call.span.end - call.span.begin
                    sent.append(k.new_empty((size, 0)) if x is None else rows_first(x))
            return self._return(sent, shapes, k) if moving else None

        def finish(group: int, received: list[Tensor]) -> None:
            begin, end = group * each_kv, (group + 1) * each_kv
            for target, parts in zip(results[1:3], received, strict=True):
                if target is not None:
                    _sum(parts, self._plan.sums, target[:, :, begin:end])

        load = self._loader(k, v, count, "k and v for the backward")
        overlapped(count, load, compute, finish)
        return results

    def _return(
        self, sent: list[Tensor], shapes: Sequence[tuple[int, ...]], like: Tensor
    ) -> tuple[Exchange, list[Tensor]]:
        """Starts to send the gradients of the keys of all calls to their ranks."""
        plan = self._plan
        rows = sum(s.parts * (s.rows[1] - s.rows[0]) for s in plan.sums)
        buffers = self._transport.receive_buffers(
            [BufferShape((1, rows, *shape), plan.most_parts, like.dtype) for shape in shapes],
            like.device,
        )
        for begin, end in plan.gaps:
            for x in buffers.tensors:
                x[0, begin:end] = 0
        what = "the gradients of k and v"
        return self._transport.send(plan.scatter, sent, buffers, what), [
            x[0] for x in buffers.tensors
        ]

    def _keys(self, call: Call) -> slice:
        begin = place(self._plan.intervals, call.span.begin)
        return slice(begin, begin + call.span.end - call.span.begin)


def _sum(received: Tensor, sums: tuple[Sums, ...], target: Tensor) -> None:
    """Adds the parts of each run of keys in float32 or wider, in the order of ranks and calls."""
    for s in sums:
        own, size = target[:, slice(*s.rows)], s.rows[1] - s.rows[0]
        if s.parts == 0:
            own.zero_()
            continue
        parts = received.narrow(0, s.at, s.parts * size).unflatten(0, (s.parts, size))
        total = parts[0] if s.parts == 1 else parts.sum(0, dtype=sum_dtype(parts.dtype))
        own.copy_(total.transpose(0, 1))
