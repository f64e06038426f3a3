"""Plain attention in eager PyTorch in the dtype of the inputs: how far a straightforward
low-precision computation is from the oracle. Kernels are allowed a small multiple of that error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

import oracle

if TYPE_CHECKING:
    from cases import Built


def index(places: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(places, np.int64)).to(device)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest TF32 number (11 significant bits)."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


class _Tf32Product(torch.autograd.Function):
    """a @ b with rounded operands, and gradients computed likewise. It is written out because
    cuBLAS silently uses fp32 instead of TF32 where an operand's alignment does not suit it."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = to_tf32(a), to_tf32(b)
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = ctx.saved_tensors
        grad = to_tf32(grad)
        return grad @ b.mT, a.mT @ grad


def to_float8(p: torch.Tensor) -> torch.Tensor:
    """Weights rounded to float8_e4m3, of whose range the largest weight of a row uses 2^8. The
    gradient is that of p."""
    unit = p.detach().amax(dim=2, keepdim=True).float() / 256
    rounded = (p.detach() / torch.where(unit == 0, 1, unit)).to(torch.float8_e4m3fn).float() * unit
    return p + (rounded.to(p.dtype) - p).detach()


def _one_sequence(
    b: Built, sequence: oracle.SequenceIndices, leaves: dict[str, torch.Tensor],
    dtype: torch.dtype, float8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [n, Hq, Dv] and lse [n, Hq] of one sequence, every step rounded to `dtype` and, with
    `float8`, the weights to float8."""
    c, o = b.case, b.options()
    product = _Tf32Product.apply if c.tf32 else torch.matmul
    n, m = len(sequence.rows), len(sequence.keys)
    rows, keys = (index(x, b.q.device) for x in (sequence.rows, sequence.grad_keys))
    q = leaves["q"][rows].transpose(0, 1)
    k = leaves["k"][keys].repeat_interleave(c.group, dim=1).transpose(0, 1)
    v = leaves["v"][keys].repeat_interleave(c.group, dim=1).transpose(0, 1)
    s = product(q, k.transpose(1, 2)) * leaves["scale"]
    if c.softcap > 0:
        s = c.softcap * torch.tanh(s / c.softcap)
    if o.slopes is not None:
        distance = np.abs(oracle.aligned(o, sequence.batch, n, m) - np.arange(m))
        penalty = o.slopes[sequence.batch][:, None, None] * distance
        s = s - torch.from_numpy(penalty).to(s.device, dtype)
    seen = torch.from_numpy(oracle.seen_pairs(o, sequence.batch, n, m)).to(s.device).expand(s.shape)
    if "bias" in leaves:
        bias = leaves["bias"]
        bias = bias[sequence.batch if bias.shape[0] > 1 else 0]
        bias = bias[:, : n if bias.shape[1] > 1 else 1, :m].expand(s.shape)
        seen = seen & torch.isfinite(bias)
        s = s + torch.where(seen, bias, 0)
    s = s.masked_fill(~seen, -torch.inf)
    if "sinks" in leaves:
        s = torch.cat([leaves["sinks"].view(-1, 1, 1).expand(-1, n, 1), s], dim=2)
    any_seen = torch.isfinite(s).any(dim=2, keepdim=True)
    s = s.masked_fill(~any_seen, 0)  # a row that sees no key would be NaN
    p = torch.softmax(s, dim=2) * any_seen
    lse = torch.logsumexp(s, dim=2) * any_seen[:, :, 0]
    p = p[:, :, p.shape[2] - m :]
    if c.dropout_p > 0:
        kept = torch.from_numpy(oracle.kept(o, sequence.batch, c.heads, n, m)).to(p.device)
        p = p * kept / (1 - c.dropout_p)
    if float8 and m > 0:
        p = to_float8(p)
    return product(p, v).transpose(0, 1), lse.transpose(0, 1)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The matrices are small and tests run in parallel."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, *x.shape[-2:])


def _separate_keys(b: Built, x: torch.Tensor, target: np.ndarray) -> torch.Tensor:
    """Keys [..., H, D] copied to where their gradients go, so that sequences that share keys get
    separate ones."""
    keys = torch.zeros(target.shape, dtype=b.dtype, device=b.q.device)
    flat = _rows_of(x).to(keys)
    for sequence in b.sequences:
        keys[index(sequence.grad_keys, x.device)] = flat[index(sequence.keys, x.device)]
    return keys


def _leaves(b: Built, want: oracle.Result | oracle.TangentResult) -> dict[str, torch.Tensor]:
    values = {
        "q": _rows_of(b.q),
        "k": _separate_keys(b, b.k, want.dk),
        "v": _separate_keys(b, b.v, want.dv),
        "scale": torch.tensor(b.scale, device=b.q.device),
        "bias": b.bias,
        "sinks": b.sinks,
    }
    return {
        name: x.detach().to(b.dtype, copy=True).requires_grad_()
        for name, x in values.items()
        if x is not None
    }


def _computed(b: Built) -> list[oracle.SequenceIndices]:
    """The sequences whose results are not all zero."""
    return [s for s in b.sequences if len(s.rows) and (len(s.keys) or b.sinks is not None)]


def _largest_error(x: torch.Tensor | None, exact: np.ndarray) -> float:
    """None is zero."""
    got = np.zeros(exact.shape) if x is None else x.detach().cpu().double().numpy()
    return float(np.abs(got - exact).max(initial=0))


def _gradient_errors(
    gradients: dict[str, torch.Tensor | None], want: oracle.Result | oracle.TangentResult
) -> dict[str, float]:
    exact = {name: np.asarray(getattr(want, f"d{name}")) for name in gradients}
    return {name: _largest_error(x, exact[name]) for name, x in gradients.items()}


@_one_thread()
def errors(b: Built, want: oracle.Result, float8: bool = False) -> dict[str, float]:
    """Largest error of the plain computation against the oracle, per result."""
    leaves = _leaves(b, want)
    dout, dlse = _rows_of(b.dout), None
    if b.dlse is not None:
        dlse = torch.from_numpy(b.by_row(b.dlse)).to(b.q.device, b.dtype)
    worst = {"out": 0.0, "lse": 0.0}
    loss = torch.zeros((), device=b.q.device, requires_grad=True)
    for sequence in _computed(b):
        rows = index(sequence.rows, b.q.device)
        out, lse = _one_sequence(b, sequence, leaves, b.dtype, float8)
        worst["out"] = max(worst["out"], _largest_error(out, want.out[sequence.rows]))
        loss = loss + (out * dout[rows]).sum()
        if dlse is not None:
            loss = loss + (lse * dlse[rows]).sum()
    loss.backward()
    return worst | _gradient_errors({name: x.grad for name, x in leaves.items()}, want)


@_one_thread()
def tangent_errors(
    b: Built,
    want: oracle.TangentResult,
    t: dict[str, torch.Tensor],
    incoming: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
) -> dict[str, float]:
    """Largest error of the plain computation of the tangents of out and lse along `t`, and of the
    gradients of a loss whose gradients by out, lse and these tangents are `incoming`."""
    leaves, sequences = _leaves(b, want), _computed(b)
    if not sequences:
        return dict.fromkeys(("out", "lse", *leaves), 0.0)
    along = {name: torch.zeros_like(x) for name, x in leaves.items()}
    for name, x in t.items():
        if name in ("k", "v"):
            x = _separate_keys(b, x, getattr(want, f"d{name}"))
        along[name].copy_(x.reshape(along[name].shape).nan_to_num())  # NaN where nothing is used

    def forward(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        named = dict(zip(leaves, inputs, strict=True))
        parts = [_one_sequence(b, s, named, b.dtype) for s in sequences]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs), torch.cat(lses)

    results, moved = torch.autograd.functional.jvp(
        forward, tuple(leaves.values()), tuple(along.values()), create_graph=True
    )
    rows = np.concatenate([s.rows for s in sequences])
    loss = sum(
        (x * torch.from_numpy(g[rows]).to(x)).sum()
        for x, g in zip((*results, *moved), incoming, strict=True)
    )
    gradients = torch.autograd.grad(loss, tuple(leaves.values()), allow_unused=True)
    worst = {
        "out": _largest_error(moved[0], want.out[rows]),
        "lse": _largest_error(moved[1], want.lse[rows]),
    }
    return worst | _gradient_errors(dict(zip(leaves, gradients, strict=True)), want)
