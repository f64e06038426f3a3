"""Attention and rotary embedding written out in PyTorch, for the tests of the compatibility layer.

Everything is differentiable and runs in the requested dtype: float64 is the exact result, the
dtype of the inputs gives the yardstick whose error a fused kernel may exceed by some factor.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import devices


def visible(rows: int, keys: int, window=(-1, -1), causal=False, chunk=0) -> Tensor:
    """The bottom-right aligned band, [rows, keys] bool."""
    position = torch.arange(rows).unsqueeze(1) + keys - rows
    key = torch.arange(keys)
    left, right = (-1 if side is None else side for side in window)
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= position - left
    if causal:
        right = 0
    if right >= 0:
        seen &= key <= position + right
    if chunk:
        seen &= torch.div(position, chunk, rounding_mode="floor") == key // chunk
    return seen


def attend_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window=(-1, -1),
    causal=False,
    chunk=0,
    scale=None,
    softcap=0.0,
    slopes=None,
    bias=None,
    sinks=None,
    key_mask=None,
    kept=None,
    dropout_p=0.0,
) -> tuple[Tensor, Tensor]:
    """One sequence: q [Sq, H, D], k [Sk, Hkv, D], v [Sk, Hkv, Dv] -> out [Sq, H, Dv], lse [H, Sq].

    slopes and sinks [H]; bias [H, Sq, Sk]; key_mask [Sk] and kept [H, Sq, Sk] bool.
    """
    rows, heads, head_dim = q.shape
    keys = k.shape[0]
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    s = torch.einsum("qhd,khd->hqk", q * scale, k)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if slopes is not None:
        distance = torch.arange(rows).unsqueeze(1) + keys - rows - torch.arange(keys)
        s = s - slopes.to(s.dtype)[:, None, None] * distance.abs().to(s.dtype)
    if bias is not None:
        s = s + bias.to(s.dtype)
    seen = visible(rows, keys, window, causal, chunk)
    if key_mask is not None:
        seen = seen & key_mask
    s = s.masked_fill(~seen, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype)[:, None, None].expand(heads, rows, 1)), dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    no_keys = (lse == -math.inf).unsqueeze(-1)
    p = torch.softmax(s.masked_fill(no_keys, 0.0), dim=-1).masked_fill(no_keys, 0.0)[..., :keys]
    if kept is not None:
        p = p * kept / (1 - dropout_p)
    return torch.einsum("hqk,khd->qhd", p, v), lse


def attend(q: Tensor, k: Tensor, v: Tensor, *, slopes=None, kept=None, dtype=None, **options):
    """A batch of equal lengths: out [B, Sq, H, Dv], lse [B, H, Sq]."""
    dtype = dtype or q.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    results = []
    for b in range(q.shape[0]):
        slope = slopes[b] if slopes is not None and slopes.ndim == 2 else slopes
        mask = None if kept is None else kept[b]
        results.append(attend_one(q[b], k[b], v[b], slopes=slope, kept=mask, **options))
    return tuple(torch.stack(x) for x in zip(*results, strict=True))


def attend_varlen(q, k, v, starts_q, starts_k, *, slopes=None, kept=None, dtype=None, **options):
    """Packed sequences: out [T, H, Dv] and lse [H, T], which are 0 and -inf past the last
    sequence."""
    dtype = dtype or q.dtype
    q, k, v = (x.to(dtype) for x in (q, k, v))
    outs, lses = [], []
    for b in range(len(starts_q) - 1):
        rows = slice(starts_q[b], starts_q[b + 1])
        keys = slice(starts_k[b], starts_k[b + 1])
        slope = slopes[b] if slopes is not None and slopes.ndim == 2 else slopes
        mask = None
        if kept is not None:
            mask = kept[b, :, : rows.stop - rows.start, : keys.stop - keys.start]
        out, lse = attend_one(q[rows], k[keys], v[keys], slopes=slope, kept=mask, **options)
        outs.append(out)
        lses.append(lse)
    rest = q.shape[0] - starts_q[-1]
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], rest), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x [..., rows, H, D] rotated at positions [..., rows], pair by pair as complex numbers."""
    half = cos.shape[1]
    head, tail = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        pairs = torch.complex(head[..., 0::2], head[..., 1::2])
    else:
        pairs = torch.complex(head[..., :half], head[..., half:])
    turn = torch.complex(cos, sin).to(pairs.dtype)[positions].unsqueeze(-2)
    turned = pairs * turn
    parts = (turned.real, turned.imag)
    if interleaved:
        head = torch.stack(parts, dim=-1).flatten(-2)
    else:
        head = torch.cat(parts, dim=-1)
    return torch.cat((head, tail), dim=-1)


def largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def assert_as_good(
    got: Tensor, plain: Tensor | None, exact: Tensor, factor: float, what: str
) -> None:
    """The error of `got` against `exact` is at most `factor` times that of `plain`, an unfused
    computation.

    In fp32, 1e-6 of the largest value (gradients, factor 3: 3e-6) is always allowed. Without
    `plain` that is the whole bound; in the 16-bit types half a unit is added to it.
    """
    assert got.shape == exact.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(got), finite), f"{what}: not finite at the wrong places"
    error = largest((got.double() - exact.double())[finite])
    size = largest(exact[finite])
    near = 0.0 if plain is None else largest((plain.double() - exact.double())[finite])
    if got.dtype == torch.float32:
        allowed = max((1e-6 if factor <= 2 else 3e-6) * size, factor * near) + 1e-7
    else:
        allowed = (
            factor * near
            + torch.finfo(got.dtype).eps * size * (0.5 if plain is None else 0.125)
            + 1e-5
        )
    assert error <= allowed, f"{what}: error {error:.3e}, allowed {allowed:.3e} (size {size:.3e})"


def check_against(call, reference, inputs: list[Tensor], what: str) -> None:
    """Compare (out, lse) of call(*inputs), and the gradients of both, with the reference."""
    got_inputs, plain_inputs = ([x.detach().clone() for x in inputs] for _ in range(2))
    exact_inputs = [x.detach().double() for x in inputs]
    results, gradients = [], []
    generator = devices.generator(7)
    weights = None
    for function, arguments in (
        (call, got_inputs),
        (reference, plain_inputs),
        (reference, exact_inputs),
    ):
        for x in arguments:
            x.requires_grad_()
        out, lse = function(*arguments)
        if weights is None:
            weights = (
                torch.randn(out.shape, generator=generator),
                torch.randn(lse.shape, generator=generator),
            )
        seen = torch.isfinite(lse)
        loss = (out * weights[0].to(out.dtype)).sum()
        loss = loss + (torch.where(seen, lse, 0.0) * weights[1].to(lse.dtype)).sum()
        results.append((out.detach(), lse.detach()))
        gradients.append(torch.autograd.grad(loss, arguments))
    for i, name in enumerate(("out", "lse")):
        assert_as_good(results[0][i], results[1][i], results[2][i], 2, f"{what}: {name}")
    for i in range(len(inputs)):
        parts = (g[i] for g in gradients)
        assert_as_good(*parts, 3, f"{what}: gradient of input {i}")
