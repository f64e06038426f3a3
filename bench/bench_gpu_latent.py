"""Decoding from a latent cache (MLA) on a GPU: query heads over one head of 576 columns, of which
the first 512 are the values; bf16.

Tilewise attends to full contiguous caches, to lengths that only the GPU knows, and to pages of 64
in random order. The peers are FlashMLA, where it is installed, with the same pages, and two matrix
products with a softmax between them (torch). Contestants alternate in CUDA graphs of many calls,
each on another cache, so that none is in L2.

  python bench/bench_gpu_latent.py                   B1..128, 1k..64k keys, 16, 64 and 128 heads
  python bench/bench_gpu_latent.py --quick           the main points (under 40 seconds)
  python bench/bench_gpu_latent.py --points "B1 " --points "128 heads" --json FILE
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import bench_gpu
import gpu_arguments
import gpu_timing
import tilewise
from bench_gpu_decode import graph_of
from tilewise.cli import tables
from tilewise.cli.progress import Progress

HEAD_DIM, HEAD_DIM_V, PAGE = 576, 512, 64
SCALE = 192**-0.5
WRONG = 5e-2  # relative to the largest number of out; torch has scores and weights in bf16
HEADS = (16, 64, 128)
BATCHES = (1, 4, 16, 64, 128)
KEYS = (1024, 4096, 16384, 65536)
MAX_BYTES = 20e9
COPIES_BYTES = 200 << 20  # of all caches together
TORCH_BYTES = 2e9  # of scores in fp32 and bf16, which torch keeps

Call = Callable[[int], Tensor]


@dataclass(frozen=True)
class Case:
    """`rows` queries per sequence against caches of `keys` keys."""

    batch: int
    keys: int
    heads: int
    rows: int = 1

    @property
    def name(self) -> str:
        """The name that --points matches, such as "B1 S16384 128 heads 1 rows"."""
        return f"B{self.batch} S{self.keys} {self.heads} heads {self.rows} rows"

    @property
    def bytes(self) -> int:
        """Bytes of the cache."""
        return self.batch * self.keys * HEAD_DIM * 2

    @property
    def products(self) -> int:
        """Floating-point operations of both products."""
        pairs = self.batch * self.rows * self.heads * self.keys
        return 2 * pairs * (HEAD_DIM + HEAD_DIM_V)

    @property
    def copies(self) -> int:
        """Number of caches to rotate through."""
        return max(1, min(40, math.ceil(COPIES_BYTES / self.bytes)))

    @property
    def launches(self) -> int:
        """Calls in a graph."""
        return max(self.copies, 12 if self.bytes > 256 << 20 else 40)


def main_cases() -> list[Case]:
    """The points of a short run."""
    points = [(1, 1024), (1, 16384), (4, 16384), (16, 4096), (64, 16384)]
    few = [Case(b, n, h) for h in (16, 128) for b, n in points]
    return [*few, Case(4, 16384, 64), Case(16, 4096, 16, rows=4)]


def all_cases() -> list[Case]:
    """The whole grid, main points first."""
    grid: Iterator[Case] = (Case(b, n, h) for h in HEADS for n in KEYS for b in BATCHES)
    return list(dict.fromkeys([*main_cases(), *(c for c in grid if c.bytes <= MAX_BYTES)]))


@dataclass
class Inputs:
    """q [batch, row, head, column]; caches [batch, key, 1, column], used in rotation."""

    q: Tensor
    caches: list[Tensor]
    paged: list[Tensor]  # the same memory as pages
    table: Tensor  # of pages in random order
    lengths: Tensor  # all keys


def draw(case: Case, device: str) -> Inputs:
    """Draws the inputs, with standard normal entries."""
    g = torch.Generator(device).manual_seed(case.keys + case.batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=device, dtype=torch.bfloat16)

    pages = case.batch * case.keys // PAGE
    caches = [normal(case.batch, case.keys, 1, HEAD_DIM) for _ in range(case.copies)]
    return Inputs(
        normal(case.batch, case.rows, case.heads, HEAD_DIM),
        caches,
        [c.view(pages, PAGE, 1, HEAD_DIM) for c in caches],
        torch.randperm(pages, generator=g, device=device).int().view(case.batch, -1),
        torch.full((case.batch,), case.keys, device=device, dtype=torch.int32),
    )


def contestants(case: Case, x: Inputs) -> dict[str, Call]:
    """Calls by name; each takes the number of a cache."""
    attend = partial(
        tilewise.attention_with_kvcache, x.q, head_dim_v=HEAD_DIM_V, scale=SCALE, causal=True
    )
    lengths: dict[str, Any] = dict(cache_seqlens=x.lengths)
    calls: dict[str, Call] = {
        "dense": lambda i: attend(x.caches[i]),
        "lengths": lambda i: attend(x.caches[i], **lengths),
        "page64": lambda i: attend(x.paged[i], block_table=x.table, **lengths),
    }
    if case.rows == 1 and case.batch * case.heads * case.keys * 6 <= TORCH_BYTES:
        calls["torch"] = lambda i: by_torch(x.q, x.caches[i])
    if importlib.util.find_spec("flash_mla") is not None and x.q.is_cuda:
        calls["FlashMLA page64"] = flash_mla(x)
    return calls


def by_torch(q: Tensor, cache: Tensor) -> Tensor:
    """Two batched products and a softmax, for one row."""
    rows, keys = q.squeeze(1), cache.squeeze(2)
    p = torch.softmax(torch.matmul(rows * SCALE, keys.mT).float(), -1).to(q.dtype)
    return torch.matmul(p, keys[..., :HEAD_DIM_V]).unsqueeze(1)


def flash_mla(x: Inputs) -> Call:
    """FlashMLA's dense decode; its plan is made once, as engines do for all layers of a step."""
    module = importlib.import_module("flash_mla")
    plan = module.get_mla_metadata(x.lengths, x.q.shape[1] * x.q.shape[2], 1)

    def call(i: int) -> Tensor:
        out: Tensor = module.flash_mla_with_kvcache(
            x.q, x.paged[i], x.table, x.lengths, HEAD_DIM_V, *plan, softmax_scale=SCALE, causal=True
        )[0]
        return out

    return call


def error(case: Case, x: Inputs, name: str, call: Call) -> float:
    """The largest error of the first sequence on the first cache, against float64, relative to the
    largest number of the output.
    """
    keys = x.caches[0][0, :, 0]
    if name.endswith("page64"):
        keys = x.paged[0][x.table[0].long()].flatten(0, 1)[:, 0]
    k = keys.double()
    s = torch.einsum("nhd,md->nhm", x.q[0].double(), k) * SCALE
    last = torch.arange(case.rows, device=k.device) + case.keys - case.rows
    hidden = torch.arange(case.keys, device=k.device) > last[:, None]
    p = torch.softmax(s.masked_fill(hidden[:, None], -math.inf), -1)
    want = torch.einsum("nhm,md->nhd", p, k[:, :HEAD_DIM_V])
    return ((call(0)[0].double() - want).abs().max() / want.abs().max()).item()


def measure(case: Case, device: str, rounds: int, clock: gpu_timing.Clock) -> dict[str, Any]:
    """Checks and times one point."""
    x = draw(case, device)
    row: dict[str, Any] = {**asdict(case), "name": case.name, "errors": {}, "left_out": {}}
    calls: dict[str, Call] = {}
    for name, call in contestants(case, x).items():
        try:
            row["errors"][name] = error(case, x, name, call)
        except (RuntimeError, TypeError, ValueError) as problem:
            row["left_out"][name] = (str(problem).strip().splitlines() or ["?"])[0]
            continue
        calls[name] = call
    launches, timed = 1, {n: partial(c, 0) for n, c in calls.items()}
    if device == "cuda":
        launches = case.launches
        timed = {n: graph_of(c, launches, case.copies) for n, c in calls.items()}
    times = clock.interleave(timed, rounds)
    row["us"] = {n: 1e3 * t.median / launches for n, t in times.items()}
    return row


NAMES = ("dense", "lengths", "page64", "torch", "FlashMLA page64")


def cells(row: dict[str, Any], case: Case) -> list[str]:
    """Microseconds, and GB/s and TFLOP/s of the paged cache."""
    us = row["us"]
    rates = [f"{case.bytes / us['page64'] / 1e3:.0f}", f"{case.products / us['page64'] / 1e6:.0f}"]
    return [case.name, *(f"{us[n]:.1f}" if n in us else "-" for n in NAMES), *rates]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = gpu_arguments.parser(
        __doc__, quick="the main points, 5 rounds", on_cpu="without graphs"
    )
    options = gpu_arguments.parsed(parser, arguments)
    quick = options.quick and not options.points
    points = main_cases() if quick else all_cases()
    points = [c for c in points if bench_gpu.matches(c.name, options.points)]
    if not gpu_arguments.measures(options, [c.name for c in points], "bench_gpu_latent"):
        return 0
    started, clock = time.monotonic(), gpu_timing.Clock(options.device)
    result: dict[str, Any] = {"machine": bench_gpu.machine(options.device), "rows": []}
    lines = []
    with Progress(len(points), "points") as bar:
        for case in points:
            if options.time_limit and time.monotonic() - started > options.time_limit:
                break
            result["rows"].append(measure(case, options.device, options.rounds, clock))
            lines.append(cells(result["rows"][-1], case))
            bar.update(point=case.name)
            bench_gpu.write(result, options.json)
    tables.show(("point", *NAMES, "GB/s", "TFLOP/s"), lines, left=(0,))
    wrong = [
        f"{row['name']} {name}: {error:.1e}"
        for row in result["rows"]
        for name, error in row["errors"].items()
        if not error < WRONG
    ]
    for row in result["rows"]:
        for name, why in row["left_out"].items():
            print(f"{row['name']}: {name} did not run: {why}")
    if wrong:
        print("WRONG results: " + ", ".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
