"""Attention to a key/value cache on NumPy arrays: append through the C ABI, then attend."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_uint32, c_void_p
from typing import Any, ClassVar, NamedTuple

import numpy as np

from . import _abi, _check, _describe, _numpy
from ._library import c_library
from ._numpy import Array
from ._request import Request
from .kvcache import (
    Entries,
    NewKeys,
    Where,
    check_cache,
    check_entries,
    check_new,
    check_pages,
    common_length,
)


class KvAppend(ctypes.Structure):
    """``tilewise_kv_append`` of the C ABI; a test compares it with the header."""

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


def _cache(name: str, value: Any, writes: bool) -> Array:
    """A cache is used where it is: a copy would lose what is appended."""
    array = _numpy.as_array(name, value)
    if array.ndim and array.shape[-1] > 1 and array.strides[-1] != array.itemsize:
        raise ValueError(
            f"{name} has stride {array.strides[-1]} bytes in its last dimension, but must be "
            "contiguous there"
        )
    if writes and not array.flags.writeable:
        raise ValueError(f"{name} is read-only, but k and v are to be written to it")
    return array


def _indices(name: str, value: Any, dims: tuple[int | None, ...]) -> Array | None:
    if value is None:
        return None
    array = _numpy.as_array(name, value)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}, but must be an integer type")
    _check.shape(name, array, dims, "see tilewise.attention_with_kvcache")
    least, most = _check.INT32
    # Numbers out of range stay so. (Unsigned arrays have no least one to compare with.)
    held = np.clip(array, None if array.dtype.kind == "u" else least, most)
    return np.ascontiguousarray(held, dtype=np.int32)


def _lengths(value: Any, batch: int) -> Array | None:
    if value is None or getattr(value, "ndim", 0) > 0:
        return _indices("cache_seqlens", value, (batch,))
    return np.full(batch, common_length(value), dtype=np.int32)


def _new_rows(name: str, value: Any, like: Array, dims: tuple[int | None, ...]) -> Array:
    array = _numpy.as_array(name, value)
    if array.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {array.dtype}, but must have {like.dtype} like q")
    _check.shape(name, array, dims, "see tilewise.attention_with_kvcache")
    return _numpy._columns(array)


class _Arrays(NamedTuple):
    """A problem but for its new keys, with ``seqused_k`` being those before them."""

    q: Array
    k_cache: Array
    v_cache: Array
    indices: dict[str, Array]  # by their names in the C struct

    def problem(self, request: Request, where: Where) -> _numpy._Problem:
        splits = {"num_splits": _check.split_count(where.num_splits)}
        return _numpy._describe_problem(
            self.q, self.k_cache, self.v_cache, len(self.q), request, self.indices, splits, False
        )


def prepare(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, request: Request, where: Where
) -> _numpy._Problem:
    """What ``attention_with_kvcache`` asks of the library once new keys are in the cache."""
    return _check_arrays(q, k_cache, v_cache, lengths, where, False).problem(request, where)


def _check_arrays(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, where: Where, writes: bool
) -> _Arrays:
    k_cache = _cache("k_cache", k_cache, writes)
    v_cache = _cache("v_cache", v_cache, writes)
    q, _, _ = _numpy._check_arrays(q, k_cache, v_cache)
    table, index = where.block_table, where.cache_batch_idx
    batch = check_cache(q, k_cache, v_cache, table, index, packed=None)
    indices: dict[str, Array] = {}
    for name, given, value, dims in (
        ("kv_batch_idx", "cache_batch_idx", where.cache_batch_idx, (batch,)),
        ("leftpad_k", "cache_leftpad", where.cache_leftpad, (batch,)),
        ("block_table", "block_table", where.block_table, (batch, None)),
    ):
        array = _indices(given, value, dims)
        if array is not None:
            indices[name] = array
    seqused = _lengths(lengths, batch)
    if seqused is not None:
        indices["seqused_k"] = seqused
    return _Arrays(q, k_cache, v_cache, indices)


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, new: NewKeys, request: Request, where: Where
) -> tuple[Array, Array]:
    """(out, lse); see ``tilewise.attention_with_kvcache``."""
    appends = check_new(new)
    given = _check_arrays(q, k_cache, v_cache, new.lengths, where, appends)
    q, k_cache, v_cache, arrays = given
    batch, lengths = len(q), arrays.get("seqused_k")
    rotated = q
    if appends:
        heads_kv, head_dim = k_cache.shape[2:]
        k = _new_rows("k", new.k, q, (batch, None, heads_kv, head_dim))
        v = _new_rows("v", new.v, q, (batch, k.shape[1], heads_kv, v_cache.shape[3]))
        new = new._replace(k=k, v=v, lengths=lengths)
        arrays["seqused_k"] = np.asarray(lengths) + np.int32(k.shape[1])
        if "block_table" in arrays:
            pad = arrays.get("leftpad_k")
            check_pages(np, arrays["block_table"], k_cache, arrays["seqused_k"], pad)
        rotated = np.empty(q.shape, q.dtype) if new.rotary_cos is not None else q
    problem = given._replace(q=rotated).problem(request, where)
    _check.flag("check", where.check)
    # Planned, and so checked, before the append writes anything.
    out = np.empty((*q.shape[:3], v_cache.shape[3]), q.dtype)
    lse = np.empty((batch, q.shape[2], q.shape[1]), np.float32)
    _describe.set_output(problem.attention, _numpy.view(out), _numpy.view(lse))
    _describe.plan(c_library(), problem.attention, None)
    try:
        if appends:
            _append(q, rotated, k_cache, v_cache, new, arrays, problem.attention)
        return _numpy._forward(problem)
    except ValueError:
        _refuse_by_our_names(problem.attention, lengths, arrays, new)
        raise


def _refuse_by_our_names(
    a: Any, lengths: Array | None, arrays: dict[str, Array], new: NewKeys
) -> None:
    """The library's sentence about an entry has the names of the C interface."""
    table = arrays.get("block_table")
    count = 0 if new.k is None else new.k.shape[1]
    capacity = a.seqlen_k if table is None else a.block_table_width * a.page_size
    rotated = 0
    if new.rotary_cos is not None:
        all_alike = a.window_left < 0 and a.window_right < 0
        rotated = max(count, min(a.seqlen_q, 1) if all_alike else a.seqlen_q)

    def numbers(name: str) -> Any:
        return arrays[name].tolist() if name in arrays else None

    entries = Entries(
        lengths=[capacity] * a.batch if lengths is None else lengths.tolist(),
        appended=count,
        capacity=capacity,
        leftpad=numbers("leftpad_k"),
        batch_idx=numbers("kv_batch_idx"),
        cache_batch=a.kv_batch or a.batch,
        table=numbers("block_table"),
        pages=a.pages,
        page_size=a.page_size,
        rotated=rotated,
        rotary_rows=0 if new.rotary_cos is None else len(new.rotary_cos),
    )
    try:
        check_entries(entries)
    except ValueError as error:
        raise error from None


def _append(
    q: Array,
    rotated: Array,
    k_cache: Array,
    v_cache: Array,
    new: NewKeys,
    arrays: dict[str, Array],
    attention: Any,
) -> None:
    library = c_library()
    library.tilewise_append_kv.restype = c_int32
    a = _abi.sized(KvAppend)
    for name in ("device", "device_index", "dtype", "batch", "seqlen_q", "seqlen_k", "heads_q",
                 "heads_kv", "head_dim", "head_dim_v", "block_table", "block_table_stride",
                 "block_table_width", "page_size", "pages", "kv_batch_idx", "kv_batch",
                 "leftpad_k"):  # fmt: skip
        setattr(a, name, getattr(attention, name))
    a.seqlen_new = new.k.shape[1]
    tensors = {"k_new": new.k, "v_new": new.v, "k_cache": k_cache, "v_cache": v_cache}
    kept = [new.lengths]  # the struct holds only addresses
    if new.rotary_cos is not None:
        tensors |= {"q": q, "q_out": rotated}
        cos = _new_rows("rotary_cos", new.rotary_cos, q, (None, None))
        sin = _new_rows("rotary_sin", new.rotary_sin, q, cos.shape)
        cos, sin = np.ascontiguousarray(cos), np.ascontiguousarray(sin)
        kept += [cos, sin]
        a.rotary_cos, a.rotary_sin = cos.ctypes.data, sin.ctypes.data
        a.rotary_rows, a.rotary_dim = cos.shape[0], 2 * cos.shape[1]
        a.rotary_interleaved = int(new.rotary_interleaved)
        a.q_single_position = int(attention.window_left < 0 and attention.window_right < 0)
        if "leftpad_k" in arrays:  # positions count from the start of the row, as for tensors
            a.rotary_seqlens = new.lengths.ctypes.data
    a.kv_float8 = attention.kv_float8
    factors = (arrays.get("k_descale"), arrays.get("v_descale"))
    _describe.set_descale(a, *(None if x is None else _numpy.view(x) for x in factors))
    a.cache_seqlens = new.lengths.ctypes.data
    for name, array in tensors.items():
        setattr(a, name, _describe.rows(_numpy.view(array), False))
    _abi.check(library, library.tilewise_append_kv(ctypes.byref(a)))
    del kept  # alive until here
