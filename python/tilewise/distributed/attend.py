"""From a problem on which all ranks agree to the method that computes it."""

from __future__ import annotations

from torch import Tensor

from .. import _torch
from .allgather import AllGather
from .core import Attend, Local, Method
from .exchange import transport_of
from .problem import Problem
from .ulysses import Ulysses, own_bias


def attend(p: Problem, name: str) -> tuple[Tensor, Tensor | None]:
    """This rank's rows of out [B, rows, Hq, Dv] and, if requested, lse [B, Hq, rows]."""
    options = _torch.score_options(p.q, p.q.shape[0], p.request)
    bias, method = p.bias, _method(p, name)
    if bias is not None:
        if name == "ulysses":
            bias = own_bias(bias, p.bias_has_rows, p.heads[0], p.ranks, p.rows)
        bias = _torch._full_keys(bias, p.size_k)
    result = Attend.apply(
        method, options._replace(sinks=None, scale_tensor=None), p.request.return_lse,
        p.q, p.k, p.v, bias, options.sinks, options.scale_tensor,
    )  # fmt: skip
    return result if p.request.return_lse else (result, None)


def _method(p: Problem, name: str) -> Method:
    transport = transport_of(p.ranks, p.q.device)
    if name == "allgather":
        return AllGather(p.ranks, p.rows, p.keys, p.request.window, transport)
    return Ulysses(p.ranks, p.rows, p.keys, Local(), p.request.return_lse, transport)
