"""Commands with a time limit. No function waits longer than its limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMED_OUT = 124


def say(text: str) -> None:
    """Prints progress immediately."""
    print(text, flush=True)


def end(process: subprocess.Popen) -> None:
    """Ends a process and everything it has started, which is in a separate process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue


def start(command: list[str], log: Path, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Starts a command whose output goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


@dataclass
class Ended:
    """How a command ended."""

    status: int  # TIMED_OUT if it exceeded its limit
    seconds: float
    log: Path

    def output(self) -> str:
        """Everything that it has printed."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines of the output."""
        return self.output().splitlines()[-lines:]


def run(command: list[str], limit: float, log: Path, env: dict[str, str] | None = None) -> Ended:
    """Runs a command for at most `limit` seconds."""
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    process = start(command, log, env)
    try:
        status = process.wait(timeout=max(limit, 1))
    except subprocess.TimeoutExpired:
        end(process)
        status = TIMED_OUT
    return Ended(status, time.monotonic() - begin, log)


def never(_ended: Ended) -> bool:
    """False: the command is not restarted."""
    return False


def run_all(
    commands: dict[str, list[str]], limit: float, folder: Path, env: dict[str, dict[str, str]],
    again: Callable[[Ended], bool] = never,
) -> dict[str, Ended]:  # fmt: skip
    """Runs commands in parallel; those that are not done at the limit are ended.

    Args:
        again: Whether to restart a command that has ended, appending to its log.
    """
    begin = time.monotonic()
    running = {}
    for name, command in commands.items():
        log = folder / f"{name}.log"
        log.unlink(missing_ok=True)
        running[name] = start(command, log, env.get(name))
    done: dict[str, Ended] = {}
    while running:
        for name, process in list(running.items()):
            seconds = time.monotonic() - begin
            status = process.poll()
            if status is None and seconds > limit:
                end(process)
                status = TIMED_OUT
            if status is None:
                continue
            ended = Ended(status, seconds, folder / f"{name}.log")
            if status != TIMED_OUT and again(ended):
                running[name] = start(commands[name], ended.log, env.get(name))
                continue
            done[name] = ended
            del running[name]
        time.sleep(0.1)
    return done


def python_environment(libraries: Path) -> dict[str, str]:
    """The environment in which Python uses the package of this tree with freshly built
    libraries.
    """
    more = os.environ.get("PYTHONPATH", "")  # packages that this machine lacks
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT / "python"), more))),
        "TILEWISE_LIBRARY_DIR": str(libraries),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "2",
        # JAX would take three quarters of the GPU's memory, which many processes share.
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }


PYTHON = sys.executable
