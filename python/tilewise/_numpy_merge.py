"""The merge of two results of attention on NumPy arrays."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def merge_states(
    out_a: Array, lse_a: Array, out_b: Array, lse_b: Array, layout: str
) -> tuple[Array, Array]:
    """See ``tilewise.merge_states``."""
    a, b = lse_a.astype(np.float32), lse_b.astype(np.float32)
    top = np.maximum(a, b)
    infinite, empty = np.isinf(top), np.isneginf(top)
    # An infinite maximum is replaced by 0: its weight is then 1, and inf - inf is never computed.
    zero, nothing = np.float32(0), np.float32(-np.inf)
    safe = [np.where(infinite, np.where(x == top, zero, nothing), x) for x in (a, b)]
    lse = np.logaddexp(*safe)
    weights = [np.where(empty, zero, np.exp(x - lse)) for x in safe]
    if out_a.ndim == 3 or layout == "bshd":
        weights = [w.swapaxes(-1, -2) for w in weights]
    out = sum(
        w[..., None] * x.astype(np.float32) for w, x in zip(weights, (out_a, out_b), strict=True)
    )
    return out.astype(out_a.dtype), np.where(infinite, top, lse)
