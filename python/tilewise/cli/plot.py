"""Plots of speed and memory over sequence length (matplotlib, drawn to a file)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Each backend has the same colour in every panel, and tilewise stands out.
COLOURS = {
    "tilewise": "#0b6e99",
    "torch-flash": "#e07b39",
    "torch-efficient": "#7a5195",
    "torch-cudnn": "#5a8f3c",
    "torch-math": "#b0a18f",
    "naive": "#8d8d8d",
}
# Room to the right of the lines for their names, as a fraction of the width of the data.
LABEL_ROOM = 0.26
INK, FAINT = "#263238", "#dfe4e6"
FORMATS = (".png", ".svg", ".pdf")
MISSING = "plots need matplotlib: pip install matplotlib"


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def figure(panels: int, title: str) -> tuple[Any, list[Any]]:
    """A figure with `panels` axes, at most three side by side, in the style that all plots share.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(MISSING) from None
    columns = min(panels, 3)
    rows = -(-panels // columns)
    size = (4.6 * columns + 0.4, 3.7 * rows + 0.4)
    drawing = Figure(figsize=size, dpi=140, layout="constrained")
    FigureCanvasAgg(drawing)
    drawing.suptitle(title, fontsize=11, color=INK, x=0.012, ha="left")
    axes = list(drawing.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[panels:]:
        axis.remove()
    axes = axes[:panels]
    for axis in axes:
        axis.grid(True, color=FAINT, linewidth=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(colors=INK, labelsize=8.5, which="both", length=3)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color("#9aa5ab")
    return drawing, axes


def save(drawing: Any, path: Path) -> None:
    """Writes the figure; its suffix (.png, .svg, .pdf) decides the format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    drawing.savefig(path, facecolor="white")


def over_length(
    axis: Any, rows: Sequence[dict[str, Any]], value: str, title: str, scale: float
) -> None:
    """Lines of `value * scale` over sequence length, one per backend, both axes logarithmic.

    Rows without the value (not measured) are not drawn.
    """
    from matplotlib import ticker

    names = dict.fromkeys(row["backend"] for row in rows)
    ends = []
    for name in names:
        points = [
            (row["length"], row[value] * scale)
            for row in rows
            if row["backend"] == name and row.get(value)
        ]
        if not points:
            continue
        ours = name == "tilewise"
        axis.plot(
            *zip(*points, strict=True),
            color=COLOURS.get(name, INK),
            linewidth=2.4 if ours else 1.5,
            marker="o",
            markersize=5 if ours else 3.5,
            zorder=3 if ours else 2,
        )
        ends.append((name, *points[-1]))
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({row["length"] for row in rows})
    axis.set_xticks(lengths, [_length_label(n) for n in lengths])
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    axis.minorticks_off()
    axis.set_xlabel("sequence length", fontsize=9, color=INK)
    axis.set_title(title, fontsize=9.5, color=INK, loc="left")
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    _label_ends(axis, ends)


def speed(axis: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Lines of GFLOP/s over sequence length, with an axis that starts at zero."""
    over_length(axis, rows, "rate", title, 1e-9)
    axis.set_yscale("linear")
    axis.autoscale(axis="x")
    axis.set_ylim(bottom=0)
    for text in list(axis.texts):
        text.remove()
    ends = []
    for name in dict.fromkeys(row["backend"] for row in rows):
        points = [r for r in rows if r["backend"] == name and r.get("rate")]
        if points:
            ends.append((name, points[-1]["length"], points[-1]["rate"] * 1e-9))
    _label_ends(axis, ends)


def _label_ends(axis: Any, ends: Sequence[tuple[str, float, float]]) -> None:
    """Writes each line's name at its end; names that would overlap are moved apart."""
    axis.margins(x=0.06)
    low, high = axis.get_xlim()
    log = axis.get_xscale() == "log"
    # The names need room to the right of the last point.
    axis.set_xlim(
        low, high * (high / low) ** LABEL_ROOM if log else high + LABEL_ROOM * (high - low)
    )
    axis.figure.canvas.draw()
    placed: list[float] = []
    to_pixels = axis.transData
    for name, x, y in sorted(ends, key=lambda end: end[2]):
        pixel_x, pixel_y = to_pixels.transform((x, y))
        if placed:
            pixel_y = max(pixel_y, placed[-1] + 17)
        placed.append(pixel_y)
        label_x, label_y = to_pixels.inverted().transform((pixel_x + 12, pixel_y))
        axis.text(
            label_x,
            label_y,
            name,
            color=COLOURS.get(name, INK),
            fontsize=8.5,
            fontweight="bold" if name == "tilewise" else "normal",
            va="center",
        )


def _length_label(length: int) -> str:
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)
