"""Entry of the `tilewise` command: finds the subcommand and turns failures into sentences."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import tilewise
from tilewise.cli import bench, doctor

DESCRIPTION = """Exact attention in linear memory.

examples:
  tilewise doctor                     what runs here, and does it compute the right thing
  tilewise bench --seqlens 512,2048   beside PyTorch's own attention; --plot FILE draws it
"""


class PrintVersion(argparse.Action):
    """The version is the library's, which is loaded when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            print(f"tilewise {tilewise.__version__}")
        except ImportError as error:
            parser.exit(2, f"tilewise: {error}\n")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="tilewise",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=PrintVersion, nargs=0, help="print it and leave")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor.add_parser(commands)
    bench.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status: 0 all well, 1 a check failed, 2 cannot run."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"tilewise {options.command}: {error}", file=sys.stderr)
        return 2
    return status
