"""From a problem on which all ranks agree to the method that computes it."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check, _torch
from .._request import Request, Shard
from .allgather import AllGather
from .core import Attend, Local, Method
from .exchange import Messages, Transport
from .grid import Grid, inside_host
from .keys import Meeting, key_plan
from .packed import PackedCut
from .packed_call import InOrder
from .problem import BOTH_RING, Cut, Problem
from .ranks import Ranks, exchanging, largest_of_ranks
from .ring import Ring
from .transport import transport_of
from .ulysses import Ulysses, own_bias


def attend(p: Problem, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, of lse [B, Hq, rows], and
    max_logits [sequences, Hq] of all ranks.
    """
    # No backend moves float8, so it travels as bytes, whose dtype does not tell that of out.
    request = _as_shard(p)._replace(out_dtype=p.out_dtype)
    options = _torch.score_options(p.q, p.sequences, request)
    options = _torch.with_descale(options, p.q, p.k, request, p.sequences)
    bias, method = p.bias, _method(p, name)
    if bias is not None:
        if p.grid is not None:
            runs = inside_host(p.cut.row_runs, p.grid)
            bias = own_bias(bias, p.bias_has_rows, p.heads[0], p.grid.inside, runs)
        elif name == "ulysses":
            bias = own_bias(bias, p.bias_has_rows, p.heads[0], p.ranks, p.cut.row_runs)
        bias = _torch._full_keys(bias, max(bias.shape[3], p.longest_k))
    q, k, v = (x.view(torch.uint8) if _check.is_float8(x.dtype) else x for x in (p.q, p.k, p.v))
    max_logits = None
    if p.request.return_max_logits:
        max_logits = q.new_full((p.sequences, p.heads[0]), -torch.inf, dtype=torch.float32)
    result = Attend.apply(
        method, options._replace(sinks=None, scale_tensor=None), p.request.return_lse,
        q, k, v, bias, options.sinks, options.scale_tensor, max_logits,
    )  # fmt: skip
    out, lse = result if p.request.return_lse else (result, None)
    if max_logits is not None:
        max_logits = largest_of_ranks(max_logits, p.ranks, "max_logits")
    # With precise_backward, the other methods return the float32 out that their backward gets.
    return out.to(p.out_dtype), lse, max_logits


def _as_shard(p: Problem) -> Request:
    """The request for parts of the heads, with the seed of dropout that rank 0 has drawn.

    All ranks draw, as the unsharded call does, so that generators that were equal stay equal.
    """
    shard = Shard(heads_q_total=p.heads[0])
    if p.request.dropout_p > 0.0:
        state = _torch.draw_dropout_state(p.q.device)
        with exchanging("the seed of dropout", p.ranks):
            dist.broadcast(state, group_src=0, group=p.ranks.group)
        shard = shard._replace(dropout_state=state)
    return p.request._replace(shard=shard)


def _method(p: Problem, name: str) -> Method:
    device = p.q.device
    if p.grid is not None:
        return _both(p, p.grid, name)
    if name != "ulysses":
        transport = transport_of(p.ranks, device)
        return _over_rows(p.ranks, p.cut, device, None if name == "ring" else transport)
    return Ulysses(
        p.ranks, p.cut.row_runs, p.cut.key_runs, sum(p.cut.pairs()), p.cut.whole(device),
        p.request.return_lse, p.out_dtype, transport_of(p.ranks, device),
    )  # fmt: skip


def _over_rows(
    ranks: Ranks, cut: Cut, device: torch.device, transport: Transport | None, parts: int = 1
) -> Method:
    """The method "allgather", or "ring" without a transport; see ``PackedCut.orders`` for parts."""
    method: Method
    if transport is None:
        cut = cut.by_chunk()
        method = Ring(ranks, cut.key_runs, *_meetings(cut, ranks.rank, ranks.world, device))
    else:
        plan = key_plan(ranks.rank, *cut.calls())
        local = cut.local(ranks.rank, device)
        method = AllGather(ranks, max(cut.pairs()), plan, local, transport)
    if isinstance(cut, PackedCut):
        return InOrder(method, cut.orders(ranks.rank, device, parts))
    return method


@lru_cache(maxsize=32)
def _meetings(
    cut: Cut, rank: int, world: int, device: torch.device
) -> tuple[list[list[tuple[Meeting, ...]]], list[list[Local]]]:
    """The meetings of all ranks, and the calls of this rank, by owner of the keys."""
    meetings = [[cut.meetings(each, owner) for owner in range(world)] for each in range(world)]
    return meetings, [[cut.local_of(m.call, device) for m in own] for own in meetings[rank]]


def _both(p: Problem, grid: Grid, name: str) -> Ulysses:
    """The method "ulysses" inside hosts around "allgather" or "ring" between them."""
    rows, keys = p.cut.row_runs, p.cut.key_runs
    transport = None if name == BOTH_RING else Messages(grid.between)
    cut = p.cut.of_hosts(grid)
    between = _over_rows(grid.between, cut, p.q.device, transport, grid.inside.world)
    return Ulysses(
        grid.inside, inside_host(rows, grid), inside_host(keys, grid), max(cut.pairs()), between,
        p.request.return_lse, p.out_dtype, transport_of(grid.inside, p.q.device),
    )  # fmt: skip
