"""The two primitives, forward and backward, and what XLA needs to compile and to map them.

Each lowers to a function that XLA may divide over devices (``_partition``). On each device the
function binds a second primitive, which lowers to the custom call.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from tilewise import _abi
from tilewise._library import jax_adapter

from . import _partition, _vmap
from ._problem import (
    Problem,
    Shapes,
    backward_call,
    forward_call,
    gradient_shapes,
    result_shapes,
    shapes_of,
)

_FORWARD = Primitive("tilewise_forward")
_BACKWARD = Primitive("tilewise_backward")
# JAX's platforms: the name by which XLA's registry knows each, and the device of the C ABI.
_PLATFORMS = {"cpu": ("cpu", _abi.CPU), "cuda": ("CUDA", _abi.CUDA)}


def forward(problem: Problem, arrays: dict[str, Any], *, with_lse_low: bool = False) -> list[Any]:
    """[out, lse], and lse_low, the rounding error of lse, if it is wanted."""
    operands = [arrays[name] for name in problem.inputs]
    return _FORWARD.bind(*operands, problem=problem, with_lse_low=with_lse_low)


def backward(problem: Problem, arrays: dict[str, Any], wanted: tuple[str, ...]) -> list[Any]:
    """The gradients of the inputs named by ``wanted``.

    ``arrays`` has the inputs and results of the forward with lse_low, dout, and perhaps dlse.
    """
    names = backward_inputs(problem, "dlse" in arrays)
    operands = [arrays[name] for name in names]
    return _BACKWARD.bind(*operands, problem=problem, wanted=wanted)


def backward_inputs(problem: Problem, with_dlse: bool) -> tuple[str, ...]:
    """The operands of the backward in their order."""
    dlse = ("dlse",) if with_dlse else ()
    return (*problem.inputs, "out", "lse", "lse_low", "dout", *dlse)


def _forward_shapes(operands: Any, problem: Problem, with_lse_low: bool) -> tuple[Shapes, Shapes]:
    given = shapes_of(problem.inputs, operands)
    results = result_shapes(problem, given)
    if not with_lse_low:
        del results["lse_low"]
    return given, results


def _backward_shapes(
    operands: Any, problem: Problem, wanted: tuple[str, ...]
) -> tuple[Shapes, Shapes]:
    with_dlse = len(operands) > len(backward_inputs(problem, False))
    given = shapes_of(backward_inputs(problem, with_dlse), operands)
    return given, gradient_shapes(given, wanted)


def _abstract(shapes: Any, *operands: Any, **static: Any) -> list[Any]:
    """The types of the results, which vary over the same axes of a shard_map as q."""
    _, results = shapes(operands, **static)
    return [
        operands[0].update(shape=shape, dtype=dtype, weak_type=False)
        for shape, dtype in results.values()
    ]


def _lower(shapes: Any, local: Primitive, ctx: Any, *operands: Any, **static: Any) -> Any:
    function: Any = functools.partial(local.bind, **static)
    context = ctx.module_context.axis_context
    # Without devices there is nothing to divide, and custom_partitioning fails.
    if getattr(context, "device_assignment", context) is not None:
        shapes_by_name = shapes(ctx.avals_in, **static)
        function = _partition.partitioned(function, static["problem"], *shapes_by_name)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lower_on_one_device(
    shapes: Any, call: Any, target: str, device: int, ctx: Any, *operands: Any, **static: Any
) -> Any:
    given, results = shapes(ctx.avals_in, **static)
    described = call(static["problem"], given, results, device)
    workspace = jax.core.ShapedArray((described.workspace_bytes,), jax.numpy.uint8)
    rule = jax.ffi.ffi_lowering(target)
    wide = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    return rule(wide, *operands, **described.attributes)[:-1]


def _not_differentiable(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "tilewise.jax: attention has first derivatives in reverse mode (jax.grad, jax.vjp), but "
        "no forward mode and no second derivatives"
    )


def _register_targets() -> None:
    library = jax_adapter()
    for platform, _ in _PLATFORMS.values():
        for name in ("forward", "backward"):
            handler = getattr(library, f"tilewise_jax_{name}_{platform.lower()}")
            jax.ffi.register_ffi_target(
                f"tilewise_{name}", jax.ffi.pycapsule(handler), platform=platform
            )


def _lower_with_devices(primitive: Primitive) -> None:
    """Asks JAX to say for which devices it lowers, which ``_lower`` needs to divide a call.

    JAX has no public name for this. Without it XLA gathers arrays that are sharded.
    """
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src import dispatch

        dispatch.prim_requires_devices_during_lowering.add(primitive)


def _define(primitive: Primitive, shapes: Any, call: Any, batch: Any) -> None:
    @functools.partial(jax.jit, static_argnums=0)
    def compiled(static: tuple[tuple[str, Any], ...], *operands: Any) -> list[Any]:
        return primitive.bind(*operands, **dict(static))

    def run(*operands: Any, **static: Any) -> list[Any]:
        with jax.disable_jit(False):
            return compiled(tuple(static.items()), *operands)

    local = Primitive(f"{primitive.name}_on_one_device")
    for each in (primitive, local):
        each.multiple_results = True
        each.def_abstract_eval(functools.partial(_abstract, shapes))
    primitive.def_impl(run)
    _lower_with_devices(primitive)
    mlir.register_lowering(primitive, functools.partial(_lower, shapes, local))
    for platform, (_, device) in _PLATFORMS.items():
        rule = functools.partial(_lower_on_one_device, shapes, call, primitive.name, device)
        mlir.register_lowering(local, rule, platform=platform)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = _not_differentiable


def _batch_forward(operands: Any, dims: Any, *, problem: Problem, with_lse_low: bool) -> Any:
    names = problem.inputs

    def call(arrays: dict[str, Any]) -> list[Any]:
        return forward(problem, arrays, with_lse_low=with_lse_low)

    return _vmap.batch(call, problem.options, names, operands, dims, summed=False)


def _batch_backward(operands: Any, dims: Any, *, problem: Problem, wanted: tuple[str, ...]) -> Any:
    with_dlse = len(operands) > len(backward_inputs(problem, False))
    names = backward_inputs(problem, with_dlse)

    def call(arrays: dict[str, Any]) -> list[Any]:
        return backward(problem, arrays, wanted)

    # Gradients that are summed over the batch would also be summed over the mapped dimension.
    summed = any(name not in ("q", "k", "v") for name in wanted)
    return _vmap.batch(call, problem.options, names, operands, dims, summed=summed)


_register_targets()
_define(_FORWARD, _forward_shapes, forward_call, _batch_forward)
_define(_BACKWARD, _backward_shapes, backward_call, _batch_backward)
