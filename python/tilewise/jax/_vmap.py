"""The rule of ``jax.vmap``: the mapped dimension is folded into the batch, so one call is enough.

Problems without a batch dimension to fold into (packed sequences, pages, a mapped sink or scale,
dropout bits that are numbered by batch row) run once per element, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tilewise._check import DESCALES

# Options whose first dimension is the batch.
_PER_SEQUENCE = ("seqused_q", "seqused_k", "diagonal", *DESCALES)
_FOLDABLE = ("bias", "alibi_slopes", "sinks", "scale_tensor", *_PER_SEQUENCE)
# Arrays that every sequence of the batch shares.
_SHARED = ("sinks", "scale_tensor")


def batch(
    call: Callable[[dict[str, Any]], list[Any]],
    options: Sequence[str],
    names: Sequence[str],
    operands: Sequence[Any],
    dims: Sequence[Any],
    *,
    summed: bool,
) -> tuple[list[Any], list[int]]:
    """The results of ``call`` for every element of the mapped dimension, which becomes their first.

    Args:
        call: Takes the arrays by name.
        options: The names among ``names`` of the arrays besides q, k, v and results.
        names: The names of the operands.
        operands: The arrays.
        dims: The mapped dimension of each, or None.
        summed: Whether a result is summed over the batch, or a tangent is shared by it.
    """
    mapped = {n: d is not None for n, d in zip(names, dims, strict=True)}
    arrays = {
        n: jnp.moveaxis(x, d, 0) if mapped[n] else x
        for n, x, d in zip(names, operands, dims, strict=True)
    }
    foldable = not summed and all(
        name in _FOLDABLE and not (name in _SHARED and mapped[name]) for name in options
    )
    if not foldable:
        return _one_by_one(call, arrays, mapped)
    count = next(len(arrays[n]) for n in names if mapped[n])
    rows = arrays["q"].shape[int(mapped["q"])]
    folded = {n: _fold(n, x, mapped[n], count, rows) for n, x in arrays.items()}
    results = call(folded)
    return [x.reshape(count, rows, *x.shape[1:]) for x in results], [0] * len(results)


def _one_by_one(call: Any, arrays: dict[str, Any], mapped: dict[str, bool]) -> Any:
    shared = {n: x for n, x in arrays.items() if not mapped[n]}
    each = {n: x for n, x in arrays.items() if mapped[n]}
    results = jax.lax.map(lambda element: call({**shared, **element}), each)
    return results, [0] * len(results)


def _fold(name: str, array: Any, mapped: bool, count: int, batch: int) -> Any:
    """[count * batch, ...] from [count, batch, ...], or from [batch, ...] if it is not mapped."""
    if name in _SHARED:
        return array
    shape = array.shape[1:] if mapped else array.shape
    if name == "bias":
        if not mapped and shape[0] == 1:
            return array
    elif name == "alibi_slopes":
        if not mapped and len(shape) == 1:
            return array
        if len(shape) == 1:  # [heads] of each element
            array, shape = array[:, None], (1, *shape)
    full = (count, batch, *shape[1:])
    return jnp.broadcast_to(array, full).reshape(count * batch, *shape[1:])
