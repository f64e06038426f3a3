"""Attention to a key/value cache that the call only reads."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from tilewise import _check, _latent, _mask_tree, _selected, masks
from tilewise._cache import CacheLayout, NewKeys, check_cache, common_length
from tilewise._describe import OptionalFields
from tilewise._request import Request

from . import _arguments, _autodiff
from ._arguments import Arrays
from ._problem import Problem

# Index arrays that say where the keys of a sequence lie, or its rows.
_OF_SEQUENCES = ("cu_seqlens_q", "seqused_k", "block_table", "kv_batch_idx")


def attend(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, request: Request, layout: CacheLayout
) -> Arrays:
    """out, lse and, if requested, max_logits; see ``tilewise.attention_with_kvcache``."""
    columns = layout.head_dim_v
    _latent.check_given(columns, v_cache)
    _latent.check_one_tensor(columns, v_cache, None, request.v_descale)
    _selected.check_options(layout, NewKeys(), request)
    if columns is not None:
        request = request._replace(v_descale=request.k_descale)
    arrays, batch = _arrays(q, k_cache, v_cache, lengths, layout)
    splits = _check.split_count(layout.num_splits, request.batch_invariant)
    numbers: dict[str, Any] = dict(max_seqlen_q=layout.max_rows(), num_splits=splits)
    if request.bias is not None:
        arrays["bias"], numbers["max_seqlen_q"] = _bias(request.bias, arrays, batch, layout)
    if request.mask is not None:
        of_mask, sizes = _mask(request.mask, arrays, batch)
        arrays, numbers = arrays | of_mask, numbers | sizes
    request = request._replace(bias=None, mask=None)
    problem = _arguments.problem(arrays, batch, request, **numbers)
    problem = problem._replace(inference=True, head_dim_v=columns)
    with_max_logits = _check.flag("return_max_logits", request.return_max_logits)
    if layout.indices is None:
        return _autodiff.attend(problem, with_max_logits, arrays)
    indices = _arguments.int32("indices", layout.indices, (*arrays["q"].shape[:-2], None))
    return _attend_selected(problem, with_max_logits, batch, arrays, indices)


def _arrays(
    q: Any, k_cache: Any, v_cache: Any, lengths: Any, layout: CacheLayout
) -> tuple[Arrays, int]:
    """(q, the caches and the index arrays, checked and by name, the number of sequences)."""
    latent, names = layout.head_dim_v is not None, ("q", "k_cache", "v_cache")
    if latent:
        k_cache = v_cache = _arguments.as_array("k_cache", k_cache)
    q, k_cache, v_cache = _arguments.inputs(q, k_cache, v_cache, names)
    values = v_cache
    if latent:
        columns = _latent.columns_of_values(k_cache, layout.head_dim_v)
        values = jax.ShapeDtypeStruct((*k_cache.shape[:3], columns), k_cache.dtype)
    starts, table, index = layout.cu_seqlens_q, layout.block_table, layout.cache_batch_idx
    packed = None if starts is None else _arguments.sequences_of(starts)
    if table is not None:
        _arguments.int32("block_table", table, (None, None))
    batch = check_cache(q, k_cache, values, table, index, packed, layout.indices is not None)
    if lengths is not None and not hasattr(lengths, "shape"):
        lengths = jnp.full((batch,), common_length(lengths), jnp.int32)
    arrays = {"q": q, "k": k_cache} if latent else {"q": q, "k": k_cache, "v": v_cache}
    for field, name, value, dims in (
        ("cu_seqlens_q", "cu_seqlens_q", starts, (batch + 1,)),
        ("seqused_k", "cache_seqlens", lengths, (batch,)),
        ("block_table", "block_table", table, (batch, None)),
        ("kv_batch_idx", "cache_batch_idx", index, (batch,)),
        ("leftpad_k", "cache_leftpad", layout.cache_leftpad, (batch,)),
    ):
        if value is not None:
            arrays[field] = _arguments.int32(name, value, dims)
    return arrays, batch


def _capacity(arrays: Arrays) -> int:
    """The keys that a row of the caches, or of block_table, has room for."""
    table = arrays.get("block_table")
    return int(arrays["k"].shape[1]) * (1 if table is None else table.shape[1])


def _bias(value: Any, arrays: Arrays, batch: int, layout: CacheLayout) -> tuple[Any, int]:
    """(the bias with one column for each key, the bound of the rows of a sequence)."""
    q, capacity, rows = arrays["q"], _capacity(arrays), layout.max_rows()
    packed = layout.cu_seqlens_q is not None
    scores = (batch, q.shape[-2], None if packed else q.shape[1], capacity)
    bias = _arguments.full_keys(_arguments.bias(value, scores), capacity)
    if packed:
        _check.varlen_bias(bias.shape, rows or None, capacity)
        rows, _ = _check.bounds_of_bias(bias.shape, rows, capacity)
    return bias, rows


def _mask(mask: Any, arrays: Arrays, batch: int) -> tuple[Arrays, dict[str, int]]:
    """The arrays and the numbers of a mask over the cache of ``arrays``."""
    q, starts, capacity = arrays["q"], arrays.get("cu_seqlens_q"), _capacity(arrays)
    rows = None if starts is not None else q.shape[1]
    if not isinstance(mask, masks.Tree):
        lengths = None if rows is None else (rows, capacity)
        return _arguments.of_mask(mask, batch, q.shape[-2], lengths), mask.numbers()
    _mask_tree.check(mask, batch, rows, starts is not None)
    used = arrays.get("seqused_k", jnp.full((batch,), capacity, jnp.int32))
    draft = rows if starts is None else jnp.diff(starts)
    older = used - arrays.get("leftpad_k", 0) - draft
    with jax.enable_x64(True):  # a row has 64 bits
        bits = _arguments.as_array("the array of mask", mask.bits)
        of_mask, numbers = _mask_tree.as_blocks(jnp, bits, older, capacity)
    return _arguments.by_name(of_mask), numbers


# --- selected keys --------------------------------------------------------------------------------


# Compiled, so that a call costs one dispatch where jax.jit does not surround it.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _attend_selected(
    problem: Problem, with_max_logits: bool, batch: int, given: Arrays, indices: Any
) -> Arrays:
    """The results of a problem whose rows of q see only the keys of ``indices``.

    Each row of q becomes a sequence of its own, and each row of the caches a page.
    """
    q, lead, heads = given["q"], given["q"].shape[:-2], given["q"].shape[-2]
    rows = math.prod(lead)
    owners = _owners(given)
    if "cu_seqlens_q" in given:
        q = _with_checked_starts(q, given["cu_seqlens_q"], problem.numbers.max_seqlen_q)
    arrays = {name: x for name, x in given.items() if name not in _OF_SEQUENCES}
    arrays["q"] = q.reshape(rows, 1, *q.shape[-2:])
    for name in given.keys() & set(_check.DESCALES):
        arrays[name] = jnp.pad(given[name], ((0, 1), (0, 0)))[owners]
    flat, unused = indices.reshape(rows, indices.shape[-1]), (owners == batch)[:, None]
    slots = math.prod(given["k"].shape[:2])
    table, keys = _selected.tables(jnp, jnp.take_along_axis, flat, slots, unused)
    arrays |= {"block_table": table, "seqused_k": keys.astype(jnp.int32)}
    problem = problem._replace(
        options=tuple(name for name in arrays if name not in ("q", "k", "v")),
        numbers=problem.numbers._replace(max_seqlen_q=0),
        single_rows=True,
    )
    results = _autodiff.attend(problem, with_max_logits, arrays)
    results["out"] = results["out"].reshape(*lead, heads, results["out"].shape[-1])
    results["lse"] = results["lse"].reshape(*lead, heads).swapaxes(-1, -2)
    if with_max_logits:
        results["max_logits"] = jax.ops.segment_max(results["max_logits"], owners, batch)
    return results


def _owners(given: Arrays) -> Any:
    """The sequence [rows] of each row of q; that of rows of no sequence is the number of them."""
    starts, lead = given.get("cu_seqlens_q"), given["q"].shape[:-2]
    if starts is None:
        return jnp.broadcast_to(jnp.arange(lead[0])[:, None], lead).reshape(-1)
    return jnp.searchsorted(starts, jnp.arange(lead[0]), side="right") - 1


def _with_checked_starts(q: Any, starts: Any, max_rows: int) -> Any:
    """Returns q [T, H, D], but NaN in rows of sequences that the library refuses.

    Where each row is a sequence, no kernel reads cu_seqlens_q. Attention of one head to a key of
    zeros does, and has the usual errors: on a CPU the computation fails.
    """
    query, key = jnp.zeros((len(q), 1, 1), jnp.float32), jnp.zeros((1, 1, 1, 1), jnp.float32)
    table = jnp.zeros((len(starts) - 1, 1), jnp.int32)
    arrays = dict(q=query, k=key, v=key, cu_seqlens_q=starts, block_table=table)
    numbers = OptionalFields(max_seqlen_q=max_rows)
    problem = Problem(("cu_seqlens_q", "block_table"), numbers, inference=True)
    checked = _autodiff.attend(problem, False, arrays)["out"]
    return jnp.where(jnp.isnan(checked), checked.astype(q.dtype), q)
