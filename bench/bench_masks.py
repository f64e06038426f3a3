"""Masks on a GPU, beside FlexAttention: TFLOP/s of the visible pairs, B1 S8192 H16 D128 in bf16.

The masks are packed documents, causal with bidirectional spans, causal as a mask, a window with
sink rows, and random blocks. FlexAttention is compiled, with a BlockMask made from the same rule.
`causal=True` of Tilewise without a mask alternates with each of them ("of plain"). With --dense, so
do Tilewise with the same pairs as a bias of 0 and minus infinity [1, 1, rows, keys], and PyTorch's
scaled_dot_product_attention with them as a bool mask; masks.from_bool of that mask is timed, too
(python/tilewise/integrations/_bool_masks.py). The timing is that of bench_gpu.py.

  python bench/bench_masks.py
  python bench/bench_masks.py --dense --no-peers --head-dim 256
  python bench/bench_masks.py --filter documents --no-peers --json FILE
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
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import bench_gpu
import bench_options
import gpu_timing
import tilewise
from tilewise import _block_tensors, masks
from tilewise.cli.progress import Progress

ROWS, HEADS, DIM = 8192, 16, 128
DIRECTIONS = ("fwd", "bwd")


@dataclass
class Named:
    """A mask, and the same rule as a function of a row and a key (FlexAttention's mask_mod)."""

    name: str
    mask: masks.Ranges | masks.Blocks
    sees: Callable[[Tensor, Tensor], Tensor]


def named_masks(rows: int) -> Iterator[Named]:
    """The masks at `rows` rows; their parts shrink with it."""
    unit = rows // 8
    document = unit * 1000 // 1024
    starts = [*range(0, rows, document), rows]
    yield Named(
        f"documents of {document} rows",
        masks.Ranges.documents(torch.tensor(starts, dtype=torch.int32)),
        lambda i, j: (i // document == j // document) & (j <= i),
    )
    span = unit // 4
    spans = [[begin, begin + span] for begin in range(0, rows, unit)]
    yield Named(
        f"causal, spans of {span} in {unit}",
        masks.Ranges.causal(rows) | masks.Ranges(spans, spans),
        lambda i, j: (j <= i) | ((i // unit == j // unit) & (i % unit < span) & (j % unit < span)),
    )
    yield Named("causal as a mask", masks.Ranges.causal(rows), lambda i, j: j <= i)
    sinks = unit // 16
    yield Named(
        f"window {unit}, {sinks} sink rows",
        masks.Ranges(
            [[0, unit], [unit, rows], [sinks, rows]],
            [[0, unit], [1, rows], [0, sinks]],
            ["causal", "both", "full"],
        ),
        lambda i, j: (j <= i) & ((j > i - unit) | (j < sinks)),
    )
    block = 128  # rows and keys of a block of masks.Blocks
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(rows // block, rows // block, generator=generator) < 0.1
    on_device: dict[torch.device, Tensor] = {}

    def sees(i: Tensor, j: Tensor) -> Tensor:
        table = on_device.setdefault(i.device, chosen.to(i.device))
        return table[i // block, j // block]

    dense = chosen.repeat_interleave(block, 0).repeat_interleave(block, 1)
    yield Named("random blocks of 128, 10 % visible", masks.from_bool(dense), sees)


def flex(
    sees: Callable[[Tensor, Tensor], Tensor], leaves: Sequence[Tensor], dout: Tensor, rows: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Forward and backward of compiled FlexAttention."""
    # Else the graphs of all masks count, and beyond a limit it runs uncompiled.
    torch.compiler.reset()
    block_mask = create_block_mask(
        lambda _b, _h, i, j: sees(i, j), None, None, rows, rows, device=dout.device
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    heads_first = [x.detach().transpose(1, 2).contiguous() for x in leaves]
    gradient = dout.transpose(1, 2).contiguous()
    learned = [x.clone().requires_grad_() for x in heads_first]
    saved: list[Tensor] = []

    def backward() -> Any:
        if not saved:
            saved.append(compiled(*learned, block_mask=block_mask))
        return torch.autograd.grad(saved[0], learned, gradient, retain_graph=True)

    return functools.partial(compiled, *heads_first, block_mask=block_mask), backward


Calls = tuple[Callable[[], Any], Callable[[], Any]]


def seen_by(sees: Callable[[Tensor, Tensor], Tensor], device: str, rows: int) -> Tensor:
    """All pairs of a rule, bool [rows, rows]."""
    index = torch.arange(rows, device=device)
    return sees(index[:, None], index[None, :])


def of_function(function: Callable[..., Tensor], leaves: Sequence[Tensor], dout: Tensor) -> Calls:
    """Forward and backward of a function of q, k and v."""
    saved: list[Tensor] = []

    def backward() -> Any:
        if not saved:
            saved.append(function(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)

    return lambda: function(*(x.detach() for x in leaves)), backward


def dense_forms(seen: Tensor, leaves: Sequence[Tensor], dout: Tensor) -> dict[str, Calls]:
    """Tilewise with the pairs as a bias, and PyTorch with them as a bool mask."""
    bias = torch.where(seen, 0.0, -torch.inf).to(dout.dtype)[None, None]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by_heads = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*by_heads, attn_mask=seen)
        return out.transpose(1, 2)

    biased = functools.partial(tilewise.attention, bias=bias)
    return {"bias": of_function(biased, leaves, dout), "SDPA": of_function(sdpa, leaves, dout)}


def problem_of(
    named: Named, device: str, rows: int, peers: bool, dense: bool, dim: int = DIM
) -> bench_options.Problem:
    """The problem of a mask, beside FlexAttention and beside the same pairs as a dense tensor."""
    draw = functools.partial(bench_options.draw, device, 1, rows, HEADS, dim)
    leaves = (draw().requires_grad_(), draw().requires_grad_(), draw().requires_grad_())
    dout = draw()
    mask = named.mask.to(device)
    flop = 4.0 * HEADS * dim * rows * rows * named.mask.density(rows, rows)
    others = {"Flex": flex(named.sees, leaves, dout, rows)} if peers else {}
    if dense:
        others |= dense_forms(seen_by(named.sees, device, rows), leaves, dout)
    return bench_options.Problem(
        named.name, leaves, dout, flop, lambda *x: tilewise.attention(*x, mask=mask),
        others,
    )  # fmt: skip


def conversion(named: Named, device: str, rows: int, clock: gpu_timing.Clock) -> dict[str, float]:
    """Milliseconds of masks.from_bool and of finding the visible blocks, and their share."""
    seen = seen_by(named.sees, device, rows)
    four = seen[None, None]
    calls = {
        "from_bool_ms": lambda: masks.from_bool(seen),
        "visible_share_ms": lambda: _block_tensors.visible_share(four),
    }
    times = {name: timing.median for name, timing in clock.interleave(calls, 5).items()}
    return times | {"visible_share": _block_tensors.visible_share(four)}


def run(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--filter", default="", metavar="WORD", help="masks whose name contains it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true", help="without FlexAttention")
    parser.add_argument("--dense", action="store_true",
                        help="also the same pairs as a bias and as a bool mask")  # fmt: skip
    parser.add_argument("--head-dim", type=int, default=DIM, metavar="D")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu tests the script itself, on a small problem")  # fmt: skip
    given = parser.parse_args(arguments)
    rows = ROWS if given.device == "cuda" else 1024
    clock = gpu_timing.Clock(given.device)
    chosen = [x for x in named_masks(rows) if given.filter in x.name]
    if not chosen:
        names = "; ".join(x.name for x in named_masks(rows))
        parser.error(f"--filter is {given.filter!r}, but must be part of one of {names}")
    plain = bench_options.dense("plain", given.device, 1, rows, HEADS, HEADS, given.head_dim)
    results = []
    with Progress(len(DIRECTIONS) * len(chosen), "problems") as bar:
        for named in chosen:
            peers = given.device == "cuda" and not given.no_peers
            problem = problem_of(named, given.device, rows, peers, given.dense, given.head_dim)
            for direction in DIRECTIONS:
                results.append(
                    bench_options.measure(problem, plain, direction, clock, given.rounds)
                )
                bar.update(point=named.name)
            if given.dense:
                results[-2] |= conversion(named, given.device, rows, clock)
    bench_options.show(results)
    for r in results:
        if "from_bool_ms" in r:
            print(
                f"{r['name']}: from_bool {r['from_bool_ms']:.2f} ms; {r['visible_share']:.3f} of "
                f"the blocks are visible, which takes {r['visible_share_ms']:.2f} ms to find"
            )
        for name, why in r["left_out"].items():
            print(f"{r['direction']} {r['name']}: {name} does not support it: {why}")
    facts = {"machine": bench_gpu.machine(given.device), "head_dim": given.head_dim}
    bench_gpu.write(facts | {"rows": results}, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
