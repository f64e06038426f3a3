"""Folds the mapped dimension of torch.func.vmap into the batch, so that one call is enough."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._options import Options, contiguous_columns


def foldable(options: Options, dims: tuple[int | None, ...]) -> bool:
    """Whether one call can compute all elements of the mapped dimension.

    A bias and slopes can be folded. Sinks and a scale must not be mapped. Other options that are
    tensors must not be given.
    """
    by_name = dict(zip(Options._fields, dims, strict=True))
    sequences = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table",
                 "kv_batch_idx", "leftpad_k", "q_descale", "k_descale", "v_descale", "diagonal",
                 "mask_first")  # fmt: skip
    mapped = (by_name["sinks"], by_name["scale_tensor"])
    return (
        all(getattr(options, name) is None for name in sequences)
        and options.dropout_state is None
        and all(dim is None for dim in mapped)
    )


def fold(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """[count * batch, ...] from [batch, ...] with a dimension of size count inserted at dim."""
    front = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return contiguous_columns(front.flatten(0, 1))


def fold_lse(lse: Tensor, dim: int | None, count: int, rank_of_q: int) -> Tensor:
    """``fold`` of lse, whose batch comes second if it is the pair (lse, lse_low)."""
    if lse.dim() - (dim is not None) < rank_of_q:
        return fold(lse, dim, count)
    front = (
        lse.unsqueeze(1).expand(2, count, *lse.shape[1:]) if dim is None else lse.movedim(dim, 1)
    )
    return contiguous_columns(front.flatten(1, 2))


def unfold(tensor: Tensor, count: int) -> Tensor:
    """[count, batch, ...] from [count * batch, ...]."""
    return tensor.unflatten(0, (count, tensor.shape[0] // count))


def fold_options(options: Options, dims: tuple[int | None, ...], count: int, batch: int) -> Options:
    """The options of the folded problem of count * batch sequences, for options that are foldable.

    ``dims`` are the mapped dimensions of the options; None for those that all elements share.
    """
    by_name = dict(zip(Options._fields, dims, strict=True))
    bias, slopes = options.bias, options.alibi_slopes
    if bias is not None:
        dim = by_name["bias"]
        front = bias.unsqueeze(0) if dim is None else bias.movedim(dim, 0)
        if dim is not None or front.shape[1] != 1:
            # A batch dimension of 1 cannot stay 1 once it is merged with a mapped dimension.
            front = front.expand(count, batch, *front.shape[2:])
        bias = contiguous_columns(front.flatten(0, 1))
    if slopes is not None:
        dim = by_name["alibi_slopes"]
        front = slopes.unsqueeze(0) if dim is None else slopes.movedim(dim, 0)
        if dim is not None or front.dim() == 3:
            front = front.unsqueeze(1) if front.dim() == 2 else front
            slopes = front.expand(count, batch, front.shape[-1]).flatten(0, 1)
    return options._replace(bias=bias, alibi_slopes=slopes)


def one_by_one(call: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    """The rule of vmap that makes one call per element and stacks the results."""
    calls = []
    for i in range(info.batch_size):
        picked = [
            argument.select(dim, i) if dim is not None else argument
            for argument, dim in zip(args, in_dims, strict=True)
        ]
        picked = [
            contiguous_columns(value) if isinstance(value, Tensor) and value.dim() > 1 else value
            for value in picked
        ]
        calls.append(call(*picked))
    results = tuple(torch.stack(outputs) for outputs in zip(*calls, strict=True))
    return results, (0,) * len(results)
