"""Compares decoding by two builds of the library, in alternating processes of bench_gpu_decode.py.

  python bench/compare_decode.py OLD NEW                          folders with libtilewise.so
  python bench/compare_decode.py OLD NEW --turns 3 --json FILE
  python bench/compare_decode.py OLD NEW -- --points "B96 32/8" --only lengths --only cudnn

Arguments after -- are passed to bench_gpu_decode.py. Each process, or turn, uses one build; every
other pair of turns begins with the new build. The medians of the turns are compared: old over new,
above 1 means that NEW is faster. A peer is the same in both builds and shows the noise of a ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from tilewise.cli import tables
from tilewise.cli.progress import Progress

SCRIPT = Path(__file__).with_name("bench_gpu_decode.py")
BUILDS = ("old", "new")

# Microseconds measured in one turn, by point and contestant.
Times = dict[str, dict[str, float]]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with an error message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for build in BUILDS:
        parser.add_argument(
            build, type=Path, metavar=build.upper(), help="folder of this build's library"
        )
    parser.add_argument("--turns", type=int, default=2, help="processes per build (2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to FILE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:end])
    options.rest = given[end + 1 :]
    if not 1 <= options.turns <= 100:
        parser.error(f"--turns is {options.turns}, but must be 1 to 100")
    for build in BUILDS:
        if not (getattr(options, build) / "libtilewise.so").exists():
            parser.error(f"{build.upper()} is {getattr(options, build)}: no libtilewise.so in it")
    return options


def turn(library: Path, rest: Sequence[str]) -> Times:
    """The times that one process has measured.

    Raises:
        SystemExit: The process failed; the message has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        process = subprocess.run(
            [sys.executable, str(SCRIPT), *rest, "--json", str(path)],
            env=os.environ | {"TILEWISE_LIBRARY_DIR": str(library.resolve())},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0 or not path.exists():
            last = (process.stderr + process.stdout).strip().splitlines()[-8:]
            raise SystemExit("\n".join([f"compare_decode: {library}: a turn failed:", *last]))
        rows = json.loads(path.read_text())["rows"]
    return {r["name"]: r["graph_us"] or r["eager_us"] for r in rows}


def compare(turns: dict[str, list[Times]]) -> dict[str, Any]:
    """Medians and ratios of the points that both builds have in every turn."""
    every = [times for build in BUILDS for times in turns[build]]
    points = [p for p in every[0] if all(p in times for times in every)]
    rows = []
    for point in points:
        names = [n for n in every[0][point] if all(n in times[point] for times in every)]
        us = {b: {n: median(t[point][n] for t in turns[b]) for n in names} for b in BUILDS}
        rows.append({"name": point, **us, "ratio": {n: us["old"][n] / us["new"][n] for n in names}})
    found = dict.fromkeys(n for r in rows for n in r["ratio"])
    means = {n: geometric_mean([r["ratio"][n] for r in rows if n in r["ratio"]]) for n in found}
    return {"rows": rows, "means": means}


def show(result: dict[str, Any]) -> None:
    """Prints the table."""
    names = list(result["means"])

    def cell(row: dict[str, Any], name: str) -> str:
        if name not in row["ratio"]:
            return "-"
        return f"{row['old'][name]:.1f} -> {row['new'][name]:.1f} ({row['ratio'][name]:.2f})"

    print("\nMicroseconds, old -> new, in brackets old over new:\n")
    lines = [[r["name"], *(cell(r, n) for n in names)] for r in result["rows"]]
    means = ["geometric mean", *(f"{result['means'][n]:.3f}" for n in names)]
    tables.show(("point", *names), [*lines, means], left=(0,))


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes the results. Returns the exit status."""
    turns: dict[str, list[Times]] = {b: [] for b in BUILDS}
    with Progress(2 * options.turns, "turns") as bar:
        for number in range(options.turns):
            for build in BUILDS if number % 2 == 0 else BUILDS[::-1]:
                turns[build].append(turn(getattr(options, build), options.rest))
                bar.update(build=build)
    result = compare(turns)
    if not result["rows"]:
        raise SystemExit("compare_decode: no point was measured in every turn")
    show(result)
    if options.json is not None:
        libraries = {b: str(getattr(options, b)) for b in BUILDS}
        result |= {"libraries": libraries, "turns": options.turns, "arguments": options.rest}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    try:
        return run(parse(arguments))
    except KeyboardInterrupt:
        print("compare_decode: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
