"""Which method a call uses: a model of the bytes, messages and products of the busiest rank.

The first group of heads travels before anything is computed; the other groups travel meanwhile. The
speeds are assumptions, not measurements: they only have to order the methods of one call.
"""

from __future__ import annotations

from typing import NamedTuple

from . import allgather, ulysses
from .keys import moved_keys
from .packed import PackedCut
from .problem import BOTH, METHODS, Problem
from .ulysses import key_heads, query_heads


class Speeds(NamedTuple):
    """The work that a rank is assumed to do per second, and the cost of a message."""

    bytes: float
    flops: float
    message: float  # seconds


CPU = Speeds(2e9, 1e11, 1e-4)  # gloo on one host, a few cores
GPU = Speeds(1.5e11, 4e14, 1e-5)  # NCCL over NVLink, 16-bit tensor cores


class Estimate(NamedTuple):
    """The busiest rank's work by one method, with the backward if the call is differentiable."""

    bytes: float  # received
    messages: int
    flops: float
    seconds: float


class Choice(NamedTuple):
    """The method of a call, the reason, and the estimates that were compared.

    Printed, it is a table with one line per method.
    """

    method: str
    reason: str
    estimates: dict[str, Estimate]
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"method: {self.method} ({self.reason})"]
        for name, e in self.estimates.items():
            lines.append(
                f"  {name}: {e.bytes / 1e6:.3f} MB received in {e.messages} messages, "
                f"{e.flops / 1e9:.3f} GFLOP, predicted {e.seconds * 1e3:.3f} ms on the busiest rank"
            )
        lines += [f"  {name}: not exact here: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


def choose(p: Problem, method: str) -> Choice:
    """The method that a call uses; the same on all ranks.

    Raises:
        ValueError: the method that the call names cannot compute it exactly.
    """
    if p.ranks.world == 1:
        return Choice("local", "one rank has the whole sequence", {}, {})
    if p.grid is not None:
        return Choice(BOTH, "the mesh has two dimensions", {}, {})
    why = _why_not_allgather(p)
    refused = {"allgather": why} if why else {}
    if method in refused:
        raise ValueError(
            f"{why}, which method='{method}' cannot compute exactly; method='ulysses' can"
        )
    estimates = {"ulysses": _ulysses(p), "allgather": _allgather(p)}
    if method != "auto":
        return Choice(method, "named by the call", estimates, refused)
    possible = [name for name in METHODS if name not in refused]
    best = min(possible, key=lambda name: estimates[name].seconds)
    reason = "the lower predicted time" if len(possible) > 1 else "the only exact one"
    return Choice(best, reason, estimates, refused)


def _why_not_allgather(p: Problem) -> str:
    """The argument that this method cannot compute exactly, or an empty string."""
    if p.request.dropout_p > 0.0 and isinstance(p.cut, PackedCut):
        # The operators count rows and keys from the same offsets in all sequences of a call.
        return f"dropout_p is {p.request.dropout_p} with packed sequences"
    return ""


def _estimate(
    p: Problem, received: float, messages: int, pairs_heads: float, groups: int
) -> Estimate:
    columns = p.q.shape[3] + p.v.shape[3]
    # The backward has 5 products for the forward's 2.
    flops = 2.0 * columns * p.q.shape[0] * pairs_heads * (3.5 if p.differentiable else 1.0)
    speeds = GPU if p.q.device.type == "cuda" else CPU  # the ranks agree on the device
    moving = received / speeds.bytes + messages * speeds.message
    computing = flops / speeds.flops
    # The first group of heads travels before anything is computed.
    seconds = moving / groups + max(moving * (groups - 1) / groups, computing)
    return Estimate(received, messages, flops, seconds)


def _ulysses(p: Problem) -> Estimate:
    world, (heads_q, heads_kv) = p.ranks.world, p.heads
    of_q = [len(own) for own in query_heads(heads_q, world)]
    of_kv = [len(key_heads(own, heads_q // heads_kv)) for own in query_heads(heads_q, world)]
    rows, keys, copies = p.cut.rows, p.cut.keys, sum(of_kv)
    d, dv = p.q.shape[3], p.v.shape[3]
    worst = 0.0
    for rank in range(world):
        other_rows, other_keys = p.size_q - rows[rank], p.size_k - keys[rank]
        other_heads = heads_q - of_q[rank]
        total = other_rows * of_q[rank] * d + other_keys * of_kv[rank] * (d + dv)  # q, k, v
        total += rows[rank] * other_heads * dv  # out
        if p.differentiable:
            total += other_rows * of_q[rank] * dv + rows[rank] * other_heads * d  # dout, dq
            total += keys[rank] * (copies - of_kv[rank]) * (d + dv)  # dk, dv
        size = float(total * p.q.element_size())
        if p.request.return_lse:  # lse and its gradient, in float32
            size += 4.0 * rows[rank] * other_heads
            size += 4.0 * other_rows * of_q[rank] if p.differentiable else 0.0
        worst = max(worst, size)
    groups = ulysses.groups(p.size_q, p.q.shape[0], p.heads, world, p.q.device)
    messages = (4 if p.differentiable else 2) * groups * (world - 1)
    pairs = sum(p.cut.pairs())
    return _estimate(p, worst * p.q.shape[0], messages, pairs * max(of_q), groups)


def _allgather(p: Problem) -> Estimate:
    world, (heads_q, heads_kv) = p.ranks.world, p.heads
    columns = p.q.shape[0] * heads_kv * (p.q.shape[3] + p.v.shape[3])
    keys, calls = p.cut.calls()
    rows = max(2 * to + back if p.differentiable else to for to, back in moved_keys(keys, calls))
    received = float(rows * columns * p.q.element_size())
    pairs = max(p.cut.pairs())
    groups = allgather.groups(p.size_q, p.q.shape[0], p.heads, world, p.q.device)
    messages = (3 if p.differentiable else 1) * groups * (world - 1)
    return _estimate(p, received, messages, pairs * heads_q, groups)
