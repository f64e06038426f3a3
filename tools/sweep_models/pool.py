"""Worker processes that sweep one class after another; a crash or a hang is a result."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

TIME_LIMIT = 120  # seconds for one class; the slowest ones take 10 on an idle core
START_LIMIT = 180  # for the imports
END_LIMIT = 20  # for a process that has closed its output, and may still free its memory
CLASSES_PER_WORKER = 120  # every loaded model file stays in memory
COMMAND = (sys.executable, "-m", "sweep_models.worker")


class Worker:
    """One process, started on first use."""

    def __init__(self, command: Sequence[str] = COMMAND, limit: float = TIME_LIMIT) -> None:
        self._command, self._limit = command, limit
        self._process: subprocess.Popen[bytes] | None = None
        self._swept = 0

    def sweep(self, name: str) -> dict[str, Any]:
        """The result of this class."""
        if self._process is None or self._swept >= CLASSES_PER_WORKER:
            self.close()
            self._start()
        self._swept += 1
        assert self._process is not None and self._process.stdin is not None
        begin = time.monotonic()
        self._process.stdin.write(name.encode() + b"\n")
        self._process.stdin.flush()
        line = self._line(self._limit)
        seconds = round(time.monotonic() - begin, 1)
        if line:
            return {**json.loads(line), "seconds": seconds}
        why = self._end() if line is not None else f"no result within {self._limit:g} s"
        self.close()
        return {"state": "failed", "why": why, "seconds": seconds}

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        here = Path(__file__).resolve().parent.parent
        path = os.pathsep.join(filter(None, (str(here), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: os.nice(10) and None,
        )
        self._swept = 0
        line = self._line(START_LIMIT)
        if line != b"ready\n":
            why = self._end() if line == b"" else f"not ready within {START_LIMIT} s"
            self.close()
            raise RuntimeError(f"a worker does not start: {why}; run it by hand: "
                               "PYTHONPATH=tools python -m sweep_models.worker")  # fmt: skip

    def _line(self, limit: float) -> bytes | None:
        """The next line; empty if the process has ended, None if the time has run out."""
        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit)
        return self._process.stdout.readline() if ready else None

    def _end(self) -> str:
        """How a process ended that has closed its output."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=END_LIMIT)
        except subprocess.TimeoutExpired:
            return f"the process closed its output and did not end within {END_LIMIT} s"
        return f"the process ended with {signal.Signals(-code).name if code < 0 else code}"


def sweep(
    names: Iterable[str],
    processes: int,
    done: Callable[[str, dict[str, Any]], None],
    limit: float = TIME_LIMIT,
) -> None:
    """Sweeps these classes, each for at most ``limit`` seconds; ``done`` is called with every
    result, in one thread at a time.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    lock = threading.Lock()
    problems: list[BaseException] = []

    def work() -> None:
        worker = Worker(limit=limit)
        try:
            while not problems:
                name = waiting.get_nowait()
                result = worker.sweep(name)
                with lock:
                    done(name, result)
        except queue.Empty:
            pass
        except BaseException as error:
            problems.append(error)
        finally:
            worker.close()

    threads = [threading.Thread(target=work) for _ in range(processes)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt as interrupt:
        problems.append(interrupt)
        for thread in threads:
            thread.join()
    if problems:
        raise problems[0]
