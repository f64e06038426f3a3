"""The modules: a training loop as papers write it, and a block that trains and generates."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from bounds import check_gradients, check_lse
from cases import Built, Case, flat, float64
from tilewise.nn import FlashAttention, MultiheadAttention, RotaryEmbedding

pytestmark = pytest.mark.tensors


def relative(given, wanted):
    return ((given - wanted).abs().max() / wanted.abs().max()).item()


def test_training_loop():
    attn = FlashAttention(head_dim=64)
    optimizer = torch.optim.Adam(attn.parameters())
    Q = torch.randn(2, 8, 512, 64, requires_grad=True)
    K = torch.randn(2, 8, 512, 64, requires_grad=True)
    V = torch.randn(2, 8, 512, 64, requires_grad=True)

    optimizer.zero_grad()
    output = attn(Q, K, V)
    loss = output.sum()
    loss.backward()
    optimizer.step()

    b = Built(Case(rows=(512,) * 2, keys=(512,) * 2, heads_kv=8, head_dim=64, head_dim_v=64))
    for x, given in ((b.q, Q), (b.k, K), (b.v, V)):
        x.copy_(given.detach().transpose(1, 2))
    b.dout.fill_(1.0)
    want = b.expected()

    def rows(x):  # [B, H, S, D] as the oracle's [B * S, H, D]
        return flat(x.detach().transpose(1, 2))

    def error(given, exact):
        return abs(rows(given) - exact).max() / abs(exact).max()

    assert max(error(output, want.out), error(K.grad, want.dk), error(V.grad, want.dv)) < 1e-6
    # The largest of four million scores of normal numbers, sums of 64 products, is 5 or 6: its
    # rounding alone may change an element of dQ by more than 1e-6.
    grads = {"q": rows(Q.grad), "scale": float64(attn.scale.grad.view(1))}
    check_gradients(grads, want, b, None, "")
    assert [name for name, _ in attn.named_parameters()] == ["scale"]
    with torch.no_grad():
        attn.scale.fill_(b.scale)
    _, lse, max_logits = attn(Q, K, V, return_lse=True, return_max_logits=True)
    check_lse(b.by_row(lse.detach()), want.lse, "fp32", None, "")
    check_lse(float64(max_logits), want.max_logits, "fp32", None, "", "max_logits")


def results(attend, inputs, dout):
    leaves = [x.detach().to(dout.dtype).requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("causal", [False, True])
def test_error_against_native_attention(causal):
    """Rounding scores of magnitude 5 to float32 costs the weights about 5e-7: native attention
    reaches an error of 1.03e-6 here, and where it does, 1e-6 is no reasonable bound for a float32
    result.
    """
    inputs = [torch.randn(2, 8, 512, 64) for _ in range(3)]
    dout = torch.randn(2, 8, 512, 64)
    ours = results(FlashAttention(64, causal=causal), inputs, dout)
    native = results(lambda *x: sdpa(*x, is_causal=causal), inputs, dout)
    exact = results(lambda *x: sdpa(*x, is_causal=causal), inputs, dout.double())
    for given, peer, wanted in zip(ours, native, exact, strict=True):
        assert relative(given, wanted) < max(1e-6, 1.5 * relative(peer, wanted))


def test_adam_finds_the_scale():
    q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    target = sdpa(q, k, v, scale=0.6)
    attn = FlashAttention(16)
    optimizer = torch.optim.Adam(attn.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        (attn(q, k, v) - target).square().mean().backward()
        optimizer.step()
    assert attn.scale.item() == pytest.approx(0.6, abs=0.03)


def test_constant_scale_and_dropout_only_in_training():
    attn = FlashAttention(8, learnable_scale=False, scale=0.5, dropout_p=0.5, layout="bshd")
    assert not list(attn.parameters())
    q = torch.randn(1, 30, 2, 8)
    assert not torch.equal(attn(q, q, q), attn(q, q, q))
    attn.eval()
    wanted = sdpa(*(q.transpose(1, 2),) * 3, scale=0.5).transpose(1, 2)
    assert torch.allclose(attn(q, q, q), wanted, atol=1e-6)
    out, lse = attn(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == (1, 2, 30)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: FlashAttention(0), "head_dim is 0"),
        (lambda: FlashAttention(577), "head_dim is 577"),
        (lambda: FlashAttention(8, layout="sbhd"), "layout is 'sbhd'"),
        (lambda: FlashAttention(8, dropout_p=1.0), "dropout_p is 1.0"),
        (lambda: FlashAttention(8, window=3), "window is 3"),
        (lambda: FlashAttention(8)(*(torch.zeros(1, 1, 1, 9),) * 3), "head dimension 9"),
        (lambda: MultiheadAttention(30, 4), "embed_dim is 30"),
        (lambda: MultiheadAttention(32, 4, head_dim=600), "head_dim is 600, but must be 1..576"),
        (lambda: MultiheadAttention(1200, 2), "embed_dim / num_heads is 600, but must be 1..576"),
        (lambda: MultiheadAttention(32, 4, window=3), "window is 3"),
        (lambda: MultiheadAttention(32, 4, num_kv_heads=3), "num_kv_heads 3"),
        (lambda: MultiheadAttention(20, 4, rotary_base=1e4), "must be even"),
        (lambda: MultiheadAttention(0, 4), "embed_dim is 0, but must be >= 1"),
        (lambda: MultiheadAttention(32, 0), "num_heads is 0, but must be >= 1"),
        (lambda: MultiheadAttention(32, 4, num_kv_heads=-1), "num_kv_heads is -1"),
        (lambda: MultiheadAttention(32, 4, rotary_base=0.0), "rotary_base is 0.0"),
        (lambda: RotaryEmbedding(8, -1), "max_positions is -1, but must be >= 0"),
        (lambda: RotaryEmbedding(8, 4, base=-1.0), "base is -1.0, but must be finite and > 0"),
        (lambda: RotaryEmbedding(0, 4), "head_dim is 0, but must be >= 1"),
        (lambda: MultiheadAttention(32, 4)(torch.zeros(5, 32)), r"x has shape \[5, 32\]"),
        (lambda: MultiheadAttention(32, 4)(torch.zeros(2, 5, 31)), r"x has shape \[2, 5, 31\]"),
        (lambda: RotaryEmbedding(8, 4)(torch.zeros(1, 5, 1, 8)), "x has 5 rows"),
    ],
)
def test_modules_refuse(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MultiheadAttention(32.0, 4), "embed_dim is 32.0"),
        (lambda: MultiheadAttention(32, "4"), "num_heads is '4'"),
        (lambda: MultiheadAttention(32, 4, num_kv_heads=True), "num_kv_heads is True"),
        (lambda: RotaryEmbedding(8, 4.5), "max_positions is 4.5"),
    ],
)
def test_modules_require_integers(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def naive_block(block, x):
    """The block in float64, with its attention written out."""
    batch, rows, _ = x.shape
    block = block.double()
    x = x.double()
    q = block.q_proj(x).view(batch, rows, block.num_heads, -1)
    k = block.k_proj(x).view(batch, rows, block.num_kv_heads, -1)
    v = block.v_proj(x).view(batch, rows, block.num_kv_heads, -1)
    if block.rotary is not None:
        angle = torch.arange(rows)[:, None] * 1e4 ** -(
            torch.arange(0, block.head_dim, 2).double() / block.head_dim
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        half = block.head_dim // 2
        q, k = (
            torch.view_as_real(torch.complex(y[..., :half], y[..., half:]) * turn).mT.flatten(-2)
            for y in (q, k)
        )
    group = block.num_heads // block.num_kv_heads
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT / math.sqrt(block.head_dim)
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -math.inf)
    if block.sinks is not None:
        column = block.sinks.view(1, -1, 1, 1).expand(batch, -1, rows, 1)
        weights = torch.cat((scores, column), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = (weights @ v).transpose(1, 2).flatten(2)
    return block.out_proj(out)


BLOCKS = {
    "plain": {},
    "grouped": dict(num_kv_heads=2),
    "rotary": dict(rotary_base=1e4, num_kv_heads=1),
    "sinks and bias": dict(sinks=True, bias=True, head_dim=24),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_equals_naive_attention(name):
    block = MultiheadAttention(32, 4, **BLOCKS[name])
    if block.sinks is not None:
        torch.nn.init.normal_(block.sinks)
    x = torch.randn(2, 17, 32)
    out = block(x)
    out.square().sum().backward()
    grads = {n: p.grad.clone() for n, p in block.named_parameters()}
    block.zero_grad()
    wanted = naive_block(block, x)
    assert torch.allclose(out.double(), wanted, atol=1e-5)
    wanted.square().sum().backward()
    for n, p in block.named_parameters():
        assert torch.allclose(grads[n].double(), p.grad, atol=1e-4, rtol=1e-4), n


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("window", [(None, None), (4, None)])
def test_generation_with_a_cache_equals_one_forward(name, window):
    block = MultiheadAttention(32, 4, window=window, **BLOCKS[name]).eval()
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        wanted = block(x)
        cache = block.new_cache(2, 12)
        steps = [block(x[:, :5], cache)]
        steps += [block(x[:, i : i + 1], cache) for i in range(5, 12)]
        assert torch.allclose(torch.cat(steps, 1), wanted, atol=1e-5)
        assert cache.length == 12
        with pytest.raises(ValueError, match="its capacity is 12"):
            block(x[:, :1], cache)
        assert cache.length == 12


def test_block_under_autocast_trains_and_generates():
    block = MultiheadAttention(32, 4, rotary_base=1e4)
    x = torch.randn(2, 8, 32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        out = block(x)
        assert out.dtype == torch.bfloat16
        cache = block.new_cache(2, 8)
        # With a cache, cosines have the cache's dtype; without one, they are in float32.
        assert torch.allclose(block(x, cache).float(), out.float(), atol=5e-2)
    out.float().sum().backward()
    assert block.q_proj.weight.grad.dtype == torch.float32


def test_cache_needs_a_causal_block():
    block = MultiheadAttention(16, 2, causal=False)
    with pytest.raises(ValueError, match="causal=True"):
        block(torch.zeros(1, 2, 16), block.new_cache(1, 4))


def test_dropout_is_never_silently_ignored():
    block = MultiheadAttention(16, 2, dropout_p=0.5)
    with pytest.raises(ValueError, match=r"trains with dropout_p 0\.5"):
        block(torch.zeros(1, 2, 16), block.new_cache(1, 4))
    block.eval()
    assert block(torch.zeros(1, 2, 16), block.new_cache(1, 4)).shape == (1, 2, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, None])
def test_modules_honour_device_and_dtype(dtype):
    """As in torch.nn: device and dtype, "meta" included; rotary tables stay float32."""
    options = dict(rotary_base=1e4, sinks=True, bias=True, max_positions=32)
    for device in ("meta", torch.get_default_device(), None):
        block = MultiheadAttention(64, 4, **options, device=device, dtype=dtype)
        scale = FlashAttention(16, device=device, dtype=dtype).scale
        here = torch.get_default_device() if device is None else torch.device(device)
        for made in (scale, *block.parameters()):
            assert made.device.type == here.type and made.dtype == (dtype or torch.float32)
        for table in (block.rotary.cos, block.rotary.sin):
            assert table.device.type == here.type and table.dtype == torch.float32
        constant = FlashAttention(16, learnable_scale=False, device=device, dtype=dtype)
        assert constant.scale == 0.25
    x = torch.randn(2, 9, 64, dtype=dtype)
    out = block(x)
    assert out.dtype == x.dtype and out.isfinite().all()
    cache = block.new_cache(2, 9)
    assert cache.k.dtype == x.dtype
    assert relative(block(x, cache).float(), out.float()) < 0.05


def test_conversion_of_a_module_keeps_exact_rotary_tables():
    made = MultiheadAttention(64, 4, rotary_base=1e4, max_positions=512)
    expected = made.rotary.cos.clone(), made.rotary.sin.clone()
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        made.to(dtype)
        assert made.q_proj.weight.dtype == dtype
        assert torch.equal(made.rotary.cos, expected[0])
        assert torch.equal(made.rotary.sin, expected[1])


def test_module_created_on_meta():
    """A "meta" module that is given memory, loads a checkpoint and computes its tables works as
    usual."""
    options = dict(rotary_base=1e4, sinks=True, max_positions=32)
    made = MultiheadAttention(64, 4, **options)
    with torch.device("meta"):
        empty = MultiheadAttention(64, 4, **options)
    empty.to_empty(device=torch.get_default_device())
    for buffer in (*empty.parameters(), *empty.buffers()):
        buffer.detach().fill_(math.nan)
    empty.reset_parameters()
    assert torch.equal(empty.rotary.cos, made.rotary.cos)
    assert torch.equal(empty.rotary.sin, made.rotary.sin)
    assert all(p.isfinite().all() for p in empty.parameters())
    empty.load_state_dict(made.state_dict())
    x = torch.randn(2, 9, 64)
    assert torch.equal(empty(x), made(x))
    with torch.device("meta"):
        attn = FlashAttention(16, scale=0.3)
    attn.to_empty(device=torch.get_default_device()).reset_parameters()
    assert float(attn.scale) == pytest.approx(0.3)
