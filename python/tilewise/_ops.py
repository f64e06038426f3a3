"""Calls, derivatives and vmap of the PyTorch operators ``forward`` and ``append_kv``.

``_schemas`` defines all operators, ``_derivatives`` has those that differentiate ``forward``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import below_autograd, is_transformed
from ._autograd import register as register_autograd
from ._derivatives import (
    FORWARD,
    call_backward,
    call_jvp,
    differentiable,
    materialized_bias,
    spread,
    tangents_of,
    wanted_of,
)
from ._fold import fold, fold_options, foldable, one_by_one, unfold
from ._options import (
    OPTION_COUNT,
    TENSOR_COUNT,
    Options,
    contiguous_columns,
    has_lse_low,
)
from ._schemas import library, options_of

WITH_LSE_LOW = True  # the last argument of a forward whose lse a backward takes


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator, through as few of PyTorch's dispatch layers as possible."""
    arguments = (q, k, v, *options)
    tensors = (q, k, v, *options[:TENSOR_COUNT])
    if torch.compiler.is_compiling():
        return _traced_forward(q, k, v, options)
    if is_transformed() or forward_ad._current_level >= 0:
        return _without_lse_low(_Forward.apply(*arguments, WITH_LSE_LOW), q)
    if torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors):
        return _EagerForward.apply(*arguments, WITH_LSE_LOW)
    with below_autograd():
        return torch.ops.tilewise.forward(*arguments)


_NO_JVP_OF_VMAP = (
    "tilewise: torch.compile cannot trace forward mode over torch.func.vmap (a jvp of a function "
    "that calls vmap); take the vmap of the jvp, or do not compile it"
)


def _traced_forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``forward`` for torch.compile, which traces operators.

    An operator loses the tangents of its arguments, and torch.compile those of a function's jvp:
    dual tensors are taken apart before the operators and made after them.
    """
    arguments = (q, k, v, *options)
    tensors: tuple[Any, ...] = arguments[: 3 + TENSOR_COUNT]
    if forward_ad._current_level >= 0 and any(
        x is not None and torch._C._functorch.is_batchedtensor(x) for x in tensors
    ):
        raise RuntimeError(_NO_JVP_OF_VMAP)
    parts = [(x, None) if x is None else forward_ad.unpack_dual(x) for x in tensors]
    if all(tangent is None for _, tangent in parts):
        if not (
            torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        ):
            return torch.ops.tilewise.forward(*arguments)
        return _without_lse_low(torch.ops.tilewise.forward(*arguments, WITH_LSE_LOW), q)
    primals: list[Any] = [primal for primal, _ in parts]
    tangents = tangents_of(tuple(tangent for _, tangent in parts), FORWARD)
    options = Options(*primals[3:], *options[TENSOR_COUNT:])
    state = (*primals[:3], *torch.ops.tilewise.forward(*primals[:3], *options, WITH_LSE_LOW))
    out_tangent, lse_tangent = call_jvp(state, tangents, options)
    return (
        forward_ad.make_dual(state[3], out_tangent),
        forward_ad.make_dual(state[4][0], lse_tangent),
    )


def forward_alone(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """``forward`` without a derivative; a tangent is refused."""
    return _alone(torch.ops.tilewise.forward, (q, k, v, *options))


def forward_max_logits_alone(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the largest logits as a third result."""
    return _alone(torch.ops.tilewise.forward_max_logits, (q, k, v, *options))


def append_kv(*arguments: Any) -> Tensor:
    """The operator, which has no derivative; a tangent is refused."""
    return _alone(torch.ops.tilewise.append_kv, arguments)


def _alone(operator: Any, arguments: tuple[Any, ...]) -> Any:
    if torch.compiler.is_compiling() or is_transformed() or forward_ad._current_level >= 0:
        return operator(*arguments)
    with below_autograd():
        return operator(*arguments)


def _without_lse_low(results: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = results
    return out, lse[0] if has_lse_low(lse, q) else lse


# --- derivatives ----------------------------------------------------------------------------------


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.set_materialize_grads(False)
    tensors = (q, k, v, *output, *options[:TENSOR_COUNT])
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0 or is_transformed():
        ctx.save_for_forward(*tensors)
    ctx.numbers = tuple(options[TENSOR_COUNT:OPTION_COUNT])


def _to_pages(rows: Tensor, pages: Tensor, block_table: Tensor) -> Tensor:
    """The sum per page of the gradients of keys, from [B, width * page_size, H, D].

    Table entries past the keys in use may have any value: the gradients there are 0, so adding them
    to some page changes nothing.
    """
    count, size, heads, columns = pages.shape
    total = rows.new_zeros((count, size, heads, columns), dtype=torch.float32)
    if count == 0 or block_table.numel() == 0:
        return total.to(pages.dtype)
    index = block_table.reshape(-1).to(torch.int64).clamp(0, count - 1)
    per_page = rows.reshape(index.shape[0], size, heads, columns).to(torch.float32)
    return total.index_add(0, index, per_page).to(pages.dtype)


def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    results: list[Tensor | None] = [None] * (3 + OPTION_COUNT + 1)  # the last is with_lse_low
    wanted = wanted_of(ctx.needs_input_grad, FORWARD)
    if wanted == 0 or (dout is None and dlse is None):
        return tuple(results)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = materialized_bias(Options(*tensors, *ctx.numbers), wanted)
    dout = torch.zeros_like(out) if dout is None else contiguous_columns(dout)
    if dlse is not None:
        dlse = contiguous_columns(dlse[0] if has_lse_low(dlse, q) else dlse)
    grads = call_backward(dout, dlse, q, k, v, out, lse, *options, wanted)
    spread(grads, wanted, results, differentiable(FORWARD), options)
    if options.block_table is not None:
        for position, pages in ((1, k), (2, v)):
            rows = results[position]
            if rows is not None:
                results[position] = _to_pages(rows, pages, options.block_table)
    return tuple(results)


def jvp(ctx: Any, *given: Tensor | None) -> tuple[Tensor, Tensor]:
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    tangents = tangents_of(given, FORWARD)
    options = Options(*tensors, *ctx.numbers)
    out_tangent, lse_tangent = call_jvp((q, k, v, out, lse), tangents, options)
    if has_lse_low(lse, q):
        lse_tangent = torch.stack((lse_tangent, torch.zeros_like(lse_tangent)))
    return out_tangent, lse_tangent


def _call_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return (
        _Forward.apply(*arguments) if is_transformed() else torch.ops.tilewise.forward(*arguments)
    )


# --- vmap -----------------------------------------------------------------------------------------
# Problems of equal lengths fold the mapped dimension into the batch and need one call. Problems
# without a batch dimension to fold into (varlen, pages, a mapped scale or sink, dropout bits that
# are numbered by batch row) make one call per element, which is always correct.


def _vmap_rule(call: Any) -> Any:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        options, with_lse_low = options_of(args[3:])
        in_dims = in_dims + (None,) * (3 + OPTION_COUNT + 1 - len(in_dims))
        args = (*args[:3], *options, with_lse_low)
        if not foldable(options, in_dims[3:-1]):
            return one_by_one(call, info, in_dims, args)
        count = info.batch_size
        q, k, v = (fold(args[i], in_dims[i], count) for i in range(3))
        folded = fold_options(options, in_dims[3:-1], count, q.shape[0] // count)
        out, lse = call(q, k, v, *folded, with_lse_low)
        if with_lse_low:
            lse = lse.unflatten(1, (count, lse.shape[1] // count))
            return (unfold(out, count), lse), (0, 1)
        return (unfold(out, count), unfold(lse, count)), (0, 0)

    return rule


def _append_kv_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """One append per element, into a view of its slice of the caches."""
    k_dim, v_dim = in_dims[:2]
    if k_dim is None or v_dim is None:
        name = "k_cache" if k_dim is None else "v_cache"
        raise RuntimeError(
            f"tilewise: {name} is not mapped by torch.func.vmap, but every element appends its own "
            "keys: the caches must be mapped like the keys"
        )
    rotated = []
    for i in range(info.batch_size):
        picked = [
            x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)
        ]
        rest = [contiguous_columns(x) if isinstance(x, Tensor) else x for x in picked[2:]]
        rotated.append(torch.ops.tilewise.append_kv(*picked[:2], *rest))
    return torch.stack(rotated), 0


torch.library.register_vmap(
    "tilewise::forward", _vmap_rule(torch.ops.tilewise.forward), lib=library
)
torch.library.register_vmap("tilewise::append_kv", _append_kv_vmap, lib=library)


# --- autograd -------------------------------------------------------------------------------------


class _EagerForward(torch.autograd.Function):
    """The operator for eager calls without tangents, which skip the overhead of ``_Forward``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            results = torch.ops.tilewise.forward(*arguments)
            returned = _without_lse_low(results, arguments[0])
        setup_context(ctx, arguments, results)
        return returned

    backward = staticmethod(backward)


class _Forward(torch.autograd.Function):
    """The operator for every mode of autograd, and for torch.func and torch.compile."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        with below_autograd():
            return torch.ops.tilewise.forward(*arguments)

    setup_context = staticmethod(setup_context)
    backward = staticmethod(backward)
    jvp = staticmethod(jvp)
    vmap = staticmethod(_vmap_rule(_call_forward))


register_autograd(library, "forward", _Forward)
register_autograd(library, "append_kv", None)
