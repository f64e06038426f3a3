"""CPU kernels that round the weights for the product with v divide an out in float32 by the sum of
the rounded weights, and one of 16 bits by the sum of the weights themselves."""

from __future__ import annotations

import numpy as np

BF16_UNITS = ("avx512_bf16", "amx", "neon_bf16")
UNIT = 2.0**-8  # the largest relative error of rounding to bf16


def rounds_weights(kernel: str) -> bool:
    """Whether a kernel of a CPU rounds weights to bf16, or for fp16 on AMX to the sum of two."""
    device, isa, *_, dtype = kernel.split(".")
    return device == "cpu" and (
        (dtype == "bf16" and isa in BF16_UNITS) or (dtype == "f16" and isa == "amx")
    )


def same_out(rounded: object, narrow: object, kernel: str, merged: float = 0.0) -> bool:
    """Whether an out in float32 that was rounded to 16 bits is the out in 16 bits: bit by bit if
    the kernel does not round weights. If it does, their sums differ by at most one rounding, and so
    does either out from its sum. Where splits are merged, `merged` is the largest |v|, of which a
    part of out may be off by a rounding.
    """
    a, b = (np.asarray(x, np.float64) for x in (rounded, narrow))
    if not rounds_weights(kernel):
        return np.array_equal(a, b)
    return bool((np.abs(a - b) <= UNIT * (3.04 * np.abs(a) + merged)).all())
