"""The FLOP formulas of the operators for ``torch.utils.flop_counter.FlopCounterMode``.

They follow the formulas of PyTorch's own attention: two matrix products in the forward and five in
the backward (one of them recomputes the scores), of every row with every key of its sequence.
Masks and windows subtract nothing, and the softmax adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from . import _schemas as _schemas  # the operators
from ._options import Options


def _numbers(tensor: Tensor | None) -> list[int] | None:
    """The entries of an index tensor; None if it is not given, or has a shape but no data."""
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import, needed only here
    from torch._subclasses.functional_tensor import FunctionalTensor

    if tensor is None or isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta:
        return None
    return tensor.tolist()


def _lengths(
    starts: Tensor | None, used: Tensor | None, uniform: Sequence[int]
) -> list[int] | None:
    """The length of each sequence: `uniform` without index tensors, None if they have no data."""
    entries = _numbers(used if used is not None else starts)
    if entries is None:
        return None if used is not None or starts is not None else list(uniform)
    if used is not None:
        return entries
    return [end - begin for begin, end in pairwise(entries)]


def _pairs(q: Tensor, k: Tensor, o: Options) -> int:
    """The sum of rows times keys over all sequences, with upper bounds for unknown lengths."""
    varlen = o.cu_seqlens_q is not None
    batch = len(o.cu_seqlens_q) - 1 if o.cu_seqlens_q is not None else len(q)
    paged = o.block_table is not None
    capacity = k.shape[-3] if o.block_table is None else o.block_table.shape[1] * k.shape[1]
    rows = _lengths(o.cu_seqlens_q, o.seqused_q, [q.shape[-3]] * batch)
    keys = _lengths(None if paged else o.cu_seqlens_k, o.seqused_k, [capacity] * batch)
    padding = _numbers(o.leftpad_k) or [0] * batch
    if keys is None:
        keys = [min(capacity, o.max_seqlen_k or capacity)] * batch
    elif o.leftpad_k is not None:
        keys = [max(n - first, 0) for n, first in zip(keys, padding, strict=True)]
    if rows is None:
        return (q.shape[0] if varlen else batch * q.shape[1]) * max(keys, default=0)
    return sum(n * m for n, m in zip(rows, keys, strict=True))


@register_flop_formula(
    [torch.ops.tilewise.forward, torch.ops.tilewise.forward_max_logits], get_raw=True
)
def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any, **_out: Any) -> int:
    options = options[: len(Options._fields)]  # without with_lse_low
    return 2 * q.shape[-2] * _pairs(q, k, Options(*options)) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(torch.ops.tilewise.backward, get_raw=True)
def _backward(*arguments: Any, **_out: Any) -> int:
    _dout, _dlse, q, k, v, _out, _lse, *options, _wanted = arguments
    columns = 3 * q.shape[-1] + 2 * v.shape[-1]
    return 2 * q.shape[-2] * _pairs(q, k, Options(*options)) * columns


@register_flop_formula(torch.ops.tilewise.jvp, get_raw=True)
def _jvp(*arguments: Any, **_out: Any) -> int:
    q, k, v, _out, _lse, dq, dk, dv, _bias, _sinks, _scale, *options = arguments
    columns = q.shape[-1] * (1 + _given(dq, dk)) + v.shape[-1] * (1 + _given(dv))
    return 2 * q.shape[-2] * _pairs(q, k, Options(*options)) * columns


@register_flop_formula(torch.ops.tilewise.second, get_raw=True)
def _second(*arguments: Any, **_out: Any) -> int:
    q, k, v, _out, _lse, _out_tangent, _lse_tangent, dq, dk, dv, *rest = arguments
    dout, options = rest[3], rest[7:-1]
    columns = q.shape[-1] * (3 + 2 * _given(dq, dk)) + v.shape[-1] * (2 + _given(dout, dout, dv))
    return 2 * q.shape[-2] * _pairs(q, k, Options(*options)) * columns


def _given(*tensors: Tensor | None) -> int:
    """How many of the tensors are given; each of the others saves a product."""
    return sum(x is not None for x in tensors)


_OPERATORS = tuple(
    getattr(torch.ops.tilewise, name)
    for name in ("forward", "forward_max_logits", "backward", "jvp", "second")
)


def _add_to_active_counters() -> None:
    """Adds the formulas to counters that copied the registry before this module was imported."""
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            for operator in _OPERATORS:
                counter.flop_registry.setdefault(operator, flop_registry[operator])


_add_to_active_counters()
