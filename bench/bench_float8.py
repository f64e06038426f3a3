"""The forward of float8 tensors on a GPU, beside the same problem in bf16.

16k tokens, hidden size 2048, full and causal, sequences of 1k to 16k rows. q, k and v are
float8_e4m3 with a factor per head, and out is bf16. In bf16, Tilewise and cuDNN compute the same
problem. The error is that of the output against fp64 on the dequantised tensors.

  python bench/bench_float8.py
  python bench/bench_float8.py --points "D128 causal" --json FILE
  TILEWISE_FORCE_ARCH=90 python bench/bench_float8.py    the kernels for other GPUs, on a Hopper
"""

from __future__ import annotations

import time
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
WRONG = 4e-2  # an error; weights rounded to four bits have 2.4e-2


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


@dataclass(frozen=True)
class Inputs:
    """[batch, row, head, column] in bf16, and the same numbers in float8 with their factors."""

    wide: tuple[Tensor, Tensor, Tensor]
    narrow: tuple[Tensor, Tensor, Tensor]
    factors: tuple[Tensor, Tensor, Tensor]
    causal: bool

    @classmethod
    def of(cls, point: Point, device: str) -> Inputs:
        torch.manual_seed(point.rows)
        shape = (point.tokens // point.rows, point.rows, HIDDEN // point.head_dim, point.head_dim)
        q, k, v = (bench_options.draw(device, *shape) for _ in range(3))
        (q8, a), (k8, b), (v8, c) = map(quantized, (q, k, v))
        return cls((q, k, v), (q8, k8, v8), (a, b, c), point.causal)

    def in_float8(self) -> Tensor:
        """The output, in bf16."""
        names = ("q_descale", "k_descale", "v_descale")
        factors = dict(zip(names, self.factors, strict=True))
        return tilewise.attention(*self.narrow, causal=self.causal, **factors)

    def calls(self) -> dict[str, Callable[[], Any]]:
        """The contestants."""
        calls: dict[str, Callable[[], Any]] = {
            "float8": self.in_float8,
            "bf16": lambda: tilewise.attention(*self.wide, causal=self.causal),
        }
        if self.wide[0].is_cuda:
            heads = [x.transpose(1, 2) for x in self.wide]
            calls["cuDNN bf16"] = lambda: torch.ops.aten._scaled_dot_product_cudnn_attention(
                *heads, None, False, 0.0, self.causal, False
            )
        return calls

    def error(self) -> float:
        """Relative Frobenius error of out against fp64, of one head of the first sequence."""
        out = self.in_float8()[0, :, 0].double()
        q, k, v = (
            x[0, :, 0].double() * factor[0, 0]
            for x, factor in zip(self.narrow, self.factors, strict=True)
        )
        scores = q @ k.T * q.shape[-1] ** -0.5
        if self.causal:
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            scores.masked_fill_(hidden, -torch.inf)
        exact = scores.softmax(-1) @ v
        return float((out - exact).norm() / exact.norm())


def measure(point: Point, clock: gpu_timing.Clock, device: str, rounds: int) -> dict[str, Any]:
    """The row of one point."""
    inputs = Inputs.of(point, device)
    times = {n: t.median for n, t in clock.interleave(inputs.calls(), rounds).items()}
    return {
        "name": point.name,
        "tflops": {name: point.flop / time / 1e9 for name, time in times.items()},
        "of_bf16": times["bf16"] / times["float8"],
        "error": inputs.error(),
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
    if not gpu_arguments.measures(given, [p.name for p in points], "bench_float8"):
        return 0
    clock, started = gpu_timing.Clock(given.device), time.monotonic()
    rows: list[dict[str, Any]] = []
    result = {"machine": bench_gpu.machine(given.device), "rows": rows}
    with Progress(len(points), "problems") as bar:
        for point in points:
            if given.time_limit and time.monotonic() - started > given.time_limit:
                break
            rows.append(measure(point, clock, given.device, given.rounds))
            bench_gpu.write(result, given.json)
            bar.update(point=point.name)
    show(rows)
    wrong = [row["name"] for row in rows if not row["error"] < WRONG]
    if wrong:
        print(f"WRONG results: {', '.join(wrong)}")
    left = [point.name for point in points[len(rows) :]]
    if left:
        print(f"not measured for lack of time: {', '.join(left)}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
