"""Shapes and memory layouts that have broken attention kernels before, one test each."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from collections.abc import Callable

import numpy as np
import pytest
import torch

import capi
import devices
from cases import Built, Case, check, flat, float64, int32, run

pytestmark = pytest.mark.abi
DTYPES = ["fp32", "bf16", "fp16"]
EDGES = [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257]
HEAD_DIMS = [1, 2, 3, 7, 8, 16, 24, 32, 40, 64, 72, 80, 96, 111, 128, 160, 192, 256, 320, 511, 512]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", EDGES)
def test_lengths_around_tile_edges(n, dtype):
    other = EDGES[(EDGES.index(n) * 5 + 3) % len(EDGES)]
    check(Case(dtype, (n,), (n,), window=(-1, 0), heads_kv=2, seed=n))
    check(Case(dtype, (n,), (other,), head_dim=16, head_dim_v=16, window=(-1, 0), seed=n))
    check(Case(dtype, (other,), (n,), head_dim=16, head_dim_v=16, seed=n))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(dim, dtype):
    other = HEAD_DIMS[(HEAD_DIMS.index(dim) * 8 + 5) % len(HEAD_DIMS)]
    for dim_v in (dim, other):
        check(Case(dtype, (33,), (70,), head_dim=dim, head_dim_v=dim_v, window=(-1, 0), group=2))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 30.0])
@pytest.mark.parametrize("seed", [9, 11])
def test_one_product_per_score(softcap, seed):
    """With one product per score, no sum averages the errors of split operands."""
    check(Case("fp32", (13,), (29,), head_dim=1, head_dim_v=16, softcap=softcap, seed=seed))


def test_head_dim_v_zero_means_head_dim():
    b = Built(Case(rows=(9,), keys=(11,), head_dim=24, head_dim_v=24, deterministic=True))
    want = run(b)
    b.attention.head_dim_v = 0
    got = run(b)
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.grads["v"], want.grads["v"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows,keys", [(1, 1), (1, 300), (300, 1), (5, 200), (200, 5), (64, 65)])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (0, 0), (3, 9), (0, -1)])
def test_rows_and_keys_differ(rows, keys, window, dtype):
    """Bottom-right alignment; with more rows than keys, the first rows are fully masked."""
    check(Case(dtype, (rows,) * 2, (keys,) * 2, window=window, group=3, dlse=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case",
    [
        Case(rows=(), keys=()),  # B = 0
        Case(rows=(0, 0), keys=(5, 5)),  # no rows
        Case(rows=(4, 4), keys=(0, 0)),  # no keys
        Case(rows=(4, 4), keys=(0, 0), sinks=True),  # a sink and no keys
        Case(rows=(0,), keys=(0,)),
        Case(rows=(), keys=(), varlen_q=True, varlen_k=True, tail_q=3, tail_k=2),
        Case(rows=(0, 0, 0), keys=(0, 0, 0), varlen_q=True, varlen_k=True),
        Case(rows=(0, 5, 0, 3), keys=(4, 0, 0, 9), varlen_q=True, varlen_k=True, sinks=True),
        Case(rows=(4, 4), keys=(6, 6), used_q=(0, 3), used_k=(6, 0), window=(-1, 0)),
        Case(rows=(3, 3), keys=(32, 32), page_size=16, used_k=(0, 32)),
        Case(rows=(3, 3), keys=(8, 8), used_k=(5, 5), leftpad=(5, 2)),
    ],
    ids=lambda c: f"{c.rows}-{c.keys}-{c.sinks}-{c.page_size}",
)
def test_empty_dimensions(case, dtype):
    check(Case(**{**case.__dict__, "dtype": dtype, "dlse": True}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_past_the_last_sequence_are_zero(dtype):
    """Rows past the last sequence, and rows and keys beyond seqused, whose memory holds NaN: out is
    0, lse -inf, and gradients are 0."""
    case = Case(
        dtype, (20, 31), (40, 17), varlen_q=True, varlen_k=True, tail_q=9, tail_k=70,
        used_q=(11, 31), used_k=(40, 3), window=(-1, 0), group=2, heads_kv=2, pad=3,
    )  # fmt: skip
    check(case)
    b = Built(case)
    got = run(b)
    for idle in (slice(11, 20), slice(51, 60)):
        assert (got.out[idle] == 0).all()
        assert np.isneginf(got.lse[idle]).all()
        assert (got.grads["q"][idle] == 0).all()
    assert (got.grads["k"][43:] == 0).all()
    assert (got.grads["v"][43:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("pad,shift", [(0, 1), (5, 0), (16, 3)])
def test_strided_views(order, pad, shift, dtype):
    for dim in (40, 64):
        case = Case(
            dtype, (37, 37), (50, 50), heads_kv=2, group=2, head_dim=dim, head_dim_v=dim,
            order=order, pad=pad, shift=shift, bias="bhr", window=(-1, 0), sinks=True,
        )  # fmt: skip
        check(case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expand", ["q0", "q1", "q2", "k0", "k1", "k2", "v0", "v1", "v2"])
def test_broadcast_views(expand, dtype):
    """Stride 0 along batch (0), rows (1) or heads (2)."""
    check(Case(dtype, (33, 33), (40, 40), heads_kv=3, group=2, expand=expand, window=(9, 0)))


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("expand", ["q0", "q1", "q2", "k0", "k1", "k2", "v0", "v1", "v2"])
def test_broadcast_views_use_the_same_kernel(expand, rows):
    """TMA accepts a stride of 0."""
    contiguous = Case(
        "bf16", (rows,) * 2, (300,) * 2, heads_kv=2, group=2, head_dim=64, head_dim_v=64
    )
    case = dataclasses.replace(contiguous, expand=expand)
    assert capi.plan(Built(case).attention).why == capi.plan(Built(contiguous).attention).why
    check(case, backward=rows > 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("page_size", [0, 16])
def test_broadcast_kv_heads_are_read_once(page_size, rows, dtype):
    """A forward reads such heads once; a backward has separate gradients for each."""
    case = Case(dtype, (rows,) * 2, (40, 40), group=6, head_dim=64, head_dim_v=48, window=(9, 0),
                softcap=5.0 if rows > 1 else 0.0, used_k=(40, 21), page_size=page_size)  # fmt: skip
    b = Built(case)
    want, why = run(b, backward=False), capi.plan(b.attention).why
    b.attention.heads_kv = 3
    b.attention.k.stride_head = b.attention.v.stride_head = 0
    got = run(b, backward=False)
    assert capi.plan(b.attention).why == why
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)
    check(case, backward=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 17, 64, 256])
def test_pages_of_any_size_shuffled_and_shared(page_size, dtype):
    base = Case(
        dtype, (5, 5, 5), (100, 100, 100), page_size=page_size, used_k=(100, 1, 67),
        heads_kv=2, group=4, window=(-1, 0),
    )  # fmt: skip
    check(base)
    check(Case(**{**base.__dict__, "share_pages": True, "leftpad": (0, 1, 33), "alibi": "h"}))
    check(Case(**{**base.__dict__, "rows": (5, 0, 90), "varlen_q": True, "dropout_p": 0.2}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_rows_by_index(dtype):
    check(Case(dtype, (2, 2, 2), (70, 70, 70), kv_idx=(2, 4, 2), used_k=(70, 9, 33), group=2))


def test_one_buffer_for_q_k_v_and_interleaved_outputs():
    """Self-attention on one packed [B, S, 3, H, D] tensor; gradients are written into another."""
    packed = devices.put(torch.randn(2, 45, 3, 4, 32))
    grads = torch.full_like(packed, torch.nan)
    b = Built(Case(rows=(45, 45), keys=(45, 45), heads_kv=4, head_dim=32, head_dim_v=32))
    b.q, b.k, b.v = packed.unbind(2)
    for name in "qkv":
        setattr(b.attention, name, capi.tensor(getattr(b, name)))
    want = b.expected()
    g = b.gradients()
    for name, x in zip("qkv", grads.unbind(2), strict=True):
        setattr(g, f"d{name}", capi.tensor(x))
    for place in capi.targets():
        with capi.on(place):
            capi.forward(b.attention)
            capi.backward(b.attention, g)
        for name, x in zip("qkv", grads.unbind(2), strict=True):
            target = getattr(want, f"d{name}")
            error = np.abs(flat(x) - target).max()
            assert error < 1e-6 * np.abs(target).max(), (place, name, error)


def test_negative_strides():
    """A reversed view, as NumPy makes it: data points at the last row."""
    b = Built(Case(rows=(30,), keys=(41,), heads_kv=2, group=2, deterministic=True))
    want = run(b)
    for name in ("q", "k", "v"):
        x = getattr(b, name)
        x.copy_(x.flip(1).clone())
        view = getattr(b.attention, name)
        view.data = x[:, -1].data_ptr()
        view.stride_row = -view.stride_row
    got = run(b)
    assert np.array_equal(got.out, want.out) and np.array_equal(got.lse, want.lse)
    for name, values in got.grads.items():
        assert np.array_equal(values, want.grads[name]), name


def test_cu_seqlens_k_gives_the_lengths_with_pages():
    """With a block table, cu_seqlens_k gives the lengths of the sequences, like seqused_k."""
    base = Case(rows=(3, 3, 3), keys=(20, 20, 20), page_size=8, used_k=(17, 0, 20), group=2)
    b = Built(base)
    want = run(b)
    b.meta["cu_seqlens_k"] = int32([0, 17, 17, 37])
    b.attention.seqused_k = None
    b.attention.cu_seqlens_k = b.meta["cu_seqlens_k"].data_ptr()
    got = run(b)
    for given, wanted in [(got.out, want.out), *((got.grads[n], want.grads[n]) for n in got.grads)]:
        # On a GPU the plan may differ: it knows either the capacity or the total length.
        allowed = 0 if devices.current().name == "cpu" else 1e-6 * np.abs(wanted).max()
        assert np.abs(given - wanted).max() <= allowed


def far_apart(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    views: int,
    step: int,
    much_memory: Callable[[int], None],
) -> list[torch.Tensor]:
    """fp32 views with these strides in one allocation, each `step` elements after the one before.
    On the host, memory is reserved and only committed where it is written; a GPU has to have all of
    it."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + views * step
    if devices.current().memory.type == "cuda":
        much_memory(4 * count + 2**31)
        area = torch.empty(count, device="cuda")
    else:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        area = torch.from_numpy(np.frombuffer(mmap.mmap(-1, 4 * count, flags=flags), np.float32))
    return [area[i * step :].as_strided(shape, strides, i * step) for i in range(views)]


@pytest.mark.parametrize("which", ["batch", "row", "head"])
def test_more_than_two_to_the_31_elements(which, much_memory):
    """Offsets beyond 2^31 in every tensor, forward and backward: index arithmetic is 64-bit."""
    far = 2**31 // 3 + 12345  # 4 steps exceed 2^31, and one step exceeds 2^32 bytes
    n, heads = 5, 5
    batch = 5 if which == "batch" else 1
    case = Case(rows=(n,) * batch, keys=(n,) * batch, heads_kv=heads, window=(-1, 0))
    b = Built(case)
    want = b.expected()
    shape = (batch, n, heads, 8)
    strides = {
        "batch": (far, 8 * heads, 8, 1),
        "row": (8, far, 8, 1),
        "head": (8, 8, far, 1),
    }[which]
    names = ("q", "k", "v", "out", "dq", "dk", "dv")
    far_views = far_apart(shape, strides, len(names), 256, much_memory)
    views = dict(zip(names, far_views, strict=True))
    g = b.gradients()
    for name in "qkv":
        views[name].copy_(getattr(b, name))
        setattr(b.attention, name, capi.tensor(views[name]))
        setattr(g, f"d{name}", capi.tensor(views[f"d{name}"]))
    b.attention.out = capi.tensor(views["out"])
    for place in capi.targets():
        with capi.on(place):
            capi.forward(b.attention)
            capi.backward(b.attention, g)
        for name in ("out", "dq", "dk", "dv"):
            target = getattr(want, name)
            error = np.abs(flat(views[name]) - target).max()
            assert error < 1e-6 * np.abs(target).max(), (place, name, error)
            views[name].fill_(torch.nan)


def test_bias_beyond_two_to_the_31_elements(much_memory):
    rows, keys = 6, 9
    b = Built(Case(rows=(rows,), keys=(keys,), heads_kv=2, bias="hr"))
    want = b.expected()
    far = 2**31 // 4 + 999
    bias, dbias = far_apart((1, 2, rows, keys), (0, keys, far, 1), 2, 64, much_memory)
    assert b.bias is not None
    bias.copy_(b.bias)
    b.attention.bias, b.attention.bias_stride_head = bias.data_ptr(), keys
    b.attention.bias_stride_row = far
    g = b.gradients()
    g.dbias, g.dbias_stride_head, g.dbias_stride_row = dbias.data_ptr(), keys, far
    for place in capi.targets():
        with capi.on(place):
            capi.forward(b.attention)
            capi.backward(b.attention, g)
        assert np.abs(flat(b.out.view) - want.out).max() < 1e-6 * np.abs(want.out).max()
        assert want.dbias is not None
        assert np.abs(float64(dbias) - want.dbias).max() < 1e-6 * np.abs(want.dbias).max()
        dbias.fill_(torch.nan)


def test_lse_may_be_null_in_forward():
    b = Built(Case(rows=(20,), keys=(30,), group=2, window=(-1, 0)))
    want = run(b, backward=False)
    b.attention.lse = b.attention.lse_low = None
    b.out.poison()
    capi.forward(b.attention)
    assert np.array_equal(flat(b.out.view), want.out)


def test_older_and_newer_struct_sizes():
    """A longer struct is accepted while its unknown bytes are 0, and refused otherwise."""
    b = Built(Case(rows=(4,), keys=(6,)))
    size = ctypes.sizeof(capi.Attention)
    raw = (ctypes.c_uint8 * (size + 32))()
    longer = ctypes.cast(raw, ctypes.POINTER(capi.Attention))
    ctypes.memmove(raw, ctypes.byref(b.attention), size)
    longer.contents.struct_size = size + 32
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    plan = capi.library().tilewise_plan
    assert plan(longer, None, capi.FORWARD, ctypes.byref(info)) == capi.OK, capi.last_error()
    raw[size + 5] = 1
    assert plan(longer, None, capi.FORWARD, ctypes.byref(info)) == capi.INVALID_ARGUMENT
    assert f"byte {size + 5} " in capi.last_error()
