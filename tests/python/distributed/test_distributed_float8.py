"""Keys and values, or also queries, of float8_e4m3 over ranks: out and lse against the oracle,
which gets the values that the bytes represent, the bytes that move, and refusals."""

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
from distributed_ranks import CUDA, device  # noqa: E402
from test_distributed import (  # noqa: E402
    CAUSAL,
    LAYOUTS,
    MESH_METHODS,
    METHODS,
    arguments,
    cuts,
    draw_as,
    joined,
    mesh_of,
)
from test_distributed_calls import counted, zeros  # noqa: E402

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


QUERIES = {
    **CASES,
    "float32_out": (replace(BASE, float32_out=True, sinks=True), "h"),
    "fp16_bias": (replace(BASE, dtype="fp16", bias="hr", bias_own_dtype=True), "b"),
    "ranges": (replace(BASE, mask_ranges=(((0, 9, 0, 20, 0), (9, 29, 9, 37, 1)),), alibi="h"), "h"),
    "packed_dropout": (replace(CASES["packed"][0], dropout_p=0.3), "bh"),
}  # fmt: skip


def quantized(
    case: Case, factors: str, names: str = "kv"
) -> tuple[Built, dict[str, Any], dict[str, Any]]:
    """The case with keys and values (or also queries) that float8 represents, their float8 and
    their factors, which are powers of two, so that the case's dtype represents the products."""
    b = Built(case)
    rng = np.random.default_rng(case.seed)
    stored, descale = {}, {}
    for name in names:
        x, lengths = getattr(b, name), case.rows if name == "q" else case.keys
        shape = (b.batch if "b" in factors else 1, case.heads_kv if "h" in factors else 1)
        scale = torch.from_numpy(2.0 ** rng.integers(-2, 2, shape)).float()
        full = scale.expand(b.batch, case.heads_kv)
        if name == "q":
            full = full.repeat_interleave(case.group, 1)
        if case.varlen_k:
            per_row = full.repeat_interleave(torch.tensor(lengths), 0).unsqueeze(-1)
        else:
            per_row = full[:, None, :, None]
        stored[name] = (x.float() / per_row).clamp(-448, 448).to(FLOAT8)
        x.copy_((stored[name].float() * per_row).to(b.dtype))
        descale[f"{name}_descale"] = scale
    return b, stored, descale


def compute(
    group, case: Case, factors: str, method: str, layout: str, names: str = "kv"
) -> dict[str, np.ndarray]:
    b, stored, descale = quantized(case, factors, names)
    qkv, options = arguments(b, layout, group)
    where: dict = {"layout": layout, "group": group}
    for i, name in enumerate("qkv"):
        if name in names:
            dim, cu = (0 if case.varlen_q else 1), cuts(case)[0 if name == "q" else 1]
            own = td.shard(stored[name].view(torch.uint8), dim, cu_seqlens=cu, **where)
            qkv[i] = own.to(device()).view(FLOAT8)
    options |= {name: x.to(device()) for name, x in descale.items()}
    options |= {"return_lse": True, "out_dtype": b.out.view.dtype, **where, **mesh_of(method)}
    with torch.no_grad(), draw_as(b, group):
        if case.varlen_q:
            out, lse = td.attention_varlen(*qkv, *cuts(case), **options)
        else:
            out, lse = td.attention(*qkv, **options)
    assert out.dtype == b.out.view.dtype
    return {"out": float64(out), "lse": float64(lse)}


def check(pool, world: int, case: Case, factors: str, names: str, methods: Any) -> None:
    b = quantized(case, factors, names)[0]
    want = b.expected()
    yard = yardstick.errors(b, want)
    for method in methods:
        for layout in LAYOUTS:
            parts = pool.run(world, compute, case, factors, method, layout, names)
            got = joined(case, layout, parts)
            where = f"{names} {method} {layout} {world} ranks {case}"
            check_out(flat(torch.from_numpy(got["out"])), want, case.dtype, yard, where)
            check_lse(b.by_row(torch.from_numpy(got["lse"])), want.lse, case.dtype, yard, where)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_are_those_of_what_the_bytes_represent(pool, world):
    for case, factors in CASES.values():
        check(pool, world, case, factors, "kv", METHODS)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_queries_of_float8(pool, world):
    methods = (*METHODS, *MESH_METHODS) if world == 4 and not CUDA else METHODS
    for case, factors in QUERIES.values():
        check(pool, world, case, factors, "qkv", methods)


def bytes_and_refusals(group):
    q, k, v = (torch.randn(1, 8, 2, 8, device=device()).bfloat16() for _ in range(3))
    moved = [
        td.explain(q, *kv, group=group, method="allgather").estimates["allgather"].bytes
        for kv in ((k, v), (k.to(FLOAT8), v.to(FLOAT8)))
    ]
    first = torch.distributed.get_rank(group) == 0
    factors = (zeros(1, 3), None if first else zeros(1, 2))
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
    except (TypeError, ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def test_bytes_and_refusals(pool):
    for moved, (shape, differ, *backward) in pool.run(2, bytes_and_refusals):
        assert moved[1] == moved[0] / 2
        assert "k_descale has shape [1, 3], but must be [batch, heads_kv] = [1, 2]" in shape
        assert "k_descale is None on rank 0" in differ or "on rank 1, but None on rank 0" in differ
        assert all("which only the forward supports" in text for text in backward)


def refused_queries(group):
    """What is refused of queries of float8: gradients, and factors that do not fit or differ."""
    q, k, v = (torch.randn(1, 8, 2, 8, device=device()).to(FLOAT8) for _ in range(3))
    sinks = zeros(2).requires_grad_()
    first = torch.distributed.get_rank(group) == 0
    options: list[dict[str, Any]] = [
        {"precise_backward": True},
        {"q_descale": zeros(3, 2)},
        {"q_descale": zeros(1, 2) if first else None},
    ]
    calls = [lambda o=o: td.attention(q, k, v, group=group, **o) for o in options]
    calls.append(lambda: td.attention(q.clone().requires_grad_(), k, v, group=group))
    calls.append(lambda: td.attention(q, k.bfloat16(), v.bfloat16(), group=group))
    bias = zeros(16).half()  # of one head, which one rank computes
    own = [x[:, :, :1] for x in (q, k, v)]
    calls.append(lambda: td.attention(*own, group=group, bias=bias, method="ulysses"))
    calls += [
        lambda m=m: td.attention(q, k, v, group=group, method=m, sinks=sinks).sum().backward()
        for m in METHODS
    ]
    return [error_of(call) for call in calls]


def test_refusals_of_queries(pool):
    for precise, shape, differ, gradient, keys, bias, *backward in pool.run(2, refused_queries):
        assert "q has dtype torch.float8_e4m3fn, of which there is only the forward" in precise
        assert "q_descale has shape [3, 2]" in shape
        assert "q_descale is None on rank 1" in differ or "q_descale is nothing on rank 1" in differ
        assert "q has dtype torch.float8_e4m3fn, of which there is only the forward" in gradient
        assert "k has dtype torch.bfloat16, but must have torch.float8_e4m3fn" in keys
        assert "bias has dtype torch.float16, but must be torch.float32 or torch.bfloat16" in bias
        assert all("q, k, v have dtype float8_e4m3fn, which only" in text for text in backward)


def test_queries_travel_as_bytes(pool):
    moved = {}
    for method in METHODS:
        for dtype in (FLOAT8, torch.bfloat16):
            results = pool.run(3, counted, method, {"return_lse": True}, dtype, False)
            moved[method, dtype] = max(bytes_ for _, bytes_ in results)
            assert {estimate for estimate, _ in results} == {moved[method, dtype]}
        ratio = moved[method, FLOAT8] / moved[method, torch.bfloat16]
        assert ratio < 1 if method == "ulysses" else ratio == 0.5  # out and lse also travel
