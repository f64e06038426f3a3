"""Draws docs/images/masks.png: the tiles of six masks, by ``Mask.plot``.

Needs matplotlib, and the package with its library. Run: python tools/draw_masks.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

from tilewise import masks

matplotlib.use("agg")

from matplotlib import pyplot as plt

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "masks.png"
LENGTH = 2048


def drawn_masks() -> dict[str, masks.Mask]:
    """The title and the mask of each picture."""
    row = np.arange(LENGTH)
    near = np.abs(row[:, None] // 64 - row // 64) <= 3
    pixels = near & (np.abs(row[:, None] % 64 - row % 64) <= 3)
    whole, images = [[0, LENGTH]], [[300, 700], [1200, 1700]]
    starts = [0, 300, 1000, 1300, LENGTH]
    return {
        "documents": masks.Ranges.documents(starts),
        "prefix": masks.Ranges.prefixes([700], LENGTH),
        "causal, images in full": masks.Ranges.causal(LENGTH) | masks.Ranges(images, images),
        "window and sinks": masks.Ranges(
            [[0, 512], [512, LENGTH], *whole], [[0, 512], *whole, [0, 64]],
            ["causal", "both", "full"],
        ),
        "shared question": (
            masks.Ranges.documents(starts) | masks.Ranges([[300, LENGTH]], [[0, 300]])
        ),
        "neighbouring pixels": masks.from_bool(pixels),
    }  # fmt: skip


def main() -> None:
    """Writes the picture."""
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.2), layout="constrained")
    for ax, (title, mask) in zip(axes.flat, drawn_masks().items(), strict=True):
        mask.plot(LENGTH, LENGTH, ax=ax)
        ax.set_title(title)
        legend = ax.get_legend()
        if ax is not axes[0, 2]:
            legend.remove()
    figure.savefig(TARGET, dpi=110)
    print(f"wrote {TARGET}")


if __name__ == "__main__":
    main()
