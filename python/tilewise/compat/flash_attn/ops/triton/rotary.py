"""``apply_rotary`` of ``flash_attn.ops.triton.rotary``, implemented with PyTorch operations."""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import Optional, Union

import torch
from torch import Tensor


def _positions(
    x: Tensor, seqlen_offsets: Union[int, Tensor], cu_seqlens: Optional[Tensor]
) -> Tensor:
    """The position of every row: [S] or [B, S], or [T] with cu_seqlens (-1 outside sequences)."""
    if cu_seqlens is None:
        rows = torch.arange(x.shape[1], device=x.device)
        if isinstance(seqlen_offsets, Tensor):
            return rows + seqlen_offsets.to(x.device, torch.int64).unsqueeze(-1)
        return rows + seqlen_offsets
    rows = torch.arange(x.shape[0], device=x.device)
    starts = cu_seqlens.to(x.device, torch.int64)
    batch = starts.numel() - 1
    if batch == 0:
        return torch.full_like(rows, -1)
    sequence = torch.searchsorted(starts, rows, right=True) - 1
    inside = sequence.clamp(0, batch - 1)
    local = rows - starts[inside]
    if isinstance(seqlen_offsets, Tensor):
        local = local + seqlen_offsets.to(x.device, torch.int64)[inside]
    else:
        local = local + seqlen_offsets
    return torch.where((sequence >= 0) & (sequence < batch), local, -1)


def _check(x: Tensor, cos: Tensor, sin: Tensor, offsets, cu_seqlens, max_seqlen) -> None:
    dims = 4 if cu_seqlens is None else 3
    if x.ndim != dims:
        layout = "[batch, seqlen, heads, head_dim]" if dims == 4 else "[rows, heads, head_dim]"
        raise ValueError(f"x has {x.ndim} dimensions, but must be {layout}")
    if cu_seqlens is not None and max_seqlen is None:
        raise ValueError("max_seqlen is None, but must be given with cu_seqlens")
    if cos.ndim != 2 or cos.shape != sin.shape:
        raise ValueError(
            f"cos has shape {tuple(cos.shape)} and sin {tuple(sin.shape)}, "
            "but both must be [positions, rotary_dim / 2]"
        )
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"cos has {cos.shape[1]} columns, so rotary_dim is {2 * cos.shape[1]}, "
            f"but must be at most head_dim = {x.shape[-1]}"
        )
    if not isinstance(offsets, Tensor):
        longest = x.shape[1] if cu_seqlens is None else int(max_seqlen)
        if longest + offsets > cos.shape[0]:
            raise ValueError(
                f"cos has {cos.shape[0]} positions, but must have seqlen {longest} + "
                f"seqlen_offsets {offsets}"
            )


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seqlen_offsets: Union[int, torch.Tensor] = 0,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    interleaved=False,
    inplace=False,
    conjugate=False,
) -> torch.Tensor:
    """Rotates the first ``rotary_dim`` elements of every head; not differentiable by itself.

    Args:
        x: [B, S, H, D], or [T, H, D] with cu_seqlens.
        cos, sin: [positions, rotary_dim / 2], where rotary_dim <= D.
        seqlen_offsets: Position of the first row, int or integer [B]. Rows whose position exceeds
            cos (possible only with a tensor) are not changed.
        cu_seqlens: [B + 1] int32.
        max_seqlen: int, required with cu_seqlens.
        interleaved: Rotate pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        inplace: Write into x.
        conjugate: Rotate in the opposite direction.

    Returns:
        The rotated tensor in the shape and dtype of x. It is computed in fp32 (fp64 for fp64) and
        rounded once.
    """
    _check(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    known = ((positions >= 0) & (positions < cos.shape[0])).unsqueeze(-1)
    if cos.shape[0]:
        rows = positions.clamp(0, cos.shape[0] - 1)
        c = torch.where(known, cos[rows].to(wide), 1.0).unsqueeze(-2)
        s = torch.where(known, sin[rows].to(wide), 0.0).unsqueeze(-2)
    else:
        c, s = torch.ones((), dtype=wide), torch.zeros((), dtype=wide)
    if conjugate:
        s = -s
    half = cos.shape[1]
    head = x[..., : 2 * half]
    if interleaved:
        first, second = head[..., 0::2].to(wide), head[..., 1::2].to(wide)
    else:
        first, second = head[..., :half].to(wide), head[..., half:].to(wide)
    rotated = (first * c - second * s, first * s + second * c)
    out = x if inplace else x.clone(memory_format=torch.contiguous_format)
    with torch.no_grad():
        if interleaved:
            out[..., 0 : 2 * half : 2] = rotated[0].to(x.dtype)
            out[..., 1 : 2 * half : 2] = rotated[1].to(x.dtype)
        else:
            out[..., :half] = rotated[0].to(x.dtype)
            out[..., half : 2 * half] = rotated[1].to(x.dtype)
    return out
