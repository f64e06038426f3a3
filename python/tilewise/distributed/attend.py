"""From a problem on which all ranks agree to the method that computes it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check, _torch
from .._request import Request, Shard
from .allgather import AllGather
from .core import Attend, Method
from .dense import DenseCut
from .exchange import Messages
from .grid import Grid, inside_host, rows_of_hosts
from .keys import key_plan
from .packed import PackedCut
from .packed_call import Reordered
from .problem import BOTH_RING, Cut, Problem
from .ranks import Ranks, exchanging
from .ring import Ring
from .transport import transport_of
from .ulysses import Ulysses, own_bias


def attend(p: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, lse [B, Hq, rows]."""
    request = _as_shard(p)
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
    q, k, v = p.q, p.k, p.v
    if _check.is_float8(k.dtype):  # no backend moves tensors of float8
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    orders = None
    if name != "ulysses" and isinstance(p.cut, PackedCut):
        orders = (p.cut.by_chunk() if name == "ring" else p.cut).orders(p.ranks.rank, q.device)
        q = Reordered.apply(q, orders[0], False)
        k, v = (Reordered.apply(x, orders[1], False) for x in (k, v))
    result = Attend.apply(
        method, options._replace(sinks=None, scale_tensor=None), p.request.return_lse,
        q, k, v, bias, options.sinks, options.scale_tensor,
    )  # fmt: skip
    out, lse = result if p.request.return_lse else (result, None)
    if orders is not None:
        out = Reordered.apply(out, orders[0], True)
        if lse is not None:
            lse = Reordered.apply(lse.transpose(1, 2), orders[0], True).transpose(1, 2)
    return out, lse


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
    device, rank = p.q.device, p.ranks.rank
    if p.grid is not None:
        return _both(p, p.grid, name)
    if name == "ring":
        return _ring(p.ranks, p.cut.by_chunk(), device)
    transport = transport_of(p.ranks, device)
    if name == "allgather":
        keys, calls = p.cut.calls()
        plan = key_plan(rank, keys, calls)
        return AllGather(p.ranks, p.size_q, plan, p.cut.local(rank, device), transport)
    whole = p.cut.whole(device)
    runs = p.cut.row_runs, p.cut.key_runs
    return Ulysses(p.ranks, *runs, whole, p.request.return_lse, transport)


def _ring(ranks: Ranks, cut: Cut, device: torch.device) -> Ring:
    meetings = [
        [cut.meetings(rank, owner) for owner in range(ranks.world)] for rank in range(ranks.world)
    ]
    local = [[cut.local_of(m.call, device) for m in own] for own in meetings[ranks.rank]]
    return Ring(ranks, cut.key_runs, meetings, local)


def _both(p: Problem, grid: Grid, name: str) -> Ulysses:
    """The method "ulysses" inside hosts around "allgather" or "ring" between them."""
    device, rank = p.q.device, grid.between.rank
    rows, keys = p.cut.row_runs, p.cut.key_runs
    assert isinstance(p.cut, DenseCut)
    hosts = p.cut._replace(row_runs=rows_of_hosts(rows, grid), key_runs=rows_of_hosts(keys, grid))
    between: Method
    if name == BOTH_RING:
        between = _ring(grid.between, hosts, device)
    else:
        plan = key_plan(rank, *hosts.calls())
        local = hosts.local(rank, device)
        between = AllGather(grid.between, p.size_q, plan, local, Messages(grid.between))
    return Ulysses(
        grid.inside, inside_host(rows, grid), inside_host(keys, grid), between,
        p.request.return_lse, transport_of(grid.inside, device),
    )  # fmt: skip
