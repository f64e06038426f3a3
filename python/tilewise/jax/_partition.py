"""How XLA divides a call over devices when its arrays are sharded and no shard_map says how.

The batch and the heads of keys and values can be divided; each device then computes a problem of
its own. Gradients of what these share, such as the sinks of all sequences, are summed. Everything
else is gathered: rows and columns, and the whole call if it drops weights, because dropout bits are
numbered by batch row and head, or has a mask, whose lists are per batch row and head.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tilewise._check import DESCALES

from ._problem import Problem, Shape, Shapes, plain_name

# The roles of dimensions. A dimension that is never divided has None.
_BATCH, _HEADS = "batch", "heads"
_Roles = tuple[str | None, ...]
_Axes = dict[str, tuple[str, ...]]  # the mesh axes that cut the dimensions with a role

_PER_SEQUENCE = ("seqused_q", "seqused_k", "leftpad_k", "kv_batch_idx", "diagonal")
_PER_ROW = ("lse", "lse_low")


def partitioned(
    call: Callable[..., list[Any]], problem: Problem, given: Shapes, results: Shapes
) -> Callable[..., list[Any]]:
    """``call`` as a function that XLA may run on parts of its arrays.

    Args:
        call: Takes the arrays of ``given`` and returns those of ``results``, in this order.
        problem: The problem that it computes.
        given: Shapes of the operands by name.
        results: Shapes of the results; a gradient has the name of its input.
    """
    operand_roles = [_roles(problem, given, name, shape) for name, shape in given.items()]
    result_roles = [_roles(problem, given, name, shape) for name, shape in results.items()]
    q_roles = operand_roles[0]
    heads_kv = given["k"].shape[1 if problem.heads_first else -2]
    sizes = {_BATCH: given["q"].shape[0], _HEADS: heads_kv}

    def shardings(mesh: Any, axes: _Axes, each: Sequence[_Roles]) -> list[Any]:
        return [_sharding(mesh, axes, roles) for roles in each]

    def partition(mesh: Any, operands: Any, _results: Any) -> Any:
        sharding = operands[0].sharding
        if mesh.empty:  # nothing names the axes: every device computes everything
            mesh = Mesh(np.array(list(sharding.device_set)), ("all",))
        axes = _axes_of(mesh, sharding, q_roles, sizes)

        def on_one_device(*parts: Any) -> list[Any]:
            computed = call(*parts)
            return [_summed(x, axes, r) for x, r in zip(computed, result_roles, strict=True)]

        return (
            mesh,
            on_one_device,
            shardings(mesh, axes, result_roles),
            tuple(shardings(mesh, axes, operand_roles)),
        )

    def infer(mesh: Any, operands: Any, _results: Any) -> Any:
        return shardings(mesh, _axes_of(mesh, operands[0].sharding, q_roles, sizes), result_roles)

    function = custom_partitioning(call)
    rule, sizes_of_factors, gathered = _rule(
        operand_roles, result_roles, [*given.values()], [*results.values()], heads_kv
    )
    # Shardings arrive as XLA has them: JAX would fail to name one that cuts a part of a mesh axis.
    function.def_partition(
        partition,
        infer_sharding_from_operands=infer,
        decode_shardings=False,
        sharding_rule=rule,
        need_replication_factors=gathered,
        **sizes_of_factors,
    )
    return function


def _roles(problem: Problem, given: Shapes, name: str, shape: Shape) -> _Roles:
    """The role of each dimension of an array. Dimensions of size 1 of a bias have none."""
    name = plain_name(name)
    rank = len(shape.shape)
    batch = None if "cu_seqlens_q" in given else _BATCH
    if "dropout_state" in given or "mask_first" in given:
        return (None,) * rank
    if name in ("q", "k", "v", "out"):
        if rank == 3:
            return (None, _HEADS, None)
        shared = name in ("k", "v") and ("block_table" in given or "kv_batch_idx" in given)
        lead = None if shared else batch
        return (lead, _HEADS, None, None) if problem.heads_first else (lead, None, _HEADS, None)
    roles: dict[str, _Roles] = {
        "bias": (batch, _HEADS, None, None),
        "alibi_slopes": (batch, _HEADS)[2 - rank :],
        "sinks": (_HEADS,),
        "max_logits": (batch, _HEADS),
        "block_table": (batch, None),
        **dict.fromkeys(DESCALES, (batch, _HEADS)),
        **dict.fromkeys(_PER_SEQUENCE, (batch,)),
        **dict.fromkeys(_PER_ROW, (batch, _HEADS, None)[3 - rank :]),
    }
    found = roles.get(name, (None,) * rank)
    if name != "bias":
        return found
    return tuple(r if n > 1 else None for r, n in zip(found, shape.shape, strict=True))


def _sharding(mesh: Mesh, axes: _Axes, roles: _Roles) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes.get(r or "") or None for r in roles)))


def _axes_of(mesh: Mesh, sharding: Any, roles: _Roles, sizes: dict[str, int]) -> _Axes:
    """The mesh axes that cut batch and heads of q evenly; none if q is cut in another way."""
    names = [name for name, size in mesh.shape.items() if size > 1]
    choices = [c for n in range(len(names) + 1) for c in itertools.permutations(names, n)]

    def even(role: str, choice: tuple[str, ...]) -> bool:
        parts = math.prod(mesh.shape[name] for name in choice)
        return parts == 1 or (role in roles and sizes[role] % parts == 0)

    for batch, heads in itertools.product(choices, repeat=2):
        if not set(batch) & set(heads) and even(_BATCH, batch) and even(_HEADS, heads):
            axes = {_BATCH: batch, _HEADS: heads}
            if _sharding(mesh, axes, roles).is_equivalent_to(sharding, len(roles)):
                return axes
    return {}


def _summed(array: Any, axes: _Axes, roles: _Roles) -> Any:
    """The sum over the devices that have parts of a dimension that this result lacks."""
    missing = [name for role, names in axes.items() if role not in roles for name in names]
    return jax.lax.psum(array, missing) if missing else array


def _rule(
    operand_roles: list[_Roles],
    result_roles: list[_Roles],
    operands: list[Shape],
    results: list[Shape],
    heads_kv: int,
) -> tuple[str, dict[str, int], tuple[str, ...]]:
    """The sharding rule in Shardy's notation, sizes of its factors, and factors to gather.

    A dimension of query heads is a pair of factors, the head of the keys and the head in its group.
    """
    gathered: list[str] = []  # in the order of their first use, as Shardy demands
    sizes: dict[str, int] = {}

    def factor(role: str | None, size: int) -> str:
        if role == _BATCH:
            return "b"
        if role == _HEADS and size == heads_kv:
            return "h"
        if role == _HEADS and heads_kv > 1:
            if "g" not in sizes:
                sizes["g"] = size // heads_kv
                gathered.append("g")
            return "(h g)"
        gathered.append(f"x{len(gathered)}")
        return gathered[-1]

    def text(each: list[_Roles], shapes: list[Shape]) -> str:
        return ", ".join(
            " ".join(factor(r, n) for r, n in zip(roles, shape.shape, strict=True))
            for roles, shape in zip(each, shapes, strict=True)
        )

    rule = f"{text(operand_roles, operands)} -> {text(result_roles, results)}"
    return rule, sizes, tuple(gathered)
