"""The derivative of attention: the forward saves lse and lse_low, the backward is one kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import NamedSharding, PartitionSpec

from . import _primitives
from ._problem import Problem

Arrays = dict[str, Any]

# Inputs with a gradient. Index arrays, dropout bits and descales have none.
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale_tensor")


@jax.tree_util.register_static
class _Wanted(tuple[str, ...]):
    """The names of the inputs whose gradients are needed, as part of the residuals."""


# Compiled, also because a shard_map that is not inside of jax.jit cannot evaluate a custom_vjp.
@functools.partial(jax.jit, static_argnums=0)
def attend(problem: Problem, arrays: Arrays) -> tuple[Any, Any]:
    """(out, lse) of a problem whose arrays, by name, have been checked."""
    return _attend(problem, _unify(arrays))


@functools.partial(jax.jit, static_argnums=0)
def decode(problem: Problem, arrays: Arrays) -> tuple[Any, Any]:
    """(out, lse) of a problem without a derivative, whose arrays have been checked."""
    return _decode(problem, _unify(arrays))


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem: Problem, arrays: Arrays) -> tuple[Any, Any]:
    out, lse = _primitives.forward(problem, arrays)
    return out, lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _decode(problem: Problem, arrays: Arrays) -> tuple[Any, Any]:
    return _attend(problem, arrays)


def _refuse_derivative(problem: Problem, inputs: Arrays) -> Any:
    if any(x.perturbed for x in inputs.values()):
        raise NotImplementedError(
            "tilewise.jax: attention_with_kvcache is for inference and has no derivative; "
            "attention and attention_varlen have"
        )
    return _decode(problem, {name: x.value for name, x in inputs.items()}), None


def _no_gradients(problem: Problem, _saved: Any, _cotangents: Any) -> tuple[Arrays]:
    return (dict.fromkeys(problem.inputs),)


def _forward(problem: Problem, inputs: Arrays) -> tuple[Any, Any]:
    arrays = {name: x.value for name, x in inputs.items()}
    perturbed = [name for name, x in inputs.items() if x.perturbed]
    if "alibi_slopes" in perturbed:
        raise NotImplementedError(
            "tilewise.jax: alibi_slopes is differentiated, but has no gradient: pass "
            "jax.lax.stop_gradient(alibi_slopes), or a bias computed from the slopes"
        )
    out, lse, lse_low = _primitives.forward(problem, arrays, with_lse_low=True)
    wanted = _Wanted(name for name in _DIFFERENTIABLE if name in perturbed)
    return (out, lse), (wanted, {**arrays, "out": out, "lse": lse, "lse_low": lse_low})


def _backward(problem: Problem, saved: Any, cotangents: Any) -> tuple[Arrays]:
    wanted, arrays = saved
    grads: Arrays = dict.fromkeys(problem.inputs)
    dout, dlse = cotangents
    if not wanted:
        return (grads,)
    arrays["dout"] = jnp.zeros_like(arrays["out"]) if isinstance(dout, SymbolicZero) else dout
    if not isinstance(dlse, SymbolicZero):
        arrays["dlse"] = dlse
    results = _primitives.backward(problem, _unify(arrays), tuple(wanted))
    for name, grad in zip(wanted, results, strict=True):
        if name in ("k", "v") and "block_table" in arrays:
            grad = _to_pages(grad, arrays[name], arrays["block_table"])
        grads[name] = grad.astype(arrays[name].dtype)
    return (grads,)


def _to_pages(rows: Any, pages: Any, block_table: Any) -> Any:
    """The sum per page of the gradients of keys, from [B, width * page_size, H, D].

    Table entries past the keys in use may have any value: the gradients there are 0.
    """
    count, size, heads, columns = pages.shape
    per_page = rows.astype(jnp.float32).reshape(-1, size, heads, columns)
    index = jnp.clip(block_table.reshape(-1), 0, count - 1)
    return jax.ops.segment_sum(per_page, index, count)


_attend.defvjp(_forward, _backward, symbolic_zeros=True)
_decode.defvjp(_refuse_derivative, _no_gradients, symbolic_zeros=True)
