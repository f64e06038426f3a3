"""`tilewise bench`: time and memory of tilewise beside PyTorch's attention backends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise.cli import plot, tables
from tilewise.cli.progress import Progress

if TYPE_CHECKING:
    from tilewise.cli.contestants import Problem

EXAMPLES = """examples:
  tilewise bench
  tilewise bench --dtype bf16 --head-dim 128 --seqlens 512,2048,8192 --pass forward
  tilewise bench --heads 16 --kv-heads 4 --full --backends tilewise,torch-flash
  tilewise bench --json bench.json --plot bench.png

Every backend gets the same tensors. Their repetitions alternate, and the median of each is shown.
Peak memory is what a process needs beyond its inputs, measured in a separate process.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="time and memory beside PyTorch's attention",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--seqlens",
        type=_lengths,
        default=[512, 1024, 2048, 4096],
        metavar="N,N,...",
        help="sequence lengths (rows = keys); default: 512,1024,2048,4096",
    )
    add("--batch", type=_positive, default=1, metavar="B", help="default: %(default)s")
    add("--heads", type=_positive, default=8, metavar="H", help="default: %(default)s")
    add("--kv-heads", type=_positive, metavar="H", help="default: as many as --heads")
    add("--head-dim", type=_positive, default=64, metavar="D", help="default: %(default)s")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="default: %(default)s")
    mask = parser.add_mutually_exclusive_group()
    mask.add_argument(
        "--causal", dest="causal", action="store_true", default=True, help="the default"
    )
    mask.add_argument("--full", dest="causal", action="store_false", help="no mask")
    add("--pass", dest="which", choices=("forward", "both"), default="both", help="default: both")
    add("--backends", type=_names, metavar="NAME,...", help="default: all that run here")
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: a GPU if there is one",
    )
    add("--threads", type=_positive, metavar="T", help="default: PyTorch's choice")
    add(
        "--seconds",
        type=_seconds,
        default=0.5,
        metavar="S",
        help="per backend and length; default: %(default)s",
    )
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    add("--plot", type=Path, metavar="FILE", help="plot the rows to FILE (.png, .svg or .pdf)")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text) if text.lstrip("-").isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} given, but must be an integer of at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} given, but must be above 0 and at most 600")
    return value


def _lengths(text: str) -> list[int]:
    return sorted({_positive(part) for part in text.split(",")})


def _names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def run(options: argparse.Namespace) -> int:
    """Measures all backends, prints the table and writes the files. Returns the exit status.

    Raises:
        ValueError: an option is wrong, or does not fit another one.
        ImportError: PyTorch is missing, or matplotlib, which --plot needs.
    """
    try:
        import torch
    except ImportError:
        raise ImportError("the benchmark compares with PyTorch, which is not installed") from None
    if options.plot and not plot.available():
        raise ImportError(plot.MISSING)
    for file in (options.json, options.plot):
        if file and not file.resolve().parent.is_dir():
            raise ValueError(f"{file}: there is no folder {file.resolve().parent}")
        if file and file.is_dir():
            raise ValueError(f"{file} is a folder, but must be a file")
    if options.plot and options.plot.suffix not in plot.FORMATS:
        raise ValueError(f"--plot is {options.plot}, but must end in {', '.join(plot.FORMATS)}")

    from tilewise.cli import contestants, cost, system

    if options.threads:
        torch.set_num_threads(options.threads)
    problem = contestants.Problem(
        dtype=options.dtype,
        batch=options.batch,
        heads=options.heads,
        kv_heads=options.kv_heads or options.heads,
        head_dim=options.head_dim,
        causal=options.causal,
        backward=options.which == "both",
        device=system.training_device(options.device),
    )
    if problem.heads % problem.kv_heads:
        raise ValueError(
            f"--kv-heads is {problem.kv_heads}, but must divide --heads, which is {problem.heads}"
        )
    backends = choose_backends(options.backends, contestants.ON_DEVICE[problem.device])
    print(title(problem, system.device_name(problem.device), torch.get_num_threads()))
    steps = len(options.seqlens) * (1 if options.no_memory else 2)
    with Progress(steps, "measuring") as bar:
        rows = cost.measure(
            problem,
            options.seqlens,
            backends,
            seconds=options.seconds,
            memory=not options.no_memory,
            progress=bar.update,
        )
    add_ratios(rows)
    print_rows(rows)
    if options.json:
        write_json(options.json, rows, system.device_name(problem.device))
    if options.plot:
        draw(options.plot, rows, title(problem, system.device_name(problem.device)))
        print(f"plot: {options.plot}")
    return 0


def choose_backends(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The backends to run.

    Raises:
        ValueError: a name is not known on this device.
    """
    for name in names or ():
        if name not in known:
            raise ValueError(f"--backends names {name!r}, but must name some of {', '.join(known)}")
    return list(names or known)


def title(problem: Problem, device: str, threads: int = 0) -> str:
    """One line about the problem and the device that it runs on."""
    heads = f"{problem.heads} heads"
    if problem.kv_heads != problem.heads:
        heads += f" ({problem.kv_heads} for keys)"
    which = "forward + backward" if problem.backward else "forward"
    mask = "causal" if problem.causal else "full"
    where = (
        f"{device}, {tables.count(threads, 'thread')}"
        if threads and problem.device == "cpu"
        else device
    )
    return (
        f"{which}, {mask}, {problem.dtype}, batch {problem.batch}, {heads} of {problem.head_dim}, "
        f"on {where}"
    )


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds to every timed row its time divided by that of tilewise."""
    ours = {r["length"]: r["seconds"] for r in rows if r["backend"] == "tilewise" and "rate" in r}
    for row in rows:
        if "rate" in row and row["length"] in ours:
            row["times_ours"] = row["seconds"] / ours[row["length"]]


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Prints the rows as a table, then why backends were not run."""
    lines, reasons, last = [], [], None
    for row in rows:
        length = str(row["length"]) if row["length"] != last else ""
        last = row["length"]
        if "left_out" in row:
            lines.append([length, row["backend"], "-", "-", "-", "-", "-"])
            reasons.append(f"N = {row['length']}, {row['backend']}: {row['left_out']}")
            continue
        peak = f"{row['peak_bytes'] / 1e6:.1f}" if "peak_bytes" in row else "-"
        ratio = f"{row['times_ours']:.2f}" if "times_ours" in row else "-"
        spread = f"±{50 * row['spread']:.0f} %"
        cells = [f"{row['seconds'] * 1e3:.2f}", spread, f"{row['rate'] / 1e9:.0f}", ratio, peak]
        lines.append([length, row["backend"], *cells])
    head = ["N", "backend", "ms", "spread", "GFLOP/s", "time / ours", "peak MB"]
    tables.show(head, lines, left=(1,), strong=lambda line: line[1] == "tilewise")
    for reason in reasons:
        print(f"left out: {reason}")


def write_json(path: Path, rows: Sequence[dict[str, Any]], device: str) -> None:
    """Writes the rows and the machine that they were measured on."""
    import torch

    import tilewise

    facts = {"device": device, "torch": torch.__version__, "tilewise": tilewise.__version__}
    path.write_text(json.dumps({"machine": facts, "rows": list(rows)}, indent=1) + "\n")
    print(f"results: {path}")


def draw(path: Path, rows: Sequence[dict[str, Any]], heading: str) -> None:
    """Plots speed over sequence length, and memory if it was measured."""
    has_memory = any("peak_bytes" in row for row in rows)
    drawing, axes = plot.figure(2 if has_memory else 1, heading)
    plot.speed(axes[0], rows, "speed, GFLOP/s")
    if has_memory:
        plot.over_length(axes[1], rows, "peak_bytes", "peak memory beyond the inputs, MB", 1e-6)
    plot.save(drawing, path)
