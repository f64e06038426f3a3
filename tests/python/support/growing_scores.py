"""Scores that change from key tile to key tile, for kernels that rarely compute a maximum."""

from __future__ import annotations

import numpy as np

import oracle
from bounds import LSE_LOW
from cases import Built, Outcome

TILE = 64
# Amounts added to the scores of the keys of tile t, counted from the first key: the maximum m
# moves by little and by much, twice, never, and rows overflow (88 in fp32) at once and in between.
LEVELS = {
    "slowly": lambda t: -6.0 * t,
    "fast": lambda t: -40.0 * t,
    "too fast": lambda t: -150.0 * t,
    "in the end": lambda t: 70.0 if t == 0 else 0.0,
    "too much in the end": lambda t: 300.0 if t == 0 else 0.0,
    "down": lambda t: 50.0 * t,
    "up and down": lambda t: 45.0 * (t % 2),
    "one step": lambda t: -11.0 if t >= 4 else 0.0,
    "far below": lambda t: -150.0,
}  # fmt: skip


def place_of(b: Built, sequence: int, key: int) -> tuple[int, ...]:
    """The index of a key in k and v."""
    case = b.case
    if case.page_size:
        page = int(b.meta["block_table"][sequence, key // case.page_size])
        return page, key % case.page_size
    return (sum(case.keys[:sequence]) + key,) if case.varlen_k else (sequence, key)


def add_level(b: Built, level: str, share: float = 1.0) -> None:
    """Adds the amounts, or this share of them, to the scores of a case whose scale is 1."""
    b.q.mul_(0.25)
    b.q[..., 0] = 1
    for sequence, keys in enumerate(b.case.keys):
        for key in range(keys):
            b.k[place_of(b, sequence, key)][..., 0] = share * LEVELS[level](key // TILE)


UNIT = {"bf16": 2**-6, "fp16": 2**-9}


def check(
    b: Built, got: Outcome, want: oracle.Result, unit: float | None = None,
    lse_unit: float = LSE_LOW,
) -> None:  # fmt: skip
    """Compares out and lse; both stay finite where rows see a key. `unit` is relative to the
    largest number of out, and by default that of the case's dtype; `lse_unit` to that of lse."""
    unit = unit or UNIT[b.case.dtype]
    assert np.isfinite(got.out).all()
    assert np.abs(got.out - want.out).max() <= unit * np.abs(want.out).max()
    seen = np.isfinite(want.lse)
    assert np.array_equal(seen, np.isfinite(got.lse))
    size = max(1.0, np.abs(want.lse[seen]).max())
    assert np.abs(got.lse[seen] - want.lse[seen]).max() <= lse_unit * size
