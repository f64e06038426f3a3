"""The cost of options on a GPU, and problems outside of the grid of bench_gpu.py.

The script measures each option at D128, 4096 rows, causal, bf16, as a fraction of the speed without
it; then windows, variable lengths, long contexts and head dimensions without a tile of their own.
Peers are PyTorch's operators, where they support the problem (above D256 whatever its
scaled_dot_product_attention chooses), and for windows and variable lengths
FA-3, where it is installed. The timing is that of bench_gpu.py.

  python bench/bench_options.py
  python bench/bench_options.py --filter varlen --json FILE
"""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import bench_gpu
import gpu_timing
import tilewise
from gpu_contestants import fa3_installed
from tilewise.cli import tables
from tilewise.cli.progress import Progress

aten = torch.ops.aten
# The fraction of the plain kernel's speed that an option should keep.
LOWEST_FRACTION = {"fwd": 0.70, "bwd": 0.65}
SCORES = ("softcap", "ALiBi", "bias", "sinks", "dropout")


@dataclass
class Problem:
    """Tensors [batch, row, head, column] or [row, head, column], and the functions that attend to
    them.
    """

    name: str
    leaves: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    flop: float
    attend: Callable[..., Tensor]
    peers: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]]

    def calls(self, direction: str) -> dict[str, Callable[[], Any]]:
        """The calls of Tilewise and of the peers for one direction."""
        if direction == "fwd":
            values = tuple(x.detach() for x in self.leaves)
            ours: Callable[[], Any] = lambda: self.attend(*values)  # noqa: E731
        else:
            out = self.attend(*self.leaves)
            ours = lambda: torch.autograd.grad(  # noqa: E731
                out, self.leaves, self.dout, retain_graph=True
            )
        found = {"tilewise": ours}
        for name, (forward, backward) in self.peers.items():
            call = forward if direction == "fwd" else backward
            if call is not None:
                found[name] = call
        return found


def draw(device: str, *shape: int) -> Tensor:
    """A bf16 tensor with standard normal entries."""
    return torch.randn(*shape, device=device).to(torch.bfloat16)


def dense(
    name: str, device: str, batch: int, rows: int, heads: int, kv_heads: int, dim: int,
    dim_v: int = 0, flop_share: float = 0.5, peer: bool = False, **options: Any,
) -> Problem:  # fmt: skip
    """Causal self-attention with options."""
    dim_v = dim_v or dim
    q = draw(device, batch, rows, heads, dim).requires_grad_()
    k = draw(device, batch, rows, kv_heads, dim).requires_grad_()
    v = draw(device, batch, rows, kv_heads, dim_v).requires_grad_()
    dout = draw(device, batch, rows, heads, dim_v)
    flop = flop_share * 2.0 * batch * heads * rows * rows * (dim + dim_v)
    peers = {}
    if peer and device == "cuda":
        peers = {"SDPA": sdpa(q, k, v, dout)} if dim > 256 else {"cuDNN": cudnn(q, k, v, dout)}
    if "window" in options and device == "cuda" and fa3_installed():
        peers |= fa3("flash_attn_func", (q, k, v), dout, window_size=options["window"])
    return Problem(
        name, (q, k, v), dout, flop,
        lambda *x: tilewise.attention(*x, causal=True, **options), peers,
    )  # fmt: skip


def sdpa(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Any, Any]:
    """Forward and backward of PyTorch's causal attention, by the backend that it chooses."""
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    saved: list[Tensor] = []

    def attend(*x: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)

    def backward() -> Any:
        if not saved:
            saved.append(attend(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout.transpose(1, 2), retain_graph=True)

    plain = [x.detach() for x in leaves]
    return lambda: attend(*plain), backward


def cudnn(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Any, Any]:
    """Forward and backward through PyTorch's cuDNN operators."""
    q, k, v, dout = (x.detach().transpose(1, 2) for x in (q, k, v, dout))

    def forward(wanted: bool = False) -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, wanted, 0.0, True, False)

    saved: list[Any] = []

    def backward() -> Any:
        if not saved:
            saved.append(forward(True))
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = saved[0]
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, True
        )

    return forward, backward


def fa3(name: str, leaves: Any, dout: Tensor, *lengths: Any, **options: Any) -> dict[str, Any]:
    """Causal forward and backward of FA-3's `name`; the backward goes through autograd."""
    attend = getattr(importlib.import_module("flash_attn_interface"), name)
    saved: list[Tensor] = []

    def result(*x: Tensor) -> Tensor:
        found = attend(*x, *lengths, causal=True, **options)
        return found[0] if isinstance(found, tuple) else found

    def backward() -> Any:
        if not saved:
            saved.append(result(*leaves))
        return torch.autograd.grad(saved[0], leaves, dout, retain_graph=True)

    plain = [x.detach() for x in leaves]
    return {"FA-3": (lambda: result(*plain), backward)}


def varlen(device: str, tokens: int, heads: int, dim: int) -> Problem:
    """Sequences of log-normal lengths (median 900, a long tail) with `tokens` rows in all."""
    generator = torch.Generator().manual_seed(tokens)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = math.exp(6.8 + 1.0 * float(torch.randn(1, generator=generator)))
        lengths.append(min(left, max(1, int(drawn))))
    cu = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    q, k, v = (draw(device, tokens, heads, dim).requires_grad_() for _ in range(3))
    dout = draw(device, tokens, heads, dim)
    flop = 0.5 * sum(4.0 * heads * n * n * dim for n in lengths)
    most = max(lengths)
    plain = [x.detach() for x in (q, k, v)]

    def forward() -> Any:
        return aten._flash_attention_forward(*plain, cu, cu, most, most, 0.0, True, False)

    saved: list[Any] = []

    def backward() -> Any:
        if not saved:
            saved.append(forward())
        out, lse, rng, unused, _ = saved[0]
        return aten._flash_attention_backward(
            dout, *plain, out, lse, cu, cu, most, most, 0.0, True, rng, unused
        )

    peers: dict[str, Any] = {"FA-2": (forward, backward)} if device == "cuda" else {}
    if device == "cuda" and fa3_installed():
        peers |= fa3("flash_attn_varlen_func", (q, k, v), dout, cu, cu, most, most)
    return Problem(
        f"varlen {tokens} tokens in {len(lengths)} sequences, longest {most}",
        (q, k, v), dout, flop,
        lambda *x: tilewise.attention_varlen(*x, cu, cu, causal=True, max_seqlen_q=most,
                                             max_seqlen_k=most), peers,
    )  # fmt: skip


def options(device: str, scale: int) -> Iterator[Problem]:
    """D128, 4096 rows: plain, then one option at a time. `scale` divides the lengths (for a trial
    run).
    """
    rows, heads = 4096 // scale, 16
    size = (4, rows, heads, heads, 128)
    yield dense("plain", device, *size)
    yield dense("softcap", device, *size, softcap=30.0)
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device=device)
    yield dense("ALiBi", device, *size, alibi_slopes=slopes)
    yield dense("bias", device, *size, bias=draw(device, 1, 1, rows, rows))
    yield dense("sinks", device, *size, sinks=torch.zeros(heads, device=device))
    yield dense("dropout", device, *size, dropout_p=0.1)
    yield dense("deterministic", device, *size, deterministic=True)
    window = 1024 // scale
    seen = (rows - window / 2) * window / (rows * rows)
    yield dense("window 1024", device, *size, flop_share=seen, window=(window - 1, 0))


def others(device: str, scale: int) -> Iterator[Problem]:
    """Problems outside of the grid."""
    rows, window = 16384 // scale, 1024 // scale
    share = (rows - window / 2) * window / (rows * rows)
    yield dense("window 1024 of 16k", device, 1, rows, 16, 16, 128, flop_share=share,
                window=(window - 1, 0))  # fmt: skip
    for tokens in (16384, 65536):
        yield varlen(device, tokens // scale, 16, 128)
    for length in (65536, 131072):
        yield dense(f"long context {length // 1024}k", device, 1, length // scale, 4, 4, 128,
                    peer=True)  # fmt: skip
    for dim, dim_v in ((72, 72), (80, 80), (96, 96), (192, 192), (192, 128)):
        for length in (1024, 4096):
            yield dense(f"D{dim}/{dim_v} S{length}", device, 16384 // length, length // scale, 16,
                        16, dim, dim_v, peer=True)  # fmt: skip
    for dim in (320, 512):
        yield dense(f"D{dim} S4096 16 heads over 4", device, 1, 4096 // scale, 16, 4, dim,
                    peer=True)  # fmt: skip


def refusal(call: Callable[[], Any]) -> str:
    """Why a call fails; empty if it does not."""
    try:
        call()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    return ""


def measure(
    problem: Problem, plain: Problem | None, direction: str, clock: gpu_timing.Clock, rounds: int
) -> dict[str, Any]:
    """Speeds of one problem in one direction, and their fraction of the speed of `plain`, which
    alternates with it, because clocks drift by more than the margin of a target.
    """
    all_calls = problem.calls(direction)
    if plain is not None:
        all_calls["plain"] = plain.calls(direction)["tilewise"]
    refused = {name: refusal(call) for name, call in all_calls.items()}
    left_out = {name: why for name, why in refused.items() if why}
    calls = {name: call for name, call in all_calls.items() if name not in left_out}
    flop = problem.flop * (2.5 if direction == "bwd" else 1.0)
    times = {n: t.median for n, t in clock.interleave(calls, rounds).items()}
    row: dict[str, Any] = {"name": problem.name, "direction": direction, "left_out": left_out}
    ours = times.get("tilewise", math.nan)
    if plain is not None:
        row["of_plain"] = times.pop("plain") / ours * problem.flop / plain.flop
    row["tflops"] = {n: flop / t / 1e9 for n, t in times.items()}
    times.pop("tilewise", None)
    row["ratio"] = {n: t / ours for n, t in times.items()}
    return row


def show(rows: list[dict[str, Any]]) -> list[str]:
    """Prints the table; returns the names of the problems below their target."""
    lines, missed = [], []
    for r in rows:
        ours = r["tflops"].get("tilewise", math.nan)
        share = r.get("of_plain", math.nan)
        name = f"{r['direction']} {r['name']}"
        verdict = ""
        if r["name"] in SCORES:
            verdict = "pass" if share >= LOWEST_FRACTION[r["direction"]] else "MISS"
        if r["ratio"]:
            peer, ratio = min(r["ratio"].items(), key=lambda x: x[1])
            verdict = "pass" if round(ratio, 2) >= 1.0 else f"MISS ({peer})"
        if verdict.startswith("MISS"):
            missed.append(name)
        peers = "  ".join(f"{n} {r['tflops'][n]:.0f} ({x:.2f})" for n, x in r["ratio"].items())
        shown = f"{100 * share:.0f} %" if "of_plain" in r else "-"
        lines.append([name, f"{ours:.1f}", shown, peers or "-", verdict])
    head = ["problem", "TFLOP/s", "of plain", "peers: TFLOP/s (ratio)", ""]
    tables.show(head, lines, left=(0, 4))
    return missed


def run(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and writes the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--filter", default="", metavar="WORD", help="problems whose name contains it"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu tests the script itself, on small problems")  # fmt: skip
    given = parser.parse_args(arguments)
    scale = 1 if given.device == "cuda" else 64
    clock = gpu_timing.Clock(given.device)
    rows = []
    with Progress(2 * 25, "problems") as bar:
        for of_options, problems in ((True, options), (False, others)):
            plain: Problem | None = None
            for problem in problems(given.device, scale):
                for direction in ("fwd", "bwd"):
                    if given.filter in problem.name:
                        rows.append(measure(problem, plain, direction, clock, given.rounds))
                    bar.update(point=problem.name)
                if of_options and plain is None:
                    plain = problem
                del problem
    missed = show(rows)
    for r in rows:
        for name, why in r["left_out"].items():
            print(f"{r['direction']} {r['name']}: {name} does not support it: {why}")
    print(f"below their target: {'; '.join(missed) or 'none'}")
    bench_gpu.write({"machine": bench_gpu.machine(given.device), "rows": rows}, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(run())
