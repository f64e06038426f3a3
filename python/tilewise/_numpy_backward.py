"""Gradients of attention on NumPy arrays, through ctypes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._requirements import require

require("tilewise on arrays", "numpy")

import numpy as np

from . import _abi, _check, _describe, _numpy
from ._describe import View
from ._library import c_library
from ._numpy import Array
from ._request import Request, Sequences


class Gradients(NamedTuple):
    """Gradients of attention, each in the shape of its input; None for an option that is off."""

    dq: Array  # in the dtype of q, as dk and dv
    dk: Array
    dv: Array
    dbias: Array | None  # float32
    dsinks: Array | None  # float32
    dscale: float


def attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, dlse: Any = None,
    causal: bool = False, window: _check.Window = _check.UNBOUNDED, scale: Any = None,
    softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None, sinks: Any = None,
    dropout_p: float = 0.0, layout: str = "bshd", cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, mask: Any = None,
) -> Gradients:  # fmt: skip
    """Gradients of ``attention`` on arrays, or of ``attention_varlen`` if cu_seqlens_q is given.

    q, k, v and all options are those of the forward; cu_seqlens_k, seqused_q and seqused_k belong
    to ``attention_varlen``.

    Args:
        dout: Gradient of out, in its shape and the dtype of q.
        out: Result of the forward, in the dtype of q or in float32 (``out_dtype``).
        lse: Result of the forward, float32.
        dlse: Gradient of lse, in its shape, float32; None is 0.
        dropout_p: As in the forward. The bits come from NumPy's global generator, which needs the
            seed that it had before the forward.
        layout: As in the forward; it has no effect on packed sequences (cu_seqlens_q).

    Returns:
        Gradients: dq, dk and dv in the shapes and dtypes of q, k and v; dbias and dsinks (None
        where the option is off) in float32; dscale as a number.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or range.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, mask=mask
    )
    sequences = Sequences(cu_seqlens_q, cu_seqlens_k, None, None, seqused_q, seqused_k)
    call = Differentiated(_numpy.prepare(q, k, v, layout, sequences, request))
    call.set_results(out, lse)
    return _backward(call, dout, dlse)


def _lse_low(problem: _numpy._Problem, lse: Array) -> Array:
    """The rounding error of lse in float32, from a second forward, because callers have only lse.
    It is 0 where the given lse is not that of the forward.
    """
    library, a, out = c_library(), problem.attention, problem.new_out()
    low, recomputed = np.empty_like(lse), np.empty_like(lse)
    _describe.set_output(a, _numpy.view(out), _numpy.view(recomputed))
    a.lse_low = low.ctypes.data
    size = _describe.plan(library, a, None).workspace_bytes
    _numpy.launch(library.tilewise_forward, [a], size)
    return np.where(recomputed == lse, low, np.float32(0))


def _incoming(name: str, value: Any, like: Array, heads_first: bool) -> Array:
    array = _numpy.as_array(name, value)
    if array.dtype != like.dtype:
        raise TypeError(f"{name} has dtype {array.dtype}, but must be {like.dtype}")
    array = array.swapaxes(1, 2) if heads_first and array.ndim == 4 else array
    _check.shape(name, array, like.shape, "the shape of the forward's result")
    return _numpy._columns(array)


class GradientArrays:
    """New arrays for all gradients of a problem, and the C struct that points to them."""

    def __init__(self, problem: _numpy._Problem) -> None:
        a, g, first = problem.attention, _abi.sized(_abi.Gradients), problem.heads_first
        self.struct, self.problem = g, problem
        varlen_q, varlen_k = a.cu_seqlens_q is not None, a.cu_seqlens_k is not None
        self.dq, self.dk, self.dv = (
            _numpy._new_rows(x.shape, x.dtype, first) for x in (problem.q, problem.k, problem.v)
        )
        g.dq = _describe.rows(_numpy.view(self.dq), varlen_q)
        g.dk, g.dv = (_describe.rows(_numpy.view(x), varlen_k) for x in (self.dk, self.dv))
        bias = problem.arrays.get("bias")
        self.dbias: Array | None = None
        self.dsinks: Array | None = None
        if bias is not None:
            self.dbias = np.empty(bias.shape, dtype=np.float32)
            dbias = _numpy.view(self.dbias)
            g.dbias = dbias.pointer
            strides = _describe.bias_strides(dbias)
            g.dbias_stride_batch, g.dbias_stride_head, g.dbias_stride_row = strides
            g.dbias_rows, g.dbias_keys = bias.shape[2:]
        if "sinks" in problem.arrays:
            self.dsinks = np.empty(a.heads_q, dtype=np.float32)
            g.dsinks = _numpy.view(self.dsinks).pointer
        self.dscale = np.empty(1, dtype=np.float32)
        g.dscale = _numpy.view(self.dscale).pointer

    def set_dlse(self, dlse: View) -> None:
        """Stores the incoming gradient of lse, which the caller keeps alive."""
        self.struct.dlse = dlse.pointer
        strides = _describe.lse_strides(dlse)
        self.struct.dlse_stride_batch, self.struct.dlse_stride_head = strides

    def gradients(self) -> Gradients:
        """The gradients after the launch, in the layout and with the bias shape of the caller."""
        first, dbias = self.problem.heads_first, self.dbias
        dq, dk, dv = (x.swapaxes(1, 2) if first else x for x in (self.dq, self.dk, self.dv))
        if dbias is not None:
            broadcast_over_keys = self.problem.bias_shape[-1] == 1
            dbias = dbias.sum(-1, keepdims=True) if broadcast_over_keys else dbias
            dbias = dbias.reshape(self.problem.bias_shape)
        return Gradients(dq, dk, dv, dbias, self.dsinks, float(self.dscale[0]))


class Differentiated:
    """A problem and the results of its forward, which every derivative starts from. It owns the
    arrays whose addresses the C structs hold.
    """

    def __init__(self, problem: _numpy._Problem) -> None:
        a, q = problem.attention, problem.q
        _check.differentiable(q)
        self.problem, self.attention, self.first = problem, a, problem.heads_first
        self.varlen_q, self.varlen_k = a.cu_seqlens_q is not None, a.cu_seqlens_k is not None
        self.kept: list[Array] = []
        shape = (*q.shape[:-1], problem.v.shape[-1])
        self.like_dout = self.like_out = np.broadcast_to(q[..., :1], shape)
        self.like_lse = np.broadcast_to(np.float32(0), (*q.shape[:-3], q.shape[-2], q.shape[-3]))

    def set_results(self, out: Any, lse: Any) -> None:
        """Stores the results of the forward in the C struct."""
        if _numpy.as_array("out", out).dtype == np.float32:
            self.attention.out_dtype = _abi.OUT_DTYPES["float32"]
            self.like_out = np.broadcast_to(np.float32(0), self.like_dout.shape)
        out = _incoming("out", out, self.like_out, self.first)
        lse = np.ascontiguousarray(_incoming("lse", lse, self.like_lse, False))
        low = self.keep(_lse_low(self.problem, lse))
        _describe.set_output(self.attention, self.keep(out), self.keep(lse))
        self.attention.lse_low = low.pointer

    def keep(self, array: Array) -> View:
        self.kept.append(array)
        return _numpy.view(array)

    def rows(self, name: str, value: Any, like: Array, varlen: bool) -> Any:
        """The C struct of an array with the shape of q, k, v or out."""
        return _describe.rows(self.keep(_incoming(name, value, like, self.first)), varlen)

    def lse(self, name: str, value: Any) -> View:
        """An array with the shape of lse."""
        array = _incoming(name, value, self.like_lse, False)
        return self.keep(np.ascontiguousarray(array))

    def gradient_arrays(self, dout: Any, dlse: Any) -> GradientArrays:
        """Arrays for the gradients, and the incoming gradients in their struct; None is 0."""
        results = GradientArrays(self.problem)
        if dout is not None:
            results.struct.dout = self.rows("dout", dout, self.like_dout, self.varlen_q)
        if dlse is not None:
            results.set_dlse(self.lse("dlse", dlse))
        return results


def _backward(call: Differentiated, dout: Any, dlse: Any) -> Gradients:
    library = c_library()
    a, results = call.attention, call.gradient_arrays(dout, dlse)
    size = _describe.plan(library, a, results.struct).workspace_bytes
    _numpy.launch(library.tilewise_backward, [a, results.struct], size)
    return results.gradients()
