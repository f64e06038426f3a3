"""The plots of the demo: the loss, and the time and memory of attention over sequence length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewise.cli import plot

available = plot.available


def smoothed(losses: Sequence[float]) -> list[float]:
    """The exponential moving average over about a thirtieth of the curve, without initial bias."""
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
    """Draws training loss, held-out loss, and the first losses with naive attention."""
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
    """Writes a plot of only the loss."""
    drawing, (axis,) = plot.figure(1, "")
    draw_loss(axis, losses, held_out, naive)
    plot.save(drawing, path)


def demo_figure(history: dict[str, Any], costs: Sequence[dict[str, Any]], path: Path) -> None:
    """Writes a plot of loss, time and peak memory.

    Args:
        history: Contents of losses.json, which train_gpt.py writes.
        costs: Rows {"backend", "length", "seconds", "peak_bytes"} of cost.measure().
        path: File to write.
    """
    problem = costs[0]
    mask = "causal" if problem["causal"] else "full"
    drawing, axes = plot.figure(3, f"Tilewise on {history['machine']}")
    draw_loss(axes[0], history["losses"], history["held_out"], history["naive"])
    sizes = f"{problem['dtype']}, {problem['heads']} heads of {problem['head_dim']}, {mask}"
    plot.over_length(axes[1], costs, "seconds", f"forward + backward, ms ({sizes})", 1e3)
    plot.over_length(axes[2], costs, "peak_bytes", "peak memory beyond the inputs, MB", 1e-6)
    plot.save(drawing, path)
