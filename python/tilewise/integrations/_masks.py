"""Masks as other packages pass them, which are tensors of pairs: as a bias, and where they should
become masks of ``tilewise.masks`` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefers_masks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a pattern should become one of ``tilewise.masks`` for tensors of this dtype on this
    device, and not a bias.

    On CPUs, and in 16 bits on GPUs of compute capability 8.0 and higher. On an H200, Hopper's
    kernels and those for Ampere were faster with a mask than with the same pairs as a bias
    (docs/masks.md). Tensor cores compute fp32 with a bias, but not with a mask.
    """
    if device.type != "cuda":
        return device.type == "cpu"
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 0)


def as_bias(name: str, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as numbers to add to the scores: True becomes 0, and False minus infinity."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=q.dtype, device=q.device)
        return torch.where(mask, zero, -torch.inf)
    if not mask.is_floating_point():
        raise ValueError(
            f"{name} has dtype {mask.dtype}, but must be boolean (True: seen) or floating point "
            "(added to the scores)"
        )
    return mask if mask.dtype in (torch.float32, q.dtype) else mask.float()
