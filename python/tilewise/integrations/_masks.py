"""Masks as other packages pass them, which are tensors of pairs: as a bias, and where they should
become masks of ``tilewise.masks`` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefers_masks(device: torch.device) -> bool:
    """Whether a pattern should become one of ``tilewise.masks`` on this device, and not a bias.

    On CPUs, and on GPUs of compute capability 8.0 and higher: with Hopper's kernels and with those
    for Ampere, both on an H200, a mask was faster than the same pairs as a bias (docs/masks.md).
    """
    if device.type != "cuda":
        return device.type == "cpu"
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
