"""Masks whose arrays hold numbers that mean nothing."""

from __future__ import annotations

import numpy as np
import torch

from cases import Built, Case, run


def check(case: Case, damage: str) -> list[str]:
    """Runs the case with random numbers in the array `damage` of its mask. They may hide any pair,
    but nothing else is read: all results stay finite. Returns the kernels.
    """
    r = np.random.default_rng(5)
    kernels = []
    for extent in (4, 300, 2**31):
        b = Built(case)
        numbers = b.mask_struct.arrays[damage]
        numbers.copy_(torch.from_numpy(r.integers(-extent, extent, numbers.shape, np.int32)))
        got = run(b)
        assert all(np.isfinite(x).all() for x in (got.out, *got.grads.values()))
        kernels += got.kernels
    return kernels
