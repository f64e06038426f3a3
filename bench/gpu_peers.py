"""The best peer of a point on Hopper: of those in this run, or by ratios to cuDNN measured before.

`peers_h200.json` holds what cuDNN, FA-2, FA-3 and FA-4 reached side by side on one H200. Where FA-3
and FA-4 are not installed, cuDNN of this run times the best one's ratio to it stands for them: the
ratio moves less between machines and days than either speed.
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
    """Of the measured point with the same mask, and with grouped heads or without, that is nearest
    in length; 1 without one (then cuDNN alone is the peer).
    """
    alike = [
        c
        for c in _cases()
        if (c["direction"], c["head_dim"], c["causal"])
        == (case.direction, case.head_dim, case.causal)
        and (c["heads"] == c["kv_heads"]) == (case.heads == case.kv_heads)
    ]
    if not alike:
        return 1.0
    nearest = min(alike, key=lambda c: abs(math.log2(c["seqlen"] / case.seqlen)))
    return float(nearest["best_over_cudnn"])


def ratio_to_best(case: Case, ratio: dict[str, float]) -> float | None:
    """Our speed over the best peer's; None when cuDNN did not run.

    Args:
        ratio: our speed over each peer's, of this run.
    """
    run = [ratio[name] for name in MEASURED if name in ratio]
    if "fa3" in ratio or "fa4" in ratio:
        return min(run)
    return ratio["cudnn"] / best_over_cudnn(case) if run else None
