"""Counts of durations in intervals, as monitoring systems take them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

# Upper ends of the intervals in seconds: a decoded token of a GPU takes milliseconds, the first
# token of a long prompt on a CPU minutes.
_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0,
)  # fmt: skip


@dataclass(frozen=True)
class Durations:
    """The state of a histogram."""

    below: list[tuple[float, int]]  # seconds, and the number of durations up to them
    count: int
    total: float  # seconds


class Histogram:
    """A histogram of durations. Its caller makes sure that only one thread uses it at a time."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_BOUNDS) + 1)
        self._total = 0.0

    def observe(self, seconds: float) -> None:
        """Counts a duration."""
        self._counts[bisect_left(_BOUNDS, seconds)] += 1
        self._total += seconds

    def durations(self) -> Durations:
        """The durations so far."""
        below, count = [], 0
        for bound, more in zip(_BOUNDS, self._counts, strict=False):
            count += more
            below.append((bound, count))
        return Durations(below, count + self._counts[-1], self._total)
