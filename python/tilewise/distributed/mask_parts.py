"""The parts of a mask that the calls of a rank need: some rows, some keys, some heads.

Every rank has the whole mask. Its host cuts the rows and keys of each call out of it once, and
keeps the part for later calls with an equal mask. A mask on a GPU is copied to the host for this.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .. import _block_lists, _mask_tensors, _trapezoids
from .._block_lists import BLOCK, Array, Strip, blocks_of
from .._mask import Mask, rebuilt
from .._options import Options
from ..masks import KINDS, Blocks, Ranges, Tree
from .layout import Run


class Scattered:
    """Keys at ascending places of a sequence; equal if the places are."""

    def __init__(self, places: Array) -> None:
        self.places = places
        self._digest = hashlib.blake2b(places.tobytes(), digest_size=16).digest()

    def below(self, end: int) -> Array:
        """The places before one."""
        return self.places[: np.searchsorted(self.places, end)]

    def __len__(self) -> int:
        return len(self.places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scattered) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)


# Rows and keys, counted within the whole sequence.
Place: TypeAlias = tuple[Run, Run | Scattered]


class WholeMask:
    """A mask of whole sequences on the host; equal if the contents are."""

    def __init__(self, mask: Any) -> None:
        self.mask = mask.on_host()
        if not isinstance(self.mask, Tree):
            _check_entries(self.mask)
        digest = hashlib.blake2b(repr((type(mask), self.mask._numbers())).encode(), digest_size=16)
        for array in self.mask._arrays():
            digest.update(repr(array.shape).encode())
            digest.update(np.ascontiguousarray(array).data)
        self.digest = digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WholeMask) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __str__(self) -> str:
        return f"{type(self.mask).__name__} with hash {self.digest[:16]}"

    def seen(self, run: Run, keys: int, sequence: int | None = None) -> Run:
        """An interval of keys outside of which the rows see none, of a sequence or of all."""
        if self.mask.batch == 1 or sequence is None:
            lists = range(self.mask.batch)
        else:
            lists = range(sequence, sequence + 1)
        hull = _seen_by_ranges if isinstance(self.mask, Ranges) else _seen_by_blocks
        low, high = hull(self.mask, run, lists)
        low, high = max(low, 0), min(high, keys)
        return (low, high) if low < high else (0, 0)

    def part_at(self, places: tuple[Place, ...] | None, device: torch.device) -> MaskPart | None:
        """The mask at the place of a call, or at those of its sequences; None: at all places.

        A call without rows or keys has none.
        """
        return _cached_part_at(self, places, device)


# By mask: the versions of its tensors, and the mask on the host.
_known: weakref.WeakKeyDictionary[Any, tuple[list[int], WholeMask]] = weakref.WeakKeyDictionary()


def whole_mask(mask: Any) -> WholeMask:
    """The mask on the host, which is copied and hashed once."""
    versions = [
        x._version for x in mask._arrays() if isinstance(x, Tensor) and not x.is_inference()
    ]
    known = _known.get(mask)
    if known is None or known[0] != versions:
        _known[mask] = known = (versions, WholeMask(mask))
    return known[1]


def _check_entries(mask: Any) -> None:
    """Refuses arrays that the host cannot cut: the kernels refuse the same ones."""
    first, e, count = mask.first, mask.entries, len(mask.entries)
    if first[0] != 0 or (np.diff(first) < 0).any() or first[-1] > count:
        raise ValueError(
            f"mask.first is {np.array2string(first, threshold=9, separator=', ')}, but must begin "
            f"with 0, not decrease and end with at most the number of entries, {count}"
        )
    if isinstance(mask, Ranges):
        good = (e[:, [0, 2]] >= 0) & (e[:, [1, 3]] >= e[:, [0, 2]])
        good &= ((e[:, 4] >= 0) & (e[:, 4] < len(KINDS)))[:, None]
        allowed = "0 <= row begin <= row end, 0 <= key begin <= key end and a kind from 0 to 3"
    else:
        good = ((e[:, 0] >= 0) & (e[:, 0] < e[:, 1]) & (e[:, 2] < len(mask.bits)))[:, None]
        good &= (e[:, 1] <= blocks_of(mask.keys))[:, None]
        allowed = (
            f"0 <= block begin < block end <= {blocks_of(mask.keys)} and bits below "
            f"{len(mask.bits)}"
        )
    bad = np.flatnonzero(~good.all(axis=1))
    if len(bad):
        raise ValueError(f"mask.entries[{bad[0]}] is {e[bad[0]].tolist()}, but must have {allowed}")


def _entries(mask: Any, lists: range, per_list: int) -> Array:
    """The entries of some sequences, each of which has `per_list` lists."""
    first = mask.first
    entries: Array = mask.entries[first[lists.start * per_list] : first[lists.stop * per_list]]
    return entries


def _cut(entries: Array, rows: Run, keys: Run) -> Array:
    """The parts of ranges in some rows and keys, as ranges."""
    place = _trapezoids.trapezoid(rows, keys)
    return _trapezoids.to_ranges(_trapezoids.intersection(_trapezoids.of_ranges(entries), place))


def _seen_by_ranges(mask: Any, run: Run, lists: range) -> Run:
    e = _cut(_entries(mask, lists, 1), run, (0, _trapezoids.UNBOUNDED))
    return (int(e[:, 2].min()), int(e[:, 3].max())) if len(e) else (0, 0)


def _seen_by_blocks(mask: Any, run: Run, lists: range) -> Run:
    if run[0] >= min(run[1], mask.rows):
        return 0, 0
    first = mask.first.astype(np.int64)
    shape = (mask.batch, mask.heads, blocks_of(mask.rows))
    rows = slice(run[0] // BLOCK, blocks_of(min(run[1], mask.rows)))
    begins, ends = (
        x.reshape(shape)[lists.start : lists.stop, :, rows].ravel() for x in (first[:-1], first[1:])
    )
    some = begins < ends
    if not some.any():
        return 0, 0
    low = mask.entries[begins[some], 0].min()
    return int(low) * BLOCK, min(int(mask.entries[ends[some] - 1, 1].max()) * BLOCK, mask.keys)


def _part_of_ranges(mask: Any, places: tuple[Place, ...]) -> Any:
    """The rectangles in the rows and keys of each sequence, or of all of them."""
    sequences = range(max(mask.batch, len(places)))
    parts = []
    for sequence in sequences:
        at = sequence if mask.batch > 1 else 0
        entries = _entries(mask, range(at, at + 1), 1)
        parts.append(_moved(entries, *places[sequence if len(places) > 1 else 0]))
    return rebuilt(Ranges, list(_trapezoids.lists(parts)), ())


def _moved(entries: Array, rows: Run, keys: Run | Scattered) -> Array:
    """The parts of ranges in some rows and keys, counted from the first of these."""
    if not isinstance(keys, Scattered):
        shown = _cut(entries, rows, keys)
        return shown - np.array([rows[0], rows[0], keys[0], keys[0], 0], np.int32)
    # A row sees an interval of the keys of a range, and so an interval of any ascending keys. These
    # intervals do not move by one key per row, so a range with a diagonal becomes one for each row,
    # or for a few that see the same of the keys.
    e = _cut(entries, rows, (0, _trapezoids.UNBOUNDED)).astype(np.int64)
    pieces = np.where(e[:, 4] == 0, 1, e[:, 1] - e[:, 0])
    step = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first, last, low, high, kind = np.repeat(e, pieces, axis=0).T
    begin = first + step
    end = np.where(kind == 0, last, begin + 1)
    low = np.where(kind & 2, low + step, low)
    high = np.where(kind & 1, high - (last - begin) + 1, high)
    low, high = np.searchsorted(keys.places, (low, high))
    shown = np.stack([begin - rows[0], end - rows[0], low, high, np.zeros_like(low)], axis=1)
    shown = shown[low < high].astype(np.int32)
    starts = np.ones(len(shown), bool)
    starts[1:] = (shown[1:, 0] != shown[:-1, 1]) | (shown[1:, 2:4] != shown[:-1, 2:4]).any(axis=1)
    joined = shown[starts]
    joined[:, 1] = shown[np.roll(starts, -1), 1]  # a range ends before the next one starts
    return joined


def _part_of_blocks(mask: Any, places: tuple[Place, ...]) -> Any:
    """The same of blocks, which are cut anew: their edges move with the rows and keys."""
    whole = mask._strip(mask.keys)
    rows, keys = _sizes(places)

    def strip(sequence: int, head: int, begin: int, end: int) -> Array:
        tile = np.zeros((end - begin, keys), bool)
        (first, last), own = places[sequence if len(places) > 1 else 0]
        first, last = first + begin, min(first + end, last, mask.rows)
        if first < last:
            at = sequence if mask.batch > 1 else 0
            columns: Any = slice(*own) if isinstance(own, tuple) else own.below(mask.keys)
            shown = _rows(whole, at, head, first, last)[:, columns]
            tile[: last - first, : shown.shape[1]] = shown
        return tile

    batch = max(mask.batch, len(places))
    lists = _block_lists.build(strip, batch, mask.heads, rows, keys)
    return rebuilt(Blocks, list(lists), (rows, keys, mask.heads))


def _rows(strip: Strip, sequence: int, head: int, begin: int, end: int) -> Array:
    """Rows of a mask of blocks, from any row on."""
    first = begin // BLOCK * BLOCK
    strips = [strip(sequence, head, at, min(at + BLOCK, end)) for at in range(first, end, BLOCK)]
    return np.concatenate(strips)[begin - first :]


class MaskPart:
    """The part of a mask that a call needs, for all heads."""

    def __init__(self, mask: Any, device: torch.device) -> None:
        self._mask, self._device = mask, device
        self._of_heads: dict[tuple[int, int], Mask] = {}

    def add_to(self, options: Options, q: Tensor, batch: int) -> Options:
        """The options with the mask of the heads of q, which begin with options.head_offset."""
        heads = (options.head_offset, options.head_offset + q.shape[-2])
        return _mask_tensors.with_mask(options, q, batch, self.of_heads(heads), None)

    def of_heads(self, heads: Run) -> Mask:
        """The mask of some of the heads, or the one that all of them share."""
        if self._mask.heads == 1:
            heads = (0, 1)
        if heads not in self._of_heads:
            self._of_heads[heads] = _heads_of(self._mask, heads).to(self._device)
        return self._of_heads[heads]


def _heads_of(mask: Any, heads: Run) -> Any:
    """The mask of some of the heads."""
    if mask.heads == heads[1] - heads[0]:
        return mask
    rows = blocks_of(mask.rows)
    first, entries = [np.zeros(1, np.int64)], []
    for sequence in range(mask.batch):
        begin, end = ((sequence * mask.heads + head) * rows for head in heads)
        own = mask.first[begin : end + 1].astype(np.int64)
        first.append(own[1:] - own[0] + first[-1][-1])
        entries.append(mask.entries[own[0] : own[-1]])
    arrays = [np.concatenate(first).astype(np.int32), np.concatenate(entries), mask.bits]
    return rebuilt(Blocks, arrays, (mask.rows, mask.keys, heads[1] - heads[0]))


@lru_cache(maxsize=64)
def _cached_part_at(
    whole: WholeMask, places: tuple[Place, ...] | None, device: torch.device
) -> MaskPart | None:
    if places is None:
        return MaskPart(whole.mask, device)
    return part_of(whole.mask, places, device)


def part_of(mask: Any, places: tuple[Place, ...], device: torch.device) -> MaskPart | None:
    """``WholeMask.part_at`` of ranges or blocks on the host, which keeps nothing."""
    if not places or 0 in _sizes(places):
        return None
    part = _part_of_ranges if isinstance(mask, Ranges) else _part_of_blocks
    return MaskPart(part(mask, places), device)


def _sizes(places: tuple[Place, ...]) -> tuple[int, int]:
    """The most rows and the most keys of a sequence."""
    keys = (len(k) if isinstance(k, Scattered) else k[1] - k[0] for _, k in places)
    return max(end - begin for (begin, end), _ in places), max(keys)


@lru_cache(maxsize=64)
def band_at(
    bounds: Run, rows: int, ends: tuple[int, ...], places: tuple[Place, ...], device: torch.device
) -> MaskPart | None:
    """The part of a window at the places of its sequences, for the calls of all layers of a step;
    see ``band_as_ranges``.
    """
    return part_of(band_as_ranges(bounds, rows, ends), places, device)


def band_as_ranges(bounds: Run, rows: int, ends: Sequence[int]) -> Any:
    """The ranges that show the pairs that a window shows.

    Args:
        bounds: left and right as the library takes them; -1 means no limit.
        rows: Rows of each sequence, of which the last is aligned with the last key.
        ends: Keys of each sequence, of which there is at least one.
    """
    left, right = (_trapezoids.UNBOUNDED if bound < 0 else bound for bound in bounds)
    parts = []
    for keys in ends:
        place = _trapezoids.trapezoid((0, rows), (0, keys))
        band = _trapezoids.trapezoid((0, rows), (0, keys), keys - rows - left, keys - rows + right)
        parts.append(_trapezoids.to_ranges(_trapezoids.intersection(band, place)))
    return rebuilt(Ranges, list(_trapezoids.lists(parts)), ())


def tree_as_ranges(tree: Any, older: Array) -> Any:
    """The ranges that show the same pairs as a tree on the host.

    A sequence gets a range of its older keys and one for each run of set bits of a row.

    Args:
        tree: ``masks.Tree`` with NumPy arrays.
        older: integer [B], the keys of each sequence before its draft keys; negative if it has
            fewer keys than rows.
    """
    bits = tree.bits.view(np.uint64)[:, :, None] >> np.arange(tree.rows, dtype=np.uint64)
    edges = np.diff((bits & np.uint64(1)).astype(np.int8), axis=-1, prepend=0, append=0)
    owner, row, begin = np.nonzero(edges > 0)
    runs = np.stack([row, row + 1, begin, np.nonzero(edges < 0)[2], np.zeros_like(row)], axis=1)
    parts = []
    for sequence, count in enumerate(older.tolist()):
        own = runs[owner == (sequence if tree.batch > 1 else 0)]
        shown = np.concatenate([own + [0, 0, count, count, 0], [[0, tree.rows, 0, count, 0]]])
        shown[:, 2] = shown[:, 2].clip(0)
        parts.append(shown[shown[:, 2] < shown[:, 3]].astype(np.int32))
    return rebuilt(Ranges, list(_trapezoids.lists(parts)), ())
