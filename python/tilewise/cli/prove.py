"""`tilewise doctor --prove`: tests kernel families that no GPU has proved, on the GPUs at hand.

A child process runs the checks of `prove_checks`, because a wrong kernel may crash its process or
never end. Whatever the outcome, a record of it goes into the user's cache directory. The library
uses the family where a record says that it is right and was faster (`tilewise._proofs`).
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from tilewise import _abi, _proofs
from tilewise._library import c_library
from tilewise._proofs import Record
from tilewise.cli import gpu, system, tables
from tilewise.cli.progress import Progress

TIME_LIMIT = 600.0  # seconds for all checks of a family
STEP_LIMIT = 120.0  # seconds for one check; a kernel that hangs ends earlier, with an error
# Environment variables that choose kernels, which would change what is compared.
CHOOSING = ("TILEWISE_UNPROVED", "TILEWISE_FORCE_ARCH")


@dataclass(frozen=True)
class Target:
    """A family that is not proved, and a GPU that can run it."""

    family: str
    index: int
    gpu: str
    sm: int

    def command(self) -> list[str]:
        """The child that runs the checks."""
        return [sys.executable, "-m", "tilewise.cli.prove_checks", self.family, str(self.index)]


@dataclass
class Outcome:
    """The reports of the child."""

    checks: int = 0
    steps: int = 0
    step: str = ""  # the one that was running
    reason: str = ""  # why it did not pass
    faster: list[int] | None = None
    timings: list[dict[str, Any]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """Adds a report of the child."""
        if "steps" in event:
            self.steps = event["steps"]
        elif "step" in event:
            self.checks += bool(self.step)
            self.step = event["step"]
        elif "failed" in event:
            self.reason = f"{event['failed']} ({self.step})"
        else:
            self.checks += bool(self.step)
            self.faster, self.timings = event["faster"], event["timings"]


def families() -> list[str]:
    """The CUDA families of this library that no GPU has proved."""
    library, info, found = c_library(), _abi.sized(_abi.KernelInfo), []
    row = 0
    while library.tilewise_kernel(row, ctypes.byref(info)) == _abi.OK:
        if info.device == _abi.CUDA and not info.proved:
            found.append(info.name.decode())
        row += 1
    return list(dict.fromkeys(found))


def targets() -> list[Target]:
    """The families to prove, each with the first GPU of every kind that can run it.

    To find out whether a GPU can run a family, it is turned on for a moment. That replaces what the
    library knew from the records, so they are applied again afterwards.
    """
    library, cuda = c_library(), cuda_version()
    found: dict[tuple[str, str, int], Target] = {}
    for device in gpu.gpus()[0]:
        for family in families():
            name, sm = device["name"], device["sm"]
            probe = Record(family, name, sm, cuda, None, "", "", "", True)
            _proofs.set_proof(library, probe, (64,))
            plan = gpu.plan(device["index"], "bfloat16", 64, "plain", _abi.FORWARD)
            _proofs.set_proof(library, probe, ())
            if plan["kernel"].startswith(family):
                found.setdefault((family, name, sm), Target(family, device["index"], name, sm))
    _proofs.apply_records(library, system.library_path())
    return list(found.values())


def cuda_version() -> int:
    """The newest CUDA version of the driver, as the C ABI counts it."""
    driver = ctypes.c_int32()
    c_library().tilewise_cuda_versions(None, ctypes.byref(driver))
    return driver.value


def watch(
    command: Sequence[str],
    *,
    quiet: bool,
    limit: float = TIME_LIMIT,
    step_limit: float = STEP_LIMIT,
) -> Outcome:
    """Runs the child to its end or to a time limit, and shows a progress bar."""
    environment = {k: v for k, v in os.environ.items() if k not in CHOOSING}
    outcome, begin = Outcome(), time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        assert child.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(child.stdout, lines), daemon=True)
        reader.start()
        bar: Progress | None = None
        try:
            while True:
                left = min(step_limit, begin + limit - time.monotonic())
                line = lines.get(timeout=max(0.0, left))
                if not line:
                    break
                outcome.take(json.loads(line))
                if bar is None and not quiet:
                    bar = Progress(outcome.steps, "prove").__enter__()
                elif bar is not None and outcome.checks > bar.done:
                    bar.update()
        except queue.Empty:
            seconds = time.monotonic() - begin
            outcome.reason = f"it did not end, and was stopped after {seconds:.0f} s"
            outcome.reason += f" ({outcome.step})" if outcome.step else ""
        except ValueError:
            outcome.reason = f"the checks printed a line that is no report: {line.strip()[:200]}"
        finally:
            child.kill()
            child.wait()
            reader.join()
            child.stdout.close()
            if bar is not None:
                bar.__exit__(None, None, None)
        if outcome.faster is None and not outcome.reason:
            outcome.reason = _crash(child.returncode, errors, outcome.step)
    return outcome


def _read(stream: TextIO, lines: queue.Queue[str]) -> None:
    """Passes on the lines of a stream; an empty one is its end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _crash(status: int, errors: TextIO, step: str) -> str:
    errors.seek(0)
    last = [line.strip() for line in errors if line.strip()][-1:]
    text = f"the process of the checks ended with status {status}"
    return text + "".join(f": {line[:200]}" for line in last) + (f" ({step})" if step else "")


def prove(target: Target, *, quiet: bool) -> Record:
    """Runs the checks of a family on a GPU and writes the record.

    Raises:
        OSError: the record cannot be written.
        RuntimeError: the user has no home directory.
    """
    outcome = watch(target.command(), quiet=quiet)
    passed = outcome.faster is not None and not outcome.reason
    record = Record(
        target.family, target.gpu, target.sm, cuda_version(), _proofs.driver_release(),
        _proofs.file_hash(system.library_path()), c_library().tilewise_version().decode(),
        datetime.date.today().isoformat(), passed, outcome.reason, outcome.checks,
        (outcome.faster or []) if passed else [], outcome.timings,
    )  # fmt: skip
    _proofs.add(record)
    _proofs.set_proof(c_library(), record, record.head_dims)
    return record


def state(record: Record | None, target: Target) -> str:
    """One sentence about a family on a GPU."""
    on, again = f"{target.family} on {target.gpu}", "run tilewise doctor --prove again"
    if os.environ.get("TILEWISE_UNPROVED") == "1":
        return f"{on}: on, because TILEWISE_UNPROVED is 1"
    if record is None:
        return f"{on}: off, because it is not proved on this GPU: run tilewise doctor --prove"
    if not record.passed:
        return f"{on}: off, because it failed on {record.date}: {record.reason}"
    if record.driver != _proofs.driver_release() or record.cuda != cuda_version():
        return f"{on}: off, because its record is of driver {record.driver}: {again}"
    if record.library != _proofs.file_hash(system.library_path()):
        return f"{on}: off, because its record is of another library: {again}"
    if not record.head_dims:
        return f"{on}: off, because it passed {record.checks} checks but was slower"
    dims = ", ".join(map(str, record.head_dims))
    return f"{on}: on for tiles of head dim {dims}, after {record.checks} checks on {record.date}"


def states() -> list[dict[str, Any]]:
    """The families of ``targets`` with their records and a sentence about each."""
    records = {(r.family, r.gpu, r.sm): r for r in _proofs.load()}
    found = []
    for target in targets():
        record = records.get((target.family, target.gpu, target.sm))
        found.append(
            {
                **asdict(target),
                "state": state(record, target),
                "record": asdict(record) if record else None,
            }
        )
    return found


def run(as_json: bool) -> int:
    """Proves all families that can run here. Returns the exit status: 1 if one is not right.

    Raises:
        ValueError: the environment turns all these families off.
        OSError: the record cannot be written.
    """
    unproved, forced = (os.environ.get(name) for name in CHOOSING)
    if unproved == "0":
        raise ValueError(
            "TILEWISE_UNPROVED is 0, which turns off what --prove tests: unset it or set it to 1"
        )
    if forced:
        raise ValueError(
            f"TILEWISE_FORCE_ARCH is {forced}, which turns off what --prove tests: unset it"
        )
    chosen = targets()
    records = []
    for target in chosen:
        if not as_json:
            print(f"{target.family} on {target.gpu}: at most {TIME_LIMIT:.0f} s")
        try:
            records.append(prove(target, quiet=as_json))
        except RuntimeError as error:
            raise OSError(str(error)) from None
        if not as_json:
            show(records[-1])
    if as_json:
        passed = all(record.passed for record in records)
        print(json.dumps({"states": states(), "passed": passed}, indent=1))
    elif not chosen:
        print("Nothing to prove: no GPU here can run a family that is not proved.")
    else:
        print(*(row["state"] for row in states()), sep="\n")
        print(f"The record is in {_proofs.file()}")
    return 0 if all(record.passed for record in records) else 1


def show(record: Record) -> None:
    """Prints the timings of a record."""
    if not record.passed:
        return
    lines = [
        [
            str(t["head_dim"]),
            "causal" if t["causal"] else "full",
            f"{t['batch']} x {t['rows']}",
            f"{1e3 * t['seconds']:.3f}",
            f"{1e3 * t['other_seconds']:.3f}",
            f"{t['other_seconds'] / t['seconds']:.2f}",
        ]
        for t in record.timings
    ]
    head = ["head dim", "mask", "batch x rows", f"{record.family}, ms", "without it, ms", "speedup"]
    tables.show(head, lines, left=(1, 2))
