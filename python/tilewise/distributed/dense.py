"""Sequences of equal length, cut over ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._options import Options
from .core import Local
from .keys import AllCalls, Bounds, Call, calls_of, visible_pairs
from .layout import Runs, lengths


class DenseCall(Local):
    """A call of some rows over the keys that they see."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def options(self, options: Options) -> Options:
        """The options with the window of the call and its part of the bias."""
        (first, last), span, bias = self._call.rows, self._call.span, options.bias
        left, right = span.window
        if bias is not None:
            bias = bias[:, :, first:last] if bias.shape[2] > 1 else bias
            bias = bias[..., span.begin : span.end]
        return options._replace(
            bias=bias,
            window_left=-1 if left is None else left,
            window_right=-1 if right is None else right,
        )


class DenseCut(NamedTuple):
    """See ``problem.Cut``."""

    row_runs: tuple[Runs, ...]  # of each rank
    key_runs: tuple[Runs, ...]
    window: Bounds

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

    def whole(self, _device: torch.device) -> Local:
        """The call of all rows."""
        return Local()

    def calls(self) -> tuple[tuple[Runs, ...], AllCalls]:
        """The runs of keys and the calls of each rank."""
        size_q, size_k = sum(self.rows), sum(self.keys)
        calls = tuple(calls_of(runs, size_q, size_k, self.window) for runs in self.row_runs)
        return self.key_runs, calls

    def local(self, rank: int, _device: torch.device) -> list[Local]:
        """The calls of a rank."""
        return [DenseCall(call) for call in self.calls()[1][rank]]
