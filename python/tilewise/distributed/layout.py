"""The rows of a sequence that each rank has, and how to cut and join tensors accordingly.

A layout gives each rank one or two runs of consecutive rows. "contiguous" cuts a sequence into as
many chunks as ranks. "zigzag" cuts it into twice as many and gives rank i the chunks i and
2 P - 1 - i, so that all ranks of a causal call compute about equally many scores (the layout of
Megatron-LM and of ring-flash-attention's zigzag). Chunk c of n begins at row c * size // n: sizes
need not be multiples of n, and ranks may have no rows. Each sequence of a packed batch is sharded
in this way, and a rank has its chunks sequence by sequence (as in Megatron-LM and Transformer
Engine).
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _check
from .._torch import as_array
from .agreement import Description, agree
from .ranks import Ranks, all_gather, eager, ranks_of, reduce_scatter, sum_dtype

LAYOUTS = ("zigzag", "contiguous")

Run: TypeAlias = tuple[int, int]  # rows from the first to before the second
Runs: TypeAlias = tuple[Run, ...]
Starts: TypeAlias = tuple[int, ...]  # cu_seqlens: [sequences + 1]


def check_layout(layout: str) -> str:
    """The given layout, after a check that it is one of ``LAYOUTS``."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, but must be 'zigzag' or 'contiguous'")
    return layout


def runs_of(size: int, layout: str, count: int) -> list[Runs]:
    """The runs of rows of each of `count` ranks, in increasing order; adjacent runs are joined."""
    chunks = count if layout == "contiguous" else 2 * count
    starts = [chunk * size // chunks for chunk in range(chunks + 1)]
    result: list[Runs] = []
    for rank in range(count):
        first = (starts[rank], starts[rank + 1])
        if layout == "contiguous":
            result.append((first,))
            continue
        second = (starts[chunks - 1 - rank], starts[chunks - rank])
        joined = first[1] == second[0]
        result.append(((first[0], second[1]),) if joined else (first, second))
    return result


def packed_runs(starts: Starts, layout: str, count: int) -> list[Runs]:
    """The runs of rows of each of `count` ranks in a packed batch, sequence by sequence."""
    result: list[list[Run]] = [[] for _ in range(count)]
    for first, last in itertools.pairwise(starts):
        for own, runs in zip(result, runs_of(last - first, layout, count), strict=True):
            own += [(first + begin, first + end) for begin, end in runs if begin < end]
    return [tuple(own) for own in result]


def starts_of(name: str, value: Any) -> Starts:
    """cu_seqlens as a tuple, from any sequence of integers in CPU memory."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise ValueError(
                f"{name} is on {value.device}, but must be in CPU memory: the host cuts sequences"
            )
        value = value.tolist()
    try:
        starts = tuple(map(operator.index, value))
    except TypeError:
        raise TypeError(
            f"{name} is {value!r}, but must be a sequence of integers or a CPU tensor of them"
        ) from None
    if not starts or starts[0] != 0 or list(starts) != sorted(starts):
        raise ValueError(f"{name} is {list(starts)}, but must begin with 0 and not decrease")
    return starts


def short(starts: Starts) -> str:
    """The ends of sequences, or their number and a hash if there are many."""
    if len(starts) <= 12:
        return str(list(starts))
    digest = hashlib.blake2b(repr(starts).encode(), digest_size=8).hexdigest()
    return f"{len(starts)} entries up to {starts[-1]} with hash {digest}"


def _whole_runs(size: int, layout: str, count: int, cu_seqlens: Any) -> list[Runs]:
    """The runs of one sequence, or of the sequences of a packed batch."""
    layout = check_layout(layout)
    if cu_seqlens is None:
        return runs_of(size, layout, count)
    starts = starts_of("cu_seqlens", cu_seqlens)
    if starts[-1] != size:
        raise ValueError(f"cu_seqlens ends with {starts[-1]}, but there are {size} rows")
    return packed_runs(starts, layout, count)


def length(runs: Runs) -> int:
    """The number of rows of the runs together."""
    return sum(end - begin for begin, end in runs)


def lengths(runs: Sequence[Runs]) -> list[int]:
    """The number of rows of each rank."""
    return [length(own) for own in runs]


def cut(x: Tensor, dim: int, runs: Runs) -> Tensor:
    """The rows of the runs, end to end; a view if there is only one run."""
    parts = [x.narrow(dim, begin, end - begin) for begin, end in runs] or [x.narrow(dim, 0, 0)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def join(pieces: list[Tensor], dim: int, runs: list[Runs]) -> Tensor:
    """The whole from the pieces of all ranks."""
    shape = list(pieces[0].shape)
    shape[dim] = sum(lengths(runs))
    whole = pieces[0].new_empty(shape)
    for piece, own in zip(pieces, runs, strict=True):
        at = 0
        for begin, end in own:
            whole.narrow(dim, begin, end - begin).copy_(piece.narrow(dim, at, end - begin))
            at += end - begin
    return whole


def gather(x: Tensor, dim: int, runs: list[Runs], ranks: Ranks, what: str) -> Tensor:
    """The whole, from this rank's rows in dimension `dim`; not differentiable."""
    pieces = all_gather(x.movedim(dim, 0), lengths(runs), ranks, what)
    return join(pieces, 0, runs).movedim(0, dim)


def scatter_sum(whole: Tensor, dim: int, runs: list[Runs], ranks: Ranks, what: str) -> Tensor:
    """This rank's rows of the sum over ranks, in float32 or wider: the adjoint of ``gather``."""
    wide = whole.to(sum_dtype(whole.dtype))
    return reduce_scatter([cut(wide, dim, own) for own in runs], ranks, what)


class Gather(torch.autograd.Function):
    """``gather``; the backward adds the gradients of all ranks in rank order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, runs: list[Runs], ranks: Ranks, what: str) -> Tensor:
        """See ``gather``."""
        ctx.plan = dim, runs, ranks, what
        return gather(x, dim, runs, ranks, what)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor | None, ...]:
        """See ``scatter_sum``."""
        dim, runs, ranks, what = ctx.plan
        dx = scatter_sum(dwhole, dim, runs, ranks, f"the gradient of {what}")
        return dx.to(dwhole.dtype), None, None, None, None


def positions(
    size: int, *, layout: str, group: Any = None, device: torch.device | str | None = None,
    cu_seqlens: Any = None,
) -> Tensor:  # fmt: skip
    """The places of this rank's rows in their sequences, for example for rotary embedding.

    Args:
        size: Rows of the whole sequence or of the packed batch.
        layout: "zigzag" or "contiguous".
        group: A process group; None is the default group.
        device: Device of the result; None is PyTorch's default.
        cu_seqlens: Integers in CPU memory [sequences + 1]: where the sequences of a packed batch
            begin and end. Places are then counted from the first row of each sequence.

    Returns:
        int64 [rows of this rank], in the order of ``shard``.

    Raises:
        TypeError: cu_seqlens has other elements than integers.
        ValueError: size is negative, layout is neither of the two, or cu_seqlens is on a GPU, does
            not begin with 0, decreases, or does not end with size.
    """
    ranks = ranks_of(group)
    own = _whole_runs(_size(size), layout, ranks.world, cu_seqlens)[ranks.rank]
    firsts = [0] * len(own)
    if cu_seqlens is not None:
        starts = starts_of("cu_seqlens", cu_seqlens)
        firsts = [starts[bisect.bisect_right(starts, begin) - 1] for begin, _ in own]
    places = [
        torch.arange(begin - first, end - first, device=device)
        for (begin, end), first in zip(own, firsts, strict=True)
    ]
    return torch.cat(places) if places else torch.arange(0, device=device)


@eager
def shard(x: Tensor, dim: int, *, layout: str, group: Any = None, cu_seqlens: Any = None) -> Tensor:
    """This rank's rows of a tensor that every rank has whole; nothing is exchanged.

    Args:
        x: The whole, for example a batch of tokens or labels.
        dim: The dimension of the sequence.
        layout: "zigzag" or "contiguous".
        group: A process group; None is the default group.
        cu_seqlens: As in ``positions``, if dim is that of a packed batch.

    Returns:
        The rows of this rank in dimension dim. The gradient of x is this rank's part: zero outside
        its rows. Summed over ranks, the parts are the whole gradient.

    Raises:
        TypeError: As for ``positions``.
        ValueError: As for ``positions``.
    """
    ranks = ranks_of(group)
    runs = _whole_runs(x.shape[dim], layout, ranks.world, cu_seqlens)
    return cut(x, dim, runs[ranks.rank])


@eager
def unshard(
    x: Tensor, dim: int, *, layout: str, size: int, group: Any = None, cu_seqlens: Any = None
) -> Tensor:
    """The whole tensor on every rank, from the rows that each rank has; the inverse of ``shard``.

    All ranks must call it. The loss is the sum of the losses of the ranks: the gradient of x adds
    up the gradients that its rows get on all ranks, in float32 or wider. If each rank computes the
    same loss from the whole, divide it by the number of ranks.

    Args:
        x: This rank's rows.
        dim: The dimension of the sequence.
        layout: "zigzag" or "contiguous".
        size: Rows of the whole sequence or of the packed batch.
        group: A process group; None is the default group.
        cu_seqlens: As in ``positions``.

    Returns:
        The whole, in the order of the sequence.

    Raises:
        IndexError: x has no dimension dim.
        NotImplementedError: a transform of torch.func is active, and there are several ranks.
        TypeError: x is not a dense tensor.
        ValueError: x has another number of rows than the layout gives this rank, or the arguments
            of the ranks differ.
        RuntimeError: another rank has stopped.
    """
    ranks = ranks_of(group)
    runs: list[Runs] = []

    def describe() -> Description:
        nonlocal runs
        runs = _whole_runs(_size(size), layout, ranks.world, cu_seqlens)
        spread = ranks.world > 1 and hasattr(x, "to_local")
        if as_array("x", x).layout != torch.strided or x.is_nested or spread:
            raise TypeError(
                f"x is a {type(x).__name__} with layout {x.layout}, but must be a dense tensor of "
                "this rank's rows"
            )
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"dim is {dim}, but x has {x.dim()} dimensions")
        own, have = length(runs[ranks.rank]), x.shape[dim]
        if have != own:
            raise ValueError(
                f"x has {have} rows in dimension {dim} on rank {ranks.rank}, but layout "
                f"{layout!r} of size {size} over {ranks.world} ranks gives it {own}"
            )
        shape: list[int | str] = list(x.shape)
        shape[dim] = "rows"
        differentiable = torch.is_grad_enabled() and x.requires_grad
        starts = None if cu_seqlens is None else short(starts_of("cu_seqlens", cu_seqlens))
        return Description({
            "layout": repr(layout), "size": str(size), "cu_seqlens": str(starts),
            "shape of x": str(shape), "dtype of x": str(x.dtype), "device": x.device.type,
            "requires_grad of x": str(differentiable),
        })  # fmt: skip

    agree(ranks, "unshard", describe)
    if ranks.world == 1:
        return x
    return Gather.apply(x, dim % x.dim(), runs, ranks, "x")


def _size(size: int) -> int:
    return _check.count("size", size, 0)
