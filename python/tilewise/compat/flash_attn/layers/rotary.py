"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the interface of ``flash_attn``.

The ``inplace`` forms write into their argument and return it. As in ``flash_attn``, autograd
tracks the returned tensor, which callers must use afterwards, but not the change of the argument.
Slices of a packed projection (``unbind``, ``split``) can therefore be rotated in place, but an
operation that has saved the argument for its own backward would read changed values.
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from tilewise.compat._calls import scalar
from tilewise.compat.flash_attn.ops.triton.rotary import apply_rotary


def rotate_half(x, interleaved=False):
    """(x1, x2) -> (-x2, x1) for each pair of the last dimension."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(x, cos, sin, interleaved=False):
    """The rotation in differentiable PyTorch operations, in the precision of x.

    Args:
        x: [B, S, H, D].
        cos, sin: [S, rotary_dim / 2] or [B, S, rotary_dim / 2].
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(
            f"cos has rotary_dim {rotary_dim}, but must have at most head_dim {x.shape[-1]}"
        )
    if interleaved:
        cos, sin = (t.repeat_interleave(2, dim=-1).unsqueeze(-2) for t in (cos, sin))
    else:
        cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
    head, tail = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((head * cos + rotate_half(head, interleaved) * sin, tail), dim=-1)


class ApplyRotaryEmb(torch.autograd.Function):
    """See ``apply_rotary_emb``."""

    @staticmethod
    def forward(
        ctx,
        x,
        cos,
        sin,
        interleaved=False,
        inplace=False,
        seqlen_offsets: Union[int, Tensor] = 0,
        cu_seqlens: Optional[Tensor] = None,
        max_seqlen: Optional[int] = None,
    ):
        ctx.options = dict(
            seqlen_offsets=seqlen_offsets,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            interleaved=interleaved,
        )
        ctx.save_for_backward(cos, sin)
        out = apply_rotary(x.data, cos, sin, inplace=inplace, **ctx.options)
        return x if inplace else out

    @staticmethod
    def backward(ctx, do):
        cos, sin = ctx.saved_tensors
        dx = apply_rotary(do, cos, sin, conjugate=True, **ctx.options)
        return dx, None, None, None, None, None, None, None


def apply_rotary_emb(
    x,
    cos,
    sin,
    interleaved=False,
    inplace=False,
    seqlen_offsets: Union[int, Tensor] = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
):
    """Rotates the first ``rotary_dim`` elements of every head of x; differentiable in x.

    Args:
        x: [B, S, H, D], or [T, H, D] with cu_seqlens.
        cos, sin: [positions, rotary_dim / 2].
        interleaved: Rotate pairs (2i, 2i + 1) (GPT-J) instead of (i, i + rotary_dim / 2)
            (GPT-NeoX).
        inplace: Write into x.
        seqlen_offsets: Position of the first row of each sequence, int or integer [B].
        cu_seqlens: [B + 1] int32.
        max_seqlen: int, required with cu_seqlens.

    Returns:
        The rotated tensor, which is x itself if inplace.
    """
    return ApplyRotaryEmb.apply(
        x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen
    )


apply_rotary_emb_func = apply_rotary_emb


def _split_qk(qkv: Tensor, num_heads_q: Optional[int]) -> tuple[Tensor, Tensor]:
    """Views of q and k in [B, S, 3, H, D] or [B, S, Hq + 2 * Hkv, D]."""
    if qkv.ndim == 5:
        if qkv.shape[2] != 3:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}, but dimension 2 must be 3")
        return qkv[:, :, 0], qkv[:, :, 1]
    if qkv.ndim != 4:
        raise ValueError(f"qkv has {qkv.ndim} dimensions, but must have 5 or, with num_heads_q, 4")
    if num_heads_q is None:
        raise ValueError("num_heads_q is None, but must be given with a qkv of 4 dimensions")
    num_heads_q = scalar(num_heads_q)
    heads_kv, odd = divmod(qkv.shape[2] - num_heads_q, 2)
    if odd or heads_kv < 0:
        raise ValueError(
            f"num_heads_q is {num_heads_q}, but the {qkv.shape[2]} heads of qkv must be "
            "num_heads_q + 2 * num_heads_k"
        )
    return qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + heads_kv]


def _rotate_qk(qkv, tables, interleaved, seqlen_offsets, num_heads_q, conjugate) -> None:
    cos, sin, cos_k, sin_k = tables
    q, k = _split_qk(qkv, num_heads_q)
    for x, c, s in ((q, cos, sin), (k, cos_k, sin_k)):
        apply_rotary(
            x, c, s, seqlen_offsets, interleaved=interleaved, inplace=True, conjugate=conjugate
        )


class ApplyRotaryEmbQKV_(torch.autograd.Function):  # noqa: N801
    """See ``apply_rotary_emb_qkv_``."""

    @staticmethod
    def forward(
        ctx,
        qkv,
        cos,
        sin,
        cos_k=None,
        sin_k=None,
        interleaved=False,
        seqlen_offsets: Union[int, torch.Tensor] = 0,
        num_heads_q: Optional[int] = None,
    ):
        tables = (cos, sin, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
        ctx.options = dict(
            interleaved=interleaved, seqlen_offsets=seqlen_offsets, num_heads_q=num_heads_q
        )
        ctx.save_for_backward(*tables)
        _rotate_qk(qkv.data, tables, conjugate=False, **ctx.options)
        return qkv

    @staticmethod
    def backward(ctx, dqkv):
        dqkv = dqkv.clone()
        _rotate_qk(dqkv, ctx.saved_tensors, conjugate=True, **ctx.options)
        return dqkv, None, None, None, None, None, None, None


def apply_rotary_emb_qkv_(
    qkv,
    cos,
    sin,
    cos_k=None,
    sin_k=None,
    interleaved=False,
    seqlen_offsets: Union[int, torch.Tensor] = 0,
    num_heads_q: Optional[int] = None,
):
    """Rotates q and k inside a packed qkv, in place.

    Args:
        qkv: [B, S, 3, H, D], or [B, S, Hq + 2 * Hkv, D] with num_heads_q = Hq.
        cos, sin: [positions, rotary_dim / 2].
        cos_k, sin_k: Tables for k if they differ from those for q (XPos).
        interleaved, seqlen_offsets: As in ``apply_rotary_emb``.

    Returns:
        qkv.
    """
    return ApplyRotaryEmbQKV_.apply(
        qkv, cos, sin, cos_k, sin_k, interleaved, seqlen_offsets, num_heads_q
    )


class ApplyRotaryEmbKV_(torch.autograd.Function):  # noqa: N801
    """See ``apply_rotary_emb_kv_``."""

    @staticmethod
    def forward(ctx, kv, cos, sin, interleaved=False, seqlen_offsets: Union[int, torch.Tensor] = 0):
        if kv.ndim != 5 or kv.shape[2] != 2:
            raise ValueError(f"kv has shape {tuple(kv.shape)}, but must be [B, S, 2, H, D]")
        ctx.options = dict(interleaved=interleaved, seqlen_offsets=seqlen_offsets, inplace=True)
        ctx.save_for_backward(cos, sin)
        apply_rotary(kv.data[:, :, 0], cos, sin, **ctx.options)
        return kv

    @staticmethod
    def backward(ctx, dkv):
        dkv = dkv.clone()
        cos, sin = ctx.saved_tensors
        apply_rotary(dkv[:, :, 0], cos, sin, conjugate=True, **ctx.options)
        return dkv, None, None, None, None


def apply_rotary_emb_kv_(
    kv, cos, sin, interleaved=False, seqlen_offsets: Union[int, torch.Tensor] = 0
):
    """Rotates k inside a packed kv [B, S, 2, H, D], in place, and returns kv."""
    return ApplyRotaryEmbKV_.apply(kv, cos, sin, interleaved, seqlen_offsets)


class Tables(NamedTuple):
    """Cosines and sines [positions, dim / 2] for q, and for k, which are others with XPos."""

    cos: Tensor
    sin: Tensor
    cos_k: Tensor
    sin_k: Tensor


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of packed projections, with tables that grow as needed.

    Args:
        dim: Rotary dimensions of a head, an even number.
        base: Frequency i is ``base ** (-2 i / dim)``.
        interleaved: As in ``apply_rotary_emb``.
        scale_base: Base of the scales of XPos (arXiv 2212.10554), which decay for q and grow for k;
            usually 512. None switches XPos off.
        device: Device of the frequencies.
    """

    def __init__(self, dim: int, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None
        if scale_base is not None:
            evens = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
            scale = (evens + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._cached: Optional[Tables] = None

    def _compute_inv_freq(self, device=None):
        evens = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (evens / self.dim)

    @property
    def _cos_cached(self):
        return None if self._cached is None else self._cached.cos

    @property
    def _sin_cached(self):
        return None if self._cached is None else self._cached.sin

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None) -> Tables:
        """Tables of at least `seqlen` positions, which another thread does not replace."""
        cached = self._cached
        if (
            cached is not None
            and seqlen <= cached.cos.shape[0]
            and cached.cos.device == device
            and cached.cos.dtype == dtype
            and not (self.training and cached.cos.is_inference())
        ):
            return cached
        # Computed in fp32 whatever the dtype of the module, because bf16 cannot represent all
        # positions above 256.
        positions = torch.arange(seqlen, device=device, dtype=torch.float32)
        exact = self.inv_freq.dtype == torch.float32
        inv_freq = self.inv_freq if exact else self._compute_inv_freq(device)
        angles = torch.outer(positions, inv_freq.to(device))
        cos, sin = torch.cos(angles), torch.sin(angles)
        if self.scale is None:
            cos, sin = cos.to(dtype), sin.to(dtype)
            tables = Tables(cos, sin, cos, sin)
        else:
            power = (positions - seqlen // 2) / self.scale_base
            scale = self.scale.to(device, torch.float32) ** power.unsqueeze(-1)
            exact_tables = (cos * scale, sin * scale, cos / scale, sin / scale)
            tables = Tables(*(table.to(dtype) for table in exact_tables))
        self._cached = tables
        return tables

    def forward(
        self,
        qkv: torch.Tensor,
        kv: Optional[torch.Tensor] = None,
        seqlen_offset: Union[int, torch.Tensor] = 0,
        max_seqlen: Optional[int] = None,
        num_heads_q: Optional[int] = None,
    ):
        """Rotates q and k in place.

        Args:
            qkv: [B, S, 3, H, D] or [B, S, Hq + 2 * Hkv, D] (with num_heads_q); if kv is given, only
                q [B, S, Hq, D].
            kv: [B, S, 2, Hkv, D].
            seqlen_offset: Position of the first row, int or integer [B], which needs max_seqlen.
            max_seqlen: Number of positions that the tables must have.

        Returns:
            qkv, or (q, kv) if kv is given.
        """
        if not isinstance(seqlen_offset, Tensor):
            seqlen_offset = scalar(seqlen_offset)
        max_seqlen = scalar(max_seqlen)
        tables = self._cached
        if max_seqlen is None and isinstance(seqlen_offset, int):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            tables = self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif tables is None:
            raise ValueError("max_seqlen is None, but must be given if seqlen_offset is a tensor")
        cos, sin, cos_k, sin_k = tables
        options = dict(interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **options
            )
        q = apply_rotary_emb_func(qkv, cos, sin, inplace=True, **options)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, **options)
