"""Measures the error of rounding q, k and v to float8_e4m3, by the options of ``quantize_fp8``.

  python examples/float8_error.py

It prints the error of attention whose inputs ``tilewise.quantize_fp8`` has rounded, relative to the
norm of the exact output in double precision, for inputs like those of models: normal numbers, and
the same with a common offset of the keys, with columns of large numbers, or with rare outliers.
"""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise
from tilewise.cli import tables

ROWS, HEADS, HEADS_KV, HEAD_DIM = 512, 8, 2, 128
OPTIONS: dict[str, dict[str, bool]] = {
    "a factor per head": {},
    "smooth": {"smooth": True},
    "rotate": {"rotate": True},
    "smooth, rotate": {"smooth": True, "rotate": True},
}
Inputs = tuple[Tensor, Tensor, Tensor]


def normal() -> Inputs:
    """q, k and v of normal numbers."""
    g = torch.Generator().manual_seed(0)
    heads = (HEADS, HEADS_KV, HEADS_KV)
    q, k, v = (torch.randn(1, ROWS, n, HEAD_DIM, generator=g) for n in heads)
    return q, k, v


def offset() -> Inputs:
    """All keys have a large common part, which a softmax does not see."""
    q, k, v = normal()
    common = torch.randn(HEADS_KV, HEAD_DIM, generator=torch.Generator().manual_seed(1))
    return q, k + 20.0 * common, v


def columns() -> Inputs:
    """Two columns of q and k hold numbers 8 times as large as the others."""
    q, k, v = (x.clone() for x in normal())
    q[..., [5, 70]] *= 8.0
    k[..., [5, 70]] *= 8.0
    return q, k, v


def rare() -> Inputs:
    """One number in 1000 is 10 times as large, as where FlashAttention-3 is measured
    (arXiv 2407.08608).
    """
    g = torch.Generator().manual_seed(2)

    def add(x: Tensor) -> Tensor:
        chosen = torch.rand(x.shape, generator=g) < 0.001
        return x + 10.0 * torch.randn(x.shape, generator=g) * chosen

    q, k, v = (add(x) for x in normal())
    return q, k, v


INPUTS = {
    "normal": normal,
    "keys with a common offset": offset,
    "large columns": columns,
    "rare outliers": rare,
}


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in double precision; tensors are [batch, row, head, column]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, dim=1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
    hidden = torch.ones(ROWS, ROWS).triu(1).bool()
    return (s.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2)


def error(inputs: Inputs, *, smooth: bool = False, rotate: bool = False) -> float:
    """The norm of the error of out, relative to that of out."""
    q, k, v = inputs
    quantized = (
        tilewise.quantize_fp8(q, heads_kv=HEADS_KV, rotate=rotate),
        tilewise.quantize_fp8(k, smooth=smooth, rotate=rotate),
        tilewise.quantize_fp8(v),
    )
    factors = {f"{n}_descale": x.descale for n, x in zip("qkv", quantized, strict=True)}
    data = (x.data for x in quantized)
    out = tilewise.attention(*data, causal=True, out_dtype=torch.float32, **factors)
    want = exact(q, k, v)
    return float((out.double() - want).norm() / want.norm())


def main() -> None:
    """Prints the table."""
    header = ["inputs", *OPTIONS]
    rows = []
    for name, make in INPUTS.items():
        errors = (error(make(), **options) for options in OPTIONS.values())
        rows.append([name, *(f"{x:.3f}" for x in errors)])
    print("relative error of causal attention in float8_e4m3, head dimension 128, 512 rows")
    tables.show(header, rows, left={0})


if __name__ == "__main__":
    main()
