"""Pieces are moved by copy engines between the GPUs of one host, while all SMs compute.

Each rank has memory that the others can read and write. Tensors for every step of a call are
published in it at once, and a rank copies the pieces that it needs. Results are copied into the
memory of the rank that needs them. Two barriers, on the stream that computes, enclose what is
published, and one follows the results of each step. Nothing else uses an SM.

A kernel that occupies every SM delays NCCL's kernels, and NCCL's kernels delay the CTAs of such a
kernel whose schedule is static. Copies avoid both.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .exchange import BufferShape, Exchange, Piece, Published, ReceiveBuffers, Table, Views
from .ranks import Ranks

_ALIGNMENT = 512  # bytes, of a tensor in shared memory
_GRAIN = 2**21  # bytes; memory is allocated in multiples of them
_VIEWS = 10000  # of which a memory keeps at most so many
_SLOTS = 3  # results of a step are read while those of the next two are written


class Memory:
    """The bytes of each rank of a group, and a barrier of the ranks on the current stream."""

    def __init__(self, of_ranks: list[Tensor], barrier: Callable[[], None], kept: Any) -> None:
        self.of_ranks, self.barrier, self._kept = of_ranks, barrier, kept
        self.addresses = [x.data_ptr() for x in of_ranks]
        self._views: dict[Any, Tensor] = {}  # calls repeat, and making a view takes the host 5 us

    def view(self, rank: int, begin: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor in the memory of a rank, from a byte on."""
        key = rank, begin, shape, dtype
        if key not in self._views:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            size = math.prod(shape) * dtype.itemsize
            own = self.of_ranks[rank][begin : begin + size]
            self._views[key] = own.view(dtype).view(tuple(shape))
        return self._views[key]


def open_memory(size: int, ranks: Ranks, device: torch.device) -> Memory:
    """Allocates `size` bytes on each rank; all ranks must call it."""
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(size, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(own, ranks.group)
    of_ranks = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(ranks.world)]
    return Memory(of_ranks, lambda: handle.barrier(channel=0), (own, handle))


Copy: TypeAlias = tuple[int, int, int]  # address of the target, address of the source, bytes


class _Streams:
    """A stream beside the current one; on a CPU everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._side = torch.cuda.Stream(device, priority=-1) if self._gpu else None

    def run(self, copies: Sequence[Copy]) -> list[Any]:
        """Copies after the work queued on the current stream so far; returns an event on a GPU."""
        if not self._gpu:
            for copy in copies:
                ctypes.memmove(*copy)
            return []
        # A call makes some hundred copies. Tensor.copy_ on views takes the host 10 us for each.
        from cuda.bindings import runtime

        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream())
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyDeviceToDevice, self._side.cuda_stream
        for target, source, size in copies:
            (error,) = runtime.cudaMemcpyAsync(target, source, size, kind, stream)
            if error != runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"tilewise.distributed: a copy between GPUs failed: {error}")
        event = torch.cuda.Event()
        event.record(self._side)
        return [event]


class _Group:
    """Memory that grows, streams and the slot of the next results, for all calls of a group on one
    type of device.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        group: Any = ranks.group
        # A weak reference, because the group is the key in `_groups` and would live as long as this
        # value holds it.
        self._process_group, self._rank, self._world = weakref.ref(group), ranks.rank, ranks.world
        self.device = device
        self.takes, self.sends = _Streams(device), _Streams(device)
        self.published = self.results = Memory([], lambda: None, None)
        self.slot = 0
        self._retired: list[Memory] = []

    @property
    def ranks(self) -> Ranks:
        """The ranks of the process group, which exists while a call uses it."""
        return Ranks(self._process_group(), self._rank, self._world)

    def grown(self, memory: Memory, size: int) -> Memory:
        """The memory, or a larger one if it is too small for `size` bytes."""
        if memory.of_ranks and memory.of_ranks[0].numel() >= size:
            return memory
        if memory.of_ranks:
            self._retired.append(memory)
        return open_memory(-(-size // _GRAIN) * _GRAIN, self.ranks, self.device)

    def begin(self) -> None:
        """Begins a call, after a barrier: every rank has read what the previous call published."""
        self.published.barrier()
        if self._retired:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._retired.clear()


# By process group and type of device, on which all ranks of a call agree.
_groups: weakref.WeakKeyDictionary[Any, dict[str, _Group]] = weakref.WeakKeyDictionary()


class Copies:
    """See ``Transport``."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        group: Any = ranks.group
        by_device = _groups.setdefault(group, {})
        if device.type not in by_device:
            by_device[device.type] = _Group(ranks, device)
        self._group = by_device[device.type]

    def open(self) -> None:
        """Allocates memory that ranks share; all ranks must call it.

        Raises:
            RuntimeError: the GPUs cannot share memory.
        """
        self._group.published = self._group.grown(self._group.published, _GRAIN)

    def publish(
        self, table: Table, views: Views, steps: int, most: Sequence[int], what: str
    ) -> Published:
        """See ``Transport``."""
        group, tensors, begins, total = self._group, [], [], 0
        for step in range(steps):
            parts: list[int] = []
            for x, rows in zip(views(step), most, strict=True):
                tensors.append((x, rows, total))
                part = rows * _row_bytes(x[0])
                parts += [total + i * part for i in range(x.shape[0])]
                total += _aligned(x.shape[0] * part)
            begins.append(parts)
        group.begin()
        group.published = group.grown(group.published, total)
        for x, rows, begin in tensors:
            shape = (x.shape[0], rows, *x.shape[2:])
            own = group.published.view(group.ranks.rank, begin, shape, x.dtype)
            own[:, : x.shape[1]].copy_(x)
        group.published.barrier()
        return _PublishedCopies(group, table, begins, what)

    def receive_buffers(
        self, shapes: Sequence[BufferShape], _device: torch.device
    ) -> ReceiveBuffers:
        """See ``Transport``."""
        group = self._group
        parts = [x.most * math.prod(x.shape[2:]) * x.dtype.itemsize for x in shapes]
        sizes = [_aligned(x.shape[0] * part) for x, part in zip(shapes, parts, strict=True)]
        slot = sum(sizes)
        if not group.results.of_ranks or group.results.of_ranks[0].numel() < _SLOTS * slot:
            group.results = group.grown(group.results, _SLOTS * slot)
        capacity = group.results.of_ranks[0].numel() // _SLOTS // _ALIGNMENT * _ALIGNMENT
        begin = group.slot * capacity
        group.slot = (group.slot + 1) % _SLOTS
        tensors, begins = [], []
        for x, part, size in zip(shapes, parts, sizes, strict=True):
            shape = (x.shape[0], x.most, *x.shape[2:])
            whole = group.results.view(group.ranks.rank, begin, shape, x.dtype)
            tensors.append(whole[:, : x.shape[1]])
            begins += [begin + i * part for i in range(x.shape[0])]
            begin += size
        return ReceiveBuffers(tensors, begins)

    def send(
        self, table: Table, sent: Sequence[Tensor], buffers: ReceiveBuffers, what: str
    ) -> Exchange:
        """See ``Transport``."""
        group, copies = self._group, list[Copy]()
        sources = [(x.data_ptr(), _row_bytes(x)) for x in sent]
        for peer, pieces in _others_first(table.sends, group.ranks):
            base = group.results.addresses[peer]
            for p in pieces:
                source, row = sources[p.source]
                target = base + buffers.begins[p.target] + p.at * row
                if row:
                    copies.append((target, source + p.begin * row, p.rows * row))
        works = group.sends.run(copies)
        return _Arrival(works, (tuple(sent), buffers), group, what)


class _PublishedCopies:
    def __init__(self, group: _Group, table: Table, begins: list[list[int]], what: str) -> None:
        self._group, self._table, self._begins, self._what = group, table, begins, what

    def take(self, step: int, received: Sequence[Tensor]) -> Exchange:
        """See ``Published``."""
        group, copies = self._group, list[Copy]()
        targets = [(x.data_ptr(), _row_bytes(x)) for x in received]
        for peer, pieces in _others_first(self._table.receives, group.ranks):
            base = group.published.addresses[peer]
            for p in pieces:
                target, row = targets[p.target]
                source = base + self._begins[step][p.source] + p.begin * row
                if row:
                    copies.append((target + p.at * row, source, p.rows * row))
        return Exchange(group.takes.run(copies), tuple(received), group.ranks, self._what)


class _Arrival(Exchange):
    """Results that this rank sends; after a barrier, those of all ranks have come."""

    def __init__(self, works: list[Any], kept: tuple[Any, ...], group: _Group, what: str) -> None:
        super().__init__(works, kept, group.ranks, what)
        self._memory = group.results

    def wait(self) -> None:
        """Makes the current stream wait."""
        super().wait()
        self._memory.barrier()


def _others_first(
    pieces: Sequence[tuple[Piece, ...]], ranks: Ranks
) -> Iterator[tuple[int, tuple[Piece, ...]]]:
    """The pieces by rank, beginning with the next one, so that ranks begin with different ones."""
    for step in range(1, ranks.world + 1):
        peer = (ranks.rank + step) % ranks.world
        yield peer, pieces[peer]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _row_bytes(x: Tensor) -> int:
    """The bytes of a row of x [rows, ...]."""
    return math.prod(x.shape[1:]) * x.element_size()
