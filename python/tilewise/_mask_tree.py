"""Trees of draft tokens as masks over a cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._block_lists import BLOCK, FULL, HIDDEN, PARTIAL, Array, Strip
from ._check import is_one_or, is_tensor
from ._mask import Mask, common_count, rebuilt
from ._mask_fields import host, int32, number, owned

_ROWS = 64  # bits of a row
_HALF = 2**32 - 1
_WORDS = BLOCK // 32


class Tree(Mask):
    """A tree of draft tokens, which are the last keys of a cache and the rows of q.

    Speculative decoding with several guesses at each place (SpecInfer, arXiv 2305.09781; Medusa,
    arXiv 2401.10774). A sequence with n rows of q sees its last n keys as draft tokens. Row i sees
    every older key, and draft key j if bit j of row i is set. Only ``attention_with_kvcache`` takes
    such a mask.

    Attributes:
        bits: int64 [batch, rows]; batch is 1 if all sequences have the same tree.
    """

    _ARRAYS = ("bits",)
    bits: Any
    heads = 1

    def __init__(self, bits: Any) -> None:
        """Makes a mask from the bits of each row; ``from_parents`` computes them.

        Args:
            bits: [rows] or [batch, rows], with 1 to 64 rows: a torch.int64 tensor, an array of
                int64 or uint64, or integers from 0 to 2^64 - 1.

        Raises:
            TypeError: bits has another dtype.
            ValueError: bits has another shape, or a number out of range.
        """
        if is_tensor(bits):
            import torch

            if bits.dtype != torch.int64:
                raise TypeError(f"bits has dtype {bits.dtype}, but must be torch.int64")
            array: Any = bits.detach().contiguous()
        else:
            array = _int64(bits)
        _check_shape("bits", array.shape)
        self._set(bits=owned(array.reshape(-1, array.shape[-1])))

    @classmethod
    def from_parents(cls, parents: Any) -> Tree:
        """The tree in which row i sees itself, its parent, the parent's parent, and so on.

        Args:
            parents: int32 [rows] or [batch, rows], with 1 to 64 rows: the row of the parent, which
                must come before the row, or -1 for a row that follows the last older key.

        Raises:
            TypeError: parents has another dtype.
            ValueError: parents has another shape, or a parent does not come before its row.
        """
        try:
            dimensions = len(parents.shape) if hasattr(parents, "shape") else np.ndim(parents)
        except ValueError:  # lists of different lengths, which `int32` refuses
            dimensions = 2
        rows = host(int32("parents", parents, (None,) * dimensions, parents))
        _check_shape("parents", rows.shape)
        rows = rows.reshape(-1, rows.shape[-1])
        wrong = np.argwhere((rows < -1) | (rows >= np.arange(rows.shape[1])))
        if len(wrong):
            b, i = wrong[0].tolist()
            raise ValueError(
                f"the parent of row {i} of sequence {b} is {rows[b, i]}, but must be -1 or a row "
                "before it"
            )
        bits = np.zeros(rows.shape, np.uint64)
        for i in range(rows.shape[1]):
            above = np.take_along_axis(bits, rows[:, i, None].clip(0), axis=1)[:, 0]
            bits[:, i] = np.where(rows[:, i] < 0, 0, above) | np.uint64(1 << i)
        mask = cls(bits)
        return mask.to(parents.device) if is_tensor(parents) else mask

    @property
    def batch(self) -> int:  # type: ignore[override]
        return int(self.bits.shape[0])

    @property
    def rows(self) -> int:
        return int(self.bits.shape[1])

    def arguments(self) -> list[Any]:
        return [self.bits]

    def __and__(self, other: Any) -> Tree:
        """The draft keys that both trees show to a row."""
        return self._combined(other, "&")

    def __or__(self, other: Any) -> Tree:
        """The draft keys that one of the trees shows to a row, or both."""
        return self._combined(other, "|")

    def _combined(self, other: Any, sign: str) -> Tree:
        if not isinstance(other, Tree):
            raise TypeError(f"the right side of {sign} is a {type(other).__name__}, {NO_TREE}")
        if self.rows != other.rows:
            raise ValueError(
                f"the trees have {self.rows} and {other.rows} rows, but must have the same number"
            )
        common_count("batch", self, other)
        device = next((t.bits.device for t in (self, other) if is_tensor(t.bits)), None)
        a, b = (t.bits if device is None else t.to(device).bits for t in (self, other))
        return rebuilt(Tree, [a & b if sign == "&" else a | b], ())

    def _shape(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        if seqlen_q not in (None, self.rows):
            raise ValueError(f"seqlen_q is {seqlen_q}, but the mask is for {self.rows}")
        keys = self.rows if seqlen_k is None else number("seqlen_k", seqlen_k, self.rows)
        return self.rows, keys

    def _strip(self, keys: int) -> Strip:
        bits = host(self.bits).view(np.uint64)[:, :, None] >> np.arange(self.rows, dtype=np.uint64)

        def strip(b: int, _head: int, begin: int, end: int) -> Array:
            tile = np.ones((end - begin, keys), bool)
            tile[:, keys - self.rows :] = bits[b, begin:end] & np.uint64(1)
            return tile

        return strip

    def tiles(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Array:
        dense = self.to_bool(seqlen_q, seqlen_k)
        tiles = [dense[..., at : at + BLOCK] for at in range(0, dense.shape[-1], BLOCK)]
        states = [
            np.where(t.all((2, 3)), FULL, np.where(t.any((2, 3)), PARTIAL, HIDDEN)) for t in tiles
        ]
        return np.stack(states, axis=-1)[:, :, None].astype(np.int8)

    def _picture(self, rows: int, keys: int) -> Array:
        """The pairs instead of tiles, of which the draft has one."""
        return np.where(self.to_bool(rows, keys), FULL, HIDDEN)

    def __repr__(self) -> str:
        whom = "every sequence" if self.batch == 1 else f"{self.batch} sequences"
        one = self.rows == 1
        text = "1 row" if one else f"{self.rows} rows"
        if not is_tensor(self.bits) or self.bits.device.type == "cpu":
            seen = self.to_bool().sum(axis=-1)
            last = "key" if one else f"{self.rows} keys"
            text += f" that see{'s' * one} {seen.min()} to {seen.max()} of the last {last}"
        return f"Tree({text}; for {whom})"


NO_TREE = (
    "but a Tree combines only with a Tree: masks.from_bool(tree.to_bool(seqlen_q, seqlen_k)) is "
    "the same mask for sequences of these lengths"
)


def _check_shape(name: str, shape: Any) -> None:
    if len(shape) not in (1, 2) or not 1 <= shape[-1] <= _ROWS or shape[0] == 0:
        raise ValueError(
            f"{name} has shape {list(shape)}, but must be [rows] or [batch, rows], with 1 to "
            f"{_ROWS} rows"
        )


def _int64(bits: Any) -> Array:
    """The bits of an array of 64-bit integers, or of integers of Python."""
    if isinstance(bits, np.ndarray):
        if bits.dtype not in (np.int64, np.uint64):
            raise TypeError(f"bits has dtype {bits.dtype}, but must be int64 or uint64")
        return np.ascontiguousarray(bits).view(np.int64)
    try:  # of objects, because NumPy would round numbers that are not integers
        array = np.array(bits, object)
        numbers = [number("bits", x, most=None) for x in array.flat]
        return np.array(numbers, np.uint64).reshape(array.shape).view(np.int64)
    except (OverflowError, ValueError, TypeError):
        raise ValueError(
            "bits has something other than integers from 0 to 2^64 - 1 in rows of one length"
        ) from None


def refuse_rotation(mask: Any) -> None:
    """Refuses a tree in a call that rotates q and new keys."""
    if isinstance(mask, Tree):
        raise ValueError(
            "rotary_cos is given with a Tree, but row r would be rotated at position "
            "cache_seqlens[b] + r instead of the depth of its token: rotate q and k before the call"
        )


def check(mask: Tree, batch: int, rows: int | None, packed: bool) -> None:
    """Refuses a tree that does not fit a call with a cache.

    Args:
        mask: The tree.
        batch: Sequences of the call.
        rows: Rows of each sequence, or of the longest of packed ones; None: not known here.
        packed: Whether sequences may have fewer rows than the tree.
    """
    if not is_one_or(mask.batch, batch):
        raise ValueError(f"mask has batch {mask.batch}, but must have 1 or {batch} like q")
    if rows is None:
        return
    if packed and rows > mask.rows:
        raise ValueError(
            f"mask is a tree of {mask.rows} rows, but must have at least {rows} like the longest "
            "sequence of cu_seqlens_q"
        )
    if not packed and rows != mask.rows:
        raise ValueError(f"mask is a tree of {mask.rows} rows, but q has {rows}")


def as_blocks(xp: Any, bits: Any, older: Any, capacity: int) -> tuple[list[Any], dict[str, int]]:
    """The arrays and numbers of a mask of blocks that shows the same pairs.

    Each sequence has three entries: a run of the blocks in which all keys are older, and two
    partial blocks, which have room for 64 draft keys wherever these begin. If no block has only
    older keys, the third entry is instead a block that shows nothing. So shapes do not depend on
    lengths, and graphs can be traced.

    Args:
        xp: ``torch``, ``numpy`` or, with 64-bit integers enabled, ``jax.numpy``, whichever the
            arrays belong to.
        bits: int64 [batch or 1, rows].
        older: integer [batch], the keys of each sequence before its draft keys; negative if it has
            fewer keys than rows.
        capacity: The largest number of keys that a sequence may have.
    """
    on = {"device": older.device} if is_tensor(older) else {}
    batch, rows = older.shape[0], bits.shape[1]
    full = xp.clip(older, 0, None) // BLOCK
    begin = (older - full * BLOCK)[:, None, None]  # the first draft key in the two blocks
    words = xp.arange(2 * _WORDS, **on) * 32
    shown = (1 << xp.clip(begin - words, 0, 32)) - 1  # [batch, 1, words]: older keys
    for first, half in ((0, bits & _HALF), (32, bits >> 32 & _HALF)):
        at = begin + first - words  # the first bit of the half in each word
        half = half[:, :, None]
        moved = xp.where(at >= 0, half << xp.clip(at, 0, 31), half >> xp.clip(-at, 0, 31))
        shown = shown | xp.where(abs(at) < 32, moved & _HALF, 0)
    signed = xp.where(shown > _HALF >> 1, shown - _HALF - 1, shown)
    by_block = xp.asarray(signed, dtype=xp.int32).reshape(batch, rows, 2, _WORDS).swapaxes(1, 2)
    hidden = xp.zeros((2 * batch + 1, BLOCK, _WORDS), dtype=xp.int32, **on)
    parts = by_block.reshape(2 * batch, rows, _WORDS), hidden[1:, rows:]
    blocks = xp.concatenate((xp.concatenate(parts, 1), hidden[:1]))
    entries = _entries(xp, full, 2 * xp.arange(batch, **on))
    first = 3 * xp.arange(batch + 1, dtype=xp.int32, **on)
    numbers = {"mask_heads": 1, "mask_rows": rows, "mask_keys": capacity + 3 * BLOCK}
    return [first, entries, blocks], numbers


def _entries(xp: Any, full: Any, bits: Any) -> Any:
    """int32 [3 * batch, 3] from the number of full blocks, and the first partial block."""
    zero = full * 0
    after_full = (zero, full, zero - 1, full, full + 1, bits, full + 1, full + 2, bits + 1)
    hidden = zero + 2 * full.shape[0]
    from_start = (zero, zero + 1, bits, zero + 1, zero + 2, bits + 1, zero + 2, zero + 3, hidden)
    columns = xp.where((full > 0)[:, None], xp.stack(after_full, 1), xp.stack(from_start, 1))
    return xp.asarray(columns.reshape(-1, 3), dtype=xp.int32)
