"""Attention of new queries to a key/value cache, with the append in the same call.

This module needs no framework: ``_kvcache_torch`` handles tensors, ``_kvcache_numpy`` arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from . import _check
from ._request import Request

# The fast path of tensors (_plain.indexed), which _kvcache_torch sets on its import.
_indexed: Callable[..., Any] | None = None


def _backend(q: Any) -> ModuleType:
    """The module for this kind of array."""
    if hasattr(q, "__torch_function__"):
        import tilewise._kvcache_torch  # as in api._backend

        return tilewise._kvcache_torch
    import tilewise._kvcache_numpy

    return tilewise._kvcache_numpy


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


class Where(NamedTuple):
    """The arguments that say where the queries and keys of each sequence lie, unchecked."""

    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None
    num_splits: int = 0
    check: bool = False
    cu_seqlens_q: Any = None  # [B + 1]; q is [T, Hq, D]
    max_seqlen_q: int | None = None

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
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, batch_idx: Any, packed: int | None
) -> int:
    """Refuses shapes that attention would refuse only after the append has written to the caches.

    k_cache, v_cache, block_table and batch_idx are those of ``attention_with_kvcache``.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] if packed.
        packed: The number of sequences, or None if q has a batch dimension.

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
    _check.head_sizes(q.shape[-2], k_cache.shape[2], head_dim, v_cache.shape[3])
    batch = q.shape[0] if packed is None else packed
    if block_table is not None and batch_idx is not None:
        raise ValueError(
            "cache_batch_idx and block_table are both given, but block_table says where the keys "
            "of each sequence lie: only one of them is allowed"
        )
    if block_table is not None:
        _check.shape("block_table", block_table, (batch, None), "[batch, pages of a sequence]")
    elif batch_idx is None and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache has batch size {k_cache.shape[0]}, but must have {batch} like q without "
            "cache_batch_idx"
        )
    return batch


def check_new(new: NewKeys) -> bool:
    """Whether there are new keys; refuses arguments whose counterpart is missing."""
    for first, second in (("k", "v"), ("rotary_cos", "rotary_sin")):
        given = [getattr(new, name) is not None for name in (first, second)]
        if given[0] != given[1]:
            missing = second if given[0] else first
            raise ValueError(f"{missing} is None, but {first} and {second} must be given together")
    if new.k is None and new.rotary_cos is not None:
        raise ValueError("rotary_cos is given without k, but rotates only q and new keys")
    for name, value, needed, given_needed in (
        ("rotary_seqlens", new.rotary_lengths, "rotary_cos", new.rotary_cos),
        ("cu_seqlens_k_new", new.cu_seqlens, "k", new.k),
    ):
        if value is not None and given_needed is None:
            raise ValueError(f"{name} is given, but belongs to {needed}, which is None")
    if new.k is not None and new.lengths is None:
        raise ValueError("cache_seqlens is None, but must say where k and v are written to")
    return new.k is not None


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
        f"block_table[{b}, {i}] is {int(table[b, i])}, but must be from 0 and less than {pages}, "
        "the pages of k_cache"
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
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, but must be from {low} to {high}: {what}")


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


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, *,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    rotary_interleaved: bool = True, rotary_seqlens: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None, causal: bool = False,
    window: _check.Window = (None, None), scale: Any = None, softcap: float = 0.0,
    bias: Any = None, alibi_slopes: Any = None, sinks: Any = None, num_splits: int = 0,
    return_lse: bool = False, tf32: bool = False, check: bool = False,
    batch_invariant: bool = False, k_descale: Any = None, v_descale: Any = None,
) -> Any:  # fmt: skip
    """Appends new keys and values to a cache in place, then attends to all keys in the cache.

    The function is for inference: it has no gradient. If an argument is refused, nothing is
    written. causal, window, scale, softcap, alibi_slopes, sinks, return_lse and tf32 are those of
    ``attention``; the last query is aligned with the last key. B is the batch, S the rows of a
    sequence, T those of all sequences, H the heads and D the head dimension.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] with cu_seqlens_q; float32, float16 or bfloat16. It is a
            torch.Tensor or a NumPy array, and all other arguments are of the same kind.
        k_cache, v_cache: [cache batch, capacity, Hkv, D] and [..., Dv]; with block_table
            [pages, page_size, Hkv, D] and [..., Dv], for any page size. The dtype is that of q, or,
            for q of float16 or bfloat16, torch.float8_e4m3fn (for arrays that of ml_dtypes).
        k, v: New keys [B, Snew, Hkv, D] and values [B, Snew, Hkv, Dv] in the dtype of q, written to
            ``cache_seqlens[b] .. cache_seqlens[b] + Snew - 1``; [Tnew, Hkv, ...] with
            cu_seqlens_k_new.
        cache_seqlens: int or integer [B]: keys already in the cache, including left padding. None
            (allowed without k) means that the caches are full.
        cache_batch_idx: integer [B]: sequence b uses row ``cache_batch_idx[b]`` of the caches.
        cache_leftpad: integer [B]: first key of each sequence; keys before it are not seen.
        block_table: integer [B, width]: entry [b, i] is the page of the keys i * page_size to
            (i + 1) * page_size - 1 of sequence b. Sequences may share pages, but each new key goes
            to a row of its own.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in the dtype of q, allowed only with k
            (rotary embedding, arXiv 2104.09864). Row r of k is rotated at position
            ``cache_seqlens[b] + r``. So is row r of q if causal or a window is given; otherwise all
            its rows are rotated at ``cache_seqlens[b]``.
        rotary_interleaved: Rotate pairs (2i, 2i + 1) as GPT-J does; otherwise pairs
            (i, i + rotary_dim / 2) as GPT-NeoX does.
        rotary_seqlens: integer [B]: positions to count rotations from, instead of cache_seqlens.
        cu_seqlens_q: integer [B + 1]: sequence b has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. None means that all sequences have equally many.
        cu_seqlens_k_new: The same for new keys; either may be given without the other.
        max_seqlen_q: Upper bound of the queries of a sequence, if known; never required.
        bias: As in ``attention``, but without a gradient; broadcastable to [B, Hq, Sq, capacity],
            with the capacity of a row of the caches or of block_table. Key 0 is the first key after
            the left padding. With cu_seqlens_q it needs as many rows as the longest sequence has,
            or 1.
        num_splits: Number of key splits that are computed in parallel; 0 chooses it by shape. It
            changes only the rounding.
        check: On a GPU, verify the entries of all index tensors before anything is written. It
            copies them to the host, so it waits for the GPU and can be neither captured nor traced.
            Without it, sequences whose entries are out of range get rows of NaN on a GPU,
            and ``last_index_error`` names the entry. The CPU always verifies.
        batch_invariant: Compute each sequence's rows bitwise as they are without the other
            sequences of the batch. num_splits must then be 0; splits follow from the length of each
            sequence.
        k_descale, v_descale: float32 [B or 1, Hkv or 1]: factors of the stored values of a
            float8_e4m3fn cache. New keys and values are divided by them, rounded to nearest even
            and clamped to +-448. None is 1.

    Returns:
        out [B, Sq, Hq, Dv] in the dtype of q, or (out, lse) with lse float32 [B, Hq, Sq]; with
        cu_seqlens_q out is [T, Hq, Dv] and lse [Hq, T].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or an entry out of range.
        RuntimeError: no kernel of this build can run the problem on this device.
    """
    backend = _backend(q)  # sets _indexed; must run first, as in api.attention
    if (
        _indexed is not None and k is None and v is None and rotary_cos is None
        and rotary_sin is None and rotary_seqlens is None and cu_seqlens_q is None
        and cu_seqlens_k_new is None and max_seqlen_q is None and bias is None
        and alibi_slopes is None and sinks is None and k_descale is None and v_descale is None
        and not check
    ):  # fmt: skip
        results = _indexed(
            q, k_cache, v_cache, None, None, None, cache_seqlens, block_table, cache_batch_idx,
            cache_leftpad, causal, window, scale, softcap, 0, 0, num_splits, False, tf32,
            batch_invariant,
        )  # fmt: skip
        if results is not None:
            return results if return_lse else results[0]
    new = NewKeys(
        k, v, cache_seqlens, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
        cu_seqlens_k_new,
    )  # fmt: skip
    request = Request(
        causal=causal,
        window=window,
        scale=scale,
        softcap=softcap,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        tf32=tf32,
        batch_invariant=batch_invariant,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    where = Where(
        cache_batch_idx, cache_leftpad, block_table, num_splits, check, cu_seqlens_q, max_seqlen_q
    )
    results = backend.attention_with_kvcache(q, k_cache, v_cache, new, request, where)
    return results if return_lse else results[0]
