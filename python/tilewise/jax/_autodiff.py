"""The derivatives of attention: what JAX asks of each primitive in forward and in reverse mode.

==============  =====================================================  ============================
primitive       its tangents                                           their transpose
==============  =====================================================  ============================
``FORWARD``     ``JVP``
``JVP``         ``JVP`` along other tangents, ``JVP_OF_JVP``           ``BACKWARD``
``BACKWARD``    ``BACKWARD`` if only dout moves, otherwise ``SECOND``  ``JVP``
``SECOND``      refused                                                ``JVP`` and ``SECOND``
``JVP_OF_JVP``  refused                                                ``SECOND``
==============  =====================================================  ============================

JAX makes a reverse mode out of a forward mode: it calls the rule for tangents and transposes what
that computes. So ``JVP`` runs only in forward mode, and ``JVP_OF_JVP``, for which there is no
kernel, never runs. Gradients of out and of its tangent are factors of products with q, k and v, so
they are rounded to the dtype of q where out is float32. All derivatives are total: the operands
out, lse and lse_low depend on the inputs, so nothing flows back through them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from tilewise import _check

from ._primitives import BACKWARD, FORWARD, JVP, JVP_OF_JVP, SECOND, Arrays, Names, bind
from ._problem import Problem, direction_of, tangent_of

# Inputs with a gradient. Index arrays, dropout bits and descales have none.
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale_tensor")
_STATE = ("out", "lse", "lse_low")
_TANGENTS = ("out_tangent", "lse_tangent")


# Compiled, so that a call costs one dispatch where jax.jit does not surround it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def attend(problem: Problem, with_max_logits: bool, arrays: Arrays) -> Arrays:
    """out, lse and perhaps max_logits of a problem whose arrays, by name, have been checked."""
    more = ("max_logits",) if with_max_logits else ()
    return bind(FORWARD, problem, arrays, ("out", "lse", *more))


def _given(problem: Problem, given: Names, values: Sequence[Any]) -> Arrays:
    """Operands, or something of each, by name; without tangents that are 0."""
    named = zip((*problem.inputs, *given), values, strict=True)
    return {name: x for name, x in named if not isinstance(x, ad.Zero)}


def _state(problem: Problem, arrays: Arrays) -> Arrays:
    """The inputs and the results of the forward."""
    return {name: arrays[name] for name in (*problem.inputs, *_STATE)}


def _no_derivative(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(
        "tilewise.jax: a second derivative of attention is differentiated, but third derivatives "
        "are not defined: pass its inputs through jax.lax.stop_gradient"
    )


def _check_moved(problem: Problem, arrays: Arrays, moved: Arrays) -> None:
    """Refuses a derivative with respect to inputs that have none."""
    if problem.inference:
        raise NotImplementedError(
            "tilewise.jax: attention_with_kvcache is for inference and has no derivative; "
            "attention and attention_varlen have"
        )
    _check.differentiable(arrays["q"])
    for name in moved:
        if name not in _DIFFERENTIABLE:
            bias = ", or a bias computed from the slopes" if name == "alibi_slopes" else ""
            raise NotImplementedError(
                f"tilewise.jax: {name} is differentiated, but has no gradient: pass "
                f"jax.lax.stop_gradient({name}){bias}"
            )


# --- forward mode ---------------------------------------------------------------------------------


def _forward_tangents(
    primals: Any, tangents: Any, *, problem: Problem, given: Names, wanted: Names
) -> Any:
    arrays = _given(problem, given, primals)
    moved = _given(problem, given, tangents)
    _check_moved(problem, arrays, moved)
    more = tuple(name for name in wanted if name not in _STATE)
    made = bind(FORWARD, problem, arrays, (*_STATE, *more))
    along = {tangent_of(name): x for name, x in moved.items()}
    changes = bind(JVP, problem, _state(problem, arrays | made) | along, _TANGENTS)
    results = [made[name] for name in wanted]
    return results, _changes(results, [changes.get(tangent_of(name)) for name in wanted])


def _jvp_tangents(
    primals: Any, tangents: Any, *, problem: Problem, given: Names, wanted: Names
) -> Any:
    arrays = _given(problem, given, primals)
    moved = _given(problem, given, tangents)
    results = bind(JVP, problem, arrays, wanted)
    changes: Arrays = {}
    along = {tangent_of(n): moved[tangent_of(n)] for n in _DIFFERENTIABLE if tangent_of(n) in moved}
    if along:
        changes = bind(JVP, problem, _state(problem, arrays) | along, wanted)
    directions = {direction_of(n): moved[n] for n in _DIFFERENTIABLE if n in moved}
    if directions:
        second = bind(JVP_OF_JVP, problem, arrays | results | directions, wanted)
        changes = {n: x + changes[n] if n in changes else x for n, x in second.items()}
    return [*results.values()], _changes(results.values(), [changes.get(n) for n in wanted])


def _backward_tangents(
    primals: Any, tangents: Any, *, problem: Problem, given: Names, wanted: Names
) -> Any:
    arrays = _given(problem, given, primals)
    moved = _given(problem, given, tangents)
    results = bind(BACKWARD, problem, arrays, wanted)
    state = _state(problem, arrays)
    incoming = {name: moved[name] for name in ("dout", "dlse") if name in moved}
    along = {tangent_of(name): moved[name] for name in _DIFFERENTIABLE if name in moved}
    if along:
        along |= {tangent_of(name): moved[name] for name in ("out", "lse")}
        along |= {tangent_of(name): arrays[name] for name in ("dout", "dlse") if name in arrays}
        changes = bind(SECOND, problem, state | along | incoming, wanted)
    else:
        incoming.setdefault("dout", jnp.zeros_like(arrays["dout"]))
        changes = bind(BACKWARD, problem, state | incoming, wanted)
    return [*results.values()], [*changes.values()]


def _changes(results: Any, changes: Any) -> list[Any]:
    """The tangents of results, where None stands for 0."""
    return [
        ad.Zero(jax.typeof(x)) if change is None else change
        for x, change in zip(results, changes, strict=True)
    ]


# --- reverse mode ---------------------------------------------------------------------------------


def _jvp_transpose(
    cotangents: Any, *operands: Any, problem: Problem, given: Names, **_: Any
) -> Any:
    arrays = _given(problem, given, operands)
    incoming = _cotangents(arrays, ("dout", "dlse"), cotangents)
    moved = _linear(arrays, tangent_of)
    grads = bind(BACKWARD, problem, _state(problem, arrays) | incoming, moved)
    return _spread(arrays, grads, tangent_of)


def _backward_transpose(
    cotangents: Any, *operands: Any, problem: Problem, given: Names, wanted: Names
) -> Any:
    arrays = _given(problem, given, operands)
    state = _state(problem, arrays)
    changes = bind(JVP, problem, state | _along(arrays, wanted, cotangents), _TANGENTS)
    results = _of_cotangents(arrays, changes)
    return [results.get(name) for name in arrays]


def _second_transpose(
    cotangents: Any, *operands: Any, problem: Problem, given: Names, wanted: Names
) -> Any:
    """``SECOND`` is symmetric: its transpose is itself along the cotangents."""
    arrays = _given(problem, given, operands)
    if ad.is_undefined_primal(arrays["dout_tangent"]):
        _no_derivative()
    along = _state(problem, arrays) | _along(arrays, wanted, cotangents)
    changes = bind(JVP, problem, along, _TANGENTS)
    along |= changes
    along |= {n: arrays[n] for n in ("dout_tangent", "dlse_tangent") if n in arrays}
    moved = _linear(arrays, tangent_of)
    grads = bind(SECOND, problem, along, moved) if moved else {}
    return _spread(arrays, grads, tangent_of, _of_cotangents(arrays, changes))


def _jvp_of_jvp_transpose(
    cotangents: Any, *operands: Any, problem: Problem, given: Names, **_: Any
) -> Any:
    arrays = _given(problem, given, operands)
    moved = _linear(arrays, direction_of)
    known = {name: x for name, x in arrays.items() if not ad.is_undefined_primal(x)}
    incoming = _cotangents(arrays, ("dout_tangent", "dlse_tangent"), cotangents)
    grads = bind(SECOND, problem, known | incoming, moved)
    return _spread(arrays, grads, direction_of)


def _cotangents(arrays: Arrays, names: tuple[str, str], values: Any) -> Arrays:
    """The cotangents of out and lse, or of their tangents, by name. That of lse may be absent."""
    of_out, of_lse = values
    given = {names[0]: ad.instantiate_zeros(of_out).astype(arrays["q"].dtype)}
    return given if isinstance(of_lse, ad.Zero) else given | {names[1]: of_lse}


def _of_cotangents(arrays: Arrays, changes: Arrays) -> Arrays:
    """The cotangents of dout and dlse, which are the tangents of out and lse."""
    of_dout = changes["out_tangent"].astype(arrays["q"].dtype)
    return {"dout": of_dout, "dlse": changes["lse_tangent"]}


def _along(arrays: Arrays, wanted: Names, cotangents: Any) -> Arrays:
    """The cotangents of gradients as tangents of the inputs."""
    return {
        tangent_of(name): x.astype(arrays[name].dtype)
        for name, x in zip(wanted, cotangents, strict=True)
        if not isinstance(x, ad.Zero)
    }


def _linear(arrays: Arrays, named: Any) -> Names:
    """The inputs whose tangents are what a transpose is asked for."""
    every = (name for name in _DIFFERENTIABLE if named(name) in arrays)
    return tuple(name for name in every if ad.is_undefined_primal(arrays[named(name)]))


def _spread(arrays: Arrays, grads: Arrays, named: Any, results: Arrays | None = None) -> list[Any]:
    """The cotangent of each operand, from the gradients of inputs and from other results."""
    spread: Arrays = {}
    for name, grad in grads.items():
        if name in ("k", "v") and "block_table" in arrays:
            grad = _to_pages(grad, arrays[name], arrays["block_table"])
        spread[named(name)] = grad.astype(arrays[name].dtype)
    spread |= results or {}
    return [spread.get(name) if ad.is_undefined_primal(x) else None for name, x in arrays.items()]


def _to_pages(rows: Any, pages: Any, block_table: Any) -> Any:
    """The sum per page of the gradients of keys, from [B, width * page_size, H, D].

    Table entries past the keys in use may have any value: the gradients there are 0.
    """
    count, size, heads, columns = pages.shape
    per_page = rows.astype(jnp.float32).reshape(-1, size, heads, columns)
    index = jnp.clip(block_table.reshape(-1), 0, count - 1)
    return jax.ops.segment_sum(per_page, index, count)


ad.primitive_jvps[FORWARD] = _forward_tangents
ad.primitive_jvps[JVP] = _jvp_tangents
ad.primitive_jvps[BACKWARD] = _backward_tangents
ad.primitive_jvps[SECOND] = ad.primitive_jvps[JVP_OF_JVP] = _no_derivative
ad.primitive_transposes[JVP] = _jvp_transpose
ad.primitive_transposes[BACKWARD] = _backward_transpose
ad.primitive_transposes[SECOND] = _second_transpose
ad.primitive_transposes[JVP_OF_JVP] = _jvp_of_jvp_transpose
