"""Attention modules: slopes, packed inputs, masks, the cache, names of checkpoint parameters."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
from compat_reference import assert_as_good  # noqa: E402
from tilewise.compat.flash_attn.layers.rotary import RotaryEmbedding  # noqa: E402
from tilewise.compat.flash_attn.modules import mha  # noqa: E402

pytestmark = pytest.mark.tensors


def test_alibi_slopes():
    assert mha.get_alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert mha.get_alibi_slopes(1) == [2.0**-8]
    six = mha.get_alibi_slopes(6)
    assert six[:4] == [2.0 ** (-2 * i) for i in range(1, 5)]
    assert six[4:] == [2.0**-1, 2.0**-3]
    assert len(mha.get_alibi_slopes(71)) == 71


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alibi", [False, True])
def test_flash_modules(causal, alibi):
    torch.manual_seed(0)
    slopes = mha.get_alibi_slopes(4) if alibi else None
    options = dict(causal=causal, window_size=(6, -1), alibi_slopes=slopes)
    qkv = torch.randn(2, 13, 3, 4, 16)
    module = mha.FlashSelfAttention(**options)
    assert not module.state_dict()
    exact = torch.tensor(slopes) if alibi else None
    want, _ = reference.attend(*qkv.double().unbind(2), causal=causal, window=(6, -1), slopes=exact)
    got = module(qkv)
    assert_as_good(got, None, want, 2, "self")
    cross = mha.FlashCrossAttention(**options)
    assert devices.equal(cross(qkv[:, :, 0], qkv[:, :, 1:]), got)
    starts = torch.tensor([0, 13, 26], dtype=torch.int32)
    packed = qkv.flatten(0, 1)
    assert devices.equal(module(packed, cu_seqlens=starts, max_seqlen=13), got.flatten(0, 1))
    lengths = dict(cu_seqlens=starts, max_seqlen=13, cu_seqlens_k=starts, max_seqlen_k=13)
    assert devices.equal(cross(packed[:, 0], packed[:, 1:], **lengths), got.flatten(0, 1))
    assert devices.equal(
        module(qkv, causal=not causal), cross(qkv[:, :, 0], qkv[:, :, 1:], not causal)
    )
    with pytest.raises(ValueError, match="max_seqlen"):
        module(packed, cu_seqlens=starts)
    with pytest.raises(ValueError, match="cu_seqlens_k"):
        cross(packed[:, 0], packed[:, 1:], cu_seqlens=starts, max_seqlen=13)


def test_dropout_only_in_training():
    qkv = torch.randn(1, 20, 3, 2, 16)
    for kind in (mha.FlashSelfAttention, mha.SelfAttention):
        module = kind(attention_dropout=0.5)
        assert not torch.equal(module(qkv), module(qkv))
        module.eval()
        assert torch.equal(module(qkv), kind().eval()(qkv))


@pytest.mark.parametrize("causal", [False, True])
def test_key_padding_mask(causal):
    torch.manual_seed(0)
    q, kv = torch.randn(2, 7, 4, 16), torch.randn(2, 9, 2, 2, 16)
    mask = torch.rand(2, 9) < 0.6
    mask[1] = False  # no visible key: zeros
    got = mha.CrossAttention(causal=causal)(q, kv, key_padding_mask=mask)
    for b in range(2):
        want, _ = reference.attend_one(
            q[b].double(), *kv[b].double().unbind(1), causal=causal, key_mask=mask[b]
        )
        assert_as_good(got[b], None, want, 2, f"sequence {b}")
    qkv = torch.randn(2, 9, 3, 4, 16)
    out = mha.SelfAttention(causal=causal)(qkv, key_padding_mask=mask)
    same = mha.CrossAttention(causal=causal)(qkv[:, :, 0], qkv[:, :, 1:], key_padding_mask=mask)
    assert devices.equal(out, same)


def module_in_float64(
    module, x, rotary_dim=0, interleaved=False, base=10000.0, x_kv=None, **options
):
    """The module computed in float64."""
    w = {n: p.detach().double() for n, p in module.named_parameters()}
    x = x.detach().double()

    def project(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    heads, heads_kv, dim = module.num_heads, module.num_heads_kv, module.head_dim
    if module.cross_attn:
        q, kv = project("Wq", x), project("Wkv", x if x_kv is None else x_kv.double())
    else:
        q, kv = project("Wqkv", x).split((heads * dim, 2 * heads_kv * dim), dim=-1)
    q = q.unflatten(-1, (heads, dim))
    k, v = kv.unflatten(-1, (2, heads_kv, dim)).unbind(-3)
    if rotary_dim:
        frequency = base ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim)
        angle = torch.outer(torch.arange(x.shape[1]).double(), frequency)
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        q, k = (
            reference.rotate(y, angle.cos(), angle.sin(), positions, interleaved) for y in (q, k)
        )
    out, _ = reference.attend(q, k, v, **options)
    return project("out_proj", out.flatten(-2))


CONFIGURATIONS = {
    "plain": dict(),
    "causal": dict(causal=True),
    "gqa": dict(num_heads_kv=2, causal=True, qkv_proj_bias=False),
    "rotary": dict(causal=True, rotary_emb_dim=8),
    "rotary_pairs": dict(causal=True, rotary_emb_dim=16, rotary_emb_interleaved=True),
    "alibi": dict(causal=True, use_alibi=True, use_flash_attn=True),
    "window": dict(window_size=(3, 1), use_flash_attn=True, softmax_scale=0.4),
    "checkpointing": dict(causal=True, checkpointing=True, num_heads_kv=1),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_mha(name):
    torch.manual_seed(0)
    options = CONFIGURATIONS[name]
    module = mha.MHA(64, 4, **options)
    x = torch.randn(2, 11, 64, requires_grad=True)
    got = module(x)
    want = module_in_float64(
        module,
        x,
        options.get("rotary_emb_dim", 0),
        options.get("rotary_emb_interleaved", False),
        causal=options.get("causal", False),
        window=options.get("window_size", (-1, -1)),
        scale=options.get("softmax_scale"),
        slopes=torch.tensor(mha.get_alibi_slopes(4)) if options.get("use_alibi") else None,
    )
    assert torch.allclose(got.double(), want, atol=2e-6), (got - want).abs().max()
    got.sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in module.parameters())
    assert x.grad is not None


@pytest.mark.parametrize("rotary_emb_dim", [0, 8])
def test_packed_mha_matches_dense(rotary_emb_dim):
    torch.manual_seed(0)
    module = mha.MHA(64, 4, causal=True, use_flash_attn=True, rotary_emb_dim=rotary_emb_dim)
    first, second = torch.randn(1, 9, 64), torch.randn(1, 4, 64)
    packed = torch.cat((first[0], second[0]))
    starts = torch.tensor([0, 9, 13], dtype=torch.int32)
    got = module(packed, cu_seqlens=starts, max_seqlen=9)
    want = torch.cat((module(first)[0], module(second)[0]))
    assert torch.allclose(got, want, atol=1e-6)


def test_mha_cross_attention():
    torch.manual_seed(0)
    module = mha.MHA(64, 4, num_heads_kv=2, cross_attn=True, return_residual=True)
    x, other = torch.randn(2, 6, 64), torch.randn(2, 9, 64)
    got, residual = module(x, other)
    assert residual is x
    assert torch.allclose(got.double(), module_in_float64(module, x, x_kv=other), atol=2e-6)
    subset, _ = module(x, other, mixer_subset=torch.tensor([0, 4]))
    assert torch.allclose(subset, got[:, [0, 4]], atol=1e-6)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 5:] = False
    masked, _ = module(x, other, key_padding_mask=mask)
    assert torch.allclose(masked, module(x, other[:, :5])[0], atol=1e-6)


@pytest.mark.parametrize("rotary", ["none", "fused", "scaled"])
@pytest.mark.parametrize("flash", [False, True])
def test_mha_with_a_cache_matches_a_full_pass(rotary, flash):
    """Prefill and steps through inference_params give the rows of one pass over the whole
    sequence."""
    torch.manual_seed(0)
    options = dict(causal=True, layer_idx=3, num_heads_kv=2, use_flash_attn=flash)
    if rotary != "none":
        options["rotary_emb_dim"] = 16
    module = mha.MHA(64, 4, **options).eval()
    if rotary == "scaled":
        module.rotary_emb = RotaryEmbedding(16, scale_base=64)
        # XPos centres its scale on the table's length, so both passes need a table of the same
        # length.
        module.rotary_emb._update_cos_sin_cache(20, torch.get_default_device(), torch.float32)
    x = torch.randn(2, 12, 64)
    with torch.no_grad():
        want = module(x, max_seqlen=20)
        params = SimpleNamespace(
            max_seqlen=20,
            max_batch_size=2,
            batch_size_offset=0,
            seqlen_offset=0,
            lengths_per_sample=None,
            key_value_memory_dict={},
        )
        parts = []
        for size in (7, 1, 1, 3):
            done = params.seqlen_offset
            parts.append(module(x[:, done : done + size], inference_params=params))
            params.seqlen_offset += size
    assert torch.allclose(torch.cat(parts, dim=1), want, atol=2e-6)
    assert params.key_value_memory_dict[3].shape == (2, 20, 2, 2, 16)
    with torch.no_grad():
        params.lengths_per_sample = torch.tensor([8, 11], dtype=torch.int32)
        rows = torch.stack((x[0, 8:9], x[1, 11:12]))
        step = module(rows, inference_params=params)
    assert torch.allclose(step[:, 0], torch.stack((want[0, 8], want[1, 11])), atol=2e-6)


def test_parameter_names_match_checkpoints():
    names = set(mha.MHA(32, 2).state_dict())
    assert names == {f"{m}.{p}" for m in ("Wqkv", "out_proj") for p in ("weight", "bias")}
    names = set(mha.MHA(32, 2, cross_attn=True, out_proj_bias=False).state_dict())
    assert names == {"Wq.weight", "Wq.bias", "Wkv.weight", "Wkv.bias", "out_proj.weight"}
    half = mha.MHA(32, 2, dtype=torch.bfloat16)
    assert half.out_proj.weight.dtype == torch.bfloat16
    assert half.allocate_inference_cache(3, 5).dtype == torch.bfloat16


def test_refusals_name_the_argument():
    with pytest.raises(NotImplementedError, match="dwconv"):
        mha.MHA(32, 2, dwconv=True)
    for options, name in (
        (dict(num_heads=3), "num_heads"),
        (dict(num_heads=4, num_heads_kv=3), "num_heads_kv"),
        (dict(num_heads=2, cross_attn=True, rotary_emb_dim=8), "rotary_emb_dim"),
        (dict(num_heads=2, use_alibi=True), "use_alibi"),
    ):
        with pytest.raises(ValueError, match=name):
            mha.MHA(32, **options)
    x = torch.randn(2, 3, 32)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    plain, flash = mha.MHA(32, 2), mha.MHA(32, 2, use_flash_attn=True)
    for call, name in (
        (lambda: plain(x.flatten(0, 1), cu_seqlens=starts, max_seqlen=3), "use_flash_attn"),
        (lambda: flash(x.flatten(0, 1), cu_seqlens=starts), "max_seqlen"),
        (lambda: flash(x, key_padding_mask=torch.ones(2, 3, dtype=torch.bool)), "key_padding_mask"),
        (lambda: plain(x, x), "x_kv"),
        (lambda: plain(x, inference_params=SimpleNamespace()), "layer_idx"),
    ):
        with pytest.raises(ValueError, match=name):
            call()
    assert math.isfinite(plain(x).sum().item())
