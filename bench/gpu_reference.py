"""Errors of a benchmarked result against attention in double precision, for one group of heads."""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_cases import Case
from gpu_contestants import Inputs

ROWS = 1024  # rows of the score matrix at a time: 128 MB in double precision at 16k keys


def reference(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The results of the last batch row and the last key/value head with its query heads.

    Returns:
        {"out"} or {"dq", "dk", "dv"}: [row, head, column] and [key, column] in double precision.
    """
    group = case.heads // case.kv_heads
    b, last = -1, slice(case.heads - group, case.heads)
    q, dout = x.q[b, :, last].double(), x.dout[b, :, last].double()
    k, v = x.k[b, :, -1].double(), x.v[b, :, -1].double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    out, dq = torch.zeros_like(q), torch.zeros_like(q)
    scale = case.head_dim**-0.5
    for head in range(group):
        for begin in range(0, case.seqlen, ROWS):
            rows = slice(begin, min(begin + ROWS, case.seqlen))
            keys = rows.stop if case.causal else case.seqlen  # later keys are masked
            s = (q[rows, head] * scale) @ k[:keys].T
            if case.causal:
                i = torch.arange(begin, rows.stop, device=s.device)
                s = s.masked_fill(torch.arange(keys, device=s.device) > i[:, None], -torch.inf)
            p = s.softmax(-1)
            out[rows, head] = p @ v[:keys]
            if case.direction == "fwd":
                continue
            g = dout[rows, head]
            ds = p * (g @ v[:keys].T - (g * out[rows, head]).sum(-1, keepdim=True)) * scale
            dq[rows, head] = ds @ k[:keys]
            dk[:keys] += ds.T @ q[rows, head]
            dv[:keys] += p.T @ g
    return {"out": out} if case.direction == "fwd" else {"dq": dq, "dk": dk, "dv": dv}


def errors(case: Case, results: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Per tensor: norm of the difference over norm of the reference (infinite for a NaN)."""
    group = case.heads // case.kv_heads
    found = {}
    for name, truth in expected.items():
        got = results[name]
        compared = got[-1, :, -1] if name in ("dk", "dv") else got[-1, :, case.heads - group :]
        error = float((compared.double() - truth).norm() / truth.norm())
        found[name] = error if error == error else float("inf")
    return found
