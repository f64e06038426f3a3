"""Records of the machines on which each kernel was run, and of kernels that were only compiled.

`provenance.json` beside this file is part of the package and is never edited by hand.
`tilewise doctor --record` adds CPU records on machines where the self-test passed. GPU records are
made from the results of `make gpu-check`:

    python -m tilewise.cli.provenance docs/results/gpu-*.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tilewise._capabilities import OWN_TABLE, cuda_code, family_of
from tilewise.cli import gpu, system

# The tile tables of mma_sync, those that every build contains as PTX, and the name that a result of
# gpu-check gives to a run that was forced to use one.
TABLES = (75, 80, 86, 90, 120)
PTX_TABLES = (75, 80)
FORCED = re.compile(r"forced-(\d+)$")
# Families that no GPU has proved: gpu-check runs them in a run of their own.
UNPROVED = ("cuda.tcgen05",)
SHORT_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

FILE = Path(__file__).with_name("provenance.json")


def load(path: Path = FILE) -> list[dict[str, Any]]:
    """The records: {"kernel", "device", "machine", "version", "date", "dtypes", "checks"}.

    Raises:
        ValueError: the file does not contain such records.
    """
    if not path.exists():
        return []
    try:
        records: list[dict[str, Any]] = json.loads(path.read_text())["records"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a file of provenance records") from None
    return records


def check(path: Path) -> None:
    """Raises ValueError or OSError if ``record`` could not add to the file."""
    if not path.resolve().parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.resolve().parent}")
    load(path)


def record(path: Path, checks: Iterable[Any]) -> int:
    """Adds this machine's passed checks to the file, replacing its earlier records.

    Args:
        path: The file, which is created if it does not exist.
        checks: selftest.Check objects.

    Returns:
        The number of records that this machine has now. An instruction set with a failed check gets
        none.
    """
    checks = list(checks)
    machine = system.cpu_name()
    records = [r for r in load(path) if r["machine"] != machine]
    added = 0
    for isa in dict.fromkeys(c.isa for c in checks if not c.isa.startswith("gpu")):
        of_isa = [c for c in checks if c.isa == isa]
        if not all(c.passed for c in of_isa):
            continue
        added += 1
        records.append(
            {
                "kernel": f"cpu.{isa}",
                "device": "cpu",
                "machine": machine,
                "version": system.versions()["tilewise"],
                "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
                "dtypes": sorted({c.dtype for c in of_isa}),
                "checks": len(of_isa),
            }
        )
    records.sort(key=lambda r: (r["kernel"], r["machine"]))
    path.write_text(json.dumps({"records": records}, indent=1) + "\n")
    return added


def from_gpu_check(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one result file of gpu-check.

    A family counts as run with the tiles of a table if every test of that run passed and none was
    skipped for lack of time. The tests of other runs say nothing about it. A GPU with wgmma runs
    mma_sync only if it is forced to.
    """
    stages = result["stages"]
    ran = stages.get("tests", {})
    sm = int(result["gpu"]["compute_capability"].replace(".", ""))
    chosen = max((table for table in TABLES if table <= sm), default=0)
    kernels = [name.split(".") for name in stages.get("smoke", {}).get("kernels", [])]
    records = []
    families = dict.fromkeys(".".join(parts[:2]) for parts in kernels)
    for family in families:
        dtypes = {SHORT_DTYPES.get(p[3], p[3]) for p in kernels if ".".join(p[:2]) == family}
        for name, report in ran.items():
            forced = FORCED.match(name)
            if not isinstance(report, dict) or not (forced or name in ("native", "unproved")):
                continue
            if (name == "unproved") != (family in UNPROVED):
                continue
            if not report["passed"] or report.get("failed") or report.get("not_run"):
                continue
            table = int(forced[1]) if forced else chosen
            if family != "cuda.mma_sync":
                if forced:  # its kernels have one table or none, so this run adds nothing
                    continue
                table = OWN_TABLE.get(family, 0)
            elif not forced and "cuda.wgmma" in families:
                continue
            how = ""
            if family == "cuda.mma_sync" and table != chosen:
                how = ", by PTX" if table in PTX_TABLES else ", compiled for it"
            records.append(
                {
                    "kernel": family,
                    "device": "cuda",
                    "table": table,
                    "machine": result["gpu"]["name"] + how,
                    "version": result["versions"].get("tilewise", ""),
                    "date": result["date"],
                    "dtypes": sorted({"float16"} & dtypes if table == 75 else dtypes),
                    "checks": report["passed"],
                    "sources": result["sources"],
                }
            )
    return records


def status(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per kernel family, and for CUDA per tile table of this build or of a record. The
    state of a row is "run" (with the machines), "only compiled" or "not in this build".
    """
    built = {row["table"] for row in cuda_code()}
    recorded = {r.get("table", 0) for r in records if r["device"] == "cuda"}
    rows = []
    for family in dict.fromkeys(row["kernel"] for row in system.kernels()):
        of_family = [r for r in records if r["kernel"] == family]
        if not family.startswith("cuda."):
            rows.append(_row(family, of_family, True))
            continue
        tables = sorted(t for t in built | recorded if family == family_of(t))
        for table in tables:
            name = f"{family} tiles of {gpu.table_name(table)}" if table else family
            runs = [r for r in of_family if r.get("table", 0) == table]
            rows.append(_row(name, runs, table in built))
        if not tables:
            rows.append(_row(family, [], False))
    return rows


def _row(kernel: str, runs: list[dict[str, Any]], built: bool) -> dict[str, Any]:
    state = ("run" if runs else "only compiled") if built else "not in this build"
    return {"kernel": kernel, "state": state, "runs": runs}


def main(arguments: Sequence[str], path: Path = FILE) -> int:
    """Replaces the GPU records with those of the given result files. Returns the exit status."""
    if not arguments:
        print("usage: python -m tilewise.cli.provenance docs/results/gpu-*.json", file=sys.stderr)
        return 2
    records = [r for r in load(path) if r["device"] != "cuda"]
    for file in arguments:
        records += from_gpu_check(json.loads(Path(file).read_text()))
    records.sort(key=lambda r: (r["kernel"], r.get("table", 0), r["machine"]))
    path.write_text(json.dumps({"records": records}, indent=1) + "\n")
    found = sum(r["device"] == "cuda" for r in records)
    print(f"{found} GPU records in {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
