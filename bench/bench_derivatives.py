"""Forward mode and second derivatives, beside Tilewise's own passes and PyTorch's MATH backend.

Four calls are timed for each shape, causal: the forward; the forward with its tangent
(torch.func.jvp of q, k and v); the backward; and the double backward, which is the backward of that
backward. "of fwd" is the time of the second relative to the first, "of bwd" that of the fourth
relative to the third. MATH is the only backend of PyTorch that has these derivatives. The timing is
that of bench_gpu.py; on a CPU it is the wall clock.

  python bench/bench_derivatives.py
  python bench/bench_derivatives.py --device cpu --filter "D64 S4096" --json FILE
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import bench_gpu
import gpu_timing
import tilewise
from tilewise.cli import tables
from tilewise.cli.progress import Progress

CALLS = ("forward", "forward + jvp", "backward", "double backward")
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Causal self-attention of `heads` heads."""

    dtype: torch.dtype
    batch: int
    rows: int
    heads: int
    head_dim: int

    @property
    def name(self) -> str:
        kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[self.dtype]
        return f"{kind} D{self.head_dim} S{self.rows}"


def shapes(device: str) -> Iterator[Shape]:
    """16k tokens of 2048 columns on a GPU; four heads of one sequence on a CPU."""
    for head_dim in (64, 128):
        if device == "cuda":
            for rows in (2048, 4096, 8192, 16384):
                yield Shape(torch.bfloat16, 16384 // rows, rows, 2048 // head_dim, head_dim)
        else:
            for rows in (256, 1024, 4096):
                yield Shape(torch.float32, 1, rows, 4, head_dim)


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's MATH backend, on tensors [batch, row, head, column]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


BACKENDS: dict[str, Attention] = {
    "tilewise": functools.partial(tilewise.attention, causal=True),
    "MATH": math,
}


def calls_of(attend: Attention, leaves: Sequence[Tensor], others: Sequence[Tensor]) -> list[Any]:
    """Functions that run the calls of CALLS; `others` are the tangents of q, k and v, and dout."""
    values = tuple(x.detach() for x in leaves)
    tangents, dout = tuple(others[:3]), others[3].clone().requires_grad_()
    out = attend(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout, create_graph=True)
    twice = (*leaves, dout)
    return [
        lambda: attend(*values),
        lambda: torch.func.jvp(attend, values, tangents),
        lambda: torch.autograd.grad(out, leaves, others[3], retain_graph=True),
        lambda: torch.autograd.grad(gradients, twice, tangents, retain_graph=True),
    ]


def measure(
    shape: Shape, backends: Sequence[str], clock: gpu_timing.Clock, device: str, rounds: int
) -> dict[str, Any]:
    """Milliseconds of each call by backend, and why a backend was left out."""
    size = (shape.batch, shape.rows, shape.heads, shape.head_dim)
    generator = torch.Generator(device).manual_seed(1)
    tensors = [
        torch.randn(size, generator=generator, device=device).to(shape.dtype) for _ in range(7)
    ]
    leaves = [x.requires_grad_() for x in tensors[:3]]
    times: dict[str, list[float]] = {}
    left_out: dict[str, str] = {}
    for name in backends:  # one after the other, since MATH takes much of the memory
        try:
            calls = dict(zip(CALLS, calls_of(BACKENDS[name], leaves, tensors[3:]), strict=True))
            found = clock.interleave(calls, rounds)
        except (torch.OutOfMemoryError, NotImplementedError) as error:
            left_out[name] = str(error).splitlines()[0]
            continue
        times[name] = [found[call].median for call in CALLS]
    return {"name": shape.name, "milliseconds": times, "left_out": left_out}


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the times of Tilewise, and how often MATH's time is Tilewise's."""
    lines = []
    for row in rows:
        times = row["milliseconds"]
        ours, peer = times.get("tilewise"), times.get("MATH")
        if ours is None:
            continue
        line = [row["name"], *(f"{x:.2f}" for x in ours)]
        line += [f"{ours[1] / ours[0]:.2f}", f"{ours[3] / ours[2]:.2f}"]
        line += [f"{b / a:.2f}" if peer else "-" for a, b in zip(ours, peer or ours, strict=True)]
        lines.append(line)
    head = ["problem", *(f"{c}, ms" for c in CALLS), "of fwd", "of bwd"]
    tables.show([*head, "MATH / ours: fwd", "jvp", "bwd", "double"], lines, left=(0,))
    for row in rows:
        for name, why in row["left_out"].items():
            print(f"{row['name']}: {name} was left out: {why}")


def run(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--filter", default="", metavar="WORD", help="shapes whose name contains it"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true", help="without MATH")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU; 1 by default")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    chosen = [x for x in shapes(given.device) if given.filter in x.name]
    if not chosen:
        names = ", ".join(x.name for x in shapes(given.device))
        parser.error(f"--filter is {given.filter!r}, but must be part of one of {names}")
    threads = torch.get_num_threads()
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    clock = gpu_timing.Clock(given.device)
    backends = ["tilewise"] if given.no_peers else list(BACKENDS)
    rows = []
    with Progress(len(chosen), "shapes") as bar:
        for shape in chosen:
            rows.append(measure(shape, backends, clock, given.device, given.rounds))
            bar.update(point=shape.name)
    torch.set_num_threads(threads)
    show(rows)
    machine = bench_gpu.machine(given.device)
    bench_gpu.write({"machine": machine, "calls": CALLS, "rows": rows}, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
