#!/usr/bin/env python3
"""Writes the tables of measurements in the pages from the JSON files in docs/results.

  tools/results_tables.py           rewrites every table in the pages
  tools/results_tables.py --check   exit status 1 and the names of the pages that would change

A page asks for a table by a pair of comments; what stands between them is replaced:

  <!-- table: hopper-forward -->
  <!-- end of table -->
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kernels_hash import kernels_hash

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/decode.md",
    "docs/derivatives.md",
    "docs/distributed.md",
    "docs/distributed-scaling.md",
    "docs/masks.md",
)
MARKED = re.compile(r"(<!-- table: ([a-z0-9-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

Row = dict[str, Any]


def load(name: str) -> Any:
    """A file of docs/results."""
    return json.loads((RESULTS / name).read_text())


def markdown(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def geometric_mean(values: Iterable[float]) -> float:
    """The exponential of the mean logarithm."""
    logs = [math.log(x) for x in values]
    return math.exp(sum(logs) / len(logs))


def length(keys: int) -> str:
    """1024 as 1k, 2^20 as 1M."""
    if keys % 2**20 == 0:
        return f"{keys // 2**20}M"
    return f"{keys // 1024}k" if keys % 1024 == 0 else str(keys)


def against_peers(rows: list[Row]) -> str:
    """TFLOP/s over sequence length, and the ratio to the better one of cuDNN and FA-3."""
    names = {"fwd": "forward", "bwd": "backward"}

    def cell(row: Row | None) -> str:
        if row is None:
            return "-"
        text = f"{row['tflops']['tilewise']:.0f} ({row['ratio']['best']:.2f})"
        return text if row["ratio"]["best"] >= 1 else f"**{text}**"

    found = {(r["direction"], r["head_dim"], r["causal"], r["seqlen"]): r for r in rows}
    return markdown(
        ["", *(f"S = {length(s)}" for s in LENGTHS)],
        (
            [f"{name} D{d} {'causal' if causal else 'full'}"]
            + [cell(found.get((direction, d, causal, s))) for s in LENGTHS]
            for direction, name in names.items()
            for d in (64, 128, 256)
            for causal in (False, True)
        ),
    )


def means(rows: list[Row]) -> str:
    """Geometric mean, least and most of Tilewise's speed over that of each peer."""
    peers = {"best": "better of both", "cudnn": "cuDNN", "fa3": "FA-3"}
    lines = []
    for direction, name in (("fwd", "forward"), ("bwd", "backward")):
        ratios = [r["ratio"] for r in rows if r["direction"] == direction]
        of_peers = [[r[peer] for r in ratios if peer in r] for peer in peers]
        cells = [f"{geometric_mean(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in of_peers]
        lines.append([name, str(len(ratios)), *cells])
    return markdown(["", "points", *peers.values()], lines)


def options(rows: list[Row]) -> str:
    """The cost of an option, as a fraction of the plain kernel's speed."""
    shares: dict[str, dict[str, float]] = {}
    for row in rows:
        if "of_plain" in row:
            shares.setdefault(row["name"], {})[row["direction"]] = row["of_plain"]
    return markdown(
        ["option", "forward", "backward"],
        (
            [name, *(f"{100 * share[d]:.0f} %" if d in share else "-" for d in ("fwd", "bwd"))]
            for name, share in shares.items()
        ),
    )


def masks(rows: list[Row]) -> str:
    """TFLOP/s of the visible pairs, beside FlexAttention and the ratio to it."""
    words = {"fwd": "forward", "bwd": "backward"}
    found: dict[str, list[str]] = {}
    head: dict[str, None] = {}
    for row in rows:
        head[words[row["direction"]]] = None
        cells = found.setdefault(row["name"], [])
        cells.append(f"{row['tflops']['tilewise']:.0f}")
        peer = row["ratio"].get("Flex")
        cells.append("-" if peer is None else f"{row['tflops']['Flex']:.0f} ({peer:.2f})")
    return markdown(
        ["mask", *(word for direction in head for word in (direction, "FlexAttention"))],
        ([name, *cells] for name, cells in found.items()),
    )


def masks_and_dense() -> str:
    """How many times as fast a mask is as its pairs in a dense tensor, least and most of a file."""
    lines = []
    for end in ("", "-d64", "-d256", "-ampere"):
        name = f"bench-h200-masks{end}.json"
        data = load(name)
        ampere = data["machine"]["forced_arch"]
        family = "mma_sync" if ampere or data["head_dim"] > 128 else "wgmma"
        chosen = f"cuda.{family}{' for Ampere' if ampere else ''}"
        line = [f"[{chosen}](docs/results/{name})", str(data["head_dim"])]
        for peer in ("bias", "SDPA"):
            for direction in ("fwd", "bwd"):
                of_peer = [r["ratio"][peer] for r in data["rows"] if r["direction"] == direction]
                line.append(f"{min(of_peer):.1f} to {max(of_peer):.1f}")
        lines.append(line)
    head = ["kernels", "head dimension", "a bias, forward", "backward", "SDPA, forward", "backward"]
    return f"\n{markdown(head, lines)}\n"


def derivatives(rows: list[Row]) -> str:
    """Milliseconds of forward mode and of the double backward, beside PyTorch's MATH."""

    def cells(row: Row) -> list[str]:
        forward, jvp, backward, double = row["milliseconds"]["tilewise"]
        math_ms = [f"{x:.0f} ms" for x in row["milliseconds"].get("MATH", ())] or ["-"] * 4
        return [
            *(row["name"], f"{forward:.2f} ms", f"{jvp:.1f} ms ({jvp / forward:.1f})", math_ms[1]),
            *(f"{backward:.2f} ms", f"{double:.0f} ms ({double / backward:.0f})", math_ms[3]),
        ]

    head = ["", "forward", "forward and `jvp`", "MATH", "backward", "double backward", "MATH"]
    return markdown(head, map(cells, rows))


# (title, contestant of bench_gpu_decode.py, the peer with the same lengths and pages)
DECODED = (
    ("contiguous, full", "dense", "cudnn"),
    ("`cache_seqlens`, full", "lengths", "cudnn lengths"),
    ("pages of 16, full", "page16", "cudnn page16"),
    ("log-normal lengths", "lognormal", "cudnn lognormal"),
    ("log-normal lengths, pages of 16", "lognormal page16", "cudnn lognormal page16"),
)


def decoding(rows: list[Row]) -> str:
    """The time of cuDNN over that of Tilewise for one query per sequence."""
    lines = []
    for label, ours, peer in DECODED:
        pairs = [
            (r["graph_us"][peer], r["graph_us"][ours])
            for r in rows
            if ours in r["graph_us"] and peer in r["graph_us"]
        ]
        ratios = [peer_us / us for peer_us, us in pairs]
        below = sum(x < 0.985 for x in ratios)
        lines.append(
            [label, str(len(ratios)), f"{geometric_mean(ratios):.2f}", f"{min(ratios):.2f}"]
            + [str(below)]
        )
    return markdown(["cache", "points", "mean", "least", "below 0.985"], lines)


def cpu(rows: list[Row]) -> str:
    """Speed over PyTorch's SDPA on the same threads: least, mean and most over all lengths."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        direction = "backward" if row["backward"] else "forward"
        if row.get("ratio"):
            groups.setdefault((row["dtype"], direction), []).append(row["ratio"])
    return markdown(
        ["", "points", "mean", "least", "most"],
        (
            [f"{dtype} {direction}", str(len(x)), f"{geometric_mean(x):.1f}"]
            + [f"{min(x):.1f}", f"{max(x):.1f}"]
            for (dtype, direction), x in groups.items()
        ),
    )


def _problem(row: Row) -> str:
    """The problem of a point of distributed attention."""
    mask = "causal" if row["causal"] else "full"
    return f"{mask}, {length(row['seqlen'])}, {row['heads']} heads over {row['heads_kv']}"


def predicted_host(points: list[Row]) -> str:
    """Predicted efficiency of distributed attention on 2 and 4 GPUs, by method."""
    found: dict[str, list[str]] = {}
    for row in (p for p in points if p["gpus"] <= 4):
        cells = found.setdefault(_problem(row), [])
        cells += [f"{row['efficiency'][m]:.3f}" for m in ("ulysses", "allgather")]
    head = [f"{gpus} GPUs, {m}" for gpus in (2, 4) for m in ("ulysses", "allgather")]
    return markdown(["", *head], ([name, *cells] for name, cells in found.items()))


def predicted_many(points: list[Row]) -> str:
    """Predicted efficiency on 8 to 1024 GPUs by the best method, and its name."""
    points = [p for p in points if p["gpus"] > 4]
    columns = sorted({(p["island"], p["seqlen"]) for p in points})

    def cell(row: Row) -> str:
        return f"{row['efficiency'][row['best']]:.2f} {row['best'].replace('mesh of ', '')}"

    found: dict[tuple[int, int, int], dict[tuple[int, int], str]] = {}
    for row in points:
        line = found.setdefault((row["heads"], row["heads_kv"], row["gpus"]), {})
        line[row["island"], row["seqlen"]] = cell(row)
    return markdown(
        ["heads", "GPUs", *(f"{length(s)}, islands of {island}" for island, s in columns)],
        (
            [f"{heads} over {heads_kv}", str(gpus), *(line[column] for column in columns)]
            for (heads, heads_kv, gpus), line in found.items()
        ),
    )


def over_gpus(rows: list[Row]) -> str:
    """Measured efficiency of distributed attention, by method and transport."""
    methods = list(dict.fromkeys(name for row in rows for name in row["efficiency"]))
    return markdown(
        [f"{rows[0]['gpus']} GPUs", *methods],
        (
            [f"documents, {_problem(r)}" if r["documents"] else _problem(r)]
            + [f"{r['efficiency'][m]:.2f}" if m in r["efficiency"] else "-" for m in methods]
            for r in rows
        ),
    )


def compared(rows: list[Row]) -> str:
    """Points measured before exchanges overlapped, beside the prediction without overlap."""
    head = ["4 GPUs", "method", "measured", "predicted without overlap", "unpredicted time",
            "predicted with overlap"]  # fmt: skip
    return markdown(
        head,
        (
            [_problem(r), r["method"], f"{r['measured']:.2f}", f"{r['without_overlap']:.2f}",
             f"{r['missing_ms']:.1f} ms", f"{r['with_overlap']:.2f}"]
            for r in rows
        ),
    )  # fmt: skip


def compared_now(rows: list[Row]) -> str:
    """Measured efficiency by messages and by copies, beside the prediction."""
    return markdown(
        [f"{rows[0]['gpus']} GPUs", "method", "by messages", "by copies", "predicted"],
        (
            [_problem(r), r["method"]]
            + [f"{r[name]:.2f}" for name in ("messages", "copies", "predicted")]
            for r in rows
        ),
    )


def source(name: str, text: str) -> str:
    """A table with the file that it comes from, its device and its date."""
    data = load(name)
    machine = data.get("machine", {})
    device = machine.get("device") or machine.get("cpu")
    is_current = name.startswith("cpu") or machine.get("kernels") == kernels_hash()
    older = "" if is_current else "from older kernels"
    remarks = "".join(f", {x}" for x in (device, machine.get("date"), older) if x)
    return f"\n{text}\n*[data](docs/results/{name}){remarks}*\n"


def peers_rows() -> list[Row]:
    """Points of the main grid and of grouped heads, in which both peers ran."""
    files = ("bench-h200-peers.json", "bench-h200-peers-gqa.json")
    return [row for name in files for row in load(name)["rows"]]


def table(name: str, build: Callable[[list[Row]], str], key: str = "rows") -> Callable[[], str]:
    """A table of the rows of one file."""
    return lambda: source(name, build(load(name)[key]))


TABLES: dict[str, Callable[[], str]] = {
    "hopper-means": lambda: source("bench-h200-peers.json", means(peers_rows())),
    "hopper": table("bench-h200-peers.json", against_peers),
    "options": table("bench-h100-options.json", options),
    "decoding": table("bench-h100-decode.json", decoding),
    "masks": table("bench-h200-masks.json", masks),
    "masks-dense": masks_and_dense,
    "derivatives": table("bench-h200-derivatives.json", derivatives),
    "cpu-amx": table("cpu-amx.json", cpu, "attention"),
    "distributed-measured": table("bench-h200x2-distributed.json", over_gpus),
    "distributed-host": table("distributed-prediction.json", predicted_host, "points"),
    "distributed-many": table("distributed-prediction.json", predicted_many, "points"),
    "distributed-compared": table("distributed-prediction.json", compared, "compared"),
    "distributed-now": table("distributed-prediction.json", compared_now, "compared_now"),
}


def filled(page: Path, text: str) -> str:
    """The text of a page with its tables rewritten."""

    def replace(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            known = ", ".join(TABLES)
            raise SystemExit(
                f"{page}: the table {match[2]!r} is unknown; it must be one of {known}"
            )
        body = TABLES[match[2]]()
        if page.parent != ROOT:  # links are relative to the page
            body = body.replace("](docs/results/", "](results/")
        return match[1] + body + match[3]

    return MARKED.sub(replace, text)


def main() -> int:
    """Rewrites or checks the pages."""
    parser = argparse.ArgumentParser(description="Writes the tables of measurements in the pages.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    given = parser.parse_args()
    stale = []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        new = filled(page, text)
        if new == text:
            continue
        stale.append(name)
        if not given.check:
            page.write_text(new)
    for name in stale:
        print(f"{name}: {'not what `make results` writes' if given.check else 'written'}")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
