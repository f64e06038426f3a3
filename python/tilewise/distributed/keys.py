"""The keys that the rows of each rank see, and the way of those keys and their gradients.

Causal masks and windows are aligned bottom-right, so a run of consecutive rows is an ordinary call
over the keys up to that of its last row. A rank has at most two runs per sequence. Every row sees
all of its keys in one call, so no partial outputs are merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .exchange import Piece, Table, table_of
from .layout import Run, Runs, length
from .ranks import Ranks

Bounds: TypeAlias = tuple[int | None, int | None]  # a window


class Span(NamedTuple):
    """The keys that a run of rows may see, and the window that limits each row to its own keys."""

    begin: int
    end: int
    window: Bounds


def span_of(run: Run, size_q: int, size_k: int, window: Bounds) -> Span:
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


class Call(NamedTuple):
    """One call: the rows among those of the rank, and the keys that they see."""

    rows: Run
    span: Span


def calls_of(runs: Runs, size_q: int, size_k: int, window: Bounds) -> tuple[Call, ...]:
    """The calls of a rank with these runs of rows: one per run, or one if no row has a mask."""
    if window == (None, None):
        return (Call((0, length(runs)), Span(0, size_k, window)),)
    result, at = [], 0
    for begin, end in runs:
        rows = (at, at + end - begin)
        at = rows[1]
        result.append(Call(rows, span_of((begin, end), size_q, size_k, window)))
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
    covered: bool  # whether the messages fill all parts


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


@lru_cache(maxsize=256)
def key_plan(rank: int, rows: tuple[Runs, ...], keys: tuple[Runs, ...], window: Bounds) -> KeyPlan:
    """The plan of one rank for the runs of rows and keys of all ranks."""
    ranks = Ranks(None, rank, len(rows))
    size_q, size_k = (sum(map(length, runs)) for runs in (rows, keys))
    calls = [calls_of(runs, size_q, size_k, window) for runs in rows]
    intervals = [intervals_of(own) for own in calls]

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

    sums: list[Sums] = []
    slots: dict[tuple[int, int, int], int] = {}  # by run of this rank, sender and call
    at = total = 0
    for index, (begin, end) in enumerate(keys[rank]):
        parts = filled = 0
        for sender, theirs in enumerate(calls):
            for number, call in enumerate(theirs):
                common = min(end, call.span.end) - max(begin, call.span.begin)
                if common > 0:
                    slots[index, sender, number] = total + parts * (end - begin)
                    parts, filled = parts + 1, filled + common
        full = filled == parts * (end - begin)
        sums.append(Sums((at, at + end - begin), total, parts, full))
        at, total = at + end - begin, total + parts * (end - begin)

    def scattered(source: int, target: int) -> Iterator[Piece]:
        for item in (0, 1):
            for number, call in enumerate(calls[source]):
                for index, (begin, end) in enumerate(keys[target]):
                    first, last = max(begin, call.span.begin), min(end, call.span.end)
                    if first < last:
                        slot = slots[index, source, number] if target == rank else 0
                        to, where = slot + first - begin, first - call.span.begin
                        yield Piece(2 * number + item, where, item, to, last - first)

    return KeyPlan(
        calls[rank],
        intervals[rank],
        table_of(ranks, gathered),
        table_of(ranks, scattered),
        tuple(sums),
    )


@lru_cache(maxsize=4096)
def moved_keys(
    rank: int, rows: tuple[Runs, ...], keys: tuple[Runs, ...], window: Bounds
) -> tuple[int, int]:
    """How many keys a rank receives from others, and how many parts of gradients of its own."""
    plan = key_plan(rank, rows, keys, window)
    to, back = (
        sum(piece.rows for peer, pieces in enumerate(table.receives) if peer != rank
            for piece in pieces if piece.target == 0)
        for table in (plan.gather, plan.scatter)
    )  # fmt: skip
    return to, back


@lru_cache(maxsize=256)
def groups_of(heads: int, work: int, least: int, most: int = 8) -> int:
    """Into how many groups of equally many heads the heads are cut, of which one is computed while
    the next one travels. `work` is the work of all heads, of which each group has at least `least`.
    """
    for count in range(min(heads, most), 1, -1):
        if heads % count == 0 and work // count >= least:
            return count
    return 1
