"""A latent cache: one tensor whose first columns are the values (MLA, arXiv 2405.04434).

The attention needs nothing for it: keys and values are two views of the same memory. This module
checks the arguments and divides an append, for every backend; it needs no framework.
"""

from __future__ import annotations

from typing import Any

from . import _check
from ._cache import NewKeys

_CACHE = "[batch or pages, rows, heads_kv, head_dim]"


def values_of(k_cache: Any, v_cache: Any, head_dim_v: int | None) -> Any:
    """v_cache, or the first head_dim_v columns of k_cache as a view if head_dim_v is given."""
    if head_dim_v is None:
        return v_cache
    return k_cache[..., : columns_of_values(k_cache, head_dim_v)]


def columns_of_values(k_cache: Any, head_dim_v: Any) -> int:
    """head_dim_v as an integer; refuses one that leaves keys no column of their own."""
    head_dim_v = _check.integer("head_dim_v", head_dim_v, "an integer or None")
    _check.shape("k_cache", k_cache, (None,) * 4, _CACHE)
    columns = k_cache.shape[3]
    if not 1 <= head_dim_v < columns:
        raise ValueError(
            f"head_dim_v is {head_dim_v}, but must be at least 1 and less than the {columns} "
            "columns of k_cache, of which the first head_dim_v are the values"
        )
    return head_dim_v


def check_given(head_dim_v: int | None, v_cache: Any) -> None:
    """Refuses a call without values."""
    if v_cache is None and head_dim_v is None:
        raise TypeError("v_cache is None, but must be given, or head_dim_v for a latent cache")


def check_one_tensor(head_dim_v: int | None, v_cache: Any, v: Any, v_descale: Any) -> None:
    """Refuses values, and factors of values, beside a latent cache, which has them in its keys."""
    if head_dim_v is None:
        return
    for name, value, of in (
        ("v_cache", v_cache, "k_cache"),
        ("v", v, "k"),
        ("v_descale", v_descale, "k_descale"),
    ):
        if value is not None:
            raise ValueError(
                f"{name} and head_dim_v are both given, but a latent cache has its values in its "
                f"keys, so {of} is that of both: only None is allowed"
            )


def split_append(
    q: Any, k_cache: Any, new: NewKeys, k: Any, head_dim_v: int
) -> tuple[tuple[Any, Any, Any], NewKeys]:
    """The append to a latent cache as an append to a cache of keys and one of values.

    The values are the first head_dim_v columns of k_cache and of the new keys k, and are not
    rotated. The keys are the columns after them, with which a rotation begins. Each column is
    written once.

    Returns:
        ((q, k_cache, v_cache), new), with the columns after the values of q.
    """
    rows: tuple[int | None, ...] = (None, None) if new.cu_seqlens is None else (None,)
    meaning = "new keys with the heads and columns of k_cache"
    _check.shape("k", k, (*rows, *k_cache.shape[2:]), meaning)
    others, pairs = k_cache.shape[3] - head_dim_v, tuple(getattr(new.rotary_cos, "shape", ()))
    if len(pairs) == 2 and 2 * pairs[1] > others:
        raise ValueError(
            f"rotary_cos has {pairs[1]} columns, but a latent cache rotates only the "
            f"{others} columns after its values: at most {others // 2} are allowed"
        )
    caches = k_cache[..., head_dim_v:], k_cache[..., :head_dim_v]
    new = new._replace(k=k[..., head_dim_v:], v=k[..., :head_dim_v])
    return (q[..., head_dim_v:], *caches), new
