"""Packed sequences of different lengths, each of which is sharded across the ranks.

The rows of a rank are, sequence by sequence, the chunks that the layout gives it (as in Megatron-LM
and Transformer Engine). Kernels want each sequence in one piece, so rows are put in that order
after they have come, and back before they are sent.

"allgather" orders keys by chunk number, and by sequence within it. In this order a rank has at most
two runs, as it has with a single sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .core import Local
from .grid import Grid
from .keys import AllCalls, Bounds, Call, Meeting, Span, span_of, visible_pairs
from .layout import Run, Runs, Starts, length, lengths, packed_runs, runs_of
from .packed_call import Order, PackedCall, SequenceParts, sizes_of

if TYPE_CHECKING:
    from .mask_parts import WholeMask


def chunks_of(rank: int, layout: str, world: int) -> tuple[int, ...]:
    """The numbers of the chunks that a rank has of each sequence, counted from 0."""
    return (rank,) if layout == "contiguous" else (rank, 2 * world - 1 - rank)


def _chunk(size: int, number: int, count: int) -> Run:
    return number * size // count, (number + 1) * size // count


class ChunkCall(NamedTuple):
    """A call of some chunks of some sequences over the keys that they see."""

    rows: dict[int, list[Run]]  # of each sequence: runs of its rows
    keys: dict[int, Run]  # of each sequence: keys within it
    diagonals: dict[int, int]  # of each sequence, see ``keys.Span``
    chunks: Run  # numbers of the chunks that contain the keys, the end excluded


class PackedCut(NamedTuple):
    """See ``problem.Cut``."""

    starts_q: Starts
    starts_k: Starts
    layout: str
    world: int
    window: Bounds
    by_place: bool  # as in ``DenseCut``
    mask: WholeMask | None = None

    @property
    def rows(self) -> list[int]:
        """The number of rows of each rank."""
        return list(_lengths(self.starts_q, self.layout, self.world))

    @property
    def keys(self) -> list[int]:
        """The number of keys of each rank."""
        return list(_lengths(self.starts_k, self.layout, self.world))

    @property
    def row_runs(self) -> tuple[Runs, ...]:
        """The rows of each rank if those of rank 0 come first, then those of rank 1, and so on."""
        return _end_to_end(self.rows)

    @property
    def key_runs(self) -> tuple[Runs, ...]:
        """The keys of each rank in the same order."""
        return _end_to_end(self.keys)

    def pairs(self) -> list[int]:
        """The number of (row, key) pairs that the rows of each rank see."""
        return list(_pairs(self))

    def whole(self, device: torch.device) -> Local:
        """The call of all rows, which come in the order of the ranks."""
        return _whole(self, device)

    def calls(self) -> tuple[tuple[Runs, ...], AllCalls]:
        """The runs of keys, in the order of chunks, and the calls of each rank."""
        return _calls(self)

    def _all_calls(self) -> tuple[tuple[Runs, ...], AllCalls]:
        starts = _chunk_starts(self.starts_k, self._chunks())
        keys = tuple(
            tuple((starts[c], starts[c + 1]) for c in chunks_of(rank, self.layout, self.world))
            for rank in range(self.world)
        )
        calls = []
        for rank in range(self.world):
            own, at = [], 0
            for call in _chunk_calls(self, rank):
                rows = sum(length(tuple(runs)) for runs in call.rows.values())
                begin, end = starts[call.chunks[0]], starts[call.chunks[1]]
                own.append(Call((at, at + rows), Span(begin, end, 0), 0))
                at += rows
            calls.append(tuple(own))
        return keys, tuple(calls)

    def local(self, rank: int, device: torch.device) -> list[Local]:
        """The calls of a rank."""
        return _locals(self, rank, device)

    def local_of(self, call: ChunkCall, device: torch.device) -> Local:
        """One call."""
        return _local(self, call, device)

    def meetings(self, rank: int, owner: int) -> tuple[Meeting, ...]:
        """The calls of a rank over the keys of another; see ``by_chunk``."""
        return _meetings(self, rank, owner)

    def of_hosts(self, grid: Grid) -> PackedCut:
        """See ``DenseCut``: chunks of the ranks of a row make up the chunks of the row."""
        return self._replace(world=grid.between.world)

    def by_chunk(self) -> PackedCut:
        """The same cut, with a call and rows in a piece for each chunk number."""
        return self._replace(by_place=True)

    def orders(self, rank: int, device: torch.device, parts: int = 1) -> tuple[Order, Order]:
        """The rows of this rank in the order of its calls, and its keys in that of chunks.

        With parts, a host of `parts` ranks takes the place of a rank; its rows come as those of its
        ranks, end to end.
        """
        return _orders(self, rank, device, parts)

    def call_order(self, rank: int) -> tuple[Tensor, Tensor]:
        """The rows of a rank in the order of its calls, and its keys in that of chunks, each as its
        place among those of the rank, which come sequence by sequence: int64 in CPU memory.

        Sequences a and b have 8 and 4 rows in four chunks each ("zigzag" over two ranks). Rank 0
        has the chunks 0 and 3 of both, and a call for each chunk number:

            rows of the rank   a0 a0 a3 a3 b0 b3
            place               0  1  2  3  4  5
            in call order      a0 a0 b0   a3 a3 b3
            result              0  1  4    2  3  5
        """
        begins = _chunk_begins(self.starts_q, self.layout, self.world, rank)
        rows = [
            (begins[sequence, begin], end - begin)
            for call in _chunk_calls(self, rank)
            for sequence, runs in sorted(call.rows.items())
            for begin, end in runs
        ]
        begins = _chunk_begins(self.starts_k, self.layout, self.world, rank)
        keys = [
            (begins[sequence, begin], end - begin)
            for number in chunks_of(rank, self.layout, self.world)
            for sequence, size in enumerate(sizes_of(self.starts_k))
            for begin, end in [_chunk(size, number, self._chunks())]
            if begin < end
        ]
        return _rows_from(rows), _rows_from(keys)

    def _chunks(self) -> int:
        return self.world if self.layout == "contiguous" else 2 * self.world


def _end_to_end(sizes: list[int]) -> tuple[Runs, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(((begin, end),) for begin, end in itertools.pairwise(starts))


def _chunk_starts(starts: Starts, count: int) -> list[int]:
    """Where each chunk begins in the order of chunks."""
    result = [0]
    for number in range(count):
        of_number = (_chunk(size, number, count) for size in sizes_of(starts))
        result.append(result[-1] + sum(end - begin for begin, end in of_number))
    return result


@lru_cache(maxsize=64)
def _lengths(starts: Starts, layout: str, world: int) -> tuple[int, ...]:
    """The number of rows of each rank."""
    return tuple(lengths(packed_runs(starts, layout, world)))


def _rows_from(parts: Iterable[tuple[int, int]]) -> Tensor:
    """Rows, end to end, of parts that are given as the first row and the number of rows: int64 in
    CPU memory.
    """
    first, sizes = torch.tensor([*parts], dtype=torch.int64, device="cpu").view(-1, 2).unbind(1)
    ends = sizes.cumsum(0)
    shifts = (first - (ends - sizes)).repeat_interleave(sizes)
    return shifts.add_(torch.arange(len(shifts), device="cpu"))


def _rows(of_ranks: Iterable[Runs]) -> Tensor:
    """The rows of the runs of all ranks, end to end."""
    return _rows_from((begin, end - begin) for own in of_ranks for begin, end in own)


def _by_sequence(starts: Starts, layout: str, world: int) -> Tensor:
    """For each row of the packed batch, its place in the order of ``PackedCut.row_runs``."""
    return _rows(packed_runs(starts, layout, world)).argsort()


@lru_cache(maxsize=64)
def _chunk_begins(starts: Starts, layout: str, world: int, rank: int) -> dict[tuple[int, int], int]:
    """By sequence and first row within it: where a chunk of a rank begins among its rows."""
    result, at = {}, 0
    count = world if layout == "contiguous" else 2 * world
    for sequence, size in enumerate(sizes_of(starts)):
        for number in chunks_of(rank, layout, world):
            begin, end = _chunk(size, number, count)
            if begin < end:
                result[sequence, begin] = at
                at += end - begin
    return result


@lru_cache(maxsize=64)
def _calls(cut: PackedCut) -> tuple[tuple[Runs, ...], AllCalls]:
    return cut._all_calls()


@lru_cache(maxsize=64)
def _pairs(cut: PackedCut) -> tuple[int, ...]:
    result = [0] * cut.world
    for size_q, size_k in zip(sizes_of(cut.starts_q), sizes_of(cut.starts_k), strict=True):
        for rank, runs in enumerate(runs_of(size_q, cut.layout, cut.world)):
            result[rank] += sum(visible_pairs(run, size_q, size_k, cut.window) for run in runs)
    return tuple(result)


@lru_cache(maxsize=256)
def _chunk_calls(cut: PackedCut, rank: int) -> tuple[ChunkCall, ...]:
    """The calls of a rank: one per chunk number, or one if no score depends on a place."""
    count = cut._chunks()
    sizes = list(zip(sizes_of(cut.starts_q), sizes_of(cut.starts_k), strict=True))
    numbers = chunks_of(rank, cut.layout, cut.world)
    calls: dict[int, ChunkCall] = {}
    for number in numbers:
        for sequence, (size_q, size_k) in enumerate(sizes):
            run = _chunk(size_q, number, count)
            if run[0] == run[1]:
                continue
            span, of_call = Span(0, size_k, 0), 0
            if cut.by_place or cut.window != (None, None):
                seen = None if cut.mask is None else cut.mask.seen(run, size_k, sequence)
                span, of_call = span_of(run, size_q, size_k, cut.window, seen), number
            call = calls.setdefault(of_call, ChunkCall({}, {}, {}, (count, 0)))
            call.rows.setdefault(sequence, []).append(run)
            call.diagonals[sequence] = span.diagonal
            chunks = call.chunks
            if span.begin < span.end:
                first, last = _holding(size_k, count, span)
                call.keys[sequence] = (first * size_k // count, span.end)
                chunks = (min(chunks[0], first), max(chunks[1], last))
            calls[of_call] = call._replace(chunks=chunks)
    return tuple(
        call if call.chunks[0] < call.chunks[1] else call._replace(chunks=(0, 0))
        for call in calls.values()
    )


@lru_cache(maxsize=1024)
def _meetings(cut: PackedCut, rank: int, owner: int) -> tuple[Meeting, ...]:
    count, starts = cut._chunks(), _chunk_starts(cut.starts_k, cut._chunks())
    sizes = list(zip(sizes_of(cut.starts_q), sizes_of(cut.starts_k), strict=True))
    result, at = [], 0
    for call in _chunk_calls(cut, rank):
        rows = (at, at + sum(length(tuple(runs)) for runs in call.rows.values()))
        at, first_key = rows[1], 0
        for number in chunks_of(owner, cut.layout, cut.world):
            keys, diagonals = {}, {}
            for sequence, (run,) in call.rows.items():
                size_q, size_k = sizes[sequence]
                seen = None if cut.mask is None else cut.mask.seen(run, size_k, sequence)
                span = span_of(run, size_q, size_k, cut.window, seen)
                begin, end = _chunk(size_k, number, count)
                low, high = max(span.begin, begin), min(span.end, end)
                if low < high:
                    keys[sequence] = (low, high)
                    diagonals[sequence] = span.between(low, high).diagonal
            of_keys = (first_key, first_key + starts[number + 1] - starts[number])
            first_key = of_keys[1]
            if keys:
                part = ChunkCall(call.rows, keys, diagonals, (number, number + 1))
                result.append(Meeting(rows, of_keys, part))
    return tuple(result)


def _holding(size: int, count: int, span: Span) -> Run:
    """The numbers of the chunks that contain the keys of the span: (first, last + 1)."""
    first = (span.begin * count) // size
    while (first + 1) * size // count <= span.begin:
        first += 1
    while first * size // count > span.begin:
        first -= 1
    last = first
    while last * size // count < span.end:
        last += 1
    return first, last


@lru_cache(maxsize=32)
def _whole(cut: PackedCut, device: torch.device) -> PackedCall:
    orders = {
        starts: Order(_by_sequence(starts, cut.layout, cut.world), starts[-1], device)
        for starts in {cut.starts_q, cut.starts_k}
    }
    mask = None if cut.mask is None else cut.mask.part_at(None, device)
    both = orders[cut.starts_q], orders[cut.starts_k]
    return PackedCall(both, cut.starts_q, cut.starts_k, device, None, mask)


@lru_cache(maxsize=32)
def _locals(cut: PackedCut, rank: int, device: torch.device) -> list[Local]:
    return [_local(cut, call, device) for call in _chunk_calls(cut, rank)]


@lru_cache(maxsize=32)
def _orders(cut: PackedCut, rank: int, device: torch.device, parts: int) -> tuple[Order, Order]:
    """See ``PackedCut.orders``.

    If rank 0 in the drawing of ``PackedCut.call_order`` is a host of two ranks, it has the rows 0,
    1, 6 and 7 of sequence a. They come as 0 7 1 6, because its first rank has the rows 0 and 7, so
    rows 0 1 6 7 are at the places 0 2 3 1.
    """
    orders = []
    for starts, in_call in zip((cut.starts_q, cut.starts_k), cut.call_order(rank), strict=True):
        finer = packed_runs(starts, cut.layout, cut.world * parts)
        arrives_at = _rows(finer[rank * parts : (rank + 1) * parts]).argsort()
        orders.append(Order(arrives_at[in_call], len(in_call), device))
    return orders[0], orders[1]


def _local(cut: PackedCut, call: ChunkCall, device: torch.device) -> PackedCall:
    count = cut._chunks()
    sizes, starts = sizes_of(cut.starts_k), _chunk_starts(cut.starts_k, count)
    first, last = call.chunks
    begins: dict[tuple[int, int], int] = {}  # by sequence and chunk: among the keys of the call
    at = 0
    for number in range(first, last):
        for sequence, size in enumerate(sizes):
            begin, end = _chunk(size, number, count)
            begins[sequence, number] = at
            at += end - begin
    assert at == starts[last] - starts[first]
    cu_q, cu_k = [0], [0]
    parts: list[tuple[int, int]] = []  # see ``_rows_from``
    for sequence, size in enumerate(sizes):
        cu_q.append(cu_q[-1] + length(tuple(call.rows.get(sequence, ()))))
        begin, end = call.keys.get(sequence, (0, 0))
        parts += _keys_between(begin, end, size, count, sequence, begins)
        cu_k.append(cu_k[-1] + end - begin)
    sequences = range(len(sizes))
    places = SequenceParts(
        tuple((call.rows.get(i, [(0, 0)])[0], call.keys.get(i, (0, 0))) for i in sequences),
        tuple(call.diagonals.get(i, 0) for i in sequences),
    )
    orders = None, Order(_rows_from(parts), at, device)
    mask = None if cut.mask is None else cut.mask.part_at(places.places, device)
    return PackedCall(orders, tuple(cu_q), tuple(cu_k), device, places, mask)


def _keys_between(
    begin: int, end: int, size: int, count: int, sequence: int, begins: dict[tuple[int, int], int]
) -> Iterator[tuple[int, int]]:
    """The places of the keys of a sequence from `begin` to before `end`, see ``_rows_from``."""
    for number in range(count):
        low, high = _chunk(size, number, count)
        first, last = max(begin, low), min(end, high)
        if first < last:
            yield begins[sequence, number] + first - low, last - first
