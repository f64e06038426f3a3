"""The Python tests in several processes that share a GPU.

Each process takes every n-th test. If it hangs or dies, its current test counts as failed, and a
new process continues with the rest: an error inside a kernel ends the GPU context of its process,
and a kernel that waits forever never ends.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .processes import PYTHON, ROOT, end, say, start

CRASHES = 12  # a share is given up after this many


@dataclass
class Share:
    """One n-th of the tests, and the process that currently runs it."""

    name: str
    index: int
    of: int
    folder: Path
    env: dict[str, str]
    arguments: list[str]
    process: subprocess.Popen | None = None
    starts: int = 0
    current: str = ""
    since: float = 0.0
    tests: list[str] = field(default_factory=list)
    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)
    served: Counter = field(default_factory=Counter)  # random problems by kernel
    read: int = 0
    over: bool = False

    @property
    def events(self) -> Path:
        return self.folder / f"{self.name}-{self.index}.events"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}-{self.index}.log"

    def launch(self) -> None:
        self.starts += 1
        self.current, self.since = "", time.time()
        env = {
            **self.env,
            "GPU_CHECK_SHARE": f"{self.index}/{self.of}",
            "GPU_CHECK_EVENTS": str(self.events),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        }
        env["PYTHONPATH"] += f":{ROOT / 'tools'}"
        command = [PYTHON, "-m", "pytest", "-q", "-p", "gpu_check.plugin", "-p", "no:cacheprovider"]
        command.append("--continue-on-collection-errors")
        self.process = start([*command, *self.arguments], self.log, env)

    def note(self, test: str, outcome: str, text: str) -> None:
        """Records an outcome here and for the next process of this share, which skips the test."""
        self.outcomes[test] = outcome, text
        event = {"event": "end", "test": test, "outcome": outcome, "text": text}
        with self.events.open("a") as file:
            file.write(json.dumps({"time": time.time(), **event}) + "\n")

    def update(self) -> None:
        """Reads the events that the process has recorded."""
        if not self.events.is_file():
            return
        with self.events.open() as file:
            file.seek(self.read)
            while line := file.readline():
                if not line.endswith("\n"):
                    break
                self.read = file.tell()
                event = json.loads(line)
                if event["event"] == "collected":
                    self.tests = event["tests"]
                elif event["event"] == "start":
                    self.current, self.since = event["test"], event["time"]
                else:
                    self.outcomes[event["test"]] = event["outcome"], event["text"]
                    self.served.update(event.get("served", {}))
                    self.current, self.since = "", event["time"]

    def watch(self, limit: float) -> None:
        """Ends a process whose test takes too long; starts another one after a crash."""
        assert self.process is not None
        status = self.process.poll()
        self.update()
        if status is None and time.time() - self.since > limit:
            end(self.process)
            if not self.current:  # the process hangs while collecting or exiting
                self.over = True
                return
            self.note(self.current, "failed", f"took longer than {limit:.0f} s")
        elif status is None:
            return
        elif self.current:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])
            self.note(self.current, "failed", f"ended the process, status {status}\n{tail}")
        left = set(self.tests) - set(self.outcomes)
        self.over = not left or self.starts > CRASHES
        if not self.over:
            self.launch()


def counts(shares: list[Share]) -> Counter:
    """Tests by outcome; collected tests without an outcome are `not run`."""
    found = Counter(dict.fromkeys(("passed", "failed", "skipped"), 0))
    found.update(outcome for s in shares for outcome, _ in s.outcomes.values())
    found["not run"] = sum(len(set(s.tests) - set(s.outcomes)) for s in shares)
    return found


def left(shares: list[Share]) -> list[str]:
    """The tests without an outcome; none if a process ended before it had collected its tests."""
    if not all(s.tests for s in shares):
        return []
    return sorted(test for s in shares for test in set(s.tests) - set(s.outcomes))


def run_shares(shares: list[Share], *, limit: float, each: float) -> None:
    """Runs all shares in parallel, with at most `each` seconds per test."""
    begin = spoken = time.monotonic()
    for share in shares:
        share.events.unlink(missing_ok=True)
        share.log.unlink(missing_ok=True)
        share.launch()
    while not all(s.over for s in shares):
        time.sleep(0.25)
        for share in shares:
            if not share.over:
                share.watch(each if share.current else 2 * each)
        now = time.monotonic()
        if now - spoken > 15:
            spoken = now
            say(f"  {now - begin:4.0f} s  {summary(counts(shares))}")
        if now - begin > limit:
            for share in shares:
                if share.process is not None:
                    end(share.process)
                share.update()
                share.over = True


def summary(found: Counter) -> str:
    """The counts in words."""
    names = ("passed", "failed", "skipped", "not run")
    return ", ".join(f"{found[n]} {n}" for n in names if found[n] or n == "passed")


def failures(shares: list[Share], most: int = 300) -> list[dict[str, str]]:
    """The failed tests with their messages."""
    found = [
        {"test": test, "text": re.sub(rf"/\S*/site-packages/|{ROOT}/", "", text[-700:])}
        for share in shares
        for test, (outcome, text) in share.outcomes.items()
        if outcome == "failed"
    ]
    return sorted(found, key=lambda f: f["test"])[:most]


def skips(shares: list[Share]) -> Counter:
    """The number of skipped tests, by reason."""
    return Counter(
        text.removeprefix("Skipped: ")[:120]
        for share in shares
        for outcome, text in share.outcomes.values()
        if outcome == "skipped"
    )
