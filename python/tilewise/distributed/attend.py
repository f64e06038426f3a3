"""From a problem on which all ranks agree to the method that computes it."""

from __future__ import annotations

from torch import Tensor

from .. import _torch
from .allgather import AllGather
from .core import Attend, Method
from .keys import key_plan
from .packed import PackedCut, Reordered
from .problem import Problem
from .transport import transport_of
from .ulysses import Ulysses, own_bias


def attend(p: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, lse [B, Hq, rows]."""
    options = _torch.score_options(p.q, p.sequences, p.request)
    bias, method = p.bias, _method(p, name)
    if bias is not None:
        if name == "ulysses":
            bias = own_bias(bias, p.bias_has_rows, p.heads[0], p.ranks, p.cut.row_runs)
        bias = _torch._full_keys(bias, p.size_k)
    q, k, v = p.q, p.k, p.v
    orders = None
    if name == "allgather" and isinstance(p.cut, PackedCut):
        orders = p.cut.orders(p.ranks.rank, q.device)
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


def _method(p: Problem, name: str) -> Method:
    device, rank = p.q.device, p.ranks.rank
    transport = transport_of(p.ranks, device)
    if name == "allgather":
        keys, calls = p.cut.calls()
        plan = key_plan(rank, keys, calls)
        return AllGather(p.ranks, p.size_q, plan, p.cut.local(rank, device), transport)
    whole = p.cut.whole(device)
    runs = p.cut.row_runs, p.cut.key_runs
    return Ulysses(p.ranks, *runs, whole, p.request.return_lse, transport)
