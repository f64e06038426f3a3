#!/usr/bin/env python3
"""Predicts how attention of one sequence scales over GPUs, from one-GPU times and link speeds.

  python bench/distributed_model.py --out docs/results/distributed-prediction.json
                                    --plot docs/images/distributed-prediction.png

The inputs are docs/results/distributed-links.json and the one-GPU results that it names; nothing is
fitted to a measurement on several GPUs. Bytes, messages and products are those of
``tilewise.distributed.cost``, which chooses the method of a call. Efficiency is the time on one GPU
over (GPUs x the time on them), forward and backward in bf16 with head dimension 128.

Left out are copies that put rows in order for a message, SMs that NCCL occupies, and congestion of
the network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilewise.cli import plot
from tilewise.distributed.cost import (
    Shape,
    Work,
    allgather_work,
    seconds,
    ulysses_work,
    with_host,
)  # fmt: skip
from tilewise.distributed.dense import DenseCut
from tilewise.distributed.layout import runs_of

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
MEASURED = "bench-h200x2-distributed.json"
HEAD_DIM, BYTES = 128, 2
ULYSSES, ALLGATHER = "ulysses", "allgather"
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024)
ISLANDS = (8, 72)  # numbers of GPUs that NVLink connects
LENGTHS = (131072, 1048576, 8388608)


class Problem(NamedTuple):
    """One sequence."""

    seqlen: int
    causal: bool
    heads: int
    heads_kv: int


class Machine(NamedTuple):
    """The work of a GPU and the bytes of its links, per second."""

    flops: dict[tuple[str, bool], float]  # by heads ("16 over 16") and causal, forward and backward
    multiprocessors: int
    tile_rows: int
    nvlink: float
    network: float
    message: float  # seconds
    host: float  # seconds to start a group of heads, in a forward or a backward


def machine_of(inputs: dict[str, Any]) -> Machine:
    """The machine of the inputs, with the speeds of the one-GPU results that they name."""
    gpu = inputs["gpu"]
    flops = {}
    for heads, file in gpu["files"].items():
        rows = {row["name"]: row for row in json.loads((RESULTS / file).read_text())["rows"]}
        for causal in (True, False):
            of = f"D128 S{gpu['seqlen']} {'causal' if causal else 'full'} {gpu['kinds'][heads]}"
            forward, backward = (
                rows[f"bf16 {direction} {of}"]["tflops"]["tilewise"] * 1e12
                for direction in ("fwd", "bwd")
            )
            # The backward has 5 products for the forward's 2.
            flops[heads, causal] = 3.5 / (1 / forward + 2.5 / backward)
    return Machine(
        flops, gpu["multiprocessors"], gpu["tile_rows"], inputs["nvlink"]["gb_s"] * 1e9,
        inputs["network"]["gb_s"] * 1e9, inputs["message"]["microseconds"] * 1e-6,
        inputs["host"]["milliseconds"] * 1e-3,
    )  # fmt: skip


def cut_of(problem: Problem, world: int) -> DenseCut:
    """The zigzag cut of the sequence."""
    runs = tuple(runs_of(problem.seqlen, "zigzag", world))
    return DenseCut(runs, runs, (None, 0) if problem.causal else (None, None), 1, False)


def shape_of(heads: int, heads_kv: int) -> Shape:
    """A differentiable call of one sequence on GPUs."""
    return Shape(
        1, (heads, heads_kv), (HEAD_DIM, HEAD_DIM), (BYTES,) * 3, torch.device("cuda"), True
    )


def computing(work: Work, problem: Problem, tiles: float, machine: Machine) -> float:
    """The seconds of a rank's kernels, of which each has `tiles` tiles of rows."""
    rate = machine.flops[f"{problem.heads} over {problem.heads_kv}", problem.causal]
    # Kernels share the last wave of tiles, so that only fewer tiles than SMs leave some idle.
    idle = max(1.0, machine.multiprocessors / tiles)
    return work.flops / rate * idle


def alone(problem: Problem, machine: Machine) -> float:
    """The seconds on one GPU."""
    work = ulysses_work(shape_of(problem.heads, problem.heads_kv), cut_of(problem, 1))
    return computing(work, problem, problem.seqlen / machine.tile_rows * problem.heads, machine)


class Flow(NamedTuple):
    """The seconds that an exchange occupies a rank's links."""

    nvlink: float
    network: float


def flow_of(work: Work, outside: float, machine: Machine) -> Flow:
    """An exchange: the fraction `outside` of its bytes and messages comes over the network."""
    messages = work.messages * machine.message
    return Flow(
        (1 - outside) * (work.bytes / machine.nvlink + messages),
        outside * (work.bytes / machine.network + messages),
    )


def flat(
    problem: Problem, world: int, island: int, method: str, machine: Machine
) -> tuple[float, float]:
    """The seconds by one method over all GPUs: with overlap, and without."""
    shape, cut = shape_of(problem.heads, problem.heads_kv), cut_of(problem, world)
    work = (ulysses_work if method == ULYSSES else allgather_work)(shape, cut)
    outside = max(0, world - island) / (world - 1)
    flow = flow_of(work, outside, machine)
    if method == ULYSSES:
        tiles = problem.seqlen / machine.tile_rows * problem.heads / world
    else:  # a rank has two chunks, one call each if causal
        calls = 2 if problem.causal else 1
        tiles = problem.seqlen / world / calls / machine.tile_rows * problem.heads
    kernels = computing(work, problem, tiles / work.groups, machine)
    moving = max(flow)
    overlapping = seconds(moving, kernels, work.groups)
    return (
        with_host(overlapping, work.groups, work.passes, machine.host),
        moving + kernels + work.passes * machine.host,
    )


def mesh(problem: Problem, inside: int, rows: int, island: int, machine: Machine) -> float:
    """The seconds by "ulysses" in the rows of a mesh, of `inside` GPUs of an island each, and
    "allgather" across its rows.
    """
    in_row = problem._replace(seqlen=problem.seqlen // rows)
    exchanged = ulysses_work(shape_of(problem.heads, problem.heads_kv), cut_of(in_row, inside))
    heads = problem.heads // inside, max(1, problem.heads_kv // inside)
    gathered = allgather_work(shape_of(*heads), cut_of(problem, rows))
    outside = max(0, rows - max(1, island // inside)) / (rows - 1)
    first, second = flow_of(exchanged, 0.0, machine), flow_of(gathered, outside, machine)
    calls = 2 if problem.causal else 1
    tiles = in_row.seqlen / calls / machine.tile_rows * heads[0]
    kernels = computing(gathered, problem, tiles / exchanged.groups / gathered.groups, machine)
    # While a row computes a group of heads, the parts of that group travel between the rows.
    between = seconds(max(second), kernels, gathered.groups)
    time = seconds(first.nvlink, max(between, first.nvlink + second.nvlink), exchanged.groups)
    groups = exchanged.groups * gathered.groups
    return with_host(time, groups, exchanged.passes, machine.host)


def efficiencies(problem: Problem, world: int, island: int, machine: Machine) -> dict[str, float]:
    """The efficiency of each method that can use all GPUs; of meshes, the best one's."""
    times = {ALLGATHER: flat(problem, world, island, ALLGATHER, machine)[0]}
    if problem.heads % world == 0:
        times[ULYSSES] = flat(problem, world, island, ULYSSES, machine)[0]
    for inside in range(2, min(island, world - 1) + 1):
        if world % inside == 0 and problem.heads % inside == 0:
            name = f"mesh of {world // inside} x {inside}"
            times[name] = mesh(problem, inside, world // inside, island, machine)
    meshes = [name for name in times if name not in (ALLGATHER, ULYSSES)]
    for name in sorted(meshes, key=times.__getitem__)[1:]:
        del times[name]
    whole = alone(problem, machine)
    return {name: whole / (world * time) for name, time in times.items()}


def without_overlap(problem: Problem, world: int, method: str, machine: Machine) -> float:
    """The efficiency on one host if nothing is computed while something moves."""
    return alone(problem, machine) / (world * flat(problem, world, world, method, machine)[1])


def points(machine: Machine) -> Iterator[dict[str, Any]]:
    """The predictions: 2 and 4 GPUs of a host, then 8 to 1024."""
    for heads, heads_kv in ((16, 16), (32, 8)):
        for causal in (True, False):
            for world in (2, 4):
                for seqlen in (32768, 131072):
                    problem = Problem(seqlen, causal, heads, heads_kv)
                    yield point(problem, world, 8, machine)
        for world in SIZES:
            for island in ISLANDS:
                for seqlen in LENGTHS:
                    yield point(Problem(seqlen, True, heads, heads_kv), world, island, machine)


def point(problem: Problem, world: int, island: int, machine: Machine) -> dict[str, Any]:
    """One prediction as it is stored."""
    found = efficiencies(problem, world, island, machine)
    best = max(found, key=found.__getitem__)
    return {**problem._asdict(), "gpus": world, "island": island, "best": best,
            "efficiency": {name: round(x, 4) for name, x in found.items()}}  # fmt: skip


def compared(inputs: dict[str, Any], machine: Machine) -> Iterator[dict[str, Any]]:
    """The measured points beside predictions without overlap, as they were measured, and with it.

    `missing_ms` is the part of the measured time on a GPU that the prediction without overlap does
    not contain.
    """
    for row in inputs["measured"]["points"]:
        problem = Problem(row["seqlen"], row["causal"], row["heads"], row["heads_kv"])
        whole = alone(problem, machine)
        for method in (ULYSSES, ALLGATHER):
            plain = without_overlap(problem, row["gpus"], method, machine)
            overlap = efficiencies(problem, row["gpus"], row["gpus"], machine)[method]
            missing = whole / row["gpus"] * (1 / row[method] - 1 / plain)
            yield {
                **problem._asdict(), "gpus": row["gpus"], "method": method,
                "measured": row[method], "without_overlap": round(plain, 4),
                "missing_ms": round(missing * 1e3, 2), "with_overlap": round(overlap, 4),
            }  # fmt: skip


def compared_now(rows: list[dict[str, Any]], machine: Machine) -> Iterator[dict[str, Any]]:
    """Measured points of full and causal sequences on one host beside their predictions."""
    for row in (row for row in rows if not row["documents"]):
        problem = Problem(row["seqlen"], row["causal"], row["heads"], row["heads_kv"])
        predicted = efficiencies(problem, row["gpus"], row["gpus"], machine)
        for method in (ULYSSES, ALLGATHER):
            yield {
                **problem._asdict(), "gpus": row["gpus"], "method": method,
                "messages": row["efficiency"][method],
                "copies": row["efficiency"][f"{method} by copies"],
                "predicted": round(predicted[method], 4),
            }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Draws the efficiency of the best method over GPUs, a panel per size of an island.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = plot.figure(
        len(ISLANDS), "Predicted efficiency, not measured: causal, 16 heads of 128, bf16, H200"
    )
    colours = ("#6fb1cc", "#0b6e99", "#c2185b")
    for axis, island in zip(axes, ISLANDS, strict=True):
        for seqlen, colour in zip(LENGTHS, colours, strict=True):
            line = [
                (p["gpus"], p["efficiency"][p["best"]]) for p in result["points"]
                if (p["island"], p["seqlen"], p["heads"]) == (island, seqlen, 16)
                and p["causal"] and p["gpus"] in SIZES
            ]  # fmt: skip
            label = f"{seqlen // 1024}k rows" if seqlen < 2**20 else f"{seqlen // 2**20}M rows"
            axis.plot(*zip(*line, strict=True), color=colour, marker="o", markersize=3, label=label)
        axis.set_xscale("log", base=2)
        axis.set_ylim(0, 1.02)
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.set_title(f"{island} GPUs per NVLink island", fontsize=9, loc="left")
        axis.set_xlabel("GPUs", fontsize=8)
    axes[0].legend(fontsize=8, edgecolor="none")
    figure.savefig(path)


def main() -> None:
    """Predicts, prints what was measured beside it, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--plot", type=Path, help="the picture to draw")
    given = parser.parse_args()
    inputs = json.loads((RESULTS / "distributed-links.json").read_text())
    machine = machine_of(inputs)
    measured = json.loads((RESULTS / MEASURED).read_text())["rows"]
    result = {
        "inputs": "distributed-links.json", "measured": MEASURED,
        "compared": list(compared(inputs, machine)),
        "compared_now": list(compared_now(measured, machine)), "points": list(points(machine)),
    }  # fmt: skip
    for row in result["compared"] + result["compared_now"]:
        print(*(f"{name} {value}" for name, value in row.items()), sep=", ")
    if given.out is None:
        for row in result["points"]:
            print(*(f"{name} {value}" for name, value in row.items()), sep=", ")
    else:
        given.out.write_text(json.dumps(result, indent=1) + "\n")
    if given.plot is not None:
        draw(result, given.plot)


if __name__ == "__main__":
    main()
