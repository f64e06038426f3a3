"""Decoding with a cache whose keys are spread over ranks, against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise.distributed as td  # noqa: E402
import yardstick  # noqa: E402
from bounds import check_lse, check_out  # noqa: E402
from cases import Built, Case, flat, float64  # noqa: E402
from distributed_ranks import CUDA, device  # noqa: E402
from tilewise.distributed.cache import merge_parts  # noqa: E402

BASE = Case(rows=(1, 1, 1), keys=(37, 37, 37), heads_kv=2, group=3, head_dim=16, head_dim_v=8,
            seed=3)  # fmt: skip
CASES = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16", "rows": (3, 3, 3)},
    "softcap": {"softcap": 1.5, "max_logits": True},
    "sinks": {"sinks": True},
    "sinks_bf16": {"sinks": True, "dtype": "bf16", "keys": (3, 3, 3), "max_logits": True},
    "float32_out": {"dtype": "bf16", "float32_out": True, "sinks": True},
}


def decode(group, case: Case, paged: bool):
    """Rank r of w holds keys r, r + w, ...; the rank of the last key appends it."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    b = Built(case)
    keys_of_rank = range(rank, case.keys[0], world)
    k, v = (x[:, keys_of_rank].to(device(), copy=True) for x in (b.k, b.v))
    appends = bool(keys_of_rank) and keys_of_rank[-1] == case.keys[0] - 1
    kept = len(keys_of_rank) - appends
    caches = [x.new_full((3, 40, *x.shape[2:]), math.nan) for x in (k, v)]
    for cache, x in zip(caches, (k, v), strict=True):
        cache[:, :kept] = x[:, :kept]
    table = None
    if paged:  # pages of 4 keys, in reverse order
        table = torch.arange(29, -1, -1, dtype=torch.int32).view(3, 10)
        pages = [cache.reshape(30, 4, *cache.shape[2:]).flip(0).contiguous() for cache in caches]
        caches = pages
    new = [x[:, kept:] for x in (k, v)] if appends else [None, None]
    results = td.attention_with_kvcache(
        b.q.to(device()), *caches, *new, group=group, block_table=table, scale=b.scale,
        cache_seqlens=torch.full((3,), kept, dtype=torch.int32), softcap=case.softcap,
        sinks=None if b.sinks is None else b.sinks.to(device()), return_lse=True,
        return_max_logits=case.max_logits,
        out_dtype=torch.float32 if case.float32_out else None,
    )  # fmt: skip
    return [x.cpu() for x in results]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_decoding(pool, world):
    for name, options in CASES.items():
        case = replace(BASE, **options)
        b = Built(case)
        want = b.expected()
        yard = None if case.dtype == "fp32" else yardstick.errors(b, want)
        for paged in (False, True):
            results = pool.run(world, decode, case, paged)
            for out, lse, *max_logits in results:
                assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])
                assert out.dtype == b.out.view.dtype
                check_out(flat(out), want, case.dtype, yard, name)
                check_lse(b.by_row(lse), want.lse, case.dtype, yard, name)
                for x, y in zip(max_logits, results[0][2:], strict=True):
                    assert torch.equal(x, y)
                    check_lse(float64(x), want.max_logits, case.dtype, yard, name, "max_logits")


def decode_nothing(group):
    """A batch without sequences, and a sequence without rows, with float32 and bfloat16."""
    shapes = []
    for size, dtype in (((0, 1), torch.float32), ((0, 1), torch.bfloat16), ((2, 0), torch.float32)):
        q = torch.zeros(*size, 2, 8, dtype=dtype, device=device())
        cache = q.new_zeros(size[0], 4, 1, 8)
        results = td.attention_with_kvcache(
            q, cache, cache, group=group, cache_seqlens=3, return_lse=True, return_max_logits=True
        )
        shapes.append([tuple(x.shape) for x in results])
        assert (results[2] == -math.inf).all()
    return shapes


def test_no_sequences_and_no_rows(pool):
    want = [[(0, 1, 2, 8), (0, 2, 1), (0, 2)]] * 2 + [[(2, 0, 2, 8), (2, 2, 0), (2, 2)]]
    for shapes in pool.run(2, decode_nothing):
        assert shapes == want


def with_queries_of_float8(group):
    """Results with queries of float8, and with the same queries in 16 bits."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(2, n, heads, 8, generator=generator).to(device(), torch.float8_e4m3fn)
        for n, heads in ((3, 4), (9, 2), (9, 2))
    )
    first = torch.distributed.get_rank(group) == 0
    q_descale, k_descale = (
        torch.tensor(x, device=device()) for x in ([[0.5, 3.0]], [[1.25], [0.75]])
    )
    options = {"group": group, "cache_seqlens": 7 if first else 2, "return_lse": True}
    results = []
    for dtype in (None, torch.float16, torch.float32):
        given = {"out_dtype": dtype, **options}
        wide = q.to(torch.float16 if dtype == torch.float16 else torch.bfloat16)
        got = td.attention_with_kvcache(q, k, v, q_descale=q_descale, k_descale=k_descale, **given)
        want = td.attention_with_kvcache(wide, k, v, k_descale=q_descale * k_descale, **given)
        results.append([[x.cpu() for x in got], [x.cpu() for x in want]])
    try:
        td.attention_with_kvcache(q, k, v, q_descale=q_descale if first else None, **options)
    except ValueError as error:
        return results, str(error)
    return results, "no error"


def test_queries_of_float8(pool):
    for results, refusal in pool.run(2, with_queries_of_float8):
        for (got, want), dtype in zip(
            results, (torch.bfloat16, torch.float16, torch.float32), strict=True
        ):
            assert got[0].dtype == dtype
            for x, y in zip(got, want, strict=True):
                # Tensor cores sum the products of float8 and those of 16 bits in another order.
                near = 1e-2 if CUDA else 0.0
                torch.testing.assert_close(x, y, rtol=near, atol=near)
        assert "q_descale is None on rank 1, but given with shape [1, 2] on rank 0" in refusal


def different(group):
    q = torch.zeros(1, 1, 2 + torch.distributed.get_rank(group), 8, device=device())
    cache = q.new_zeros(1, 4, 1, 8)
    try:
        td.attention_with_kvcache(q, cache, cache, group=group)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_that_differ(pool):
    for text in pool.run(2, different):
        assert "shape of q is [1, 1, 3, 8] on rank 1, but [1, 1, 2, 8] on rank 0" in text


def test_merging_parts():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 5, 3, 8, generator=generator)
    k, v = (torch.randn(2, 12, 3, 8, generator=generator) for _ in range(2))
    import tilewise

    want = tilewise.attention(q, k, v, return_lse=True)
    pieces = [(0, 4), (4, 4), (4, 11), (11, 12)]
    parts = [tilewise.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in pieces]
    out, lse = merge_parts(*(torch.stack(x) for x in zip(*parts, strict=True)))
    assert torch.allclose(out, want[0], atol=1e-6) and torch.allclose(lse, want[1], atol=1e-6)
    none = merge_parts(torch.full((2, 1, 1, 1, 3), math.nan), torch.full((2, 1, 1, 1), -math.inf))
    assert none[0].eq(0).all() and none[1].eq(-math.inf).all()
    lse = torch.tensor([math.nan, 1.0]).view(2, 1, 1, 1)
    assert all(x.isnan().all() for x in merge_parts(torch.ones(2, 1, 1, 1, 3), lse))
    sink = torch.tensor([math.inf, 1.0]).view(2, 1, 1, 1)
    out, lse = merge_parts(torch.tensor([0.0, 5.0]).view(2, 1, 1, 1, 1), sink)
    assert out.item() == 0 and lse.item() == math.inf
