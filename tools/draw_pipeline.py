#!/usr/bin/env python3
"""Draws the pipeline of the Hopper forward: docs/images/hopper-forward.svg.

  tools/draw_pipeline.py           writes the drawing
  tools/draw_pipeline.py --check   exit status 1 if the file is not what this script writes

The drawing is a schedule, not a measurement: it shows the order of loads, products and softmax of
one CTA with two consumer warpgroups and four key tiles, and which barriers connect them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

FIGURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "hopper-forward.svg"

UNIT = 11  # pixels of a time step; a product takes 4
ROW = 46
LEFT = 190
TOP = 40
BEGIN, END = -12, 76
ROWS = (
    ("scheduler warp", "the next work tile"),
    ("producer warp", "TMA loads"),
    ("warpgroup 0", "products on tensor cores"),
    ("", "softmax"),
    ("warpgroup 1", "products on tensor cores"),
    ("", "softmax"),
)
COLOURS = {"tile": "#d9d9d9", "q": "#f6c891", "k": "#9ec9ec", "v": "#a9d8a5", "p": "#e3b9e0"}


class Bar(NamedTuple):
    """A bar of the drawing: one operation and its duration. A prime marks the next work tile."""

    row: int
    begin: int
    length: int
    label: str
    colour: str


def consumer(row: int, at: int) -> list[Bar]:
    """The bars of a warpgroup whose first product starts at `at`; it alternates with the other."""
    bars = [Bar(row, at, 4, "S3", "k")]
    for step, (s, o) in enumerate((("S2", "O3"), ("S1", "O2"), ("S0", "O1"), ("S3'", "O0"))):
        begin = 8 + 16 * step + 2 * at
        bars += [Bar(row, begin, 4, s, "k"), Bar(row, begin + 4, 4, o, "v")]
    bars.append(Bar(row + 1, at + 4, 4, "P3", "p"))
    for step, p in enumerate(("P2", "P1", "P0")):
        bars.append(Bar(row + 1, 12 + 16 * step + 2 * at, 6, p, "p"))
    bars.append(Bar(row + 1, 64 + 2 * at, min(6, END - 64 - 2 * at), "store", "tile"))
    return bars


LOADS = ((-9, "Q", "q"), (-6, "K3", "k"), (-3, "K2", "k"), (0, "V3", "v"), (3, "V2", "v"),
         (8, "K1", "k"), (20, "K0", "k"), (24, "V1", "v"), (30, "Q'", "q"), (36, "K3'", "k"),
         (40, "V0", "v"), (52, "K2'", "k"), (56, "V3'", "v"))  # fmt: skip

BARS = [
    Bar(0, -12, 6, "tile n", "tile"),
    Bar(0, -4, 6, "n + 1", "tile"),
    Bar(0, 30, 6, "n + 2", "tile"),
    *(Bar(1, at, 3, label, colour) for at, label, colour in LOADS),
    *consumer(2, 0),
    *consumer(4, 4),
]

# From (row, time) to (row, time): the barrier that a consumer waits for, or that a load waits for.
FULL = (((1, -3), (2, 0)), ((1, 11), (2, 24)), ((1, 27), (2, 44)), ((1, 43), (2, 60)))
EMPTY = (((4, 8), (1, 8)), ((4, 20), (1, 20)), ((4, 24), (1, 24)), ((4, 40), (1, 40)))


def x_of(time: float) -> float:
    """The x coordinate of a time, in pixels."""
    return LEFT + (time - BEGIN) * UNIT


def text(x: float, y: float, words: str, size: int = 12, more: str = "") -> str:
    """An SVG text at a position."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" {more}>{words}</text>'


def arrow(begin: tuple[int, int], end: tuple[int, int], dashed: bool) -> str:
    """A line between two bars, from the lower or upper edge of one to the other's."""
    (row, time), (to_row, to_time) = begin, end
    y = TOP + row * ROW + (30 if to_row > row else 6)
    to_y = TOP + to_row * ROW + (6 if to_row > row else 30)
    style = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x_of(time):g}" y1="{y}" x2="{x_of(to_time):g}" y2="{to_y}" stroke="#444"'
        f'{style} marker-end="url(#head)"/>'
    )


def drawing() -> str:
    """The SVG."""
    width, height = int(x_of(END)) + 10, TOP + len(ROWS) * ROW + 62
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif">',
        '<defs><marker id="head" markerWidth="7" markerHeight="6" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z" fill="#444"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 22, "one work tile of 128 query rows, key tiles 3 to 0", 13),
        text(x_of(56), 22, "next work tile (')", 13),
    ]
    for row, (name, what) in enumerate(ROWS):
        y = TOP + row * ROW
        out.append(
            f'<line x1="{LEFT}" y1="{y + 36}" x2="{width - 8}" y2="{y + 36}" stroke="#ccc"/>'
        )
        out.append(text(8, y + 16, name, 13, 'font-weight="bold"'))
        out.append(text(8, y + 31, what, 11))
    for bar in BARS:
        x, y = x_of(bar.begin), TOP + bar.row * ROW + 6
        fill = COLOURS[bar.colour]
        out.append(
            f'<rect x="{x:g}" y="{y}" width="{bar.length * UNIT - 1}" height="24" rx="2" '
            f'fill="{fill}" stroke="#666" stroke-width="0.6"/>'
        )
        middle = x + bar.length * UNIT / 2
        out.append(text(middle, y + 16, bar.label, 11, 'text-anchor="middle"'))
    out += [arrow(*ends, dashed=False) for ends in FULL]
    out += [arrow(*ends, dashed=True) for ends in EMPTY]
    y = height - 34
    notes = (
        "Sn = Q Kn^T, Pn = softmax weights of Sn, On: O += Pn Vn. K and V have two stages each; "
        "time runs to the right.",
        "Solid arrows: full barriers (a stage has landed; one per load is drawn for warpgroup 0). "
        "Dashed: empty barriers (both warpgroups have read the stage).",
    )
    out += [text(8, y + 18 * i, note, 12) for i, note in enumerate(notes)]
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    """Writes or checks the file."""
    parser = argparse.ArgumentParser(description="Draws the pipeline of the Hopper forward.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    if parser.parse_args().check:
        same = FIGURE.is_file() and FIGURE.read_text() == drawing()
        if not same:
            print(f"{FIGURE.name}: not what tools/draw_pipeline.py writes; run `make results`")
        return 0 if same else 1
    FIGURE.write_text(drawing())
    return 0


if __name__ == "__main__":
    sys.exit(main())
