"""Ranks of a mesh of two dimensions: "ulysses" inside a row, "allgather" or "ring" across rows.

A row of the mesh is meant to be a host. Its ranks exchange their rows for heads, after which each
has, for some heads, all rows of its host; it then receives the keys of the other hosts for these
heads. A layout cuts the sequence for all ranks of the mesh, in row-major order. A host therefore
has the rows that the layout would give it if each host were a single rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist

from .layout import Run, Runs, length
from .ranks import Ranks


class Grid(NamedTuple):
    """The ranks of this rank's row of the mesh, and those of its column."""

    inside: Ranks
    between: Ranks


def grid_of(mesh: Any, ranks: Ranks) -> Grid | None:
    """The grid of a mesh of two dimensions; None for other meshes.

    Raises:
        ValueError: the ranks of the mesh are not those of the group in row-major order.
    """
    if mesh is None or mesh.ndim != 2:
        return None
    expected = dist.get_process_group_ranks(ranks.group) if ranks.group else [0]
    if mesh.mesh.flatten().tolist() != expected:
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.tolist()}, but must have those of the group, "
            f"{expected}, in row-major order"
        )
    return Grid(*(_ranks(mesh.get_group(dim)) for dim in (1, 0)))


def _ranks(group: Any) -> Ranks:
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def rows_of_hosts(runs: tuple[Runs, ...], grid: Grid) -> tuple[Runs, ...]:
    """The runs of rows that the ranks of each row of the mesh have together."""
    each = grid.inside.world
    return tuple(
        _joined([run for own in runs[host * each : (host + 1) * each] for run in own])
        for host in range(grid.between.world)
    )


def _joined(runs: list[Run]) -> Runs:
    joined: list[Run] = []
    for begin, end in sorted(runs):
        if begin == end:
            continue
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def inside_host(runs: tuple[Runs, ...], grid: Grid) -> tuple[Runs, ...]:
    """The runs of each rank of this rank's row of the mesh, numbered within the rows that these
    ranks have together.
    """
    each, host = grid.inside.world, grid.between.rank
    of_ranks = runs[host * each : (host + 1) * each]
    whole = _joined([run for own in of_ranks for run in own])

    def placed(run: Run) -> Run:
        at = 0
        for begin, end in whole:
            if begin <= run[0] and run[1] <= end:
                return at + run[0] - begin, at + run[1] - begin
            at += end - begin
        return at, at  # an empty run

    result = tuple(tuple(placed(run) for run in own if run[0] < run[1]) for own in of_ranks)
    assert sum(map(length, result)) == length(whole)
    return result
