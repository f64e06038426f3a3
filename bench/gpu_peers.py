"""The best peer of a point on Hopper: measured in this run, or estimated from earlier ratios to
cuDNN.

`peers_h200.json` holds the speeds of cuDNN, FA-3 and FA-4, measured side by side on one H200.
Where FA-3 and FA-4 are not installed, the speed of cuDNN in this run times the best peer's ratio to
it stands in for them: the ratio varies less between machines and days than either speed.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

from gpu_cases import Case

FILE = Path(__file__).with_name("peers_h200.json")
MEASURED = ("cudnn", "fa3", "fa4")


@functools.cache
def _cases() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(FILE.read_text())["cases"]
    return rows


def best_over_cudnn(case: Case) -> float:
    """The best peer's speed over cuDNN's at the measured point that resembles `case` most: the one
    of nearest length among those with the same direction, head dimension and mask, and with grouped
    heads if `case` has them. 1 if there is none (then cuDNN is the only peer).
    """
    similar = [
        c
        for c in _cases()
        if (c["direction"], c["head_dim"], c["causal"])
        == (case.direction, case.head_dim, case.causal)
        and (c["heads"] == c["kv_heads"]) == (case.heads == case.kv_heads)
    ]
    if not similar:
        return 1.0
    nearest = min(similar, key=lambda c: abs(math.log2(c["seqlen"] / case.seqlen)))
    return float(nearest["best_over_cudnn"])


def ratio_to_best(case: Case, ratio: dict[str, float]) -> float | None:
    """Tilewise's speed over the best peer's; None if none of MEASURED ran.

    Args:
        ratio: Tilewise's speed over each peer's in this run.
    """
    run = [ratio[name] for name in MEASURED if name in ratio]
    if "fa3" in ratio or "fa4" in ratio:
        return min(run)
    return ratio["cudnn"] / best_over_cudnn(case) if run else None
