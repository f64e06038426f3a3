"""Timing on a GPU: medians of CUDA events, in alternating rounds after a warm-up, with the L2 cache
flushed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import gpu_power


@dataclass
class Timing:
    """Milliseconds of each round, and the GPU's power during it, where it was read."""

    rounds: list[float]
    power: list[gpu_power.Reading] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median milliseconds."""
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, relative to the median."""
        if len(self.rounds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return (high - low) / self.median


class Clock:
    """Times calls on a device: by events on a GPU, and by wall clock on the CPU, where only the
    script itself is tested.
    """

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.meter = gpu_power.Meter(device)
        if self.cuda:
            l2 = torch.cuda.get_device_properties().L2_cache_size
            # Long enough (0.1 ms) for the CPU to have queued the call before it starts.
            self._flush = torch.empty(max(4 * l2, 512 << 20), dtype=torch.uint8, device=device)

    def interleave(
        self, calls: Mapping[str, Callable[[], Any]], rounds: int, warm: int = 2
    ) -> dict[str, Timing]:
        """Times all calls alternately; every other round runs in reverse order."""
        pending: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for repetition in range(-warm, rounds):
            order = list(calls) if repetition % 2 else list(reversed(calls))
            for name in order:
                measured = self._once(calls[name])
                if repetition >= 0:
                    pending[name].append(measured)
            if self.cuda:  # keeps the GPU busy without letting the CPU run far ahead
                torch.cuda.synchronize()
        return {n: Timing([self._between(*m) for m in marks]) for n, marks in pending.items()}

    def back_to_back(
        self, calls: Mapping[str, Callable[[], Any]], seconds: float
    ) -> dict[str, Timing]:
        """Milliseconds per call when the device is never idle, as in training, where it is slower.

        Every call repeats for `seconds`, then again in reverse order; the first third is not
        counted.
        """
        timings = {name: Timing([]) for name in calls}
        for name in [*calls, *reversed(calls)]:
            self.meter.start()
            begin = time.perf_counter()
            timings[name].rounds.append(self._in_a_row(calls[name], seconds))
            reading = self.meter.stop(begin + (time.perf_counter() - begin) / 3)
            timings[name].power += [reading] if reading is not None else []
        return timings

    def _in_a_row(self, call: Callable[[], Any], seconds: float, calls_per_mark: int = 8) -> float:
        marks = [self._mark()]
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds or len(marks) < 4:
            for _ in range(calls_per_mark):
                call()
            marks.append(self._mark())
            if self.cuda:  # keeps the CPU only a little ahead
                marks[max(0, len(marks) - 4)].synchronize()
        if self.cuda:
            torch.cuda.synchronize()
        first = len(marks) // 3
        return self._between(marks[first], marks[-1]) / (calls_per_mark * (len(marks) - 1 - first))

    def _once(self, call: Callable[[], Any]) -> tuple[Any, Any]:
        if self.cuda:
            self._flush.zero_()
        begin = self._mark()
        call()
        return begin, self._mark()

    def _mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin))


def roofline(clock: Clock, device: str, size: int = 8192, gigabytes: float = 1.0) -> dict[str, Any]:
    """The speed of a bf16 matrix product and a memory copy on this machine, in the same run."""
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    source = torch.empty(int(gigabytes * 1e9), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    timings = clock.interleave({"gemm": lambda: a @ b, "copy": lambda: target.copy_(source)}, 10)
    return {
        "gemm_bf16_size": size,
        "gemm_bf16_tflops": 2.0 * size**3 / timings["gemm"].median / 1e9,
        "copy_gb_s": 2.0 * source.numel() / timings["copy"].median / 1e6,
    }


def graph_of(call: Callable[[], Any], launches: int) -> Callable[[], None]:
    """A function that replays a CUDA graph of this many calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            call()
    return graph.replay


def launch_overhead(
    calls: Mapping[str, Callable[[], Any]], device: str, calls_in_a_row: int = 100, rounds: int = 15
) -> dict[str, dict[str, float]]:
    """Microseconds that a call keeps Python busy, and until its result is available on an idle GPU.

    The first is the time of many calls in a row, which the GPU processes meanwhile and which are
    too few to fill its queue. Both are medians of interleaved rounds.
    """

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    row: dict[str, list[float]] = {name: [] for name in calls}
    alone: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(-2, rounds):
        for name in list(calls) if repetition % 2 else list(reversed(calls)):
            call = calls[name]
            wait()
            begin = time.perf_counter()
            for _ in range(calls_in_a_row):
                call()
            busy = time.perf_counter() - begin
            wait()
            singles = []
            for _ in range(10):
                begin = time.perf_counter()
                call()
                wait()
                singles.append(time.perf_counter() - begin)
            if repetition >= 0:
                row[name].append(1e6 * busy / calls_in_a_row)
                alone[name].append(1e6 * statistics.median(singles))
    median = statistics.median
    return {n: {"launch_us": median(row[n]), "alone_us": median(alone[n])} for n in calls}
