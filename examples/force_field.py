"""A force field: energies and forces of atoms from attention, trained on both.

  python examples/force_field.py
  python examples/force_field.py --quick --out out/force-quick

Forces are the negative gradient of the energy, and the loss contains them: training differentiates
a gradient of attention.

    forces = -torch.autograd.grad(energy.sum(), positions, create_graph=True)[0]
    (forces - wanted).square().mean().backward()

The atoms lie in a plane and attract and repel each other in pairs (Morse potential). The model is a
small transformer over atoms. The same steps are then taken with PyTorch's MATH backend, and the
losses compared. A plot shows the losses, and forces on one configuration.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import derivative_cost
from tilewise.cli import plot

HEADS = 4


class Block(nn.Module):
    """A transformer block whose every part has a second derivative."""

    def __init__(self, width: int, attention: derivative_cost.Attention) -> None:
        super().__init__()
        self.attention = attention
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, N, W] to the same shape."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.project(self.attention(q, k, v).flatten(2))
        return x + self.down(silu(self.up(self.norms[1](x))))


class Energy(nn.Module):
    """The energy [B] of atoms at positions [B, N, 2]."""

    def __init__(self, width: int, depth: int, attention: derivative_cost.Attention) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(2, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Block(width, attention) for _ in range(depth))
        self.leave = nn.Linear(width, 1)

    def forward(self, positions: Tensor) -> Tensor:
        """The energy."""
        x = self.enter(positions)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).sum((1, 2))


def morse(positions: Tensor) -> Tensor:
    """The energy [B] of the Morse potential between all pairs of atoms [B, N, 2]."""
    first, second = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
    distance = (positions[:, first] - positions[:, second]).norm(dim=-1)
    return ((1 - torch.exp(-(distance - 1))).square() - 1).sum(1)


def configurations(batch: int, atoms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [B, N, 2] near a ring, their energies [B] and forces [B, N, 2]."""
    angle = 2 * torch.pi * torch.arange(atoms) / atoms
    ring = torch.stack((angle.cos(), angle.sin()), -1) * atoms / 6
    positions = (ring + 0.15 * torch.randn(batch, atoms, 2)).requires_grad_()
    energy = morse(positions)
    (gradient,) = torch.autograd.grad(energy.sum(), positions)
    return positions.detach(), energy.detach(), -gradient


def predicted(model: nn.Module, positions: Tensor, create_graph: bool) -> tuple[Tensor, Tensor]:
    """The model's energies and forces."""
    positions = positions.clone().requires_grad_()
    energy = model(positions)
    (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=create_graph)
    return energy, -gradient


def loss_of(model: nn.Module, data: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The squared error of energies per atom and of forces, to minimise and to report."""
    positions, energy, forces = data
    got_energy, got_forces = predicted(model, positions, create_graph=True)
    atoms = positions.shape[1]
    of_energies = ((got_energy - energy) / atoms).square().mean()
    loss = of_energies + (got_forces - forces).square().mean()
    return loss, loss


def draw(losses: dict[str, list[float]], model: nn.Module, atoms: int, path: Path) -> None:
    """Plots the losses, and true and predicted forces on one configuration."""
    drawing, (left, right) = plot.figure(2, "A force field that differentiates attention twice")
    for name, values in losses.items():
        colour = plot.COLOURS["tilewise" if name == "tilewise" else "torch-math"]
        left.plot(values, color=colour, label=name, linestyle="-" if name == "tilewise" else "--")
    left.set(yscale="log")
    left.set_title("loss", fontsize=9.5, color=plot.INK, loc="left")
    left.legend(fontsize=8.5, frameon=False)
    positions, _, forces = configurations(1, atoms)
    for values, colour, width in (
        (forces, plot.INK, 0.010),
        (None, plot.COLOURS["tilewise"], 0.005),
    ):
        shown = predicted(model, positions, create_graph=False)[1] if values is None else values
        right.quiver(*positions[0].T, *shown[0].T, color=colour, width=width)
    right.set(aspect="equal")
    right.set_title("forces: true (dark), predicted", fontsize=9.5, color=plot.INK, loc="left")
    plot.save(drawing, path)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = derivative_cost.parser("energies and forces by attention", "force_field", 3e-3)
    parser.add_argument("--batch", type=int, default=24, help="configurations in a step")
    parser.add_argument("--atoms", type=int, default=10)
    return derivative_cost.parse(parser, arguments, 700)


def step_of_attention(attention: derivative_cost.Attention, *qkv: Tensor) -> None:
    """Forward, backward and double backward, as a step of training on forces has them."""
    leaves = [x.detach().requires_grad_() for x in qkv]
    energy = attention(*leaves).square().sum()
    gradients = torch.autograd.grad(energy, leaves, create_graph=True)
    sum(x.square().sum() for x in gradients).backward()


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains with both backends; returns 1 if their first losses differ, else 0."""
    options = parse(arguments)
    models, losses = derivative_cost.train(
        options,
        lambda attention: Energy(options.width, options.depth, attention),
        lambda model: loss_of(model, configurations(options.batch, options.atoms)),
    )
    positions, _, forces = configurations(256, options.atoms)
    got = predicted(models["tilewise"], positions, create_graph=False)[1]
    print(
        f"error of forces (root mean square) {(got - forces).square().mean().sqrt():.3f}, "
        f"forces themselves {forces.square().mean().sqrt():.3f}"
    )
    print(
        "forward, backward and double backward",
        derivative_cost.measure(step_of_attention, options.rows),
    )
    if plot.available():
        draw(losses, models["tilewise"], options.atoms, options.out / "force_field.png")
        print(f"plot: {options.out / 'force_field.png'}")
    return derivative_cost.compare(losses)


if __name__ == "__main__":
    sys.exit(main())
