"""Masks of blocks from strips of 128 rows: runs of full blocks, and partial blocks as bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

BLOCK = 128  # rows and keys of a block
Array: TypeAlias = npt.NDArray[Any]
# Expands rows: a bool array [row_end - row_begin, keys], True where a row sees a key, from (batch
# index, head, row_begin, row_end).
Strip: TypeAlias = Callable[[int, int, int, int], Array]

HIDDEN, PARTIAL, FULL = 0, 1, 2


class Lists(NamedTuple):
    """The arrays of a mask of blocks; see ``tilewise_mask`` in mask.h."""

    first: Array  # int32 [lists + 1]
    entries: Array  # int32 [n, 3]
    bits: Array  # int32 [m, 128, 4]


def blocks_of(length: int) -> int:
    return -(-length // BLOCK)


def build(strip: Strip, batch: int, heads: int, rows: int, keys: int) -> Lists:
    """The lists of blocks of a mask; equal partial blocks share their bits."""
    first = [0]
    entries: list[list[int]] = []
    known: dict[bytes, int] = {}
    for b, h, block in np.ndindex(batch, heads, blocks_of(rows)):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, rows)
        for entry in _entries(strip(b, h, begin, end), keys, known):
            last = entries[-1] if len(entries) > first[-1] else None
            if last is not None and entry[2] < 0 and last[1:] == [entry[0], -1]:
                last[1] = entry[1]
            else:
                entries.append(entry)
        first.append(len(entries))
    bits = np.frombuffer(b"".join(known), np.int32).reshape(-1, BLOCK, BLOCK // 32)
    return Lists(np.array(first, np.int32), np.array(entries, np.int32).reshape(-1, 3), bits.copy())


def visible_share(dense: Array) -> float:
    """The share of the blocks of a mask, bool [batch, heads, rows, keys], that show a pair."""
    batch, heads, rows, keys = dense.shape
    starts, found = np.arange(blocks_of(keys)) * BLOCK, 0
    for b, h, block in np.ndindex(batch, heads, blocks_of(rows)):
        columns = dense[b, h, block * BLOCK : (block + 1) * BLOCK].any(axis=0)
        found += int(np.logical_or.reduceat(columns, starts).sum())
    return found / (batch * heads * blocks_of(rows) * blocks_of(keys))


def _entries(tile: Array, keys: int, known: dict[bytes, int]) -> Iterator[list[int]]:
    """Yields [key block, next key block, index of its bits or -1] of each visible block of a strip.

    The bits of partial blocks that are new are added to ``known``, whose values are their indices.
    """
    rows, width = tile.shape[0], blocks_of(keys) * BLOCK
    padded = np.zeros((BLOCK, width), bool)
    padded[:rows, :keys] = tile
    by_block = padded.reshape(BLOCK, -1, BLOCK)
    visible: Array = np.asarray(by_block.any(axis=(0, 2)))
    sizes = np.minimum(BLOCK, keys - np.arange(len(visible)) * BLOCK) * rows
    full = by_block.sum(axis=(0, 2)) == sizes  # pairs beyond the mask are hidden anyway
    for at in np.flatnonzero(visible).tolist():
        if full[at]:
            yield [at, at + 1, -1]
        else:
            packed = np.packbits(by_block[:, at], axis=1, bitorder="little").tobytes()
            yield [at, at + 1, known.setdefault(packed, len(known))]


def warn_of_size(blocks: int, stacklevel: int) -> None:
    """Warns if a mask has too many different partial blocks; stacklevel is that of the warning."""
    size = blocks * BLOCK * BLOCK // 8
    if size > 2**30:
        warnings.warn(
            f"the mask has {blocks:,} different partial blocks, {size / 2**30:.1f} GB of bits: its "
            "pattern has hardly a block of 128 x 128 that is all visible or all hidden",
            stacklevel=stacklevel,
        )


def states(lists: Lists, batch: int, heads: int, rows: int, keys: int) -> Array:
    """HIDDEN, PARTIAL or FULL of every block, int8 [batch, heads, row blocks, key blocks]."""
    count = batch * heads * blocks_of(rows)
    grid = np.zeros((count, blocks_of(keys)), np.int8)
    owner = np.repeat(np.arange(count), np.diff(lists.first))
    for at, (begin, end, bits) in zip(owner.tolist(), lists.entries.tolist(), strict=True):
        grid[at, begin:end] = FULL if bits < 0 else PARTIAL
    return grid.reshape(batch, heads, -1, blocks_of(keys))


def reduced_by_band(grid: Array, rows: int, keys: int, shift: int, left: int, right: int) -> Array:
    """The states of blocks that are also within a band: row i sees keys from i + shift - left to
    i + shift + right; a negative limit is none.
    """
    first_row = np.arange(grid.shape[2])[:, None] * BLOCK + shift
    last_row = np.minimum(first_row + BLOCK, rows + shift) - 1
    first_key = np.arange(grid.shape[3]) * BLOCK
    last_key = np.minimum(first_key + BLOCK, keys) - 1
    some, every = np.ones((2, *grid.shape[2:]), bool)
    if right >= 0:
        some = some & (first_key <= last_row + right)
        every = every & (last_key <= first_row + right)
    if left >= 0:
        some = some & (last_key >= first_row - left)
        every = every & (first_key >= last_row - left)
    return np.where(some, np.where(every, grid, np.minimum(grid, PARTIAL)), HIDDEN)


def strip_of(lists: Lists, heads: int, rows: int, keys: int) -> Strip:
    """The function that expands rows of a mask of blocks."""

    def strip(b: int, h: int, begin: int, end: int) -> Array:
        at = (b * heads + h) * blocks_of(rows) + begin // BLOCK
        tile = np.zeros((BLOCK, blocks_of(keys) * BLOCK), bool)
        for low, high, bits in lists.entries[lists.first[at] : lists.first[at + 1]].tolist():
            columns = slice(low * BLOCK, high * BLOCK)
            if bits < 0:
                tile[:, columns] = True
            else:
                block = lists.bits[bits].view(np.uint8)
                tile[:, columns] = np.unpackbits(block, axis=1, bitorder="little")
        return tile[: end - begin, :keys]

    return strip
