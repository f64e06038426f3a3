"""Masks as data: which pairs of a row and a key are visible, for ``attention(mask=...)``.

``Ranges`` is a set of rectangles, full or causal ones: documents, prefixes, spans, shared
questions. ``Blocks`` lists the visible blocks of 128 rows and 128 keys of every head, with a bit
per pair in blocks that are only partly visible; ``from_flex`` and ``from_bool`` make such masks.
``Tree`` is for the draft tokens of speculative decoding.

A pair is visible if the mask, causal and window all allow it. Rows and keys are counted within a
sequence. Masks are immutable and can be pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import _block_lists, _trapezoids
from ._block_lists import BLOCK, FULL, PARTIAL, Array, Lists, Strip, blocks_of
from ._check import is_one_or, is_tensor
from ._mask import Mask, common_count, rebuilt
from ._mask_fields import KINDS, check_kinds, host, int32, kind_numbers, number, owned, vector
from ._mask_tree import NO_TREE, Tree

__all__ = ["KINDS", "Blocks", "Mask", "Ranges", "Tree", "from_bool", "from_flex"]


class _Combining(Mask):
    """Masks that ``&`` and ``|`` combine."""

    def __and__(self, other: Any) -> Any:
        """The pairs that both masks show."""
        if isinstance(self, Ranges) and isinstance(other, Ranges):
            return self._common(other)
        return _combined(self, other, np.logical_and, "&")

    def __or__(self, other: Any) -> Any:
        """The pairs that one of the masks shows, or both."""
        if isinstance(self, Ranges) and isinstance(other, Ranges):
            return self._joined(other)
        return _combined(self, other, np.logical_or, "|")


class Ranges(_Combining):
    """A set of rectangles of rows and keys. A pair is visible if at least one of them shows it.

    The kind of a rectangle says which of its pairs are visible. With R rows and C keys, and row i
    and key j counted from its first row and key:

    ================== ======================= =============================================
    kind               visible                 which means
    ================== ======================= =============================================
    ``full``           all
    ``causal``         j <= i + C - R          the last row sees up to the last key
    ``inverse_causal`` j >= i                  the first row sees from the first key on
    ``both``           i <= j <= i + C - R
    ================== ======================= =============================================

    What lies beyond the rows and keys of a sequence is ignored.

    Attributes:
        entries: int32 [n, 5]: row begin, row end, key begin, key end, number of the kind.
        first: int32 [batch + 1]: sequence b has the entries first[b] to first[b + 1] - 1.
    """

    _ARRAYS = ("entries", "first")
    entries: Any
    first: Any

    def __init__(
        self, query_ranges: Any, key_ranges: Any, kinds: Any = "full", *, starts: Any = None
    ) -> None:
        """Makes a mask of rectangles [begin, end).

        Args:
            query_ranges: int32 [n, 2], the rows of each rectangle: a tensor, an array or a list.
            key_ranges: int32 [n, 2], its keys.
            kinds: One of ``masks.KINDS`` for all rectangles, a list of n of them, or their
                numbers as int32 [n].
            starts: int32 [batch + 1]: sequence b has the rectangles starts[b] to starts[b + 1] - 1.
                None: every sequence has all of them.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: an argument has the wrong shape, or no kind has a given name or number. The
                calls that use the mask refuse ranges out of order, and kinds in a tensor on a GPU.
        """
        like = next((x for x in (query_ranges, key_ranges, kinds, starts) if is_tensor(x)), None)
        rows = int32("query_ranges", query_ranges, (None, 2), like)
        count = rows.shape[0]
        keys = int32("key_ranges", key_ranges, (count, 2), like)
        numbers = int32("kinds", kind_numbers(kinds, count, like), (count,), like)
        check_kinds(numbers)
        starts = vector([0, count], like) if starts is None else starts
        first = int32("starts", starts, (None,), like)
        if first.shape[0] < 2:
            raise ValueError(f"starts has {first.shape[0]} entries, but must have batch + 1")
        parts = [rows, keys, numbers[:, None]]
        if like is None:
            entries: Any = np.ascontiguousarray(np.concatenate(parts, axis=1))
        else:
            import torch

            entries = torch.cat(parts, dim=1)
        self._set(entries=entries, first=owned(first))

    heads = 1

    @property
    def batch(self) -> int:  # type: ignore[override]
        return int(self.first.shape[0]) - 1

    def arguments(self) -> list[Any]:
        return [self.first, self.entries]

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int | None = None) -> Ranges:
        """One causal rectangle, the same as ``causal=True``, to be joined with others by ``|``.

        Without seqlen_k it has as many keys as rows. The last row sees up to the last key.
        """
        rows = number("seqlen_q", seqlen_q)
        keys = rows if seqlen_k is None else number("seqlen_k", seqlen_k)
        return cls([[0, rows]], [[0, keys]], "causal")

    @classmethod
    def documents(cls, cu_seqlens: Any, *, causal: bool = True) -> Ranges:
        """Documents packed into one sequence: a row sees the keys of its own document.

        Args:
            cu_seqlens: int32 [documents + 1], where the documents begin and end.
            causal: Whether a row sees only the keys up to its own.
        """
        starts = int32("cu_seqlens", cu_seqlens, (None,), cu_seqlens)
        if is_tensor(starts):
            import torch

            spans = torch.stack([starts[:-1], starts[1:]], dim=1)
        else:
            spans = np.stack([starts[:-1], starts[1:]], axis=1)
        return cls(spans, spans, "causal" if causal else "full")

    @classmethod
    def prefixes(cls, lengths: Any, seqlen: int) -> Ranges:
        """A prefix LM: all rows of sequence b see its first lengths[b] keys, and the keys up to
        their own.

        Args:
            lengths: int32 [batch], the keys of each prefix, from 0 to seqlen.
            seqlen: Rows and keys of every sequence.
        """
        prefix = host(int32("lengths", lengths, (None,), lengths))
        batch = len(prefix)
        rows = np.tile(np.array([[0, number("seqlen", seqlen)]], np.int32), (2 * batch, 1))
        keys = rows.copy()
        keys[::2, 1] = prefix
        mask = cls(
            rows, keys, np.tile(np.array([0, 1], np.int32), batch), starts=2 * np.arange(batch + 1)
        )
        return mask.to(lengths.device) if is_tensor(lengths) else mask

    def blocks(self, seqlen_q: int, seqlen_k: int) -> Blocks:
        """The same mask as ``Blocks``, for sequences of these lengths, which are at least 1."""
        rows, keys = number("seqlen_q", seqlen_q, 1), number("seqlen_k", seqlen_k, 1)
        shape = (self.batch, self.heads, rows, keys)
        return _from_strips(self.on_host()._strip(keys), shape, self._arrays()[0])

    def _shape(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        ends = []
        for name, given, column in (("seqlen_q", seqlen_q, 1), ("seqlen_k", seqlen_k, 3)):
            if given is None:
                given = int(host(self.entries)[:, column].max(initial=0))
            ends.append(number(name, given))
        return ends[0], ends[1]

    def _intervals(self, b: int, begin: int, end: int, keys: int) -> tuple[Array, Array]:
        """Where the keys that each row sees begin and end, per range: two arrays [ranges, rows]."""
        entries, first = host(self.entries).astype(np.int64), host(self.first)
        e = entries[first[b] : first[b + 1]]
        e = e[(e[:, 0] < end) & (e[:, 1] > begin)]
        q0, q1, k0, k1, kind = (e[:, i, None] for i in range(5))
        row = np.arange(begin, end)
        low = np.where(kind & 2, np.maximum(k0, k0 + row - q0), k0)
        high = np.where(kind & 1, np.minimum(k1, row + 1 + k1 - q1), k1)
        high = np.minimum(high, keys)
        outside = (row < q0) | (row >= q1) | (high <= low)
        return np.where(outside, 0, low), np.where(outside, 0, high)

    def _strip(self, keys: int) -> Strip:
        columns = np.arange(keys)

        def strip(b: int, _head: int, begin: int, end: int) -> Array:
            tile = np.zeros((end - begin, keys), bool)
            for low, high in zip(*self._intervals(b, begin, end, keys), strict=True):
                tile |= (columns >= low[:, None]) & (columns < high[:, None])
            return tile

        return strip

    def tiles(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Array:
        rows, keys = self._shape(seqlen_q, seqlen_k)
        ranges = self.on_host()
        grid = np.zeros((self.batch, 1, blocks_of(rows), blocks_of(keys)), np.int8)
        for b, i in np.ndindex(self.batch, blocks_of(rows)):
            low, high = ranges._intervals(b, i * BLOCK, min((i + 1) * BLOCK, rows), keys)
            some = high > low
            touched = zip(
                np.where(some, low, keys).min(axis=1).tolist(), high.max(axis=1).tolist(),
                low.max(axis=1).tolist(), high.min(axis=1).tolist(), strict=True,
            )  # fmt: skip
            for begin, end, all_begin, all_end in touched:
                if begin >= end:
                    continue
                line = grid[b, 0, i]
                at = slice(begin // BLOCK, blocks_of(end))
                line[at] = np.maximum(line[at], PARTIAL)
                last = blocks_of(keys) if all_end == keys else all_end // BLOCK
                line[blocks_of(all_begin) : last] = FULL
        return grid

    def _visible_pairs(self, rows: int, keys: int) -> int:
        ranges, total = self.on_host(), 0
        for b, i in np.ndindex(self.batch, blocks_of(rows)):
            low, high = ranges._intervals(b, i * BLOCK, min((i + 1) * BLOCK, rows), keys)
            order = np.argsort(low, axis=0)
            low, high = (np.take_along_axis(x, order, axis=0) for x in (low, high))
            reached = np.maximum.accumulate(high, axis=0)  # by ranges up to this one
            low[1:] = np.maximum(low[1:], reached[:-1])
            total += int(np.maximum(high - low, 0).sum())
        return total

    def _joined(self, other: Ranges) -> Ranges:
        tensors = is_tensor(self.entries) and is_tensor(other.entries)
        if tensors and self.batch == other.batch == 1 and self.first.device == other.first.device:
            import torch  # no read from a device

            entries = torch.cat([self._listed_entries(), other._listed_entries()])
            return rebuilt(Ranges, [entries, vector([0, entries.shape[0]], entries)], ())
        return self._by_sequence(other, lambda a, b: np.concatenate([a, b]))

    def _listed_entries(self) -> Any:
        """The entries of a mask of tensors with one list, made empty where it leaves them out."""
        import torch

        index = torch.arange(self.entries.shape[0], device=self.first.device)
        listed = (index >= self.first[0]) & (index < self.first[1])
        return self.entries * listed.unsqueeze(1)

    def _common(self, other: Ranges) -> Ranges:
        def common(a: Array, b: Array) -> Array:
            both = _trapezoids.intersection(*map(_trapezoids.of_ranges, (a, b)))
            return _trapezoids.to_ranges(both)

        return self._by_sequence(other, common)

    def _by_sequence(self, other: Ranges, combine: Callable[[Array, Array], Array]) -> Ranges:
        batch = common_count("batch", self, other)
        sides = []
        for m in (self, other):
            entries, first = host(m.entries), host(m.first)
            sides.append([entries[first[b] : first[b + 1]] for b in range(m.batch)])
        pairs = (tuple(side[b % len(side)] for side in sides) for b in range(batch))
        mask = rebuilt(Ranges, list(_trapezoids.lists([combine(*pair) for pair in pairs])), ())
        device = next((m.entries.device for m in (self, other) if is_tensor(m.entries)), None)
        return mask if device is None else mask.to(device)

    def __repr__(self) -> str:
        count = self.entries.shape[0]
        text = f"{count} range" + ("" if count == 1 else "s")
        if not is_tensor(self.entries) or self.entries.device.type == "cpu":
            kinds = np.bincount(host(self.entries)[:, 4].clip(0, 3), minlength=4).tolist()
            named = [f"{n} {name}" for n, name in zip(kinds, KINDS, strict=True) if n]
            text += f": {', '.join(named)}" if named else ""
        whom = "every sequence" if self.batch == 1 else f"{self.batch} sequences"
        return f"Ranges({text}; for {whom})"


class Blocks(_Combining):
    """The visible blocks of 128 rows and 128 keys, and a bit per pair of those partly visible.

    Attributes:
        first: int32 [batch * heads * ceil(rows / 128) + 1]: where the list of each sequence, head
            and row block begins.
        entries: int32 [n, 3]: key block begin, key block end, and -1 for full blocks or the index
            of one partial block in bits. Ascending in each list.
        bits: int32 [m, 128, 4]: bit j % 32 of word j // 32 is key j of the block.
        rows: Rows of the mask, which must be those of the sequences.
        keys: Keys of the mask.
    """

    _ARRAYS = ("first", "entries", "bits")
    _NUMBERS = ("rows", "keys", "heads")
    first: Any
    entries: Any
    bits: Any
    rows: int
    keys: int

    def __init__(
        self, first: Any, entries: Any, bits: Any, *, rows: int, keys: int, heads: int = 1
    ) -> None:
        """Makes a mask from its arrays; ``from_bool`` and ``from_flex`` compute them.

        All arguments are those of the attributes: int32 tensors, arrays or lists, and numbers.

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: an argument has the wrong shape.
        """
        like = next((x for x in (first, entries, bits) if is_tensor(x)), None)
        first = int32("first", first, (None,), like)
        rows, keys, heads = (
            number("rows", rows, 1),
            number("keys", keys, 1),
            number("heads", heads, 1),
        )
        lists = first.shape[0] - 1
        if lists < 1 or lists % (heads * blocks_of(rows)) != 0:
            raise ValueError(
                f"first has {lists + 1} entries for {rows} rows and {heads} heads, but must have "
                "batch * heads * ceil(rows / 128) + 1, with a batch of at least 1"
            )
        self._set(
            first=owned(first),
            entries=owned(int32("entries", entries, (None, 3), like)),
            bits=owned(int32("bits", bits, (None, BLOCK, BLOCK // 32), like)),
            rows=rows,
            keys=keys,
            heads=heads,
        )

    @property
    def batch(self) -> int:  # type: ignore[override]
        return (int(self.first.shape[0]) - 1) // (self.heads * blocks_of(self.rows))

    def arguments(self) -> list[Any]:
        return [self.first, self.entries, self.bits]

    def numbers(self) -> dict[str, int]:
        return {"mask_heads": self.heads, "mask_rows": self.rows, "mask_keys": self.keys}

    def _shape(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        for name, given, length in (
            ("seqlen_q", seqlen_q, self.rows),
            ("seqlen_k", seqlen_k, self.keys),
        ):
            if given is not None and given != length:
                raise ValueError(f"{name} is {given}, but the mask is for {length}")
        return self.rows, self.keys

    def _lists(self) -> Lists:
        return Lists(host(self.first), host(self.entries), host(self.bits))

    def _strip(self, keys: int) -> Strip:
        return _block_lists.strip_of(self._lists(), self.heads, self.rows, keys)

    def tiles(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Array:
        self._shape(seqlen_q, seqlen_k)
        return _block_lists.states(self._lists(), self.batch, self.heads, self.rows, self.keys)

    def __repr__(self) -> str:
        size = f"{self.rows} x {self.keys}, batch {self.batch}, heads {self.heads}"
        distinct = self.bits.shape[0]
        text = (
            f"{distinct} different partial blocks, {distinct * BLOCK * BLOCK // 8:,} bytes of bits"
        )
        if not is_tensor(self.first) or self.first.device.type == "cpu":
            grid = self.tiles()
            full, part = int((grid == FULL).sum()), int((grid == PARTIAL).sum())
            text = f"of {grid.size} blocks {full} full and {part} partial, {text}"
        return f"Blocks({size}: {text})"


def check(mask: Any, batch: int, heads: int, lengths: tuple[int, int] | None) -> None:
    """Refuses a mask that does not fit a call.

    Args:
        mask: The argument of the call.
        batch: Sequences of the call.
        heads: Query heads.
        lengths: Rows and keys, if all sequences have the same; keys of a cache: its capacity.

    Raises:
        TypeError: it is no mask.
        ValueError: it has other sizes.
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask is a {type(mask).__name__}, but must be one of tilewise.masks: for a bool "
            "tensor or array, pass masks.from_bool(mask), and for a BlockMask masks.from_flex(mask)"
        )
    if isinstance(mask, Tree):
        raise TypeError(
            "mask is a Tree, but only attention_with_kvcache takes one: pass "
            "masks.from_bool(mask.to_bool(seqlen_q, seqlen_k))"
        )
    for name, count, wanted in (("batch", mask.batch, batch), ("heads", mask.heads, heads)):
        if not is_one_or(count, wanted):
            raise ValueError(f"mask has {name} {count}, but must have 1 or {wanted} like q")
    if isinstance(mask, Blocks) and lengths is not None and lengths != (mask.rows, mask.keys):
        raise ValueError(
            f"mask is for {mask.rows} rows and {mask.keys} keys, but must be for {lengths[0]} rows "
            f"and {lengths[1]} keys"
        )


# --- making masks ---------------------------------------------------------------------------------


def from_bool(dense: Any) -> Blocks:
    """The mask of a dense matrix. One on a GPU is converted there, which waits for the GPU.

    Args:
        dense: bool, a tensor or an array: [seqlen_q, seqlen_k], or [batch or 1, heads or 1,
            seqlen_q, seqlen_k]; True is visible.

    Raises:
        TypeError: it is no bool tensor or array.
        ValueError: it has another number of dimensions.
    """
    if not is_tensor(dense):
        dense = np.asarray(dense)
    if str(dense.dtype).rpartition(".")[2] != "bool":
        raise TypeError(f"dense has dtype {dense.dtype}, but must be bool")
    if dense.ndim not in (2, 4) or 0 in dense.shape:
        raise ValueError(
            f"dense has shape {list(dense.shape)}, but must be [seqlen_q, seqlen_k] or "
            "[batch or 1, heads or 1, seqlen_q, seqlen_k], with sizes of at least 1"
        )
    four = dense[None, None] if dense.ndim == 2 else dense
    if is_tensor(dense) and dense.is_cuda:
        from ._block_tensors import lists_of

        lists = lists_of(four)
        _block_lists.warn_of_size(lists.bits.shape[0], stacklevel=3)
        return rebuilt(Blocks, list(lists), (*four.shape[2:], four.shape[1]))
    array = host(four)
    return _from_strips(lambda b, h, begin, end: array[b, h, begin:end], array.shape, dense)


def from_flex(block_mask: Any, *, score_mod: Any = None) -> Blocks:
    """The mask of a ``torch.nn.attention.flex_attention.BlockMask``.

    Its full blocks stay full. ``mask_mod`` is evaluated once, in the partial blocks. Other
    block sizes become blocks of 128.

    Args:
        block_mask: The mask, with any block size, per head and per sequence or shared.
        score_mod: Must be None: a function of scores is no mask.

    Raises:
        TypeError: block_mask is no BlockMask.
        ValueError: score_mod is given.
    """
    if score_mod is not None:
        raise ValueError(
            "score_mod is given, but a mask only shows or hides pairs: pass softcap, alibi_slopes "
            "or bias to attention instead"
        )
    from ._mask_flex import strip_of_flex

    strip, shape = strip_of_flex(block_mask)
    return _from_strips(strip, shape, block_mask.kv_num_blocks)


def _from_strips(strip: Strip, shape: tuple[int, ...], like: Any, stacklevel: int = 4) -> Blocks:
    """The mask of batch, heads, rows and keys that strips show; with tensors if `like` is one."""
    batch, heads, rows, keys = shape
    lists = _block_lists.build(strip, batch, heads, rows, keys)
    _block_lists.warn_of_size(lists.bits.shape[0], stacklevel)
    mask = rebuilt(Blocks, list(lists), (rows, keys, heads))
    return mask.to(like.device) if is_tensor(like) else mask


def _combined(a: Mask, b: Any, join: Callable[[Array, Array], Array], sign: str) -> Blocks:
    if not isinstance(b, Mask):
        raise TypeError(f"the right side of {sign} is a {type(b).__name__}, but must be a mask")
    if isinstance(b, Tree):
        raise TypeError(f"the right side of {sign} is a Tree, {NO_TREE}")
    sized = next(m for m in (a, b) if isinstance(m, Blocks))
    rows, keys = sized.rows, sized.keys
    sizes = [common_count(name, a, b) for name in ("batch", "heads")]
    for m in (a, b):
        if isinstance(m, Blocks) and (m.rows, m.keys) != (rows, keys):
            raise ValueError(
                f"the masks are for {rows} x {keys} and {m.rows} x {m.keys} rows and keys, but "
                "must be for the same"
            )
    strips = [(m.on_host()._strip(keys), m.batch > 1, m.heads > 1) for m in (a, b)]

    def strip(batch: int, head: int, begin: int, end: int) -> Array:
        left, right = (
            of_mask(batch if per_sequence else 0, head if per_head else 0, begin, end)
            for of_mask, per_sequence, per_head in strips
        )
        return join(left, right)

    return _from_strips(strip, (*sizes, rows, keys), sized.first, stacklevel=5)
