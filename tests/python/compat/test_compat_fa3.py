"""FlashAttention-3's functions: values and gradients, chunks, qv, combine, caches, refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
import tilewise  # noqa: E402
from compat_reference import assert_as_good, check_against  # noqa: E402
from tilewise.compat import flash_attn_interface as fa3  # noqa: E402
from tilewise.compat._chunks import split_lengths  # noqa: E402

pytestmark = pytest.mark.tensors

DTYPES = [torch.float32, torch.bfloat16]
BANDS = {
    "full": dict(),
    "causal": dict(causal=True),
    "local": dict(window_size=(7, 2)),
}


def inputs(batch, rows, keys, heads=4, heads_kv=2, dim=16, dim_v=16, dtype=torch.float32, seed=0):
    g = devices.generator(seed)
    shapes = ((rows, heads, dim), (keys, heads_kv, dim), (keys, heads_kv, dim_v))
    return [torch.randn(batch, *s, generator=g).to(dtype) for s in shapes]


def reference_options(options):
    """The options with the names of compat_reference."""
    options = dict(options)
    options["window"] = options.pop("window_size", (-1, -1))
    options["chunk"] = options.pop("attention_chunk", 0)
    return options


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize(("rows", "keys"), [(21, 33), (33, 21), (1, 40)])
def test_dense(dtype, band, softcap, rows, keys):
    options = dict(BANDS[band], softcap=softcap)
    check_against(
        lambda *x: fa3.flash_attn_func(*x, return_attn_probs=True, **options),
        lambda *x: reference.attend(*x, **reference_options(options)),
        inputs(2, rows, keys, dim_v=24, dtype=dtype),
        f"{band} {softcap}",
    )


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
@pytest.mark.parametrize(("rows", "keys"), [(21, 33), (33, 21), (16, 16), (1, 40), (7, 0)])
def test_chunks(band, chunk, rows, keys):
    options = dict(BANDS[band], attention_chunk=chunk)
    check_against(
        lambda *x: fa3.flash_attn_func(*x, return_attn_probs=True, **options),
        lambda *x: reference.attend(*x, **reference_options(options)),
        inputs(2, rows, keys),
        f"{band} chunk {chunk}",
    )


@pytest.mark.parametrize("rows", [0, 1, 5, 12])
@pytest.mark.parametrize("keys", [0, 1, 4, 5, 17])
@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_chunk_lengths_add_up(rows, keys, chunk):
    parts = split_lengths(rows, keys, chunk)
    assert sum(r for r, _ in parts) == rows and sum(k for _, k in parts) == keys
    assert all(r >= 0 and 0 <= k <= chunk for r, k in parts)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("chunk", [0, 6])
def test_variable_length(band, chunk):
    starts_q, starts_k = [0, 5, 5, 22], [0, 9, 16, 30]
    q, k, v = (x[0] for x in inputs(1, 22, 30))
    starts = [torch.tensor(s, dtype=torch.int32) for s in (starts_q, starts_k)]
    options = dict(BANDS[band], attention_chunk=chunk)
    check_against(
        lambda *x: fa3.flash_attn_varlen_func(
            *x, *starts, 17, 14, return_attn_probs=True, **options
        ),
        lambda *x: reference.attend_varlen(*x, starts_q, starts_k, **reference_options(options)),
        [q, k, v],
        f"{band} {chunk}",
    )


@pytest.mark.parametrize("chunk", [0, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_seqused(chunk, causal):
    """Rows and keys not in use hold NaN; such rows give 0, and such keys are not read."""
    rows, keys, used_q, used_k = [6, 9, 3], [8, 4, 10], [5, 9, 0], [8, 3, 6]
    q, k, v = (x[0] for x in inputs(1, 18, 22))
    starts = [
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
        for x in (rows, keys)
    ]
    wanted = torch.zeros(18, 4, 16, dtype=torch.float64)
    for b in range(3):
        first, key = starts[0][b].item(), starts[1][b].item()
        rows_in_use, keys_in_use = slice(first, first + used_q[b]), slice(key, key + used_k[b])
        wanted[rows_in_use], _ = reference.attend_one(
            q[rows_in_use].double(),
            k[keys_in_use].double(),
            v[keys_in_use].double(),
            causal=causal,
            chunk=chunk,
        )
        q[first + used_q[b] : first + rows[b]] = math.nan
        k[key + used_k[b] : key + keys[b]] = math.nan
        v[key + used_k[b] : key + keys[b]] = math.nan
    seqused = [torch.tensor(x, dtype=torch.int32) for x in (used_q, used_k)]
    out = fa3.flash_attn_varlen_func(
        q, k, v, *starts, 9, 10, *seqused, causal=causal, attention_chunk=chunk
    )
    assert_as_good(out, None, wanted, 2, "out")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("varlen", [False, True])
def test_qv(dtype, causal, varlen):
    """Scores are q . k + qv . v, the absorbed form of multi-head latent attention."""
    q, k, v = inputs(2, 9, 14, heads_kv=1, dim=8, dim_v=24, dtype=dtype)
    qv = torch.randn(2, 9, 4, 24, generator=devices.generator(4)).to(dtype)
    starts_q, starts_k = [0, 9, 18], [0, 14, 28]
    starts = [torch.tensor(s, dtype=torch.int32) for s in (starts_q, starts_k)]
    tensors = [x.flatten(0, 1) for x in (q, k, v, qv)] if varlen else [q, k, v, qv]

    def call(q, k, v, qv):
        options = dict(qv=qv, causal=causal, return_attn_probs=True)
        if varlen:
            return fa3.flash_attn_varlen_func(q, k, v, *starts, 9, 14, **options)
        return fa3.flash_attn_func(q, k, v, **options)

    def wanted(q, k, v, qv):
        q, k = torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
        if varlen:
            return reference.attend_varlen(q, k, v, starts_q, starts_k, causal=causal)
        return reference.attend(q, k, v, causal=causal)

    check_against(call, wanted, tensors, f"qv {varlen}")


@pytest.mark.parametrize("heads_kv", [4, 2])
def test_qkvpacked(heads_kv):
    q, k, v = inputs(2, 11, 11, heads_kv=heads_kv)
    if heads_kv == 4:
        qkv, heads = torch.stack((q, k, v), dim=2), None
    else:
        qkv, heads = torch.cat((q, k, v), dim=2), 4
    out, lse = fa3.flash_attn_qkvpacked_func(
        qkv, causal=True, num_heads_q=heads, return_attn_probs=True
    )
    plain = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, num_splits=0)
    assert devices.equal(out, plain[0]) and devices.equal(lse, plain[1])
    assert isinstance(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads), torch.Tensor)


@pytest.mark.parametrize("splits", [1, 2, 5, 17])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
def test_combine(splits, varlen, out_dtype):
    """Merging splits of one attention gives that attention; splits without keys do not count."""
    torch.manual_seed(0)
    q, k, v = (x.double() for x in inputs(2, 6, 40))
    bounds = torch.linspace(0, 40, splits + 1).long().tolist()
    parts = [reference.attend(q, k[:, a:b], v[:, a:b]) for a, b in pairwise(bounds)]
    out_partial = torch.stack([x[0] for x in parts]).float()
    lse_partial = torch.stack([x[1].transpose(1, 2) for x in parts]).float()
    nothing = torch.full_like(lse_partial[:1], -math.inf)
    out_partial = torch.cat((out_partial, torch.full_like(out_partial[:1], math.nan)))
    lse_partial = torch.cat((lse_partial, nothing))
    want, want_lse = reference.attend(q, k, v)
    want_lse = want_lse.transpose(1, 2)
    if varlen:
        out_partial, lse_partial = out_partial.flatten(1, 2), lse_partial.flatten(1, 2)
        want, want_lse = want.flatten(0, 1), want_lse.flatten(0, 1)
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial, out_dtype=out_dtype)
    assert out.dtype == (out_dtype or torch.float32) and lse.dtype == torch.float32
    assert_as_good(out, want.to(out.dtype), want, 2, "out")
    assert_as_good(lse, None, want_lse, 2, "lse")
    into = torch.empty_like(out)
    assert fa3.flash_attn_combine(out_partial, lse_partial, out=into)[0] is into
    assert torch.equal(into, out)


def test_combine_of_empty_splits():
    out, lse = fa3.flash_attn_combine(
        torch.full((3, 2, 4, 8), math.nan), torch.full((3, 2, 4), -math.inf)
    )
    assert torch.equal(out, torch.zeros(2, 4, 8)) and (lse == -math.inf).all()
    with pytest.raises(ValueError, match="lse_partial"):
        fa3.flash_attn_combine(torch.zeros(3, 2, 4, 8), torch.zeros(3, 4, 2))


CAPACITY = 40


def cached(page_size, seed=0):
    """(k_cache, v_cache, page_table, function that makes a cache dense)."""
    g = devices.generator(seed)
    if not page_size:
        k, v = (torch.randn(3, CAPACITY, 2, 16, generator=g) for _ in range(2))
        return k, v, None, lambda cache: cache
    width = -(-CAPACITY // page_size)
    table = torch.randperm(3 * width + 1, generator=g)[: 3 * width].reshape(3, width).int()
    k, v = (torch.randn(3 * width + 1, page_size, 2, 16, generator=g) for _ in range(2))
    return k, v, table, lambda cache: cache[table.long()].flatten(1, 2)


@pytest.mark.parametrize("page_size", [0, 1, 7])
@pytest.mark.parametrize("chunk", [0, 5, 64])
@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("leftpad", [None, [2, 0, 9]])
@pytest.mark.parametrize("form", ["dense", "packed"])
def test_cache(page_size, chunk, band, leftpad, form):
    """Rows and new keys of different lengths, rotary positions that differ from them, and
    chunks."""
    torch.manual_seed(0)
    rows, new = ([3, 3, 3], [2, 2, 2]) if form == "dense" else ([4, 1, 0], [3, 1, 2])
    lengths, positions = [11, 3, 22], [5, 3, 0]
    k_cache, v_cache, table, as_contiguous = cached(page_size)
    q, k = torch.randn(sum(rows), 4, 16), torch.randn(sum(new), 2, 16)
    v = torch.randn(sum(new), 2, 16)
    angle = torch.rand(CAPACITY, 4) * 6.3
    cos, sin = angle.cos(), angle.sin()
    limited = bool(BANDS[band]) or chunk > 0
    k_rows, v_rows = as_contiguous(k_cache).double(), as_contiguous(v_cache).double()
    wanted, wanted_lse = [], []
    for b, (q_b, k_b, v_b) in enumerate(
        zip(q.split(rows), k.split(new), v.split(new), strict=True)
    ):
        steps = torch.arange(rows[b]) if limited else torch.zeros(rows[b], dtype=torch.long)
        q_b = reference.rotate(q_b.double(), cos.double(), sin.double(), positions[b] + steps, True)
        at = positions[b] + torch.arange(new[b])
        k_b = reference.rotate(k_b.double(), cos.double(), sin.double(), at, True)
        end = lengths[b] + new[b]
        k_rows[b, lengths[b] : end], v_rows[b, lengths[b] : end] = k_b, v_b.double()
        start = leftpad[b] if leftpad else 0
        options = reference_options(dict(BANDS[band], attention_chunk=chunk))
        out, lse = reference.attend_one(q_b, k_rows[b, start:end], v_rows[b, start:end], **options)
        wanted.append(out)
        wanted_lse.append(lse)
    if form == "dense":
        q, k, v = (x.unflatten(0, (3, -1)) for x in (q, k, v))
        packed = {}
        want, want_lse = torch.stack(wanted), torch.stack(wanted_lse)
    else:
        cu_q, cu_new = (
            torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32)
            for x in (rows, new)
        )
        packed = dict(cu_seqlens_q=cu_q, cu_seqlens_k_new=cu_new, max_seqlen_q=4)
        want, want_lse = torch.cat(wanted), torch.cat(wanted_lse, dim=1)
    results = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cache_leftpad=None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32),
        page_table=table,
        rotary_seqlens=torch.tensor(positions, dtype=torch.int32),
        attention_chunk=chunk,
        return_softmax_lse=True,
        **packed,
        **BANDS[band],
    )
    out, lse, out_accum, lse_accum = results
    assert out_accum.numel() == lse_accum.numel() == 0
    assert_as_good(out, None, want, 2, "out")
    assert_as_good(lse, None, want_lse, 2, "lse")
    assert_as_good(as_contiguous(k_cache), None, k_rows, 2, "k_cache")
    assert torch.equal(as_contiguous(v_cache).double(), v_rows)


def test_cache_with_qv_and_batch_index():
    torch.manual_seed(0)
    q, qv = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 24)
    k_cache, v_cache = torch.randn(5, 20, 1, 8), torch.randn(5, 20, 1, 24)
    index, lengths = torch.tensor([3, 1], dtype=torch.int32), [20, 6]
    got = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        qv=qv,
        cache_seqlens=torch.tensor(lengths, dtype=torch.int32),
        cache_batch_idx=index,
        causal=True,
    )
    both, keys = torch.cat((q, qv), dim=-1).double(), torch.cat((k_cache, v_cache), -1).double()
    for b, n in enumerate(lengths):
        i = index[b]
        want, _ = reference.attend_one(both[b], keys[i, :n], v_cache[i, :n].double(), causal=True)
        assert_as_good(got[b], None, want, 2, "out")


@pytest.mark.parametrize("step", [1, 2])
def test_qv_with_keys_and_values_in_one_tensor(step):
    """Only neighbouring columns are read in place, not columns that are `step` apart."""
    torch.manual_seed(0)
    q, qv, rows = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), torch.randn(2, 9, 1, 24)
    v, k = rows[..., : 8 * step : step], rows[..., 8 : 8 + 8 * step : step]
    got = fa3.flash_attn_func(q, k, v, qv=qv)
    both, keys = torch.cat((q, qv), dim=-1).double(), torch.cat((k, v), -1).double()
    for b in range(2):
        want, _ = reference.attend_one(both[b], keys[b], v[b].double())
        assert_as_good(got[b], None, want, 2, "out")


def test_private_forward_and_backward_match_the_public_function():
    q, k, v = (x.requires_grad_() for x in inputs(2, 12, 20))
    out, lse, *rest = fa3._flash_attn_forward(q, k, v, softmax_scale=0.3, causal=True, softcap=5.0)
    assert len(rest) == 2 and not out.requires_grad
    public = fa3.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, softcap=5.0)
    assert devices.equal(out, public)
    dout = torch.randn_like(out)
    parts = [torch.full_like(x, math.nan) for x in (q, k, v)]
    sums = fa3._flash_attn_backward(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq=parts[0],
        dk=parts[1],
        dv=parts[2],
        softmax_scale=0.3,
        is_causal=True,
        softcap=5.0,
    )
    assert torch.allclose(sums, (dout * out).sum(-1).transpose(1, 2), atol=1e-5)
    # The public function's backward also has lse_low, which the private pair cannot carry.
    for part, want in zip(parts, torch.autograd.grad(public, (q, k, v), dout), strict=True):
        torch.testing.assert_close(part, want, rtol=1e-5, atol=2e-6)
    into = torch.empty_like(out)
    again = fa3._flash_attn_forward(q, k, v, out_=into, softmax_scale=0.3, causal=True, softcap=5.0)
    assert again[0] is into and torch.equal(into, out)


def test_private_forward_reads_caches():
    torch.manual_seed(0)
    k_cache, v_cache, table, _ = cached(4)
    q = torch.randn(3, 2, 4, 16)
    lengths = torch.tensor([9, 30, 4], dtype=torch.int32)
    out, *_ = fa3._flash_attn_forward(
        q, k_cache, v_cache, seqused_k=lengths, page_table=table, softmax_scale=0.25, causal=True
    )
    public = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        page_table=table,
        softmax_scale=0.25,
        causal=True,
        num_splits=1,
    )
    assert devices.equal(out, public)


def test_hints_are_accepted():
    q, k, v = inputs(1, 4, 9)
    lengths = torch.tensor([9], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(1, 4, 9, 4, 2, 16, lengths)
    assert metadata.dtype == torch.int32
    plain = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
    hinted = fa3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, scheduler_metadata=metadata, pack_gqa=True, sm_margin=2
    )
    assert devices.equal(plain, hinted)
    assert fa3.round_up_headdim(72) == 72 and fa3.round_multiple(65, 64) == 128


def test_refusals_name_the_argument():
    q, k, v = inputs(1, 4, 4)
    with pytest.raises(ValueError, match="attention_chunk"):
        fa3.flash_attn_func(q, k, v, attention_chunk=-1)
    with pytest.raises(ValueError, match="qv"):
        fa3.flash_attn_func(q, k, v, qv=q[..., :3])
    with pytest.raises(ValueError, match="num_heads_q"):
        fa3.flash_attn_qkvpacked_func(torch.cat((q, k, v), dim=2))
    wide = [torch.zeros(1, 2, 1, d) for d in (65, 65, 512)]
    with pytest.raises(NotImplementedError, match=r"qv makes a score of 65 \+ 512 products"):
        fa3.flash_attn_func(*wide, qv=torch.zeros(1, 2, 1, 512))
    with pytest.raises(NotImplementedError, match="cu_seqlens_q"):
        fa3._flash_attn_forward(q, k[0], v[0], cu_seqlens_k=torch.tensor([0, 4]))


def test_softmax_scale_gets_a_gradient():
    q, k, v = inputs(2, 9, 9)
    scale = torch.tensor(0.3, requires_grad=True)
    fa3.flash_attn_func(q, k, v, softmax_scale=scale, causal=True).square().sum().backward()
    given, scale.grad = scale.grad, None
    tilewise.attention(q, k, v, scale=scale, causal=True).square().sum().backward()
    torch.testing.assert_close(given, scale.grad)


@pytest.mark.parametrize("wrong", [dict(size=(5, 2, 9, 4, 16)), dict(dtype=torch.float16)])
def test_outputs_of_the_wrong_shape_are_refused(wrong):
    options = dict(size=(2, 9, 4, 16), dtype=torch.float32) | wrong
    given = torch.empty(options["size"], dtype=options["dtype"])
    parts, lse = torch.randn(3, 2, 9, 4, 16), torch.randn(3, 2, 9, 4)
    with pytest.raises(ValueError, match=r"^out has shape .* but must have .*float32"):
        fa3.flash_attn_combine(parts, lse, out=given, out_dtype=torch.float32)
    q = torch.randn(2, 9, 4, 16)
    with pytest.raises(ValueError, match=r"^out_ has shape"):
        fa3._flash_attn_forward(q, q, q, out_=given)


@pytest.mark.tensors("cpu")
def test_too_small_max_seqlen_q_is_refused():
    q, cache = torch.randn(8, 4, 16), torch.randn(2, 40, 4, 16)
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match="max_seqlen_q is 2, but a sequence has 5 queries"):
        fa3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=torch.tensor([20, 30], dtype=torch.int32),
            cu_seqlens_q=starts, max_seqlen_q=2, attention_chunk=4, causal=True,
        )  # fmt: skip
