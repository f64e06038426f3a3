#!/usr/bin/env python3
"""Times attention of one sequence over the GPUs of a host, forward and backward, in bf16 with head
dimension 128, beside PyTorch's context_parallel.

  python bench/bench_distributed.py --json RESULT.json
  python bench/bench_distributed.py --device cpu --ranks 2 --lengths 64 --rounds 1   to try it

Efficiency is the time on one GPU over (GPUs x the time on all of them), in one run. A round is a
few short calls in a row, so that the host's work is hidden as in training, or one long call. The
time of a round is that of its slowest rank, and the result is the median of the rounds. Messages,
copies and PyTorch run in separate processes, so that the others have results even if one of them
crashes or hangs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F  # noqa: N812

import tilewise
import tilewise.distributed as td
from tilewise.distributed.layout import packed_runs, runs_of
from tilewise.distributed.transport import VARIABLE as TRANSPORT

HEAD_DIM = 128
HEADS = ((16, 16), (32, 8))
DOCUMENTS = 40  # of log-normal lengths, in the longest sequence
TIMEOUT = 120.0  # seconds after which an exchange counts as failed
CALLS = 4  # in a row, at most
ROUND_SECONDS = 0.2  # of a round with fewer calls in a row
METHODS = ("ulysses", "allgather", "ring")
COPIES = ("ulysses by copies", "allgather by copies")
PEERS = {"context_parallel over tilewise": "tilewise", "context_parallel over cudnn": "cudnn"}


class Point(NamedTuple):
    """One sequence, or documents that fill one."""

    seqlen: int
    causal: bool
    heads: int
    heads_kv: int
    documents: bool = False

    @property
    def name(self) -> str:
        """The name in the result."""
        mask = "documents" if self.documents else "causal" if self.causal else "full"
        return f"{mask} S{self.seqlen} {self.heads} over {self.heads_kv}"

    def ends(self) -> list[int]:
        """Where the documents begin and end."""
        numbers = random.Random(1)
        lengths = [numbers.lognormvariate(0, 1) for _ in range(DOCUMENTS)]
        total = sum(lengths)
        inner = [round(sum(lengths[:i]) * self.seqlen / total) for i in range(DOCUMENTS)]
        return [*inner, self.seqlen]


def points(lengths: list[int]) -> list[Point]:
    """All points, the short ones first."""
    dense = [
        Point(seqlen, causal, *heads)
        for seqlen in lengths for heads in HEADS for causal in (True, False)
    ]  # fmt: skip
    return [*dense, *(Point(lengths[-1], True, *heads, documents=True) for heads in HEADS)]


class Place(NamedTuple):
    """This process: its rank, the number of ranks, and its device."""

    rank: int
    world: int
    device: torch.device
    hosts: Any  # a gloo group of all ranks: its barriers and decisions do not involve a stream


Call = Callable[[], Tensor]  # the forward


def leaves(point: Point, rows: int, place: Place, rows_first: bool = True) -> list[Tensor]:
    """q, k and v of one sequence with that many rows."""
    generator = torch.Generator(place.device).manual_seed(place.rank)

    def made(heads: int) -> Tensor:
        shape = (1, rows, heads, HEAD_DIM) if rows_first else (1, heads, rows, HEAD_DIM)
        x = torch.randn(shape, device=place.device, dtype=torch.bfloat16, generator=generator)
        return x.requires_grad_()

    return [made(point.heads), made(point.heads_kv), made(point.heads_kv)]


def alone(point: Point, place: Place) -> tuple[Call, list[Tensor]]:
    """The whole sequence on one GPU."""
    tensors = leaves(point, point.seqlen, place)
    if not point.documents:
        return lambda: tilewise.attention(*tensors, causal=point.causal), tensors
    ends = torch.tensor(point.ends(), dtype=torch.int32, device=place.device)
    q, k, v = (x.squeeze(0) for x in tensors)
    return lambda: tilewise.attention_varlen(q, k, v, ends, ends, causal=True), tensors


def ours(point: Point, place: Place, method: str) -> tuple[Call, list[Tensor]]:
    """This rank's rows by a method."""
    if not point.documents:
        runs = runs_of(point.seqlen, "zigzag", place.world)[place.rank]
        tensors = leaves(point, sum(end - begin for begin, end in runs), place)
        return lambda: td.attention(*tensors, causal=point.causal, method=method), tensors
    ends = point.ends()
    runs = packed_runs(tuple(ends), "zigzag", place.world)[place.rank]
    tensors = leaves(point, sum(end - begin for begin, end in runs), place)
    q, k, v = (x.squeeze(0) for x in tensors)
    return lambda: td.attention_varlen(q, k, v, ends, causal=True, method=method), tensors


@contextlib.contextmanager
def ring(point: Point, place: Place, backend: str) -> Iterator[tuple[Call, list[Tensor]]]:
    """This rank's rows by PyTorch's context_parallel, over Tilewise's kernels or those of cuDNN."""
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if point.documents:
        raise NotImplementedError("context_parallel has no packed sequences")
    kind = SDPBackend.FLASH_ATTENTION if backend == "tilewise" else SDPBackend.CUDNN_ATTENTION
    mesh = init_device_mesh(place.device.type, (place.world,))
    _attention._cp_options.enable_load_balance = point.causal
    cut = torch.zeros(1, point.seqlen, device=place.device)  # the call requires a buffer
    tensors = leaves(point, point.seqlen // place.world, place, rows_first=False)
    grouped = {"enable_gqa": True} if point.heads != point.heads_kv else {}
    with context_parallel(mesh, buffers=[cut], buffer_seq_dims=[1]), sdpa_kernel(kind):
        yield (
            lambda: F.scaled_dot_product_attention(*tensors, is_causal=point.causal, **grouped),
            tensors,
        )


@contextlib.contextmanager
def over(
    transport: str, point: Point, place: Place, method: str
) -> Iterator[tuple[Call, list[Tensor]]]:
    """This rank's rows by a method whose pieces travel in this way."""
    with mock.patch.dict(os.environ, {TRANSPORT: transport}):
        yield ours(point, place, method)


def prepared(name: str, point: Point, place: Place) -> Any:
    """A context manager with the call of a contestant."""
    cpu = place.device.type == "cpu"
    if name in PEERS:
        if cpu:
            raise NotImplementedError("context_parallel supports no operator for CPUs")
        return ring(point, place, PEERS[name])
    if name in COPIES:
        if cpu:
            raise NotImplementedError("the transport 'copies' needs GPUs")
        return over("copies", point, place, name.split()[0])
    return over("messages", point, place, name)


class Times(NamedTuple):
    """Milliseconds of a forward and a backward in each round: until the results are there, and
    until the host has queued all of its work.
    """

    whole: list[float]
    host: list[float]


def timed(call: Call, tensors: list[Tensor], rounds: int, place: Place, apart: bool) -> Times:
    """The times after two calls of warm-up.

    The ranks begin together, except if they are `apart`.
    """
    times = Times([], [])
    calls = 1
    cuda = place.device.type == "cuda"
    for repetition in range(-2, rounds):
        if cuda:
            torch.cuda.synchronize()
        if not apart:
            dist.barrier(place.hosts)
        begin = time.perf_counter()
        for _ in range(calls):
            for x in tensors:
                x.grad = None
            out = call()
            out.backward(out.detach())
        queued = time.perf_counter() - begin
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        if repetition >= 0:
            times.whole.append(seconds * 1e3 / calls)
            times.host.append(queued * 1e3 / calls)
        elif repetition == -1:
            longest = seconds if apart else max(agreed(seconds, place))
            calls = max(1, min(CALLS, int(ROUND_SECONDS / longest)))
    return times


def slowest(rounds: list[float], place: Place) -> float:
    """The median over rounds of the time of the slowest rank."""
    times = torch.tensor(rounds)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=place.hosts)
    return statistics.median(times.tolist())


def agreed(value: Any, place: Place) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * place.world
    dist.all_gather_object(values, value, group=place.hosts)
    return values


def measured(point: Point, place: Place, names: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """The row of a point; every rank takes part."""
    row: dict[str, Any] = {**point._asdict(), "name": point.name, "gpus": place.world}
    whole = 0.0
    if place.rank == 0:
        whole = statistics.median(timed(*alone(point, place), rounds, place, apart=True).whole)
    whole = agreed(whole, place)[0]
    row |= {"alone_ms": whole, "milliseconds": {}, "host_ms": {}, "efficiency": {}, "peak_mb": {},
            "left_out": {}}  # fmt: skip
    for name in names:
        if place.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        why, taken = "", Times([], [])
        try:
            with prepared(name, point, place) as (call, tensors):
                taken = timed(call, tensors, rounds, place, apart=False)
        except (ImportError, RuntimeError) as error:
            why = str(error).strip().splitlines()[0]
        whys = [text for text in agreed(why, place) if text]
        if whys:
            row["left_out"][name] = whys[0]
            continue
        milliseconds = slowest(taken.whole, place)
        row["milliseconds"][name] = milliseconds
        row["host_ms"][name] = slowest(taken.host, place)
        row["efficiency"][name] = whole / (place.world * milliseconds)
        if place.device.type == "cuda":
            peaks = agreed(torch.cuda.max_memory_allocated() / 1e6, place)
            row["peak_mb"][name] = max(peaks)
    return row


def say(row: dict[str, Any]) -> None:
    """Prints a row."""
    found = ", ".join(f"{name} {x:.3f}" for name, x in row["efficiency"].items())
    print(f"{row['gpus']} GPUs, {row['name']}: {found}", flush=True)
    host = ", ".join(f"{name} {x:.2f}" for name, x in row["host_ms"].items())
    print(f"  alone {row['alone_ms']:.2f} ms; the host alone, in ms: {host}", flush=True)
    for name, why in row["left_out"].items():
        print(f"  without {name}: {why[:120]}", flush=True)


def serve(
    rank: int, world: int, names: tuple[str, ...], rows_file: str, given: argparse.Namespace
) -> None:
    """A rank: measures all points; rank 0 writes the rows after each."""
    cuda = given.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        importlib.import_module("tilewise.integrations.sdpa")
        torch.nn.attention.activate_flash_attention_impl("tilewise")
    dist.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{rows_file}.store", rank=rank,
        world_size=world, timeout=datetime.timedelta(seconds=TIMEOUT),
    )  # fmt: skip
    place = Place(rank, world, device, dist.new_group(backend="gloo"))
    rows, left = [], []
    for point in (point for point in points(given.lengths) if given.only in point.name):
        # Rank 0 decides, because clocks differ.
        if agreed(time.time() > given.until, place)[0]:
            left.append(f"{world} GPUs, {point.name}, {', '.join(names)}: no time was left")
        else:
            rows.append(measured(point, place, names, given.rounds))
            if rank == 0:
                say(rows[-1])
        if rank == 0:
            Path(rows_file).write_text(json.dumps({"rows": rows, "not_measured": left}))
    dist.barrier(place.hosts)
    dist.destroy_process_group()


def spawned(world: int, names: tuple[str, ...], given: argparse.Namespace) -> dict[str, Any]:
    """The rows of contestants, measured in new processes; if these fail, the rows before that."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        why = ""
        try:
            torch.multiprocessing.spawn(serve, (world, names, str(rows), given), nprocs=world)
        except Exception as error:  # a rank has failed, for whatever reason
            why = f"{world} GPUs, {', '.join(names)}: {str(error).strip().splitlines()[-1]}"
            print(why, flush=True)
        found = {"rows": [], "not_measured": []}
        if rows.is_file():
            found = json.loads(rows.read_text())
        return {**found, "not_measured": [*found["not_measured"], *([why] if why else [])],
                "failed": bool(why)}  # fmt: skip


def merged(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with the contestants of all parts."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for row in (row for part in parts for row in part["rows"]):
        before = rows.setdefault((row["gpus"], row["name"]), row)
        for key in ("milliseconds", "host_ms", "efficiency", "peak_mb", "left_out"):
            before[key] |= row[key]
    return list(rows.values())


def predicted(row: dict[str, Any]) -> dict[str, float]:
    """The efficiency that bench/distributed_model.py predicts; none for documents."""
    import distributed_model as model

    if row["documents"]:
        return {}
    inputs = json.loads((model.RESULTS / "distributed-links.json").read_text())
    problem = model.Problem(row["seqlen"], row["causal"], row["heads"], row["heads_kv"])
    found = model.efficiencies(problem, row["gpus"], row["gpus"], model.machine_of(inputs))
    return {name: found[name] for name in METHODS if name in found}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Times attention over the GPUs of a host.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu only tries the script, over gloo")  # fmt: skip
    parser.add_argument(
        "--ranks", help="2,4 for example; default: 2, 4 and 8, as far as there are GPUs"
    )
    parser.add_argument("--lengths", default="32768,131072", help="rows; default: %(default)s")
    parser.add_argument("--only", default="", help="points with this in the name: documents")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--time-limit", type=float, default=600, help="seconds")
    parser.add_argument("--json", type=Path, help="the file to write")
    given = parser.parse_args()
    given.lengths = [int(x) for x in given.lengths.split(",")]
    if given.ranks is None:
        available = torch.cuda.device_count() if given.device == "cuda" else 2
        given.worlds = [n for n in (2, 4, 8) if n <= available]
    else:
        given.worlds = [int(x) for x in given.ranks.split(",")]
    given.until = time.time() + given.time_limit
    return given


def main() -> int:
    """Measures every number of ranks in processes of their own."""
    given = parse()
    if not given.worlds:
        print("one GPU or none: attention over several GPUs cannot be measured here")
        return 0
    cuda = given.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else "CPU, over gloo"
    result: dict[str, Any] = {
        "machine": {"device": name, "torch": torch.__version__, "tilewise": tilewise.__version__},
        "rounds": given.rounds, "rows": [], "not_measured": [],
    }  # fmt: skip
    failed = False
    parts: list[dict[str, Any]] = []
    for world in given.worlds:
        for names in (METHODS, COPIES, tuple(PEERS)):
            parts.append(spawned(world, names, given))
            failed |= names == METHODS and parts[-1]["failed"]
            result["rows"] = merged(parts)
            result["not_measured"] = [line for part in parts for line in part["not_measured"]]
            for row in result["rows"]:
                row["predicted"] = predicted(row) if cuda else {}
            if given.json is not None:  # after each part, so that nothing is lost
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
