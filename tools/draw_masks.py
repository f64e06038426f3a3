"""Draws docs/images/masks.png and flex-masks.png: the tiles of six masks each, by ``Mask.plot``.

Needs matplotlib, and the package with its library. Run: python tools/draw_masks.py
"""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np

from tilewise import masks

matplotlib.use("agg")

from matplotlib import pyplot as plt

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
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


def masks_from_flex() -> dict[str, masks.Mask]:
    """Those of docs/from-flexattention.md, for longer sequences."""
    row = np.arange(LENGTH)
    starts, texts = [0, 300, 1000, 1300, LENGTH], [[0, 400], [400, 900], [900, 1500], [1500, 2048]]
    documents = masks.Ranges.documents(starts)
    heads = [[0, 100], [300, 650], [1000, 1100], [1300, 1700]]
    spans = [[300, 700], [1200, 1700]]
    window = masks.Ranges([[0, 256], [256, LENGTH]], [[0, 256], [0, LENGTH]], ["causal", "both"])
    distance = row[:, None] - row
    dilated = masks.from_bool((distance >= 0) & (distance <= 1024) & (distance % 4 == 0))
    rows = [[begin, end] for begin, end in itertools.pairwise(starts)]
    return {
        "window in documents": documents & window,
        "documents with prefixes": documents | masks.Ranges(rows, heads),
        "transfusion": masks.Ranges.causal(LENGTH) | masks.Ranges(spans, spans),
        "flamingo": masks.Ranges(texts, [[i * 512, i * 512 + 512] for i in range(4)]),
        "dilated window": dilated,
        "dilated, one of 4 sequences": masks.Ranges(
            [[0, 256], [256, 512]], [[0, 256], [0, 512]], ["causal", "both"]
        ),
    }


def draw(drawn: dict[str, masks.Mask], target: Path) -> None:
    """Writes the picture of six masks."""
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.2), layout="constrained")
    for ax, (title, mask) in zip(axes.flat, drawn.items(), strict=True):
        mask.plot(ax=ax)
        ax.set_title(title)
        legend = ax.get_legend()
        if ax is not axes[0, 2]:
            legend.remove()
    figure.savefig(target, dpi=110)
    print(f"wrote {target}")


def main() -> None:
    """Writes the pictures."""
    draw(drawn_masks(), IMAGES / "masks.png")
    draw(masks_from_flex(), IMAGES / "flex-masks.png")


if __name__ == "__main__":
    main()
