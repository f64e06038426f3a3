"""Which kernels have been run, on which machine, and which only compiled.

`provenance.json` beside this file is written by `tilewise doctor --record` on machines where the
self-test passed, never by hand; it travels in the package.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tilewise.cli import system

FILE = Path(__file__).with_name("provenance.json")


def load(path: Path = FILE) -> list[dict[str, Any]]:
    """The records: {"kernel", "device", "machine", "version", "date", "dtypes", "checks"}."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    return records


def record(path: Path, checks: Iterable[Any]) -> int:
    """Adds this machine's passed checks to the file, replacing its earlier records.

    Args:
        path: the file; made if it is not there.
        checks: selftest.Check objects.

    Returns:
        How many records this machine has now. An instruction set with a failed check gets none.
    """
    checks = list(checks)
    machine = system.cpu_name()
    records = [r for r in load(path) if r["machine"] != machine]
    added = 0
    for isa in dict.fromkeys(c.isa for c in checks):
        mine = [c for c in checks if c.isa == isa]
        if not all(c.passed for c in mine):
            continue
        added += 1
        records.append(
            {
                "kernel": f"cpu.{isa}",
                "device": "cpu",
                "machine": machine,
                "version": system.versions()["tilewise"],
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
                "dtypes": sorted({c.dtype for c in mine}),
                "checks": len(mine),
            }
        )
    records.sort(key=lambda r: (r["kernel"], r["machine"]))
    path.write_text(json.dumps({"records": records}, indent=1) + "\n")
    return added


def status(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kernel family of this build: where it was run, or that it only compiled."""
    families = dict.fromkeys(row["kernel"] for row in system.kernels())
    rows = []
    for family in families:
        runs = [r for r in records if r["kernel"] == family]
        rows.append({"kernel": family, "state": "run" if runs else "only compiled", "runs": runs})
    return rows
