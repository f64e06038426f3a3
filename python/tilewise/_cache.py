"""The arguments of attention to a key/value cache, and their checks, for every backend.

This module needs no framework.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from . import _abi, _check


class NewKeys(NamedTuple):
    """The keys and values to append to a cache before attention, and how they are rotated."""

    k: Any = None  # [B, Snew, Hkv, D], or [Tnew, Hkv, D] with cu_seqlens
    v: Any = None
    lengths: Any = None  # [B] int32: keys already in the cache
    rotary_cos: Any = None  # [positions, rotary_dim / 2]
    rotary_sin: Any = None
    rotary_interleaved: bool = True
    rotary_lengths: Any = None  # [B] int32: first positions, if they differ from lengths
    cu_seqlens: Any = None  # [B + 1] int32


class CacheLayout(NamedTuple):
    """Where the queries and the cached keys of each sequence lie; the arguments are unchecked."""

    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None
    num_splits: int = 0
    check: bool = False
    cu_seqlens_q: Any = None  # [B + 1]; q is [T, Hq, D]
    max_seqlen_q: int | None = None
    head_dim_v: int | None = None  # of a latent cache, which has its values in its keys
    indices: Any = None  # [*rows of q, keys]: the rows of the cache that each row of q sees

    def max_rows(self) -> int:
        """The upper bound of the queries of a sequence, or 0 if it is not given.

        Raises:
            ValueError: max_seqlen_q is given without cu_seqlens_q.
        """
        if self.max_seqlen_q is not None and self.cu_seqlens_q is None:
            raise ValueError("max_seqlen_q is given, but belongs to cu_seqlens_q, which is None")
        return _check.bound("max_seqlen_q", self.max_seqlen_q)


def common_length(cache_seqlens: Any) -> int:
    """The value of cache_seqlens if it is one length for all sequences."""
    allowed = "an integer, or a tensor or array [batch] of integers"
    length = _check.integer("cache_seqlens", cache_seqlens, allowed)
    _, high = _check.INT32
    if not 0 <= length <= high:
        raise ValueError(f"cache_seqlens is {length}, but must be from 0 to {high}")
    return length


def check_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    batch_idx: Any,
    packed: int | None,
    pool: bool = False,
) -> int:
    """Refuses shapes that attention would refuse only after the append has written to the caches.

    k_cache, v_cache, block_table and batch_idx are those of ``attention_with_kvcache``.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] if packed.
        packed: The number of sequences, or None if q has a batch dimension.
        pool: Whether the caches need not have a row for each sequence.

    Returns:
        The number of sequences.
    """
    rank = "[batch or pages, rows, heads_kv, head_dim]"
    _check.shape("k_cache", k_cache, (None,) * 4, rank)
    _check.shape("v_cache", v_cache, (*k_cache.shape[:3], None), "k_cache's, then head_dim_v")
    head_dim = k_cache.shape[3]
    if packed is None:
        _check.shape("q", q, (None, None, None, head_dim), "[batch, seqlen, heads, head_dim]")
    else:
        _check.shape("q", q, (None, None, head_dim), "[total rows, heads, head_dim]")
    largest = _check.max_forward_head_dim(q)
    _check.head_sizes(q.shape[-2], k_cache.shape[2], head_dim, v_cache.shape[3], largest)
    batch = q.shape[0] if packed is None else packed
    if block_table is not None and batch_idx is not None:
        raise ValueError(
            "cache_batch_idx and block_table are both given, but block_table says where the keys "
            "of each sequence lie: only one of them is allowed"
        )
    if block_table is not None:
        _check.shape("block_table", block_table, (batch, None), "[batch, pages of a sequence]")
    elif batch_idx is None and k_cache.shape[0] != batch and not pool:
        raise ValueError(
            f"k_cache has batch size {k_cache.shape[0]}, but must have {batch} like q without "
            "cache_batch_idx"
        )
    return batch


def check_new(new: NewKeys) -> bool:
    """Whether there are new keys; refuses arguments whose counterpart is missing."""
    _check.flag("rotary_interleaved", new.rotary_interleaved)
    for first, second in (("k", "v"), ("rotary_cos", "rotary_sin")):
        given = [getattr(new, name) is not None for name in (first, second)]
        if given[0] != given[1]:
            missing = second if given[0] else first
            raise ValueError(f"{missing} is None, but {first} and {second} must be given together")
    if new.k is None and new.rotary_cos is not None:
        raise ValueError(
            "rotary_cos is given, but k is None: q is rotated only together with new keys"
        )
    for name, value, needed, given_needed in (
        ("rotary_seqlens", new.rotary_lengths, "rotary_cos", new.rotary_cos),
        ("cu_seqlens_k_new", new.cu_seqlens, "k", new.k),
    ):
        if value is not None and given_needed is None:
            raise ValueError(f"{name} is given, but belongs to {needed}, which is None")
    if new.k is not None and new.lengths is None:
        raise ValueError("cache_seqlens is None, but must say where k and v are written to")
    return new.k is not None


def check_rotary_columns(cos: Any, head_dim: int) -> None:
    """Refuses tables that rotate more columns than a head of k has."""
    if 2 * cos.shape[-1] > head_dim:
        raise ValueError(
            f"rotary_cos has {cos.shape[-1]} columns, but must have at most {head_dim // 2}: each "
            f"rotates a pair of the {head_dim} columns of a head"
        )


# The words of the C ABI for the arguments of ``attention_with_kvcache``.
_ARGUMENTS = {
    "k": "k_cache", "v": "v_cache", "k_new": "k", "v_new": "v", "kv_batch_idx": "cache_batch_idx",
    "leftpad_k": "cache_leftpad", "seqused_k": "cache_seqlens",
    "cu_seqlens_new": "cu_seqlens_k_new",
}  # fmt: skip


def in_python(sentence: str) -> str:
    """A sentence of the library, which starts with "tilewise: ", with the names of Python's
    arguments. Other sentences use them already.
    """
    if not sentence.startswith("tilewise: "):
        return sentence
    words = _abi.in_python(sentence)
    return re.sub(r"\w+", lambda word: _ARGUMENTS.get(word[0], word[0]), words)


def check_pages(xp: Any, table: Any, cache: Any, seqused: Any, leftpad: Any) -> None:
    """Refuses entries out of range among the pages in use, before the append writes to any page.

    Args:
        xp: ``torch`` or ``numpy``, whichever the arrays belong to.
        table: block_table [B, pages of a sequence].
        cache: [pages, page_size, ...].
        seqused: [B], keys in use after the append.
        leftpad: [B] or None.
    """
    pages, page_size = cache.shape[:2]
    bad = (table < 0) | (table >= pages)
    if not bad.any():
        return
    column = xp.arange(table.shape[1])
    bad &= column * page_size < seqused[:, None]
    if leftpad is not None:
        bad &= (column + 1) * page_size > leftpad[:, None]
    if not bad.any():
        return  # entries past the keys in use may have any value
    b, i = divmod(int((bad.reshape(-1) * 1).argmax()), table.shape[1])
    raise ValueError(
        f"block_table[{b}, {i}] is {int(table[b, i])}, but must be >= 0 and less than {pages}, "
        "the number of pages of k_cache"
    )


class Entries(NamedTuple):
    """The entries of index arrays as lists on the host, and the sizes that limit them."""

    lengths: list[int]  # keys in the cache before the append
    rows: list[int]  # queries of each sequence
    appended: list[int]  # new keys of each sequence
    capacity: int  # keys of a row of the caches, or of block_table
    leftpad: list[int] | None = None
    batch_idx: list[int] | None = None
    cache_batch: int = 0
    table: list[list[int]] | None = None
    pages: int = 0
    page_size: int = 1
    starts: tuple[tuple[str, list[int], int], ...] = ()  # name, cu_seqlens, rows of the array
    max_rows: int = 0  # max_seqlen_q, or 0
    rotary_rows: int | None = None  # None: nothing is rotated
    rotary_lengths: list[int] | None = None
    single_position: bool = False  # all queries of a sequence are rotated at one position


def _entry(name: str, value: int, low: int, high: int, what: str) -> None:
    if high < low:  # a row or a page of a cache that has none
        raise ValueError(f"{name} is {value}, but no value is valid, because k_cache is empty")
    if not low <= value <= high:
        allowed = str(low) if low == high else f"from {low} to {high}"
        raise ValueError(f"{name} is {value}, but must be {allowed}: {what}")


class _Pages:
    """The rows of pages that new keys are written to; refuses to write a row twice."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._written: dict[int, list[tuple[int, int, str]]] = {}  # by page: rows, entry

    def write(self, b: int, table: list[int], begin: int, end: int) -> None:
        """Records that the keys [begin, end) of sequence b are new."""
        for i in range(begin // self._size, -(-end // self._size)):
            first, page = i * self._size, table[i]
            low, high = max(begin - first, 0), min(end - first, self._size)
            others = self._written.setdefault(page, [])
            for other_low, other_high, entry in others:
                if low < other_high and other_low < high:
                    raise ValueError(
                        f"block_table[{b}, {i}] is {page} like {entry}, but both would hold a new "
                        f"key in row {max(low, other_low)} of that page: each new key must go to "
                        "a row of its own"
                    )
            others.append((low, high, f"block_table[{b}, {i}]"))


def check_starts(name: str, starts: list[int], total: int) -> None:
    """Refuses cu_seqlens that do not start at 0, that decrease, or that exceed the rows."""
    _entry(f"{name}[0]", starts[0], 0, 0, "the first row")
    for b, end in enumerate(starts[1:]):
        what = f"{name}[{b}] is {starts[b]}, and the array has {total} rows"
        _entry(f"{name}[{b + 1}]", end, starts[b], total, what)


def check_max_rows(max_rows: int, longest: int) -> None:
    """Refuses a max_seqlen_q that is given (not 0) and less than the longest sequence."""
    if 0 < max_rows < longest:
        raise ValueError(
            f"max_seqlen_q is {max_rows}, but a sequence has {longest} queries: it must be at "
            "least that"
        )


def _check_rotation(e: Entries, b: int) -> None:
    queries = min(e.rows[b], 1) if e.single_position else e.rows[b]
    rotated = max(e.appended[b], queries)
    if e.rotary_rows is None or rotated == 0:
        return
    first = e.lengths[b] if e.rotary_lengths is None else e.rotary_lengths[b]
    if e.rotary_lengths is not None:
        _entry(f"rotary_seqlens[{b}]", first, 0, _check.INT32[1], "a row of rotary_cos")
    if first + rotated > e.rotary_rows:
        raise ValueError(
            f"rotary_cos has {e.rotary_rows} rows, but must have {first + rotated}: sequence {b} "
            f"is rotated up to position {first + rotated - 1}"
        )


def check_entries(e: Entries) -> None:
    """Refuses entries that place keys outside the caches, or two new keys in the same row."""
    for starts in e.starts:
        check_starts(*starts)
    check_max_rows(e.max_rows, max(e.rows, default=0))
    seen: dict[int, int] = {}
    pages = _Pages(e.page_size)
    for b, row in enumerate(e.batch_idx or ()):
        _entry(f"cache_batch_idx[{b}]", row, 0, e.cache_batch - 1, "a row of k_cache")
        if any(e.appended) and seen.setdefault(row, b) != b:
            raise ValueError(
                f"cache_batch_idx[{b}] is {row} like that of sequence {seen[row]}, but each new "
                "key must go to a row of its own"
            )
    for b, (length, appended) in enumerate(zip(e.lengths, e.appended, strict=True)):
        if appended > e.capacity:
            raise ValueError(
                f"sequence {b} has {appended} new keys, but the cache holds {e.capacity}"
            )
        room = f"with {appended} new keys, the cache holds {e.capacity}"
        _entry(f"cache_seqlens[{b}]", length, 0, e.capacity - appended, room)
        padding = e.leftpad[b] if e.leftpad else 0
        if any(e.appended):  # without an append, a row may consist of nothing but padding
            _entry(f"cache_leftpad[{b}]", padding, 0, length, f"cache_seqlens[{b}] is {length}")
        _entry(f"cache_leftpad[{b}]", padding, 0, e.capacity, "the keys of a row of the cache")
        if e.table is not None:
            for i in range(padding // e.page_size, -(-(length + appended) // e.page_size)):
                _entry(f"block_table[{b}, {i}]", e.table[b][i], 0, e.pages - 1, "a page of k_cache")
            if appended:
                pages.write(b, e.table[b], length, length + appended)
        _check_rotation(e, b)
