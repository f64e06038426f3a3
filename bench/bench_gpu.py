"""Attention on a GPU: Tilewise and cuDNN, FA-2, EFFICIENT, and FA-3 and FA-4 where installed.

All contestants run in one process on the same tensors, warm and in alternating rounds, with the L2
cache flushed before each call. The table shows TFLOP/s from the medians of CUDA events and the
ratio of Tilewise to each peer (above 1: Tilewise is faster), together with the bf16 matrix product
and the copy bandwidth measured in the same run.

  python bench/bench_gpu.py                      the whole grid (a few minutes)
  python bench/bench_gpu.py --quick              the main points (under a minute)
  python bench/bench_gpu.py --points "bf16 D128 causal" --points "fp32 fwd"
  python bench/bench_gpu.py --time-limit 300 --json FILE --png FILE
  python bench/bench_gpu.py --points "bf16 D128" --back-to-back 0.5   without idle time
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import gpu_arguments
import gpu_cases
import gpu_contestants
import gpu_reference
import gpu_report
import gpu_timing
import tilewise
from tilewise.cli import plot
from tilewise.cli.progress import Progress

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))
from kernels_hash import kernels_hash


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with an error message if it is invalid."""
    parser = gpu_arguments.parser(
        __doc__,
        quick="the main points, 5 rounds, without 16-bit EFFICIENT",
        on_cpu="the peer is torch's default",
    )
    add = parser.add_argument
    add("--peers", metavar="NAMES", help="comma-separated, of: " + ", ".join(peers()))
    add(
        "--back-to-back",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="instead of alternating, call each contestant twice for this long without a break, as "
        "training does; reports power, clock and energy where nvidia-ml-py is installed",
    )
    add("--no-check", action="store_true", help="do not measure errors")
    add("--no-overhead", action="store_true", help="do not measure launch overhead and autograd")
    add("--png", type=Path, metavar="FILE", help="plot speed over sequence length")
    add("--strict", action="store_true", help="exit status 1 when a target is missed")
    add("--tokens", type=int, default=gpu_cases.TOKENS, help="rows of q in all sequences together")
    options = gpu_arguments.parsed(parser, arguments)
    if options.tokens < 1:
        parser.error(f"--tokens is {options.tokens}, but must be at least 1")
    if options.back_to_back < 0:
        parser.error(
            f"--back-to-back is {options.back_to_back}, but must be 0 (alternating) or more"
        )
    wanted = options.peers.split(",") if options.peers else peers()
    unknown = [n for n in wanted if n not in peers()]
    if unknown:
        parser.error(f"--peers has {unknown[0]!r}, allowed are: {', '.join(peers())}")
    options.peers = wanted
    return options


def peers() -> list[str]:
    """The names of all peers."""
    return [n for n in gpu_contestants.NAMES if n != "tilewise"]


def matches(name: str, filters: Sequence[str]) -> bool:
    """Whether all words of some filter occur in `name`. Without filters every name matches."""
    words = name.split()
    return not filters or any(
        all(any(fnmatch.fnmatchcase(w, wanted) for w in words) for wanted in text.split())
        for text in filters
    )


def choose(options: argparse.Namespace) -> list[gpu_cases.Case]:
    """The points of this run."""
    if options.quick and not options.points:
        return gpu_cases.main_cases(options.tokens)
    return [c for c in gpu_cases.all_cases(options.tokens) if matches(c.name, options.points)]


def contestants(case: gpu_cases.Case, options: argparse.Namespace) -> list[str]:
    """The contestants at this point."""
    names = gpu_contestants.names_for(case, options.device)
    chosen = [n for n in names if n in ("tilewise", "sdpa") or n in options.peers]
    if options.quick and case.dtype != gpu_cases.FP32:
        chosen = [n for n in chosen if n != "efficient"]
    return chosen


def measure(
    case: gpu_cases.Case, options: argparse.Namespace, clock: gpu_timing.Clock
) -> dict[str, Any]:
    """Checks and times one point."""
    x = gpu_contestants.draw(case, options.device)
    calls: dict[str, gpu_contestants.Call] = {}
    left_out: dict[str, str] = {}
    for name in contestants(case, options):
        call = gpu_contestants.prepare(name, case, x)
        if isinstance(call, str):
            left_out[name] = call
        else:
            calls[name] = call
    errors: dict[str, dict[str, float]] = {}
    if not options.no_check:
        expected = gpu_reference.reference(case, x)
        errors = {n: gpu_reference.errors(case, c(), expected) for n, c in calls.items()}
        del expected
    else:
        errors = {n: {"unchecked": 0.0} for n in calls}
    if options.back_to_back:
        timings = clock.back_to_back(calls, options.back_to_back)
    else:
        timings = clock.interleave(calls, options.rounds)
    return gpu_report.make_row(case, timings, errors, left_out, kernel(case, x))


def method(options: argparse.Namespace) -> str:
    """A description of how times are measured."""
    if options.back_to_back:
        return f"{options.back_to_back:g} s back to back, twice"
    return f"medians of {options.rounds} rounds"


def kernel(case: gpu_cases.Case, x: gpu_contestants.Inputs) -> dict[str, Any]:
    """The planner's choice for this point."""
    explanation = tilewise.explain(x.q, x.k, x.v, causal=case.causal)
    plan = explanation.forward if case.direction == "fwd" else explanation.backward
    if isinstance(plan, str):
        return {"refused": plan}
    return {"name": plan.kernel, "tile": [plan.tile_q, plan.tile_k], "splits": plan.splits}


def overhead(device: str) -> dict[str, dict[str, float]]:
    """Times of a tiny problem called from Python, of Tilewise and scaled_dot_product_attention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v, dout = (torch.randn(1, 8, 128, 64, device=device, dtype=dtype) for _ in range(4))
    leaves = tuple(t.detach().requires_grad_() for t in (q, k, v))

    def ours(*x: torch.Tensor) -> torch.Tensor:
        return tilewise.attention(*x, layout="bhsd")

    def step(attend: Any) -> Any:
        return lambda: torch.autograd.grad(attend(*leaves), leaves, dout)

    both = {
        "tilewise forward": lambda: ours(q, k, v),
        "SDPA forward": lambda: sdpa(q, k, v),
        "tilewise forward, gradients wanted": lambda: ours(*leaves),
        "SDPA forward, gradients wanted": lambda: sdpa(*leaves),
        "tilewise forward and backward": step(ours),
        "SDPA forward and backward": step(sdpa),
    }
    # SDPA would use cuDNN on some GPUs, but the target is relative to FLASH.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return gpu_timing.launch_overhead(both, device)


LATENCY = ("tilewise", "cudnn", "sdpa")
LAUNCHES = 40  # per graph


def graph_latency(clock: gpu_timing.Clock, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times of B1 H16 S512 D128 in a CUDA graph, operands in L2: the device's part of a launch."""
    rows = []
    length = 512 if clock.cuda else 32
    for direction, causal in itertools.product(("fwd", "bwd"), (False, True)):
        case = gpu_cases.Case("bf16", direction, 128, length, causal, 16, 16, length)
        x = gpu_contestants.draw(case, options.device)
        calls: dict[str, Any] = {}
        left_out: dict[str, str] = {}
        for name in gpu_contestants.names_for(case, options.device):
            call = gpu_contestants.prepare(name, case, x) if name in LATENCY else None
            try:
                if callable(call):
                    calls[name] = gpu_timing.graph_of(call, LAUNCHES) if clock.cuda else call
                elif call:
                    left_out[name] = call
            except RuntimeError as error:  # this contestant cannot be captured
                left_out[name] = str(error).strip().splitlines()[0]
        times = clock.interleave(calls, options.rounds)
        times_us = {n: 1e3 * t.median / (LAUNCHES if clock.cuda else 1) for n, t in times.items()}
        rows.append({"name": f"B1 H16 {case.name}", "microseconds": times_us, "left_out": left_out})
    return rows


def end_to_end(clock: gpu_timing.Clock, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward through autograd, as a model calls them."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = []
    for causal in (False, True):
        case = gpu_cases.Case("bf16", "bwd", 128, min(4096, options.tokens), causal, 16, 16,
                              options.tokens)  # fmt: skip
        x = gpu_contestants.draw(case, options.device)
        leaves = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))

        def ours(leaves: Any = leaves, x: Any = x, causal: bool = causal) -> Any:
            return torch.autograd.grad(tilewise.attention(*leaves, causal=causal), leaves, x.dout)

        def theirs(leaves: Any = leaves, x: Any = x, causal: bool = causal) -> Any:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
                out = sdpa(*(t.transpose(1, 2) for t in leaves), is_causal=causal)
            return torch.autograd.grad(out.transpose(1, 2), leaves, x.dout)

        timings = clock.interleave({"tilewise": ours, "fa2": theirs}, options.rounds)
        times = {n: t.median for n, t in timings.items()}
        name = case.name.replace(" bwd", " fwd+bwd")
        rows.append(
            {"name": name, "milliseconds": times, "ratio": times["fa2"] / times["tilewise"]}
        )
    return rows


def machine(device: str) -> dict[str, Any]:
    """The machine and software that the numbers were measured on."""
    facts: dict[str, Any] = {
        "tilewise": tilewise.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "forced_arch": os.environ.get("TILEWISE_FORCE_ARCH"),
        "kernels": kernels_hash(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        facts |= {
            "device": properties.name,
            "sm": properties.major * 10 + properties.minor,
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    else:
        from tilewise.cli.system import cpu_name

        facts["device"] = cpu_name()
    return facts


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes the results. Returns the exit status."""
    started = time.monotonic()
    cases = choose(options)
    if not gpu_arguments.measures(options, [c.name for c in cases], "bench_gpu"):
        return 0
    torch.manual_seed(0)
    clock = gpu_timing.Clock(options.device)
    size = 8192 if options.device == "cuda" else 256
    result: dict[str, Any] = {
        "machine": machine(options.device),
        "rounds": options.rounds,
        "back_to_back": options.back_to_back,
    }
    result["roofline"] = gpu_timing.roofline(clock, options.device, size, size / 8192)
    facts, limits = result["machine"], result["roofline"]
    forced = f", TILEWISE_FORCE_ARCH={facts['forced_arch']}" if facts["forced_arch"] else ""
    print(
        f"tilewise {facts['tilewise']}, torch {facts['torch']}, {facts['device']}{forced}\n"
        f"bf16 {size}^3 product {limits['gemm_bf16_tflops']:.0f} TFLOP/s, "
        f"copy {limits['copy_gb_s']:.0f} GB/s; {method(options)}\n"
    )
    if not options.no_overhead:
        result["launch_overhead"] = overhead(options.device)
        result["end_to_end"] = end_to_end(clock, options)
        result["graph_latency"] = graph_latency(clock, options)
    result["rows"], result["not_measured"] = [], []
    gpu_report.print_line(gpu_report.HEAD)
    with Progress(len(cases), "points") as bar:
        for case in cases:
            if options.time_limit and time.monotonic() - started > options.time_limit:
                result["not_measured"].append(case.name)
                continue
            row = measure(case, options, clock)
            result["rows"].append(row)
            gpu_report.print_line(gpu_report.line(row, limits))
            if options.back_to_back:
                print(gpu_report.power_line(row), flush=True)
            bar.update(point=case.name)
            write(result, options.json)
    result["summary"] = gpu_report.summary(result["rows"])
    result["seconds"] = time.monotonic() - started
    gpu_report.show_summary(result)
    write(result, options.json)
    if options.json:
        print(f"\nresults: {options.json}")
    plot_result(result, options)
    s = result["summary"]
    missed = s["missed"] or s["wrong"] or any(m.get("met") is False for m in s["means"].values())
    return 1 if s["wrong"] or s["not_run"] or (options.strict and missed) else 0


def write(result: dict[str, Any], path: Path | None) -> None:
    """Replaces the result file atomically: an interrupted run keeps what it has measured."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(json.dumps(result, indent=1) + "\n")
    new.replace(path)


def plot_result(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Draws the plot if it was requested and can be drawn."""
    if options.png is None:
        return
    if not plot.available():
        print(f"no plot: {plot.MISSING}")
        return
    title = f"Attention, bf16, {options.tokens} tokens, {result['machine']['device']}"
    if gpu_report.draw(result["rows"], title, options.png):
        print(f"plot: {options.png}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    try:
        return run(parse(arguments))
    except KeyboardInterrupt:
        print("bench_gpu: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
