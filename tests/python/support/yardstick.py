"""Plain attention in eager PyTorch in the dtype of the inputs: how far a straightforward
low-precision computation is from the oracle. Kernels are allowed a small multiple of that error."""

from __future__ import annotations

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


def _one_sequence(
    b: Built, sequence: oracle.SequenceIndices, leaves: dict[str, torch.Tensor], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [n, Hq, Dv] and lse [n, Hq] of one sequence, every step rounded to `dtype`."""
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
    return product(p, v).transpose(0, 1), lse.transpose(0, 1)


def errors(b: Built, want: oracle.Result) -> dict[str, float]:
    """Largest error of the plain computation against the oracle, per result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small and tests run in parallel
    try:
        return _errors(b, want)
    finally:
        torch.set_num_threads(threads)


def _errors(b: Built, want: oracle.Result) -> dict[str, float]:
    dtype = b.dtype

    def leaf(x: torch.Tensor) -> torch.Tensor:
        return x.detach().to(dtype, copy=True).requires_grad_()

    def rows_of(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(-1, *x.shape[-2:])

    def separate_keys(x: torch.Tensor, target: np.ndarray) -> torch.Tensor:
        """Keys copied to where their gradients go, so that sequences that share keys get separate
        ones."""
        keys, flat = torch.zeros(target.shape, dtype=dtype, device=x.device), rows_of(x)
        for sequence in b.sequences:
            keys[index(sequence.grad_keys, x.device)] = flat[index(sequence.keys, x.device)]
        return leaf(keys)

    leaves = {
        "q": leaf(rows_of(b.q)),
        "k": separate_keys(b.k, want.dk),
        "v": separate_keys(b.v, want.dv),
    }
    leaves["scale"] = leaf(torch.tensor(b.scale, device=b.q.device))
    if b.bias is not None:
        leaves["bias"] = leaf(b.bias)
    if b.sinks is not None:
        leaves["sinks"] = leaf(b.sinks)
    dout, dlse = rows_of(b.dout), None
    if b.dlse is not None:
        dlse = torch.from_numpy(b.by_row(b.dlse)).to(b.q.device, dtype)
    worst = {"out": 0.0, "lse": 0.0}
    loss = sum((x * 0).sum() for x in leaves.values() if x.isfinite().all())
    for sequence in b.sequences:
        if len(sequence.rows) == 0 or (len(sequence.keys) == 0 and b.sinks is None):
            continue
        rows = index(sequence.rows, b.q.device)
        out, lse = _one_sequence(b, sequence, leaves, dtype)
        error = np.abs(out.detach().cpu().double().numpy() - want.out[sequence.rows])
        worst["out"] = max(worst["out"], float(error.max(initial=0)))
        loss = loss + (out * dout[rows]).sum()
        if dlse is not None:
            loss = loss + (lse * dlse[rows]).sum()
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        loss.backward()
    exact = {
        "q": want.dq, "k": want.dk, "v": want.dv, "bias": want.dbias, "sinks": want.dsinks,
        "scale": np.float64(want.dscale),
    }  # fmt: skip
    for name, target in exact.items():
        if name not in leaves or target is None:
            continue
        grad = leaves[name].grad
        got = np.zeros(target.shape) if grad is None else grad.cpu().double().numpy()
        error = np.abs(got - target)
        worst[name] = float(error.max(initial=0))
    return worst
