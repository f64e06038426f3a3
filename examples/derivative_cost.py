"""What `meanflow.py` and `force_field.py` share: training with two backends, and what a call costs.

PyTorch's fused kernels have neither forward mode nor second derivatives; its MATH backend has both,
and keeps matrices of rows x keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.cli.progress import Progress

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # [batch, rows, heads, head_dim] each


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by PyTorch's MATH backend."""
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


BACKENDS: dict[str, Attention] = {"tilewise": tilewise.attention, "MATH": math}


Losses = dict[str, list[float]]  # of every step, by backend


def parser(description: str, name: str, rate: float) -> argparse.ArgumentParser:
    """The options that both examples have."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--quick", action="store_true", help="a few steps and a short sequence")
    options.add_argument("--steps", type=int, help="steps with each backend")
    options.add_argument("--width", type=int, default=64)
    options.add_argument("--depth", type=int, default=2, help="transformer blocks")
    options.add_argument("--rate", type=float, default=rate, help="largest learning rate")
    options.add_argument("--rows", type=int, help="rows of the attention whose cost is measured")
    options.add_argument("--out", type=Path, default=Path("out") / name)
    return options


def parse(
    options: argparse.ArgumentParser, arguments: Sequence[str] | None, steps: int
) -> argparse.Namespace:
    """The command line; `steps` is the default without --quick."""
    given = options.parse_args(arguments)
    given.steps = given.steps or (6 if given.quick else steps)
    given.rows = given.rows or (1024 if given.quick else 4096)
    return given


def train(
    options: argparse.Namespace,
    build: Callable[[Attention], nn.Module],
    loss_of: Callable[[nn.Module], tuple[Tensor, Tensor]],
) -> tuple[dict[str, nn.Module], Losses]:
    """Trains a model with each backend, from the same weights and data, and prints the last losses.

    `loss_of` draws a batch; it returns the loss whose gradient is taken and the one to report.
    """
    models: dict[str, nn.Module] = {}
    losses: Losses = {}
    texts = []
    for backend, attention in BACKENDS.items():
        torch.manual_seed(0)
        model, seen, start = build(attention), [], time.perf_counter()
        optimizer = torch.optim.Adam(model.parameters(), lr=options.rate, betas=(0.9, 0.99))
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, options.steps)
        with Progress(options.steps, f"training with {backend}") as bar:
            for _ in range(options.steps):
                minimised, loss = loss_of(model)
                optimizer.zero_grad()
                minimised.backward()
                optimizer.step()
                schedule.step()
                seen.append(loss.item())
                bar.update(loss=f"{seen[-1]:.4f}")
        models[backend], losses[backend] = model, seen
        last = sum(seen[-20:]) / len(seen[-20:])
        texts.append(f"{backend} {last:.4f} in {time.perf_counter() - start:.1f} s")
    print(f"loss of the last steps: {', '.join(texts)}")
    return models, losses


def compare(losses: Losses) -> int:
    """Prints how far the first losses of the backends are apart; 1 if that is too far, else 0."""
    first = [values[:5] for values in losses.values()]
    difference = max(abs(a - b) / b for a, b in zip(*first, strict=True))
    print(f"largest relative difference of the first losses: {difference:.1e}")
    return int(difference > 1e-4)


def kept_bytes(call: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd saves for the backward during the call."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return sum(storages.values())


def measure(call: Callable[[Attention, Tensor, Tensor, Tensor], object], rows: int) -> str:
    """Runs the call with each backend on [1, rows, 4, 32] and says what it costs."""
    q, k, v = torch.randn(3, 1, rows, 4, 32)
    texts = []
    for name, attention in BACKENDS.items():
        kept = kept_bytes(lambda f=attention: call(f, q, k, v))
        start = time.perf_counter()
        call(attention, q, k, v)
        seconds = time.perf_counter() - start
        texts.append(f"{name} {seconds * 1e3:.0f} ms, {kept / 2**20:.0f} MiB kept")
    return f"at {rows} rows: {'; '.join(texts)}"
