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

from tilewise import _abi, _check, _describe
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
_ROWS = ("q", "k", "v", "out")

# Endings of names: a tangent of an input or a result along the direction of a derivative, or the
# gradient of such a tangent; and a tangent of an input along a second direction.
_TANGENT = "_tangent"
_DIRECTION = "_direction"


def tangent_of(name: str) -> str:
    """The name of the tangent of an array; the one of dout is the gradient of out's tangent."""
    return name + _TANGENT


def direction_of(name: str) -> str:
    """The name of an input's tangent along the second direction of the two."""
    return name + _DIRECTION


def plain_name(name: str) -> str:
    """The name of the array whose shape the named one has: q for dq and for q_tangent."""
    plain = name.removesuffix(_TANGENT).removesuffix(_DIRECTION)
    return plain[1:] if plain in ("dq", "dk", "dv", "dout", "dlse") else plain


class Problem(NamedTuple):
    """Everything about a call except its arrays. Primitives take it as a static parameter."""

    options: tuple[str, ...]  # the given arrays besides q, k and v: fields of OptionalFields
    numbers: OptionalFields  # whose arrays are None here
    heads_first: bool = False
    inference: bool = False  # a call that has no derivative
    head_dim_v: int | None = None  # the first columns of k that are the values, and there is no v
    single_rows: bool = False  # each row of k and v is a page of one key

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of all arrays of the forward."""
        rows = ("q", "k", "v") if self.head_dim_v is None else ("q", "k")
        return (*rows, *self.options)


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


def result_shapes(problem: Problem, given: Shapes, wanted: Sequence[str]) -> Shapes:
    """The results named by ``wanted``.

    They are out, lse, lse_low and max_logits of a forward, tangents, or gradients, which have the
    names of their inputs. Gradients of pages are per sequence.
    """
    return {name: _result_shape(problem, given, name) for name in wanted}


def _result_shape(problem: Problem, given: Shapes, name: str) -> Shape:
    if name in problem.inputs:
        return _gradient_shape(given, name)
    q = given["q"].shape
    if plain_name(name) == "out":
        dtype = _check.out_dtype_name(problem.numbers.out_dtype, given["q"].dtype)
        columns = problem.head_dim_v or given["v"].shape[-1]
        return Shape((*q[:-1], columns), np.dtype(dtype))
    rows, heads = (-2, -3) if problem.heads_first else (-3, -2)
    if name == "max_logits":
        starts = given.get("cu_seqlens_q")
        batch = q[0] if starts is None else starts.shape[0] - 1
        return Shape((batch, q[heads]), np.dtype(np.float32))
    lead = () if len(q) == 3 else q[:1]
    return Shape((*lead, q[heads], q[rows]), np.dtype(np.float32))


def _gradient_shape(given: Shapes, name: str) -> Shape:
    shape, dtype = given[name]
    if name in ("k", "v") and "block_table" in given:
        batch, width = given["block_table"].shape
        shape = (batch, width * shape[1], *shape[2:])
    return Shape(shape, dtype if name in ("q", "k", "v") else np.dtype(np.float32))


def call(problem: Problem, given: Shapes, results: Shapes, device: int) -> Call:
    """A call with the operands ``given`` and the results ``results``, in this order.

    Their names say which pass it is: gradients are those of a backward, tangents make it ``jvp``,
    and both together ``second``.
    """

    def describe(shift: int) -> dict[str, Any]:
        named = {f"d{n}" if n in problem.inputs else n: shape for n, shape in results.items()}
        views = _views({**given, **named}, problem.heads_first, shift)
        views |= _views_of_cache(problem, views)
        structs = {"attention": _attention(problem, given, views, device), "gradients": None}
        if named.keys() != results.keys():
            structs["gradients"] = _gradients(given, views)
        if any(name.endswith(_TANGENT) for name in views):
            structs["tangents"] = _tangents(given, views)
        return structs

    library = c_library()
    structs = describe(0)
    size = _describe.plan(library, *structs.values()).workspace_bytes
    if device == _abi.CUDA:  # other kernels run where rows are not aligned
        unaligned = _describe.plan(library, *describe(_UNALIGNED).values())
        size = max(size, unaligned.workspace_bytes)
    none = np.zeros(0, np.int64)
    attributes = {"mask_pointers": none, "mask": none}
    a = structs["attention"]
    if a.mask:
        mask = a.mask.contents
        attributes = {"mask_pointers": _take_pointers(mask), "mask": _words(mask)}
        a.mask = None
    for name, struct in structs.items():
        if struct is not None:
            attributes[f"{name}_pointers"] = _take_pointers(struct)
            attributes[name] = _words(struct)
    return Call(attributes, size + _WORKSPACE_ALIGNMENT)


def _views(shapes: Shapes, heads_first: bool, shift: int) -> dict[str, View]:
    """Row-major views [batch, row, head, column] of consecutive buffers."""
    views = {}
    for i, (name, (shape, _)) in enumerate(shapes.items()):
        strides = [1] * len(shape)
        for d in reversed(range(len(shape) - 1)):
            strides[d] = strides[d + 1] * shape[d + 1]
        if heads_first and len(shape) == 4 and plain_name(name) in _ROWS:
            shape = (shape[0], shape[2], shape[1], shape[3])
            strides[1], strides[2] = strides[2], strides[1]
        views[name] = View((i + 1) * _BUFFER + shift, shape, tuple(strides))
    return views


def _views_of_cache(problem: Problem, views: dict[str, View]) -> dict[str, View]:
    """The views of k and v of a problem that reads them in another shape than they have.

    XLA may copy a cache whose shape is changed by an operation of its own.
    """
    k, v = views["k"], views.get("v", views["k"])
    if problem.head_dim_v is not None:
        v = k._replace(shape=(*k.shape[:-1], problem.head_dim_v))
    if not problem.single_rows:
        return {"k": k, "v": v}

    def rows(view: View) -> View:
        (pages, size, *columns), strides = view.shape, view.strides[1:]
        return view._replace(shape=(pages * size, 1, *columns), strides=(strides[0], *strides))

    return {"k": rows(k), "v": rows(v)}


def _attention(problem: Problem, given: Shapes, views: dict[str, View], device: int) -> Any:
    bias = given.get("bias")
    arrays: dict[str, Any] = {name: views[name] for name in problem.options}
    optional = problem.numbers._replace(
        **arrays,
        bias_dtype=0 if bias is None else _abi.DTYPES[str(bias.dtype)],
        kv_float8=_check.is_float8(given["k"].dtype),
    )
    dtype = _abi.DTYPES[str(given["q"].dtype)]
    a = _describe.attention(views["q"], views["k"], views["v"], dtype, optional, (device, 0))
    _describe.set_output(a, views["out"], views["lse"])
    if "lse_low" in views:
        a.lse_low = views["lse_low"].pointer
    if "max_logits" in views:
        _describe.set_max_logits(a, views["max_logits"])
    return a


def _gradients(given: Shapes, views: dict[str, View]) -> Any:
    g = _abi.sized(_abi.Gradients)
    names = {name: name for name in ("dout", "dq", "dk", "dv", "dlse")}
    _set_rows_and_lse(g, names, given, views)
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


def _tangents(given: Shapes, views: dict[str, View]) -> Any:
    t = _abi.sized(_abi.Tangents)
    names = {name: name + _TANGENT for name in ("q", "k", "v", "out", "dout", "lse", "dlse")}
    _set_rows_and_lse(t, names, given, views)
    if "bias_tangent" in views:
        bias = views["bias_tangent"]
        t.bias = bias.pointer
        t.bias_stride_batch, t.bias_stride_head, t.bias_stride_row = _describe.bias_strides(bias)
    if "sinks_tangent" in views:
        t.sinks = views["sinks_tangent"].pointer
    if "scale_tensor_tangent" in views:
        t.scale = views["scale_tensor_tangent"].pointer
    return t


def _set_rows_and_lse(
    struct: Any, names: dict[str, str], given: Shapes, views: dict[str, View]
) -> None:
    """Sets those fields of a struct whose views, named by ``names``, exist."""
    for field, name in names.items():
        view = views.get(name)
        if view is None:
            continue
        if plain_name(name) == "lse":
            setattr(struct, field, view.pointer)
            batch, head = _describe.lse_strides(view)
            setattr(struct, f"{field}_stride_batch", batch)
            setattr(struct, f"{field}_stride_head", head)
        else:
            keys = plain_name(name) in ("k", "v")
            starts = "cu_seqlens_k" if keys else "cu_seqlens_q"
            setattr(struct, field, _describe.rows(view, starts in given))


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
