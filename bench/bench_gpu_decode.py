"""Decoding on a GPU: one query per sequence against key/value caches; cuDNN, FA-2 and FA-3 as
peers.

Tilewise attends to contiguous caches without and with cache_seqlens, to lengths that end inside a
key tile, to log-normal lengths, to pages of 1, 16, 64 and 256 keys in random order, and to float8
caches with the same number of keys. The peers are PyTorch's own operators, and FA-3 where it is
installed, with contiguous bf16 caches. With cuDNN's own front end (nvidia-cudnn-frontend), cuDNN
also attends to these lengths and pages. Contestants alternate, both in a CUDA graph of many calls
(device time per call) and call by call (including the launch); each call uses another cache, so
that none is in L2.

  python bench/bench_gpu_decode.py                    B1..128, 1k..128k keys, 4 sets of heads
  python bench/bench_gpu_decode.py --quick            the main points (under 40 seconds)
  python bench/bench_gpu_decode.py --points "B1 32/8" --points "S4096 16/1"
  python bench/bench_gpu_decode.py --time-limit 300 --json FILE
  python bench/bench_gpu_decode.py --most-gb 1.1 --only lengths --only "cudnn lengths"
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import bench_gpu
import gpu_arguments
import gpu_decode_cases as cases
import gpu_report
import gpu_timing
from gpu_contestants import TITLES
from tilewise.cli import tables
from tilewise.cli.progress import Progress

WRONG = 1e-2  # the error of bf16 is 2e-3
PEERS = ("cudnn", "fa2", "fa3", "sdpa", *cases.SAME_CACHE_PEERS)
BARS = ("cudnn", "fa3")  # the target is the better of them
OURS = ("dense", "lengths", "inside", *cases.PAGE_BARS, *cases.FLOAT8, *cases.LOG_NORMAL)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with an error message if it is invalid."""
    parser = gpu_arguments.parser(
        __doc__, quick="the main points, 5 rounds", on_cpu="without graphs"
    )
    parser.add_argument(
        "--most-gb",
        type=float,
        default=math.inf,
        metavar="GB",
        help="only points with at most this much of keys and values, smallest first",
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=(*OURS, *PEERS),
        metavar="NAME",
        help=f"only these contestants: {', '.join((*OURS, *PEERS))}; repeatable",
    )
    options = gpu_arguments.parsed(parser, arguments)
    if not options.most_gb > 0:
        parser.error(f"--most-gb is {options.most_gb:g}, but must be more than 0")
    return options


def choose(options: argparse.Namespace) -> list[cases.Case]:
    """The points of this run."""
    if options.quick and not options.points:
        points = cases.main_cases()
    else:
        points = [c for c in cases.all_cases() if bench_gpu.matches(c.name, options.points)]
    if options.most_gb == math.inf:
        return points
    return sorted((c for c in points if c.bytes <= options.most_gb * 1e9), key=lambda c: c.bytes)


def graph_of(call: cases.Call, launches: int, copies: int) -> Callable[[], None]:
    """A function that replays a CUDA graph of many launches, one cache after another."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(launches):
            call(i % copies)
    return graph.replay


def measure(
    case: cases.Case, options: argparse.Namespace, clock: gpu_timing.Clock
) -> dict[str, Any]:
    """Checks and times one point."""
    x = cases.draw(case, options.device)
    calls, errors, left_out, shares = {}, {}, {}, {}
    for contestant in cases.contestants(case, x):
        if options.only and contestant.name not in options.only:
            continue
        try:
            errors[contestant.name] = cases.error(case, x, contestant)
        except (RuntimeError, TypeError, ValueError) as error:
            left_out[contestant.name] = (str(error).strip().splitlines() or [type(error).__name__])[
                0
            ]
            continue
        calls[contestant.name] = contestant.call
        shares[contestant.name] = contestant.share(case)
    singles = {n: (lambda call=call: call(0)) for n, call in calls.items()}
    eager = clock.interleave(singles, options.rounds)
    graph = {}
    if options.device == "cuda":
        replays = {n: graph_of(call, case.launches, case.copies) for n, call in calls.items()}
        timings = clock.interleave(replays, options.rounds, warm=1)
        graph = {n: 1e3 * t.median / case.launches for n, t in timings.items()}
    return make_row(
        case, {n: 1e3 * t.median for n, t in eager.items()}, graph, errors, shares, left_out
    )


def make_row(
    case: cases.Case,
    eager: Mapping[str, float],
    graph: Mapping[str, float],
    errors: Mapping[str, float],
    shares: Mapping[str, float],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """One result: microseconds, GB/s, ratios to the peers, pages over contiguous keys, float8 over
    bf16, and the bars.

    Args:
        shares: Fraction of the caches' bytes that each contestant reads. Ratios compare GB/s,
            so that a peer that cannot skip keys beyond the lengths is compared by what it reads.
    """
    row: dict[str, Any] = {**case.to_json(), "left_out": dict(left_out), "errors": dict(errors)}
    row["eager_us"], row["graph_us"] = dict(eager), dict(graph)
    times = graph or eager
    rates = {n: case.bytes * shares[n] / t / 1e3 for n, t in times.items()}
    ours = [n for n in rates if n not in PEERS]
    row["gb_s"] = rates
    row["ratio"] = {
        p: {n: rates[n] / rates[p] for n in ours if cases.SAME_CACHE_PEERS.get(p, n) == n}
        for p in PEERS
        if p in rates
    }
    row["of_contiguous"] = {
        n: times[n] / times["lengths"] for n in cases.PAGE_BARS if n in times and "lengths" in times
    }
    row["of_bf16"] = {
        n: times[n] / times[other]
        for n, other in cases.FLOAT8.items()
        if n in times and other in times
    }
    row["missed"] = [
        f"{n} {row['ratio'][p][n]:.2f} of {TITLES[p]}"
        for n in ("dense", "lengths")
        for p in BARS
        if round(row["ratio"].get(p, {}).get(n, math.inf), 2) < cases.PEER_BAR
    ]
    row["missed"] += [
        f"{n} {row['ratio'][p][n]:.2f} of cuDNN's"
        for p, n in cases.SAME_CACHE_PEERS.items()
        if round(row["ratio"].get(p, {}).get(n, math.inf), 2) < cases.PEER_BAR
    ]
    row["missed"] += [
        f"{n} {x:.2f} of contiguous"
        for n, x in row["of_contiguous"].items()
        if round(x, 2) > cases.PAGE_BARS[n]
    ]
    row["wrong"] = [n for n in ours if not errors[n] < WRONG]
    return row


HEAD = ("point", *OURS, "cuDNN", *cases.SAME_CACHE_PEERS, "FA-2", "FA-3")


def cells(row: dict[str, Any]) -> list[str]:
    """Microseconds per contestant, in brackets the ratio: Tilewise to cuDNN, pages to contiguous
    keys, float8 to bf16.
    """
    times = row["graph_us"] or row["eager_us"]
    over_cudnn = row["ratio"].get("cudnn", {})

    def cell(name: str) -> str:
        if name not in times:
            return "-"
        ratio = (row["of_contiguous"] | row["of_bf16"]).get(name, over_cudnn.get(name))
        return f"{times[name]:.1f}" + ("" if ratio is None else f" ({ratio:.2f})")

    titles = {title: name for name, title in TITLES.items()}
    return [row["name"], *(cell(titles.get(title, title)) for title in HEAD[1:])]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, points below a bar, wrong results, contestants that did not run."""
    means = {}
    for name in HEAD[1:]:
        for peer in BARS:
            ratios = [r["ratio"][peer][name] for r in rows if name in r["ratio"].get(peer, {})]
            if ratios:
                means[f"{name} over {TITLES[peer]}"] = gpu_report.geometric_mean(ratios)
        peers = [r["ratio"].get(f"cudnn {name}", {}) for r in rows]
        same_cache = [ratio[name] for ratio in peers if name in ratio]
        if same_cache:
            means[f"{name} over cuDNN's {name}"] = gpu_report.geometric_mean(same_cache)
        slower = [r["of_contiguous"][name] for r in rows if name in r["of_contiguous"]]
        if slower:
            means[f"{name} over contiguous, time"] = gpu_report.geometric_mean(slower)
        of_bf16 = [r["of_bf16"][name] for r in rows if name in r["of_bf16"]]
        if of_bf16:
            means[f"{name} over bf16, time"] = gpu_report.geometric_mean(of_bf16)
    return {
        "means": means,
        "missed": [f"{r['name']}: {', '.join(r['missed'])}" for r in rows if r["missed"]],
        "wrong": [f"{r['name']}: {', '.join(r['wrong'])}" for r in rows if r["wrong"]],
        "not_run": [f"{r['name']}: {n}: {why}" for r in rows for n, why in r["left_out"].items()],
    }


def show(result: dict[str, Any]) -> None:
    """Prints the table and the bars."""
    rows, s = result["rows"], result["summary"]
    in_graph = any(r["graph_us"] for r in rows)
    print(
        f"\nMicroseconds per call{' in a CUDA graph' if in_graph else ''}; in brackets, for pages:"
    )
    print(
        "time over that of contiguous keys; for float8 over that of bf16; for the others GB/s over"
    )
    print("cuDNN's\n")
    tables.show(HEAD, [cells(r) for r in rows], left=(0,))
    if in_graph:
        print("\nCall by call, microseconds:\n")
        tables.show(HEAD, [cells(eager_only(r)) for r in rows], left=(0,))
    for name, mean in s["means"].items():
        print(f"{name}: {mean:.3f}, geometric mean")
    for title, names in (
        ("below a bar", s["missed"]),
        ("WRONG results", s["wrong"]),
        ("did not run", s["not_run"]),
        ("out of time, not measured", result["not_measured"]),
    ):
        if names:
            print(f"{title}:\n  " + "\n  ".join(names))


def eager_only(row: dict[str, Any]) -> dict[str, Any]:
    """The row reduced to the times of calls without a graph."""
    return row | {"graph_us": {}, "ratio": {}, "of_contiguous": {}, "of_bf16": {}}


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes the results. Returns the exit status."""
    started = time.monotonic()
    points = choose(options)
    if not gpu_arguments.measures(options, [c.name for c in points], "bench_gpu_decode"):
        return 0
    clock = gpu_timing.Clock(options.device)
    result: dict[str, Any] = {"machine": bench_gpu.machine(options.device), "rows": []}
    result |= {"rounds": options.rounds, "not_measured": []}
    facts = result["machine"]
    print(f"tilewise {facts['tilewise']}, torch {facts['torch']}, {facts['device']}")
    with Progress(len(points), "points") as bar:
        for case in points:
            if options.time_limit and time.monotonic() - started > options.time_limit:
                result["not_measured"].append(case.name)
                continue
            result["rows"].append(measure(case, options, clock))
            bar.update(point=case.name)
            bench_gpu.write(result, options.json)
    result["summary"] = summary(result["rows"])
    result["seconds"] = time.monotonic() - started
    show(result)
    bench_gpu.write(result, options.json)
    return 1 if result["summary"]["wrong"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    try:
        return run(parse(arguments))
    except KeyboardInterrupt:
        print("bench_gpu_decode: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
