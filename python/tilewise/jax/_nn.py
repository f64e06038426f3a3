"""Attention with the signature and the conventions of ``jax.nn.dot_product_attention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tilewise import _check
from tilewise._request import Request

from . import _arguments, _autodiff


def dot_product_attention(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: Any = None,
    is_causal: bool = False, query_seq_lengths: Any = None, key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None, return_residual: bool = False,
) -> Any:  # fmt: skip
    """``jax.nn.dot_product_attention`` computed by Tilewise, without its ``implementation``.

    The band is aligned as there: row i sees key j if j <= i (is_causal) and i - left <= j <= i +
    right (local_window_size), also where queries and keys differ in number. The differences are:

    - A row that sees no key has out 0 and residual -inf. jax.nn gives it the mean of all values.
    - The residual is float32 and has a derivative. jax.nn rounds it to the dtype of key.
    - value may have another head dimension than key.

    Args:
        query: [B, T, N, H] or [T, N, H]; float32, float16, bfloat16 or (without derivatives)
            float8_e4m3fn.
        key: [B, S, K, H] or [S, K, H], where N is a multiple of K.
        value: [B, S, K, Hv] or [S, K, Hv].
        bias: Broadcastable to [B, N, T, S], float32 or the dtype of query. Differentiable.
        mask: bool, broadcastable to [B, N, T, S]: True where a row sees a key. It is added to the
            bias as 0 or -inf, which takes memory for a float32 array of its shape; is_causal,
            local_window_size and the lengths take none.
        scale: Factor of the scores; None is 1 / sqrt(H).
        is_causal: Row i sees key j if j <= i.
        query_seq_lengths: int32 [B]: rows in use; the others are 0.
        key_value_seq_lengths: int32 [B]: keys in use.
        local_window_size: (left, right), or one number for both; not negative.
        return_residual: Return (out, lse) with lse float32 [B, T, N] or [T, N].

    Returns:
        out in the shape of query, with Hv columns, and its dtype, or bfloat16 for float8_e4m3fn.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or range.
    """
    q, k, v = _arguments.inputs(query, key, value, ("query", "key", "value"))
    batched = q.ndim == 4
    if not batched:
        q, k, v = (x[None] for x in (q, k, v))
    _check.dense(q, k, v, "bshd")
    batch, rows, heads = q.shape[:3]
    keys = k.shape[1]
    arrays = {"q": q, "k": k, "v": v}
    scores = (batch, heads, rows, keys)
    added = _bias(bias, mask, scores)
    if added is not None:
        arrays["bias"] = _arguments.full_keys(added, keys)
    window = _window(local_window_size)
    rows_used, keys_used = rows, keys
    if query_seq_lengths is not None:
        rows_used = arrays["seqused_q"] = _arguments.int32(
            "query_seq_lengths", query_seq_lengths, (batch,)
        )
    if key_value_seq_lengths is not None:
        keys_used = arrays["seqused_k"] = _arguments.int32(
            "key_value_seq_lengths", key_value_seq_lengths, (batch,)
        )
    # Our band is aligned at the last row and key in use, that of jax.nn at the first ones.
    banded = _check.flag("is_causal", is_causal) or window != _check.UNBOUNDED
    moved = rows_used - keys_used
    if banded and not (isinstance(moved, int) and moved == 0):
        arrays["diagonal"] = jnp.broadcast_to(jnp.asarray(moved, jnp.int32), (batch,))
    request = Request(is_causal, window, scale)
    problem = _arguments.problem(arrays, batch, request)
    results = _autodiff.attend(problem, False, arrays)
    out, lse = results["out"], results["lse"].swapaxes(1, 2)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if _check.flag("return_residual", return_residual) else out


def _window(size: Any) -> _check.Window:
    """(left, right), not negative: jax.nn takes -1 literally, but here it would mean no limit."""
    if size is None:
        return _check.UNBOUNDED
    left, right = size if isinstance(size, (tuple, list)) and len(size) == 2 else (size, size)
    allowed = "an integer, a pair (left, right) of integers, or None"
    sides = [_check.integer("local_window_size", x, allowed) for x in (left, right)]
    if min(sides) < 0:
        raise ValueError(f"local_window_size is {size}, but must not be negative")
    return sides[0], sides[1]


def _bias(bias: Any, mask: Any, scores: tuple[int, int, int, int]) -> jax.Array | None:
    """The sum of the bias and of 0 or -inf for the mask, with four dimensions."""
    added = None if bias is None else _arguments.bias(bias, scores)
    if mask is None:
        return added
    mask = _arguments.as_array("mask", mask)
    if mask.dtype != jnp.bool_:
        raise TypeError(f"mask has dtype {mask.dtype}, but must be bool")
    hidden = _arguments.bias(jnp.where(mask, 0.0, -jnp.inf).astype(jnp.float32), scores)
    return hidden if added is None else added.astype(jnp.float32) + hidden
