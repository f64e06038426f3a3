"""The fast path of eager calls that give no tensor but q, k, v and index tensors, and no dropout.

The overhead of a call in Python matters if the problem is tiny. Nothing is checked twice here: the
operator checks its arguments, and a call that it does not take (or refuses) goes through the
general path of ``_torch``, which converts the arguments or raises its own error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._autograd import below_autograd, transform_level
from ._check import UNBOUNDED, Window, window_bounds
from ._options import WANT_K, WANT_Q, WANT_V

_forward = torch.ops.tilewise._plain_forward.default
_backward = torch.ops.tilewise._plain_backward.default
# The callable inside an overload saves one Python frame per call.
_forward = getattr(_forward, "_op", _forward)
_backward = getattr(_backward, "_op", _backward)
_general = torch.ops.tilewise.forward.default
_general = getattr(_general, "_op", _general)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
FAILURES = (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError)

_is_compiling = torch.compiler.is_compiling
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_dispatch_modes = torch._C._len_torch_dispatch_stack
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_deterministic_mode = torch._C._get_deterministic_algorithms


def is_eager() -> bool:
    """Whether no tracing, transform, dispatch mode, autocast or forward-mode AD is active."""
    return not (
        _is_compiling() or transform_level() is not None or _dispatch_modes() or _any_autocast()
        or forward_ad._current_level >= 0
    )  # fmt: skip


def _needs_dispatch(tensor: Tensor) -> bool:
    """Whether the tensor is a subclass or a negative view, which PyTorch's dispatcher must handle.
    The plain operators are registered for the autograd keys, above the layers that do so.
    """
    return type(tensor) is not Tensor or tensor.is_neg()


def attention(
    q: Any, k: Any, v: Any, causal: bool, window: Window, scale: Any, return_lse: bool,
    deterministic: bool, tf32: bool, layout: str,
) -> Any:  # fmt: skip
    """The result of ``attention`` without its other options; None: use the general path."""
    if _is_compiling():
        return None
    if (
        type(q) not in _PLAIN_TYPES
        or type(k) not in _PLAIN_TYPES
        or type(v) not in _PLAIN_TYPES
        or (scale is not None and type(scale) is not float)
        or type(deterministic) is not bool
        or type(tf32) is not bool
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
        or transform_level() is not None
        or _dispatch_modes()
        or _any_autocast()
        or forward_ad._current_level >= 0
    ):
        return None
    if layout == "bshd":
        heads_first = False
    elif layout == "bhsd":
        heads_first = True
    else:
        return None
    if window is UNBOUNDED and type(causal) is bool:
        left, right = -1, 0 if causal else -1
    else:
        left, right = window_bounds(causal, window)
    deterministic = deterministic or _deterministic_mode()
    try:
        if _grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            if _wrapped(q) or _wrapped(k) or _wrapped(v):  # outlived their torch.func transform
                return None
            if q.dtype == torch.float8_e4m3fn:  # the general path refuses it
                return None
            options = (scale, left, right, deterministic, tf32, heads_first)
            return _apply(q, k, v, options, return_lse)
        out, lse = _forward(q, k, v, scale, left, right, deterministic, tf32, heads_first)
    except FAILURES:
        return None
    return (out, lse) if return_lse else out


def indexed(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_q: Any, seqused_k: Any,
    block_table: Any, kv_batch_idx: Any, leftpad_k: Any, causal: bool, window: Window, scale: Any,
    softcap: Any, max_seqlen_q: int, max_seqlen_k: int, num_splits: Any, deterministic: bool,
    tf32: bool, batch_invariant: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out, lse), without a derivative, of sequences that index tensors describe; None: use the
    general path.
    """
    if (
        type(q) is not Tensor
        or type(k) is not Tensor
        or type(v) is not Tensor
        or (scale is not None and type(scale) is not float)
        or type(softcap) is not float
        or type(num_splits) is not int
        or type(deterministic) is not bool
        or type(tf32) is not bool
        or type(batch_invariant) is not bool
        or not is_eager()
    ):
        return None
    device = q.device  # a tensor on another device, such as "meta", can redirect the dispatch
    if k.device != device or v.device != device:
        return None
    for index in (
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, kv_batch_idx, leftpad_k,
    ):  # fmt: skip
        if index is None:
            continue
        if type(index) is not Tensor or index.dtype != torch.int32 or index.device != device:
            return None
    if window is UNBOUNDED and type(causal) is bool:
        left, right = -1, 0 if causal else -1
    else:
        left, right = window_bounds(causal, window)
    try:
        with below_autograd():  # the options are positional, in the order of Options
            return _general(
                q, k, v, None, None, None, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
                block_table, kv_batch_idx, leftpad_k, None, None, None, None, None, None,
                None, None, None,
                q.shape[-1] ** -0.5 if scale is None else scale, left, right, softcap, 0.0,
                max_seqlen_q, max_seqlen_k, num_splits,
                deterministic or _deterministic_mode(), tf32, False, batch_invariant,
                0, 0, 0, 0, 0, 0, 0, 0, 0, False,
            )  # fmt: skip
    except FAILURES:
        return None


def varlen(
    q: Any, k: Any, v: Any, sequences: tuple[Any, ...], causal: bool, window: Window, scale: Any,
    softcap: Any, deterministic: bool, tf32: bool, batch_invariant: bool,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """(out, lse) of ``attention_varlen`` without a gradient; None: use the general path.

    ``sequences`` has the fields of ``Sequences``.
    """
    (
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table
    ) = sequences  # fmt: skip
    if (cu_seqlens_k is None) == (block_table is None) or cu_seqlens_q is None:
        return None
    for bound in (max_seqlen_q, max_seqlen_k):
        if bound is not None and (type(bound) is not int or bound < 0):
            return None
    if _grad_enabled() and any(getattr(x, "requires_grad", True) for x in (q, k, v)):
        return None
    return indexed(
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, block_table, None, None,
        causal, window, scale, softcap, max_seqlen_q or 0, max_seqlen_k or 0, 0, deterministic,
        tf32, batch_invariant,
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    """The plain operator and its derivative."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: tuple[Any, ...], return_lse: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, *options, _ops.WITH_LSE_LOW)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        if not return_lse:
            return out
        return out, lse[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        wanted = needs[0] * WANT_Q + needs[1] * WANT_K + needs[2] * WANT_V
        if wanted == 0 or (dout is None and dlse is None):
            return None, None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else _ops.contiguous_columns(dout)
        dlse = None if dlse is None else _ops.contiguous_columns(dlse)
        if (
            _is_compiling()
            or _grad_enabled()
            or forward_ad._current_level >= 0
            or transform_level() is not None
            or _dispatch_modes()
            or _needs_dispatch(dout)
            or (dlse is not None and _needs_dispatch(dlse))
        ):
            grads = _general_backward(dout, dlse, q, k, v, out, lse, ctx.options, wanted)
        else:
            grads = _backward(dout, dlse, q, k, v, out, lse, *ctx.options, wanted)
        dq, dk, dv = grads
        return (
            dq if needs[0] else None,
            dk if needs[1] else None,
            dv if needs[2] else None,
            None,
            None,
        )


# Function.apply without its preparations for torch.func, whose calls take the general path.
_apply = super(torch.autograd.Function, _Attention).apply


def _general_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    plain: tuple[Any, ...], wanted: int,
) -> list[Tensor]:  # fmt: skip
    """The gradients by the general operator, which supports tracing, transforms and autograd."""
    scale, left, right, deterministic, tf32, heads_first = plain
    options = _ops.Options(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        window_left=left,
        window_right=right,
        deterministic=deterministic,
        tf32=tf32,
        heads_first=heads_first,
    )

    def rows(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if heads_first else tensor

    grads = _ops.call_backward(
        rows(dout), dlse, rows(q), rows(k), rows(v), rows(out), lse, *options, wanted
    )
    return [
        rows(grad) if wanted & bit else grad
        for grad, bit in zip(grads[:3], (WANT_Q, WANT_K, WANT_V), strict=True)
    ]
