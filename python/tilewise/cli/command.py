"""Entry point of the `tilewise` command: runs the subcommand and prints its errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import tilewise
from tilewise.cli import bench, doctor

DESCRIPTION = """Exact attention in linear memory.

examples:
  tilewise doctor                     which kernels run here, and whether they are correct
  tilewise bench --seqlens 512,2048   speed beside PyTorch's own attention; --plot FILE draws it
"""


class PrintVersion(argparse.Action):
    """Prints the version. Only this action loads the library, from which the version comes."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            print(f"tilewise {tilewise.__version__}")
        except ImportError as error:
            parser.exit(2, f"tilewise: {error}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="tilewise",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=PrintVersion, nargs=0, help="print the version and exit")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    bench.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit status: 0 success, 1 a check failed, 2 the command cannot run, 130 interrupted.
    """
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"tilewise {options.command}: {error}", file=sys.stderr)
        return 2
    return status
