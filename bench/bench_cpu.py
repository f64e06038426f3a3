"""Attention on this machine's cores: Tilewise and PyTorch's scaled_dot_product_attention.

Both run on the same threads of the same process, in alternating rounds. The table shows GFLOP/s,
their ratio, the fraction of the machine's measured peak, and whether the ratio meets its target.

  python bench/bench_cpu.py                       the whole grid (about 13 minutes on two cores)
  python bench/bench_cpu.py --quick               no N = 8192, shorter repetitions (3 minutes)
  python bench/bench_cpu.py --filter "bf16 D64" --filter decode
  python bench/bench_cpu.py --threads 2 --json results.json
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cpu_cases as cases
import peaks
import report


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; exits with an error message if it is invalid."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=0, help="default: one per physical core")
    parser.add_argument("--no-pin", action="store_true", help="do not bind the process to cores")
    parser.add_argument("--quick", action="store_true", help="no N = 8192, short repetitions")
    parser.add_argument("--seconds", type=float, help="per contestant and case (1.0; quick 0.3)")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only cases whose name has all the words of TEXT (wildcards allowed); repeatable",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 when a target is missed"
    )
    options = parser.parse_args(arguments)
    if options.threads < 0:
        parser.error(f"--threads is {options.threads}, but must be at least 1 (or 0: all cores)")
    if options.seconds is not None and not 0 < options.seconds <= 600:
        parser.error(f"--seconds is {options.seconds}, but must be above 0 and at most 600")
    if options.seconds is None:
        options.seconds = 0.3 if options.quick else 1.0
    return options


def matches(name: str, filters: Sequence[str]) -> bool:
    """Whether some filter's words all occur in `name`; no filter matches everything."""
    words = name.split()
    return not filters or any(
        all(any(fnmatch.fnmatchcase(w, wanted) for w in words) for wanted in text.split())
        for text in filters
    )


def physical_cores() -> list[int]:
    """One CPU number per physical core that this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    seen, cores = set(), []
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(cpu)
        if core not in seen:
            seen.add(core)
            cores.append(cpu)
    return cores


def choose_cores(threads: int, pin: bool) -> int:
    """Binds the process to `threads` different physical cores. Returns the number of threads to
    use.
    """
    if not hasattr(os, "sched_getaffinity"):
        return threads or os.cpu_count() or 1
    cores = physical_cores()
    if threads > len(cores):
        raise SystemExit(f"--threads is {threads}, but this process has {len(cores)} cores")
    threads = threads or len(cores)
    if pin:
        os.sched_setaffinity(0, set(cores[:threads]))
    return threads


def rotation(problem_bytes: int, total_bytes: int) -> int:
    """How many copies of a problem to rotate through: 2 to 64, so many that they take at least
    `total_bytes` if 64 suffice.
    """
    return max(2, min(64, math.ceil(total_bytes / max(1, problem_bytes))))


def measure_attention(case: cases.Case, seconds: float) -> dict[str, Any]:
    """Times one case. Returns {"tilewise": timing, "torch": timing, "ratio": torch / tilewise}."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import tilewise
    from tilewise.cli.timing import interleave

    dtype = report.TORCH_DTYPES[case.dtype]
    shape = (1, case.heads, case.length, case.head_dim)
    copies = rotation(case.input_bytes, 8 << 20)
    inputs = [
        tuple(torch.randn(shape).to(dtype).requires_grad_(case.backward) for _ in range(3))
        for _ in range(copies)
    ]

    def ours(q: Any, k: Any, v: Any) -> Any:
        return tilewise.attention(q, k, v, causal=case.causal, layout="bhsd")

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(q, k, v, is_causal=case.causal)

    contestants = {}
    for name, function in (("tilewise", ours), ("torch", theirs)):
        if case.backward:
            outputs = [function(*qkv) for qkv in inputs]
            gradient = torch.randn(shape).to(dtype)
            contestants[name] = lambda i, outputs=outputs, gradient=gradient: torch.autograd.grad(
                outputs[i % copies], inputs[i % copies], gradient, retain_graph=True
            )
        else:
            contestants[name] = lambda i, function=function: function(*inputs[i % copies])
    with torch.set_grad_enabled(case.backward):
        timings = interleave(contestants, seconds=seconds)
    return report.compare(case.to_json(), timings, case.flop)


def measure_decode(case: cases.Decode, seconds: float, total_bytes: int) -> dict[str, Any]:
    """Times one decode step over caches that are in memory, not in a processor cache.

    Returns {"tilewise": timing, "torch": timing, "read": timing, "ratio": torch / tilewise,
    "share": read / tilewise}; "read" only reads the same bytes.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import tilewise
    from tilewise.cli.timing import interleave

    dtype = report.TORCH_DTYPES[case.dtype]
    copies = rotation(case.cache_bytes, total_bytes)
    shape = (1, case.kv_heads, case.length, case.head_dim)
    first = [torch.randn(shape).to(dtype) for _ in range(2)]
    # Every call uses the next copy: the last one read may still be in a large last-level cache.
    caches = itertools.cycle([tuple(t.clone() for t in first) for _ in range(copies)])
    query = torch.randn(1, case.heads, 1, case.head_dim).to(dtype)
    grouped = case.heads != case.kv_heads

    def read(_: int) -> None:
        for cache in next(caches):
            cache.view(torch.float32).sum()  # reads the bytes; the value does not matter

    with torch.no_grad():
        timings = interleave(
            {
                "tilewise": lambda _: tilewise.attention(
                    query, *next(caches), causal=True, layout="bhsd"
                ),
                "torch": lambda _: scaled_dot_product_attention(
                    query, *next(caches), enable_gqa=grouped
                ),
                "read": read,
            },
            seconds=seconds,
            minimum=5,
        )
    row = report.compare(case.to_json(), timings, float(case.cache_bytes))
    return {**row, "share": timings["read"].median / timings["tilewise"].median}


def machine(threads: int, isa: str, load: float) -> dict[str, Any]:
    """The machine and software that the numbers were measured on."""
    import torch

    import tilewise
    from tilewise.cli.system import cpu_name

    return {
        "cpu": cpu_name(),
        "isa": isa,
        "threads": threads,
        "load": load,
        "torch": torch.__version__,
        "tilewise": tilewise.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes the results. Returns the exit status."""
    lengths = cases.LENGTHS[:-1] if options.quick else cases.LENGTHS
    grid = [c for c in cases.attention_cases(lengths) if matches(c.name, options.filter)]
    longest = 0 if options.quick else cases.LONG_CACHE
    decodes = [c for c in cases.decode_cases(longest) if matches(c.name, options.filter)]
    if options.list:
        print("\n".join(c.name for c in [*grid, *decodes]))
        return 0
    if not grid and not decodes:
        raise SystemExit(f"--filter {' '.join(options.filter)!r} matches no case; see --list")
    load = os.getloadavg()[0]
    threads = choose_cores(options.threads, not options.no_pin)
    os.environ.setdefault("TILEWISE_NUM_THREADS", str(threads))

    import torch

    from tilewise.cli.system import current_isa

    torch.manual_seed(0)
    torch.set_num_threads(threads)
    isa = current_isa()
    memory_bytes = 256 << 20 if options.quick else 1 << 30
    limits = peaks.measure(threads, repetitions=9 if options.quick else 25)
    result: dict[str, Any] = {"machine": machine(threads, isa, load), "peaks": limits}
    result["attention"], result["decode"] = [], []
    table = report.Table(isa, limits)
    table.header(result["machine"])
    for case in grid:
        row = measure_attention(case, options.seconds)
        result["attention"].append(table.attention(case, row))
    for decode in decodes:
        row = measure_decode(decode, options.seconds, memory_bytes)
        result["decode"].append(table.decode(decode, row))
    table.summary()
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
        print(f"results: {options.json}")
    return 1 if options.strict and table.missed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    try:
        return run(parse(arguments))
    except peaks.PeaksError as error:
        print(f"bench_cpu: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
