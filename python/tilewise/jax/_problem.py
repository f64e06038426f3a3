"""The structs of the C ABI for a call on JAX arrays, made from shapes when XLA lowers the call.

A compiled computation learns the addresses of its buffers only when it runs. So the structs are
described once with NULL pointers, and a list says which pointer belongs to which buffer
(``bindings/jax/handlers.cpp``). Planning needs no addresses either: it gives the size of the
workspace, which XLA allocates as one more result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tilewise import _abi, _describe
from tilewise._check import is_float8
from tilewise._describe import OptionalFields, View
from tilewise._library import c_library

# While a struct is described, the pointer of buffer i is (i + 1) * _BUFFER. Planning reads
# alignments from pointers, and every buffer of XLA is at least this well aligned ...
_BUFFER = 256
# ... except that a buffer may be part of another one. A plan for pointers moved by this many bytes
# holds for every buffer whose elements are aligned.
_UNALIGNED = 8
_WORKSPACE_ALIGNMENT = 64

# Arrays whose two middle dimensions are exchanged in the layout "bhsd".
_ROWS = ("q", "k", "v", "out", "dout")


class Problem(NamedTuple):
    """Everything about a call except its arrays. Primitives take it as a static parameter."""

    options: tuple[str, ...]  # the given arrays besides q, k and v: fields of OptionalFields
    numbers: OptionalFields  # whose arrays are None here
    heads_first: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all arrays of the forward."""
        return ("q", "k", "v", *self.options)


class Call(NamedTuple):
    """The attributes of a handler's call, and the size in bytes of its last result."""

    attributes: dict[str, npt.NDArray[np.int64]]
    workspace_bytes: int


class Shape(NamedTuple):
    """The shape and dtype of an operand or a result."""

    shape: tuple[int, ...]
    dtype: Any


Shapes = dict[str, Shape]


def shapes_of(names: Sequence[str], arrays: Sequence[Any]) -> Shapes:
    """The shapes of arrays by their names."""
    return {n: Shape(tuple(a.shape), a.dtype) for n, a in zip(names, arrays, strict=True)}


def result_shapes(problem: Problem, given: Shapes) -> Shapes:
    """The results of a forward: out, lse, and lse_low in the shape of lse."""
    q = given["q"].shape
    out = Shape((*q[:-1], given["v"].shape[-1]), given["q"].dtype)
    rows, heads = (-2, -3) if problem.heads_first else (-3, -2)
    lead = () if len(q) == 3 else q[:1]
    lse = Shape((*lead, q[heads], q[rows]), np.dtype(np.float32))
    return {"out": out, "lse": lse, "lse_low": lse}


def gradient_shapes(given: Shapes, wanted: Sequence[str]) -> Shapes:
    """The gradients of the inputs named by ``wanted``. Those of pages are per sequence."""
    shapes = {}
    for name in wanted:
        shape, dtype = given[name]
        if name in ("k", "v") and "block_table" in given:
            batch, width = given["block_table"].shape
            shape = (batch, width * shape[1], *shape[2:])
        if name not in ("q", "k", "v"):
            dtype = np.dtype(np.float32)
        shapes[name] = Shape(shape, dtype)
    return shapes


def forward_call(problem: Problem, given: Shapes, results: Shapes, device: int) -> Call:
    """A forward with the operands ``given`` and the results ``results``, in this order."""

    def describe(shift: int) -> tuple[Any, None]:
        views = _views({**given, **results}, problem.heads_first, shift)
        return _attention(problem, given, views, device), None

    return _call(describe, device)


def backward_call(problem: Problem, given: Shapes, grads: Shapes, device: int) -> Call:
    """A backward with the operands ``given``, from q to dout or dlse, and the results ``grads``."""

    def describe(shift: int) -> tuple[Any, Any]:
        named = {f"d{name}": shape for name, shape in grads.items()}
        views = _views({**given, **named}, problem.heads_first, shift)
        return _attention(problem, given, views, device), _gradients(given, views)

    return _call(describe, device)


def _call(describe: Any, device: int) -> Call:
    library = c_library()
    a, g = describe(0)
    size = _describe.plan(library, a, g).workspace_bytes
    if device == _abi.CUDA:  # other kernels run where rows are not aligned
        size = max(size, _describe.plan(library, *describe(_UNALIGNED)).workspace_bytes)
    none = np.zeros(0, np.int64)
    attributes = {"mask_pointers": none, "mask": none}
    if a.mask:
        mask = a.mask.contents
        attributes = {"mask_pointers": _take_pointers(mask), "mask": _words(mask)}
        a.mask = None
    attributes |= {"attention_pointers": _take_pointers(a), "attention": _words(a)}
    if g is not None:
        attributes |= {"gradients_pointers": _take_pointers(g), "gradients": _words(g)}
    return Call(attributes, size + _WORKSPACE_ALIGNMENT)


def _views(shapes: Shapes, heads_first: bool, shift: int) -> dict[str, View]:
    """Row-major views [batch, row, head, column] of consecutive buffers."""
    views = {}
    for i, (name, (shape, _)) in enumerate(shapes.items()):
        strides = [1] * len(shape)
        for d in reversed(range(len(shape) - 1)):
            strides[d] = strides[d + 1] * shape[d + 1]
        if heads_first and len(shape) == 4 and name.removeprefix("d") in _ROWS:
            shape = (shape[0], shape[2], shape[1], shape[3])
            strides[1], strides[2] = strides[2], strides[1]
        views[name] = View((i + 1) * _BUFFER + shift, shape, tuple(strides))
    return views


def _attention(problem: Problem, given: Shapes, views: dict[str, View], device: int) -> Any:
    bias = given.get("bias")
    arrays: dict[str, Any] = {name: views[name] for name in problem.options}
    optional = problem.numbers._replace(
        **arrays,
        bias_dtype=0 if bias is None else _abi.DTYPES[str(bias.dtype)],
        kv_float8=is_float8(given["k"].dtype),
    )
    dtype = _abi.DTYPES[str(given["q"].dtype)]
    a = _describe.attention(views["q"], views["k"], views["v"], dtype, optional, (device, 0))
    _describe.set_output(a, views["out"], views["lse"])
    if "lse_low" in views:
        a.lse_low = views["lse_low"].pointer
    return a


def _gradients(given: Shapes, views: dict[str, View]) -> Any:
    g = _abi.sized(_abi.Gradients)
    varlen_q, varlen_k = "cu_seqlens_q" in given, "cu_seqlens_k" in given
    for name, varlen in (("dout", varlen_q), ("dq", varlen_q), ("dk", varlen_k), ("dv", varlen_k)):
        if name in views:
            setattr(g, name, _describe.rows(views[name], varlen))
    if "dlse" in views:
        g.dlse = views["dlse"].pointer
        g.dlse_stride_batch, g.dlse_stride_head = _describe.lse_strides(views["dlse"])
    if "dbias" in views:
        bias = views["dbias"]
        g.dbias = bias.pointer
        strides = _describe.bias_strides(bias)
        g.dbias_stride_batch, g.dbias_stride_head, g.dbias_stride_row = strides
        g.dbias_rows, g.dbias_keys = bias.shape[2:]
    if "dsinks" in views:
        g.dsinks = views["dsinks"].pointer
    if "dscale_tensor" in views:
        g.dscale = views["dscale_tensor"].pointer
    return g


def _take_pointers(struct: ctypes.Structure) -> npt.NDArray[np.int64]:
    """Pairs (offset in bytes, buffer) of the pointers in a struct, which become NULL."""
    pairs: list[int] = []
    for name, kind in struct._fields_:  # type: ignore[misc]
        offset = getattr(type(struct), name).offset
        if kind is ctypes.c_void_p and getattr(struct, name):
            pairs += (offset, getattr(struct, name) // _BUFFER - 1)
            setattr(struct, name, None)
        elif kind is _abi.Tensor and getattr(struct, name).data:
            tensor = getattr(struct, name)
            pairs += (offset + _abi.Tensor.data.offset, tensor.data // _BUFFER - 1)
            tensor.data = None
    return np.array(pairs, np.int64)


def _words(struct: ctypes.Structure) -> npt.NDArray[np.int64]:
    return np.frombuffer(bytes(struct), np.int64)
