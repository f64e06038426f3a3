"""out_dtype: out in float32 of queries of 16 bits.

The property tests compare it with the oracle for every combination of options. Here: it is the sum
before rounding, bit by bit and against fp64, and the Python functions and their derivatives.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import capi
import devices
import tilewise
from bounds import largest
from cases import DTYPES, Built, Case, check, flat, float64, run
from rounded_weights import same_out
from tilewise import masks

DENSE = Case(rows=(70, 70), keys=(300, 300), heads_kv=2, group=2, head_dim=40, head_dim_v=24)
CASES = {
    "prefill": replace(DENSE, window=(-1, 0), sinks=True, softcap=3.0, bias="h"),
    "splits": replace(DENSE, rows=(4, 4), keys=(1500, 1500), splits=3),
    "decode": replace(DENSE, rows=(1, 1)),
    "pages": replace(DENSE, rows=(3, 3), page_size=16, splits=2),
    "varlen": replace(
        DENSE, rows=(5, 0, 90), keys=(9, 40, 0), varlen_q=True, varlen_k=True, tail_q=3
    ),
    "unseen": replace(DENSE, rows=(90, 90), keys=(20, 20), window=(-1, 0)),
    "huge": replace(DENSE, spread=100.0, scale=1e5),
}  # fmt: skip


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(x).float().to(DTYPES[dtype]).double().numpy()


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", CASES)
def test_rounded_it_is_out_in_the_dtype_of_q(name, dtype, device):
    case = replace(CASES[name], dtype=dtype)
    if device.name != "cpu":  # another form of a kernel may run there
        check(replace(case, float32_out=True), backward=False)
        return
    for target in capi.targets():
        b = Built(case)
        with capi.on(target):
            narrow, wide = (
                run(x, backward=False) for x in (b, Built(replace(case, float32_out=True)))
            )
        largest_v = largest(flat(b.v)) if case.splits else 0.0
        assert same_out(rounded(wide.out, dtype), narrow.out, narrow.kernels[0], largest_v), target
        assert np.array_equal(wide.lse, narrow.lse) and wide.kernels == narrow.kernels
        if narrow.out.any() and name != "huge":  # which has a row of v
            assert not np.array_equal(wide.out, narrow.out), (target, name)


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rows", [1, 70])
def test_its_error_is_less_than_the_rounding_to_16_bits(dtype, rows):
    """Values around 4, so that the rounding of weights, which bf16 and AMX kernels do, averages
    out: a 16-bit out cannot be closer to the exact one than the exact one rounded."""
    case = Case(rows=(rows,), keys=(2000,), dtype=dtype, float32_out=True, head_dim=64)
    b = Built(case)
    b.v.copy_(b.v.float() * 0.25 + 4.0)
    want = b.expected().out
    possible = np.abs(rounded(want, dtype) - want)
    for target in capi.targets():
        with capi.on(target):
            error = np.abs(run(b, backward=False).out - want)
        assert error.max() < 0.25 * possible.max(), target
        assert np.sqrt((error**2).mean()) < 0.2 * np.sqrt((possible**2).mean()), target


def tensors(dtype=torch.bfloat16, grad=False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 150, 4, 32), (2, 170, 2, 32), (2, 170, 2, 24))
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made] if grad else made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"mask": masks.Ranges.documents([0, 60, 150])}, {"return_max_logits": True}],
)
def test_results_of_attention(dtype, options):
    q, k, v = tensors(dtype)
    narrow = tilewise.attention(q, k, v, return_lse=True, **options)
    wide = tilewise.attention(q, k, v, return_lse=True, out_dtype=torch.float32, **options)
    kernel = tilewise.explain(q, k, v, **options).forward.kernel
    assert wide[0].dtype == torch.float32
    assert same_out(float64(wide[0].to(dtype)), float64(narrow[0]), kernel)
    assert all(torch.equal(x, y) for x, y in zip(wide[1:], narrow[1:], strict=True))
    same = tilewise.attention(q, k, v, out_dtype=dtype, **options)
    assert torch.equal(same if isinstance(same, torch.Tensor) else same[0], narrow[0])

    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    out = tilewise.attention(*swapped, layout="bhsd", return_lse=True, out_dtype=torch.float32,
                             **options)[0]  # fmt: skip
    assert torch.equal(out.transpose(1, 2), wide[0])
    if dtype == torch.float16:
        arrays = [x.numpy() for x in (q, k, v)]
        out = tilewise.attention(*arrays, return_lse=True, out_dtype=np.float32, **options)[0]
        assert out.dtype == np.float32 and np.array_equal(out, wide[0])


def test_results_of_packed_sequences_and_caches():
    q, k, v = (x[0] for x in tensors(torch.float16))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 50, 50, 140], [0, 30, 60, 170])]
    narrow = tilewise.attention_varlen(q, k, v, *starts, causal=True)
    wide = tilewise.attention_varlen(q, k, v, *starts, causal=True, out_dtype=torch.float32)
    assert wide.dtype == torch.float32 and torch.equal(wide.half(), narrow)
    arrays = [x.numpy() for x in (q, k, v, *starts)]
    got = tilewise.attention_varlen(*arrays, causal=True, out_dtype="float32")
    assert got.dtype == np.float32 and np.array_equal(got, wide)

    q, k, v = tensors(torch.float16)
    q, chosen = q[:, :3], torch.arange(60, dtype=torch.int32).repeat(2, 3, 1)
    for options in ({"causal": True}, {"indices": chosen}, {"indices": chosen[:, :0]}):
        few = q[:, :0] if options.get("indices", chosen).shape[1] == 0 else q
        calls = [
            tilewise.attention_with_kvcache(few, k, v, cache_seqlens=100, out_dtype=wide, **options)
            for wide in (None, torch.float32)
        ]
        assert calls[1].dtype == torch.float32 and torch.equal(calls[1].half(), calls[0])
        on_arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        got = tilewise.attention_with_kvcache(
            few.numpy(), k.numpy(), v.numpy(), cache_seqlens=100, out_dtype=np.float32, **on_arrays
        )
        assert got.dtype == np.float32 and np.array_equal(got, calls[1])


def gradients(out, inputs, cotangent):
    return torch.autograd.grad(out, inputs, cotangent.to(out.dtype))


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_calls_and_gradients_on_each_device(dtype):
    g = devices.generator(0)
    shapes = ((2, 150, 4, 64), (2, 170, 2, 64), (2, 170, 2, 64))
    q, k, v = (torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (150, 170)]

    def results(out_dtype):
        packed = [x.flatten(0, 1) for x in (q, k, v)]
        with torch.no_grad():
            cached = tilewise.attention_with_kvcache(
                q[:, :1], k, v, cache_seqlens=100, out_dtype=out_dtype
            )
        return (
            tilewise.attention(q, k, v, causal=True, out_dtype=out_dtype),
            tilewise.attention_varlen(*packed, *starts, causal=True, out_dtype=out_dtype),
            cached,
        )

    wide, narrow = results(torch.float32), results(None)
    for x, y in zip(wide, narrow, strict=True):
        assert x.dtype == torch.float32
        if x.device.type == "cpu":
            kernel = tilewise.explain(q, k, v).forward.kernel
            assert same_out(float64(x.to(dtype)), float64(y), kernel)
        else:
            assert devices.equal(x.to(dtype), y)
        assert not torch.equal(x, x.to(dtype).float())
    dout = torch.randn(wide[0].shape, generator=g)
    got, want = (gradients(x[0], (q, k, v), dout) for x in (wide, narrow))
    for x, y in zip(got, want, strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_in_float32_is_rounded(compiled):
    q, k, v = tensors(torch.bfloat16, grad=True)
    call = torch.compile(tilewise.attention) if compiled else tilewise.attention
    out = call(q, k, v, causal=True, out_dtype=torch.float32)
    narrow = call(q, k, v, causal=True)
    assert out.dtype == torch.float32
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    got = gradients(out, (q, k, v), dout)
    again = gradients(
        tilewise.attention(q, k, v, causal=True, out_dtype=torch.float32), (q, k, v),
        dout.bfloat16().float(),
    )  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))
    want = gradients(narrow, (q, k, v), dout)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


def test_tangents_and_second_derivatives():
    q, k, v = tensors(torch.float16)

    def attend(q, k, v, out_dtype=torch.float32):
        return tilewise.attention(q, k, v, causal=True, out_dtype=out_dtype)

    moves = [torch.randn(x.shape).to(x.dtype) for x in (q, k, v)]
    out, tangent = torch.func.jvp(attend, (q, k, v), tuple(moves))
    _, narrow = torch.func.jvp(lambda *x: attend(*x, None), (q, k, v), tuple(moves))
    assert out.dtype == tangent.dtype == torch.float32
    torch.testing.assert_close(tangent.half(), narrow, rtol=4e-3, atol=4e-3)

    def of_gradients(out_dtype):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        loss = attend(*inputs, out_dtype).float().square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        return torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)

    for x, y in zip(of_gradients(torch.float32), of_gradients(None), strict=True):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x, y, rtol=2e-2, atol=float(y.abs().max()) * 1e-2)

    batched = torch.func.vmap(attend)(*(x[None] for x in (q, k, v)))
    assert batched.dtype == torch.float32 and torch.equal(batched[0], out)


def test_derivatives_of_arrays():
    q, k, v = (x.numpy() for x in tensors(torch.float16))
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True, out_dtype=np.float32)
    dout = np.random.default_rng(0).standard_normal(out.shape).astype(np.float16)
    got = tilewise.attention_backward(dout, q, k, v, out, lse, causal=True)
    inputs = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    wide = tilewise.attention(*inputs, causal=True, out_dtype=torch.float32)
    want = gradients(wide, inputs, torch.from_numpy(dout))
    assert all(np.array_equal(x, y) for x, y in zip(got[:3], want, strict=True))
    with pytest.raises(TypeError, match="dout has dtype float32, but must be float16"):
        tilewise.attention_backward(out, q, k, v, out, lse, causal=True)
    moves = tilewise.Tangents(q=q)
    tangent, lse_tangent = tilewise.attention_jvp(moves, q, k, v, out, lse, causal=True)
    assert tangent.dtype == np.float32
    tilewise.attention_second(
        moves, tangent, lse_tangent, dout, q, k, v, out, lse, dout=dout, causal=True
    )


def test_errors_and_explanations():
    q, k, v = tensors(torch.bfloat16)
    with pytest.raises(TypeError, match=r"out_dtype is torch.float16, but must be None, torch.bf"):
        tilewise.attention(q, k, v, out_dtype=torch.float16)
    with pytest.raises(TypeError, match="out_dtype is 'half', but must be None or float32 like q"):
        tilewise.attention(*(x.float().numpy() for x in (q, k, v)), out_dtype="half")
    plan = tilewise.explain(q, k, v, out_dtype=torch.float32)
    assert "out in float32" in str(plan) and "cpu." in plan.forward.kernel
    assert "out in float32" not in str(tilewise.explain(q, k, v))
    meta = tilewise.attention(*(x.to("meta") for x in (q, k, v)), out_dtype=torch.float32)
    assert meta.dtype == torch.float32


def test_partial_results_merge_without_rounding():
    q, k, v = tensors(torch.bfloat16)
    v = v * 0.25 + 4.0  # see test_its_error_is_less_than_the_rounding_to_16_bits
    parts = [
        tilewise.attention(q, k[:, keys], v[:, keys], return_lse=True, out_dtype=torch.float32)
        for keys in (slice(0, 100), slice(100, None))
    ]
    out, lse = tilewise.merge_states(*parts[0], *parts[1])
    whole, whole_lse = tilewise.attention(
        q.float(), k.float(), v.float(), return_lse=True, out_dtype=torch.float32
    )
    assert out.dtype == torch.float32
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-4)
    assert (out - whole).abs().max() < 0.25 * (whole.bfloat16().float() - whole).abs().max()
