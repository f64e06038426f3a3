"""Runs test files of FlashAttention 2 and 3 on ``tilewise.compat``, a seeded sample of their cases.

    python tools/run_peer_suites.py CHECKOUT/tests/test_flash_attn.py \
        CHECKOUT/hopper/test_flash_attn.py --seconds 100 --processes 8 --result peers.json

The files are not part of this repository; they are read from a checkout. They need a GPU, pytest
and einops. The time is divided equally between functions; a case that needs more memory than a
process's share of the GPU runs again at the end, by itself. Outcomes:

    passed       the test's own bounds held
    failed       they did not, or a call raised
    skipped      skipped by the test itself
    refused      a call raised NotImplementedError
    deselected   documented as different (tools/peer_suites/known.py), or larger than --largest
    out of memory   even without other processes on the GPU
    not run      the time had run out
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peer_suites.cases import sample
from peer_suites.known import ADAPTED
from peer_suites.worker import Result, Settings, serve

OUTCOMES = ("passed", "failed", "skipped", "refused", "deselected", "out of memory", "not run")
START_SECONDS = 120  # for a process to import torch and the file
GRACE_SECONDS = 5  # for cases that are running when the time runs out
LARGE_FRACTION = 0.15  # of the time, for cases that need all of the memory


Tasks = Callable[[], "tuple[str, int] | None"]


class Suite:
    """The remaining cases of one file, and the outcomes of the others."""

    def __init__(self, found: list[tuple[str, int, str]], options: argparse.Namespace) -> None:
        chosen = [x for x in found if fnmatch.fnmatch(x[0], options.only)]
        self.totals = {name: total for name, total, _ in chosen}
        self.waiting = {
            name: deque(sample(name, total, options.count, options.seed))
            for name, total, _ in chosen
        }
        self.sizes = {name: len(cases) for name, cases in self.waiting.items()}
        self.spent = dict.fromkeys(self.totals, 0.0)
        self.running: Counter[str] = Counter()
        self.large: deque[tuple[str, int]] = deque()  # ran out of memory beside other processes
        self.results: list[Result] = []

    def next(self) -> tuple[str, int] | None:
        """A case of the function that has had the least time so far."""
        names = [name for name, cases in self.waiting.items() if cases]
        if not names:
            return None
        name = min(names, key=lambda x: (self.spent[x] + 0.1 * self.running[x], x))
        self.running[name] += 1
        return name, self.waiting[name].popleft()

    def next_large(self) -> tuple[str, int] | None:
        """A case that needs more memory than a process's share of the GPU."""
        return self.large.popleft() if self.large else None

    def add(self, result: Result, exclusive: bool) -> None:
        self.running[result.function] -= 1
        self.spent[result.function] += result.seconds
        if result.outcome == "out of memory" and not exclusive:
            self.large.append((result.function, result.number))
        else:
            self.results.append(result)

    def summary(self) -> dict[str, Any]:
        """Counts, reasons and failures per function."""
        functions = {}
        for name, total in self.totals.items():
            of_function = [x for x in self.results if x.function == name]
            counts = Counter(x.outcome for x in of_function)
            counts["not run"] = self.sizes[name] - len(of_function)
            reasons = Counter(
                f"{x.outcome}: {x.why}"
                for x in of_function
                if x.outcome not in ("passed", "failed")
            )
            functions[name] = {
                "cases": total,
                "sample": self.sizes[name],
                **{outcome: counts[outcome] for outcome in OUTCOMES},
                "seconds": round(self.spent[name], 1),
                "reasons": dict(reasons.most_common()),
                "failures": [
                    {"case": x.number, "why": x.why} for x in of_function if x.outcome == "failed"
                ],
            }
        return functions


class Workers:
    """Processes with one connection each; each first sends the functions of the file."""

    def __init__(self, settings: Settings, count: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._settings = settings
        self._processes: dict[Connection, Any] = {}
        self.idle: Connection | None = None  # has sent the functions of the file, and waits
        for _ in range(count):
            self.start()

    def start(self) -> Connection:
        """Starts one more process."""
        connection, far_end = self._context.Pipe()
        process = self._context.Process(target=serve, args=(far_end, self._settings), daemon=True)
        process.start()
        far_end.close()
        self._processes[connection] = process
        return connection

    def connections(self) -> list[Connection]:
        """The connections of the running processes."""
        return list(self._processes)

    def receive(self, connection: Connection, task: tuple[str, int] | None) -> Any:
        """The next message; a process that ends without one has failed its case."""
        try:
            message = connection.recv()
        except EOFError:
            message = "a process ended before it could run a case"
            if task is not None:
                return Result(*task, "failed", "the process ended", fatal=True)
        if isinstance(message, str):
            raise SystemExit(message)
        return message

    def functions(self) -> list[tuple[str, int, str]]:
        """The functions of the file, from the first process that reports them."""
        ready = wait(self.connections(), START_SECONDS)
        if not ready:
            raise SystemExit(f"{self._settings.file} was not imported within {START_SECONDS} s")
        assert isinstance(ready[0], Connection)
        self.idle = ready[0]
        return list(self.receive(ready[0], None))

    def drop(self, connection: Connection) -> None:
        """Ends a process."""
        process = self._processes.pop(connection)
        process.terminate()
        process.join(10)
        connection.close()

    def stop(self) -> None:
        """Ends all processes."""
        for connection in self.connections():
            self.drop(connection)


def run_cases(workers: Workers, suite: Suite, tasks: Tasks, until: float, exclusive: bool) -> None:
    """Sends cases to the processes until there are none left, or the time runs out."""
    busy: dict[Connection, tuple[str, int] | None] = dict.fromkeys(workers.connections())

    def send(connection: Connection) -> None:
        if time.monotonic() < until and (task := tasks()) is not None:
            connection.send(task)
            busy[connection] = task

    if workers.idle is not None:
        busy.pop(workers.idle)
        send(workers.idle)
    while busy and (left := until + GRACE_SECONDS - time.monotonic()) > 0:
        for connection in wait(list(busy), left):
            assert isinstance(connection, Connection)
            task = busy.pop(connection)
            message = workers.receive(connection, task)
            if isinstance(message, Result):
                suite.add(message, exclusive)
                if message.fatal:
                    workers.drop(connection)
                    busy[workers.start()] = None
                    continue
            send(connection)


def run_file(file: str, options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Runs the sample of one file; returns the counts per function."""
    begin = time.monotonic()
    settings = Settings(file, options.device, options.largest, 0.95 / options.processes)
    workers = Workers(settings, options.processes)
    suite = Suite(workers.functions(), options)
    run_cases(workers, suite, suite.next, begin + seconds * (1 - LARGE_FRACTION), exclusive=False)
    workers.stop()
    if suite.large:
        workers = Workers(settings._replace(memory=0.98), 1)
        run_cases(workers, suite, suite.next_large, begin + seconds, exclusive=True)
        workers.stop()
    return {"file": "/".join(Path(file).parts[-2:]), "functions": suite.summary()}


def text(results: list[dict[str, Any]]) -> str:
    """A table of counts, then reasons and failures."""
    lines = []
    for result in results:
        lines.append(f"\n{result['file']}")
        lines.append(
            f"{'function':50}{'cases':>8}{'sample':>8}"
            + "".join(f"{outcome:>14}" for outcome in OUTCOMES)
        )
        for name, row in result["functions"].items():
            lines.append(
                f"{name:50}{row['cases']:>8}{row['sample']:>8}"
                + "".join(f"{row[outcome]:>14}" for outcome in OUTCOMES)
            )
        for name, row in result["functions"].items():
            lines += [f"  {name}: {count} {why}" for why, count in row["reasons"].items()]
            lines += [f"  {name}[{x['case']}] FAILED {x['why']}" for x in row["failures"][:10]]
    return "\n".join(lines)


def environment(device: str) -> dict[str, str]:
    """The environment that the numbers were measured in."""
    import torch

    import tilewise

    gpu = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    return {"device": gpu, "torch": torch.__version__, "tilewise": tilewise.__version__}


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", help="test files of a checkout")
    parser.add_argument("--count", type=int, default=300, help="cases per function")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600.0, help="for all files together")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--largest", type=int, default=0, help="deselect cases with larger sizes")
    parser.add_argument("--only", default="*", help="functions, by pattern")
    parser.add_argument("--result", help="JSON file to write")
    options = parser.parse_args(arguments)
    share = options.seconds / len(options.files)
    results = [run_file(file, options, share) for file in options.files]
    print(text(results))
    if options.result:
        settings = {x: getattr(options, x) for x in ("count", "seed", "seconds", "largest")}
        everything = {
            **environment(options.device), **settings, "adapted": ADAPTED, "files": results
        }  # fmt: skip
        Path(options.result).write_text(json.dumps(everything, indent=1) + "\n")
    failed = sum(row["failed"] for x in results for row in x["functions"].values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
