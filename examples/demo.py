"""The demonstration: exactness, a GPT trained on real text, a plot, and an answer of a model.

  python examples/demo.py                     about 5 minutes on two cores
  python examples/demo.py --text book.txt     trains on another text
  python examples/demo.py --quick             one minute: a smaller model and fewer steps

If it is interrupted during the training, it continues from there when it is started again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import exactness
import figures
import models
import train_gpt
from tilewise.cli import bench, contestants, cost, system
from tilewise.cli.progress import Progress

LENGTHS = (256, 512, 1024, 2048, 4096)
QUICK_LENGTHS = (256, 512, 1024)
CHAT_MODEL, CHAT_SECONDS = models.SMOLLM2, 180
CHAT = ("--question", "What is the capital of France?", "--max-tokens", "40")
QUICK_TRAINING = ("--steps", "30", "--batch", "4", "--rows", "256", "--layers", "2")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="default: Python's standard library")
    add("--out", type=Path, metavar="DIR", help="default: out/demo, with --quick out/demo-quick")
    add("--minutes", type=float, default=4.0, help="longest time of the training (4)")
    add("--quick", action="store_true", help="a small run")
    add("--fresh", action="store_true", help="start the training over")
    options = parser.parse_args(arguments)
    if options.out is None:  # the two kinds of runs must not continue each other's training
        options.out = Path("out/demo-quick" if options.quick else "out/demo")
    return options


def headline(number: int, text: str) -> None:
    """Prints the heading of a step."""
    print(f"\n{'=' * 8} {number} of 4: {text} {'=' * 8}\n", flush=True)


def training_arguments(options: argparse.Namespace) -> list[str]:
    """The command line for train_gpt.py."""
    arguments = ["--out", str(options.out), "--minutes", str(options.minutes)]
    if options.text:
        arguments += ["--text", str(options.text)]
    if options.quick:
        arguments += QUICK_TRAINING
    if options.fresh:
        arguments.append("--fresh")
    return arguments


def measure_cost(quick: bool) -> list[dict[str, object]]:
    """Time and peak memory of tilewise and naive attention, forward and backward."""
    device = system.training_device("auto")
    problem = contestants.Problem(
        dtype="fp32" if device == "cpu" else "bf16", backward=True, device=device
    )
    lengths = QUICK_LENGTHS if quick else LENGTHS
    print(bench.title(problem, system.device_name(device)))
    with Progress(2 * len(lengths), "measuring") as bar:
        rows = cost.measure(
            problem,
            lengths,
            ("tilewise", "naive"),
            seconds=0.3 if quick else 1.0,
            progress=bar.update,
        )
    bench.add_ratios(rows)
    bench.print_rows(rows)
    return rows


def answer_a_question() -> int:
    """Lets a trained model answer, or says why there is none. Returns the exit status."""
    try:
        models.require(*models.needed(CHAT_MODEL))
    except models.MissingError as error:
        print(f"no answer: {error}")
        return 0
    program = str(Path(__file__).with_name("generate.py"))
    command = [sys.executable, program, "--model", CHAT_MODEL, *CHAT]
    try:
        return subprocess.run(command, timeout=CHAT_SECONDS, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"\nno answer within {CHAT_SECONDS} s: try again with python examples/generate.py")
        return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the four steps. Returns the exit status of the first that fails, or 0."""
    options = parse(arguments)
    started = time.monotonic()
    headline(1, "exact attention compared with double precision and naive attention")
    status = exactness.main()
    if status:
        return status
    headline(2, "a small GPT trained on real text")
    status = train_gpt.main(training_arguments(options))
    if status:
        return status
    headline(3, "time and memory over sequence length")
    rows = measure_cost(options.quick)
    picture = (options.out / "demo.png").resolve()
    if figures.available():
        history = json.loads((options.out / "losses.json").read_text())
        figures.demo_figure(history, rows, picture)
        print(f"\npicture: {picture}")
    else:
        print("\nno picture: matplotlib is not installed")
    headline(4, "a language model answers through Tilewise")
    status = answer_a_question()
    if status:
        return status
    print(f"\ndone in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
