"""The operators' autograd kernels, and the derivatives that are refused.

The kernels replace ``torch.library.register_autograd`` at a tenth of its overhead (0.04 ms instead
of 0.4 ms: that function parses the schema again in every call). They also refuse forward-mode
tangents, which it drops silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_NO_TRANSFORM = (
    "tilewise: torch.func.grad, vjp and jacrev take no derivative of the operators themselves, "
    "which are what torch.compile traces; use them on tilewise.attention without a compiler, or "
    "take the derivative by autograd"
)

_NO_TANGENTS = (
    "tilewise: attention_with_kvcache has no forward-mode derivative, nor has an operator that is "
    "called directly or whose tangents come from outside a compiled function; call "
    "tilewise.attention or attention_varlen, and make dual tensors inside the compiled function"
)


# A context in which operators skip autograd, for calls whose derivatives are recorded elsewhere or
# not at all.
below_autograd = torch._C._AutoDispatchBelowAutograd
# The level of the innermost active transform of torch.func, or None.
transform_level = torch._C._functorch.maybe_current_level


def is_transformed() -> bool:
    """Whether a transform of torch.func is active."""
    return transform_level() is not None


def no_third_derivative(_ctx: Any, *_grads: Any) -> Any:
    raise RuntimeError(
        "tilewise: attention has first and second derivatives; third ones are not defined. "
        "backward() of a loss that contains a tangent is one inside forward_ad.dual_level(): call "
        "it after that block"
    )


def no_twice_forward_mode(_ctx: Any, *_tangents: Any) -> Any:
    raise RuntimeError(
        "tilewise: forward mode over forward mode (jvp of jvp, jacfwd of jacfwd) is not defined "
        "for attention; for second derivatives combine torch.func.jvp with torch.func.grad, or "
        "jacfwd with jacrev"
    )


def _refuse_tangents(arguments: tuple[Any, ...]) -> None:
    """Refuses dual tensors, which are always at level 0.

    Under torch.compile, only this kernel sees dual tensors made outside the compiled function.
    """
    if forward_ad._current_level < 0 and not is_transformed():
        return
    for value in arguments:
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value, level=0).tangent is not None:
            raise RuntimeError(_NO_TANGENTS)


def register(
    library: torch.library.Library, name: str, function: type[torch.autograd.Function] | None
) -> None:
    """Registers the operator's autograd kernel; without a function its results have no gradient."""
    operator = getattr(torch.ops.tilewise, name).default

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_tangents(arguments)
        if function and torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            if is_transformed():
                raise RuntimeError(_NO_TRANSFORM)
            return function.apply(*arguments)
        with below_autograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    library.impl(name, kernel, "Autograd", with_keyset=True)
