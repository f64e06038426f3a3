"""MeanFlow: a model that turns noise into samples in one step, trained with the JVP of attention.

  python examples/meanflow.py
  python examples/meanflow.py --quick --out out/meanflow-quick

MeanFlow (Geng et al., arXiv 2505.13447) learns the average velocity u(z, r, t) between the times r
and t. Its target contains du/dt along the flow, which `torch.func.jvp` gives in one call:

    u, du = torch.func.jvp(model, (z, r, t), (v, 0, 1))
    target = v - (t - r) * du

The data are sets of points on a ring, and the model is a small diffusion transformer whose tokens
are the points of a set. The same steps are then taken with PyTorch's MATH backend, and the losses
compared. A plot shows the losses, and what one step makes of noise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import derivative_cost
from tilewise.cli import plot

HEADS, FREQUENCIES = 4, 3


class Block(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the condition (adaLN)."""

    def __init__(self, width: int, attention: derivative_cost.Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.condition = nn.Linear(width, 6 * width)
        nn.init.zeros_(self.condition.weight)
        nn.init.constant_(self.condition.bias, 0.5)  # with 0 no loss would depend on attention yet

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        """Maps x [B, N, W], with the condition c [B, 1, W], to the same shape."""
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.condition(silu(c)).chunk(6, -1)
        y = self.qkv(self.norm(x) * (1 + scale) + shift)
        q, k, v = y.unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + gate * self.project(self.attention(q, k, v).flatten(2))
        y = self.up(self.norm(x) * (1 + scale_mlp) + shift_mlp)
        return x + gate_mlp * self.down(silu(y))


class Transformer(nn.Module):
    """The average velocity u(z, r, t) of sets of points z [B, N, 2], with times r and t [B]."""

    def __init__(self, width: int, depth: int, attention: derivative_cost.Attention) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.times = nn.Sequential(
            nn.Linear(4 * FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.blocks = nn.ModuleList(Block(width, attention) for _ in range(depth))
        self.norm, self.leave = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        """u, with the shape of z."""
        angles = torch.stack((t, t - r), 1)[..., None] * 2.0 ** torch.arange(-1, FREQUENCIES - 1)
        c = self.times(torch.cat((angles.sin(), angles.cos()), -1).flatten(1))[:, None]
        x = self.enter(z) + c
        for block in self.blocks:
            x = block(x, c)
        return self.leave(self.norm(x))


def sets(batch: int, points: int) -> Tensor:
    """Sets of points [batch, points, 2] on a ring of radius 1."""
    angle = 2 * math.pi * torch.rand(batch, points)
    ring = torch.stack((angle.cos(), angle.sin()), -1)
    return ring + 0.03 * torch.randn(batch, points, 2)


def loss_of(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of MeanFlow for a batch of data, with the weights of its paper and without."""
    batch = x.shape[0]
    times = torch.sigmoid(torch.randn(2, batch) - 0.4)
    t, r = times.amax(0), times.amin(0)
    r = torch.where(torch.rand(batch) < 0.75, t, r)  # most of the batch is plain flow matching
    noise = torch.randn_like(x)
    z = torch.lerp(x, noise, t[:, None, None])
    v = noise - x
    u, du = torch.func.jvp(model, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r)[:, None, None] * du
    error = (u - target.detach()).square().mean((1, 2))
    return (error / (error.detach() + 1e-2)).mean(), error.mean()


def sample(model: nn.Module, noise: Tensor) -> Tensor:
    """Data from noise, in one step."""
    batch = noise.shape[0]
    with torch.no_grad():
        return noise - model(noise, torch.zeros(batch), torch.ones(batch))


def distance(x: Tensor) -> Tensor:
    """The mean distance of points from the ring."""
    return (x.norm(dim=-1) - 1).abs().mean()


def draw(losses: dict[str, list[float]], noise: Tensor, made: Tensor, path: Path) -> None:
    """Plots the losses, noise, and what one step makes of it."""
    drawing, (left, *others) = plot.figure(3, "MeanFlow: one step from noise to data")
    for name, values in losses.items():
        colour = plot.COLOURS["tilewise" if name == "tilewise" else "torch-math"]
        mean = torch.tensor(values).unfold(0, min(20, len(values)), 1).mean(1)
        left.plot(mean, color=colour, label=name, linestyle="-" if name == "tilewise" else "--")
    left.set_title("loss, mean of 20 steps", fontsize=9.5, color=plot.INK, loc="left")
    left.legend(fontsize=8.5, frameon=False)
    for axis, points, title in zip(others, (noise, made), ("noise", "one step"), strict=True):
        axis.scatter(*points.flatten(0, 1).T, s=2, color=plot.COLOURS["tilewise"])
        axis.set(xlim=(-3, 3), ylim=(-3, 3), aspect="equal")
        axis.set_title(title, fontsize=9.5, color=plot.INK, loc="left")
    plot.save(drawing, path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = derivative_cost.parser("MeanFlow with the JVP of attention", "meanflow", 2e-3)
    parser.add_argument("--batch", type=int, default=32, help="sets in a step")
    parser.add_argument("--points", type=int, default=16, help="points in a set")
    return derivative_cost.parse(parser, arguments, 400)


def step_of_attention(attention: derivative_cost.Attention, *qkv: Tensor) -> None:
    """Forward, JVP and backward, as a step of MeanFlow has them."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    out, tangent = torch.func.jvp(attention, tuple(leaves), qkv)
    (out - tangent.detach()).square().sum().backward()


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with both backends; returns 1 if their first losses differ, else 0."""
    options = parse(arguments)
    models, losses = derivative_cost.train(
        options,
        lambda attention: Transformer(options.width, options.depth, attention),
        lambda model: loss_of(model, sets(options.batch, options.points)),
    )
    noise = torch.randn(128, options.points, 2)
    made = sample(models["tilewise"], noise)
    print(
        f"mean distance of points from the ring: noise {distance(noise):.3f}, "
        f"one step {distance(made):.3f}, data {distance(sets(128, options.points)):.3f}"
    )
    print("forward, JVP and backward", derivative_cost.measure(step_of_attention, options.rows))
    if plot.available():
        draw(losses, noise, made, options.out / "meanflow.png")
        print(f"plot: {options.out / 'meanflow.png'}")
    return derivative_cost.compare(losses)


if __name__ == "__main__":
    sys.exit(main())
