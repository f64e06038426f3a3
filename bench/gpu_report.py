"""The output of a GPU benchmark: a line per point, the targets ("bars"), the plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import gpu_peers
from gpu_cases import FP32, MEAN_BAR, POINT_BAR, Case
from gpu_contestants import TITLES
from tilewise.cli import plot, tables

# A result this much further from double precision than the peer's is wrong rather than inexact.
WRONG = 4.0


def make_row(
    case: Case,
    timings: dict[str, Any],
    errors: dict[str, dict[str, float]],
    left_out: dict[str, str],
    kernel: dict[str, Any],
) -> dict[str, Any]:
    """One result: TFLOP/s of all contestants, ratios to the peers, errors, the target."""
    row: dict[str, Any] = {**case.to_json(), "kernel": kernel, "left_out": left_out}
    row["tflops"] = {n: case.flop / t.median / 1e9 for n, t in timings.items()}
    row["milliseconds"] = {n: t.median for n, t in timings.items()}
    row["spread"] = {n: t.spread for n, t in timings.items()}
    if any(t.power for t in timings.values()):
        row |= power_of(case, timings)
    row["errors"] = errors
    row["largest_error"] = {n: max(e.values()) for n, e in errors.items()}
    if "tilewise" not in timings:
        return row
    ours = timings["tilewise"].median
    row["ratio"] = {n: t.median / ours for n, t in timings.items() if n != "tilewise"}
    best = gpu_peers.ratio_to_best(case, row["ratio"])
    if best is not None and case.dtype != FP32:
        row["ratio"]["best"] = best
    peer = row["judged_by"] = case.judged_by(kernel.get("name", ""))
    if peer in row["ratio"]:
        row["bar"] = POINT_BAR[peer]
        row["met"] = round(row["ratio"][peer], 2) >= row["bar"]
    row["right"] = is_right(row)
    return row


def power_of(case: Case, timings: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Mean watts, MHz and picojoules per useful operation, for contestants whose power was read."""
    read = {n: t for n, t in timings.items() if t.power}
    watts = {n: fmean(p.watts for p in t.power) for n, t in read.items()}
    return {
        "watts": watts,
        "sm_mhz": {n: fmean(p.sm_mhz for p in t.power) for n, t in read.items()},
        "pj_per_flop": {n: 1e9 * w * read[n].median / case.flop for n, w in watts.items()},
    }


def power_line(row: dict[str, Any]) -> str:
    """The power line below the line of a point."""

    def of(name: str, key: str, digits: int) -> str:
        values = row.get(key, {})
        return f"{values[name]:.{digits}f}" if name in values else "-"

    parts = [
        f"{name} {of(name, 'watts', 0)} W {of(name, 'sm_mhz', 0)} MHz "
        f"{of(name, 'pj_per_flop', 2)} pJ/flop"
        for name in row["tflops"]
    ]
    return "    " + "; ".join(parts)


def is_right(row: dict[str, Any]) -> bool:
    """Whether Tilewise's error is finite and, where a peer ran, comparable to the best peer's."""
    errors = dict(row["largest_error"])
    ours, _ = errors.pop("tilewise"), errors.pop("tilewise-tf32", None)
    return math.isfinite(ours) and (not errors or ours <= WRONG * min(errors.values()))


HEAD = ("point", "batch", "tilewise", "of gemm", "peers: TFLOP/s (ratio)", "error", "peer's", "")


def line(row: dict[str, Any], roofline: dict[str, Any]) -> list[str]:
    """The cells of a row."""
    if "tilewise" not in row["tflops"]:
        return [row["name"], str(row["batch"]), "-", "-", row["left_out"].get("tilewise", "")] + [
            ""
        ] * 3
    ours = row["tflops"]["tilewise"]
    peers = [
        f"{TITLES.get(name, name)} {row['tflops'][name]:.0f} ({ratio:.2f})"
        if name in row["tflops"]
        else f"{name} ({ratio:.2f})"
        for name, ratio in row["ratio"].items()
    ]
    others = [e for n, e in row["largest_error"].items() if not n.startswith("tilewise")]
    verdict = "" if "met" not in row else "pass" if row["met"] else "MISS"
    return [
        row["name"],
        str(row["batch"]),
        f"{ours:.1f}",
        f"{100 * ours / roofline['gemm_bf16_tflops']:.0f} %",
        "  ".join(peers) or "-",
        f"{row['largest_error']['tilewise']:.1e}",
        f"{min(others):.1e}" if others else "-",
        verdict if row["right"] else "WRONG",
    ]


def print_line(cells: Sequence[str]) -> None:
    """Prints one line immediately, in columns wide enough for every name."""
    widths = (32, 6, 9, 8, 44, 9, 9, 5)
    left = (0, 4, 7)
    print(
        " ".join(
            cell.ljust(w) if i in left else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
        ).rstrip(),
        flush=True,
    )


def geometric_mean(values: Iterable[float]) -> float:
    """The mean of positive numbers; NaN if there are none."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Points below their bar, geometric means, wrong results."""
    ran = [r for r in rows if "ratio" in r]
    means: dict[str, dict[str, Any]] = {}
    for direction in ("fwd", "bwd"):
        for name in (*TITLES, "best"):
            ratios = [
                r["ratio"][name]
                for r in ran
                if r["direction"] == direction
                and name in r["ratio"]
                and (r["dtype"] == FP32) == (name == "efficient")
            ]
            if not ratios:
                continue
            mean = {"geometric_mean": geometric_mean(ratios), "points": len(ratios)}
            mean |= {"least": min(ratios), "greatest": max(ratios)}
            if any(r.get("judged_by") == name for r in ran) and (direction, name) in MEAN_BAR:
                mean |= {"bar": MEAN_BAR[direction, name]}
                mean["met"] = round(mean["geometric_mean"], 3) >= mean["bar"]
            means[f"{direction} over {name}"] = mean
    judged = [r for r in ran if "met" in r]
    return {
        "points": len(judged),
        "points_met": sum(r["met"] for r in judged),
        "missed": [
            f"{r['name']} ({r['ratio'][r['judged_by']]:.2f})" for r in judged if not r["met"]
        ],
        "wrong": [r["name"] for r in ran if not r["right"]],
        "less_exact_than_efficient": [
            r["name"]
            for r in ran
            if "efficient" in r["largest_error"]
            and r["dtype"] == FP32
            and r["largest_error"]["tilewise"] > r["largest_error"]["efficient"]
        ],
        "not_run": [f"{r['name']}: {r['left_out']['tilewise']}" for r in rows if "ratio" not in r],
        "means": means,
        "largest_spread": largest_spread(ran),
    }


def largest_spread(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The largest distance between quartiles, relative to the median: of Tilewise ("ours") and of
    the peers.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        for name, spread in row["spread"].items():
            whose = "ours" if name.startswith("tilewise") else "peers"
            if spread >= found.get(whose, {"spread": -1.0})["spread"]:
                found[whose] = {"spread": spread, "name": name, "point": row["name"]}
    return found


def show_summary(result: dict[str, Any]) -> None:
    """Prints the bars, the launch overhead and the calls through autograd."""
    s = result["summary"]
    print(f"\n{s['points_met']} of {s['points']} points at or above their bar")
    for title, names in (
        ("below", s["missed"]),
        ("WRONG results", s["wrong"]),
        ("fp32 less exact than EFFICIENT", s["less_exact_than_efficient"]),
        ("not run", s["not_run"]),
    ):
        if names:
            print(f"{title}: " + "; ".join(names))
    for whose, most in s["largest_spread"].items():
        where = f"{most['name']}, {most['point']}"
        print(
            f"largest distance between quartiles, {whose}: {100 * most['spread']:.1f} % ({where})"
        )
    if s["means"]:
        head = ["ratio to the peer", "geometric mean", "least", "greatest", "points", "bar", ""]
        lines = [
            [
                name,
                f"{m['geometric_mean']:.3f}",
                f"{m['least']:.2f}",
                f"{m['greatest']:.2f}",
                str(m["points"]),
                f"{m['bar']:.2f}" if "bar" in m else "-",
                {True: "pass", False: "MISS", None: ""}[m.get("met")],
            ]
            for name, m in s["means"].items()
        ]
        print()
        tables.show(head, lines, left=(0, 6))
    if result.get("launch_overhead"):
        print("\nOne call from Python, B1 H8 S128 D64, microseconds:")
        lines = [
            [name, f"{t['launch_us']:.1f}", f"{t['alone_us']:.1f}"]
            for name, t in result["launch_overhead"].items()
        ]
        tables.show(["call", "busy in Python", "until the result"], lines, left=(0,))
    if result.get("graph_latency"):
        print("\nOne call in a CUDA graph, microseconds:")
        rows = result["graph_latency"]
        names = list(dict.fromkeys(name for r in rows for name in r["microseconds"]))
        lines = [
            [r["name"], *(f"{r['microseconds'].get(name, math.nan):.1f}" for name in names)]
            for r in rows
        ]
        tables.show(["point", *(TITLES.get(name, name) for name in names)], lines, left=(0,))
        for r in rows:
            for name, why in r["left_out"].items():
                print(f"{r['name']}: {name} does not support it: {why}")
    if result.get("end_to_end"):
        print("\nForward and backward through autograd, milliseconds:")
        lines = [
            [r["name"], *(f"{r['milliseconds'].get(n, math.nan):.2f}" for n in ("tilewise", "fa2")),
             f"{r['ratio']:.2f}"]
            for r in result["end_to_end"]
        ]  # fmt: skip
        tables.show(["point", "tilewise", "FA-2", "ratio"], lines, left=(0,))
    if result["not_measured"]:
        print(f"\nout of time: {len(result['not_measured'])} points were not measured")


COLOURS = {
    "tilewise": "#0b6e99",
    "fa2": "#e07b39",
    "cudnn": "#5a8f3c",
    "efficient": "#7a5195",
    "fa3": "#c2185b",
    "fa4": "#8d6e63",
}


def draw(rows: list[dict[str, Any]], title: str, path: Path) -> bool:
    """TFLOP/s over sequence length: a panel per direction and head dimension, bf16, causal and
    full. Returns whether there was anything to draw; needs matplotlib.
    """
    chosen = [r for r in rows if r["dtype"] == "bf16" and r["heads"] == r["kv_heads"]]
    dims = [d for d in (64, 128, 256) if any(r["head_dim"] == d for r in chosen)]
    directions = [d for d in ("fwd", "bwd") if any(r["direction"] == d for r in chosen)]
    if not dims or not directions:
        return False
    panels = [(direction, dim) for direction in directions for dim in dims]
    figure, axes = plot.figure(len(panels), title)
    for axis, (direction, dim) in zip(axes, panels, strict=True):
        in_panel = [r for r in chosen if r["direction"] == direction and r["head_dim"] == dim]
        named: set[str] = set()
        for name, colour in COLOURS.items():
            for causal, style in ((False, "-"), (True, "--")):
                points = sorted(
                    (r["seqlen"], r["tflops"][name])
                    for r in in_panel
                    if r["causal"] == causal and name in r["tflops"]
                )
                if not points:
                    continue
                label = None if name in named else {"tilewise": "Tilewise", **TITLES}[name]
                named.add(name)
                axis.plot(
                    *zip(*points, strict=True),
                    style,
                    color=colour,
                    linewidth=2.2 if name == "tilewise" else 1.3,
                    marker="o",
                    markersize=3,
                    label=label,
                )
        lengths = sorted({r["seqlen"] for r in in_panel})
        axis.set_xscale("log", base=2)
        axis.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        which = "forward" if direction == "fwd" else "backward"
        axis.set_title(f"{which}, D {dim}: TFLOP/s (dashed: causal)", fontsize=9, loc="left")
        if named:
            axis.legend(fontsize=7, framealpha=0.9, edgecolor="none", loc="lower right")
    plot.save(figure, path)
    return True
