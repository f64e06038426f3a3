"""The time that a method takes: a model of the bytes, messages and products of the busiest rank,
and of its host.

The first group of heads travels before anything is computed; each other group travels while an
earlier one is computed. The host starts the groups one after the other, ahead of the GPU.
``method="auto"`` and bench/distributed_model.py use the same formulas.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from . import allgather, ulysses
from .keys import AllCalls, Meeting, flop_of, moved_keys
from .layout import Runs
from .ulysses import key_heads, query_heads


class Speeds(NamedTuple):
    """The bytes that a rank receives and its operations, per second, and fixed costs."""

    bytes: float
    flops: float
    message: float  # seconds per message
    host: float  # seconds to start the exchanges and kernels of a group, in a forward or a backward


# gloo on one host, a few cores; assumed. What the host does there is part of the other costs.
CPU = Speeds(2e9, 1e11, 1e-4, 0.0)
# NCCL over NVLink, forward and backward in bf16 on an H200: docs/results/distributed-links.json has
# the sources. The cost of a message is assumed.
GPU = Speeds(3.7e11, 6.8e14, 2e-6, 1e-3)


class Shape(NamedTuple):
    """The properties of a call that decide its cost, besides the cut of the sequence."""

    batch: int
    heads: tuple[int, int]  # of queries, of keys
    columns: tuple[int, int]  # of q and k, of v
    element_size: tuple[int, int, int]  # bytes of an element of q, of k and v, of out
    device: torch.device
    differentiable: bool
    return_lse: bool = False


class Cut(Hashable, Protocol):
    """The part of ``problem.Cut`` that the cost depends on."""

    @property
    def rows(self) -> list[int]:
        """The number of rows of each rank."""

    @property
    def keys(self) -> list[int]:
        """The number of keys of each rank."""

    def pairs(self) -> list[int]:
        """The number of (row, key) pairs that the rows of each rank see."""

    def calls(self) -> tuple[tuple[Runs, ...], AllCalls]:
        """The runs of keys and the calls of each rank, for "allgather"."""

    def by_chunk(self) -> Cut:
        """The cut whose ``meetings`` are those of "ring"."""

    def meetings(self, rank: int, owner: int, /) -> tuple[Meeting, ...]:
        """The calls of a rank over the keys of another."""


class Work(NamedTuple):
    """The busiest rank's work, with the backward if the call is differentiable."""

    bytes: float  # received
    messages: int
    flops: float
    groups: int  # of heads, of which one is computed while the next one travels
    passes: int  # 2 with the backward


def seconds(moving: float, computing: float, groups: int) -> float:
    """The time of a pipeline of groups: moving is hidden, except that of the first group."""
    return moving / groups + max(moving * (groups - 1) / groups, computing)


def with_host(time: float, groups: int, passes: int, host: float) -> float:
    """The time if the host needs `host` seconds to start a group: the first group of each pass
    waits for it, and all groups together take at least as long as it takes to start them.
    """
    return max(time + passes * host, passes * groups * host)


def predicted(work: Work, speeds: Speeds) -> float:
    """The time of the busiest rank in seconds."""
    moving = work.bytes / speeds.bytes + work.messages * speeds.message
    time = seconds(moving, work.flops / speeds.flops, work.groups)
    return with_host(time, work.groups, work.passes, speeds.host)


def _passes(shape: Shape) -> int:
    return 2 if shape.differentiable else 1


def _flops(shape: Shape, pairs: int, heads: int) -> float:
    # The backward has 5 products for the forward's 2.
    passes = 3.5 if shape.differentiable else 1.0
    return flop_of(pairs, shape.batch, heads, shape.columns) * passes


@lru_cache(maxsize=256)
def ulysses_work(shape: Shape, cut: Cut) -> Work:
    """The work of "ulysses"."""
    rows, keys, (heads_q, heads_kv) = cut.rows, cut.keys, shape.heads
    world, (d, dv) = len(rows), shape.columns
    of_q = [len(own) for own in query_heads(heads_q, world)]
    of_kv = [len(key_heads(own, heads_q // heads_kv)) for own in query_heads(heads_q, world)]
    copies, size_q, size_k = sum(of_kv), sum(rows), sum(keys)
    worst, (element, key_element, out_element) = 0.0, shape.element_size
    for rank in range(world):
        other_rows, other_keys = size_q - rows[rank], size_k - keys[rank]
        other_heads = heads_q - of_q[rank]
        total = other_rows * of_q[rank] * d  # q
        if shape.differentiable:
            total += other_rows * of_q[rank] * dv + rows[rank] * other_heads * d  # dout, dq
            total += keys[rank] * (copies - of_kv[rank]) * (d + dv)  # dk, dv
        size = float(total * element) + rows[rank] * other_heads * dv * out_element
        size += other_keys * of_kv[rank] * (d + dv) * key_element  # k, v
        if shape.return_lse:  # lse and its gradient, in float32
            size += 4.0 * rows[rank] * other_heads
            size += 4.0 * other_rows * of_q[rank] if shape.differentiable else 0.0
        worst = max(worst, size)
    pairs = sum(cut.pairs())
    groups = ulysses.groups(pairs, shape.batch, shape.heads, (d, dv), world, shape.device)
    messages = (4 if shape.differentiable else 2) * groups * (world - 1)
    flops = _flops(shape, pairs, max(of_q))
    return Work(worst * shape.batch, messages, flops, groups, _passes(shape))


@lru_cache(maxsize=256)
def allgather_work(shape: Shape, cut: Cut) -> Work:
    """The work of "allgather"."""
    heads_q, heads_kv = shape.heads
    columns = shape.batch * heads_kv * sum(shape.columns)
    keys, calls = cut.calls()
    element, key_element, _ = shape.element_size
    of_rows = max(
        2 * to * key_element + back * element if shape.differentiable else to * key_element
        for to, back in moved_keys(keys, calls)
    )
    received = float(of_rows * columns)
    world = len(keys)
    pairs = max(cut.pairs())
    groups = allgather.groups(pairs, shape.batch, shape.heads, shape.columns, shape.device)
    messages = (3 if shape.differentiable else 1) * groups * (world - 1)
    return Work(received, messages, _flops(shape, pairs, heads_q), groups, _passes(shape))


@lru_cache(maxsize=256)
def ring_work(shape: Shape, cut: Cut) -> Work:
    """The work of "ring"; a group is a step."""
    heads_q, heads_kv = shape.heads
    columns = shape.batch * heads_kv * sum(shape.columns)
    keys, world, by_chunk = cut.keys, len(cut.keys), cut.by_chunk()
    element, key_element, _ = shape.element_size
    worst, steps = 0.0, 0
    for rank in range(world):
        others = [other for other in range(world) if other != rank]
        seen = [other for other in others if by_chunk.meetings(rank, other)]
        seen_by = sum(1 for other in others if by_chunk.meetings(other, rank))
        size = float(sum(keys[other] for other in seen) * key_element)
        if shape.differentiable:
            size = 2 * size + seen_by * keys[rank] * element
        worst, steps = max(worst, size), max(steps, len(seen))
    messages = 2 * (3 if shape.differentiable else 1) * steps
    flops = _flops(shape, max(cut.pairs()), heads_q)
    return Work(worst * columns, messages, flops, max(1, steps), _passes(shape))
