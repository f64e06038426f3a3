"""The primitives, one per pass, and what XLA needs to compile and to map them.

All have the same form: operands are the inputs of a problem and the arrays named by ``given``, and
``wanted`` names the results (``_problem``). Each lowers to a function that XLA may divide over
devices (``_partition``). On each device the function binds a second primitive, which lowers to the
custom call.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from tilewise import _abi
from tilewise._library import jax_adapter

from . import _partition, _vmap
from ._problem import Problem, Shapes, call, plain_name, result_shapes, shapes_of

Arrays = dict[str, Any]
Names = tuple[str, ...]

FORWARD = Primitive("tilewise_forward")
BACKWARD = Primitive("tilewise_backward")
JVP = Primitive("tilewise_jvp")
SECOND = Primitive("tilewise_second")
# The change of the tangents of out and lse along a second direction of the inputs. There is no
# kernel for it: it exists because JAX derives the reverse mode, which is SECOND, from it.
JVP_OF_JVP = Primitive("tilewise_jvp_of_jvp")

# JAX's platforms: the name by which XLA's registry knows each, and the device of the C ABI.
# Planning refuses a pass for which the device has no kernel.
_PLATFORMS = {"cpu": ("cpu", _abi.CPU), "cuda": ("CUDA", _abi.CUDA)}
_PASSES = ("forward", "backward", "jvp", "second")


def bind(primitive: Primitive, problem: Problem, arrays: Arrays, wanted: Names) -> Arrays:
    """The results named by ``wanted``; ``arrays`` are the inputs and the other operands."""
    arrays = _unify(arrays)
    given = tuple(name for name in arrays if name not in problem.inputs)
    operands = [arrays[name] for name in (*problem.inputs, *given)]
    results = primitive.bind(*operands, problem=problem, given=given, wanted=wanted)
    return dict(zip(wanted, results, strict=True))


def _unify(arrays: Arrays) -> Arrays:
    """The arrays, each varying over every axis of a shard_map that one of them varies over.

    A primitive needs that, and the conversion sums the gradients of arrays that do not vary. Arrays
    that are sharded over explicit axes are gathered; XLA can divide a call over other axes
    (``_partition``).
    """
    arrays = {name: _gathered(array) for name, array in arrays.items()}
    axes = {name: _axes(array) for name, array in arrays.items()}
    every = frozenset().union(*axes.values())

    def varying(name: str) -> Any:
        missing = tuple(sorted(every - axes[name]))
        return jax.lax.pcast(arrays[name], missing, to="varying") if missing else arrays[name]

    return {name: varying(name) for name in arrays}


def _gathered(array: Any) -> Any:
    sharding = jax.typeof(array).sharding
    if all(axis is None for axis in sharding.spec):
        return array
    return jax.reshard(array, NamedSharding(sharding.mesh, PartitionSpec()))


def _axes(array: Any) -> frozenset[str]:
    """The axes of a shard_map that an array varies over."""
    kind = jax.typeof(array)
    return frozenset(kind.mat.varying if hasattr(kind, "mat") else kind.vma)


def _shapes(
    operands: Any, *, problem: Problem, given: Names, wanted: Names
) -> tuple[Shapes, Shapes]:
    shapes = shapes_of((*problem.inputs, *given), operands)
    return shapes, result_shapes(problem, shapes, wanted)


def _abstract(*operands: Any, **static: Any) -> list[Any]:
    """The types of the results, which vary over the same axes of a shard_map as q and are not
    sharded over explicit axes, as the operands are not (`_gathered`).
    """
    _, results = _shapes(operands, **static)
    mesh = operands[0].sharding.mesh
    return [
        operands[0].update(
            shape=shape, dtype=dtype, weak_type=False,
            sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))),
        )
        for shape, dtype in results.values()
    ]  # fmt: skip


def _lower(local: Primitive, ctx: Any, *operands: Any, **static: Any) -> Any:
    function: Any = functools.partial(local.bind, **static)
    context = ctx.module_context.axis_context
    # Without devices there is nothing to divide, and custom_partitioning fails.
    if getattr(context, "device_assignment", context) is not None:
        shapes_by_name = _shapes(ctx.avals_in, **static)
        function = _partition.partitioned(function, static["problem"], *shapes_by_name)
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


def _lower_on_one_device(target: str, device: int, ctx: Any, *operands: Any, **static: Any) -> Any:
    shapes, results = _shapes(ctx.avals_in, **static)
    described = call(static["problem"], shapes, results, device)
    workspace = jax.core.ShapedArray((described.workspace_bytes,), jax.numpy.uint8)
    rule = jax.ffi.ffi_lowering(target)
    wide = ctx.replace(avals_out=[*ctx.avals_out, workspace])
    return rule(wide, *operands, **described.attributes)[:-1]


def _refuse_jvp_of_jvp(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "tilewise.jax: forward mode over forward mode (jax.jvp of jax.jvp, jacfwd of jacfwd) is "
        "not defined: use jax.jvp of jax.grad, or jax.grad of jax.jvp"
    )


def _register_targets() -> None:
    library = jax_adapter()
    for platform, _ in _PLATFORMS.values():
        for name in _PASSES:
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


def _define(primitive: Primitive) -> None:
    @functools.partial(jax.jit, static_argnums=0)
    def compiled(static: tuple[tuple[str, Any], ...], *operands: Any) -> list[Any]:
        return primitive.bind(*operands, **dict(static))

    def run(*operands: Any, **static: Any) -> list[Any]:
        with jax.disable_jit(False):
            return compiled(tuple(static.items()), *operands)

    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract)
    primitive.def_impl(run)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)


def _define_kernel(primitive: Primitive) -> None:
    _define(primitive)
    local = Primitive(f"{primitive.name}_on_one_device")
    local.multiple_results = True
    local.def_abstract_eval(_abstract)
    _lower_with_devices(primitive)
    mlir.register_lowering(primitive, functools.partial(_lower, local))
    for platform, (_, device) in _PLATFORMS.items():
        rule = functools.partial(_lower_on_one_device, primitive.name, device)
        mlir.register_lowering(local, rule, platform=platform)


def _batch(
    primitive: Primitive, operands: Any, dims: Any, *, problem: Problem, given: Names, wanted: Names
) -> Any:
    def run(arrays: Arrays) -> list[Any]:
        return [*bind(primitive, problem, arrays, wanted).values()]

    # All sequences of the batch share these inputs: their gradients are summed over it, and would
    # also be summed over the mapped dimension, and their tangents cannot be mapped.
    shared = {"bias", "sinks", "scale_tensor"} & {plain_name(name) for name in (*given, *wanted)}
    names = (*problem.inputs, *given)
    return _vmap.batch(run, problem.options, names, operands, dims, summed=bool(shared))


_register_targets()
for _primitive in (FORWARD, BACKWARD, JVP, SECOND):
    _define_kernel(_primitive)
_define(JVP_OF_JVP)
mlir.register_lowering(JVP_OF_JVP, _refuse_jvp_of_jvp)
