"""Tables of pieces that move between ranks, and the transports that move them.

A table lists pieces of the first dimension of tensors. The tensors that a rank publishes and those
in which it receives are contiguous, so each piece is one message, which arrives in its place. All
ranks derive their tables from the same facts, and so agree on sizes and order without exchanging
them. Tensors without columns move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks, exchanging


class Piece(NamedTuple):
    """Rows that move from a published tensor of one rank to a receiving tensor of another."""

    source: int  # the index of the published tensor
    begin: int  # the first row there
    target: int  # the index of the receiving tensor
    at: int  # the first row there
    rows: int


class Table(NamedTuple):
    """The pieces that one rank sends to and receives from each rank, itself included."""

    sends: tuple[tuple[Piece, ...], ...]
    receives: tuple[tuple[Piece, ...], ...]


def table_of(ranks: Ranks, pieces: Callable[[int, int], Iterator[Piece]]) -> Table:
    """The table of this rank from ``pieces(source rank, target rank)``."""

    def some(source: int, target: int) -> tuple[Piece, ...]:
        return tuple(piece for piece in pieces(source, target) if piece.rows > 0)

    return Table(
        tuple(some(ranks.rank, peer) for peer in range(ranks.world)),
        tuple(some(peer, ranks.rank) for peer in range(ranks.world)),
    )


class Exchange:
    """Messages in flight; ``wait`` before the received tensors are read."""

    def __init__(self, works: list[Any], kept: tuple[Any, ...], ranks: Ranks, what: str) -> None:
        self._works = works
        self._kept = kept  # tensors must not be freed while messages are in flight
        self._ranks, self._what = ranks, what

    def wait(self) -> None:
        """Makes the current stream wait on a GPU, and the host wait on a CPU."""
        with exchanging(self._what, self._ranks):
            for work in self._works:
                work.wait()
        self._works, self._kept = [], ()


class BufferShape(NamedTuple):
    """The shape [parts, rows, ...] and the dtype of a receive buffer, with this rank's number of
    rows; ``most`` is the largest number of rows of any rank.
    """

    shape: tuple[int, ...]
    most: int
    dtype: torch.dtype


class ReceiveBuffers(NamedTuple):
    """Tensors that receive pieces. In memory that ranks share, ``begins`` has the byte at which
    each of their parts begins.
    """

    tensors: list[Tensor]
    begins: list[int]


Views: TypeAlias = Callable[[int], Sequence[Tensor]]
"""The tensors [parts, rows, ...] that a rank publishes in a step; see ``parts_of``."""


class Published(Protocol):
    """Tensors of all steps, from which other ranks take their pieces."""

    def take(self, step: int, received: Sequence[Tensor]) -> Exchange:
        """Starts to receive the pieces of a step in tensors [rows, ...]."""


class Transport(Protocol):
    """The way in which pieces move between the ranks of a group."""

    def publish(
        self, table: Table, views: Views, steps: int, most: Sequence[int], what: str
    ) -> Published:
        """Publishes the tensors of all steps; `most`: for each, the most rows that a rank has."""

    def receive_buffers(
        self, shapes: Sequence[BufferShape], device: torch.device
    ) -> ReceiveBuffers:
        """Tensors in which the next ``send`` receives; valid until the second ``send`` after it."""

    def send(
        self, table: Table, sent: Sequence[Tensor], buffers: ReceiveBuffers, what: str
    ) -> Exchange:
        """Starts to send tensors [rows, ...], and to receive in the parts of the buffers."""


def parts_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The parts [rows, ...] of all tensors [parts, rows, ...], in the order that pieces count."""
    return [part for x in tensors for part in x.unbind(0)]


class Messages:
    """Point-to-point messages of ``torch.distributed``: gloo, NCCL."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def publish(
        self, table: Table, views: Views, _steps: int, _most: Sequence[int], what: str
    ) -> Published:
        """See ``Transport``."""
        return _PublishedMessages(self._ranks, table, views, what)

    def receive_buffers(
        self, shapes: Sequence[BufferShape], device: torch.device
    ) -> ReceiveBuffers:
        """See ``Transport``."""
        tensors = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in shapes]
        return ReceiveBuffers(tensors, [])

    def send(
        self, table: Table, sent: Sequence[Tensor], buffers: ReceiveBuffers, what: str
    ) -> Exchange:
        """See ``Transport``."""
        return start(table, sent, parts_of(buffers.tensors), self._ranks, what)


class _PublishedMessages:
    def __init__(self, ranks: Ranks, table: Table, views: Views, what: str) -> None:
        self._ranks, self._table, self._views, self._what = ranks, table, views, what

    def take(self, step: int, received: Sequence[Tensor]) -> Exchange:
        """See ``Published``."""
        sent = parts_of([x.contiguous() for x in self._views(step)])
        return start(self._table, sent, received, self._ranks, self._what)


def start(
    table: Table, published: Sequence[Tensor], received: Sequence[Tensor], ranks: Ranks, what: str
) -> Exchange:
    """Starts the messages of a table; every rank must start its exchanges in the same order."""
    operations: list[Any] = []
    with exchanging(what, ranks):
        for peer in range(ranks.world):
            if peer == ranks.rank:
                continue
            for p in table.sends[peer]:
                rows = _rows(published[p.source], p.begin, p.rows)
                if rows.numel():
                    operations.append(_message(dist.isend, rows, peer, ranks))
            for p in table.receives[peer]:
                rows = _rows(received[p.target], p.at, p.rows)
                if rows.numel():
                    operations.append(_message(dist.irecv, rows, peer, ranks))
        works = dist.batch_isend_irecv(operations) if operations else []
    for p in table.receives[ranks.rank]:
        rows = _rows(published[p.source], p.begin, p.rows)
        _rows(received[p.target], p.at, p.rows).copy_(rows)
    return Exchange(works, (tuple(published), tuple(received)), ranks, what)


def _rows(x: Tensor, begin: int, rows: int) -> Tensor:
    return x if rows == x.shape[0] else x.narrow(0, begin, rows)


def _message(operation: Any, rows: Tensor, peer: int, ranks: Ranks) -> Any:
    return dist.P2POp(operation, rows, group=ranks.group, group_peer=peer)


def received_bytes(table: Table, received: Sequence[Tensor], ranks: Ranks) -> int:
    """The bytes that an exchange receives from other ranks."""
    total = 0
    for peer, pieces in enumerate(table.receives):
        for p in pieces if peer != ranks.rank else ():
            whole = received[p.target]
            total += p.rows * (whole.numel() // whole.shape[0]) * whole.element_size()
    return total


def overlapped(
    count: int,
    load: Callable[[int], tuple[Exchange, Any]],
    compute: Callable[[int, Any], tuple[Exchange, Any] | None],
    finish: Callable[[int, Any], None],
) -> None:
    """Runs `count` steps, with the exchanges of their neighbours under way while each computes.

    Args:
        count: The number of steps, the same on all ranks.
        load: Starts the exchange that step i needs; returns it and what it receives.
        compute: Computes step i from what was received, and starts the exchange of its results;
            returns that exchange and what it receives, or None.
        finish: Uses what has come back for step i.
    """
    loading = load(0) if count else None
    storing: tuple[int, Exchange, Any] | None = None
    for i in range(count):
        assert loading is not None
        exchange, inputs = loading
        following = load(i + 1) if i + 1 < count else None
        exchange.wait()
        started = compute(i, inputs)
        del inputs
        if storing is not None:
            storing[1].wait()
            finish(storing[0], storing[2])
        storing = None if started is None else (i, *started)
        loading = following
    if storing is not None:
        storing[1].wait()
        finish(storing[0], storing[2])


def rows_first(x: Tensor) -> Tensor:
    """[B, rows, ...] as contiguous [rows, B, ...], so that runs of rows are contiguous."""
    return x.transpose(0, 1).contiguous()
