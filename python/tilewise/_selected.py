"""Selected keys (top-k sparse attention): each row of q names the rows of a cache that it sees.

To the kernels they are pages of one key, with a block table for each row of q. This module checks
the arguments and makes the tables, for every backend; it needs no framework.
"""

from __future__ import annotations

from typing import Any

from . import _check
from ._cache import CacheLayout, NewKeys
from ._request import Request


def check_options(layout: CacheLayout, new: NewKeys, request: Request) -> None:
    """Refuses options that need the positions of keys, which selected keys do not have."""
    if layout.indices is None:
        return
    left, right = _check.window_bounds(request.causal, request.window)
    for name, given in (
        ("causal or window", left >= 0 or right >= 0),
        ("bias", request.bias is not None),
        ("mask", request.mask is not None),
        ("alibi_slopes", request.alibi_slopes is not None),
        ("cache_leftpad", layout.cache_leftpad is not None),
        ("rotary_cos", new.rotary_cos is not None),
    ):
        if given:
            raise ValueError(
                f"{name} and indices are both given, but keys that are selected by their place in "
                "the cache have no positions: only one of them is allowed"
            )


def single_rows(name: str, cache: Any) -> Any:
    """The rows of a cache as pages of one key, [slots, 1, Hkv, D], in the same memory.

    Args:
        cache: [pages or batch, rows, Hkv, D], a tensor or a NumPy array.
    """
    groups, rows, heads, columns = cache.shape
    if _check.is_tensor(cache):
        strides = cache.stride()
    else:
        strides = tuple(stride // cache.itemsize for stride in cache.strides)
    if groups > 1 and rows > 1 and strides[0] != rows * strides[1]:
        raise ValueError(
            f"{name} has {rows} rows a page that are {strides[1]} elements apart and pages that "
            f"are {strides[0]} apart, but with indices all rows must be equally far apart"
        )
    return cache.reshape(groups * rows, 1, heads, columns)


def tables(xp: Any, take: Any, indices: Any, slots: int, unused: Any) -> tuple[Any, Any]:
    """(block table [rows, keys] with the valid indices first, their numbers [rows]).

    Args:
        xp: ``torch`` or ``numpy``, whichever the arrays belong to.
        take: Its function ``take_along_dim`` or ``take_along_axis``.
        indices: int32 [rows, keys]; those outside of 0 to slots - 1 select nothing.
        unused: bool [rows, 1]: rows that belong to no sequence and see nothing.
    """
    valid = (indices >= 0) & (indices < slots) & ~unused
    columns = xp.cumsum(xp.ones_like(indices), 1)
    order = xp.argsort(xp.where(valid, columns, columns + indices.shape[1]), 1)
    return take(indices, order, 1), valid.sum(1)
