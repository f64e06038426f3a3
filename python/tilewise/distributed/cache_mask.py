"""The part of a mask over a cache whose keys are spread over ranks that shows a rank its keys.

Causal rows and windows are such a mask as well, whose ranges move with the ends of the sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import _check, _mask_tree, _torch, masks
from .._block_lists import Array
from .._cache import check_cache
from .._kvcache_torch import cache_lengths, index_tensor
from .agreement import exchange
from .layout import Run
from .mask_parts import (
    MaskPart,
    Place,
    Scattered,
    band_as_ranges,
    band_at,
    part_of,
    tree_as_ranges,
    whole_mask,
)
from .ranks import Ranks, exchanging


class Keys(NamedTuple):
    """The keys of a rank; see ``attention_with_kvcache``."""

    k_cache: Any
    v_cache: Any
    k: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any


class CacheMask:
    """A mask and a window that were checked, and the places of a rank's keys in them."""

    def __init__(
        self, mask: Any, bounds: Run, positions: Any, q: Tensor, keys: Keys, ranks: Ranks
    ) -> None:
        """Checks the arguments of one rank, one of mask and bounds at least; exchanges nothing.

        The bounds are those of the window as the library takes them: -1 means no limit.
        """
        batch = check_cache(
            q, keys.k_cache, keys.v_cache, keys.block_table, keys.cache_batch_idx, None
        )
        self._q, self._ranks = q, ranks
        rows, table = q.shape[1], keys.block_table
        capacity = keys.k_cache.shape[1] * (1 if table is None else table.shape[1])
        self.whole = None
        if mask is not None:
            _check_mask(mask, batch, rows, q.shape[2])
            self.whole = whole_mask(mask)
        self._bounds = bounds
        self._positions = _positions(positions, batch, capacity, ranks)
        self._places: tuple[Place, ...] = tuple(
            ((0, rows), _compact(own)) for own in self._positions
        )
        moves = isinstance(mask, masks.Tree) or bounds != (-1, -1)
        self._ends = _ends(self._positions, keys, q) if moves else None

    def longest(self) -> Array | None:
        """Where each sequence ends over all ranks: integer [B]; None where ``own_part`` needs no
        such number. A tree and a window are aligned with the last key, which only all ranks
        together know.
        """
        if self._ends is None or self._ranks.world == 1:
            return self._ends
        with exchanging("the ends of its sequences", self._ranks):
            return np.array(exchange(self._ends.tolist(), self._ranks)).max(axis=0)

    def own_part(self, longest: Array | None) -> Any:
        """The mask of this rank's keys, counted as they are in its cache; None without any."""
        batch, rows, heads, _ = self._q.shape
        device, whole = self._q.device, self.whole
        if batch == 0:
            return None
        part: MaskPart | None
        if whole is None:
            assert longest is not None
            part = band_at(self._bounds, rows, tuple(longest.tolist()), self._places, device)
        elif longest is None:
            part = whole.part_at(self._places, device)
        else:
            shown = whole.mask
            if isinstance(shown, masks.Tree):
                shown = tree_as_ranges(shown, longest - rows)
            if self._bounds != (-1, -1):
                shown = shown & band_as_ranges(self._bounds, rows, longest.tolist())
            part = part_of(shown, self._places, device)
        return None if part is None else part.of_heads((0, heads))


def _check_mask(mask: Any, batch: int, rows: int, heads: int) -> None:
    if isinstance(mask, masks.Tree):
        _mask_tree.check(mask, batch, rows, False)
        return
    masks.check(mask, batch, heads, None)
    if isinstance(mask, masks.Blocks) and mask.rows != rows:
        raise ValueError(f"mask is for {mask.rows} rows, but q has {rows}")


def _positions(given: Any, batch: int, capacity: int, ranks: Ranks) -> Array:
    """The places of the keys that fit into a row of the cache: [B or 1, capacity]."""
    if given is None:
        if ranks.world > 1:
            raise ValueError(
                "key_positions is None with a mask, causal or a window, but must be the places of "
                "this rank's keys in their sequence, since a rank may have any of them"
            )
        return np.arange(capacity)[None]
    tensor = index_tensor("key_positions", given, torch.device("cpu"))
    assert tensor is not None
    shape = tuple(tensor.shape)
    if len(shape) not in (1, 2) or shape[-1] < capacity or shape[:-1] not in ((), (batch,)):
        raise ValueError(
            f"key_positions has shape {list(shape)}, but must be [n] or [{batch}, n], with n of at "
            f"least {capacity}, the keys that a sequence has room for in this cache"
        )
    array = tensor.numpy()[..., :capacity]
    array = array[None] if len(shape) == 1 else array
    bad = np.argwhere(np.diff(array, axis=1, prepend=-1) <= 0)
    if len(bad):
        b, j = bad[0].tolist()
        at = f"{b}, {j}" if len(shape) == 2 else f"{j}"
        raise ValueError(
            f"key_positions[{at}] is {array[b, j]}, but must be at least 0 and above the entry "
            "before it"
        )
    return array


def _compact(own: Array) -> tuple[int, int] | Scattered:
    """The places of keys; those that follow each other are a run, whose parts are cheaper."""
    begin = int(own[0]) if len(own) else 0
    if len(own) == 0 or int(own[-1]) - begin == len(own) - 1:
        return begin, begin + len(own)
    return Scattered(np.ascontiguousarray(own))


def _ends(positions: Array, keys: Keys, q: Tensor) -> Array:
    """The place after the last key of this rank in each sequence, 0 without one: int64 [B]."""
    batch, capacity = q.shape[0], positions.shape[1]
    lengths = cache_lengths(keys.cache_seqlens, batch, q.device)
    padding = index_tensor("cache_leftpad", keys.cache_leftpad, q.device)
    if padding is not None:
        _check.shape("cache_leftpad", padding, (batch,), "one number per sequence")
    count = np.full(batch, capacity) if lengths is None else lengths.cpu().numpy().astype(np.int64)
    if keys.k is not None:
        count = count + _torch.as_array("k", keys.k).shape[1]
    if padding is not None:
        count = count - padding.cpu().numpy()
    count = count.clip(0, capacity)  # the call refuses lengths beyond the cache
    if capacity == 0:
        return np.zeros(batch, np.int64)
    own = np.broadcast_to(positions, (batch, capacity))
    last = np.take_along_axis(own, (count - 1).clip(0)[:, None], axis=1)[:, 0]
    return np.where(count > 0, last.astype(np.int64) + 1, 0)
