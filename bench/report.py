"""The benchmark's table: one line per case as soon as it is measured, and how many targets are met.

The table calls a target "bar": the least ratio to PyTorch, or for decoding the least fraction of
the speed of a plain read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import cpu_cases as cases
import peaks
from tilewise.cli import tables
from tilewise.cli.timing import Timing

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PASS, MISS, NO_BAR = "pass", "MISS", "-"


def compare(case: dict[str, object], timings: dict[str, Timing], amount: float) -> dict[str, Any]:
    """One result row: both timings, both rates (amount per second), and their ratio.

    "ratio" is that of the medians, to which the bars refer; "best_ratio" is that of the fastest
    repetitions, which are less affected by other load.
    """
    ours, theirs = timings["tilewise"], timings["torch"]
    row: dict[str, Any] = {**case, "ratio": theirs.median / ours.median}
    row["best_ratio"] = theirs.best / ours.best
    for name, timing in timings.items():
        row[name] = {**timing.to_json(), "rate": amount / timing.median}
    return row


class Table:
    """Prints rows and counts bars.

    Args:
        isa: The instruction set in use, which determines the bars.
        limits: The result of peaks.measure().
    """

    def __init__(self, isa: str, limits: dict[str, Any]) -> None:
        self.isa = isa
        self.limits = limits
        self.passed = 0
        self.missed: list[str] = []
        self._colour = sys.stdout.isatty()
        self._section = ""

    def header(self, machine: dict[str, Any]) -> None:
        """Prints the versions, the machine and its measured peaks."""
        print(
            f"tilewise {machine['tilewise']} beside torch {machine['torch']} on {machine['cpu']}, "
            f"{tables.count(machine['threads'], 'thread')}, instruction set {self.isa}"
        )
        rates = [f"{n} {v['best'] / 1e9:.0f}" for n, v in self.limits["flops"].items()]
        print("measured peaks, GFLOP/s: " + ", ".join(rates))
        if machine["load"] > 0.3 * machine["threads"]:
            print(
                f"NOTE: other programs were running (load {machine['load']:.1f}), and medians of "
                "several threads are affected most: see the column 'best'"
            )

    def attention(self, case: cases.Case, row: dict[str, Any]) -> dict[str, Any]:
        """Prints a row of the grid; returns it with its bar and fraction of the peak added."""
        mask = "causal" if case.causal else "full"
        which = "backward" if case.backward else "forward"
        self._begin(
            f"{case.dtype} {which}, D = {case.head_dim}",
            f"{'N':>6} {'mask':<7}{'tilewise':>9}{'torch':>9}  GFLOP/s  {'ratio':>6} "
            f"{'(spread)':<10}{'best':>6}{'of peak':>8}{'bar':>6}",
        )
        ours, theirs = row["tilewise"], row["torch"]
        limit = peaks.limit(self.limits, self.isa, case.dtype)
        share = "-"
        if limit:
            row["limit"], row["share"] = limit[0], ours["rate"] / limit[1]
            share = f"{100 * row['share']:.0f} %"
        row["bar"] = cases.bar(case, self.isa)
        mark = self._judge(case.name, row["ratio"], row["bar"])
        bar = f"{row['bar']:.1f}" if row["bar"] else "-"
        print(
            f"{case.length:>6} {mask:<7}{ours['rate'] / 1e9:>9.0f}{theirs['rate'] / 1e9:>9.0f}"
            f"{'':11}{self._ratios(row)}{share:>8}{bar:>6} {mark}",
            flush=True,
        )
        return row

    def decode(self, case: cases.Decode, row: dict[str, Any]) -> dict[str, Any]:
        """Prints a row of the decode table; the bar is a fraction of a plain read of the caches."""
        self._begin(
            f"decode: one query row, {case.length} keys, D = {case.head_dim}",
            f"{'dtype':>6} {'heads':<7}{'tilewise':>9}{'torch':>7}{'read':>7} GB/s  {'ratio':>6} "
            f"{'(spread)':<10}{'best':>6}{'of read':>8}{'bar':>6}",
        )
        ours, theirs, read = (row[name]["rate"] / 1e9 for name in ("tilewise", "torch", "read"))
        row["bar"] = cases.DECODE_BAR
        mark = self._judge(case.name, row["share"], row["bar"])
        heads = f"{case.heads}/{case.kv_heads}"
        print(
            f"{case.dtype:>6} {heads:<7}{ours:>9.1f}{theirs:>7.1f}{read:>7.1f}"
            f"{'':7}{self._ratios(row)}{100 * row['share']:>6.0f} %"
            f"{row['bar'] * 100:>4.0f} % {mark}",
            flush=True,
        )
        return row

    def summary(self) -> None:
        """Prints how many bars were met, and which were not."""
        total = self.passed + len(self.missed)
        if total == 0:
            print(f"\nno bars are set for instruction set {self.isa}")
            return
        print(f"\n{self.passed} of {total} bars met on {self.isa}")
        if self.missed:
            print("missed: " + "; ".join(self.missed))

    def _begin(self, section: str, columns: str) -> None:
        if section != self._section:
            self._section = section
            print(f"\n{section}\n{columns}")

    def _judge(self, name: str, value: float, bar: float | None) -> str:
        if bar is None:
            return NO_BAR
        # The value is printed and compared with two decimals.
        met = round(value, 2) >= bar
        if met:
            self.passed += 1
        else:
            self.missed.append(f"{name} ({value:.2f}, bar {bar:.1f})")
        word = PASS if met else MISS
        if not self._colour:
            return word
        return f"\033[{32 if met else 31}m{word}\033[0m"

    @staticmethod
    def _ratios(row: dict[str, Any]) -> str:
        worst = max(row["tilewise"]["spread"], row["torch"]["spread"])
        spread = f"(±{50 * worst:.0f} %)" if row["torch"]["repetitions"] > 1 else "(one run)"
        return f"{row['ratio']:>6.2f} {spread:<10}{row['best_ratio']:>6.2f}"
