"""Attention to a key/value cache on NumPy arrays: append and attention through the C ABI."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any, ClassVar, NamedTuple

from ._requirements import require

require("tilewise on arrays", "numpy")

import numpy as np

from . import _abi, _check, _describe, _latent, _mask_tree, _numpy, _selected
from ._cache import (
    CacheLayout,
    Entries,
    NewKeys,
    check_cache,
    check_entries,
    check_max_rows,
    check_new,
    check_pages,
    check_rotary_columns,
    check_starts,
    common_length,
    in_python,
)
from ._library import c_library
from ._numpy import Array
from ._request import Request


class KvAppend(ctypes.Structure):
    """``tilewise_kv_append`` of the C ABI; a test compares it with append.h."""

    _fields_: ClassVar[_abi._Fields] = [
        ("struct_size", c_uint32),
        ("device", c_int32),
        ("device_index", c_int32),
        ("dtype", c_int32),
        ("stream", c_void_p),
        *((name, c_int64) for name in ("batch", "seqlen_q", "seqlen_new", "seqlen_k")),
        *((name, c_int64) for name in ("heads_q", "heads_kv", "head_dim", "head_dim_v")),
        *((name, _abi.Tensor) for name in ("q", "q_out", "k_new", "v_new", "k_cache", "v_cache")),
        *((name, c_void_p) for name in ("cache_seqlens", "cu_seqlens_q", "cu_seqlens_new")),
        ("rotary_seqlens", c_void_p),
        ("block_table", c_void_p),
        *((name, c_int64) for name in ("block_table_stride", "block_table_width")),
        *((name, c_int64) for name in ("page_size", "pages")),
        ("kv_batch_idx", c_void_p),
        ("kv_batch", c_int64),
        ("leftpad_k", c_void_p),
        ("rotary_cos", c_void_p),
        ("rotary_sin", c_void_p),
        ("rotary_rows", c_int64),
        ("rotary_dim", c_int64),
        ("rotary_interleaved", c_int32),
        ("q_single_position", c_int32),
        ("parallel", c_void_p),
        ("kv_float8", c_int32),
        ("check", c_int32),
        *((name, c_void_p) for name in ("k_descale", "v_descale")),
        *((name, c_int64) for name in ("k_descale_stride_batch", "k_descale_stride_head")),
        *((name, c_int64) for name in ("v_descale_stride_batch", "v_descale_stride_head")),
    ]


def _shares_memory(array: Array, value: Any) -> bool:
    """Whether converting the value again gives a view of the same memory, not a copy."""
    return array.size == 0 or np.shares_memory(array, _numpy.as_array("cache", value))


def _cache(name: str, value: Any, writes: bool) -> Array:
    """The cache as a view of the caller's memory, because a copy would lose what is appended."""
    array = _numpy.as_array(name, value)
    _check.shape(name, array, (None,) * 4, "[batch or pages, rows, heads_kv, head_dim]")
    if writes and not isinstance(value, np.ndarray) and not _shares_memory(array, value):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which NumPy copies, but k and v must be written "
            "to it: only a NumPy array, or an object whose memory NumPy can view, is allowed"
        )
    # NumPy gives an empty array strides of 0.
    if array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError(
            f"{name} has stride {array.strides[-1]} bytes in its last dimension, but must be "
            "contiguous there"
        )
    if array.size and any(step % array.itemsize for step in array.strides):
        raise ValueError(
            f"{name} has strides of {list(array.strides)} bytes, but each must be a multiple of "
            f"{array.itemsize}, the bytes of an element"
        )
    if writes and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but k and v must be written to it")
    return array


def _indices(name: str, value: Any, dims: tuple[int | None, ...]) -> Array | None:
    if value is None:
        return None
    array = _numpy.as_array(name, value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, but must be an integer type")
    _check.shape(name, array, dims, "see tilewise.attention_with_kvcache")
    low, high = _check.INT32
    # Clamping keeps out-of-range entries out of range. NumPy does not compare unsigned arrays with
    # a negative bound.
    clamped = np.clip(array, None if array.dtype.kind == "u" else low, high)
    return np.ascontiguousarray(clamped, dtype=np.int32)


def _lengths(value: Any, batch: int) -> Array | None:
    if value is None or getattr(value, "ndim", 0) > 0:
        return _indices("cache_seqlens", value, (batch,))
    return np.full(batch, common_length(value), dtype=np.int32)


def _new_rows(name: str, value: Any, like: Array, dims: tuple[int | None, ...]) -> Array:
    array = _numpy.as_array(name, value)
    _check.new_row_dtype(name, array.dtype, like.dtype)
    _check.shape(name, array, dims, "see tilewise.attention_with_kvcache")
    return _numpy._columns(array)


_MASK_ARRAYS = ("mask_first", "mask_entries", "mask_bits")


class _Arrays(NamedTuple):
    """A checked problem without its new keys; ``seqused_k`` counts the keys before them."""

    q: Array
    k_cache: Array
    v_cache: Array
    batch: int
    arrays: dict[str, Array]  # by their names in the C struct

    def problem(self, request: Request, layout: CacheLayout) -> _numpy._Problem:
        splits = _check.split_count(layout.num_splits, request.batch_invariant)
        numbers = {"num_splits": splits, "max_seqlen_q": layout.max_rows()}
        arrays = self.arrays
        if request.mask is not None:
            of_mask, sizes = self._mask(request.mask)
            arrays, numbers = arrays | of_mask, numbers | sizes
            request = request._replace(mask=None)
        return _numpy._describe_problem(
            self.q, self.k_cache, self.v_cache, self.batch, request, arrays, numbers, False
        )

    def _mask(self, mask: Any) -> tuple[dict[str, Array], dict[str, int]]:
        """The arrays of a mask and its numbers; ``seqused_k`` counts the new keys."""
        from . import masks

        starts, capacity = self.arrays.get("cu_seqlens_q"), self.capacity()
        rows = self.q.shape[1] if starts is None else None
        if not isinstance(mask, masks.Tree):
            lengths = None if rows is None else (rows, capacity)
            return _numpy._mask(mask, self.batch, self.q.shape[-2], lengths), mask.numbers()
        counts = None if starts is None else np.diff(starts)
        longest = rows if counts is None else int(counts.max(initial=0))
        _mask_tree.check(mask, self.batch, longest, counts is not None)
        used = self.arrays.get("seqused_k", np.full(self.batch, capacity))
        older = used - self.arrays.get("leftpad_k", 0)
        older = older - (self.q.shape[1] if counts is None else counts)
        bits = _numpy.as_array("the array of mask", mask.bits)
        arrays, numbers = _mask_tree.as_blocks(np, bits, older, capacity)
        return dict(zip(_MASK_ARRAYS, arrays, strict=True)), numbers

    def capacity(self) -> int:
        """The keys that a row of the caches, or of block_table, has room for."""
        table = self.arrays.get("block_table")
        return int(self.k_cache.shape[1]) * (1 if table is None else table.shape[1])

    def check_entries(self, mask: Any) -> None:
        """Refuses entries of a mask that are out of range: a call without rows and keys."""
        empty = np.empty((self.batch, 0, self.q.shape[-2], 1), self.q.dtype)
        arrays, numbers = self._mask(mask)
        _numpy._forward(
            _numpy._describe_problem(
                empty, empty, empty, self.batch, Request(), arrays, numbers, False
            )
        )


def prepare(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, request: Request, layout: CacheLayout
) -> _numpy._Problem:
    """The problem that ``attention_with_kvcache`` runs once new keys are in the cache."""
    given = _check_arrays(q, k_cache, v_cache, lengths, request.bias, layout, False)
    return (
        given.problem(request, layout)
        if layout.indices is None
        else _select(given, request, layout)
    )


def _check_arrays(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, bias: Any, layout: CacheLayout, writes: bool
) -> _Arrays:
    k_cache = _cache("k_cache", k_cache, writes)
    v_cache = _latent.values_of(k_cache, v_cache, layout.head_dim_v)
    v_cache = _cache("v_cache", v_cache, writes)
    q, _, _ = _numpy._check_arrays(q, k_cache, v_cache)
    table = _indices("block_table", layout.block_table, (None, None))
    starts = _indices("cu_seqlens_q", layout.cu_seqlens_q, (None,))
    if starts is not None and len(starts) < 1:
        raise ValueError("cu_seqlens_q is empty, but must be [batch + 1]")
    packed = None if starts is None else len(starts) - 1
    pool = layout.indices is not None and not writes
    batch = check_cache(q, k_cache, v_cache, table, layout.cache_batch_idx, packed, pool)
    if starts is not None:
        # The library checks them as well, but only after an append has written to the caches.
        check_starts("cu_seqlens_q", starts.tolist(), len(q))
        check_max_rows(layout.max_rows(), int(np.diff(starts).max(initial=0)))
    arrays: dict[str, Array] = {}
    for name, given, value, dims in (
        ("kv_batch_idx", "cache_batch_idx", layout.cache_batch_idx, (batch,)),
        ("leftpad_k", "cache_leftpad", layout.cache_leftpad, (batch,)),
        ("block_table", "block_table", table, (batch, None)),
        ("cu_seqlens_q", "cu_seqlens_q", starts, (batch + 1,)),
    ):
        array = _indices(given, value, dims)
        if array is not None:
            arrays[name] = array
    seqused = _lengths(lengths, batch)
    if seqused is not None:
        arrays["seqused_k"] = seqused
    if bias is not None:
        arrays["bias"] = _bias(bias, q, k_cache, batch, arrays)
    return _Arrays(q, k_cache, v_cache, batch, arrays)


def _bias(value: Any, q: Array, k_cache: Array, batch: int, arrays: dict[str, Array]) -> Array:
    """The bias with four dimensions, and one column for each key that the cache has room for."""
    bias = _numpy.as_array("bias", value)
    packed = "cu_seqlens_q" in arrays
    table = arrays.get("block_table")
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    _check.bias(bias, batch, q.shape[-2], None if packed else q.shape[1], capacity)
    bias = _numpy._four_dimensions(bias, capacity)
    if packed:
        _check.varlen_bias(bias.shape, _numpy._longest(arrays, "q"), capacity)
    return bias


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, new: tuple[Any, ...], layout: tuple[Any, ...],
    given: tuple[Any, ...],
) -> tuple[Array, ...]:  # fmt: skip
    """(out, lse) and, if requested, max_logits; see ``tilewise.attention_with_kvcache``. The tuples
    have the fields of ``NewKeys``, ``CacheLayout`` and ``Request``.
    """
    return _attend(q, k_cache, v_cache, NewKeys(*new), Request(*given), CacheLayout(*layout))


def _attend(
    q: Any, k_cache: Any, v_cache: Any, new: NewKeys, request: Request, layout: CacheLayout
) -> tuple[Array, ...]:
    appends, columns = check_new(new), layout.head_dim_v or 0
    _selected.check_options(layout, new, request)
    given = _check_arrays(q, k_cache, v_cache, new.lengths, request.bias, layout, appends)
    q, k_cache, v_cache, batch, arrays = given
    lengths, rotated = arrays.get("seqused_k"), q
    q_to_rotate = q  # in a latent cache, the columns of q after those of the values
    if appends:
        if columns > 0:
            k = _numpy.as_array("k", new.k)
            (q_to_rotate, k_cache, v_cache), new = _latent.split_append(q, k_cache, new, k, columns)
        new = _check_new_rows(new, q, k_cache, v_cache, batch)._replace(lengths=lengths)
        count = np.int32(new.k.shape[1]) if new.cu_seqlens is None else np.diff(new.cu_seqlens)
        arrays["seqused_k"] = np.asarray(lengths) + count
        if "block_table" in arrays:
            pad = arrays.get("leftpad_k")
            check_pages(np, arrays["block_table"], k_cache, arrays["seqused_k"], pad)
        rotated = q.copy() if new.rotary_cos is not None else q
    given = given._replace(q=rotated)
    selects = layout.indices is not None
    problem = given.problem(request, layout)
    attended = _select(given, request, layout) if selects else problem
    max_logits = _numpy.new_max_logits(attended.attention, request)
    _check.flag("check", layout.check)
    try:
        # Planning checks the arguments, so it comes before the append writes anything.
        if appends and selects:
            _plan(problem)
        _plan(attended)
        if appends and request.mask is not None:
            given.check_entries(request.mask)
        if appends:
            written = (q_to_rotate, rotated[..., columns:], k_cache, v_cache)
            _append(written, new, arrays, problem.attention)
        out, lse = _numpy._forward(attended)
        results = (out, lse) if max_logits is None else (out, lse, max_logits)
        return _results_like(given, *results) if selects else results
    except ValueError as error:
        _raise_entry_error(problem.attention, lengths, arrays, new)
        raise ValueError(in_python(str(error))) from None


def _plan(problem: _numpy._Problem) -> None:
    q, out = problem.q, problem.new_out()
    lse = np.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.float32)
    _describe.set_output(problem.attention, _numpy.view(out), _numpy.view(lse))
    _describe.plan(c_library(), problem.attention, None)


def _select(given: _Arrays, request: Request, layout: CacheLayout) -> _numpy._Problem:
    """The problem of rows of q that see only the keys that ``layout.indices`` selects."""
    lead = given.q.shape[:-2]
    indices = np.asarray(_indices("indices", layout.indices, (*lead, None)))
    rows = math.prod(lead)
    owners = _owners(given)
    unused = (owners == given.batch)[:, None]
    owners = owners.clip(max=given.batch - 1)
    k = _selected.single_rows("k_cache", given.k_cache)
    v = _selected.single_rows("v_cache", given.v_cache)

    def per_row(name: str) -> Any:
        if getattr(request, name) is None:
            return None
        factors = _numpy._float32(name, getattr(request, name))
        scaled = given.q if name == "q_descale" else k
        _check.descale(name, factors, _check.is_float8(scaled.dtype), given.batch, k.shape[2])
        return np.broadcast_to(factors, (given.batch, k.shape[2]))[owners]

    flat = indices.reshape(rows, indices.shape[-1])
    table, keys = _selected.tables(np, np.take_along_axis, flat, len(k), unused)
    arrays = {"block_table": np.ascontiguousarray(table), "seqused_k": keys.astype(np.int32)}
    q = given.q.reshape(rows, 1, *given.q.shape[-2:])
    request = request._replace(**{name: per_row(name) for name in _check.DESCALES})
    layout = layout._replace(cu_seqlens_q=None, max_seqlen_q=None)
    return _Arrays(q, k, v, rows, arrays).problem(request, layout)


def _results_like(given: _Arrays, out: Array, lse: Array, *max_logits: Array) -> tuple[Array, ...]:
    """The results of sequences of one row for the given q.

    They are out [rows, 1, H, Dv], lse [rows, H, 1] and, if requested, max_logits [rows, H].
    """
    lead, heads = given.q.shape[:-2], given.q.shape[-2]
    out = out.reshape(*lead, heads, out.shape[-1])
    lse = np.ascontiguousarray(lse.reshape(*lead, heads).swapaxes(-1, -2))
    return out, lse, *(_largest_of_sequences(x, given) for x in max_logits)


def _largest_of_sequences(of_rows: Array, given: _Arrays) -> Array:
    """The largest entries [B, H] of each sequence, from those of each row [rows, H]."""
    result = np.full((given.batch + 1, of_rows.shape[1]), -np.inf, np.float32)
    np.maximum.at(result, _owners(given), of_rows)
    return result[:-1]


def _owners(given: _Arrays) -> Array:
    """The sequence [rows] of each row of q; that of rows of no sequence is the number of them."""
    starts, lead = given.arrays.get("cu_seqlens_q"), given.q.shape[:-2]
    if starts is None:
        return np.arange(lead[0]).repeat(lead[1])
    return np.searchsorted(starts, np.arange(lead[0]), side="right") - 1


def _raise_entry_error(
    a: Any, lengths: Array | None, arrays: dict[str, Array], new: NewKeys
) -> None:
    """Raises the error of the first bad entry, if any, in terms of the caller's arguments.

    The library's own sentence is about lengths after the append; the caller gave those before it.
    """
    table, starts = arrays.get("block_table"), arrays.get("cu_seqlens_q")
    capacity = a.seqlen_k if table is None else a.block_table_width * a.page_size
    packed = [] if starts is None else [("cu_seqlens_q", starts.tolist(), a.seqlen_q)]
    if new.cu_seqlens is not None:
        packed.append(("cu_seqlens_k_new", new.cu_seqlens.tolist(), len(new.k)))

    def numbers(name: str) -> Any:
        return arrays[name].tolist() if name in arrays else None

    def rows(starts: Array | None, uniform: int) -> list[int]:
        return [uniform] * a.batch if starts is None else np.diff(starts).tolist()

    entries = Entries(
        lengths=[capacity] * a.batch if lengths is None else lengths.tolist(),
        rows=rows(starts, a.seqlen_q),
        appended=rows(new.cu_seqlens, 0 if new.k is None else new.k.shape[1]),
        capacity=capacity,
        leftpad=numbers("leftpad_k"),
        batch_idx=numbers("kv_batch_idx"),
        cache_batch=a.kv_batch or a.batch,
        table=numbers("block_table"),
        pages=a.pages,
        page_size=a.page_size,
        starts=tuple(packed),
        max_rows=a.max_seqlen_q,
        rotary_rows=None if new.rotary_cos is None else len(new.rotary_cos),
        rotary_lengths=None if new.rotary_lengths is None else new.rotary_lengths.tolist(),
        single_position=a.window_left < 0 and a.window_right < 0,
    )
    try:
        check_entries(entries)
    except ValueError as error:
        raise error from None


def _check_new_rows(new: NewKeys, q: Array, k_cache: Array, v_cache: Array, batch: int) -> NewKeys:
    starts = _indices("cu_seqlens_k_new", new.cu_seqlens, (batch + 1,))
    rows: tuple[int | None, ...] = (batch, None) if starts is None else (None,)
    k = _new_rows("k", new.k, q, (*rows, *k_cache.shape[2:]))
    v = _new_rows("v", new.v, q, (*k.shape[:-2], *v_cache.shape[2:]))
    if v.dtype != k.dtype:
        raise TypeError(f"v has dtype {v.dtype}, but must have {k.dtype} like k")
    positions = _indices("rotary_seqlens", new.rotary_lengths, (batch,))
    return new._replace(k=k, v=v, cu_seqlens=starts, rotary_lengths=positions)


def _append(
    written: tuple[Array, Array, Array, Array],
    new: NewKeys,
    arrays: dict[str, Array],
    attention: Any,
) -> None:
    q, rotated, k_cache, v_cache = written
    library = c_library()
    library.tilewise_append_kv.restype = c_int32
    a = _abi.sized(KvAppend)
    a.dtype = _abi.DTYPES[str(new.k.dtype)]
    for name in ("device", "device_index", "batch", "seqlen_q", "seqlen_k", "heads_q",
                 "heads_kv", "cu_seqlens_q", "block_table", "block_table_stride",
                 "block_table_width", "page_size", "pages", "kv_batch_idx", "kv_batch",
                 "leftpad_k"):  # fmt: skip
        setattr(a, name, getattr(attention, name))
    a.head_dim, a.head_dim_v = k_cache.shape[-1], v_cache.shape[-1]
    a.seqlen_new = new.k.shape[-3]
    tensors = {"k_new": new.k, "v_new": new.v, "k_cache": k_cache, "v_cache": v_cache}
    keep_alive = [new.lengths]  # the struct holds only addresses
    if new.rotary_cos is not None:
        tensors |= {"q": q, "q_out": rotated}
        cos = _new_rows("rotary_cos", new.rotary_cos, q, (None, None))
        check_rotary_columns(cos, k_cache.shape[-1])
        sin = _new_rows("rotary_sin", new.rotary_sin, q, cos.shape)
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
        keep_alive += [cos, sin]
        a.rotary_cos, a.rotary_sin = cos.ctypes.data, sin.ctypes.data
        a.rotary_rows, a.rotary_dim = cos.shape[0], 2 * cos.shape[1]
        a.rotary_interleaved = int(new.rotary_interleaved)
        a.q_single_position = int(attention.window_left < 0 and attention.window_right < 0)
        if new.rotary_lengths is not None:
            a.rotary_seqlens = new.rotary_lengths.ctypes.data
        elif "leftpad_k" in arrays:  # positions count from the start of the cache row
            a.rotary_seqlens = new.lengths.ctypes.data
    a.kv_float8 = attention.kv_float8
    for name in ("k_descale", "v_descale"):
        if name in arrays:
            _describe.set_descale(a, **{name: _numpy.view(arrays[name])})
    a.cache_seqlens = new.lengths.ctypes.data
    if new.cu_seqlens is not None:
        a.cu_seqlens_new = new.cu_seqlens.ctypes.data
    for name, array in tensors.items():
        setattr(a, name, _describe.rows(_numpy.view(array), array.ndim == 3))
    _abi.check(library, library.tilewise_append_kv(ctypes.byref(a)))
    del keep_alive
