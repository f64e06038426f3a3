"""Saturated rows, whose gradients lose digits to an out that is rounded to 16 bits."""

from __future__ import annotations

import numpy as np

from cases import Built, Case, flat

# Two rows and keys with scores of the size of sqrt(96), so that one weight is close to 1: delta and
# dp then cancel to a small part of themselves.
SATURATED = Case(rows=(2,), keys=(2,), dtype="fp16", head_dim=96, head_dim_v=96, scale=1.0,
                 sinks=True)  # fmt: skip
SUBNORMAL = 2.0**-24  # distance of the smallest numbers of fp16


def error(b: Built, got: list[np.ndarray]) -> float:
    """The error of dq and dk, relative to the largest exact one, beyond what fp16 can hold and what
    rounding the terms of delta to fp32 costs.
    """
    exact = b.expected()
    want = (exact.dq, exact.dk)
    wrong = max(np.abs(x - y).max() for x, y in zip(got, want, strict=True))
    terms = np.abs(flat(b.dout) * exact.out).sum(-1).max()
    factor = max(np.abs(flat(x)).max() for x in (b.q, b.k))
    unavoidable = SUBNORMAL + 2 * 2.0**-24 * terms * factor
    return float((wrong - unavoidable) / max(np.abs(y).max() for y in want))


def bound(device: str) -> float:
    """On tensor cores the derivatives of the scores are rounded to fp16 as well."""
    return 1e-3 if device == "cpu" else 2e-3
