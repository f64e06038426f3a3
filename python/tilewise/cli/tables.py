"""Tables by rich if it is installed and the output is a terminal, in plain text otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence


def show(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    left: Collection[int] = (),
    strong: Callable[[Sequence[str]], bool] = lambda _: False,
) -> None:
    """Prints a table.

    Args:
        head: Column titles.
        lines: Cells, as many per line as titles.
        left: Indices of the columns that are left-aligned; the others hold numbers and are
            right-aligned.
        strong: Whether a line is printed in bold, if the output can show it.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table(box=None, pad_edge=False)
            for column, text in enumerate(head):
                table.add_column(text, justify="left" if column in left else "right")
            for line in lines:
                table.add_row(*line, style="bold" if strong(line) else None)
            Console().print(table)
            return
    print(plain(head, lines, left=left))


def count(number: int, thing: str) -> str:
    """The number with its noun, such as "1 thread" or "2 threads"."""
    return f"{number} {thing}" + ("" if number == 1 else "s")


def plain(
    head: Sequence[str], lines: Sequence[Sequence[str]], *, left: Collection[int] = ()
) -> str:
    """The table as text, columns two spaces apart."""
    widths = [max(len(row[c]) for row in [head, *lines]) for c in range(len(head))]

    def one(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(one(row) for row in [head, *lines])
