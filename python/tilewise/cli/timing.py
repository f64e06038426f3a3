"""Timing on a machine that other processes share: interleaved repetitions, medians, spread.

The repetitions of the contestants alternate, so that a slow phase of the machine (another process,
a lower clock) affects all of them equally. A repetition in which the process got clearly less
processor time than in its best one is dropped, because other processes disturbed it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# A repetition counts if the process got at least this fraction of the processor time per second
# that it got in its best repetition.
QUIET = 0.95


@dataclass
class Timing:
    """Repetitions of one contestant: wall seconds, and processor seconds per wall second."""

    seconds: list[float] = field(default_factory=list)
    usage: list[float] = field(default_factory=list)

    def add(self, seconds: float, processor_seconds: float) -> None:
        """Adds one repetition."""
        self.seconds.append(seconds)
        self.usage.append(processor_seconds / seconds if seconds > 0 else 0.0)

    @property
    def kept(self) -> list[float]:
        """The undisturbed repetitions, or all of them if fewer than three are undisturbed."""
        if not self.usage:
            return []
        limit = QUIET * max(self.usage)
        quiet = [s for s, u in zip(self.seconds, self.usage, strict=True) if u >= limit]
        return quiet if len(quiet) >= 3 else list(self.seconds)

    @property
    def median(self) -> float:
        """Median time in seconds of the kept repetitions."""
        return statistics.median(self.kept)

    @property
    def best(self) -> float:
        """Time in seconds of the fastest repetition."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, relative to the median (0: all equal)."""
        kept = self.kept
        if len(kept) < 2:
            return 0.0
        low, _, high = statistics.quantiles(kept, n=4, method="inclusive")
        return (high - low) / self.median

    def to_json(self) -> dict[str, object]:
        """The numbers that are written to a result file."""
        return {
            "seconds": self.median,
            "best_seconds": self.best,
            "spread": self.spread,
            "repetitions": len(self.seconds),
            "kept": len(self.kept),
        }


def interleave(
    contestants: Mapping[str, Callable[[int], object]],
    *,
    seconds: float = 0.5,
    minimum: int = 3,
    maximum: int = 200,
) -> dict[str, Timing]:
    """Times callables, whose repetitions alternate.

    Args:
        contestants: Callables by name. Each receives the number of the repetition, with which it
            can rotate its buffers.
        seconds: Approximate time of each contestant. If its warm-up alone takes more than eight
            times as long, it is not run again, and the warm-up is its only repetition.
        minimum: Least number of repetitions of all other contestants, however long they take.
        maximum: Largest number of repetitions.

    Returns:
        Timings by name, with at least one repetition each.
    """
    results = {name: Timing() for name in contestants}
    spent = dict.fromkeys(contestants, 0.0)
    active = []
    for name, call in contestants.items():
        elapsed, processor = _once(call, 0)
        if elapsed > 8 * seconds:
            results[name].add(elapsed, processor)
        else:
            active.append(name)
    for repetition in range(1, maximum + 1):
        active = [n for n in active if repetition <= minimum or spent[n] < seconds]
        if not active:
            break
        # The order alternates, so that no contestant always runs after the same other one.
        for name in active if repetition % 2 else reversed(active):
            elapsed, processor = _once(contestants[name], repetition)
            results[name].add(elapsed, processor)
            spent[name] += elapsed
    return results


def _once(call: Callable[[int], object], repetition: int) -> tuple[float, float]:
    processor = time.process_time()
    start = time.perf_counter()
    call(repetition)
    elapsed = time.perf_counter() - start
    return elapsed, time.process_time() - processor
