"""Plots a result of bench_gpu_decode.py: GB/s per batch size and number of keys.

  python bench/plot_decode.py docs/results/bench-h200-decode.json docs/images/h200-decode.png

A few points are drawn as bars, many as lines over the keys, with a panel per pair of head counts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.cli import plot

# Contestants as bench_gpu_decode.py names them; those that were not measured are omitted.
STYLES = {
    "lengths": ("Tilewise", "#0b6e99", "-"),
    "page16": ("Tilewise, pages of 16", "#6fb1cc", ":"),
    "float8": ("Tilewise, float8", "#c2185b", "-."),
    "cudnn": ("cuDNN", "#5a8f3c", "--"),
    "fa3": ("FA-3", "#e07b39", "--"),
}
BARS = 16  # points
WIDTHS = {1: 0.8, 8: 1.4, 64: 2.2}  # line widths by batch size; other batch sizes are not drawn


def short(keys: int) -> str:
    """Formats 4096 as 4k."""
    return f"{keys // 1024}k" if keys >= 1024 else str(keys)


def heads_of(row: dict[str, Any]) -> tuple[int, int]:
    """Numbers of query heads and key/value heads."""
    return row["heads"], row["kv_heads"]


def draw(result: dict[str, Any], path: Path) -> bool:
    """Draws the plot; returns whether there was anything to draw.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [r for r in result["rows"] if any(name in r["gb_s"] for name in STYLES)]
    if not rows:
        return False
    title = f"Decoding, bf16, D 128, {result['machine']['device']}: GB/s"
    if len(rows) <= BARS:
        figure, axes = plot.figure(1, title)
        bars(axes[0], sorted(rows, key=lambda r: (heads_of(r), r["bytes"], r["batch"])))
    else:
        heads = list(dict.fromkeys(map(heads_of, rows)))
        figure, axes = plot.figure(len(heads), title)
        for axis, pair in zip(axes, heads, strict=True):
            lines(axis, [r for r in rows if heads_of(r) == pair])
            axis.set_title(f"{pair[0]} query heads, {pair[1]} of keys", fontsize=9, loc="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3,
                  fontsize=7, edgecolor="none")  # fmt: skip
    plot.save(figure, path)
    return True


def bars(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draws a group of bars per point, the first point on top."""
    names = [name for name in STYLES if any(name in r["gb_s"] for r in rows)]
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [(len(rows) - 1 - j + (0.4 - height * (i + 0.5)), r["gb_s"][name])
                  for j, r in enumerate(rows) if name in r["gb_s"]]  # fmt: skip
        title, colour, _ = STYLES[name]
        axis.barh(*zip(*places, strict=True), height=0.9 * height, color=colour, label=title)
    labels = [f"B{r['batch']}, {short(r['keys'])}, {r['heads']}/{r['kv_heads']}" for r in rows]
    axis.set_yticks(range(len(rows))[::-1], labels)
    axis.grid(False, axis="y")


def lines(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Draws a line per batch size; larger batches have thicker lines."""
    for name, (title, colour, style) in STYLES.items():
        for batch, width in WIDTHS.items():
            points = sorted(
                (r["keys"], r["gb_s"][name])
                for r in rows
                if r["batch"] == batch and name in r["gb_s"]
            )
            if points:
                axis.plot(*zip(*points, strict=True), style, color=colour, linewidth=width,
                          marker="o", markersize=2.5, label=f"{title}, B{batch}")  # fmt: skip
    keys = sorted({r["keys"] for r in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(keys, [short(n) for n in keys])
    axis.minorticks_off()
    axis.set_ylim(bottom=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("json", type=Path, help="result of bench_gpu_decode.py --json")
    parser.add_argument("picture", type=Path, help=f"one of {', '.join(plot.FORMATS)}")
    given = parser.parse_args(arguments)
    if not plot.available():
        print(f"no plot: {plot.MISSING}")
        return 1
    if not draw(json.loads(given.json.read_text()), given.picture):
        print(f"no plot: {given.json} has no point")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
