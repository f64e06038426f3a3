"""Forward mode and second derivatives of attention on NumPy arrays, through ctypes."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._requirements import require

require("tilewise on arrays", "numpy")

import numpy as np

from . import _abi, _check, _describe, _numpy
from ._library import c_library
from ._numpy import Array
from ._numpy_backward import Differentiated, Gradients
from ._request import Request, Sequences


class Tangents(NamedTuple):
    """Derivatives of the inputs of attention along one direction; None is 0 and costs nothing.

    Each has the shape and dtype of its input, and scale is a number. ALiBi slopes have no tangent.
    """

    q: Any = None
    k: Any = None
    v: Any = None
    bias: Any = None
    sinks: Any = None
    scale: float | None = None


def attention_jvp(
    tangents: Tangents, q: Any, k: Any, v: Any, out: Any, lse: Any, *,
    causal: bool = False, window: _check.Window = _check.UNBOUNDED, scale: Any = None,
    softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None, sinks: Any = None,
    dropout_p: float = 0.0, layout: str = "bshd", cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, mask: Any = None,
) -> tuple[Array, Array]:  # fmt: skip
    """Tangents of out and lse: the derivative of ``attention`` along ``tangents`` (forward mode).

    q, k, v and all options are those of the forward; with cu_seqlens_q it is the derivative of
    ``attention_varlen``, and cu_seqlens_k, seqused_q and seqused_k belong to that call. It runs on
    the CPU in memory linear in the sequence length.

    Args:
        tangents: Tangents of the inputs.
        out: Result of the forward, in the dtype of q or in float32 (``out_dtype``).
        lse: Result of the forward, float32.
        dropout_p: As in the forward. The bits come from NumPy's global generator, which needs the
            seed that it had before the forward.
        layout: As in the forward; it has no effect on packed sequences (cu_seqlens_q).

    Returns:
        (out_tangent, lse_tangent) in the shapes and dtypes of out and lse. Rows that see no key
        have tangents of 0.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or range.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, mask=mask
    )
    call = _Call(q, k, v, layout, request, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
    call.set_results(out, lse)
    call.set_tangents(tangents)
    return call.jvp()


def attention_second(
    tangents: Tangents, out_tangent: Any, lse_tangent: Any, dout_tangent: Any, q: Any, k: Any,
    v: Any, out: Any, lse: Any, *, dlse_tangent: Any = None, dout: Any = None, dlse: Any = None,
    causal: bool = False, window: _check.Window = _check.UNBOUNDED, scale: Any = None,
    softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None, sinks: Any = None,
    dropout_p: float = 0.0, layout: str = "bshd", cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None, mask: Any = None,
) -> Gradients:  # fmt: skip
    """Gradients, with respect to the inputs, of a loss of the results and their tangents.

    The loss is dout . out + dlse . lse + dout_tangent . out_tangent + dlse_tangent . lse_tangent,
    whose four factors are constants here. Its gradients with respect to the tangents of the inputs
    are those of ``attention_backward`` with dout_tangent and dlse_tangent as dout and dlse. The
    page docs/c-api.md builds double backward and Hessian-vector products from these functions.

    Args:
        tangents: As in ``attention_jvp``.
        out_tangent: Result of ``attention_jvp``.
        lse_tangent: Result of ``attention_jvp``, float32.
        dout_tangent: Gradient of out_tangent, in its shape and the dtype of q.
        dlse_tangent: Gradient of lse_tangent, in its shape, float32; None is 0.
        dout: Gradient of out, in its shape and the dtype of q; None is 0.
        dlse: Gradient of lse, in its shape, float32; None is 0.

    All other arguments are those of ``attention_jvp``.

    Returns:
        Gradients, like ``attention_backward``.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape or range.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, mask=mask
    )
    call = _Call(q, k, v, layout, request, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k))
    call.set_results(out, lse)
    call.set_tangents(tangents)
    call.set_result_tangents(out_tangent, lse_tangent, dout_tangent, dlse_tangent)
    return call.second(dout, dlse)


class _Call(Differentiated):
    """A checked problem and its C structs."""

    def __init__(
        self, q: Any, k: Any, v: Any, layout: str, request: Request, lengths: tuple[Any, ...]
    ) -> None:
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, None, None, seqused_q, seqused_k)
        super().__init__(_numpy.prepare(q, k, v, layout, sequences, request))
        self.tangents = _abi.sized(_abi.Tangents)

    def set_tangents(self, given: Tangents) -> None:
        if not isinstance(given, Tangents):
            raise TypeError(
                f"tangents is a {type(given).__name__}, but must be a tilewise.Tangents"
            )
        t, problem = self.tangents, self.problem
        for name, like, varlen in (
            ("q", problem.q, self.varlen_q), ("k", problem.k, self.varlen_k),
            ("v", problem.v, self.varlen_k),
        ):  # fmt: skip
            value = getattr(given, name)
            if value is not None:
                setattr(t, name, self.rows(f"tangents.{name}", value, like, varlen))
        for name in ("bias", "sinks"):
            if getattr(given, name) is not None and name not in problem.arrays:
                raise ValueError(f"tangents.{name} is given, but {name} is None: it needs {name}")
        if given.bias is not None:
            array = _numpy.as_array("tangents.bias", given.bias)
            bias = problem.arrays["bias"]
            if array.dtype != bias.dtype:
                raise TypeError(f"tangents.bias has dtype {array.dtype}, but must be {bias.dtype}")
            _check.shape("tangents.bias", array, problem.bias_shape, "the shape of bias")
            wide = self.keep(_numpy._four_dimensions(array, bias.shape[-1]))
            t.bias = wide.pointer
            t.bias_stride_batch, t.bias_stride_head, t.bias_stride_row = _describe.bias_strides(
                wide
            )
        if given.sinks is not None:
            sinks = _numpy._float32("tangents.sinks", given.sinks)
            _check.shape("tangents.sinks", sinks, problem.arrays["sinks"].shape, "as sinks")
            t.sinks = self.keep(sinks).pointer
        if given.scale is not None:
            scale = np.array([_check.scale_number(given.scale)], dtype=np.float32)
            t.scale = self.keep(scale).pointer

    def set_lse_tangent(self, view: _describe.View) -> None:
        t = self.tangents
        t.lse = view.pointer
        t.lse_stride_batch, t.lse_stride_head = _describe.lse_strides(view)

    def set_result_tangents(self, out: Any, lse: Any, dout: Any, dlse: Any) -> None:
        t = self.tangents
        t.out = self.rows("out_tangent", out, self.like_out, self.varlen_q)
        self.set_lse_tangent(self.lse("lse_tangent", lse))
        t.dout = self.rows("dout_tangent", dout, self.like_dout, self.varlen_q)
        if dlse is not None:
            view = self.lse("dlse_tangent", dlse)
            t.dlse = view.pointer
            t.dlse_stride_batch, t.dlse_stride_head = _describe.lse_strides(view)

    def workspace_bytes(self, gradients: Any) -> int:
        """The size of the workspace of ``second``, or of ``jvp`` if there are no gradients."""
        info = _describe.plan(c_library(), self.attention, gradients, self.tangents)
        return int(info.workspace_bytes)

    def jvp(self) -> tuple[Array, Array]:
        out = self.problem.new_out()
        lse = np.empty(self.like_lse.shape, dtype=np.float32)
        self.tangents.out = _describe.rows(_numpy.view(out), self.varlen_q)
        self.set_lse_tangent(_numpy.view(lse))
        structs = [self.attention, self.tangents]
        _numpy.launch(c_library().tilewise_jvp, structs, self.workspace_bytes(None))
        return (out.swapaxes(1, 2) if self.first else out), lse

    def second(self, dout: Any, dlse: Any) -> Gradients:
        results = self.gradient_arrays(dout, dlse)
        structs = [self.attention, self.tangents, results.struct]
        size = self.workspace_bytes(results.struct)
        _numpy.launch(c_library().tilewise_second, structs, size)
        return results.gradients()
