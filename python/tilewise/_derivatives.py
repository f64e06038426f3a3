"""The operators ``backward``, ``jvp`` and ``second`` as functions of PyTorch's autograd.

With ``_Forward`` of ``_ops`` they close the derivatives of attention up to the second order:

====================  ========================  ===========================================
function              its reverse mode          its forward mode
====================  ========================  ===========================================
``_Forward``          ``Backward``              ``Jvp``
``Backward``          ``Jvp`` and ``Second``    ``Second``, or ``Backward`` (see below)
``Jvp``               ``Second``, ``Backward``  refused
``Second``            refused                   refused
====================  ========================  ===========================================

The forward mode of ``Backward`` is ``Backward`` itself if only dout and dlse have tangents, because
it is linear in these. All derivatives are total: the arguments out and lse depend on the other
arguments, so nothing flows through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _flop_counters, _schemas
from ._autograd import below_autograd, is_transformed, no_third_derivative, no_twice_forward_mode
from ._autograd import register as register_autograd
from ._fold import fold, fold_lse, fold_options, foldable, one_by_one, unfold
from ._options import (
    OPTION_COUNT,
    TANGENT_COUNT,
    TENSOR_COUNT,
    WANT_BIAS,
    WANT_BITS,
    WANT_SCALE,
    WANT_SINKS,
    Options,
    contiguous_columns,
    has_lse_low,
)

Tensors = tuple[Tensor | None, ...]

_TENSOR_OPTIONS = tuple(Options._fields.index(name) for name in ("bias", "sinks", "scale_tensor"))
_SLOPES = Options._fields.index("alibi_slopes")


class ArgumentPositions(NamedTuple):
    """The positions of an operator's arguments: q (before k and v), lse, the first option, and the
    first of the six tangents; -1 for what it does not take.
    """

    q: int
    lse: int
    options: int
    tangents: int = -1


# Functions, because PyTorch 2.10 cannot trace properties of a named tuple.
def differentiable(at: ArgumentPositions) -> tuple[int, ...]:
    """The positions of q, k, v, bias, sinks and scale_tensor, in the order of the WANT bits."""
    return (at.q, at.q + 1, at.q + 2, *(at.options + i for i in _TENSOR_OPTIONS))


def _slopes(at: ArgumentPositions) -> int:
    return at.options + _SLOPES


FORWARD = ArgumentPositions(q=0, lse=-1, options=3)
_BACKWARD = ArgumentPositions(q=2, lse=6, options=7)
_JVP = ArgumentPositions(q=0, lse=4, options=5 + TANGENT_COUNT, tangents=5)
_SECOND = ArgumentPositions(q=0, lse=4, options=7 + TANGENT_COUNT + 4, tangents=7)


def bits_of(flags: Iterable[bool]) -> int:
    """The WANT bits of six flags."""
    return sum(bit for bit, flag in zip(WANT_BITS, flags, strict=True) if flag)


def wanted_of(needs: tuple[bool, ...], at: ArgumentPositions) -> int:
    """The WANT bits of the arguments that need a gradient."""
    if needs[_slopes(at)]:
        raise RuntimeError(
            "tilewise: alibi_slopes requires a gradient, but none is defined for it; "
            "pass alibi_slopes.detach(), or a bias computed from the slopes"
        )
    return bits_of(needs[i] for i in differentiable(at))


def tangents_of(given: Tensors, at: ArgumentPositions) -> Tensors:
    """The six tangents among those of all arguments; None stands for zeros."""
    if given[_slopes(at)] is not None:
        raise RuntimeError(
            "tilewise: alibi_slopes has a tangent, but no derivative is defined for it; pass "
            "alibi_slopes.detach(), or a bias computed from the slopes"
        )
    return tuple(given[i] for i in differentiable(at))


def _only(tensors: Tensors, wanted: int) -> Tensors:
    """The tensors whose bits are wanted; None for the others."""
    return tuple(x if wanted & bit else None for x, bit in zip(tensors, WANT_BITS, strict=True))


def materialized_bias(options: Options, wanted: int) -> Options:
    """The options, in which an expanded bias is copied if its elements get gradients."""
    bias = options.bias
    if bias is None or not wanted & WANT_BIAS:
        return options
    expanded = any(bias.stride(i) == 0 and bias.shape[i] > 1 for i in range(3))
    if not expanded:
        return options
    # Tensor.contiguous() returns a bias without elements as it is.
    return options._replace(bias=bias.clone(memory_format=torch.contiguous_format))


def spread(
    grads: tuple[Tensor, ...], wanted: int, into: list[Any], at: tuple[int, ...], options: Options
) -> None:
    """Writes the wanted gradients to their positions; dbias gets the dtype of the bias."""
    for grad, bit, position in zip(grads, WANT_BITS, at, strict=True):
        if wanted & bit:
            bias = options.bias if bit == WANT_BIAS else None
            into[position] = grad if bias is None else grad.to(bias.dtype)


def _like_bias(tangents: Tensors, options: Options) -> Tensors:
    """The tangents with that of the bias in its dtype: dbias, from which it comes, is float32."""
    at = WANT_BITS.index(WANT_BIAS)
    bias, tangent = options.bias, tangents[at]
    if bias is None or tangent is None:
        return tangents
    return (*tangents[:at], tangent.to(bias.dtype), *tangents[at + 1 :])


def _plain_lse(lse: Tensor | None, q: Tensor) -> Tensor | None:
    """lse, or a tangent or gradient of it, without the part that belongs to lse_low."""
    return lse[0] if lse is not None and has_lse_low(lse, q) else lse


# --- calls ----------------------------------------------------------------------------------------


def call_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    """The operator, through as few of PyTorch's dispatch layers as possible.

    The gradient of a float32 out is rounded to the dtype of q, because it is a factor of products
    that are computed in that dtype.
    """
    _flop_counters.register_if_active()
    return _call(Backward, torch.ops.tilewise.backward, dout.to(q.dtype), dlse, q, *arguments)


def call_jvp(state: Sequence[Tensor], tangents: Tensors, options: Options) -> tuple[Tensor, Tensor]:
    """The tangents of out and lse (without lse_low); state: q, k, v, out and lse."""
    _check_second_order(state[1], options)
    return _call(Jvp, torch.ops.tilewise.jvp, *state, *_columns(tangents), *options)


def _call_second(
    state: Sequence[Tensor], out_tangents: Tensors, tangents: Tensors, cotangents: Tensors,
    options: Options, wanted: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``second``; state: q, k, v, out and lse. Cotangents: of out, lse and their tangents, those
    of out and its tangent rounded as in ``call_backward``.
    """
    _check_second_order(state[1], options)
    dout, dlse, dout_tangent, dlse_tangent = cotangents
    rounded = (None if x is None else x.to(state[0].dtype) for x in (dout, dout_tangent))
    dout, dout_tangent = rounded
    return _call(
        Second, torch.ops.tilewise.second, *state, *_columns(out_tangents), *_columns(tangents),
        *_columns((dout, dlse, dout_tangent, dlse_tangent)), *options, wanted,
    )  # fmt: skip


def _call(function: Any, operator: Any, *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return operator(*arguments)
    if is_transformed() or torch.is_grad_enabled() or forward_ad._current_level >= 0:
        return function.apply(*arguments)
    with below_autograd():
        return operator(*arguments)


def _columns(tensors: Tensors) -> Tensors:
    return tuple(None if x is None else contiguous_columns(x) for x in tensors)


def _check_second_order(k: Tensor, options: Options) -> None:
    """Refuses the options under which there is only a forward and a backward."""
    for name in ("block_table", "kv_batch_idx", "leftpad_k"):
        if getattr(options, name) is not None:
            raise RuntimeError(
                f"tilewise: {name} is given, but forward mode and second derivatives are not "
                "defined for caches; pass the keys and values themselves"
            )
    if k.element_size() == 1:
        raise RuntimeError(
            f"tilewise: k has dtype {k.dtype}, but forward mode and second derivatives need "
            "torch.float32, torch.float16 or torch.bfloat16"
        )
    if options.batch_invariant:
        raise RuntimeError(
            "tilewise: batch_invariant is True, but forward mode and second derivatives are only "
            "defined for False"
        )


# --- vmap -----------------------------------------------------------------------------------------
# Problems of equal lengths fold the mapped dimension into the batch and need one call. Problems
# without a batch dimension to fold into (varlen, a mapped scale or sink, dropout bits that are
# numbered by batch row), and gradients that are summed over the batch, make one call per element,
# which is always correct.


def _vmap_rule(call: Any, at: ArgumentPositions) -> Any:
    """The rule of an operator: all tensors before its options but lse have a batch first."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        end = at.options + OPTION_COUNT
        options = Options(*args[at.options : end])
        if _is_summed(args, at) or not foldable(options, in_dims[at.options : end]):
            return one_by_one(call, info, in_dims, args)
        count = info.batch_size
        tensors: list[Any] = [
            None if args[i] is None else fold(args[i], in_dims[i], count)
            for i in range(at.options)
            if i != at.lse
        ]
        q = tensors[at.q]
        tensors.insert(at.lse, fold_lse(args[at.lse], in_dims[at.lse], count, q.dim()))
        folded = fold_options(options, in_dims[at.options : end], count, q.shape[0] // count)
        results = call(*tensors, *folded, *args[end:])
        # An empty vector stands for a gradient that is not wanted.
        unfolded = tuple(
            x.expand(count, *x.shape) if x.dim() == 1 else unfold(x, count) for x in results
        )
        return unfolded, (0,) * len(unfolded)

    return rule


def _is_summed(args: tuple[Any, ...], at: ArgumentPositions) -> bool:
    """Whether the bias, the sinks or the scale has a tangent, or gets a gradient."""
    if args[at.options + OPTION_COUNT :] and args[-1] & (WANT_BIAS | WANT_SINKS | WANT_SCALE):
        return True
    tangents = args[at.tangents : at.tangents + TANGENT_COUNT] if at.tangents >= 0 else ()
    return any(x is not None for x in tangents[3:])


# --- functions ------------------------------------------------------------------------------------


class Backward(torch.autograd.Function):
    """The gradients, which are linear in dout and dlse."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return torch.ops.tilewise.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: tuple[Tensor, ...]) -> None:
        _save(ctx, inputs, _BACKWARD)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        needs, wanted = ctx.needs_input_grad, ctx.numbers[-1]
        results: list[Any] = [None] * len(needs)
        tangents = _only(cotangents, wanted)
        if all(x is None for x in tangents):
            return tuple(results)
        (dout, dlse, *state), options = _saved(ctx, _BACKWARD)
        tangents = _like_bias(tangents, options)
        out_tangents = call_jvp(state, tangents, options)
        results[:2] = (x if need else None for x, need in zip(out_tangents, needs, strict=False))
        second = wanted_of(needs, _BACKWARD)
        if second:
            options = materialized_bias(options, second)
            grads = _call_second(
                state, out_tangents, tangents, (None, None, dout, dlse), options, second
            )
            spread(grads, second, results, differentiable(_BACKWARD), options)
        return tuple(results)

    @staticmethod
    def jvp(ctx: Any, *given: Tensor | None) -> tuple[Tensor, ...]:
        (dout, dlse, *state), options = _saved(ctx, _BACKWARD)
        wanted, q = ctx.numbers[-1], state[0]
        tangents = tangents_of(given, _BACKWARD)
        dout_tangent, dlse_tangent = given[:2]
        if all(x is None for x in tangents):
            dout_tangent = torch.zeros_like(dout) if dout_tangent is None else dout_tangent
            return call_backward(*_columns((dout_tangent, dlse_tangent)), *state, *options, wanted)
        out_tangents = given[_BACKWARD.lse - 1], _plain_lse(given[_BACKWARD.lse], q)
        if any(x is None for x in out_tangents):
            out_tangents = call_jvp(state, tangents, options)
        cotangents = (dout_tangent, dlse_tangent, dout, dlse)
        return _call_second(state, out_tangents, tangents, cotangents, options, wanted)

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        return _vmap_rule(partial(_call, Backward, torch.ops.tilewise.backward), _BACKWARD)(
            *arguments
        )


class Jvp(torch.autograd.Function):
    """The tangents of out and lse, which are linear in those of the inputs."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            return torch.ops.tilewise.jvp(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _save(ctx, inputs, _JVP, output)

    @staticmethod
    def backward(
        ctx: Any, dout_tangent: Tensor | None, dlse_tangent: Tensor | None
    ) -> tuple[Any, ...]:
        needs = ctx.needs_input_grad
        results: list[Any] = [None] * len(needs)
        if dout_tangent is None and dlse_tangent is None:
            return tuple(results)
        (out_tangent, lse_tangent, *saved), options = _saved(ctx, _JVP, 2)
        state, tangents = saved[: _JVP.tangents], tuple(saved[_JVP.tangents :])
        if dout_tangent is None:
            dout_tangent = torch.zeros_like(out_tangent)
        wanted = wanted_of(needs, _JVP)
        wanted_tangents = bits_of(needs[_JVP.tangents : _JVP.options])
        options = materialized_bias(options, wanted | wanted_tangents)
        if wanted:
            grads = _call_second(
                state, (out_tangent, lse_tangent), tangents,
                (None, None, dout_tangent, dlse_tangent), options, wanted,
            )  # fmt: skip
            spread(grads, wanted, results, differentiable(_JVP), options)
        if wanted_tangents:
            cotangents = _columns((dout_tangent, dlse_tangent))
            grads = call_backward(*cotangents, *state, *options, wanted_tangents)
            at = tuple(range(_JVP.tangents, _JVP.options))
            spread(grads, wanted_tangents, results, at, options)
        return tuple(results)

    jvp = staticmethod(no_twice_forward_mode)

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        return _vmap_rule(partial(_call, Jvp, torch.ops.tilewise.jvp), _JVP)(*arguments)


class Second(torch.autograd.Function):
    """The gradients through the tangents."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        with below_autograd():
            return torch.ops.tilewise.second(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Saves nothing, because there is no third derivative."""

    backward = staticmethod(no_third_derivative)
    jvp = staticmethod(no_third_derivative)

    @staticmethod
    def vmap(*arguments: Any) -> Any:
        return _vmap_rule(partial(_call, Second, torch.ops.tilewise.second), _SECOND)(*arguments)


def _save(
    ctx: Any, inputs: tuple[Any, ...], at: ArgumentPositions, leading: tuple[Tensor, ...] = ()
) -> None:
    """Saves the leading tensors and the inputs for both modes; ``_saved`` gives them back."""
    ctx.set_materialize_grads(False)
    count = at.options + TENSOR_COUNT
    tensors = (*leading, *inputs[:count])
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)
    ctx.numbers = inputs[count:]


def _saved(ctx: Any, at: ArgumentPositions, leading: int = 0) -> tuple[tuple[Any, ...], Options]:
    """The saved tensors before the options, and the options."""
    tensors, end = ctx.saved_tensors, at.options + leading
    numbers = ctx.numbers[: OPTION_COUNT - TENSOR_COUNT]
    return tensors[:end], Options(*tensors[end:], *numbers)


for _name, _function, _at in (
    ("backward", Backward, _BACKWARD),
    ("jvp", Jvp, _JVP),
    ("second", Second, _SECOND),
):
    register_autograd(_schemas.library, _name, _function)
    _rule = _vmap_rule(getattr(torch.ops.tilewise, _name), _at)
    torch.library.register_vmap(f"tilewise::{_name}", _rule, lib=_schemas.library)
