"""FlashAttention-2's functions: values, gradients and return values, judged by the rule of its
tests.

An output may be 2 times, and a gradient 3 times, as far from float64 as plain PyTorch in that
dtype.
"""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
from compat_reference import assert_as_good, check_against  # noqa: E402
from tilewise import _check  # noqa: E402
from tilewise.compat import _calls  # noqa: E402
from tilewise.compat import flash_attn as fa  # noqa: E402
from tilewise.compat.flash_attn import flash_attn_interface as interface  # noqa: E402

pytestmark = pytest.mark.tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BANDS = {
    "full": dict(),
    "causal": dict(causal=True),
    "local": dict(window_size=(5, 2)),
    "left": dict(window_size=(9, -1)),
    "causal_local": dict(causal=True, window_size=(6, 3)),
}


def inputs(batch, rows, keys, heads, heads_kv, dim, dtype, dim_v=None, seed=0):
    generator = devices.generator(seed)
    shapes = ((rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v or dim))
    return [torch.randn(batch, *s, generator=generator).to(dtype) for s in shapes]


def for_reference(options):
    """The options of the functions, renamed for the reference."""
    known = dict(options)
    known["window"] = known.pop("window_size", (-1, -1))
    known["scale"] = known.pop("softmax_scale", None)
    known["slopes"] = known.pop("alibi_slopes", None)
    return known


@pytest.mark.parametrize(
    ("dtype", "heads_kv"),
    [*((torch.float32, n) for n in (4, 2, 1)), (torch.float16, 2), (torch.bfloat16, 1)],
)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize(("rows", "keys"), [(33, 47), (47, 33), (1, 65), (64, 64)])
def test_dense(dtype, band, heads_kv, rows, keys):
    tensors = inputs(2, rows, keys, 4, heads_kv, 24, dtype)
    options = BANDS[band]
    check_against(
        lambda *x: fa.flash_attn_func(*x, return_attn_probs=True, **options)[:2],
        lambda *x: reference.attend(*x, **for_reference(options)),
        tensors,
        f"{dtype} {band} {heads_kv} {rows}x{keys}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 40, 59, 64, 111, 128, 256])
def test_head_dimensions(dtype, dim):
    tensors = inputs(1, 17, 29, 2, 1, dim, dtype)
    check_against(
        lambda *x: fa.flash_attn_func(*x, causal=True, return_attn_probs=True)[:2],
        lambda *x: reference.attend(*x, causal=True),
        tensors,
        f"{dtype} head dimension {dim}",
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("band", ["full", "causal", "local"])
@pytest.mark.parametrize("slopes", [None, "head", "batch"])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_score_options(dtype, band, slopes, softcap):
    tensors = inputs(2, 19, 31, 4, 2, 16, dtype)
    options = dict(BANDS[band], softcap=softcap, softmax_scale=0.7)
    if slopes is not None:
        shape = (4,) if slopes == "head" else (2, 4)
        options["alibi_slopes"] = torch.rand(shape, generator=devices.generator(3)) * 0.3
    check_against(
        lambda *x: fa.flash_attn_func(*x, return_attn_probs=True, **options)[:2],
        lambda *x: reference.attend(*x, **for_reference(options)),
        tensors,
        f"{dtype} {band} slopes {slopes} softcap {softcap}",
    )


STARTS_Q, STARTS_K = [0, 5, 5, 22, 23], [0, 9, 16, 16, 49]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_variable_length(dtype, band, heads_kv):
    """Empty sequences on either side, and two rows of q past the last sequence."""
    q, k, v = (x[0] for x in inputs(1, 25, 49, 4, heads_kv, 24, dtype))
    starts = [torch.tensor(s, dtype=torch.int32) for s in (STARTS_Q, STARTS_K)]
    options = BANDS[band]
    check_against(
        lambda *x: fa.flash_attn_varlen_func(
            *x, *starts, 17, 33, return_attn_probs=True, **options
        )[:2],
        lambda *x: reference.attend_varlen(*x, STARTS_Q, STARTS_K, **for_reference(options)),
        [q, k, v],
        f"{dtype} {band} {heads_kv}",
    )


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("band", ["full", "causal", "local"])
def test_variable_length_paged(page_size, band):
    starts_q, lengths = [0, 4, 7, 19], [9, 3, 30]
    torch.manual_seed(0)
    q = torch.randn(19, 4, 16)
    width = -(-max(lengths) // page_size)
    pages = width * 3 + 2
    k, v = torch.randn(pages, page_size, 2, 16), torch.randn(pages, page_size, 2, 16)
    table = torch.randperm(pages)[: 3 * width].reshape(3, width).int()
    starts_k = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    gathered = [
        torch.cat([x[table[b].long()].flatten(0, 1)[:n] for b, n in enumerate(lengths)])
        for x in (k, v)
    ]
    cu_q, cu_k = (torch.tensor(s, dtype=torch.int32) for s in (starts_q, starts_k))
    out, lse, _ = fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 12, 30, block_table=table, return_attn_probs=True, **BANDS[band]
    )
    options = for_reference(BANDS[band])
    want = reference.attend_varlen(q, *gathered, starts_q, starts_k, dtype=torch.float64, **options)
    assert_as_good(out, None, want[0], 2, "out")
    assert_as_good(lse, None, want[1], 2, "lse")


@pytest.mark.parametrize("varlen", [False, True])
def test_packed_forms_agree_bitwise(varlen):
    generator = devices.generator(0)
    shape = (22,) if varlen else (2, 11)
    q = torch.randn(*shape, 4, 16, generator=generator, requires_grad=True)
    kv = torch.randn(*shape, 2, 4, 16, generator=generator, requires_grad=True)
    starts = torch.tensor([0, 6, 22], dtype=torch.int32)
    options = dict(causal=True, window_size=(4, -1), softcap=3.0)
    dim = len(shape)
    qkv = torch.cat((q.detach().unsqueeze(dim), kv.detach()), dim=dim).requires_grad_()
    k, v = (x.detach().clone().requires_grad_() for x in kv.unbind(dim))
    q1 = q.detach().clone().requires_grad_()
    if varlen:
        plain = fa.flash_attn_varlen_func(q1, k, v, starts, starts, 16, 16, **options)
        with_kv = fa.flash_attn_varlen_kvpacked_func(q, kv, starts, starts, 16, 16, **options)
        with_qkv = fa.flash_attn_varlen_qkvpacked_func(qkv, starts, 16, **options)
    else:
        plain = fa.flash_attn_func(q1, k, v, **options)
        with_kv = fa.flash_attn_kvpacked_func(q, kv, **options)
        with_qkv = fa.flash_attn_qkvpacked_func(qkv, **options)
    assert devices.equal(plain, with_kv) and devices.equal(plain, with_qkv)
    for out in (plain, with_kv, with_qkv):
        (out * torch.arange(out.numel()).reshape(out.shape).cos()).sum().backward()
    assert devices.equal(q.grad, q1.grad) and devices.equal(qkv.grad.select(dim, 0), q1.grad)
    for i, x in enumerate((k, v)):
        assert devices.equal(kv.grad.select(dim, i), x.grad)
        assert devices.equal(qkv.grad.select(dim, i + 1), x.grad)


def test_return_values():
    q, k, v = inputs(2, 7, 9, 4, 2, 16, torch.bfloat16)
    out = fa.flash_attn_func(q, k, v)
    assert isinstance(out, torch.Tensor) and out.shape == q.shape and out.dtype == q.dtype
    out3, lse, mask = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    assert torch.equal(out, out3)
    assert lse.shape == (2, 4, 7) and lse.dtype == torch.float32
    assert mask.numel() == 0 and mask.dtype == q.dtype
    out, lse, mask, state = interface._flash_attn_forward(
        q, k, v, 0.0, 0.25, False, -1, -1, 0.0, None, False
    )
    assert state.shape == (2,) and not out.requires_grad
    starts = torch.tensor([0, 7, 14], dtype=torch.int32)
    starts_k = torch.tensor([0, 9, 18], dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse, *_ = interface._flash_attn_varlen_forward(
        *packed, starts, starts_k, 7, 9, 0.0, 0.25, False
    )
    assert out.shape == (14, 4, 16) and lse.shape == (4, 14)


def test_returned_mask_needs_no_wider_heads_than_the_device_has(monkeypatch):
    """It is computed with values of as many columns as there are keys, a part of them at a time."""
    attend, widths = _calls.attend, []

    def recorded(q, k, v, options):
        widths.append(v.shape[-1])
        return attend(q, k, v, options)

    for limit in ("MAX_HEAD_DIM", "_MAX_HEAD_DIM_CUDA"):
        monkeypatch.setattr(_check, limit, 64)
    monkeypatch.setattr(_calls, "attend", recorded)
    q, k, v = inputs(1, 4, 100, 1, 1, 16, torch.float32)
    _, _, mask = fa.flash_attn_func(q, k, v, 0.5, return_attn_probs=True)
    assert mask.shape == (1, 1, 4, 100)
    assert widths == [64, 36] * 2


@pytest.mark.parametrize("band", ["full", "causal", "local"])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("varlen", [False, True])
def test_dropout(band, softcap, varlen):
    """The returned mask is the one that produced out and the gradients."""
    dropout_p = 0.3
    options = dict(BANDS[band], softcap=softcap)
    q, k, v = inputs(3, 40, 52, 4, 2, 16, torch.float32)
    call, wanted, lengths = fa.flash_attn_func, reference.attend, ()
    extra = ()
    if varlen:
        starts_q, starts_k = [0, 40, 71, 120], [0, 52, 60, 156]
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        extra = [torch.tensor(s, dtype=torch.int32) for s in (starts_q, starts_k)] + [49, 96]
        call, wanted, lengths = (
            fa.flash_attn_varlen_func,
            reference.attend_varlen,
            (starts_q, starts_k),
        )
    torch.manual_seed(11)
    out, lse, mask = call(q, k, v, *extra, dropout_p, return_attn_probs=True, **options)
    seen = mask != 0
    fraction = (mask[seen] < 0).float().mean().item()
    assert abs(fraction - dropout_p) < 0.02
    exact_out, exact_lse = wanted(
        q,
        k,
        v,
        *lengths,
        dtype=torch.float64,
        kept=mask >= 0,
        dropout_p=dropout_p,
        **for_reference(options),
    )
    assert_as_good(out, None, exact_out, 2, "out")
    assert_as_good(lse, None, exact_lse, 2, "lse")
    if not varlen:
        visible = reference.visible(40, 52, options.get("window_size", (-1, -1)), band == "causal")
        assert torch.equal(seen, visible.expand_as(seen))
        assert torch.allclose(mask.abs().sum(-1), visible.any(-1).float().expand_as(lse), atol=1e-5)

    def again(*x):
        torch.manual_seed(11)
        return call(*x, *extra, dropout_p, return_attn_probs=True, **options)[:2]

    kept, known = mask >= 0, for_reference(options)
    check_against(
        again,
        lambda *x: wanted(*x, *lengths, kept=kept, dropout_p=dropout_p, **known),
        [q, k, v],
        f"dropout {band}",
    )


def test_dropout_differs_per_call_and_repeats_with_the_seed():
    q, k, v = inputs(1, 32, 32, 2, 2, 16, torch.float32)
    torch.manual_seed(5)
    first, second = (fa.flash_attn_func(q, k, v, 0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(fa.flash_attn_func(q, k, v, 0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention_over_two_shards(dtype, causal):
    """Context parallelism as packages do it: forward and backward per shard, merged by lse."""
    q, k, v = inputs(2, 32, 32, 4, 2, 16, dtype)
    dout = torch.randn(q.shape, generator=devices.generator(9)).to(dtype)
    scale = 16**-0.5
    halves = [slice(0, 16), slice(16, 32)]
    outs, lses = torch.zeros(2, 32, 4, 16), torch.full((2, 4, 32), -math.inf)
    pairs = [(i, j) for i in range(2) for j in range(2) if not causal or j <= i]
    for i, j in pairs:
        rows, keys = halves[i], halves[j]
        out, lse, _, _ = interface._flash_attn_forward(
            q[:, rows],
            k[:, keys],
            v[:, keys],
            0.0,
            scale,
            causal and i == j,
            -1,
            -1,
            0.0,
            None,
            False,
        )
        old = lses[:, :, rows]
        new = torch.logaddexp(old, lse)
        share = torch.exp(lse - new).transpose(1, 2).unsqueeze(-1)
        outs[:, rows] = outs[:, rows] * (1 - share) + out.float() * share
        lses[:, :, rows] = new
    out = outs.to(dtype)
    gradients = [torch.zeros(x.shape) for x in (q, k, v)]
    for i, j in pairs:
        rows, keys = halves[i], halves[j]
        parts = [torch.full_like(x, math.nan) for x in (q[:, rows], k[:, keys], v[:, keys])]
        sums = interface._flash_attn_backward(
            dout[:, rows],
            q[:, rows],
            k[:, keys],
            v[:, keys],
            out[:, rows],
            lses[:, :, rows],
            *parts,
            0.0,
            scale,
            causal and i == j,
            -1,
            -1,
            0.0,
            None,
            True,
        )
        row_sums = (dout[:, rows].double() * out[:, rows].double()).sum(-1).transpose(1, 2)
        assert torch.allclose(sums.double(), row_sums, atol=1e-4)
        for total, part, where in zip(gradients, parts, (rows, keys, keys), strict=True):
            total[:, where] += part.float()

    def run(compute):
        tensors = [x.detach().to(compute).requires_grad_() for x in (q, k, v)]
        result, lse = reference.attend(*tensors, causal=causal)
        return result, lse, torch.autograd.grad((result * dout.to(compute)).sum(), tensors)

    plain, exact = run(dtype), run(torch.float64)
    assert_as_good(out, plain[0].detach(), exact[0].detach(), 2, "out")
    for got, near, want, name in zip(gradients, plain[2], exact[2], "qkv", strict=True):
        assert_as_good(got.to(dtype), near, want, 3, f"d{name}")


def test_private_backward_matches_the_public_one():
    q, k, v = (x.requires_grad_() for x in inputs(2, 20, 30, 4, 2, 16, torch.float32))
    torch.manual_seed(3)
    out, lse, _, state = interface._flash_attn_forward(
        q, k, v, 0.2, 0.3, True, 8, 0, 5.0, None, False
    )
    dout = torch.randn_like(out)
    parts = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(
        dout, q, k, v, out, lse, *parts, 0.2, 0.3, True, 8, 0, 5.0, None, False, rng_state=state
    )
    torch.manual_seed(3)
    public = fa.flash_attn_func(q, k, v, 0.2, 0.3, True, (8, 0), 5.0)
    assert devices.equal(out, public)
    # The public function's backward also has lse_low, which the private pair cannot carry.
    for part, want in zip(parts, torch.autograd.grad(public, (q, k, v), dout), strict=True):
        torch.testing.assert_close(part, want, rtol=1e-5, atol=2e-6)


def test_private_varlen_backward():
    q, k, v = (x[0].requires_grad_() for x in inputs(1, 23, 49, 4, 2, 16, torch.float32))
    starts = [torch.tensor(s, dtype=torch.int32) for s in (STARTS_Q, STARTS_K)]
    out, lse, _, _ = interface._flash_attn_varlen_forward(q, k, v, *starts, 17, 33, 0.0, 0.25, True)
    dout = torch.randn_like(out)
    parts = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = interface._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *parts, *starts, 17, 33, 0.0, 0.25, True, -1, -1, 0.0, None, False
    )
    assert sums.shape == (4, 23)
    public = fa.flash_attn_varlen_func(q, k, v, *starts, 17, 33, 0.0, 0.25, True)
    # The public function's backward also has lse_low, which the private pair cannot carry.
    for part, want in zip(parts, torch.autograd.grad(public, (q, k, v), dout), strict=True):
        torch.testing.assert_close(part, want, rtol=1e-5, atol=2e-6)


def test_rows_without_visible_keys():
    q, k, v = (x.requires_grad_() for x in inputs(1, 10, 4, 2, 2, 8, torch.float32))
    out, lse, _ = fa.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.equal(out[:, :6], torch.zeros_like(out[:, :6]))
    assert (lse[:, :, :6] == -math.inf).all() and torch.isfinite(lse[:, :, 6:]).all()
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.isfinite(g).all() for g in gradients)
    assert torch.equal(gradients[0][:, :6], torch.zeros_like(gradients[0][:, :6]))


def dense_call(q, k, v, _):
    return fa.flash_attn_func(q, k, v, causal=True, window_size=(3, -1), softcap=4.0)


def packed_call(q, k, v, starts):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return fa.flash_attn_varlen_func(q, k, v, starts, starts, 14, 14, causal=True)


def cache_call(q, k, v, lengths):
    caches = torch.zeros(2, 2, 20, 2, 16, device=q.device)
    out = fa.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    return torch.cat((out.flatten(), caches.flatten()))


@pytest.mark.parametrize("call", [dense_call, packed_call, cache_call])
def test_whole_graphs_are_captured(call):
    """torch.compile with fullgraph=True changes no result and no gradient."""
    q, k, v = (x.requires_grad_() for x in inputs(2, 9, 9, 4, 2, 16, torch.float32))
    if call is cache_call:
        q, k, v = (x.detach() for x in (q, k, v))
    # Made outside: a tensor built from numbers during tracing ignores torch.set_default_device.
    index = torch.tensor([3, 11] if call is cache_call else [0, 4, 18], dtype=torch.int32)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, index)
    plain = call(q, k, v, index)
    assert devices.equal(compiled, plain)
    if call is not cache_call:
        weight = torch.randn_like(plain)
        for a, b in zip(
            torch.autograd.grad(compiled, (q, k, v), weight),
            torch.autograd.grad(plain, (q, k, v), weight),
            strict=True,
        ):
            assert devices.equal(a, b)


def test_inputs_with_unusual_strides():
    base = inputs(2, 12, 12, 4, 4, 16, torch.float32)
    strange = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in base[:2]]
    strange.append(base[2].permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0))
    assert strange[2].stride(-1) != 1
    assert devices.equal(fa.flash_attn_func(*strange), fa.flash_attn_func(*base))


def test_refusals_name_the_argument():
    q, k, v = inputs(1, 4, 4, 4, 2, 8, torch.float32)
    state = None
    for arguments, name in (
        (dict(dropout_p=1.0), "dropout_p"),
        (dict(dropout_p=-0.1), "dropout_p"),
        (dict(softcap=-1.0), "softcap"),
        (dict(alibi_slopes=torch.zeros(3)), "alibi_slopes"),
        (dict(alibi_slopes=[1.0]), "alibi_slopes"),
        (dict(dropout_p="x"), "dropout_p"),
        (dict(window_size=3), "window"),
        (dict(q=q.cpu().numpy()), "q is a ndarray"),
        (dict(k=k.to("meta")), "k is on meta"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=name):
            fa.flash_attn_func(**(dict(q=q, k=k, v=v) | arguments))
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"\bk\b"):
        fa.flash_attn_func(q, k[..., :4], v)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=r"\bv\b"):
        fa.flash_attn_func(q, k, v.half())
    with pytest.raises(ValueError, match=r"qkv has shape .*, but dimension 2 must be 3"):
        fa.flash_attn_qkvpacked_func(torch.stack((k, v), dim=2))
    bad_starts = [torch.zeros(0, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)]
    bad_starts += [torch.tensor([0.0, 4.0]), [0, 4], None]
    if q.device.type == "cpu":  # on a GPU, entries are only read on request
        bad_starts.append(torch.tensor([0, 3, 2], dtype=torch.int32))
    for starts in bad_starts:
        with pytest.raises((ValueError, TypeError, RuntimeError), match="cu_seqlens_q"):
            fa.flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, 4, 4)
    parts = [torch.empty_like(x) for x in (q, k, v)]
    with pytest.raises(ValueError, match="rng_state"):
        interface._flash_attn_backward(
            q,
            q,
            k,
            v,
            q,
            torch.zeros(1, 4, 4),
            *parts,
            0.1,
            1.0,
            False,
            -1,
            -1,
            0.0,
            None,
            False,
            state,
        )
