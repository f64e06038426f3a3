"""Trains a small GPT on sequences that are sharded across processes, and compares with one process.

  python examples/train_distributed.py [--ranks 2]    starts the processes on this machine
  torchrun --nproc-per-node 2 examples/train_distributed.py

Each rank has its rows of the tokens and targets, computes everything except attention from them
alone, and adds the gradients of the weights to those of the other ranks. Rank 0 also trains a copy
of the model on whole sequences, and the program fails unless the losses of both agree.

The processes exchange tensors over gloo, on CPUs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import gpt
import tilewise.distributed as td

LARGEST_DIFFERENCE = 1e-4  # of the losses, in nats


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="processes to start, without torchrun")
    parser.add_argument("--rows", type=int, default=510, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--method", default="auto", help="auto, ulysses or allgather")
    parser.add_argument("--layout", default="zigzag", help="zigzag or contiguous")
    return parser.parse_args()


def batch_of(step: int, rows: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets [2, rows]: bytes of the source of the model, the same on all ranks."""
    text = torch.tensor(list(Path(gpt.__file__).read_bytes()))
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - rows - 1, (2, 1), generator=generator)
    window = text[starts + torch.arange(rows + 1)]
    return window[:, :-1], window[:, 1:]


def cut_model(config: gpt.Config, args: argparse.Namespace) -> gpt.GPT:
    """The model for this rank's rows, with distributed attention and the rows' own positions."""
    model = gpt.GPT(config)
    attend = partial(td.attention, causal=True, method=args.method, layout=args.layout)
    for block in model.blocks:
        block.attention.attend = attend
    rows = td.positions(config.context, layout=args.layout)
    model.cos, model.sin = model.cos[rows], model.sin[rows]
    return model


def step_cut(model: gpt.GPT, tokens: Tensor, targets: Tensor, layout: str) -> float:
    """The loss of the whole batch; leaves its gradient in the weights of every rank."""
    local_tokens, local_targets = (td.shard(x, 1, layout=layout) for x in (tokens, targets))
    with torch.autocast(
        local_tokens.device.type, torch.bfloat16, enabled=local_tokens.device.type == "cuda"
    ):
        logits = model(local_tokens).float().flatten(0, 1)
    # The losses of the ranks add up to the mean over all tokens.
    loss = (
        functional.cross_entropy(logits, local_targets.flatten(), reduction="sum") / targets.numel()
    )
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    return total.item()


def step_whole(model: gpt.GPT, tokens: Tensor, targets: Tensor) -> float:
    loss = model.loss(tokens, targets)
    loss.backward()
    return loss.item()


def train(args: argparse.Namespace) -> bool:
    """Trains on this rank; says whether the losses agree with those of whole sequences."""
    first = dist.get_rank() == 0
    config = gpt.Config(layers=2, width=128, heads=8, kv_heads=4, context=args.rows)
    torch.manual_seed(0)
    model = cut_model(config, args)
    torch.manual_seed(0)
    whole = gpt.GPT(config) if first else None
    models = [m for m in (model, whole) if m is not None]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    q = torch.empty(2, len(td.positions(args.rows, layout=args.layout)), 8, 16, requires_grad=True)
    choice = td.explain(q, q[:, :, :4], q[:, :, :4], causal=True, method=args.method,
                        layout=args.layout)  # fmt: skip
    if first:
        print(choice)
    worst = 0.0
    for step in range(args.steps):
        tokens, targets = batch_of(step, args.rows)
        loss = step_cut(model, tokens, targets, args.layout)
        if whole is not None:
            expected = step_whole(whole, tokens, targets)
            worst = max(worst, abs(loss - expected))
            print(f"step {step}: loss {loss:.6f} on {dist.get_world_size()} ranks, "
                  f"{expected:.6f} on one")  # fmt: skip
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if first:
        print(f"largest difference {worst:.1e}, allowed {LARGEST_DIFFERENCE:.0e}")
    return worst <= LARGEST_DIFFERENCE


def run(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    good = train(args)
    dist.destroy_process_group()
    if not good:
        sys.exit(1)


def main() -> None:
    args = options()
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
        good = train(args)
        dist.destroy_process_group()
        sys.exit(0 if good else 1)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run, (args, store), nprocs=args.ranks)


if __name__ == "__main__":
    main()
