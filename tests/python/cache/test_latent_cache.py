"""Latent caches (MLA): one tensor whose first columns are the values, compared with fp64.

Values that are the first columns of the keys, in every option and pass, are in the property tests.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
import tilewise  # noqa: E402
from compat_reference import assert_as_good  # noqa: E402
from tilewise import _check  # noqa: E402
from tilewise.compat import _fa3  # noqa: E402
from tilewise.compat import flash_attn_interface as fa3  # noqa: E402

pytestmark = pytest.mark.tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = torch.float8_e4m3fn
LENGTHS = [70, 0, 9]
VALUES = {576: 512, 288: 256}  # columns of values by those of keys


def dims(dtype):
    """(D, Dv) of DeepSeek's cache, or in float32 on a GPU those of a smaller one."""
    head_dim = 288 if devices.current().name == "cuda" and dtype == torch.float32 else 576
    return head_dim, VALUES[head_dim]


def problem(dtype, page_size=0, rows=2, heads=16, new=0, seed=0):
    """(q, cache, new keys, block table or None), with random unused rows."""
    g, (head_dim, _) = devices.generator(seed), dims(dtype)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    room = max(LENGTHS) + new
    if not page_size:
        return normal(3, rows, heads, head_dim), normal(3, room, 1, head_dim), None, None
    width = -(-room // page_size)
    table = torch.randperm(3 * width + 2, generator=g)[: 3 * width].reshape(3, width).int()
    return (
        normal(3, rows, heads, head_dim),
        normal(3 * width + 2, page_size, 1, head_dim),
        normal(3, new, 1, head_dim),
        table,
    )


def in_order(cache, table):
    return cache if table is None else cache[table.long()].flatten(1, 2)


def expected(q, cache, table, lengths, dtype, **options):
    """(out, lse) of each sequence, computed in `dtype`."""
    results = []
    for b, n in enumerate(lengths):
        keys = in_order(cache, table)[b, :n].to(dtype)
        values = keys[..., : VALUES[keys.shape[-1]]]
        results.append(reference.attend_one(q[b].to(dtype), keys, values, **options))
    return [torch.stack(x) for x in zip(*results, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 4), (128, 1), (128, 2), (1, 3)])
@pytest.mark.parametrize(("causal", "num_splits"), [(True, 0), (False, 3)])
def test_decode(dtype, page_size, heads, rows, causal, num_splits):
    q, cache, _, table = problem(dtype, page_size, rows, heads)
    options = dict(causal=causal, scale=192**-0.5)
    got = tilewise.attention_with_kvcache(
        q, cache, head_dim_v=dims(dtype)[1], cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=table, num_splits=num_splits, return_lse=True, **options,
    )  # fmt: skip
    plain = expected(q, cache, table, LENGTHS, dtype, **options)
    exact = expected(q, cache, table, LENGTHS, torch.float64, **options)
    for name, *values in zip(("out", "lse"), got, plain, exact, strict=True):
        assert_as_good(*values, 2, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("interleaved", [None, False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_append_writes_every_column_once(dtype, page_size, interleaved, packed):
    """Only the columns after the values are rotated; the rest of the cache is unchanged."""
    new, (head_dim, head_dim_v) = 2, dims(dtype)
    q, cache, _, table = problem(dtype, page_size, rows=2, new=new)
    k = torch.randn(3, new, 1, head_dim, generator=devices.generator(3)).to(dtype)
    angle = torch.rand(90, 16, generator=devices.generator(5)) * 6.3
    tables = (None, None) if interleaved is None else (angle.cos().to(dtype), angle.sin().to(dtype))
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32) if packed else None
    before, lengths = cache.clone(), torch.tensor(LENGTHS, dtype=torch.int32)
    out = tilewise.attention_with_kvcache(
        q.flatten(0, 1) if packed else q, cache, None, k.flatten(0, 1) if packed else k,
        head_dim_v=head_dim_v, cache_seqlens=lengths, block_table=table, causal=True,
        rotary_cos=tables[0], rotary_sin=tables[1], rotary_interleaved=bool(interleaved),
        cu_seqlens_q=starts, cu_seqlens_k_new=starts, check=True,
    )  # fmt: skip
    positions = lengths[:, None] + torch.arange(new)
    turned = [q.double(), k.double()]
    if interleaved is not None:
        tables = [x.double() for x in tables]
        for x in turned:
            x[..., head_dim_v:] = reference.rotate(
                x[..., head_dim_v:], *tables, positions, interleaved
            )
    wanted = before.double()
    rows = in_order(torch.arange(cache.shape[0] * cache.shape[1]).view(cache.shape[:2]), table)
    written = torch.stack([rows[b, n : n + new] for b, n in enumerate(LENGTHS)]).flatten()
    wanted.view(-1, 1, head_dim)[written] = turned[1].flatten(0, 1)
    assert torch.equal(cache[..., :head_dim_v].double(), wanted[..., :head_dim_v])
    if interleaved is None:
        assert torch.equal(cache.double(), wanted)
    else:
        # As exact as the rounding of the rotated columns to the dtype, and of fp32 sums.
        assert_as_good(cache, wanted.to(dtype), wanted, 2, "cache")
    untouched = torch.ones(rows.max() + 1 if table is None else before[..., 0, 0].numel()).bool()
    untouched[written] = False
    same = (cache == before).flatten(0, 1).flatten(1).all(-1)
    assert same[untouched].all() and not same[written].any()
    lengths = [n + new for n in LENGTHS]
    exact, _ = expected(turned[0], wanted, table, lengths, torch.float64, causal=True)
    plain, _ = expected(turned[0].to(dtype), cache, table, lengths, dtype, causal=True)
    assert_as_good(out.view_as(plain), plain, exact, 2, "out")


@pytest.mark.parametrize("factor", [None, 0.25])
def test_float8_cache_has_one_factor(factor):
    """Columns are divided by k_descale when they are written, and multiplied when they are read."""
    q, cache, _, table = problem(torch.bfloat16, page_size=16, new=1)
    head_dim, head_dim_v = dims(torch.bfloat16)
    k = torch.randn(3, 1, 1, head_dim, generator=devices.generator(3)).bfloat16()
    cache = (cache.float() * 0.5).to(FLOAT8)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    descale = None if factor is None else torch.tensor([[factor]])
    before = cache.clone()
    out = tilewise.attention_with_kvcache(
        q, cache, None, k, head_dim_v=head_dim_v, cache_seqlens=lengths, block_table=table,
        k_descale=descale,
    )  # fmt: skip
    stored = (k.float() / (factor or 1.0)).clamp(-448, 448).to(FLOAT8)
    now, old = (in_order(x.view(torch.uint8), table) for x in (cache, before))
    for b, n in enumerate(LENGTHS):
        old[b, n] = stored.view(torch.uint8)[b, 0]
    assert torch.equal(now, old)
    wide = cache.to(torch.float64) * (factor or 1.0)
    grown = [n + 1 for n in LENGTHS]
    exact, _ = expected(q, wide, table, grown, torch.float64)
    plain, _ = expected(q, wide, table, grown, torch.bfloat16)
    assert_as_good(out, plain, exact, 2, "out")


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("page_size", [0, 16])
def test_arrays_agree_bitwise_with_tensors(rotary, page_size):
    q, cache, _, table = problem(torch.float32, page_size, new=2)
    given = dict(q=q, k_cache=cache, k=torch.randn(3, 2, 1, 576), block_table=table)
    given["cache_seqlens"] = torch.tensor(LENGTHS, dtype=torch.int32)
    if rotary:
        given |= dict(rotary_cos=torch.randn(90, 32), rotary_sin=torch.randn(90, 32))
    arrays = {name: None if x is None else x.numpy().copy() for name, x in given.items()}
    options = dict(head_dim_v=512, causal=True, return_lse=True)
    want = tilewise.attention_with_kvcache(**given, **options)
    got = tilewise.attention_with_kvcache(**arrays, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    np.testing.assert_array_equal(arrays["k_cache"], given["k_cache"].numpy())
    np.testing.assert_array_equal(arrays["q"], given["q"].numpy())
    plan = tilewise.explain(
        arrays["q"], arrays["k_cache"], cache_seqlens=9, head_dim_v=512,
        block_table=arrays["block_table"],
    )  # fmt: skip
    assert "head dim 576 and 512" in str(plan) and "cpu." in str(plan)


@pytest.mark.tensors("cpu")
def test_compiled_call_appends():
    q, cache, _, table = problem(torch.float32, page_size=16, new=1)
    k = torch.randn(3, 1, 1, 576)
    options = dict(
        head_dim_v=512, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table=table, causal=True,
    )  # fmt: skip
    copy = cache.clone()
    want = tilewise.attention_with_kvcache(q, copy, None, k, **options)
    compiled = torch.compile(tilewise.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, cache, None, k, **options), want)
    assert torch.equal(cache, copy)


BAD = {
    "both caches": (dict(v_cache=torch.zeros(3, 9, 1, 16)), "v_cache and head_dim_v are both"),
    "v": (dict(v=torch.zeros(3, 1, 1, 16)), "v and head_dim_v are both given"),
    "v_descale": (dict(v_descale=torch.ones(1, 1)), "v_descale and head_dim_v are both given"),
    "no values": (dict(head_dim_v=0), "head_dim_v is 0, but must be at least 1 and less than"),
    "all columns": (dict(head_dim_v=24), "head_dim_v is 24, but must be .* the 24 columns"),
    "fraction": (dict(head_dim_v=1.5), "head_dim_v is 1.5, but must be an integer or None"),
    "neither": (dict(head_dim_v=None), "v_cache is None, but must be given, or head_dim_v"),
    "k columns": (dict(k=torch.zeros(3, 1, 1, 16)), r"k has shape .* must be \[any, any, 1, 24\]"),
    "k heads": (dict(k=torch.zeros(3, 1, 2, 24)), r"k has shape .* must be \[any, any, 1, 24\]"),
    "cos kind": (dict(rotary_cos=[1.0], rotary_sin=[1.0]), "rotary_cos"),
    "rotation of values": (
        dict(rotary_cos=torch.zeros(9, 5), rotary_sin=torch.zeros(9, 5)),
        "rotary_cos has 5 columns, but a latent cache rotates only the 8 columns after its values",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("arrays", [False, True])
def test_refusals_name_the_argument_and_write_nothing(name, arrays, device):
    if arrays and device.name == "cuda":
        pytest.skip("arrays are in the memory of the CPU")
    given = dict(
        q=torch.zeros(3, 1, 2, 24), k_cache=torch.zeros(3, 9, 1, 24), v_cache=None,
        k=torch.ones(3, 1, 1, 24), cache_seqlens=torch.tensor([1, 2, 3]), head_dim_v=16,
    )  # fmt: skip
    changes, sentence = BAD[name]
    given |= devices.moved(changes)
    if arrays:
        is_tensor = {n: isinstance(x, torch.Tensor) for n, x in given.items()}
        given = {n: x.numpy() if is_tensor[n] else x for n, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=sentence):
        tilewise.attention_with_kvcache(**given)
    assert not given["k_cache"].any()


@pytest.mark.parametrize("latent", [False, True])
def test_head_dimension_beyond_the_device_is_refused_before_the_append(latent, monkeypatch):
    """Limits of GPUs, which no smaller test can reach on a CPU."""
    monkeypatch.setattr(_check, "max_forward_head_dim", lambda q: 32)
    q, cache, k = (torch.ones(1, n, heads, 40) for n, heads in ((1, 16), (9, 1), (1, 1)))
    cache.zero_()
    values = (None, k) if latent else (cache.clone(), k, k)
    options = dict(head_dim_v=32) if latent else {}
    with pytest.raises(ValueError, match=r"must be 1\.\.32 for this dtype on a GPU"):
        tilewise.attention_with_kvcache(q, cache, *values, cache_seqlens=3, **options)
    assert not cache.any()


@pytest.mark.parametrize("page_size", [0, 64])
@pytest.mark.parametrize("append", [False, True])
def test_qv_of_flash_attention_3_reads_a_latent_cache_in_place(page_size, append):
    """Neighbouring columns of one tensor are not copied; two tensors are, with the same result."""
    new, (head_dim, head_dim_v) = 2 * append, dims(torch.bfloat16)
    q, cache, _, table = problem(torch.bfloat16, page_size, new=new)
    k = torch.randn(3, 2, 1, head_dim, generator=devices.generator(3)).bfloat16()
    parts = [(x[..., head_dim_v:], x[..., :head_dim_v]) for x in (cache, k)]
    copies = [x.clone() for x in parts[0]]
    options = dict(
        qv=q[..., :head_dim_v], cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
        page_table=table, causal=True, softmax_scale=192**-0.5,
    )  # fmt: skip
    keys = parts[1] if append else (None, None)
    joined = _fa3._latent_keys(*parts[0])
    assert joined.data_ptr() == cache.data_ptr() and joined.shape == cache.shape
    assert joined.stride() == cache.stride() and _fa3._latent_keys(*copies) is None
    assert _fa3._latent_keys(*reversed(parts[0])) is None
    got = fa3.flash_attn_with_kvcache(q[..., head_dim_v:], *parts[0], *keys, **options)
    same = fa3.flash_attn_with_kvcache(q[..., head_dim_v:], *copies, *keys, **options)
    assert torch.equal(got, same)
    lengths = [n + new for n in LENGTHS]
    common = dict(causal=True, scale=192**-0.5)
    plain, _ = expected(q, cache, table, lengths, torch.bfloat16, **common)
    exact, _ = expected(q, cache, table, lengths, torch.float64, **common)
    assert_as_good(got, plain, exact, 2, "out")
