"""Arguments that the GPU benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch


def parser(document: str | None, *, quick: str, on_cpu: str) -> argparse.ArgumentParser:
    """A parser with these arguments.

    Args:
        document: The script's docstring, which `--help` shows.
        quick: What `--quick` measures.
        on_cpu: How times are measured with `--device cpu`, which tests the script itself.
    """
    made = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--quick", action="store_true", help=quick)
    add(
        "--points",
        action="append",
        default=[],
        metavar="WORDS",
        help="only points whose name has all the words (wildcards allowed); repeatable",
    )
    add("--rounds", type=int, help="timed rounds (9; quick 5)")
    add(
        "--time-limit",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="stop measuring after this time",
    )
    add("--list", action="store_true", help="print the names of the points")
    add("--json", type=Path, metavar="FILE", help="write the results, again after every point")
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help=f"cpu tests the script itself: wall-clock times, {on_cpu}",
    )
    return made


def parsed(made: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line; exits with an error message if an argument is invalid."""
    options = made.parse_args(arguments)
    if options.rounds is not None and not 1 <= options.rounds <= 1000:
        made.error(f"--rounds is {options.rounds}, but must be 1 to 1000")
    if options.time_limit < 0:
        made.error(f"--time-limit is {options.time_limit}, but must be 0 (no limit) or more")
    options.rounds = options.rounds or (5 if options.quick else 9)
    return options


def measures(options: argparse.Namespace, names: Sequence[str], script: str) -> bool:
    """Whether to measure the points with these names; with `--list` they are printed instead.

    Exits with an error message if there is no point, or no GPU.
    """
    if options.list:
        print("\n".join(names))
        return False
    if not names:
        raise SystemExit(f"--points {' '.join(options.points)!r} matches no point; see --list")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{script}: torch sees no CUDA device")
    return True
