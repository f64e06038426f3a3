"""The process group of a call, and the collectives that move pieces of different sizes.

Sums over ranks are computed here in rank order from exchanged pieces, and not by the reducing
collectives: this receives as many bytes, and its result is bitwise the same in every run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

# PyTorch 2.13 renamed the collective and warns of the old name.
gather_equal: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def eager(function: F) -> F:
    """The function outside of graphs of torch.compile, which cannot exchange with other ranks."""
    return torch.compiler.disable(function, reason="tilewise.distributed exchanges between ranks")


class Ranks(NamedTuple):
    """A process group and this process's place in it; group is None for a single process."""

    group: dist.ProcessGroup | None
    rank: int
    world: int


def ranks_of(group: Any = None, mesh: Any = None) -> Ranks:
    """The ranks of a group, or of a mesh of one dimension; by default, those of all processes.

    With a mesh of two dimensions, these are the ranks of the group.

    Without an initialised default group, this process is the only rank.
    """
    if mesh is not None:
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"mesh has {mesh.ndim} dimensions, but must have 1, or 2 for ranks inside and "
                "between hosts: pass the dimensions of the sequence, as in mesh['cp']"
            )
        if group is not None and mesh.ndim == 1:
            raise ValueError("group and mesh are both given, but only one of them is allowed")
        group = mesh.get_group() if mesh.ndim == 1 else group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        group = dist.group.WORLD
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group does not contain this process, but must")
    return Ranks(group, rank, dist.get_world_size(group))


@contextlib.contextmanager
def exchanging(what: str, ranks: Ranks) -> Iterator[None]:
    """Says which exchange failed if the backend reports that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"tilewise.distributed: rank {ranks.rank} of {ranks.world} could not exchange {what}: "
            "another rank has stopped, has raised an error or cannot be reached "
            f"({dist.get_backend(ranks.group)}: {error})"
        ) from error


def all_to_all(
    pieces: Sequence[Tensor], shapes: Sequence[Sequence[int]], ranks: Ranks, what: str
) -> list[Tensor]:
    """Sends pieces[r] to rank r; returns what rank r sent, of shape shapes[r], for every r."""
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    sizes = [math.prod(shape) for shape in shapes]
    received = sent.new_empty(sum(sizes))
    with exchanging(what, ranks):
        dist.all_to_all_single(
            received, sent, sizes, [piece.numel() for piece in pieces], group=ranks.group
        )
    parts = received.split(sizes)
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def all_gather(piece: Tensor, counts: Sequence[int], ranks: Ranks, what: str) -> list[Tensor]:
    """The pieces of all ranks, of which rank r's has counts[r] rows in dimension 0.

    Pieces are padded to the longest one, because the collective takes equal sizes only. Layouts
    cut a sequence into pieces that differ by two rows at most.
    """
    longest, rest = max(counts), piece.shape[1:]
    padded = piece.new_zeros((longest, *rest))
    padded[: piece.shape[0]] = piece
    received = piece.new_empty((len(counts) * longest, *rest))
    with exchanging(what, ranks):
        gather_equal(received, padded, group=ranks.group)
    parts = received.view(len(counts), longest, *rest)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def largest_of_ranks(x: Tensor, ranks: Ranks, what: str) -> Tensor:
    """The largest of each entry over the ranks, whose tensors have one shape; a NaN stays."""
    return torch.cat(all_gather(x[None], [1] * ranks.world, ranks, what)).amax(0)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed over ranks: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def reduce_scatter(pieces: Sequence[Tensor], ranks: Ranks, what: str) -> Tensor:
    """The sum over ranks, in rank order, of the piece that each has for this rank."""
    shape = pieces[ranks.rank].shape
    first, *others = all_to_all(pieces, [shape] * ranks.world, ranks, what)
    for other in others:
        first += other
    return first
