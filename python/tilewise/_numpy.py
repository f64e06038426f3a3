"""The public functions on NumPy arrays, and on objects that NumPy can view as one, without PyTorch.

Through ctypes they call the C library, whose own thread pool does the work (TILEWISE_NUM_THREADS).
bfloat16 arrays are those of the package ml_dtypes. Dropout bits come from NumPy's global generator:
the same ``numpy.random.seed`` before ``attention`` and ``attention_backward`` gives both the same
bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from ._requirements import require

require("tilewise on arrays", "numpy")

import numpy as np
import numpy.typing as npt

from . import _abi, _check, _describe
from ._describe import View
from ._library import c_library
from ._numpy_merge import merge_states as merge_states
from ._request import Request, Sequences

Array: TypeAlias = npt.NDArray[Any]
Result: TypeAlias = Array | tuple[Array, ...]

_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT8 = "float8_e4m3fn"
_WORKSPACE_ALIGNMENT = 64


class _Problem(NamedTuple):
    """A checked problem. It owns the arrays, because the struct holds only their addresses."""

    attention: Any
    q: Array
    k: Array
    v: Array
    arrays: dict[str, Array]
    heads_first: bool
    bias_shape: tuple[int, ...]  # as given

    def new_out(self) -> Array:
        """An empty array for out, or for its tangent."""
        name = _check.out_dtype_name(self.attention.out_dtype, self.q.dtype)
        dtype = _out_dtypes(self.q.dtype)[name]
        return _new_rows((*self.q.shape[:-1], self.v.shape[-1]), dtype, self.heads_first)


def _out_dtypes(dtype: Any) -> dict[str, Any]:
    """The dtypes that out may have for some dtype of q, by name."""
    dtypes = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
    if str(dtype) not in dtypes:  # bfloat16 and float8 come from ml_dtypes, which then is there
        import ml_dtypes

        dtypes["bfloat16"] = np.dtype(ml_dtypes.bfloat16)
    return dtypes


def attention(q: Any, k: Any, v: Any, layout: str, given: tuple[Any, ...]) -> Result:
    """See ``tilewise.attention``; ``given`` has the fields of ``Request``."""
    request = Request(*given)
    return _forward_results(prepare_dense(q, k, v, layout, request), request)


def attention_varlen(
    q: Any, k: Any, v: Any, sequences: tuple[Any, ...], given: tuple[Any, ...]
) -> Result:
    """See ``tilewise.attention_varlen``; the tuples have the fields of ``Sequences`` and
    ``Request``.
    """
    request = Request(*given)
    return _forward_results(prepare_varlen(q, k, v, Sequences(*sequences), request), request)


# --- from arguments to a problem ------------------------------------------------------------------


_CPU_MEMORY = 1  # kDLCPU of DLPack


def as_array(name: str, value: Any) -> Array:
    """The array in CPU memory as a NumPy array: a view where NumPy can make one, else a copy.

    Raises:
        TypeError: the value is not an array, lies on another device, or is a masked array.
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a {type(value).__name__}, whose mask would not be read, but must be a "
            f"plain array: pass {name}.filled(...), and -inf in bias for keys to hide"
        )
    if isinstance(value, np.ndarray):
        return value
    if _check.is_tensor(value):
        raise TypeError(f"{name} is a torch.Tensor, but must be an array: the two are not mixed")
    if type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        raise TypeError(
            f"{name} is a jax.Array, but must be a torch.Tensor or an array of NumPy: "
            "use tilewise.jax, which has the same functions for JAX, or pass numpy.asarray(...)"
        )
    _refuse_other_memory(name, value)
    if hasattr(value, "__array__"):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        return np.from_dlpack(value)
    raise TypeError(f"{name} is a {type(value).__name__}, but must be an array")


def _refuse_other_memory(name: str, value: Any) -> None:
    """Refuses an array on a GPU, which NumPy would silently copy to the host."""
    where = ""
    if hasattr(value, "__dlpack_device__"):
        kind, number = value.__dlpack_device__()
        if int(kind) != _CPU_MEMORY:
            where = f"on device {int(number)} of DLPack's type {int(kind)}"
    elif hasattr(value, "__cuda_array_interface__"):
        where = "on a GPU"
    if where:
        raise TypeError(
            f"{name} is a {type(value).__module__}.{type(value).__name__} {where}, but must be a "
            "torch.Tensor, or an array in the memory of the CPU: pass torch.from_dlpack(...) of "
            "it, or copy it to the host first"
        )


def prepare(q: Any, k: Any, v: Any, layout: str, lengths: Sequences, request: Request) -> _Problem:
    """The problem of ``attention_varlen`` if any of its lengths is given, else of ``attention``."""
    sequences = lengths.or_none()
    if sequences is None:
        return prepare_dense(q, k, v, layout, request)
    return prepare_varlen(q, k, v, sequences, request)


def prepare_dense(q: Any, k: Any, v: Any, layout: str, request: Request) -> _Problem:
    """Checks the arguments of equal-length sequences and describes the problem."""
    heads_first = _check.heads_first(layout)
    q, k, v = _check_arrays(q, k, v)
    _check.dense(q, k, v, layout)
    if heads_first:
        q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    arrays: dict[str, Array] = {}
    if request.bias is not None:
        bias = as_array("bias", request.bias)
        _check.bias(bias, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        arrays["bias"] = _four_dimensions(bias, k.shape[1])
    return _describe_problem(q, k, v, q.shape[0], request, arrays, {}, heads_first)


def prepare_varlen(q: Any, k: Any, v: Any, sequences: Sequences, request: Request) -> _Problem:
    """Checks the arguments of packed sequences and describes the problem."""
    q, k, v = _check_arrays(q, k, v)
    paged = sequences.block_table is not None
    _check.varlen(q, k, v, paged)
    starts = _int32("cu_seqlens_q", sequences.cu_seqlens_q, (None,))
    if starts is None or len(starts) < 1:
        raise ValueError("cu_seqlens_q is missing or empty, but must be int32 [batch + 1]")
    if paged and sequences.cu_seqlens_k is not None:
        raise ValueError(
            "cu_seqlens_k and block_table are both given, but pages hold the keys of each "
            "sequence from its start: pass cu_seqlens_k=None and seqused_k"
        )
    if not paged and sequences.cu_seqlens_k is None:
        raise TypeError("cu_seqlens_k is None, but must be int32 [batch + 1] without block_table")
    batch = len(starts) - 1
    shapes: dict[str, tuple[int | None, ...]] = {
        "cu_seqlens_q": (batch + 1,), "cu_seqlens_k": (batch + 1,), "seqused_q": (batch,),
        "seqused_k": (batch,), "block_table": (batch, None),
    }  # fmt: skip
    arrays: dict[str, Array] = {}
    for name, dims in shapes.items():
        array = _int32(name, getattr(sequences, name), dims)
        if array is not None:
            arrays[name] = array
    bounds = {
        name: _check.bound(name, getattr(sequences, name))
        for name in ("max_seqlen_q", "max_seqlen_k")
    }
    if request.bias is not None:
        bias = as_array("bias", request.bias)
        _check.bias(bias, batch, q.shape[1], None, None)
        rows, keys = _longest(arrays, "q"), _longest(arrays, "k")
        if keys is None:
            keys = arrays["block_table"].shape[1] * k.shape[1]
        bias = _four_dimensions(bias, keys if bias.shape[-1] == 1 else bias.shape[-1])
        _check.varlen_bias(bias.shape, rows, keys)
        arrays["bias"] = bias
    return _describe_problem(q, k, v, batch, request, arrays, bounds, False)


def _expanded(array: Array, shape: tuple[int, int]) -> Array:
    return np.ascontiguousarray(np.broadcast_to(array, shape))


def _longest(arrays: dict[str, Array], side: str) -> int | None:
    """The longest sequence of queries ("q") or keys ("k"); None if only its pages limit it."""
    lengths = arrays.get(f"seqused_{side}")
    if lengths is None and f"cu_seqlens_{side}" in arrays:
        lengths = np.diff(arrays[f"cu_seqlens_{side}"])
    return None if lengths is None else int(lengths.max(initial=0))


def _describe_problem(
    q: Array, k: Array, v: Array, batch: int, request: Request, arrays: dict[str, Array],
    bounds: dict[str, int], heads_first: bool,
) -> _Problem:  # fmt: skip
    heads, head_dim = q.shape[-2:]
    if _check.flag("precise_backward", request.precise_backward):
        raise ValueError(
            "precise_backward is True, but arrays have no autograd that keeps out: pass an out of "
            "out_dtype float32 to attention_backward instead"
        )
    numbers = _check.numbers(request)
    dtypes, sizes = (q.dtype, k.dtype), (batch, heads, k.shape[-2])
    arrays |= _check.per_head(request, _float32, _expanded, dtypes, sizes)
    shard = request.shard
    if numbers["dropout_p"] > 0.0 and shard.dropout_state is None:
        arrays["dropout_state"] = np.random.randint(0, 2**62, 2, dtype=np.int64)
    elif numbers["dropout_p"] > 0.0:
        arrays["dropout_state"] = np.ascontiguousarray(shard.dropout_state, dtype=np.int64)
    diagonal = _int32("diagonal", shard.diagonal, (batch,))
    if diagonal is not None:
        arrays["diagonal"] = diagonal
    if request.mask is not None:
        lengths = (q.shape[1], k.shape[1]) if q.ndim == 4 else None
        arrays |= _mask(request.mask, batch, heads, lengths)
        numbers |= request.mask.numbers()
    floats = _out_dtypes(q.dtype)
    out_dtype = _check.out_dtype(request.out_dtype, q.dtype, floats)
    bias = arrays.get("bias")
    if bias is not None:
        out = floats[_check.out_dtype_name(out_dtype, q.dtype)]
        _check.bias_dtype(bias.dtype, q.dtype, floats, out)
    known: dict[str, Any] = {name: view(array) for name, array in arrays.items()}
    known |= bounds | numbers
    optional = _describe.OptionalFields(
        **known,
        bias_dtype=0 if bias is None else _abi.DTYPES[str(bias.dtype)],
        scale=_scale(request.scale, head_dim),
        kv_float8=_check.is_float8(k.dtype),
        row_offset=shard.row_offset,
        key_offset=shard.key_offset,
        batch_offset=shard.batch_offset,
        head_offset=shard.head_offset,
        heads_q_total=shard.heads_q_total,
        out_dtype=out_dtype,
    )
    dtype = _abi.DTYPES[str(q.dtype)]
    a = _describe.attention(view(q), view(k), view(v), dtype, optional)
    bias_shape = () if request.bias is None else as_array("bias", request.bias).shape
    return _Problem(a, q, k, v, arrays, heads_first, bias_shape)


def _mask(mask: Any, batch: int, heads: int, lengths: tuple[int, int] | None) -> dict[str, Array]:
    from . import masks

    masks.check(mask, batch, heads, lengths)
    arrays = [np.ascontiguousarray(as_array("the array of mask", x)) for x in mask.arguments()]
    return dict(zip(("mask_first", "mask_entries", "mask_bits"), arrays, strict=False))


def view(array: Array) -> View:
    """The pointer, shape and strides (in elements) of an array."""
    size = array.itemsize
    return View(array.ctypes.data, array.shape, tuple(step // size for step in array.strides))


def _check_arrays(q: Any, k: Any, v: Any) -> tuple[Array, Array, Array]:
    arrays = as_array("q", q), as_array("k", k), as_array("v", v)
    q, k, v = arrays
    if str(q.dtype) not in (*_FLOATS, _FLOAT8):
        raise TypeError(
            f"q has dtype {q.dtype}, but must be float32, float16 or, from ml_dtypes, bfloat16 or "
            "float8_e4m3fn"
        )
    _check.key_dtype("k", k.dtype, k.dtype, q.dtype)
    _check.key_dtype("v", v.dtype, k.dtype, q.dtype)
    return _columns(arrays[0]), _columns(arrays[1]), _columns(arrays[2])


def _columns(array: Array) -> Array:
    """The array, copied unless its last dimension is contiguous and all elements are aligned."""
    steps = [step % array.itemsize for step in array.strides]
    usable = not any(steps) and array.flags.aligned and not _negative(array)
    if usable and (array.ndim == 0 or array.shape[-1] <= 1 or array.strides[-1] == array.itemsize):
        return array
    return array.copy(order="C")


def _negative(array: Array) -> bool:
    return any(step < 0 for step in array.strides)


def _int32(name: str, value: Any, dims: tuple[int | None, ...]) -> Array | None:
    if value is None:
        return None
    array = as_array(name, value)
    if array.dtype != np.int32:
        raise TypeError(f"{name} has dtype {array.dtype}, but must be int32")
    _check.shape(name, array, dims, "see tilewise.attention_varlen")
    return np.ascontiguousarray(array)


def _float32(name: str, value: Any) -> Array:
    array = as_array(name, value)
    if str(array.dtype) not in (*_FLOATS, "float64"):
        raise TypeError(f"{name} has dtype {array.dtype}, but must be float32")
    return np.ascontiguousarray(array, dtype=np.float32)


def _four_dimensions(bias: Array, keys: int) -> Array:
    shape = (1,) * (4 - bias.ndim) + bias.shape
    wide: Array = np.broadcast_to(bias.reshape(shape), (*shape[:3], keys))
    expanded = any(wide.strides[i] == 0 and wide.shape[i] > 1 for i in range(4))
    return np.ascontiguousarray(wide) if expanded else _columns(wide)


def _scale(scale: Any, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if hasattr(scale, "shape") and hasattr(scale, "item"):
        scale = as_array("scale", scale)
        if scale.size != 1:
            raise ValueError(f"scale has shape {list(scale.shape)}, but must have one element")
        scale = scale.item()
    return _check.scale_number(scale)


# --- calls ----------------------------------------------------------------------------------------


def launch(function: Any, structs: Sequence[Any], workspace_bytes: int) -> None:
    """Calls a pass of the C library on its structs, with an aligned workspace of this size."""
    memory = np.empty(workspace_bytes + _WORKSPACE_ALIGNMENT, dtype=np.uint8)
    address = memory.ctypes.data + (-memory.ctypes.data) % _WORKSPACE_ALIGNMENT
    status = function(*map(ctypes.byref, structs), address, workspace_bytes)
    _abi.check(c_library(), status)


def _new_rows(shape: tuple[int, ...], dtype: Any, heads_first: bool) -> Array:
    """An empty array [batch, row, head, column], stored as "bhsd" if heads_first."""
    if not heads_first or len(shape) != 4:
        return np.empty(shape, dtype=dtype)
    batch, rows, heads, columns = shape
    return np.empty((batch, heads, rows, columns), dtype=dtype).swapaxes(1, 2)


def _forward_results(problem: _Problem, request: Request) -> Any:
    """out, and the other results that the request asks for."""
    max_logits = new_max_logits(problem.attention, request)
    return request.results(*_forward(problem), max_logits)


def new_max_logits(a: Any, request: Request) -> Array | None:
    """The array [B, Hq] that the forward of the struct will fill, if the request asks for it."""
    if not _check.flag("return_max_logits", request.return_max_logits):
        return None
    max_logits = np.empty((a.batch, a.heads_q), dtype=np.float32)
    _describe.set_max_logits(a, view(max_logits))
    return max_logits


def _forward(problem: _Problem) -> tuple[Array, Array]:
    library, a, q, out = c_library(), problem.attention, problem.q, problem.new_out()
    lse = np.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=np.float32)
    _describe.set_output(a, view(out), view(lse))
    size = _describe.plan(library, a, None).workspace_bytes
    launch(library.tilewise_forward, [a], size)
    return (out.swapaxes(1, 2) if problem.heads_first else out), lse
