"""Time (interleaved) and peak memory of each backend over sequence length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tilewise.cli.contestants import Problem

# A backend that holds score matrices is not run if its copies of them (scores, weights, their
# gradients and one or two casts) would take more than this fraction of the free memory.
MEMORY_FRACTION = 0.4
SCORE_COPIES = 6


def measure(
    problem: Problem,
    lengths: Sequence[int],
    backends: Sequence[str],
    *,
    seconds: float,
    memory: bool = True,
    progress: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Times every backend at every length, then measures peak memory.

    Args:
        problem: The attention, whose length is replaced by each of `lengths`.
        lengths: Sequence lengths.
        backends: Keys of contestants.ATTEND.
        seconds: Approximate time that each backend runs at each length.
        memory: Whether to measure peak memory as well.
        progress: Called once per length for time, and once per length for memory.

    Returns:
        One row per backend and length, with the problem's fields and "backend". If it ran, the row
        has "seconds", "spread", "rate" (FLOP per second) and, if measured, "peak_bytes"; otherwise
        "left_out" gives the reason.
    """
    rows = []
    for length in lengths:
        rows += _time(dataclasses.replace(problem, length=length), backends, seconds)
        progress()
    if memory:
        _add_memory(problem.device, rows, progress)
    return rows


def _time(problem: Problem, backends: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    from tilewise.cli import contestants
    from tilewise.cli.timing import interleave

    inputs = problem.inputs()
    rows, calls = [], {}
    for name in backends:
        row = {**problem.to_json(), "backend": name}
        rows.append(row)
        reason = _too_large(problem, name)
        if not reason:
            call = contestants.prepare(name, problem, inputs)
            try:
                call(0)
            except RuntimeError as error:  # this backend does not support this problem
                reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            else:
                calls[name] = _synchronous(call, problem.device)
        if reason:
            row["left_out"] = reason
    timings = interleave(calls, seconds=seconds)
    for row in rows:
        if row["backend"] in timings:
            timing = timings[row["backend"]]
            row.update(timing.to_json())
            row["rate"] = problem.flop / timing.median
    return rows


def _too_large(problem: Problem, backend: str) -> str:
    from tilewise.cli import contestants
    from tilewise.cli.memory import available

    needed = SCORE_COPIES * problem.score_bytes
    free = available()
    if problem.device != "cpu" or backend not in contestants.QUADRATIC or not free:
        return ""
    if needed <= MEMORY_FRACTION * free:
        return ""
    return f"needs about {needed / 1e9:.1f} GB of score matrices, but {free / 1e9:.1f} GB are free"


def _synchronous(call: Callable[[int], object], device: str) -> Callable[[int], object]:
    if device == "cpu":
        return call

    import torch

    def waiting(repetition: int) -> None:
        call(repetition)
        torch.cuda.synchronize()

    return waiting


def _add_memory(device: str, rows: list[dict[str, Any]], progress: Callable[[], None]) -> None:
    import torch

    from tilewise.cli import contestants, memory

    ran = [row for row in rows if "rate" in row]
    names = [f.name for f in dataclasses.fields(contestants.Problem)]
    jobs = [
        {"backend": row["backend"], "problem": {n: row[n] for n in names}, "length": row["length"]}
        for row in ran
    ]
    last = None
    if device == "cpu" and memory.can_measure():
        peaks = memory.measure(jobs, torch.get_num_threads())
    elif device == "cuda":
        peaks = (_cuda_peak(job) for job in jobs)
    else:
        return
    for row, peak in zip(ran, peaks, strict=True):
        if peak is not None:
            row["peak_bytes"] = peak
        if last not in (None, row["length"]):
            progress()
        last = row["length"]
    progress()


def _cuda_peak(job: dict[str, Any]) -> int:
    import torch

    from tilewise.cli import contestants

    problem = contestants.Problem(**job["problem"])
    call = contestants.prepare(job["backend"], problem, problem.inputs())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
