"""Attention of new queries to a key/value cache, with the append in the same call.

Needs no framework: tensors and arrays are handled by ``_kvcache_torch`` and ``_kvcache_numpy``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from . import _check
from ._request import Request

# The short way of tensors (_plain.indexed), there once PyTorch has been needed.
_indexed: Callable[..., Any] | None = None


def _backend(q: Any) -> ModuleType:
    """The module for this kind of array."""
    if hasattr(q, "__torch_function__"):
        import tilewise._kvcache_torch  # as in api._backend

        return tilewise._kvcache_torch
    import tilewise._kvcache_numpy

    return tilewise._kvcache_numpy


class NewKeys(NamedTuple):
    """What is to be written to a cache before attention, and how it is rotated."""

    k: Any = None  # [B, Snew, Hkv, D], or [Tnew, Hkv, D] with cu_seqlens
    v: Any = None
    lengths: Any = None  # [B] int32: keys already in the cache
    rotary_cos: Any = None  # [positions, rotary_dim / 2]
    rotary_sin: Any = None
    rotary_interleaved: bool = True
    rotary_lengths: Any = None  # [B] int32: positions instead of lengths
    cu_seqlens: Any = None  # [B + 1] int32


class Where(NamedTuple):
    """Where the queries and keys of each sequence lie, unchecked."""

    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    block_table: Any = None
    num_splits: int = 0
    check: bool = False
    cu_seqlens_q: Any = None  # [B + 1]; q is [T, Hq, D]
    max_seqlen_q: int | None = None

    def most_rows(self) -> int:
        """The bound of queries of a sequence, or 0.

        Raises:
            ValueError: it is given for sequences that are equally long.
        """
        if self.max_seqlen_q is not None and self.cu_seqlens_q is None:
            raise ValueError("max_seqlen_q is given, but belongs to cu_seqlens_q, which is None")
        return _check.bound("max_seqlen_q", self.max_seqlen_q)


def common_length(cache_seqlens: Any) -> int:
    """A length that all sequences have."""
    allowed = "an integer, or a tensor or array [batch] of integers"
    length = _check.integer("cache_seqlens", cache_seqlens, allowed)
    _, most = _check.INT32
    if not 0 <= length <= most:
        raise ValueError(f"cache_seqlens is {length}, but must be from 0 to {most}")
    return length


def check_cache(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, batch_idx: Any, packed: int | None
) -> int:
    """Refuses shapes that attention would refuse only after the append has written to the caches.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] when packed.
        k_cache: As in ``attention_with_kvcache``.
        v_cache: Likewise.
        block_table: Likewise.
        batch_idx: cache_batch_idx, likewise.
        packed: The number of sequences, or None when q has a batch dimension.

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
    """Whether there are new keys; refuses what is given in part."""
    for first, second in (("k", "v"), ("rotary_cos", "rotary_sin")):
        given = [getattr(new, name) is not None for name in (first, second)]
        if given[0] != given[1]:
            missing = second if given[0] else first
            raise ValueError(f"{missing} is None, but {first} and {second} must be given together")
    if new.k is None and new.rotary_cos is not None:
        raise ValueError("rotary_cos is given without k, but rotates only q and new keys")
    for name, value, needed, there in (
        ("rotary_seqlens", new.rotary_lengths, "rotary_cos", new.rotary_cos),
        ("cu_seqlens_k_new", new.cu_seqlens, "k", new.k),
    ):
        if value is not None and there is None:
            raise ValueError(f"{name} is given, but belongs to {needed}, which is None")
    if new.k is not None and new.lengths is None:
        raise ValueError("cache_seqlens is None, but must say where k and v are written")
    return new.k is not None


def check_pages(xp: Any, table: Any, cache: Any, seqused: Any, leftpad: Any) -> None:
    """Refuses pages out of range among those in use, before the append writes to the others.

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
        return  # entries behind the end may hold anything
    b, i = divmod(int((bad.reshape(-1) * 1).argmax()), table.shape[1])
    raise ValueError(
        f"block_table[{b}, {i}] is {int(table[b, i])}, but must be from 0 and less than {pages}, "
        "the pages of k_cache"
    )


class Entries(NamedTuple):
    """The entries of index arrays, as lists on the host, and the sizes they are limited by."""

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
    starts: tuple[tuple[str, list[int], int], ...] = ()  # name, cu_seqlens, rows there are
    most_rows: int = 0  # max_seqlen_q, or 0
    rotary_rows: int | None = None  # None: nothing is rotated
    rotary_lengths: list[int] | None = None
    rotated_alike: bool = False  # all queries of a sequence


def _entry(name: str, value: int, low: int, high: int, what: str) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}, but must be from {low} to {high}: {what}")


class _Pages:
    """Which rows of which pages new keys go to: no row twice."""

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._written: dict[int, list[tuple[int, int, str]]] = {}  # by page: rows, entry

    def write(self, b: int, table: list[int], begin: int, end: int) -> None:
        """Keys [begin, end) of sequence b are new."""
        for i in range(begin // self._size, -(-end // self._size)):
            first, page = i * self._size, table[i]
            low, high = max(begin - first, 0), min(end - first, self._size)
            others = self._written.setdefault(page, [])
            for other_low, other_high, entry in others:
                if low < other_high and other_low < high:
                    raise ValueError(
                        f"block_table[{b}, {i}] is {page}, as {entry} is, but both are to hold a "
                        f"new key in row {max(low, other_low)} of that page: new keys must go to "
                        "rows of their own"
                    )
            others.append((low, high, f"block_table[{b}, {i}]"))


def check_starts(name: str, starts: list[int], total: int) -> None:
    """Refuses sequences that do not lie one behind the other within all rows."""
    _entry(f"{name}[0]", starts[0], 0, 0, "the first row")
    for b, end in enumerate(starts[1:]):
        what = f"{name}[{b}] is {starts[b]}, and there are {total} rows"
        _entry(f"{name}[{b + 1}]", end, starts[b], total, what)


def check_most_rows(most: int, longest: int) -> None:
    """max_seqlen_q, where it is given, is no less than what there is."""
    if 0 < most < longest:
        raise ValueError(
            f"max_seqlen_q is {most}, but a sequence has {longest} queries: at least as many are "
            "allowed"
        )


def _check_rotation(e: Entries, b: int) -> None:
    queries = min(e.rows[b], 1) if e.rotated_alike else e.rows[b]
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
    """Refuses entries by which keys lie outside the caches, or new ones upon each other."""
    for starts in e.starts:
        check_starts(*starts)
    check_most_rows(e.most_rows, max(e.rows, default=0))
    seen: dict[int, int] = {}
    pages = _Pages(e.page_size)
    for b, row in enumerate(e.batch_idx or ()):
        _entry(f"cache_batch_idx[{b}]", row, 0, e.cache_batch - 1, "a row of k_cache")
        if any(e.appended) and seen.setdefault(row, b) != b:
            raise ValueError(
                f"cache_batch_idx[{b}] is {row}, as that of sequence {seen[row]}, but new keys "
                "must go to rows of their own"
            )
    for b, (length, appended) in enumerate(zip(e.lengths, e.appended, strict=True)):
        room = f"with {appended} new keys, the cache holds {e.capacity}"
        _entry(f"cache_seqlens[{b}]", length, 0, e.capacity - appended, room)
        padding = e.leftpad[b] if e.leftpad else 0
        if any(e.appended):  # else a row that is nothing but padding has no keys
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
    """Appends new keys and values to a cache in place, then attends to all of it.

    For inference: no gradient flows through it. Nothing is written when an argument is refused.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] with cu_seqlens_q; fp32, fp16 or bf16: a torch.Tensor or a
            NumPy array, and all the others of that kind.
        k_cache, v_cache: [cache batch, capacity, Hkv, D] and [..., Dv]; with block_table
            [pages, page_size, Hkv, D] and [..., Dv], any page size. In q's dtype, or, for q of
            fp16 or bf16, torch.float8_e4m3fn (ml_dtypes' float8_e4m3fn).
        k, v: new keys [B, Snew, Hkv, D] and values [B, Snew, Hkv, Dv], written to
            ``cache_seqlens[b] .. cache_seqlens[b] + Snew - 1``; [Tnew, Hkv, ...] with
            cu_seqlens_k_new.
        cache_seqlens: int or [B]: keys already in the cache, left padding included. None (allowed
            without k): the caches are full.
        cache_batch_idx: [B] int: sequence b uses row ``cache_batch_idx[b]`` of the caches.
        cache_leftpad: [B] int: first key of each sequence; those before it are not seen.
        block_table: [B, pages of a sequence] int: page of each run of page_size keys. Sequences may
            share pages, but each new key goes to a row of its own.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in q's dtype; need k. Row r of k is
            rotated at ``cache_seqlens[b] + r``; so is row r of q if causal or a window is given,
            otherwise all of its rows are rotated at ``cache_seqlens[b]``.
        rotary_interleaved: pairs (2i, 2i + 1) (GPT-J), else (i, i + rotary_dim / 2) (GPT-NeoX).
        rotary_seqlens: [B] int: positions that rotation counts from, instead of cache_seqlens.
        cu_seqlens_q: [B + 1] int: sequence b has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. None: equally many.
        cu_seqlens_k_new: likewise of new keys; either may be given without the other.
        max_seqlen_q: upper bound of the queries of a sequence, when known; never required.
        causal, window, scale, softcap, alibi_slopes, sinks: as in ``tilewise.attention``; the last
            query is aligned with the last key.
        bias: as in ``tilewise.attention``, without a gradient, broadcastable to [B, Hq, Sq,
            capacity], capacity being that of a row of the caches or of block_table; key 0 is the
            first one behind cache_leftpad. With cu_seqlens_q at least as many rows as the longest
            sequence has, or 1.
        num_splits: key splits worked on at once; 0: chosen by shape. Changes rounding only.
        return_lse: also return lse.
        tf32: as in ``tilewise.attention``.
        check: also on a GPU, verify the entries of all index tensors before anything is written. It
            copies them to the host, so it waits for the GPU and can be neither captured nor
            traced. Without it, the rows of entries that do not fit become NaN there, and
            ``last_index_error`` names the entry. The CPU always verifies.
        batch_invariant: give each sequence's rows, to the bit, what they are without the other
            sequences of the batch; then num_splits is 0, and splits follow from the lengths of
            each sequence.
        k_descale, v_descale: fp32 [B, Hkv], either may be 1: what the values of a float8_e4m3fn
            cache are multiplied by. New keys and values are divided by them, rounded to nearest
            even and held within +-448. None is 1.

    Returns:
        out [B, Sq, Hq, Dv], or (out, lse [B, Hq, Sq] fp32); with cu_seqlens_q out [T, Hq, Dv] and
        lse [Hq, T].

    Raises:
        ValueError, TypeError, RuntimeError: naming the argument, what was given, what is allowed.
    """
    backend = _backend(q)  # sets _indexed, as in api.attention
    if (
        _indexed is not None and k is None and v is None and rotary_cos is None
        and rotary_sin is None and rotary_seqlens is None and cu_seqlens_q is None
        and cu_seqlens_k_new is None and max_seqlen_q is None and bias is None
        and alibi_slopes is None and sinks is None and k_descale is None and v_descale is None
        and not check
    ):  # fmt: skip
        short = _indexed(
            q, k_cache, v_cache, None, None, None, cache_seqlens, block_table, cache_batch_idx,
            cache_leftpad, causal, window, scale, softcap, 0, 0, num_splits, False, tf32,
            batch_invariant,
        )  # fmt: skip
        if short is not None:
            return short if return_lse else short[0]
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
