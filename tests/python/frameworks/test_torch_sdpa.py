"""tilewise.attention on tensors compared with torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.utils.checkpoint import checkpoint

import devices
import tilewise

pytestmark = pytest.mark.tensors

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def heads(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def relative(given, wanted):
    return ((given.double() - wanted).abs().max() / wanted.abs().max()).item()


def compare(inputs, ours, theirs, tolerance):
    """Compare output and gradients of two functions of the same leaves; `theirs` is in float64."""
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out, wanted = ours(*inputs), theirs(*wide)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, inputs, dout)
    wanted_grads = torch.autograd.grad(wanted, wide, dout.double())
    assert relative(out, wanted) < tolerance
    for grad, wanted_grad, x in zip(grads, wanted_grads, inputs, strict=True):
        assert grad.shape == x.shape and grad.dtype == x.dtype
        assert relative(grad, wanted_grad) < tolerance


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_same_as_sdpa(dtype, causal, head_dim):
    q, k, v = (heads(2, 3, 97, head_dim, dtype=dtype) for _ in range(3))
    compare(
        (q, k, v),
        lambda q, k, v: tilewise.attention(q, k, v, causal=causal, layout="bhsd"),
        lambda q, k, v: sdpa(q, k, v, is_causal=causal),
        TOLERANCE[dtype],
    )


def test_grouped_heads_bias_scale_and_other_value_dim():
    q, k, v = heads(2, 4, 30, 16), heads(2, 2, 40, 16), heads(2, 2, 40, 24)
    bias = heads(1, 4, 30, 40)
    compare(
        (q, k, v, bias),
        lambda q, k, v, b: tilewise.attention(q, k, v, bias=b, scale=0.2, layout="bhsd"),
        lambda q, k, v, b: sdpa(q, k, v, attn_mask=b, scale=0.2, enable_gqa=True),
        2e-6,
    )


@pytest.mark.parametrize("shape", [(40,), (1, 40), (30, 40), (4, 1, 40), (2, 1, 1, 40)])
def test_bias_is_broadcast_and_its_gradient_summed(shape):
    q, k, v = heads(2, 4, 30, 16), heads(2, 4, 40, 16), heads(2, 4, 40, 16)
    compare(
        (q, k, v, heads(*shape)),
        lambda q, k, v, b: tilewise.attention(q, k, v, bias=b, layout="bhsd"),
        lambda q, k, v, b: sdpa(q, k, v, attn_mask=b.expand(2, 4, 30, 40)),
        2e-6,
    )


def test_gradient_of_an_expanded_bias():
    q, k, v, b = heads(2, 4, 30, 16), heads(2, 4, 40, 16), heads(2, 4, 40, 16), heads(1, 4, 1, 40)
    compare(
        (q, k, v, b),
        lambda q, k, v, b: tilewise.attention(q, k, v, bias=b.expand(2, 4, 30, 40), layout="bhsd"),
        lambda q, k, v, b: sdpa(q, k, v, attn_mask=b.expand(2, 4, 30, 40)),
        2e-6,
    )


def test_bias_that_does_not_depend_on_the_key_changes_nothing():
    q, bias = heads(2, 4, 30, 16), heads(30, 1)
    out = tilewise.attention(q, q, q, bias=bias, layout="bhsd")
    assert torch.allclose(out, tilewise.attention(q, q, q, layout="bhsd"), atol=1e-6)
    (grad,) = torch.autograd.grad(out.sin().sum(), bias)
    assert grad.shape == bias.shape and grad.abs().max() < 1e-5


def test_low_precision_bias_keeps_its_dtype():
    q, k, v = (heads(1, 2, 20, 16, dtype=torch.bfloat16) for _ in range(3))
    bias = heads(20, 20, dtype=torch.bfloat16)
    out = tilewise.attention(q, k, v, bias=bias, layout="bhsd")
    (grad,) = torch.autograd.grad(out.sum(), bias)
    assert grad.dtype == torch.bfloat16 and grad.shape == bias.shape


VIEWS = {
    "transposed": lambda x: x.detach().transpose(1, 2).contiguous().transpose(1, 2),
    "column stride 2": lambda x: x.detach().repeat_interleave(2, -1)[..., ::2],
    "slice of packed qkv": lambda x: torch.stack((x.detach(), x.detach()), dim=2)[:, :, 0],
    "expanded batch": lambda x: x.detach()[:1].expand(2, -1, -1, -1),
    "expanded heads": lambda x: x.detach()[:, :, :1].expand(-1, -1, 3, -1),
    "flipped columns": lambda x: x.detach().flip(-1).mT.contiguous().mT,
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_give_the_results_of_contiguous_copies(name):
    views = [VIEWS[name](torch.randn(2, 33, 3, 16)).requires_grad_() for _ in range(3)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    dout = torch.randn(2, 33, 3, 16).transpose(0, 1).contiguous().transpose(0, 1)
    out = tilewise.attention(*views, causal=True)
    wanted = tilewise.attention(*copies, causal=True)
    assert devices.equal(out, wanted)
    grads = torch.autograd.grad(out, views, dout)
    for grad, wanted_grad in zip(grads, torch.autograd.grad(wanted, copies, dout), strict=True):
        assert devices.equal(grad, wanted_grad)


def test_incoming_gradient_without_strides():
    q = heads(1, 20, 2, 16)
    (grad,) = torch.autograd.grad(tilewise.attention(q, q, q).sum(), q)
    (wanted,) = torch.autograd.grad((tilewise.attention(q, q, q) * torch.ones(())).sum(), q)
    assert devices.equal(grad, wanted)


def test_lse_and_its_gradient():
    q, k = heads(2, 3, 20, 16), heads(2, 3, 30, 16)

    def ours(q, k):
        return tilewise.attention(q, k, k, return_lse=True, layout="bhsd")[1]

    compare((q, k), ours, lambda q, k: torch.logsumexp(q @ k.mT / 4.0, -1), 2e-6)


def test_learnable_scale_and_sinks():
    q, k, v = heads(2, 4, 20, 16), heads(2, 4, 30, 16), heads(2, 4, 30, 16)
    scale = torch.tensor(0.3, requires_grad=True)
    sinks = heads(4)

    def theirs(q, k, v, scale, sinks):
        scores = torch.cat((scale * q @ k.mT, sinks.view(1, 4, 1, 1).expand(2, 4, 20, 1)), -1)
        return scores.softmax(-1)[..., :-1] @ v

    compare(
        (q, k, v, scale, sinks),
        lambda q, k, v, c, s: tilewise.attention(q, k, v, scale=c, sinks=s, layout="bhsd"),
        theirs,
        3e-6,
    )


def test_only_requested_gradients():
    q, k, v = heads(1, 9, 2, 8), heads(1, 9, 2, 8).detach(), heads(1, 9, 2, 8)
    tilewise.attention(q, k, v).sum().backward()
    assert q.grad is not None and v.grad is not None and k.grad is None


def test_no_grad_builds_no_graph():
    q = heads(1, 9, 2, 8)
    with torch.no_grad():
        assert not tilewise.attention(q, q, q).requires_grad
    with torch.inference_mode():
        assert tilewise.attention(q, q, q).is_inference()
    assert not tilewise.attention(q.detach(), q.detach(), q.detach()).requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_behaves_as_for_sdpa(dtype):
    q, k, v = heads(2, 3, 20, 16), heads(2, 3, 20, 16, dtype=dtype), heads(2, 3, 20, 16)
    with torch.autocast(torch.get_default_device().type, dtype=dtype):
        out, wanted = tilewise.attention(q, k, v, layout="bhsd"), sdpa(q, k, v)
        masked = tilewise.attention(q, k, v, bias=torch.zeros(20, 20), layout="bhsd")
    assert out.dtype == wanted.dtype == masked.dtype == dtype
    out.sum().backward()
    assert q.grad.dtype == torch.float32 and k.grad.dtype == dtype
    with (
        torch.autocast(torch.get_default_device().type, dtype=dtype, enabled=False),
        pytest.raises(TypeError),
    ):
        tilewise.attention(q, k, v, layout="bhsd")


def test_dropout_follows_the_seed():
    q, k, v = heads(2, 40, 2, 16), heads(2, 40, 2, 16), torch.ones(2, 40, 2, 16)

    def run(seed):
        torch.manual_seed(seed)
        out = tilewise.attention(q, k, v, dropout_p=0.5)
        return (out, *torch.autograd.grad(out.sin().sum(), (q, k)))

    for one, other in zip(run(1), run(1), strict=True):
        assert devices.equal(one, other)
    assert not torch.equal(run(1)[0], run(2)[0])
    assert not torch.equal(
        tilewise.attention(q, k, v, dropout_p=0.5), tilewise.attention(q, k, v, dropout_p=0.5)
    )


def test_dropout_keeps_the_mean():
    weights = tilewise.attention(
        torch.zeros(1, 2000, 1, 8), torch.zeros(1, 64, 1, 8), torch.ones(1, 64, 1, 8), dropout_p=0.3
    )[0, :, 0, 0]
    # Row sums are kept / 64 / 0.7 with a binomial count of mean 0.7 * 64: mean 1, variance
    # 0.3 / 0.7 / 64 per row.
    assert abs(weights.mean().item() - 1.0) < 5 * math.sqrt(0.3 / 0.7 / 64 / 2000)
    assert abs(weights.var().item() - 0.3 / 0.7 / 64) < 0.001


def test_checkpointing_replays_the_dropout_bits():
    q = heads(1, 40, 2, 16)

    def block(q):
        return tilewise.attention(q, q, q, causal=True, dropout_p=0.4).sin().sum()

    torch.manual_seed(3)
    (wanted,) = torch.autograd.grad(block(q), q)
    torch.manual_seed(3)
    (grad,) = torch.autograd.grad(checkpoint(block, q, use_reentrant=False), q)
    assert devices.equal(grad, wanted)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("shape", [(2, 150, 3, 32), (1, 1, 2, 64), (1, 300, 1, 16)])
def test_results_do_not_depend_on_the_number_of_threads(shape):
    q, bias = heads(*shape), heads(shape[1], 400)
    k, v = (heads(shape[0], 400, shape[2], shape[3]) for _ in range(2))
    inputs, results, threads = (q, k, v, bias), [], torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            out = tilewise.attention(q, k, v, causal=True, bias=bias)
            results.append((out, *torch.autograd.grad(out.sin().sum(), inputs)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two)


def test_empty_problems():
    for batch, rows, keys in ((0, 3, 3), (2, 0, 3), (2, 3, 0)):
        q, k = heads(batch, rows, 2, 8), heads(batch, keys, 2, 8)
        out, lse = tilewise.attention(q, k, k, return_lse=True)
        assert out.shape == q.shape and not out.any()
        assert torch.equal(lse, torch.full((batch, 2, rows), -math.inf))
        out.sum().backward()
        assert not q.grad.any() and not k.grad.any()
