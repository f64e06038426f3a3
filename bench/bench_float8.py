"""The forward of float8 tensors on a GPU, beside the same problem in bf16.

16k tokens, hidden size 2048, full and causal, sequences of 1k to 16k rows. q, k and v are
float8_e4m3 with a factor per head, and out is bf16. In bf16, Tilewise and cuDNN compute the same
problem. The error is that of the output against fp64 on the dequantised tensors.

  python bench/bench_float8.py
  python bench/bench_float8.py --points "D128 causal" --json FILE
  TILEWISE_FORCE_ARCH=90 python bench/bench_float8.py    the kernels for other GPUs, on a Hopper
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import bench_gpu
import bench_options
import gpu_arguments
import gpu_timing
import tilewise
from gpu_cases import HIDDEN, MAIN_LENGTHS, TOKENS
from tilewise.cli import tables
from tilewise.cli.progress import Progress

HEAD_DIMS = (64, 128)
COLUMNS = ("float8", "bf16", "cuDNN bf16")


@dataclass(frozen=True)
class Point:
    """Self-attention over `rows` rows."""

    head_dim: int
    rows: int
    causal: bool
    tokens: int = TOKENS

    @property
    def name(self) -> str:
        return f"D{self.head_dim} S{self.rows} {'causal' if self.causal else 'full'}"

    @property
    def flop(self) -> float:
        """Two products over the visible pairs."""
        return 4.0 * self.tokens * self.rows * HIDDEN * (0.5 if self.causal else 1.0)


def grid(device: str) -> Iterator[Point]:
    """The points; on a CPU small ones, for a trial run."""
    lengths, tokens = (MAIN_LENGTHS, TOKENS) if device == "cuda" else ((64,), 64)
    for head_dim in HEAD_DIMS:
        for causal in (False, True):
            for rows in lengths:
                yield Point(head_dim, rows, causal, tokens)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor [batch, row, head, column] in float8, and its factor per sequence and head."""
    factor = x.abs().amax((1, 3)).float() / 448.0
    return (x / factor[:, None, :, None]).to(torch.float8_e4m3fn), factor


def calls_of(point: Point, device: str) -> dict[str, Callable[[], Any]]:
    """The contestants, on the same numbers."""
    shape = (point.tokens // point.rows, point.rows, HIDDEN // point.head_dim, point.head_dim)
    q, k, v = (bench_options.draw(device, *shape) for _ in range(3))
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = map(quantized, (q, k, v))
    float8 = functools.partial(
        tilewise.attention, q8, k8, v8, causal=point.causal, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale,
    )  # fmt: skip
    calls: dict[str, Callable[[], Any]] = {
        "float8": float8,
        "bf16": lambda: tilewise.attention(q, k, v, causal=point.causal),
    }
    if device == "cuda":
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        calls["cuDNN bf16"] = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads, None, False, 0.0, point.causal, False
        )
    return calls


def error(point: Point, device: str) -> float:
    """Relative Frobenius error of out against fp64, of one head of the first sequence."""
    torch.manual_seed(point.rows)
    shape = (1, min(point.rows, 4096), 1, point.head_dim)
    x = [bench_options.draw(device, *shape) for _ in range(3)]
    (q, a), (k, b), (v, c) = map(quantized, x)
    out = tilewise.attention(
        q, k, v, causal=point.causal, q_descale=a, k_descale=b, v_descale=c
    ).double()
    wide = [(y.double() * f[:, None, :, None]).transpose(1, 2) for y, f in ((q, a), (k, b), (v, c))]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=point.causal)
    exact = exact.transpose(1, 2)
    return float((out - exact).norm() / exact.norm())


def measure(point: Point, clock: gpu_timing.Clock, device: str, rounds: int) -> dict[str, Any]:
    """The row of one point."""
    times = {n: t.median for n, t in clock.interleave(calls_of(point, device), rounds).items()}
    return {
        "name": point.name,
        "tflops": {name: point.flop / time / 1e9 for name, time in times.items()},
        "of_bf16": times["bf16"] / times["float8"],
        "error": error(point, device),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    lines = [
        [r["name"], *(f"{r['tflops'].get(n, float('nan')):.0f}" for n in COLUMNS),
         f"{r['of_bf16']:.2f}", f"{r['error']:.1e}"]
        for r in rows
    ]  # fmt: skip
    tables.show(["problem", *COLUMNS, "float8 / bf16", "error"], lines, left=(0,))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the results."""
    made = gpu_arguments.parser(
        __doc__, quick="5 rounds", on_cpu="of one small point per head dimension and mask"
    )
    given = gpu_arguments.parsed(made, arguments)
    points = [p for p in grid(given.device) if bench_gpu.matches(p.name, given.points)]
    if not gpu_arguments.measures(given, [p.name for p in points], "bench_float8.py"):
        return 0
    clock = gpu_timing.Clock(given.device)
    rows: list[dict[str, Any]] = []
    result = {"machine": bench_gpu.machine(given.device), "rows": rows}
    with Progress(len(points), "problems") as bar:
        for point in points:
            rows.append(measure(point, clock, given.device, given.rounds))
            bench_gpu.write(result, given.json)
            bar.update(point=point.name)
    show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
