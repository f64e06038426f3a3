"""Argument checks that do not need the library.

Each error is one sentence with the argument's name, the value given and the values allowed. The
checks read only ``shape`` and ``dtype`` of an array, so they work on NumPy arrays and on PyTorch
tensors, also while ``torch.compile`` traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

from . import _abi

LAYOUTS = {
    "bshd": "[batch, seqlen, heads, head_dim]",
    "bhsd": "[batch, heads, seqlen, head_dim]",
}
VARLEN = "[total rows, heads, head_dim]"
PAGED = "[pages, page_size, heads, head_dim]"
MAX_HEAD_DIM = 576
_MAX_HEAD_DIM_CUDA = 512
MAX_SPLITS = 256

_MAX_KEYS = 2**62  # the sum of two such numbers still fits into int64
# The smallest normal and the largest finite number of float32, in which the kernels compute.
_MIN_FLOAT, _MAX_FLOAT = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
INT32 = (-(2**31), 2**31 - 1)  # smallest and largest entry of the kernels' index arrays

Window = tuple[int | None, int | None]
UNBOUNDED: Window = (None, None)  # the default; fast paths recognise it by its identity


def is_tensor(array: Any) -> bool:
    """Whether this is a PyTorch tensor, without importing PyTorch."""
    return hasattr(array, "__torch_function__")


def heads_first(layout: str) -> bool:
    """True for "bhsd", False for "bshd"."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be 'bshd' or 'bhsd'")
    return layout == "bhsd"


def integer(name: str, value: Any, allowed: str) -> int:
    """The value of a Python or NumPy integer, as a Python int."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}")
    return int(value)


def number(name: str, value: Any, allowed: str = "a number") -> None:
    """Refuses everything except a real number of Python or NumPy."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}, but must be {allowed}")


def flag(name: str, value: Any) -> bool:
    """A bool of Python or NumPy, or 0 or 1, as a Python bool."""
    if value is True or value is False:
        return bool(value)
    is_scalar = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    if (isinstance(value, Integral) and value in (0, 1)) or (is_scalar and value.dtype == bool):
        return bool(value)
    raise TypeError(f"{name} is {value!r}, but must be True or False")


def window_bounds(causal: bool, window: Window) -> tuple[int, int]:
    """(left, right) as the library takes them: -1 means no limit, and causal makes right 0."""
    causal = flag("causal", causal)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window is {window!r}, but must be a pair (left, right)")
    bounds = []
    for side, value in zip(("left", "right"), window, strict=True):
        if value is not None:
            value = integer(f"window {side}", value, "an integer, or None for no limit")
            if value > _MAX_KEYS:
                raise ValueError(f"window {side} is {value}, but must be at most {_MAX_KEYS}")
        bounds.append(-1 if value is None or value < 0 else value)
    return bounds[0], 0 if causal else bounds[1]


def softcap(value: float) -> float:
    """0, or a normal number of float32, because scores are divided by it."""
    number("softcap", value)
    if value != 0 and not _MIN_FLOAT <= value <= _MAX_FLOAT:
        raise ValueError(
            f"softcap is {value}, but must be 0 (off) or from {_MIN_FLOAT:.3g} to {_MAX_FLOAT:.3g}"
        )
    return float(value)


def dropout(value: float) -> float:
    """A number in [0, 1) that does not become 1 when it is rounded to float32."""
    number("dropout_p", value)
    if not 0.0 <= value < 1.0 - 2.0**-25:
        raise ValueError(f"dropout_p is {value}, but must be in [0, 1), and below 1 in float32")
    return float(value)


def numbers(request: Any) -> dict[str, Any]:
    """The options that are numbers or flags, by the names of the operators and of the C ABI."""
    left, right = window_bounds(request.causal, request.window)
    flag("return_lse", request.return_lse)  # Request.results reads it; the operators do not
    return {
        "window_left": left,
        "window_right": right,
        "softcap": softcap(request.softcap),
        "dropout_p": dropout(request.dropout_p),
        "deterministic": flag("deterministic", request.deterministic),
        "tf32": flag("tf32", request.tf32),
        "check": flag("check", request.check),
        "batch_invariant": flag("batch_invariant", request.batch_invariant),
    }


def out_dtype(given: Any, dtype: Any, dtypes: dict[str, Any]) -> int:
    """The tilewise_out_dtype of the dtype that is asked for, in which 0 is the default.

    Args:
        given: None, or a dtype: that of q or float32; for q of float8_e4m3fn, float32 or a 16-bit
            type.
        dtype: The dtype of q.
        dtypes: float32, float16 and bfloat16 of the framework, by their names.
    """
    float8, float32 = is_float8(dtype), dtypes["float32"]
    if given is None or (dtype == given and not float8):
        return _abi.OUT_DEFAULT
    for name, each in dtypes.items():
        if each == given and (float8 or name == "float32"):
            return _abi.OUT_DTYPES[name]
    allowed = f"None, {dtype} like q, or {float32}"
    if float32 == dtype:
        allowed = f"None or {dtype} like q"
    if float8:
        allowed = f"None, {', '.join(str(x) for x in dtypes.values())}, because q has dtype {dtype}"
    raise TypeError(f"out_dtype is {given!r}, but must be {allowed}")


def computed_out_dtype(request: Any, q: Any, dtypes: dict[str, Any]) -> int:
    """The tilewise_out_dtype in which the forward computes out, which may be rounded afterwards.

    It is ``out_dtype``, or float32 where precise_backward keeps the out of 16-bit inputs.
    """
    given = out_dtype(request.out_dtype, q.dtype, dtypes)
    if not flag("precise_backward", request.precise_backward) or q.dtype == dtypes["float32"]:
        return given
    differentiable(q)
    return _abi.OUT_DTYPES["float32"]


def out_dtype_name(number: int, dtype: Any) -> str:
    """The name of the dtype of a tilewise_out_dtype, where q has ``dtype``."""
    names = {each: name for name, each in _abi.OUT_DTYPES.items()}
    return names.get(number, "bfloat16" if is_float8(dtype) else str(dtype))


def bound(name: str, value: int | None) -> int:
    """An optional upper bound of the sequence lengths; 0 stands for an unknown one."""
    if value is None:
        return 0
    value = integer(name, value, "an integer or None")
    if not 0 <= value <= _MAX_KEYS:
        raise ValueError(f"{name} is {value}, but must be from 0 to {_MAX_KEYS}")
    return value


def split_count(num_splits: int, batch_invariant: bool = False) -> int:
    """The number of key splits, at most MAX_SPLITS; 0 leaves the choice to the planner."""
    num_splits = integer("num_splits", num_splits, "an integer")
    if not 0 <= num_splits <= MAX_SPLITS:
        raise ValueError(
            f"num_splits is {num_splits}, but must be from 0 to {MAX_SPLITS} (0: chosen by shape)"
        )
    if num_splits and batch_invariant:
        raise ValueError(
            f"num_splits is {num_splits} and batch_invariant is True, but then splits follow from "
            "the length of each sequence: num_splits must be 0"
        )
    return num_splits


def scale_number(value: float) -> float:
    """A number that is finite in float32."""
    number("scale", value, "a number, a tensor of one element or None")
    if not abs(value) <= _MAX_FLOAT:
        raise ValueError(f"scale is {value}, but must be finite in float32")
    return float(value)


def positive(name: str, value: float) -> float:
    """A finite number greater than 0."""
    number(name, value)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"{name} is {value}, but must be finite and > 0")
    return float(value)


def count(name: str, value: int, minimum: int = 1) -> int:
    """An integer that is at least `minimum`."""
    value = integer(name, value, "an integer")
    if value < minimum:
        raise ValueError(f"{name} is {value}, but must be >= {minimum}")
    return value


def shape(name: str, array: Any, dims: tuple[int | None, ...], meaning: str) -> None:
    """Refuses an array whose shape is not `dims`, in which None allows any size."""
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


def max_head_dim(device: str) -> int:
    """The largest head dimension that every pass computes on a type of device."""
    return _MAX_HEAD_DIM_CUDA if device == "cuda" else MAX_HEAD_DIM


def max_forward_head_dim(q: Any) -> int:
    """The largest head dimension of a forward of q; on a GPU, that of latent caches in 16 bits."""
    if not is_tensor(q) or str(q.dtype) in ("torch.float16", "torch.bfloat16"):
        return MAX_HEAD_DIM
    return max_head_dim(q.device.type)


def head_dim(name: str, value: Any, allowed: str = "an integer") -> int:
    """A head dimension that the kernels have; `name` is the argument or expression it is from.

    Raises:
        TypeError: the value is not an integer.
        ValueError: no kernel has heads of this size.
    """
    columns = integer(name, value, allowed)
    if not 1 <= columns <= MAX_HEAD_DIM:
        raise ValueError(f"{name} is {columns}, but must be 1..{MAX_HEAD_DIM}")
    return columns


def head_sizes(
    heads_q: int, heads_kv: int, head_dim: int, head_dim_v: int, largest: int = MAX_HEAD_DIM
) -> None:
    """Refuses numbers of heads or columns of q, k and v that do not go together."""
    if heads_kv < 1 or heads_q < 1:
        raise ValueError(f"q has {heads_q} heads and k has {heads_kv}, but both must be >= 1")
    if heads_q % heads_kv != 0:
        raise ValueError(
            f"q has {heads_q} heads, but must have a multiple of the {heads_kv} heads of k and v"
        )
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if size < 1 or size > largest:
            where = f" for this dtype on a GPU (1..{MAX_HEAD_DIM} in 16 bits, and on a CPU)"
            where = "" if largest == MAX_HEAD_DIM else where
            raise ValueError(f"{name} has head dimension {size}, but must be 1..{largest}{where}")


def dense(q: Any, k: Any, v: Any, layout: str) -> None:
    """Refuses shapes of q, k and v that do not describe sequences of equal length."""
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
    """Refuses shapes of q, k and v that are not those of packed sequences (or of pages of keys)."""
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
    """Refuses a bias that cannot be broadcast to [batch, heads, rows, keys].

    It may have fewer dimensions. Rows and keys are None where the host does not know the lengths.
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
    """Refuses a bias with fewer rows or keys than the longest sequence (None: not known) has."""
    for name, have, want in (("rows", shape[2], rows), ("keys", shape[3], keys)):
        if want is not None and have != 1 and have < want:
            raise ValueError(
                f"bias has shape {list(shape)} with {have} {name}, but the longest sequence has "
                f"{want}: at least as many, or 1, are allowed"
            )
    if keys is None and shape[3] == 1:
        raise ValueError(
            f"bias has shape {list(shape)}, whose one key is broadcast, but the number of keys is "
            "not known: pass max_seqlen_k, or a bias with a dimension of keys"
        )


def bounds_of_bias(shape: Sequence[int], rows: int, keys: int) -> tuple[int, int]:
    """Upper bounds of the lengths: those given, or, where they are 0, the sizes of the bias."""
    return rows or (shape[2] if shape[2] != 1 else 0), keys or shape[3]


def is_float8(dtype: Any) -> bool:
    """Whether a dtype is float8_e4m3fn, of PyTorch or of ml_dtypes."""
    return str(dtype).endswith("float8_e4m3fn")


def differentiable(q: Any) -> None:
    """Refuses q of float8_e4m3fn, which only the forward takes.

    Raises:
        NotImplementedError: q has that dtype.
    """
    if is_float8(q.dtype):
        raise NotImplementedError(
            f"q has dtype {q.dtype}, of which there is only the forward: for derivatives, multiply "
            "q, k and v by their descales in float32, float16 or bfloat16 and pass these"
        )


def bias_dtype(given: Any, dtype: Any, dtypes: dict[str, Any], out: Any) -> None:
    """Refuses a bias whose dtype is not float32 or that of q, ``dtype``.

    ``dtypes`` are as in ``out_dtype``. For q of float8_e4m3fn the 16-bit type is that of the
    kernel, which follows from ``out``, the dtype of out.
    """
    float32 = dtypes["float32"]
    allowed = [float32] if dtype == float32 else [float32, dtype]
    if is_float8(dtype):
        allowed[1] = dtypes["float16" if out == dtypes["float16"] else "bfloat16"]
    if given not in allowed:
        words = " or ".join(str(x) for x in allowed)
        raise TypeError(f"bias has dtype {given}, but must be {words}")


def key_dtype(name: str, dtype: Any, k_dtype: Any, q_dtype: Any) -> None:
    """Refuses k or v unless it has the dtype of q or both are float8_e4m3fn and q has 16 bits."""
    if dtype == k_dtype == q_dtype:
        return
    wide = str(q_dtype).endswith("float32") or is_float8(q_dtype)
    if dtype == q_dtype and is_float8(k_dtype):
        raise TypeError(f"{name} has dtype {dtype}, but k has {k_dtype}: both must have the same")
    if dtype != k_dtype or wide or not is_float8(dtype):
        other = "" if wide else ", or float8_e4m3fn for both k and v"
        raise TypeError(f"{name} has dtype {dtype}, but must have {q_dtype} like q{other}")


DESCALES = ("q_descale", "k_descale", "v_descale")


def new_row_dtype(name: str, dtype: Any, q_dtype: Any) -> None:
    """Refuses new keys, values or tables of a cache unless they have the dtype of q.

    Beside q of float8_e4m3fn, new keys and values have 16 bits: the append divides them by their
    descales and rounds them, and there is nothing to rotate q with.
    """
    if is_float8(q_dtype):
        if name.startswith("rotary"):
            raise TypeError(
                f"{name} is given, but q has dtype {q_dtype}: rotate q before it is rounded"
            )
        if not str(dtype).endswith("float16"):
            raise TypeError(
                f"{name} has dtype {dtype}, but must be float16 or bfloat16, because q has "
                f"{q_dtype}"
            )
    elif dtype != q_dtype:
        raise TypeError(f"{name} has dtype {dtype}, but must have {q_dtype} like q")


def is_one_or(size: int, count: int) -> bool:
    """Whether a dimension is broadcast, or has the given size. The sizes of torch.compile may be
    symbols, of which Python's ``in`` finds none equal.
    """
    return size == 1 or size == count


def descale(name: str, array: Any, float8: bool, batch: int, heads_kv: int) -> None:
    """Refuses factors of float8_e4m3 numbers that are not [batch or 1, heads_kv or 1]."""
    if not float8:
        owners = "queries" if name == "q_descale" else "keys and values"
        raise ValueError(f"{name} is given, but belongs to float8_e4m3 {owners}")
    given = tuple(array.shape)
    fits = len(given) == 2 and is_one_or(given[0], batch) and is_one_or(given[1], heads_kv)
    if not fits:
        raise ValueError(
            f"{name} has shape {list(given)}, but must be [batch, heads_kv] = "
            f"[{batch}, {heads_kv}], where either may be 1"
        )


def per_head(
    request: Any,
    float32: Callable[[str, Any], Any],
    expand: Callable[[Any, tuple[int, int]], Any],
    dtypes: tuple[Any, Any],
    sizes: tuple[int, int, int],
) -> dict[str, Any]:
    """The given options that have a number per head, checked: slopes, sinks and descales.

    Args:
        request: The options.
        float32: Makes an array of an option's name and value.
        expand: Broadcasts an array to a shape.
        dtypes: Those of q and k.
        sizes: (batch, heads_q, heads_kv).
    """
    batch, heads, heads_kv = sizes
    arrays = {}
    if request.alibi_slopes is not None:
        arrays["alibi_slopes"] = float32("alibi_slopes", request.alibi_slopes)
        alibi(arrays["alibi_slopes"], batch, heads)
    if request.sinks is not None:
        arrays["sinks"] = float32("sinks", request.sinks)
        shape("sinks", arrays["sinks"], (heads,), "one logit per query head")
    for name in DESCALES:
        if getattr(request, name) is not None:
            factors = float32(name, getattr(request, name))
            scaled = is_float8(dtypes[0 if name == "q_descale" else 1])
            descale(name, factors, scaled, batch, heads_kv)
            arrays[name] = expand(factors, (batch, heads_kv))
    return arrays


def alibi(array: Any, batch: int, heads: int) -> None:
    """Refuses slopes that are neither per head nor per sequence and head."""
    given = tuple(array.shape)
    if given != (heads,) and given != (batch, heads):
        raise ValueError(
            f"alibi_slopes has shape {list(given)}, but must be [heads_q] = [{heads}] or "
            f"[batch, heads_q] = [{batch}, {heads}]"
        )
