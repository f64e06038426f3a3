"""Sets of trapezoids: rectangles of rows and keys, cut by two diagonals.

A set is an int64 array [n, 6] of row begin, row end, key begin, key end, low and high. Row i and
key j are a pair of a trapezoid if row begin <= i < row end, key begin <= j < key end and
low <= j - i <= high. Every range of ``tilewise.masks.Ranges`` is a trapezoid. Unlike ranges,
trapezoids are closed under intersection, and a trapezoid is at most three ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Set = npt.NDArray[np.int64]

UNBOUNDED = 2**40  # beyond every j - i
_CAUSAL, _INVERSE = 1, 2  # bits of the kind of a range
_IS_BEGIN = np.array([True, False] * 3)  # of the six numbers of a trapezoid
_PAIRS_AT_ONCE = 2**18  # of trapezoids, in an intersection: 12 MB


def trapezoid(
    rows: tuple[int, int], keys: tuple[int, int], low: int = -UNBOUNDED, high: int = UNBOUNDED
) -> Set:
    """The set of one trapezoid."""
    return np.array([[*rows, *keys, low, high]], np.int64)


def rectangles(rows: npt.NDArray[np.int64], keys: npt.NDArray[np.int64]) -> Set:
    """The rectangles of spans of rows and of keys: [n, 2] each, or [2] for the same in all."""
    rows, keys = np.broadcast_arrays(rows, keys)
    whole = np.broadcast_to(np.array([-UNBOUNDED, UNBOUNDED]), rows.shape)
    return np.concatenate([rows, keys, whole], axis=1)


def of_ranges(entries: npt.NDArray[np.int32]) -> Set:
    """The trapezoids of ranges int32 [n, 5]: row begin and end, key begin and end, kind."""
    first_row, end_row, first_key, end_key, kind = entries.astype(np.int64).T
    low = np.where(kind & _INVERSE, first_key - first_row, -UNBOUNDED)
    high = np.where(kind & _CAUSAL, end_key - end_row, UNBOUNDED)
    return np.stack([first_row, end_row, first_key, end_key, low, high], axis=1)


def intersection(a: Set, b: Set) -> Set:
    """The trapezoids that two of the sets have in common; those without a pair are left out."""
    parts = [a[:0]]
    step = max(1, _PAIRS_AT_ONCE // max(1, len(b)))
    for begin in range(0, len(a), step):
        left = a[begin : begin + step, None]
        common = np.where(_IS_BEGIN, np.maximum(left, b), np.minimum(left, b)).reshape(-1, 6)
        parts.append(common[_has_pairs(common)])
    return np.concatenate(parts)


def _has_pairs(set_: Set) -> npt.NDArray[np.bool_]:
    first_row, end_row, first_key, end_key, low, high = set_.T
    inside = (first_row < end_row) & (first_key < end_key) & (low <= high)
    return inside & (end_key - 1 - first_row >= low) & (first_key - end_row + 1 <= high)


def to_ranges(set_: Set) -> npt.NDArray[np.int32]:
    """The ranges int32 [n, 5] that show the pairs of the trapezoids.

    The rows of a trapezoid are cut where its upper diagonal leaves it and where its lower diagonal
    enters it. Between these cuts both ends of the keys either follow a diagonal or do not.
    """
    first_row, end_row, first_key, end_key, low, high = set_.T
    # Rows above the first that the upper diagonal lets see a key, and rows below the last that the
    # lower diagonal lets see one, are left out.
    first_row = np.maximum(first_row, first_key - high)
    end_row = np.maximum(first_row, np.minimum(end_row, end_key - low))
    leaves, enters = end_key - high, first_key - low
    cuts = np.sort(np.clip([leaves, enters], first_row, end_row), axis=0)
    edges = [first_row, *cuts, end_row]
    pieces = []
    for begin, end in itertools.pairwise(edges):
        causal, inverse = begin < leaves, begin >= enters
        first = np.where(inverse, begin + low, first_key)
        last = np.where(causal, end + high, end_key)
        kind = np.where(causal, _CAUSAL, 0) + np.where(inverse, _INVERSE, 0)
        piece = np.stack([begin, end, first, last, kind], axis=1)
        pieces.append(piece[begin < end])
    return np.concatenate(pieces).astype(np.int32)


def lists(sets: Sequence[npt.NDArray[np.int32]]) -> tuple[npt.NDArray[np.int32], ...]:
    """The arrays (entries, first) of ``Ranges`` from the ranges of every sequence."""
    first = np.cumsum([0, *map(len, sets)]).astype(np.int32)
    return np.ascontiguousarray(np.concatenate(sets)), first
