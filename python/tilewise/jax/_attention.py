"""The public functions of ``tilewise.jax`` besides ``dot_product_attention``."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from tilewise import _check
from tilewise._cache import CacheLayout
from tilewise._check import UNBOUNDED, Window
from tilewise._request import Request, Sequences

from . import _arguments, _autodiff, _kvcache
from ._problem import Problem


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = UNBOUNDED,
    scale: Any = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None,
    sinks: Any = None, dropout_p: float = 0.0, dropout_seed: Any = None,
    return_lse: bool = False, deterministic: bool = False, tf32: bool = False,
    batch_invariant: bool = False, k_descale: Any = None, v_descale: Any = None,
    layout: str = "bshd", mask: Any = None, return_max_logits: bool = False,
    out_dtype: Any = None, precise_backward: bool = False, q_descale: Any = None,
) -> Any:  # fmt: skip
    """``tilewise.attention`` on JAX arrays: exact attention of equal-length sequences.

    Arguments, results and errors are those of ``tilewise.attention``, except for these:

    Args:
        q: Queries: a jax.Array or a NumPy array, also while JAX traces. So are k, v and options.
        k: Keys.
        v: Values.
        out_dtype: As there: a dtype of NumPy or JAX, or its name.
        dropout_seed: Decides which weights dropout_p drops, and must be given with it: an integer
            from 0 to 2**64 - 1, a traced integer, or a key of jax.random. The same seed gives the
            same bits; the bits of a row depend on its position in the batch.

    Returns:
        out; with return_lse also lse, and with return_max_logits also max_logits. out and lse have
        gradients, tangents and second derivatives with respect to q, k, v, bias, sinks and a scale
        that is an array, but not if q or k is float8_e4m3fn. The tangent of out has the dtype of
        out. The gradient of a float32 out is rounded to the dtype of q.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or range.
        NotImplementedError: no kernel of this build can run the problem on this device, or a
            derivative is not defined.
    """
    heads_first = _check.heads_first(layout)
    q, k, v = _arguments.inputs(q, k, v)
    _check.dense(q, k, v, layout)
    arrays = {"q": q, "k": k, "v": v}
    if bias is not None:
        rows, heads = (2, 1) if heads_first else (1, 2)
        scores = (q.shape[0], q.shape[heads], q.shape[rows], k.shape[rows])
        full = _arguments.bias(bias, scores)
        arrays["bias"] = _arguments.full_keys(full, k.shape[rows])
    request = Request(
        causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    problem = _arguments.problem(arrays, q.shape[0], request, dropout_seed, heads_first)
    return _results(request, problem, arrays)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Any = None,
    seqused_k: Any = None, block_table: Any = None, causal: bool = False,
    window: Window = UNBOUNDED, scale: Any = None, softcap: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, dropout_p: float = 0.0,
    dropout_seed: Any = None, return_lse: bool = False, deterministic: bool = False,
    tf32: bool = False, batch_invariant: bool = False, k_descale: Any = None,
    v_descale: Any = None, mask: Any = None, return_max_logits: bool = False,
    out_dtype: Any = None, precise_backward: bool = False, q_descale: Any = None,
) -> Any:  # fmt: skip
    """``tilewise.attention_varlen`` on JAX arrays: exact attention of packed sequences.

    Arguments, results and errors are those of ``tilewise.attention_varlen``, with dropout_seed as
    in ``attention``. There is no ``check``: XLA runs the call later, when it is too late for this
    function to raise an exception about an index array. On a CPU an entry out of range fails the
    computation; on a GPU its rows are NaN, and ``tilewise.last_index_error`` names the entry.

    A bias has as many rows and keys as the longest sequence. max_seqlen_q and max_seqlen_k default
    to its sizes.
    """
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table
    )
    q, k, v = _arguments.inputs(q, k, v)
    paged = block_table is not None
    _check.varlen(q, k, v, paged)
    batch = _arguments.sequences_of(cu_seqlens_q)
    if paged == (cu_seqlens_k is not None):
        raise ValueError(
            "exactly one of cu_seqlens_k and block_table must be given: pages hold the keys of "
            "each sequence from its start"
        )
    arrays = {"q": q, "k": k, "v": v, **_arguments.lengths(sequences, batch)}
    rows = _check.bound("max_seqlen_q", max_seqlen_q)
    keys = _check.bound("max_seqlen_k", max_seqlen_k)
    if bias is not None:
        full = _arguments.bias(bias, (batch, q.shape[1], None, None))
        widest = keys or (block_table.shape[1] * k.shape[1] if paged else None)
        _check.varlen_bias(full.shape, rows or None, widest)
        if full.shape[3] == 1:
            full = _arguments.full_keys(full, widest or 1)
        arrays["bias"] = full
        rows, keys = _check.bounds_of_bias(full.shape, rows, keys)
    request = Request(
        causal, window, scale, softcap, None, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    problem = _arguments.problem(
        arrays, batch, request, dropout_seed, max_seqlen_q=rows, max_seqlen_k=keys
    )
    return _results(request, problem, arrays)


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any = None, *, cache_seqlens: Any = None,
    cache_batch_idx: Any = None, cache_leftpad: Any = None, block_table: Any = None,
    cu_seqlens_q: Any = None, max_seqlen_q: int | None = None, causal: bool = False,
    window: Window = UNBOUNDED, scale: Any = None, softcap: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, num_splits: int = 0, return_lse: bool = False,
    tf32: bool = False, batch_invariant: bool = False, k_descale: Any = None,
    v_descale: Any = None, mask: Any = None, return_max_logits: bool = False,
    out_dtype: Any = None, q_descale: Any = None, head_dim_v: int | None = None,
    indices: Any = None,
) -> Any:  # fmt: skip
    """Attention of new queries to all keys in a cache, which the call only reads.

    Arguments, results and errors are those of ``tilewise.attention_with_kvcache``; index arrays are
    int32. JAX arrays do not change, so new keys are written before the call, for instance by
    ``jax.lax.dynamic_update_slice`` with a donated cache, and cache_seqlens includes them. With
    head_dim_v the values are read in place, without a copy of these columns.

    The number of rows of packed sequences is known only when the computation runs: those past the
    rows of a ``Tree`` see no key.

    The function is for inference: it has no derivative.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, 0.0, return_lse, False, tf32,
        False, batch_invariant, k_descale, v_descale, mask, return_max_logits, out_dtype, False,
        q_descale,
    )  # fmt: skip
    layout = CacheLayout(
        cache_batch_idx, cache_leftpad, block_table, num_splits, False, cu_seqlens_q, max_seqlen_q,
        head_dim_v, indices,
    )  # fmt: skip
    return _returned(request, _kvcache.attend(q, k_cache, v_cache, cache_seqlens, request, layout))


def _results(request: Request, problem: Problem, arrays: dict[str, Any]) -> Any:
    with_max_logits = _check.flag("return_max_logits", request.return_max_logits)
    results = _autodiff.attend(problem, with_max_logits, arrays)
    if request.precise_backward and request.out_dtype != jnp.dtype("float32"):
        # JAX keeps the float32 out for the backward, and the gradient of the rounded one is exact.
        results["out"] = results["out"].astype(arrays["q"].dtype)
    return _returned(request, results)


def _returned(request: Request, results: dict[str, Any]) -> Any:
    """The results that the request asks for, in the form in which the functions return them."""
    return request.results(results["out"], results["lse"], results.get("max_logits"))
