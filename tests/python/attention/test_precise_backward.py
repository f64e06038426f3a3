"""precise_backward: gradients of saturated rows do not lose digits to the rounding of out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import capi
import tilewise
from cases import Built, flat, float64, run
from rounded_weights import same_out
from saturated import CASES_IN_BF16, SATURATED, bound, error


def of_attention(b: Built, precise: bool, **options) -> list[np.ndarray]:
    """dq and dk by autograd."""
    inputs = [x.detach().clone().requires_grad_() for x in (b.q, b.k, b.v, b.sinks)]
    q, k, v, sinks = inputs
    out = tilewise.attention(q, k, v, scale=1.0, sinks=sinks, precise_backward=precise, **options)
    assert out.dtype == options.get("out_dtype", b.dtype)
    return [flat(x) for x in torch.autograd.grad(out, inputs[:2], b.dout.to(out.dtype))]


def of_abi(b: Built, wide: bool) -> list[np.ndarray]:
    """dq and dk by the C ABI, from an out in float32 if `wide`."""
    grads = run(Built(replace(b.case, float32_out=wide))).grads
    return [grads["q"], grads["k"]]


@pytest.mark.abi
def test_saturated_rows(device):
    for target in capi.targets():
        with capi.on(target):
            rounded, precise = np.transpose([
                (error(b, of_abi(b, False)), error(b, of_abi(b, True)))
                for b in (Built(replace(SATURATED, seed=seed)) for seed in range(40))
            ])  # fmt: skip
        assert (rounded > 0.1).sum() > 3, target
        assert precise.max() < bound(device.name, "fp16"), target


@pytest.mark.parametrize("name", CASES_IN_BF16)
def test_saturated_rows_of_bf16_on_cpus(name):
    """Kernels that round weights to bf16 must divide a float32 `out` by the sum of the rounded
    weights: else it is off by up to 2^-8, as if it had been rounded itself.
    """
    for target in capi.targets():
        with capi.on(target):
            errors = [
                error(b, of_abi(b, True))
                for b in (Built(replace(CASES_IN_BF16[name], seed=seed)) for seed in range(40))
            ]
        assert max(errors) < bound("cpu", "bf16"), (target, max(errors))


@pytest.mark.tensors
def test_autograd_keeps_out_in_float32(device):
    for seed in range(4):
        b = Built(replace(SATURATED, seed=seed))
        precise = of_attention(b, True, deterministic=True)
        wide = of_attention(b, False, deterministic=True, out_dtype=torch.float32)
        assert all(np.array_equal(x, y) for x, y in zip(precise, wide, strict=True))
        assert error(b, precise) < bound(device.name, "fp16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{"causal": True}, {"return_max_logits": True}])
def test_out_is_that_without_the_option(dtype, options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, 4, 32, generator=generator).to(dtype) for _ in range(3))

    def results(q, k, v, **more):
        return tilewise.attention(q, k, v, return_lse=True, **options, **more)

    plain, precise = results(q, k, v), results(q, k, v, precise_backward=True)
    kernel = tilewise.explain(q, k, v, **options).forward.kernel
    assert same_out(float64(precise[0]), float64(plain[0]), kernel)
    assert all(torch.equal(x, y) for x, y in zip(plain[1:], precise[1:], strict=True))
    wide = results(q, k, v, precise_backward=True, out_dtype=torch.float32)[0]
    assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), precise[0])
    starts = torch.tensor([0, 15, 40], dtype=torch.int32)
    packed = [
        tilewise.attention_varlen(q[0], k[0], v[0], starts, starts, precise_backward=precise)
        for precise in (False, True)
    ]
    assert same_out(*map(float64, packed[::-1]), kernel)


def test_compiled_and_of_second_order():
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, 40, 2, 32, generator=generator).bfloat16().requires_grad_() for _ in range(3)
    ]

    def loss(q, k, v):
        return tilewise.attention(q, k, v, causal=True, precise_backward=True).square().sum()

    first = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    compiled = torch.autograd.grad(torch.compile(loss)(*inputs), inputs)
    assert all(torch.equal(x, y) for x, y in zip(first, compiled, strict=True))
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), inputs)
    assert all(x.dtype == torch.bfloat16 and x.isfinite().all() for x in second)


def test_errors():
    q = torch.randn(1, 4, 2, 8).half()
    with pytest.raises(TypeError, match="precise_backward is 'yes', but must be True or False"):
        tilewise.attention(q, q, q, precise_backward="yes")
    with pytest.raises(ValueError, match="precise_backward is True, but arrays have no autograd"):
        tilewise.attention(*[q.numpy()] * 3, precise_backward=True)
    assert tilewise.explain(q, q, q, precise_backward=True).forward.kernel.endswith(".f16")
