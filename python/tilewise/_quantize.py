"""``quantize_fp8``: tensors of float8_e4m3fn with the descales that attention takes."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _check
from ._check import heads_first
from ._torch import autocasts

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FLOAT8).max  # 448
_LEAST = torch.finfo(torch.float32).tiny  # descales are normal numbers, by which one can divide
_GRANULARITIES = ("head", "tensor")


class QuantizedFp8(NamedTuple):
    """A tensor in float8_e4m3fn and its factors.

    data * descale is x up to rounding, without the mean if ``smooth`` and rotated if ``rotate``.
    """

    data: Tensor  # the shape of x
    descale: Tensor  # float32 [batch, heads_kv], or [1, 1] for the whole tensor
    mean: Tensor | None  # float32, x.mean over rows; None without ``smooth``


def quantize_fp8(
    x: Tensor, *, heads_kv: int | None = None, granularity: str = "head", smooth: bool = False,
    rotate: bool = False, layout: str = "bshd",
) -> QuantizedFp8:  # fmt: skip
    """Rounds q, k or v to float8_e4m3fn, with the factor that ``attention`` multiplies it by.

    ``attention(q.data, k.data, v.data, q_descale=q.descale, ...)`` of three results is attention of
    the three tensors. The factor maps the largest magnitude to 448, the largest number of the
    format, and is a normal number of float32. Numbers above 2^-15 of that magnitude get a relative
    error of at most 2^-4, and smaller ones lose more, so a large outlier costs the precision of
    small numbers. smooth removes and rotate spreads the outliers that models have in a few columns
    (SageAttention, arXiv 2410.02367; FlashAttention-3, 2407.08608; QuaRot, 2404.00456). The steps
    are operators of PyTorch in float32, also under autocast, which torch.compile fuses.

    Args:
        x: [batch, rows, heads, head_dim], or with layout "bhsd" [batch, heads, rows, head_dim];
            finite, float32, float16 or bfloat16.
        heads_kv: For q: the heads of k and v, of which heads is a multiple. Query heads that share
            one of them share a factor. None is the heads of x.
        granularity: "head" for a factor per sequence and head of k, "tensor" for one.
        smooth: For k alone: round k minus its mean over the rows, so that a common offset of the
            keys costs no precision. A row's scores all change by the same number,
            scale * q.mean, which the softmax ignores: out is that of k, while lse and max_logits
            are less by that number. Not for calls with softcap, sinks, or keys that are quantised
            in several parts, as those of a cache are.
        rotate: For q and k, both of them: multiply by a Hadamard matrix with signs, the same in
            every call, which spreads a column's outliers over all columns and changes no
            product q.k. head_dim is a power of two. Rotary embedding comes before.
        layout: "bshd" or "bhsd".

    Returns:
        QuantizedFp8: data, descale and, with smooth, the mean of the keys [batch, 1, heads,
        head_dim] in the layout of x.

    Raises:
        TypeError: x has the wrong type or dtype.
        ValueError: an argument has the wrong shape or is not one of the allowed values.
    """
    rows, heads = (2, 1) if heads_first(layout) else (1, 2)
    _check_given(x, heads, granularity)
    groups = _groups(x.shape[heads], heads_kv)
    wide = x.detach().to(torch.float32)
    mean = None
    if _check.flag("smooth", smooth):
        # Divided before the sum, which then is finite, and 0 where there is no row.
        mean = (wide / max(1, x.shape[rows])).sum(dim=rows, keepdim=True)
        wide = wide - mean
    if _check.flag("rotate", rotate):
        with _without_autocast(x.device.type):  # which would round to 16 bits
            wide = wide @ rotation(x.shape[3], x.device)
    group = (groups, x.shape[heads] // groups)
    by_group = wide.reshape(*x.shape[:heads], *group, *x.shape[heads + 1 :])
    over = tuple(d for d in range(5) if granularity == "tensor" or d not in (0, heads))
    largest = _largest(by_group, over)
    descale = torch.where(largest == 0.0, 1.0, (largest / _LARGEST).clamp(min=_LEAST))
    data = (by_group / descale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8)
    shape = (1, 1) if granularity == "tensor" else (x.shape[0], groups)
    return QuantizedFp8(data.reshape(x.shape), descale.reshape(shape), mean)


def rotation(size: int, device: torch.device) -> Tensor:
    """The orthogonal matrix [size, size] of ``rotate``: diag(signs) @ Hadamard / sqrt(size).

    The signs are those of Rudin and Shapiro. No row of the Hadamard matrix is like them, so that a
    vector of equal numbers does not become one outlier.

    Raises:
        ValueError: size is not a power of two.
    """
    if size & (size - 1) != 0:
        raise ValueError(f"x has head dimension {size}, but rotate=True needs a power of two")
    matrix = torch.ones(1, 1, device=device)
    signs = other = torch.ones(1, device=device)
    while matrix.shape[0] < size:
        top, bottom = torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)
        matrix = torch.cat((top, bottom), 0)
        signs, other = torch.cat((signs, other)), torch.cat((signs, -other))
    return signs.unsqueeze(1) * matrix * size**-0.5


def _without_autocast(device: str) -> Any:
    return torch.autocast(device, enabled=False) if autocasts(device) else contextlib.nullcontext()


def _largest(x: Tensor, over: tuple[int, ...]) -> Tensor:
    """The largest magnitude over some dimensions, which are kept; 0 where there is no number."""
    if x.numel() == 0:
        return x.new_zeros([1 if d in over else size for d, size in enumerate(x.shape)])
    return x.abs().amax(dim=over, keepdim=True)


def _groups(heads: int, heads_kv: int | None) -> int:
    if heads_kv is None:
        return heads
    groups = _check.count("heads_kv", heads_kv)
    if heads % groups != 0:
        raise ValueError(f"heads_kv is {groups}, but must divide the {heads} heads of x")
    return groups


def _check_given(x: Tensor, heads: int, granularity: str) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}, but must be a torch.Tensor")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(
            f"x has dtype {x.dtype}, but must be torch.float32, torch.float16 or torch.bfloat16"
        )
    if x.dim() != 4:
        raise ValueError(
            f"x has shape {list(x.shape)}, but must have 4 dimensions: batch, rows, heads and "
            "head_dim in the order of layout"
        )
    if x.shape[heads] == 0 or x.shape[3] == 0:
        raise ValueError(
            f"x has shape {list(x.shape)}, but must have at least one head and one column"
        )
    if granularity not in _GRANULARITIES:
        raise ValueError(
            f"granularity is {granularity!r}, but must be 'head' or 'tensor': attention takes no "
            "factors of blocks of rows"
        )
