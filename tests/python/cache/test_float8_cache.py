"""float8_e4m3 caches with 16-bit queries; the oracle gets the values that the bytes represent.

Tested through the C ABI on every device, and append and attention together through PyTorch.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import capi  # noqa: E402
import devices  # noqa: E402
import test_decode  # noqa: E402
import tilewise  # noqa: E402
from bounds import LSE_LOW  # noqa: E402
from cases import Built, Case, run  # noqa: E402
from float8_cases import FLOAT8, check, is_expected, with_float8  # noqa: E402

DTYPES = ["fp16", "bf16"]


def random_case(seed: int, dtype: str) -> Case:
    r = np.random.default_rng(seed)
    emulated = devices.current().name == "emulator"
    batch, rows = int(r.integers(1, 4)), int(r.choice([1, 1, 2, 5, 20]))
    page_size = int(r.choice([0, 1, 16, 64]))
    longest = int(r.integers(1, 300 if emulated else 1200))
    room = -(-longest // page_size) * page_size if page_size else longest
    varlen = bool(not page_size and r.integers(3) == 0)
    used_k = None if varlen else tuple(int(n) for n in r.integers(0, room + 1, batch))
    keys = tuple(int(n) for n in r.integers(0, room + 1, batch)) if varlen else (room,) * batch
    return Case(
        dtype=dtype, rows=(rows,) * batch, keys=keys, varlen_q=varlen, varlen_k=varlen,
        heads_kv=int(r.integers(1, 3)), group=int(r.choice([1, 2, 4])),
        head_dim=int(r.choice([16, 40, 64])), head_dim_v=int(r.choice([64, 24])),
        page_size=page_size, used_k=used_k, window=[(-1, -1), (-1, 0), (30, 0)][int(r.integers(3))],
        softcap=float(r.choice([0.0, 0.0, 5.0])), alibi=str(r.choice(["", "", "h"])),
        sinks=bool(r.integers(3) == 0), splits=int(r.choice([0, 0, 3])),
        scale=float(r.choice([1.0, -1.0])) * 40**-0.5, seed=seed,
    )  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_caches(dtype, seed):
    check(random_case(seed, dtype), factors=seed % 4 != 0, broadcast=["", "b", "h", "bh"][seed % 4])


@pytest.mark.abi
def test_many_rows():
    """Covers key tiles that are packed once for several row tiles."""
    n = 70 if devices.current().name == "emulator" else 900
    check(Case(dtype="bf16", rows=(n,), keys=(n,), head_dim=64, head_dim_v=64, window=(-1, 0)))


def option_case(seed: int, dtype: str) -> Case:
    """Every option beside every other one, combined as serving would."""
    r = np.random.default_rng(1000 + seed)
    big = 1 if devices.current().name == "emulator" else 4
    rows = int(r.choice([1, 1, 1, 2, 4, 7, 16, 33, 64]))
    batch = int(r.integers(1, 4)) if rows <= 7 else 1
    group = int(r.choice([1, 2, 4, 5, 8, 16])) if rows <= 4 else int(r.choice([1, 2]))
    head_dim, head_dim_v = r.choice([8, 16, 64, 72, 80, 96, 128, 192, 256], 2)
    most = 6e6 * big / (batch * rows * group * (head_dim + head_dim_v))
    longest = int(min(r.choice([60, 200, 400]) * big, max(20, most)))
    page_size = int(r.choice([0, 0, 1, 3, 16, 64, 128]))
    room = -(-longest // page_size) * page_size if page_size else longest
    used_k = tuple(int(n) for n in r.integers(0, longest + 1, batch)) if r.integers(4) else None
    leftpad, kv_idx = test_decode.random_places(r, batch, used_k, page_size)
    return Case(
        dtype=dtype, rows=(rows,) * batch, keys=(room,) * batch, group=group, used_k=used_k,
        heads_kv=int(r.integers(1, 3)) if rows <= 7 else 1, head_dim=int(head_dim),
        head_dim_v=int(head_dim_v), page_size=page_size, leftpad=leftpad, kv_idx=kv_idx,
        window=[(-1, -1), (-1, 0), (int(r.integers(0, 100)), 0), (3, 5)][int(r.integers(4))],
        softcap=float(r.choice([0.0, 0.0, 5.0])), alibi=str(r.choice(["", "", "h", "bh"])),
        bias=[None, None, None, "bhr", "r"][int(r.integers(5))],
        bias_own_dtype=bool(r.integers(2)), sinks=bool(r.integers(3) == 0),
        dropout_p=float(r.choice([0.0, 0.0, 0.2])), splits=int(r.choice([0, 0, 1, 3, 8])),
        scale=float(r.choice([1.0, -1.0, 0.3])) * float(head_dim) ** -0.5,
        scale_ptr=bool(r.integers(2)), pad=int(r.choice([0, 0, 16, 1])), seed=seed,
    )  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(dtype, seed):
    check(option_case(seed, dtype), factors=seed % 5 != 0, signed=seed % 3 == 0)


@pytest.mark.abi
@pytest.mark.parametrize("page_size", [0, 1, 16, 64])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunked_prefill(dtype, head_dim, page_size):
    """More rows than a tile has, varlen, paged and contiguous."""
    room = 304 if page_size != 64 else 320
    check(
        Case(dtype=dtype, rows=(100,), keys=(room,), used_k=(300,), head_dim=head_dim,
             head_dim_v=64, page_size=page_size, window=(-1, 0)),
    )  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_of_any_size(dtype):
    """Each row is an fp16 number times a power of two: rows differ widely, large, tiny and 0."""
    lowest, highest = (-20, 13) if dtype == "fp16" else (-120, 70)
    b = Built(Case(dtype=dtype, rows=(12,), keys=(70,), head_dim=64, head_dim_v=64,
                   scale=2.0 ** (5 - highest)))  # fmt: skip
    powers = torch.linspace(lowest, highest, 12).round()
    powers[5] = -torch.inf  # a row of zeros
    b.q.mul_(torch.exp2(powers).to(b.q)[None, :, None, None])
    with_float8(b, factors=True)
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False)
        want = b.expected()
        assert is_expected(got.kernels[0])
        assert np.abs(got.out - want.out).max() <= 2**-7 * np.abs(want.out).max()
        assert (np.abs(got.lse - want.lse) <= LSE_LOW * np.maximum(1, np.abs(want.lse))).all()


CODES = torch.arange(256, dtype=torch.int16).to(torch.uint8)


@pytest.mark.abi
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_exact(dtype, rows):
    """With one key, v is the result, and k is the score of queries that have a single 1."""
    b = Built(Case(dtype=dtype, rows=(rows,), keys=(1,), head_dim=256, head_dim_v=256, scale=1.0))
    with_float8(b, factors=False)
    b.q[:] = 0
    b.bytes["v"][0, 0, 0] = CODES
    meaning = CODES.view(FLOAT8).double().numpy()
    finite = CODES.clone()
    finite[[0x7F, 0xFF]] = 0
    for target in capi.targets():
        with capi.on(target):
            b.bytes["k"][:] = 0
            out = run(b, backward=False).out
            seen = ~np.isnan(meaning)
            assert (out[:, 0, seen] == meaning[seen]).all() and np.isnan(out[:, 0, ~seen]).all()
            b.bytes["k"][0, 0, 0] = finite
            for first in range(0, 256, rows):
                columns = (first + torch.arange(rows)) % 256
                b.q[:] = torch.eye(256)[columns][None, :, None].to(b.q)
                lse = run(b, backward=False).lse[:, 0]
                want = finite.view(FLOAT8).double()[columns].numpy()
                assert (np.abs(lse - want) <= LSE_LOW * np.maximum(1, np.abs(want))).all(), target
            b.bytes["k"][0, 0, 0, 9] = 0xFF
            assert np.isnan(run(b, backward=False).out).all(), target


SHAPES = test_decode.SHAPES | {"general": dict(rows=(2,) * 3, group=2, softcap=9.0)}


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("head_dim", [(64, 64), (96, 48), (128, 80), (256, 144)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
def test_paged_keys_equal_contiguous_keys(page_size, shape, head_dim):
    """They are bitwise equal if both are split in the same way, whichever form runs."""
    room = -(-300 // page_size) * page_size
    contiguous = Case(
        dtype="bf16", keys=(room,) * 3, used_k=(300, 41, 197), head_dim=head_dim[0],
        head_dim_v=head_dim[1], **SHAPES[shape],
    )  # fmt: skip
    want, b = Built(contiguous), Built(dataclasses.replace(contiguous, page_size=page_size))
    for built in (want, b):
        built.attention.batch_invariant = shape == "invariant"
        with_float8(built, factors=True)
    b.q.copy_(want.q)
    if b.sinks is not None:
        b.sinks.copy_(want.sinks)
    for name in ("k", "v"):
        to, source = (test_decode.flat_view(x.bytes[name]) for x in (b, want))
        for here, there in zip(b.sequences, want.sequences, strict=True):
            to[here.keys] = source[there.keys]
    plan = capi.plan(b.attention)
    uses_tma = test_decode.form(b, plan) == "paged TMA" and shape != "general"
    assert (b"paged TMA form" if uses_tma else b"general form") in plan.why
    if test_decode.splitting_of(plan) != test_decode.splitting_of(capi.plan(want.attention)):
        want.attention.num_splits = b.attention.num_splits = 2
    results = [run(x, backward=False) for x in (b, want)]
    for here, there in zip(b.sequences, want.sequences, strict=True):
        assert np.array_equal(results[0].out[here.rows], results[1].out[there.rows])
    assert np.array_equal(results[0].lse, results[1].lse)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("make", [test_decode.cluster_combine_case, test_decode.chunk_case])
def test_splits_and_chunks_are_combined(make, seed):
    """In clusters, by the last CTA of a tile, and by the combine kernel."""
    check(dataclasses.replace(make(seed), head_dim_v=(48, 64)[seed % 2]), signed=seed % 4 == 0)


@pytest.mark.abi
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("rows", [4, 40])
def test_nan_reaches_only_the_rows_that_see_it(rows, page_size, softcap):
    b = Built(
        Case(dtype="bf16", rows=(rows,), keys=(48,), head_dim=64, head_dim_v=64, window=(-1, 0),
             page_size=page_size, softcap=softcap)
    )  # fmt: skip
    with_float8(b, factors=False)
    last = b.sequences[0].keys[-1]
    for target in capi.targets():
        for name, code, columns in (("v", 0x7F, 1), ("k", 0xFF, 64)):
            row = test_decode.flat_view(b.bytes[name])[last]
            before, row[0, 3] = int(row[0, 3]), code
            with capi.on(target):
                out = run(b, backward=False).out
            assert np.isnan(out[-1, 0, 3]) and np.isnan(out).sum() == columns, (target, name)
            row[0, 3] = before


def plan(case: Case, change, gradients: bool = False) -> tuple[int, str]:
    b = Built(case)
    with_float8(b, factors=True)
    change(b.attention)
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    g = ctypes.byref(b.gradients()) if gradients else None
    direction = capi.BACKWARD if gradients else capi.FORWARD
    library = capi.library()
    status = library.tilewise_plan(ctypes.byref(b.attention), g, direction, ctypes.byref(info))
    return status, capi.last_error() if status else info.kernel.decode()


@pytest.mark.abi
def test_supported_and_refused_float8_problems():
    case = Case(dtype="bf16", rows=(1,), keys=(30,), head_dim=64, head_dim_v=64)
    status, kernel = plan(case, lambda a: None)
    assert status == capi.OK and kernel.endswith(".forward.bf16.f8")
    status, why = plan(case, lambda a: None, gradients=True)
    assert status == capi.UNSUPPORTED and why.startswith("backward with float8_e4m3 k and v")
    for change, words in (
        (lambda a: setattr(a, "kv_float8", 2), "kv_float8 is 2"),
        (lambda a: setattr(a, "kv_float8", 0), "k_descale is given, but k is not float8_e4m3"),
        (lambda a: setattr(a, "dtype", 0), "kv_float8 is 1 with dtype float32"),
    ):
        status, why = plan(case, change)
        assert status == capi.INVALID_ARGUMENT and why.startswith(words), why


@pytest.mark.abi
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_append_on_every_device(dtype, interleaved):
    """Bitwise without rotation, and within one step of the format with it."""
    batch, heads, dim, dim_v, new, room, rotary = 2, 5, 40, 24, 3, 11, 16
    g = torch.Generator().manual_seed(interleaved)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    wide = capi.DTYPES[dtype]
    k, v = (devices.put(draw(batch, new, heads, n).to(wide)) for n in (dim, dim_v))
    angle = draw(room, rotary // 2)
    cos, sin = (devices.put(x.to(wide)) for x in (angle.cos(), angle.sin()))
    factors = [devices.put(torch.rand(batch, heads, generator=g) + 0.5) for _ in "kv"]
    lengths = devices.put(torch.tensor([2, 8], dtype=torch.int32))
    caches = [capi.guarded((batch, room, heads, n), torch.uint8) for n in (dim, dim_v)]
    a = capi.KvAppend(
        struct_size=ctypes.sizeof(capi.KvAppend), device=devices.current().code,
        device_index=devices.current().index, dtype=capi.DTYPE_CODES[wide],
        stream=devices.current().stream, batch=batch, seqlen_new=new, seqlen_k=room, heads_q=heads,
        heads_kv=heads, head_dim=dim, head_dim_v=dim_v, k_new=capi.tensor(k), v_new=capi.tensor(v),
        k_cache=capi.tensor(caches[0].view), v_cache=capi.tensor(caches[1].view),
        cache_seqlens=lengths.data_ptr(), rotary_cos=cos.data_ptr(), rotary_sin=sin.data_ptr(),
        rotary_rows=room, rotary_dim=rotary, rotary_interleaved=interleaved, kv_float8=1,
        k_descale=factors[0].data_ptr(), v_descale=factors[1].data_ptr(),
        k_descale_stride_batch=heads, k_descale_stride_head=1,
        v_descale_stride_batch=heads, v_descale_stride_head=1,
    )  # fmt: skip
    assert capi.library().tilewise_append_kv(ctypes.byref(a)) == capi.OK, capi.last_error()
    pairs = k[..., :rotary].float()
    first, second = pairs.chunk(2, -1) if not interleaved else (pairs[..., ::2], pairs[..., 1::2])
    at = lengths.long()[:, None] + torch.arange(new, device=k.device)
    c, s = (x.float()[at][:, :, None] for x in (cos, sin))
    turned = k.float().clone()
    halves = first * c - second * s, first * s + second * c
    joined = torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)
    turned[..., :rotary] = joined
    for cache, x, factor, exact in zip(
        caches, (turned, v.float()), factors, (rotary, 0), strict=True
    ):
        want = torch.full_like(cache.view, 0xFF)
        stored = (x / factor[:, None, :, None]).clamp(-448, 448).to(FLOAT8).view(torch.uint8)
        for b, n in enumerate(lengths.tolist()):
            want[b, n : n + new] = stored[b]
        assert torch.equal(cache.view[..., exact:], want[..., exact:])
        assert int((cache.view.int() - want.int()).abs().max()) <= 1
        assert cache.stray_writes() == 0


# --- append and attention through PyTorch ---------------------------------------------------------


@pytest.mark.tensors
@pytest.mark.parametrize("rotary", ["none", "interleaved", "halves"])
@pytest.mark.parametrize("page_size", [0, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_append_rounds_to_nearest(dtype, page_size, rotary):
    batch, capacity, heads, heads_kv, dim, new = 2, 48, 4, 2, 32, 3
    g = devices.generator(3)
    draw = lambda *shape: torch.randn(*shape, generator=g)  # noqa: E731
    shape = (batch * capacity // page_size, page_size) if page_size else (batch, capacity)
    caches = [draw(*shape, heads_kv, dim).to(FLOAT8) for _ in "kv"]
    before = [x.clone() for x in caches]
    table = None
    if page_size:
        table = torch.randperm(shape[0], generator=g).int().reshape(batch, -1)
    q = draw(batch, 2, heads, dim).to(dtype)
    k, v = draw(batch, new, heads_kv, dim).to(dtype), draw(batch, new, heads_kv, dim).to(dtype)
    k[0, 0, 0, -3:] = torch.tensor(
        [1e4, -1e4, float("nan")], dtype=dtype
    )  # past the rotated columns
    lengths = torch.tensor([5, 40], dtype=torch.int32)
    factors = [torch.rand(batch, heads_kv, generator=g) + 0.5 for _ in "kv"]
    cos = sin = None
    if rotary != "none":
        angle = torch.rand(capacity, 8, generator=g) * 6.3
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    out = tilewise.attention_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, block_table=table, rotary_cos=cos,
        rotary_sin=sin, rotary_interleaved=rotary == "interleaved", causal=True,
        k_descale=factors[0], v_descale=factors[1],
    )  # fmt: skip
    assert out.dtype == dtype and out.shape == q.shape

    def as_contiguous(x):
        rows = x.view(torch.uint8)
        return rows if table is None else rows[table.long()].flatten(1, 2)

    turned = k.float()
    if cos is not None:
        import compat_reference as reference

        positions = lengths[:, None] + torch.arange(new)
        turned = reference.rotate(
            turned, cos.float(), sin.float(), positions, rotary == "interleaved"
        )
    for now, old, x, factor, name in zip(
        caches, before, (turned, v.float()), factors, "kv", strict=True
    ):
        want = as_contiguous(old).clone()
        scaled = x / factor[:, None, :, None]
        stored = scaled.clamp(-448, 448).to(FLOAT8).view(torch.uint8)
        for b, n in enumerate(lengths.tolist()):
            want[b, n : n + new] = stored[b]
        got = as_contiguous(now)
        if name == "v" or cos is None:
            assert torch.equal(got, want), name
        else:  # rotating with another order of rounding may give the neighbouring number
            differs = (got.int() - want.int()).abs()
            assert int(differs.max()) <= 1 and float((differs > 0).float().mean()) < 1e-3


@pytest.mark.tensors
def test_attention_varlen_over_pages_and_explain():
    g = devices.generator(5)
    q = torch.randn(3, 4, 32, generator=g).bfloat16()
    k, v = (torch.randn(6, 8, 2, 32, generator=g).to(FLOAT8) for _ in "kv")
    cu = torch.tensor([0, 1, 3], dtype=torch.int32)
    used = torch.tensor([9, 24], dtype=torch.int32)
    table = torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32)
    factor = torch.tensor([[2.0, 0.5]])
    options = dict(block_table=table, seqused_k=used, k_descale=factor, v_descale=factor)
    got = tilewise.attention_varlen(q, k, v, cu, None, **options)
    wide = [(x.float() * factor[0][:, None]).bfloat16() for x in (k, v)]
    want = tilewise.attention_varlen(
        q.float(), *(x.float() for x in wide), cu, None, block_table=table, seqused_k=used
    )
    assert float((got.float() - want).abs().max()) <= 2**-7 * float(want.abs().max())
    text = str(tilewise.explain(q, k, v, cu_seqlens_q=cu, **options))
    assert ".forward.bf16.f8" in text and "backward with float8_e4m3 k and v" in text


@pytest.mark.tensors
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(v_cache=torch.zeros(2, 8, 2, 16).bfloat16()), "v_cache has dtype torch.bfloat16"),
        (dict(q=torch.zeros(2, 1, 4, 16)), "k_cache has dtype torch.float8_e4m3fn"),
        (dict(k_descale=torch.ones(3, 2)), r"k_descale has shape \[3, 2\]"),
        (dict(k_descale=torch.ones(2, 2, dtype=torch.int32)), "k_descale has dtype torch.int32"),
        (dict(v_descale=2.0), "v_descale is a float"),
    ],
)
def test_refused_by_name(change, words):
    zeros = torch.zeros(2, 8, 2, 16).to(FLOAT8)
    given = dict(q=torch.zeros(2, 1, 4, 16).bfloat16(), k_cache=zeros, v_cache=zeros)
    given |= devices.moved(change)
    with pytest.raises((TypeError, ValueError), match=words):
        tilewise.attention_with_kvcache(**given)


def test_descale_requires_float8():
    x = torch.zeros(1, 8, 2, 16)
    with pytest.raises(ValueError, match="k_descale is given, but belongs to float8_e4m3"):
        tilewise.attention_with_kvcache(x[:, :1], x, x, k_descale=torch.ones(1, 2))
