"""Shows that tiled attention is exact, by its errors against double precision.

  python examples/exactness.py

For fp32, bf16 and fp16, output and gradients, it prints the largest difference from the same
formula in double precision, relative to the largest magnitude. "naive" is softmax(q k^T) v in
PyTorch in the same dtype, "tiled" is Tilewise. The allowed error is twice (output) or three times
(gradients) that of naive attention, and in fp32 at least 1e-6.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise.cli import system, tables

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("out", "dq", "dk", "dv")
ALWAYS_ALLOWED = {"fp32": 1e-6, "bf16": 0.0, "fp16": 0.0}
FACTOR = {"out": 2.0, "dq": 3.0, "dk": 3.0, "dv": 3.0}


@dataclass(frozen=True)
class Setting:
    """The sizes and options of a problem with grouped heads."""

    name: str
    rows: int = 500
    keys: int = 500
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    causal: bool = False
    left: int | None = None
    softcap: float = 0.0


SETTINGS = (
    Setting("full"),
    Setting("causal", causal=True),
    Setting("causal, window of 100, softcap 20", causal=True, left=100, softcap=20.0, head_dim=80),
)


def naive(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """The formula in the dtype of q; tensors are [batch, row, head, column]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    s = q @ k.transpose(-1, -2) * setting.head_dim**-0.5
    if setting.softcap > 0:
        s = setting.softcap * torch.tanh(s / setting.softcap)
    rows, keys = s.shape[-2:]
    row = torch.arange(rows, device=s.device)[:, None]
    distance = torch.arange(keys, device=s.device) - (row + keys - rows)
    if setting.causal:
        s = s.masked_fill(distance > 0, -torch.inf)
    if setting.left is not None:
        s = s.masked_fill(distance < -setting.left, -torch.inf)
    return (s.softmax(-1) @ v).transpose(1, 2)


def ours(q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> Tensor:
    """The same function by Tilewise."""
    return tilewise.attention(
        q,
        k,
        v,
        causal=setting.causal,
        window=(setting.left, None),
        softcap=setting.softcap,
    )


def compute(
    attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor, setting: Setting
) -> dict[str, Tensor]:
    """Output and gradients, computed in the dtype of the inputs and converted to float64."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves, setting)
    gradients = torch.autograd.grad(out, leaves, dout)
    return {n: t.detach().double() for n, t in zip(NAMES, (out, *gradients), strict=True)}


def rows_of(setting: Setting, dtype: str, device: str = "cpu") -> list[dict[str, Any]]:
    """One row per tensor, with the errors of Tilewise and of naive attention."""
    generator = torch.Generator().manual_seed(0)
    s = setting
    shapes = [(2, s.rows, s.heads, s.head_dim), *[(2, s.keys, s.kv_heads, s.head_dim)] * 2]
    shapes.append(shapes[0])
    *inputs, dout = (torch.randn(x, generator=generator).to(device, DTYPES[dtype]) for x in shapes)
    exact = compute(naive, [t.double() for t in inputs], dout.double(), setting)
    tiled = compute(ours, inputs, dout, setting)
    reference = compute(naive, inputs, dout, setting)
    rows = []
    for name in NAMES:
        scale = exact[name].abs().max()
        error, naive_error, apart = (
            ((a - b).abs().max() / scale).item()
            for a, b in (
                (tiled[name], exact[name]),
                (reference[name], exact[name]),
                (tiled[name], reference[name]),
            )
        )
        allowed = max(ALWAYS_ALLOWED[dtype], FACTOR[name] * naive_error)
        rows.append(
            {
                "setting": setting.name,
                "dtype": dtype,
                "device": device,
                "tensor": name,
                "ours": error,
                "naive": naive_error,
                "apart": apart,
                "allowed": allowed,
                "passed": error <= allowed,
            }
        )
    return rows


def main() -> int:
    """Prints the tables. Returns 0 if every error is within its bound, 1 otherwise."""
    rows: list[dict[str, Any]] = []
    for device in dict.fromkeys(("cpu", system.training_device("auto"))):
        name = system.device_name(device)
        print(f"{name}: largest error, relative to the largest magnitude\n")
        rows += on_device(device)
    failed = [row for row in rows if not row["passed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} within their bounds")
    return 1 if failed else 0


def on_device(device: str) -> list[dict[str, Any]]:
    """Computes and prints the tables of one device."""
    rows: list[dict[str, Any]] = []
    for setting in SETTINGS:
        table = [row for dtype in DTYPES for row in rows_of(setting, dtype, device)]
        rows += table
        print(
            f"{setting.name} ({setting.heads} heads, {setting.kv_heads} for keys, "
            f"D = {setting.head_dim}, N = {setting.rows})"
        )
        lines = [
            [
                row["dtype"] if row["tensor"] == NAMES[0] else "",
                row["tensor"],
                *(f"{row[n]:.1e}" for n in ("ours", "naive", "apart", "allowed")),
                "pass" if row["passed"] else "FAIL",
            ]
            for row in table
        ]
        head = ["dtype", "", "tiled vs fp64", "naive vs fp64", "tiled vs naive", "allowed", ""]
        tables.show(head, lines, left=(0, 1, 6))
        print(flush=True)
    return rows


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # there are no options; any argument is an error
    sys.exit(main())
