"""The demo's plots: the loss, and what attention costs over sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.cli import plot

available = plot.available


def smoothed(losses: Sequence[float]) -> list[float]:
    """An exponential mean over about a thirtieth of the curve, without the drag of its start."""
    weight = 1 - 1 / min(20, max(2, len(losses) / 30))
    result, mean = [], 0.0
    for count, loss in enumerate(losses, start=1):
        mean = weight * mean + (1 - weight) * loss
        result.append(mean / (1 - weight**count))
    return result


def draw_loss(
    axis: Any,
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    naive: Sequence[float],
) -> None:
    """Training loss, held-out loss, and the first steps' losses with naive attention."""
    steps = range(1, len(losses) + 1)
    ours = plot.COLOURS["tilewise"]
    axis.plot(steps, losses, color=ours, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smoothed(losses), color=ours, linewidth=2.2, label="training text")
    if held_out:
        axis.plot(
            *zip(*held_out, strict=True),
            color=plot.COLOURS["torch-flash"],
            linewidth=1.4,
            marker="o",
            markersize=3.5,
            label="held-out text",
        )
    if naive:
        axis.plot(
            range(1, len(naive) + 1),
            naive,
            linestyle="none",
            marker="x",
            markersize=5,
            color=plot.INK,
            label=f"naive attention, first {len(naive)} steps",
        )
    axis.set_xlabel("step", fontsize=9, color=plot.INK)
    axis.set_title("loss, nats per token", fontsize=9.5, color=plot.INK, loc="left")
    axis.set_ylim(bottom=max(0.0, min(losses) - 0.3))
    axis.legend(fontsize=8.5, frameon=False, labelcolor=plot.INK)


def loss_figure(
    losses: Sequence[float],
    held_out: Sequence[tuple[int, float]],
    naive: Sequence[float],
    path: Path,
) -> None:
    """The loss alone."""
    drawing, (axis,) = plot.figure(1, "")
    draw_loss(axis, losses, held_out, naive)
    plot.save(drawing, path)


def demo_figure(history: dict[str, Any], costs: Sequence[dict[str, Any]], path: Path) -> None:
    """Loss, time and peak memory in one picture.

    Args:
        history: what train_gpt.py wrote into losses.json.
        costs: rows {"backend", "length", "seconds", "peak_bytes"} of cost.measure().
        path: where to write it.
    """
    what = costs[0]
    mask = "causal" if what["causal"] else "full"
    drawing, axes = plot.figure(3, f"Tilewise on {history['machine']}")
    draw_loss(axes[0], history["losses"], history["held_out"], history["naive"])
    which = f"{what['dtype']}, {what['heads']} heads of {what['head_dim']}, {mask}"
    plot.over_length(axes[1], costs, "seconds", f"forward + backward, ms ({which})", 1e3)
    plot.over_length(axes[2], costs, "peak_bytes", "peak memory beyond the inputs, MB", 1e-6)
    plot.save(drawing, path)
