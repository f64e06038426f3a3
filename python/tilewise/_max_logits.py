"""Calls, derivatives and vmap of the PyTorch operator ``forward_max_logits``.

It is ``forward`` with a third result, the largest logits, which has no derivative. The derivatives
of out and lse are those of ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._autograd import below_autograd, is_transformed
from ._autograd import register as register_autograd
from ._fold import one_by_one
from ._options import OPTION_COUNT, TENSOR_COUNT, Options, has_lse_low
from ._schemas import library, options_of

Results = tuple[Tensor, Tensor, Tensor]


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Results:
    """(out, lse, max_logits)."""
    arguments = (q, k, v, *options)
    tensors = (q, k, v, *options[:TENSOR_COUNT])
    transformed = is_transformed() or forward_ad._current_level >= 0
    compiled = torch.compiler.is_compiling()
    needs_gradient = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad for x in tensors
    )
    if transformed and not compiled:
        out, lse, max_logits = _Forward.apply(*arguments, _ops.WITH_LSE_LOW)
    elif transformed or needs_gradient:
        out, lse, max_logits = torch.ops.tilewise.forward_max_logits(*arguments, _ops.WITH_LSE_LOW)
    else:
        return torch.ops.tilewise.forward_max_logits(*arguments)
    return out, lse[0] if has_lse_low(lse, q) else lse, max_logits


class _Forward(torch.autograd.Function):
    """The operator for every mode of autograd, and for torch.func and torch.compile."""

    @staticmethod
    def forward(*arguments: Any) -> Results:
        with below_autograd():
            return torch.ops.tilewise.forward_max_logits(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
        ctx.mark_non_differentiable(output[2])
        _ops.setup_context(ctx, inputs, output[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return _ops.backward(ctx, *grads[:2])

    @staticmethod
    def jvp(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return (*_ops.jvp(ctx, *given), None)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _vmap(_call_forward, info, in_dims, args)


def _call_forward(*arguments: Any) -> Results:
    operator = torch.ops.tilewise.forward_max_logits
    return _Forward.apply(*arguments) if is_transformed() else operator(*arguments)


def _vmap(call: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """One call per element."""
    options, with_lse_low = options_of(args[3:])
    in_dims = in_dims + (None,) * (3 + OPTION_COUNT + 1 - len(in_dims))
    return one_by_one(call, info, in_dims, (*args[:3], *options, with_lse_low))


torch.library.register_vmap(
    "tilewise::forward_max_logits",
    lambda info, in_dims, *args: _vmap(torch.ops.tilewise.forward_max_logits, info, in_dims, args),
    lib=library,
)
register_autograd(library, "forward_max_logits", _Forward)
