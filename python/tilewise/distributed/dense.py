"""Sequences of equal length, sharded across ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .._options import Options
from .core import Local, diagonals, with_diagonal
from .grid import Grid, rows_of_hosts
from .keys import AllCalls, Bounds, Call, Meeting, calls_of, meetings_of, visible_pairs
from .layout import Runs, lengths

if TYPE_CHECKING:
    from .mask_parts import MaskPart, WholeMask


class DenseCall(Local):
    """A call of some rows over the keys that they see."""

    def __init__(self, call: Call, diagonal: Tensor | None, mask: MaskPart | None) -> None:
        super().__init__(mask)
        self._call, self._diagonal = call, diagonal

    def options(self, options: Options) -> Options:
        """The options with the place of the call and its part of the bias."""
        (first, last), span, bias = self._call.rows, self._call.span, options.bias
        if bias is not None:
            bias = bias[:, :, first:last] if bias.shape[2] > 1 else bias
            bias = bias[..., span.begin : span.end]
        return with_diagonal(options, self._diagonal)._replace(
            bias=bias, row_offset=self._call.first, key_offset=span.begin
        )

    def add_bias(self, sums: Tensor, grad: Tensor) -> None:
        """See ``Local``."""
        part = sums[:, :, slice(*self._call.rows)] if sums.shape[2] > 1 else sums
        part[..., self._call.span.begin : self._call.span.end] += grad


class DenseCut(NamedTuple):
    """See ``problem.Cut``."""

    row_runs: tuple[Runs, ...]  # of each rank
    key_runs: tuple[Runs, ...]
    window: Bounds
    sequences: int
    by_place: bool  # whether scores, dropout or a mask depend on the places of rows and keys
    mask: WholeMask | None = None

    @property
    def rows(self) -> list[int]:
        """The number of rows of each rank."""
        return lengths(self.row_runs)

    @property
    def keys(self) -> list[int]:
        """The number of keys of each rank."""
        return lengths(self.key_runs)

    def pairs(self) -> list[int]:
        """The number of (row, key) pairs that the rows of each rank see."""
        size_q, size_k = sum(self.rows), sum(self.keys)
        return [
            sum(visible_pairs(run, size_q, size_k, self.window) for run in runs)
            for runs in self.row_runs
        ]

    def whole(self, device: torch.device) -> Local:
        """The call of all rows."""
        return Local(None if self.mask is None else self.mask.part_at(None, device))

    def calls(self) -> tuple[tuple[Runs, ...], AllCalls]:
        """The runs of keys and the calls of each rank."""
        size_q, size_k = sum(self.rows), sum(self.keys)
        calls = tuple(
            calls_of(runs, size_q, size_k, self.window, self.by_place, self.mask)
            for runs in self.row_runs
        )
        return self.key_runs, calls

    def local(self, rank: int, device: torch.device) -> list[Local]:
        """The calls of a rank."""
        return [self.local_of(call, device) for call in self.calls()[1][rank]]

    def local_of(self, call: Call, device: torch.device) -> Local:
        """One call."""
        diagonal = diagonals((call.span.diagonal,) * self.sequences, device)
        mask = None if self.mask is None else self.mask.part_at((call.place,), device)
        return DenseCall(call, diagonal, mask)

    def of_hosts(self, grid: Grid) -> DenseCut:
        """The cut for the rows of a mesh, each of which has the rows of its ranks."""
        return self._replace(
            row_runs=rows_of_hosts(self.row_runs, grid), key_runs=rows_of_hosts(self.key_runs, grid)
        )

    def by_chunk(self) -> DenseCut:
        """See ``PackedCut``."""
        return self

    def meetings(self, rank: int, owner: int) -> tuple[Meeting, ...]:
        """The calls of a rank over the keys of another."""
        sizes = sum(self.rows), sum(self.keys)
        return meetings_of(
            self.row_runs[rank], self.key_runs[owner], *sizes, self.window, self.mask
        )
