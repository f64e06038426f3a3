"""Checks of arguments that need no library: one sentence with the name, the value, what is allowed.

Everything here works on any array with a ``shape``: PyTorch tensors (also while ``torch.compile``
traces) and NumPy arrays alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

LAYOUTS = {
    "bshd": "[batch, seqlen, heads, head_dim]",
    "bhsd": "[batch, heads, seqlen, head_dim]",
}
VARLEN = "[total rows, heads, head_dim]"
PAGED = "[pages, page_size, heads, head_dim]"
MAX_HEAD_DIM = 512
MAX_SPLITS = 256

_MOST_KEYS = 2**62  # a sum of two of them has 64 bits
# What kernels compute with: the least normal number of float32, and the largest one.
_LEAST_FLOAT, _MOST_FLOAT = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
INT32 = (-(2**31), 2**31 - 1)  # least and largest number of the kernels' index arrays

Window = tuple[int | None, int | None]


def heads_first(layout: str) -> bool:
    """True for "bhsd", False for "bshd"."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be 'bshd' or 'bhsd'")
    return layout == "bhsd"


def integer(name: str, value: Any, allowed: str) -> int:
    """An integer of Python or NumPy, as Python's."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}")
    return int(value)


def _number(name: str, value: Any, allowed: str = "a number") -> None:
    """A real number of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}")


def flag(name: str, value: Any) -> bool:
    """True or False: of Python, of NumPy, or 1 or 0."""
    if value is True or value is False:
        return bool(value)
    of_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    if (isinstance(value, Integral) and value in (0, 1)) or (of_numpy and value.dtype == bool):
        return bool(value)
    raise TypeError(f"{name} is {value!r}, but must be True or False")


def window_bounds(causal: bool, window: Window) -> tuple[int, int]:
    """(left, right) as the library counts them: -1 is no limit. Causal closes the right side."""
    causal = flag("causal", causal)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}, but must be a pair (left, right)")
    bounds = []
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None:
            value = integer(f"window {side}", value, "an integer, or None for no limit")
            if value > _MOST_KEYS:
                raise ValueError(f"window {side} is {value}, but must be at most {_MOST_KEYS}")
        bounds.append(-1 if value is None or value < 0 else value)
    return bounds[0], 0 if causal else bounds[1]


def softcap(value: float) -> float:
    """0, or a number that float32 holds: scores are divided by it."""
    _number("softcap", value)
    if value != 0 and not _LEAST_FLOAT <= value <= _MOST_FLOAT:
        raise ValueError(
            f"softcap is {value}, but must be 0 (off) or from {_LEAST_FLOAT:.3g} to "
            f"{_MOST_FLOAT:.3g}"
        )
    return float(value)


def dropout(value: float) -> float:
    """A number in [0, 1), in float32, too."""
    _number("dropout_p", value)
    if not 0.0 <= value < 1.0 - 2.0**-25:
        raise ValueError(f"dropout_p is {value}, but must be in [0, 1), and below 1 in float32")
    return float(value)


def bound(name: str, value: int | None) -> int:
    """An optional upper bound of lengths, or 0 when it is not known."""
    if value is None:
        return 0
    value = integer(name, value, "an integer or None")
    if not 0 <= value <= _MOST_KEYS:
        raise ValueError(f"{name} is {value}, but must be from 0 to {_MOST_KEYS}")
    return value


def split_count(num_splits: int) -> int:
    """A number >= 0; 0 leaves the choice to the planner."""
    num_splits = integer("num_splits", num_splits, "an integer")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(
            f"num_splits is {num_splits}, but must be from 0 to {MAX_SPLITS} (0: chosen by shape)"
        )
    return num_splits


def scale_number(value: float) -> float:
    """A number that float32 holds."""
    _number("scale", value, "a number, a tensor of one element or None")
    if not abs(value) <= _MOST_FLOAT:
        raise ValueError(f"scale is {value}, but must be finite, and in float32, too")
    return float(value)


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    _number(name, value)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} is {value}, but must be finite and > 0")
    return float(value)


def count(name: str, value: int, least: int = 1) -> int:
    """An integer from `least` on."""
    value = integer(name, value, "an integer")
    if value < least:
        raise ValueError(f"{name} is {value}, but must be >= {least}")
    return value


def shape(name: str, array: Any, dims: tuple[int | None, ...], meaning: str) -> None:
    """The shape of an array; None allows any size."""
    given = tuple(array.shape)
    fits = len(given) == len(dims)
    if fits:
        for have, want in zip(given, dims, strict=True):
            fits = fits and (want is None or have == want)
    if not fits:
        allowed = ", ".join("any" if size is None else str(size) for size in dims)
        raise ValueError(f"{name} has shape {list(given)}, but must be [{allowed}]: {meaning}")


def _rank(name: str, array: Any, rank: int, meaning: str) -> None:
    if len(array.shape) != rank:
        raise ValueError(
            f"{name} has shape {list(array.shape)}, but must have {rank} dimensions: {meaning}"
        )


def head_sizes(heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int) -> None:
    """Heads and columns of q, k and v."""
    if heads_kv < 1 or heads_q < 1:
        raise ValueError(f"q has {heads_q} heads and k has {heads_kv}, but both must be >= 1")
    if heads_q % heads_kv != 0:
        raise ValueError(
            f"q has {heads_q} heads, but must have a multiple of the {heads_kv} heads of k and v"
        )
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if size < 1 or size > MAX_HEAD_DIM:
            raise ValueError(f"{name} has head dimension {size}, but must be 1..{MAX_HEAD_DIM}")


def dense(q: Any, k: Any, v: Any, layout: str) -> None:
    """Shapes of q, k and v of equal-length sequences."""
    meaning = LAYOUTS[layout]
    heads = 2 if layout == "bshd" else 1
    _rank("q", q, 4, meaning)
    _rank("k", k, 4, meaning)
    _rank("v", v, 4, meaning)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch size {k.shape[0]}, but q has {q.shape[0]}")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head dimension {k.shape[3]}, but q has {q.shape[3]}")
    if v.shape[0] != k.shape[0] or v.shape[1] != k.shape[1] or v.shape[2] != k.shape[2]:
        raise ValueError(
            f"v has shape {list(v.shape)}, but must agree with k, {list(k.shape)}, in all but the "
            f"last dimension: {meaning}"
        )
    head_sizes(q.shape[heads], k.shape[heads], q.shape[3], v.shape[3])


def varlen(q: Any, k: Any, v: Any, paged: bool) -> None:
    """Shapes of q, k and v of sequences laid end to end; keys may lie in pages."""
    _rank("q", q, 3, VARLEN)
    rank, meaning = (4, PAGED) if paged else (3, VARLEN)
    _rank("k", k, rank, meaning)
    _rank("v", v, rank, meaning)
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head dimension {k.shape[-1]}, but q has {q.shape[-1]}")
    if tuple(v.shape[:-1]) != tuple(k.shape[:-1]):
        raise ValueError(
            f"v has shape {list(v.shape)}, but must agree with k, {list(k.shape)}, in all but the "
            f"last dimension: {meaning}"
        )
    head_sizes(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])


def bias(array: Any, batch: int, heads: int, rows: int | None, keys: int | None) -> None:
    """Shape of a bias of up to four dimensions; missing ones and ones of 1 are broadcast.

    Rows and keys are None where the lengths are not known on the host.
    """
    given = tuple(array.shape)
    if not 1 <= len(given) <= 4:
        raise ValueError(
            f"bias has shape {list(given)}, but must have 1 to 4 dimensions, broadcastable to "
            "[batch, heads_q, seqlen_q, seqlen_k]"
        )
    full = (batch, heads, rows, keys)[4 - len(given) :]
    for have, want in zip(given, full, strict=True):
        if have != 1 and want is not None and have != want:
            allowed = ["any" if size is None else size for size in full]
            raise ValueError(
                f"bias has shape {list(given)}, but must be broadcastable to "
                f"[batch, heads_q, seqlen_q, seqlen_k], here {allowed}"
            )


def varlen_bias(shape: Sequence[int], rows: int | None, keys: int | None) -> None:
    """Of the longest sequence, as far as it is known, a bias has every row and key."""
    for name, have, want in (("rows", shape[2], rows), ("keys", shape[3], keys)):
        if want is not None and have != 1 and have < want:
            raise ValueError(
                f"bias has shape {list(shape)} with {have} {name}, but the longest sequence has "
                f"{want}: at least as many, or 1, are allowed"
            )
    if keys is None and shape[3] == 1:
        raise ValueError(
            f"bias has shape {list(shape)} with one key for all, which needs to know how many "
            "there are: pass max_seqlen_k, or a bias with a dimension of keys"
        )


def bounds_of_bias(shape: Sequence[int], rows: int, keys: int) -> tuple[int, int]:
    """Bounds of the lengths: those given, or, where they are 0, what a bias has room for."""
    return rows or (shape[2] if shape[2] != 1 else 0), keys or shape[3]


def is_float8(dtype: Any) -> bool:
    """Whether it is float8_e4m3fn, of PyTorch or of ml_dtypes."""
    return str(dtype).endswith("float8_e4m3fn")


def key_dtype(name: str, dtype: Any, k_dtype: Any, q_dtype: Any) -> None:
    """Keys and values have the dtype of q, or, where that has 16 bits, both float8_e4m3fn."""
    if dtype == k_dtype == q_dtype:
        return
    wide = str(q_dtype).endswith("float32")
    if dtype == q_dtype and is_float8(k_dtype):
        raise TypeError(f"{name} has dtype {dtype}, but k has {k_dtype}: both must have the same")
    if dtype != k_dtype or wide or not is_float8(dtype):
        other = "" if wide else ", or float8_e4m3fn for both k and v"
        raise TypeError(f"{name} has dtype {dtype}, but must have {q_dtype} like q{other}")


def descale(name: str, array: Any, float8: bool, batch: int, heads_kv: int) -> None:
    """Factors of a float8_e4m3 cache per sequence and head; dimensions of 1 are broadcast."""
    if not float8:
        raise ValueError(f"{name} is given, but belongs to float8_e4m3 keys and values")
    given = tuple(array.shape)
    fits = len(given) == 2 and given[0] in (1, batch) and given[1] in (1, heads_kv)
    if not fits:
        raise ValueError(
            f"{name} has shape {list(given)}, but must be [batch, heads_kv] = "
            f"[{batch}, {heads_kv}], where either may be 1"
        )


def alibi(array: Any, batch: int, heads: int) -> None:
    """Slopes per head, or per sequence and head."""
    given = tuple(array.shape)
    if given != (heads,) and given != (batch, heads):
        raise ValueError(
            f"alibi_slopes has shape {list(given)}, but must be [heads_q] = [{heads}] or "
            f"[batch, heads_q] = [{batch}, {heads}]"
        )
