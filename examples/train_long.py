"""Trains a small GPT on one long sequence, sharded across GPUs, or across processes on a CPU.

  python examples/train_long.py                         as many ranks as GPUs, else 2 on the CPU
  torchrun --nproc-per-node 8 examples/train_long.py    also on several hosts

Each rank has its rows of the tokens and computes everything except attention from them alone. Rank
0 prints the method that Tilewise chooses, and for each step the loss, the tokens per second of all
ranks and the largest memory of a rank. Into the folder of --out it writes what it prints
(`long.json`) and a plot (`long.png`), if matplotlib is installed.

With GPUs the sequence has 131072 tokens and the model 16 heads of 128 columns, in bfloat16; on a
CPU 4096 tokens and 8 heads of 16 columns, in float32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import corpus
import gpt
import tilewise.distributed as td
from train_distributed import step_cut


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, help="processes, unless torchrun starts them")
    parser.add_argument("--tokens", type=int, help="tokens of the sequence")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--method", default="auto", help="auto, ulysses or allgather")
    parser.add_argument("--layout", default="zigzag", help="zigzag or contiguous")
    parser.add_argument("--text", type=Path, help="the text; else Python's own sources")
    parser.add_argument("--out", type=Path, default=Path("out/long"))
    args = parser.parse_args(arguments)
    gpus = torch.cuda.device_count()
    args.ranks = args.ranks or gpus or 2
    args.tokens = args.tokens or (131072 if gpus else 4096)
    return args


def model_of(args: argparse.Namespace, device: torch.device) -> gpt.GPT:
    """The model for this rank's rows, with distributed attention and the rows' own positions."""
    gpu = device.type == "cuda"
    sizes = {"width": 2048, "heads": 16, "kv_heads": 16} if gpu else {"width": 128, "heads": 8}
    torch.manual_seed(0)
    model = gpt.GPT(gpt.Config(layers=4 if gpu else 2, context=args.tokens, **sizes)).to(device)
    attend = partial(td.attention, causal=True, method=args.method, layout=args.layout)
    for block in model.blocks:
        block.attention.attend = attend
    rows = td.positions(args.tokens, layout=args.layout, device=device)
    model.cos, model.sin = model.cos[rows], model.sin[rows]
    return model


def memory_of(device: torch.device) -> int:
    """The largest memory in MiB that any rank has used: of its GPU, or of its process."""
    if device.type == "cuda":
        used = torch.cuda.max_memory_allocated(device)
    else:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # KiB on Linux
    largest = torch.tensor(used // 2**20, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def draw(steps: list[dict[str, float]], title: str, path: Path) -> None:
    """Plots the loss and the tokens per second."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(8, 3), layout="constrained")
    figure.suptitle(title)
    for place, (name, label) in enumerate(
        (("loss", "loss (nats per token)"), ("tokens_per_second", "tokens per second"))
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        axes.plot([step[name] for step in steps])
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains on this rank; rank 0 reports."""
    first, world = dist.get_rank() == 0, dist.get_world_size()
    text = corpus.load(args.text, args.tokens)
    model = model_of(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = model.config
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, k = (
        torch.empty(1, model.cos.shape[0], heads, config.head_dim, dtype=dtype, device=device)
        for heads in (config.heads, config.kv_heads)
    )
    choice = td.explain(q.requires_grad_(), k, k, causal=True, method=args.method,
                        layout=args.layout)  # fmt: skip
    if first:
        print(f"{args.tokens} tokens on {world} ranks ({device.type}), {text.source}\n{choice}")
    steps: list[dict[str, float]] = []
    for number in range(args.steps):
        begin = time.perf_counter()
        tokens, targets = (x.to(device) for x in text.batch(number, 0, 1, args.tokens))
        loss = step_cut(model, tokens, targets, args.layout)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        speed = args.tokens / (time.perf_counter() - begin)
        memory = memory_of(device)
        steps.append({"loss": loss, "tokens_per_second": speed, "memory_mib": memory})
        if first:
            print(f"step {number + 1}/{args.steps}: loss {loss:.4f}, {speed:.0f} tokens/s, "
                  f"{memory} MiB on a rank", flush=True)  # fmt: skip
    if first:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"tokens": args.tokens, "ranks": world, "method": choice.method, "steps": steps}
        (args.out / "long.json").write_text(json.dumps(record, indent=1) + "\n")
        draw(steps, f"{args.tokens} tokens on {world} ranks", args.out / "long.png")
    if steps[-1]["loss"] >= steps[0]["loss"] and args.steps > 1:
        sys.exit(f"the loss has not decreased: {steps[0]['loss']:.4f}, {steps[-1]['loss']:.4f}")


def run(rank: int, args: argparse.Namespace, store: str | None) -> None:
    """One rank, started by this program (with a file as the store) or by torchrun."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    if store is None:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(
            backend, init_method=f"file://{store}", rank=rank, world_size=args.ranks
        )
    train(args, device)
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if "RANK" in os.environ:
        run(int(os.environ["LOCAL_RANK"]), args, None)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run, (args, store), nprocs=args.ranks)


if __name__ == "__main__":
    main()
