"""Checks the arguments of the public functions and converts them to a problem and its arrays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tilewise import _check, masks
from tilewise._describe import OptionalFields
from tilewise._request import Request, Sequences

from ._problem import Problem

Arrays = dict[str, Any]

_FLOATS = ("float32", "float16", "bfloat16")
_OUT_DTYPES = {name: jnp.dtype(name) for name in _FLOATS}


def as_array(name: str, value: Any) -> jax.Array:
    """The value as a JAX array; refuses what JAX would convert to another dtype.

    Raises:
        TypeError: the value is neither a JAX array nor an array of NumPy.
    """
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, np.ma.MaskedArray):
        if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
            raise TypeError(
                f"{name} has dtype {value.dtype}, which JAX would convert: pass an array of the "
                "dtype that is meant"
            )
        return jnp.asarray(value)
    kind = "torch.Tensor" if _check.is_tensor(value) else type(value).__name__
    raise TypeError(f"{name} is a {kind}, but must be a jax.Array or a NumPy array")


def inputs(q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v")) -> list[Any]:
    """q, k and v as arrays of dtypes that go together."""
    q, k, v = (as_array(name, x) for name, x in zip(names, (q, k, v), strict=True))
    if str(q.dtype) not in _FLOATS and not _check.is_float8(q.dtype):
        allowed = "float32, float16, bfloat16 or float8_e4m3fn"
        raise TypeError(f"q has dtype {q.dtype}, but must be {allowed}")
    _check.key_dtype(names[1], k.dtype, k.dtype, q.dtype)
    _check.key_dtype(names[2], v.dtype, k.dtype, q.dtype)
    return [q, k, v]


def int32(name: str, value: Any, dims: tuple[int | None, ...]) -> jax.Array:
    """An index array, which the kernels read as int32."""
    array = as_array(name, value)
    if array.dtype != jnp.int32:
        raise TypeError(f"{name} has dtype {array.dtype}, but must be int32")
    _check.shape(name, array, dims, "see tilewise.attention_varlen")
    return array


def float32(name: str, value: Any) -> jax.Array:
    array = as_array(name, value)
    if str(array.dtype) not in _FLOATS:
        allowed = "float32, float16 or bfloat16"
        raise TypeError(f"{name} has dtype {array.dtype}, but must be {allowed}")
    return array.astype(jnp.float32)


def bias(value: Any, scores: tuple[int, int, int | None, int | None]) -> jax.Array:
    """The bias with four dimensions; each is that of the scores [B, Hq, rows, keys], or 1.

    Rows and keys are None where the host does not know the lengths.
    """
    array = as_array("bias", value)
    _check.bias(array, *scores)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def full_keys(array: Any, keys: int) -> jax.Array:
    """A bias with one column per key: kernels do not broadcast over keys."""
    return jnp.broadcast_to(array, (*array.shape[:3], keys))


def sequences_of(cu_seqlens_q: Any) -> int:
    """The number of sequences of packed queries."""
    starts = int32("cu_seqlens_q", cu_seqlens_q, (None,))
    if len(starts) < 1:
        raise ValueError("cu_seqlens_q is empty, but must be int32 [batch + 1]")
    return len(starts) - 1


def lengths(sequences: Sequences, batch: int) -> Arrays:
    """The index arrays that are given."""
    dims: dict[str, tuple[int | None, ...]] = {
        "cu_seqlens_q": (batch + 1,), "cu_seqlens_k": (batch + 1,), "seqused_q": (batch,),
        "seqused_k": (batch,), "block_table": (batch, None),
    }  # fmt: skip
    given = {name: getattr(sequences, name) for name in dims}
    return {name: int32(name, x, dims[name]) for name, x in given.items() if x is not None}


def dropout_state(seed: Any) -> jax.Array:
    """{seed, offset} as two 64-bit numbers, lower words first, in 32-bit words."""
    if seed is None:
        raise ValueError(
            "dropout_seed is None, but dropout_p is positive: pass an integer or a key of "
            "jax.random"
        )
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        _check.shape("dropout_seed", seed, (), "one key of jax.random")
        words = jax.random.bits(seed, (2,), jnp.uint32)
    elif isinstance(seed, jax.Array):
        if not jnp.issubdtype(seed.dtype, jnp.integer):
            raise TypeError(
                f"dropout_seed has dtype {seed.dtype}, but must be an integer or a key of "
                "jax.random"
            )
        _check.shape("dropout_seed", seed, (), "one integer; a key is made by jax.random.key")
        wide = seed.dtype.itemsize == 8
        high = (seed >> 32).astype(jnp.uint32) if wide else jnp.uint32(0)
        words = jnp.stack([seed.astype(jnp.uint32), high])
    else:
        number = _check.integer("dropout_seed", seed, "an integer or a key of jax.random")
        if not 0 <= number < 2**64:
            raise ValueError(f"dropout_seed is {number}, but must be from 0 to 2**64 - 1")
        words = jnp.array([number & 0xFFFFFFFF, number >> 32], jnp.uint32)
    return jnp.concatenate([words, jnp.zeros(2, jnp.uint32)])


def _scale(scale: Any, head_dim: int, arrays: Arrays) -> float:
    """The scale, or 1 where an array of one element, which is added to ``arrays``, replaces it."""
    if scale is None:
        return float(head_dim**-0.5)
    if not isinstance(scale, (jax.Array, np.ndarray)):
        return _check.scale_number(scale)
    array = float32("scale", scale)
    if array.size != 1:
        raise ValueError(f"scale has shape {list(array.shape)}, but must have one element")
    arrays["scale_tensor"] = array.reshape(1)
    return 1.0


def of_mask(mask: Any, batch: int, heads: int, lengths: tuple[int, int] | None) -> Arrays:
    """The arrays of a mask, checked; ``lengths`` are those of equally long sequences."""
    masks.check(mask, batch, heads, lengths)
    return by_name(as_array("the array of mask", x) for x in mask.arguments())


def by_name(arrays: Iterable[Any]) -> Arrays:
    """The arrays of a mask by the names of ``OptionalFields``."""
    return dict(zip(("mask_first", "mask_entries", "mask_bits"), arrays, strict=False))


def problem(
    arrays: Arrays,
    batch: int,
    request: Request,
    dropout_seed: Any = None,
    heads_first: bool = False,
    **numbers: Any,
) -> Problem:
    """The problem of the arrays, to which this adds those of the options.

    Args:
        arrays: q [..., heads, head_dim], k, v, index arrays and the bias, by the names of
            ``OptionalFields``.
        batch: The number of sequences.
        request: The options.
        dropout_seed: See ``attention``.
        heads_first: Whether q, k and v are in "bhsd" order.
        numbers: Bounds of lengths and the number of splits.
    """
    q, k = arrays["q"], arrays["k"]
    heads = q.shape[1] if heads_first else q.shape[-2]
    heads_kv = k.shape[1] if heads_first else k.shape[-2]
    numbers |= _check.numbers(request)
    sizes = (batch, heads, heads_kv)
    arrays |= _check.per_head(request, float32, jnp.broadcast_to, (q.dtype, k.dtype), sizes)
    if request.mask is not None:
        row = 2 if heads_first else 1
        lengths = (q.shape[row], k.shape[row]) if q.ndim == 4 else None
        arrays |= of_mask(request.mask, batch, heads, lengths)
        numbers |= request.mask.numbers()
    if numbers["dropout_p"] > 0.0:
        arrays["dropout_state"] = dropout_state(dropout_seed)
    scale = _scale(request.scale, q.shape[-1], arrays)
    out_dtype = _check.computed_out_dtype(request, q, _OUT_DTYPES)
    if "bias" in arrays:
        out = _OUT_DTYPES[_check.out_dtype_name(out_dtype, q.dtype)]
        _check.bias_dtype(arrays["bias"].dtype, q.dtype, _OUT_DTYPES, out)
    fields = OptionalFields(scale=scale, out_dtype=out_dtype, **numbers)
    options = tuple(name for name in arrays if name not in ("q", "k", "v"))
    return Problem(options, fields, heads_first)
