"""Saturated rows, whose gradients lose digits to an out that is rounded to 16 bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cases import Built, Case, flat

# Two rows and keys with scores of the size of sqrt(96), so that one weight is close to 1: delta and
# dp then cancel to a small part of themselves.
SATURATED = Case(rows=(2,), keys=(2,), dtype="fp16", head_dim=96, head_dim_v=96, scale=1.0,
                 sinks=True)  # fmt: skip
IN_BF16 = replace(SATURATED, dtype="bf16")
# With rows for the kernels of decoding and for those of prefill, and with splits.
CASES_IN_BF16 = {
    "sinks": IN_BF16,
    "no sinks": replace(IN_BF16, sinks=False, head_dim=64, head_dim_v=64),
    "dropout": replace(IN_BF16, dropout_p=0.3),
    "groups": replace(IN_BF16, rows=(4,), keys=(4,), heads_kv=2, group=4),
    "dropout of groups": replace(IN_BF16, rows=(4,), keys=(3,), group=4, dropout_p=0.3),
    "splits": replace(IN_BF16, keys=(600,), splits=3),
    "splits of groups": replace(IN_BF16, rows=(4,), keys=(600,), group=4, splits=3),
}
# Distance of the smallest numbers of a dtype.
SUBNORMAL = {"fp16": 2.0**-24, "bf16": 2.0**-133}


def error(b: Built, got: list[np.ndarray]) -> float:
    """The error of dq and dk, relative to the largest exact one, beyond what the dtype can hold and
    what rounding the terms of delta to fp32 costs.
    """
    exact = b.expected()
    want = (exact.dq, exact.dk)
    wrong = max(np.abs(x - y).max() for x, y in zip(got, want, strict=True))
    terms = np.abs(flat(b.dout) * exact.out).sum(-1).max()
    factor = max(np.abs(flat(x)).max() for x in (b.q, b.k))
    unavoidable = SUBNORMAL[b.case.dtype] + 2 * 2.0**-24 * terms * factor
    return float((wrong - unavoidable) / max(np.abs(y).max() for y in want))


def bound(device: str, dtype: str) -> float:
    """dq and dk are rounded to the dtype, and on tensor cores and units for bf16 the derivatives of
    the scores are as well. The bound of bf16 has been tested on CPUs only.
    """
    if dtype == "bf16":
        return 2.0**-7
    return 1e-3 if device == "cpu" else 2e-3
