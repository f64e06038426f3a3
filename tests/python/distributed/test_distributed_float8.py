"""Keys and values of float8_e4m3 over ranks: out and lse against the oracle, which gets the values
that the bytes represent, the bytes that move, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise.distributed as td  # noqa: E402
import yardstick  # noqa: E402
from bounds import check_lse, check_out  # noqa: E402
from cases import Built, Case, flat, float64  # noqa: E402
from distributed_ranks import device  # noqa: E402
from test_distributed import CAUSAL, LAYOUTS, METHODS, arguments, cuts, joined  # noqa: E402

FLOAT8 = torch.float8_e4m3fn
BASE = Case(dtype="bf16", rows=(29, 29), keys=(37, 37), heads_kv=3, group=2, head_dim=16,
            head_dim_v=8, window=CAUSAL, seed=4)  # fmt: skip
CASES = {
    "all": (BASE, "bh"),
    "heads": (replace(BASE, dtype="fp16", window=(9, 2), sinks=True, softcap=1.5), "h"),
    "uneven_heads": (replace(BASE, heads_kv=2, group=3, alibi="h"), "bh"),
    "shared": (replace(BASE, heads_kv=1, group=5, mask_blocks="h"), ""),
    "packed": (replace(BASE, rows=(13, 1, 0, 17), keys=(13, 4, 9, 20), varlen_q=True,
                       varlen_k=True), "bh"),
}  # fmt: skip


def quantized(case: Case, factors: str) -> tuple[Built, dict[str, Any], dict[str, Any]]:
    """The case with keys and values that float8 represents, their float8 and their factors, which
    are powers of two, so that the dtype of q represents the products."""
    b = Built(case)
    rng = np.random.default_rng(case.seed)
    stored, descale = {}, {}
    for name in "kv":
        x = getattr(b, name)
        shape = (b.batch if "b" in factors else 1, case.heads_kv if "h" in factors else 1)
        scale = torch.from_numpy(2.0 ** rng.integers(-2, 2, shape)).float()
        full = scale.expand(b.batch, -1)
        if case.varlen_k:
            per_key = full.repeat_interleave(torch.tensor(case.keys), 0).unsqueeze(-1)
        else:
            per_key = full[:, None, :, None]
        stored[name] = (x.float() / per_key).clamp(-448, 448).to(FLOAT8)
        x.copy_((stored[name].float() * per_key).to(b.dtype))
        descale[f"{name}_descale"] = scale
    return b, stored, descale


def compute(group, case: Case, factors: str, method: str, layout: str) -> dict[str, np.ndarray]:
    b, stored, descale = quantized(case, factors)
    (q, _, _), options = arguments(b, layout, group)
    where: dict = {"layout": layout, "group": group, "cu_seqlens": cuts(case)[1]}
    dim = 0 if case.varlen_q else 1
    k, v = (
        td.shard(stored[n].view(torch.uint8), dim, **where).to(device()).view(FLOAT8) for n in "kv"
    )
    options |= {name: x.to(device()) for name, x in descale.items()}
    options |= {"group": group, "method": method, "layout": layout, "return_lse": True}
    with torch.no_grad():
        if case.varlen_q:
            out, lse = td.attention_varlen(q, k, v, *cuts(case), **options)
        else:
            out, lse = td.attention(q, k, v, **options)
    return {"out": float64(out), "lse": float64(lse)}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_those_of_what_the_bytes_represent(pool, world):
    for name, (case, factors) in CASES.items():
        b = quantized(case, factors)[0]
        want = b.expected()
        yard = yardstick.errors(b, want)
        for method in METHODS:
            for layout in LAYOUTS:
                parts = pool.run(world, compute, case, factors, method, layout)
                got = joined(case, layout, parts)
                where = f"{name} {method} {layout} {world} ranks"
                check_out(flat(torch.from_numpy(got["out"])), want, case.dtype, yard, where)
                check_lse(b.by_row(torch.from_numpy(got["lse"])), want.lse, case.dtype, yard, where)


def bytes_and_refusals(group):
    q = torch.randn(1, 8, 2, 8, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 8, 2, 8, dtype=torch.bfloat16) for _ in range(2))
    moved = [
        td.explain(q, *kv, group=group, method="allgather").estimates["allgather"].bytes
        for kv in ((k, v), (k.to(FLOAT8), v.to(FLOAT8)))
    ]
    factors = (torch.ones(1, 3), torch.ones(1, 2) if torch.distributed.get_rank(group) else None)
    q.requires_grad_()
    bytes_ = k.to(FLOAT8), v.to(FLOAT8)
    calls = [lambda x=x: td.attention(q, *bytes_, group=group, k_descale=x) for x in factors]
    calls += [
        lambda m=m: td.attention(q, *bytes_, group=group, method=m).sum().backward()
        for m in METHODS
    ]
    return moved, [error_of(call) for call in calls]


def error_of(call) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_bytes_and_refusals(pool):
    for moved, (shape, differ, *backward) in pool.run(2, bytes_and_refusals):
        assert moved[1] == moved[0] / 2
        assert "k_descale has shape [1, 3], but must be [batch, heads_kv] = [1, 2]" in shape
        assert "k_descale is None on rank 0" in differ or "on rank 1, but None on rank 0" in differ
        assert all("which only the forward supports" in text for text in backward)
