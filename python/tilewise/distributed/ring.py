"""Attention of this rank's rows over the keys of one rank after another, merged in float32.

In step s a rank computes over the keys of the rank s places before it, which come while step s - 1
is computed; in the backward the gradients of those keys go back meanwhile. A rank holds the keys of
two ranks at a time, where "allgather" holds all keys of some heads. Owners send their keys
themselves, and only to ranks whose rows see them.

Partial outputs are float32, so that their sum is rounded once, or not at all (``out_dtype``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _abi, _torch
from .._options import WANT_K, WANT_Q, WANT_SINKS, WANT_V, Options, out_dtype_of
from .core import Gradients, Local, Result, add_bias, add_of_heads, no_sums
from .exchange import Exchange, Messages, Piece, ReceiveBuffers, Table, overlapped, rows_first
from .keys import Meeting
from .layout import Runs, length
from .ranks import Ranks


class Ring:
    """See ``core.Method``. `meetings[a][b]` are the calls of rank a over the keys of rank b, and
    `local[b]` computes those of this rank.
    """

    def __init__(
        self, ranks: Ranks, keys: Sequence[Runs], meetings: Sequence[Sequence[Sequence[Meeting]]],
        local: Sequence[Sequence[Local]],
    ) -> None:  # fmt: skip
        self._ranks, self._local, self._meetings = ranks, local, meetings
        self._keys = [length(own) for own in keys]

    def _peers(self, step: int) -> tuple[int, int]:
        """The owner of the keys of a step, and the rank that computes over this rank's keys."""
        rank, world = self._ranks.rank, self._ranks.world
        return (rank - step) % world, (rank + step) % world

    def _exchange(
        self, sent: Sequence[Tensor], received: Sequence[Tensor], to: int | None,
        source: int | None, what: str,
    ) -> Exchange:  # fmt: skip
        """Starts to send whole tensors [keys, ...] to one rank and to receive from another."""

        def all_of(tensors: Sequence[Tensor], peer: int | None) -> list[tuple[Piece, ...]]:
            pieces = tuple(Piece(i, 0, i, 0, len(x)) for i, x in enumerate(tensors) if len(x))
            return [pieces if peer == other else () for other in range(self._ranks.world)]

        table = Table(tuple(all_of(sent, to)), tuple(all_of(received, source)))
        buffers = ReceiveBuffers([x.unsqueeze(0) for x in received], [])
        return Messages(self._ranks).send(table, sent, buffers, what)

    def _loader(self, k: Tensor, v: Tensor, what: str) -> Any:
        """Starts to receive the keys and values of a step: [B, keys, heads, columns]."""
        rank, published = self._ranks.rank, [rows_first(x) for x in (k, v)]

        def load(step: int) -> tuple[Exchange, tuple[Tensor, ...]]:
            owner, other = self._peers(step)
            if step == 0:
                return Exchange([], (), self._ranks, what), (k, v)
            see, seen = self._meetings[rank][owner], self._meetings[other][rank]
            size = self._keys[owner] if see else 0
            received = [x.new_empty((size, *x.shape[1:])) for x in published]
            exchange = self._exchange(
                published, received, other if seen else None, owner if see else None, what
            )
            return exchange, tuple(x.transpose(0, 1) for x in received)

        return load

    def _calls(self, step: int) -> Any:
        owner = self._peers(step)[0]
        return zip(self._meetings[self._ranks.rank][owner], self._local[owner], strict=True)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """See ``Method``."""
        out_dtype = out_dtype_of(q, options)
        q, options = _in_16_bits(q, options, out_dtype)
        batch, rows, heads, _ = q.shape
        out = q.new_zeros((batch, rows, heads, v.shape[3]), dtype=torch.float32)
        # A sink is a part of its own, with no output. lse is added up in float64. Its low part, if
        # given, would tell the backward that the keys of a call are all that its rows see.
        lse = q.new_full((batch, heads, rows), -torch.inf, dtype=torch.float64)
        if options.sinks is not None:
            lse = lse.copy_(options.sinks[:, None])
        of_part = options._replace(sinks=None, out_dtype=_abi.OUT_DTYPES["float32"])

        def compute(step: int, x: tuple[Tensor, ...]) -> None:
            for meeting, local in self._calls(step):
                own = slice(*meeting.rows)
                keys, values = (y[:, slice(*meeting.keys)] for y in x)
                part = local.forward(q[:, own], keys, values, of_part, max_logits)
                part_lse = local.lse_pair(part.state[-1]).double().sum(0)
                before, share, lse[..., own] = _torch._merge_weights(lse[..., own], part_lse)
                before, share = (w.float().transpose(1, 2).unsqueeze(-1) for w in (before, share))
                out[:, own] = out[:, own] * before + part.out * share

        overlapped(self._ranks.world, self._loader(k, v, "k and v"), compute, lambda *_: None)
        result, lse = out.to(out_dtype), lse.float()
        return Result(result, lse, [q, k, v, result, lse])

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """See ``Method``."""
        q, k, v, out, lse = state
        results = no_sums(options, wanted)
        if wanted & WANT_SINKS:
            results[4] = _of_sinks(options.sinks, out, lse, dout, dlse)
        asked = ((0, q, WANT_Q), (1, k, WANT_K), (2, v, WANT_V))
        sums = {at: x.new_zeros(x.shape, dtype=torch.float32) for at, x, bit in asked
                if wanted & bit}  # fmt: skip
        moving = [at for at in (1, 2) if at in sums]
        inner, without_sinks = wanted & ~WANT_SINKS, options._replace(sinks=None)
        rank, heads = self._ranks.rank, q.shape[2]

        def compute(step: int, x: tuple[Tensor, ...]) -> tuple[Exchange, Any] | None:
            owner, other = self._peers(step)
            of_keys = {at: torch.zeros_like(x[at - 1], dtype=torch.float32) for at in moving}
            for meeting, local in self._calls(step):
                own, keys = slice(*meeting.rows), slice(*meeting.keys)
                saved = local.state_of(
                    q[:, own], x[0][:, keys], x[1][:, keys], out[:, own],
                    local.lse_given(lse[..., own].contiguous()),
                )  # fmt: skip
                own_dlse = None if dlse is None else dlse[..., own]
                grads = local.backward(saved, dout[:, own], own_dlse, without_sinks, inner)
                if 0 in sums:
                    sums[0][:, own] += grads[0]
                for at, total in of_keys.items():
                    total[:, keys] += grads[at]
                add_of_heads(results, grads, 0, heads)
                add_bias(local, results[3], grads[3], 0, heads)
            if step == 0:
                for at, total in of_keys.items():
                    sums[at] += total
            if step == 0 or not moving:
                return None
            sees = self._meetings[other][rank]
            sent = [rows_first(total.to(k.dtype)) for total in of_keys.values()]
            received = [
                rows_first(
                    sums[at].new_empty(sums[at].shape if sees else (0, 0, 0, 0), dtype=k.dtype)
                )
                for at in moving
            ]
            to = owner if self._meetings[rank][owner] else None
            what = "the gradients of k and v"
            return self._exchange(sent, received, to, other if sees else None, what), received

        def finish(_step: int, received: Sequence[Tensor]) -> None:
            for at, x in zip(moving, received, strict=True):
                if x.numel():
                    sums[at] += x.transpose(0, 1)

        load = self._loader(k, v, "k and v for the backward")
        overlapped(self._ranks.world if inner else 0, load, compute, finish)
        for at, total in sums.items():
            results[at] = total.to(q.dtype)
        return results


def _in_16_bits(q: Tensor, options: Options, out_dtype: torch.dtype) -> tuple[Tensor, Options]:
    """Queries of float8, which are bytes here, as the kernels widen them: to the 16 bits of out,
    which the calls with their float32 out do not know.
    """
    if q.dtype != torch.uint8:
        return q, options
    wide = torch.float16 if out_dtype == torch.float16 else torch.bfloat16
    given = [x for x in (options.q_descale, options.k_descale) if x is not None]
    product = given[0] * given[1] if len(given) == 2 else given[0] if given else None
    options = options._replace(q_descale=None, k_descale=product)
    return q.view(torch.float8_e4m3fn).to(wide), options


def _of_sinks(
    sinks: Tensor | None, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """The gradient of the sinks, whose value is 0: the sum of p (dlse - dout . out) over rows."""
    assert sinks is not None
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    below = torch.where(sinks[:, None] == lse, 0.0, sinks[:, None] - lse)
    p = below.exp().masked_fill(lse == -torch.inf, 0.0)
    return (p * ((0.0 if dlse is None else dlse) - delta)).sum((0, 2))
