"""What the interfaces of both FlashAttention generations share: arguments in, operators called."""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from tilewise import _ops
from tilewise._ops import Options

# Keys whose values are made visible in one forward of `attention_probabilities`: the head dimension
# of the widest kernel.
_PROBE_WIDTH = 512


def maybe_contiguous(x):
    """x, copied if its last dimension is not contiguous; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    """The smallest multiple of m that is at least x."""
    return (x + m - 1) // m * m


def bound(value) -> int:
    """An optional upper bound of lengths; one that is a tensor is not worth a synchronisation."""
    return int(value) if isinstance(value, int) else 0


def int32(x: Optional[Tensor]) -> Optional[Tensor]:
    """Index tensors as the kernels read them."""
    return None if x is None else maybe_contiguous(x.to(torch.int32))


def slopes(alibi_slopes: Optional[Tensor]) -> Optional[Tensor]:
    """ALiBi slopes as the kernels read them: fp32, no gradient."""
    return None if alibi_slopes is None else maybe_contiguous(alibi_slopes.detach().float())


def options_of(
    q: Tensor,
    *,
    softmax_scale: Optional[float],
    causal: bool,
    window_size,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_state: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
) -> Options:
    """The options that dense and variable-length calls have in common."""
    left, right = (-1 if side is None or side < 0 else int(side) for side in window_size)
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p is {dropout_p}, but must be in [0, 1)")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap is {softcap}, but must be finite and >= 0 (0: off)")
    return Options(
        alibi_slopes=slopes(alibi_slopes),
        dropout_state=dropout_state,
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        window_left=left,
        window_right=0 if causal else right,
        softcap=float(softcap or 0.0),
        dropout_p=float(dropout_p),
        deterministic=bool(deterministic),
    )


def new_dropout_state(dropout_p: float, device: torch.device) -> Optional[Tensor]:
    """Seed and offset of a call, drawn from PyTorch's generator; None without dropout.

    This is also the ``rng_state`` of the private functions.
    """
    if dropout_p <= 0.0:
        return None
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse), differentiable."""
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    return _ops.forward(q, k, v, options)


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]],
    options: Options,
) -> Tensor:
    """Writes dq, dk and dv into the given tensors.

    Returns:
        The sums over head_dim of dout * out: fp32, of lse's shape.
    """
    bits = (_ops.WANT_Q, _ops.WANT_K, _ops.WANT_V)
    wanted = sum(bit for bit, x in zip(bits, gradients, strict=True) if x is not None)
    inputs = tuple(maybe_contiguous(x) for x in (q, k, v, out))
    lse = maybe_contiguous(lse.float())
    results = torch.ops.tilewise.backward(
        maybe_contiguous(dout), None, *inputs, lse, *options, wanted
    )
    for given, made in zip(gradients, results, strict=False):
        if given is not None:
            given.copy_(made)
    sums = (dout.float() * out.float()).sum(dim=-1)
    return sums.transpose(-1, -2).contiguous()


@torch.no_grad()
def attention_probabilities(q: Tensor, k: Tensor, options: Options, max_seqlen_k: int) -> Tensor:
    """The matrix of probabilities, negative where dropout removed the entry; for tests of callers.

    Args:
        q, k: dense [B, S, H, D] or packed [T, H, D].

    Returns:
        dense [B, Hq, Sq, Sk]; packed [Hq, T, max_seqlen_k], row t being query t; dtype of q.
    """
    uniform = options._replace(scale=0.0, alibi_slopes=None, softcap=0.0)
    kept = _probe(q, k, uniform, max_seqlen_k) > 0
    without = options._replace(dropout_p=0.0, dropout_state=None)
    p = _probe(q, k, without, max_seqlen_k)
    return torch.where(kept, p, -p)


def _probe(q: Tensor, k: Tensor, options: Options, max_seqlen_k: int) -> Tensor:
    """Reads the probabilities off the output: with unit vectors as values it is made of them."""
    if options.cu_seqlens_k is None:
        key = torch.arange(k.shape[1], device=k.device)
    else:
        rows = torch.arange(k.shape[0], device=k.device)
        starts = options.cu_seqlens_k.to(torch.int64)
        key = rows - starts[torch.searchsorted(starts, rows, right=True) - 1]
    parts = []
    for first in range(0, max_seqlen_k, _PROBE_WIDTH):
        columns = torch.arange(first, min(first + _PROBE_WIDTH, max_seqlen_k), device=k.device)
        units = (key.unsqueeze(-1) == columns).to(q.dtype)
        shape = (*k.shape[:-1], columns.numel())
        values = units.unsqueeze(-2).expand(shape)  # [..., rows, heads, columns]
        out, _ = attend(q, k, values, options)
        parts.append(out.transpose(-2, -3))
    if not parts:
        return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], 0))
    return torch.cat(parts, dim=-1)
