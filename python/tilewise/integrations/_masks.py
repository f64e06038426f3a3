"""Masks as other packages pass them: tensors of pairs, as a bias; and where masks are data."""

from __future__ import annotations

import torch
from torch import Tensor


def computes_masks(device: torch.device) -> bool:
    """Whether ``attention`` takes ``mask`` on this device: so far on CPUs only."""
    return device.type == "cpu"


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
