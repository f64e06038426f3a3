"""FlashAttention-3's functions with float8_e4m3 tensors and their descale factors."""

from __future__ import annotations

import pytest
import torch

import devices
import tilewise
from test_compat_fa3 import inputs
from tilewise.compat import flash_attn_interface as fa3

pytestmark = pytest.mark.tensors


def key_starts():
    return torch.tensor([0, 9, 16, 40], dtype=torch.int32)


def fp8_inputs(way: str):
    """A function of FlashAttention-3 as a call of (q, k, v, **options), and q, k and v for it: 3
    sequences, 2 key heads.
    """
    q, k, v = inputs(3, 5, 12)
    if way == "varlen":
        q, k, v = (x[0] for x in inputs(1, 20, 40))
    lengths = (torch.tensor([0, 5, 5, 20], dtype=torch.int32), key_starts(), 15, 24)
    call = {
        "dense": fa3.flash_attn_func,
        "varlen": lambda *x, **o: fa3.flash_attn_varlen_func(*x, *lengths, **o),
        "cache": lambda *x, **o: fa3.flash_attn_with_kvcache(*x, cache_seqlens=9, **o),
        "private": lambda *x, **o: fa3._flash_attn_forward(*x, **o)[0],
    }[way]
    return call, [q.bfloat16(), *(x.to(torch.float8_e4m3fn) for x in (k, v))]


def times_factors(x, factors, way):
    """The values of float8 keys or values in bf16: multiplying by small powers of 2 is exact."""
    factors = factors.expand(3, 2).bfloat16()
    if way == "varlen":
        return (
            x.bfloat16() * factors.repeat_interleave(key_starts().diff().long(), dim=0)[..., None]
        )
    return x.bfloat16() * factors[:, None, :, None]


FACTORS = {
    "per sequence and head": [[0.5, 2.0], [4.0, 1.0], [0.25, 8.0]],
    "per sequence": [[0.5], [4.0], [0.25]],
    "per head": [[2.0, 0.25]],
    "one": [[4.0]],
}


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("way", ["dense", "varlen", "cache", "private"])
def test_descale_factors_of_fp8_keys_and_values(way, kind, chunk):
    call, (q, k, v) = fp8_inputs(way)
    k_descale = torch.tensor(FACTORS[kind])
    v_descale = k_descale.flip(0) * 2
    options = dict(causal=True, attention_chunk=chunk)
    out = call(q, k, v, k_descale=k_descale, v_descale=v_descale, **options)
    wide = [q, times_factors(k, k_descale, way), times_factors(v, v_descale, way)]
    wanted = call(*(x.float() for x in wide), **options)
    plain = call(*wide, **options)
    error = float((out.float() - wanted).abs().max())
    assert error <= 2 * float((plain.float() - wanted).abs().max()) + 1e-6
    assert not torch.equal(out, call(q, k, v, **options)), "the factors were not read"


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("way", ["dense", "varlen", "cache", "private"])
def test_queries_of_fp8(way, kind, chunk):
    """They give the bits of queries of bf16 whose factors have gone to the keys."""
    call, (q, k, v) = fp8_inputs(way)
    q = q.to(torch.float8_e4m3fn)
    factors = torch.tensor(FACTORS[kind])
    options = dict(causal=True, attention_chunk=chunk, v_descale=factors)
    out = call(q, k, v, q_descale=factors, k_descale=factors * 2, **options)
    wanted = call(q.bfloat16(), k, v, k_descale=factors * factors * 2, **options)
    assert out.dtype == torch.bfloat16 and devices.equal(out, wanted)


def test_new_keys_are_divided_by_the_factors():
    q, k, v = (x.bfloat16() for x in inputs(2, 2, 3))
    caches = [torch.zeros(2, 16, 2, 16).to(torch.float8_e4m3fn) for _ in range(4)]
    factors = dict(k_descale=torch.tensor([[0.5, 2.0]]), v_descale=torch.tensor([[4.0], [0.25]]))
    out = fa3.flash_attn_with_kvcache(q, *caches[:2], k, v, cache_seqlens=4, causal=True, **factors)
    wanted = tilewise.attention_with_kvcache(
        q, *caches[2:], k, v, cache_seqlens=4, causal=True, **factors
    )
    assert devices.equal(out, wanted)
    for ours, theirs in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(ours.float(), theirs.float())
    written = (k / torch.tensor([0.5, 2.0])[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(caches[0][:, 4:7].float(), written.float())


def test_unsupported_fp8_arguments_are_refused():
    q, k, v = (x.bfloat16() for x in inputs(1, 4, 4))
    fp8 = [x.to(torch.float8_e4m3fn) for x in (q, k, v)]
    starts, factor = torch.tensor([0, 4], dtype=torch.int32), torch.ones(1, 2)

    def varlen(q, k, v, **options):
        return fa3.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 4, 4, **options)

    calls = fa3.flash_attn_func, varlen, fa3.flash_attn_with_kvcache, fa3._flash_attn_forward
    for call in calls:
        with pytest.raises(TypeError, match="bfloat16, but must have torch"):
            call(fp8[0], k, v, q_descale=factor)
        with pytest.raises(ValueError, match="q_descale is given, but belongs to float8_e4m3 quer"):
            call(q, *fp8[1:], q_descale=factor)
        with pytest.raises(ValueError, match="k_descale is given, but belongs to float8_e4m3 keys"):
            call(q, k, v, k_descale=factor)
        with pytest.raises(ValueError, match=r"v_descale has shape \[2, 2\], but must be"):
            call(q, *fp8[1:], v_descale=torch.ones(2, 2))
    for call in (fa3.flash_attn_func, fa3.flash_attn_with_kvcache):
        for query in (q, fp8[0]):
            with pytest.raises(NotImplementedError, match="qv is given, but must be None with v"):
                call(query, *fp8[1:], qv=q)
