"""The keys that the rows of each rank see, and how those keys and their gradients travel.

A run of consecutive rows is one call over the keys that it sees, with a diagonal that says where
those lie in the whole sequence. A rank has at most two runs per sequence. With "allgather" every
row sees all of its keys in one call, so no partial outputs are merged. With "ring" a run has a call
per owner of keys (``Meeting``), whose partial outputs are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from .exchange import Piece, Table, table_of
from .layout import Run, Runs, length
from .ranks import Ranks

if TYPE_CHECKING:
    from .mask_parts import WholeMask

Bounds: TypeAlias = tuple[int | None, int | None]  # a window


class Span(NamedTuple):
    """The keys that a run of rows may see.

    The diagonal is that of ``_request.Shard``: added to the alignment of the call over these keys,
    it gives that of the whole sequence.
    """

    begin: int
    end: int
    diagonal: int

    def between(self, begin: int, end: int) -> Span:
        """The span of some of the keys."""
        return Span(begin, end, self.diagonal + self.end - end)


def span_of(run: Run, size_q: int, size_k: int, window: Bounds, seen: Run | None = None) -> Span:
    """The keys of a run of rows; a mask shows none outside of `seen`.

    Row i of the whole sequence is aligned with key i + size_k - size_q. A call over the keys before
    `end` aligns the last row of the run with key end - 1 instead. With causal attention that is the
    same key, so the diagonal is 0 and the call is an ordinary one.
    """
    left, right = window
    aligned = run[1] + size_k - size_q  # one past the key of the last row
    end = size_k if right is None else min(size_k, aligned + right)
    if end <= 0 or run[0] == run[1]:
        return Span(0, 0, 0)
    begin = 0 if left is None else max(0, run[0] + size_k - size_q - left)
    if seen is not None:
        begin, end = max(begin, seen[0]), min(end, seen[1])
        if begin >= end:
            return Span(0, 0, 0)
    return Span(min(begin, end), end, aligned - end)


def visible_pairs(run: Run, size_q: int, size_k: int, window: Bounds) -> int:
    """The number of (row, key) pairs of the run that the window leaves visible."""
    left, right = window
    first, last = run[0] + size_k - size_q, run[1] + size_k - size_q  # aligned keys
    rows = run[1] - run[0]
    upper = (
        rows * size_k if right is None else _clipped(first + right + 1, last + right + 1, size_k)
    )
    lower = 0 if left is None else _clipped(first - left, last - left, size_k)
    return upper - lower


def _clipped(first: int, last: int, most: int) -> int:
    """The sum of min(max(i, 0), most) over i from first to before last."""
    begin, end = min(max(first, 0), most), min(max(last, 0), most)
    above = max(0, last - max(first, most))
    return (begin + end - 1) * (end - begin) // 2 + above * most


class Call(NamedTuple):
    """One call: the rows among those of the rank, and the keys that they see."""

    rows: Run
    span: Span
    first: int  # the first row, in the whole sequence

    @property
    def place(self) -> tuple[Run, Run]:
        """The rows and keys within the whole sequence."""
        rows = self.first, self.first + self.rows[1] - self.rows[0]
        return rows, (self.span.begin, self.span.end)


class Meeting(NamedTuple):
    """A call of some rows of a rank over some keys of another; ``Cut.local_of`` takes ``call``."""

    rows: Run  # among those of the rank
    keys: Run  # among those of the other rank
    call: Any


@lru_cache(maxsize=1024)
def meetings_of(
    rows: Runs, keys: Runs, size_q: int, size_k: int, window: Bounds, mask: WholeMask | None
) -> tuple[Meeting, ...]:
    """The calls of a rank with these runs of rows over the keys of a rank with those runs."""
    result, at = [], 0
    for begin, end in rows:
        own, first_key = (at, at + end - begin), 0
        at = own[1]
        seen = None if mask is None else mask.seen((begin, end), size_k)
        span = span_of((begin, end), size_q, size_k, window, seen)
        for key_begin, key_end in keys:
            low, high = max(span.begin, key_begin), min(span.end, key_end)
            if low < high and begin < end:
                call = Call(own, span.between(low, high), begin)
                of_keys = (first_key + low - key_begin, first_key + high - key_begin)
                result.append(Meeting(own, of_keys, call))
            first_key += key_end - key_begin
    return tuple(result)


@lru_cache(maxsize=1024)
def calls_of(
    runs: Runs, size_q: int, size_k: int, window: Bounds, by_place: bool,
    mask: WholeMask | None = None,
) -> tuple[Call, ...]:  # fmt: skip
    """The calls of a rank with these runs of rows: one per run, or only one if there is no
    window and scores do not depend on the place of a row (`by_place`).
    """
    if window == (None, None) and not by_place:
        return (Call((0, length(runs)), Span(0, size_k, 0), 0),)
    result, at = [], 0
    for begin, end in runs:
        rows = (at, at + end - begin)
        at = rows[1]
        seen = None if mask is None else mask.seen((begin, end), size_k)
        result.append(Call(rows, span_of((begin, end), size_q, size_k, window, seen), begin))
    return tuple(result)


def intervals_of(calls: tuple[Call, ...]) -> Runs:
    """The keys that any of the calls sees, as increasing intervals with gaps between them."""
    merged: list[Run] = []
    for begin, end in sorted((c.span.begin, c.span.end) for c in calls):
        if begin == end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return tuple(merged)


def place(intervals: Runs, key: int) -> int:
    """The place of a key among the keys of the intervals."""
    at = 0
    for begin, end in intervals:
        if begin <= key < end:
            return at + key - begin
        at += end - begin
    return at


class Sums(NamedTuple):
    """How the gradients of a run of keys are summed: from `parts` parts, which lie end to end."""

    rows: Run  # among the keys of the rank
    at: int  # the first row of the first part
    parts: int


class KeyPlan(NamedTuple):
    """How keys travel to the ranks that see them, and their gradients back.

    The published tensors of ``gather`` are k and v; the received ones have the keys of the
    intervals. Those of ``scatter`` are the gradients of k and v of each call; the received ones
    have the parts of the sums.
    """

    calls: tuple[Call, ...]
    intervals: Runs
    gather: Table
    scatter: Table
    sums: tuple[Sums, ...]
    gaps: Runs  # rows of the parts that no message fills
    most_keys: int  # of any rank
    most_parts: int  # rows of all parts that any rank receives


class GradientPart(NamedTuple):
    """The gradients of some keys of a run of their owner, from one call of a rank."""

    run: int
    sender: int
    call: int
    begin: int  # the keys from begin to before end
    end: int
    at: int  # where the run begins in the part, among all parts of the owner


AllCalls: TypeAlias = tuple[tuple[Call, ...], ...]  # of each rank


def _parts_of(own: Runs, calls: AllCalls) -> tuple[list[GradientPart], list[Sums]]:
    """The parts of the gradients of a rank's keys, by run, rank and call, and their sums."""
    parts: list[GradientPart] = []
    sums: list[Sums] = []
    row = at = 0
    for index, (begin, end) in enumerate(own):
        first = len(parts)
        for sender, theirs in enumerate(calls):
            for number, call in enumerate(theirs):
                low, high = max(begin, call.span.begin), min(end, call.span.end)
                if low < high:
                    place = at + (len(parts) - first) * (end - begin)
                    parts.append(GradientPart(index, sender, number, low, high, place))
        count = len(parts) - first
        sums.append(Sums((row, row + end - begin), at, count))
        row, at = row + end - begin, at + count * (end - begin)
    return parts, sums


def _gaps(own: Runs, parts: list[GradientPart]) -> Runs:
    """The rows of the parts that no message fills."""
    gaps = []
    for part in parts:
        begin, end = own[part.run]
        gaps.append((part.at, part.at + part.begin - begin))
        gaps.append((part.at + part.end - begin, part.at + end - begin))
    return tuple(gap for gap in gaps if gap[0] < gap[1])


@lru_cache(maxsize=256)
def key_plan(rank: int, keys: tuple[Runs, ...], calls: AllCalls) -> KeyPlan:
    """The plan of one rank for the runs of keys and the calls of all ranks."""
    ranks = Ranks(None, rank, len(keys))
    intervals = [intervals_of(own) for own in calls]
    parts = [_parts_of(own, calls) for own in keys]

    def gathered(source: int, target: int) -> Iterator[Piece]:
        for item in (0, 1):
            at = 0
            for begin, end in keys[source]:
                for low, high in intervals[target]:
                    first, last = max(begin, low), min(end, high)
                    if first < last:
                        to = place(intervals[target], first)
                        yield Piece(item, at + first - begin, item, to, last - first)
                at += end - begin

    def scattered(source: int, target: int) -> Iterator[Piece]:
        for part in parts[target][0]:
            if part.sender == source:
                where = part.begin - calls[source][part.call].span.begin
                to = part.at + part.begin - keys[target][part.run][0]
                for item in (0, 1):
                    yield Piece(2 * part.call + item, where, item, to, part.end - part.begin)

    return KeyPlan(
        calls[rank],
        intervals[rank],
        table_of(ranks, gathered),
        table_of(ranks, scattered),
        tuple(parts[rank][1]),
        _gaps(keys[rank], parts[rank][0]),
        max(map(length, keys)),
        max(sum(s.parts * (s.rows[1] - s.rows[0]) for s in sums) for _, sums in parts),
    )


@lru_cache(maxsize=64)
def moved_keys(keys: tuple[Runs, ...], calls: AllCalls) -> list[tuple[int, int]]:
    """How many keys each rank receives from others, and how many gradients of keys of its own."""
    result = []
    for rank, own in enumerate(keys):
        seen = intervals_of(calls[rank])
        mine = sum(
            max(0, min(end, high) - max(begin, low)) for begin, end in own for low, high in seen
        )
        parts, _ = _parts_of(own, calls)
        back = sum(part.end - part.begin for part in parts if part.sender != rank)
        result.append((length(seen) - mine, back))
    return result


_MOST_GROUPS = {"cuda": 8, "cpu": 4}
# 1.3 ms of an H200. The host takes about as long to start the kernels and copies of a group's
# forward. On a CPU, where any group occupies all cores, groups only save memory.
_LEAST_FLOP = {"cuda": 1e12, "cpu": 0.0}


def flop_of(pairs: int, batch: int, heads: int, columns: tuple[int, int]) -> float:
    """The operations of a forward; `pairs` of a row and a key are those of one head."""
    return 2.0 * sum(columns) * batch * pairs * heads


def groups_of(heads: int, flop: float, device: torch.device) -> int:
    """Into how many groups of equally many heads the heads are cut, of which one is computed while
    the next one travels; `flop` are the operations of the forward of all heads.
    """
    most, least = _MOST_GROUPS[device.type], _LEAST_FLOP[device.type]
    for count in range(min(heads, most), 1, -1):
        if heads % count == 0 and flop >= count * least:
            return count
    return 1
