"""Peak memory of a call, measured by the operating system (Linux).

The process's high-water mark is reset before the call and read after it. The call runs in a child
process whose allocator returns every larger block to the system at once; otherwise memory retained
from earlier calls would hide what this one needs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def can_measure() -> bool:
    """Whether this system lets a process reset its high-water mark."""
    return _CLEAR.exists() and os.access(_CLEAR, os.W_OK)


def available() -> int:
    """Bytes of memory that can be allocated without swapping; 0 if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def peak(call: Callable[[], object]) -> int:
    """Bytes of resident memory that `call` needs beyond those in use before it."""
    _CLEAR.write_text("5")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def measure(jobs: Sequence[dict[str, Any]], threads: int) -> Iterator[int | None]:
    """Peak bytes of attention jobs (see run_job), one after the other in one child process.

    Yields None for a job that failed (out of memory), and for all that follow it.
    """
    command = [sys.executable, "-m", "tilewise.cli.memory", str(threads)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdin is not None and child.stdout is not None
    ended = False
    try:
        for job in jobs:
            line = ""
            if not ended:
                with contextlib.suppress(OSError):  # it has died before it could read the job
                    child.stdin.write(json.dumps(job) + "\n")
                    child.stdin.flush()
                    line = child.stdout.readline()
            ended = not line.strip()
            yield None if ended else int(line)
    finally:
        with contextlib.suppress(OSError):
            child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()


def run_job(job: dict[str, Any]) -> int:
    """Peak bytes beyond the inputs of a job {"backend": ..., "problem": {fields of Problem}}."""
    from tilewise.cli import contestants

    problem = contestants.Problem(**job["problem"])
    inputs = problem.inputs()
    call = contestants.prepare(job["backend"], problem, inputs)
    small = contestants.Problem(**{**job["problem"], "length": 64})
    # Allocates thread stacks and loads code pages, which do not belong to the job.
    contestants.prepare(job["backend"], small, small.inputs())(0)
    return peak(lambda: call(0))


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


def _return_blocks_at_once() -> None:
    """Makes glibc map blocks of 64 KB and more from the system and return them when freed."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 64 << 10)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 10)
    except (OSError, AttributeError):
        pass


def _run_jobs() -> None:
    """Runs in the child: reads jobs from stdin and prints the peak of each."""
    import torch

    torch.set_num_threads(int(sys.argv[1]))
    _return_blocks_at_once()
    for line in sys.stdin:
        print(run_job(json.loads(line)), flush=True)


if __name__ == "__main__":
    _run_jobs()
