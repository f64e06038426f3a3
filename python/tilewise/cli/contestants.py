"""The attention implementations that the benchmark compares, and the problem that they compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Problem:
    """Self-attention over `length` rows. Tensors are [batch, head, row, column]."""

    dtype: str = "fp32"
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    length: int = 1024
    head_dim: int = 64
    causal: bool = True
    backward: bool = False
    device: str = "cpu"

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with standard normal entries; they require gradients if there is a backward."""
        generator = torch.Generator().manual_seed(0)

        def draw(heads: int) -> Tensor:
            shape = (self.batch, heads, self.length, self.head_dim)
            tensor = torch.randn(shape, generator=generator).to(self.device, DTYPES[self.dtype])
            return tensor.requires_grad_(self.backward)

        return draw(self.heads), draw(self.kv_heads), draw(self.kv_heads)

    @property
    def flop(self) -> float:
        """FLOP of two products forward and five backward over the visible pairs (causal: half)."""
        forward = 4.0 * self.batch * self.heads * self.length * self.length * self.head_dim
        return forward * (3.5 if self.backward else 1.0) * (0.5 if self.causal else 1.0)

    @property
    def score_bytes(self) -> int:
        """Size in bytes of one score matrix in fp32, the least that naive attention needs."""
        return 4 * self.batch * self.heads * self.length * self.length

    def to_json(self) -> dict[str, Any]:
        """The fields as a dictionary."""
        return asdict(self)


def attend_tilewise(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention by tilewise."""
    return tilewise.attention(q, k, v, causal=causal, layout="bhsd")


def attend_naive(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The formula of attention in PyTorch operations, with the whole score matrix in memory."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ v


def _sdpa(backend: SDPBackend) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel([backend]):
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    return attend


ATTEND: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
    "tilewise": attend_tilewise,
    "torch-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "torch-efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "torch-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch-math": _sdpa(SDPBackend.MATH),
    "naive": attend_naive,
}
# The backends that hold whole score matrices in memory.
QUADRATIC = ("torch-math", "naive")
ON_DEVICE = {
    "cpu": ("tilewise", "torch-flash", "torch-math", "naive"),
    "cuda": ("tilewise", "torch-flash", "torch-cudnn", "torch-efficient", "torch-math", "naive"),
}


def prepare(
    backend: str, problem: Problem, inputs: tuple[Tensor, Tensor, Tensor]
) -> Callable[[int], object]:
    """A callable to be timed: the forward, or the forward and the backward together."""
    attend = ATTEND[backend]
    if not problem.backward:

        def forward(_: int) -> object:
            with torch.no_grad():
                return attend(*inputs, problem.causal)

        return forward
    gradient = torch.ones_like(inputs[0])

    def both(_: int) -> object:
        out = attend(*inputs, problem.causal)
        return torch.autograd.grad(out, inputs, gradient)

    return both
