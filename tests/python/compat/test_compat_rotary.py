"""Rotary embedding compared with complex multiplication in float64."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import devices  # noqa: E402
from compat_reference import assert_as_good, rotate  # noqa: E402
from tilewise.compat.flash_attn.layers import rotary  # noqa: E402
from tilewise.compat.flash_attn.ops.triton.rotary import apply_rotary  # noqa: E402

pytestmark = pytest.mark.tensors

BATCH, ROWS, HEADS, DIM, POSITIONS = 2, 7, 3, 16, 20


def tables(half, dtype=torch.float32, seed=1):
    angle = torch.rand(POSITIONS, half, generator=devices.generator(seed)) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def exact(x, cos, sin, positions, interleaved):
    return rotate(x.double(), cos.double(), sin.double(), positions, interleaved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 8, 16])
@pytest.mark.parametrize("offsets", [0, 4, "tensor"])
@pytest.mark.parametrize("inplace", [False, True])
def test_dense(dtype, interleaved, rotary_dim, offsets, inplace):
    torch.manual_seed(0)
    x = torch.randn(BATCH, ROWS, HEADS, DIM).to(dtype)
    cos, sin = tables(rotary_dim // 2, dtype)
    if offsets == "tensor":
        offsets = torch.tensor([3, 11], dtype=torch.int32)
        positions = torch.arange(ROWS) + offsets[:, None].long()
    else:
        positions = (torch.arange(ROWS) + offsets).expand(BATCH, ROWS)
    want = exact(x, cos, sin, positions, interleaved)
    plain = rotary.apply_rotary_emb_torch(x, cos[positions], sin[positions], interleaved)
    given, before = x.clone(), x.clone()
    got = rotary.apply_rotary_emb(
        given, cos, sin, interleaved=interleaved, inplace=inplace, seqlen_offsets=offsets
    )
    assert got.dtype == dtype
    assert_as_good(got, plain, want, 2, "rotated")
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    if inplace:
        assert got.data_ptr() == given.data_ptr()
    else:
        assert torch.equal(given, before)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("with_offsets", [False, True])
def test_variable_length(interleaved, with_offsets):
    torch.manual_seed(0)
    lengths = [3, 0, 5, 1]
    cu_seqlens = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
    x = torch.randn(11, HEADS, DIM)  # two rows belong to no sequence
    cos, sin = tables(4)
    offsets = torch.tensor([2, 9, 0, 15]) if with_offsets else 0
    got = rotary.apply_rotary_emb(
        x,
        cos,
        sin,
        interleaved=interleaved,
        seqlen_offsets=offsets,
        cu_seqlens=cu_seqlens,
        max_seqlen=5,
    )
    starts = offsets.tolist() if with_offsets else [0] * 4
    positions = torch.cat([torch.arange(n) + s for n, s in zip(lengths, starts, strict=True)])
    want = exact(x[:9], cos, sin, positions, interleaved)
    assert_as_good(got[:9], None, want, 2, "rotated")
    assert torch.equal(got[9:], x[9:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradient(interleaved, inplace):
    x = torch.randn(BATCH, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(2, torch.float64)
    offsets = torch.tensor([1, 5])

    def rotated(x):
        given = x.clone() if inplace else x
        return rotary.apply_rotary_emb(
            given, cos, sin, interleaved, inplace=inplace, seqlen_offsets=offsets
        )

    assert torch.autograd.gradcheck(rotated, x)


def test_slices_of_a_projection_are_rotated_in_place():
    """unbind returns views that autograd forbids ordinary in-place operations to modify."""
    cos, sin = tables(4, torch.float64)
    base = torch.randn(1, 3, 3, 2, 8, dtype=torch.float64, requires_grad=True)

    def slices(x, inplace):
        q, k, v = (x * 1.0).unbind(2)
        q, k = (rotary.apply_rotary_emb(y, cos, sin, inplace=inplace) for y in (q, k))
        return torch.stack((q, k, v), dim=2)

    assert torch.equal(slices(base, True), slices(base, False))
    assert torch.autograd.gradcheck(lambda x: slices(x, True), base)


def test_conjugate_inverts_the_rotation():
    x = torch.randn(BATCH, ROWS, HEADS, DIM)
    cos, sin = tables(8)
    turned = apply_rotary(x, cos, sin, 3)
    assert not torch.allclose(turned, x, atol=0.1)
    back = apply_rotary(turned, cos, sin, 3, conjugate=True)
    assert torch.allclose(back, x, atol=1e-6)


def test_rows_past_the_tables_are_unchanged():
    x = torch.randn(1, 4, 1, 4)
    cos, sin = tables(2)
    got = apply_rotary(x, cos, sin, torch.tensor([POSITIONS - 2]))
    assert torch.equal(got[:, 2:], x[:, 2:])
    assert not torch.equal(got[:, :2], x[:, :2])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packing", ["three", "heads"])
def test_packed_qkv(interleaved, packing):
    torch.manual_seed(0)
    heads_q, heads_kv = (HEADS, HEADS) if packing == "three" else (4, 2)
    q, k, v = (torch.randn(BATCH, ROWS, h, DIM) for h in (heads_q, heads_kv, heads_kv))
    cos, sin = tables(4)
    cos_k, sin_k = tables(4, seed=2)
    qkv = torch.stack((q, k, v), dim=2) if packing == "three" else torch.cat((q, k, v), dim=2)
    qkv.requires_grad_()
    got = rotary.apply_rotary_emb_qkv_(
        qkv.clone(), cos, sin, cos_k, sin_k, interleaved, 2, None if packing == "three" else heads_q
    )
    positions = (torch.arange(ROWS) + 2).expand(BATCH, ROWS)
    parts = got.unbind(2) if packing == "three" else got.split((heads_q, heads_kv, heads_kv), dim=2)
    wanted = (
        exact(q, cos, sin, positions, interleaved),
        exact(k, cos_k, sin_k, positions, interleaved),
        v.double(),
    )
    for part, want, name in zip(parts, wanted, "qkv", strict=True):
        assert_as_good(part.detach(), None, want, 2, name)
    # A rotation preserves lengths, so d(sum of squares / 2) is the input itself.
    (gradient,) = torch.autograd.grad((got * got.detach()).sum(), qkv)
    assert torch.allclose(gradient, qkv.detach(), atol=1e-5)


def test_packed_kv_rotates_only_k():
    kv = torch.randn(BATCH, ROWS, 2, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(4, torch.float64)
    got = rotary.apply_rotary_emb_kv_(kv.clone(), cos, sin, seqlen_offsets=1)
    positions = (torch.arange(ROWS) + 1).expand(BATCH, ROWS)
    want = exact(kv[:, :, 0].detach(), cos, sin, positions, False)
    assert torch.allclose(got[:, :, 0], want) and torch.equal(got[:, :, 1], kv[:, :, 1])
    assert torch.autograd.gradcheck(
        lambda x: rotary.apply_rotary_emb_kv_(x.clone(), cos, sin, seqlen_offsets=1), kv
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding_module(interleaved):
    torch.manual_seed(0)
    module = rotary.RotaryEmbedding(8, base=100.0, interleaved=interleaved)
    assert not list(module.parameters()) and not module.state_dict()
    qkv = torch.randn(BATCH, ROWS, 3, HEADS, DIM)
    frequency = 100.0 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.outer(torch.arange(POSITIONS).float(), frequency).double()
    positions = (torch.arange(ROWS) + 5).expand(BATCH, ROWS)
    wanted = [
        exact(qkv[:, :, i], angle.cos(), angle.sin(), positions, interleaved) for i in range(2)
    ]
    got = module(qkv.clone(), seqlen_offset=5)
    for i in range(2):
        assert torch.allclose(got[:, :, i].double(), wanted[i], atol=2e-6)
    assert torch.equal(got[:, :, 2], qkv[:, :, 2])
    offsets = torch.tensor([5, 5])
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), offsets, max_seqlen=POSITIONS)
    assert torch.allclose(q.double(), wanted[0], atol=2e-6)
    assert torch.allclose(kv[:, :, 0].double(), wanted[1], atol=2e-6)


def test_positions_are_exact_in_a_half_precision_module():
    module = rotary.RotaryEmbedding(4).to(torch.bfloat16)
    module._update_cos_sin_cache(1024, device=torch.get_default_device(), dtype=torch.float32)
    frequency = torch.tensor([1.0, 0.01])
    want = torch.outer(torch.arange(1024).float(), frequency).cos()
    assert torch.allclose(module._cos_cached, want, atol=1e-5)


@pytest.mark.parametrize("scale_base", [None, 16])
def test_threads_share_a_module(scale_base):
    """Calls with other lengths and dtypes replace the tables, but not those of a call in flight."""
    module = rotary.RotaryEmbedding(8, scale_base=scale_base).eval()
    device = torch.get_default_device()  # of this thread
    start = threading.Barrier(4)
    types = (torch.float32, torch.bfloat16)

    def ones(rows, dtype):
        return torch.ones(1, rows, 3, 1, 8, dtype=dtype, device=device)

    alone = rotary.RotaryEmbedding(8).eval()
    wanted = {(rows, dtype): alone(ones(rows, dtype)) for rows in range(1, 41) for dtype in types}

    def rotate_many(thread):
        start.wait()
        dtype = types[thread % 2]
        for step in range(300):
            rows = 1 + (7 * step + thread) % 40
            got = module(ones(rows, dtype))
            # With a scale_base the numbers depend on the length of the table.
            assert scale_base is not None or torch.equal(got, wanted[rows, dtype])
        return True

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(rotate_many, range(4)))
    finally:
        sys.setswitchinterval(interval)


def test_scale_base_cancels_between_q_and_k():
    """XPos: the product of q at i and k at j decays with i - j and does not depend on i."""
    module = rotary.RotaryEmbedding(8, scale_base=16)
    qkv = torch.ones(1, 6, 3, 1, 8, dtype=torch.float64)
    got = module(qkv.clone())
    products = torch.einsum("qd,kd->qk", got[0, :, 0, 0], got[0, :, 1, 0])
    for distance in range(6):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5)
    evens = torch.arange(0, 8, 2).double()
    scale = (evens + 0.4 * 8) / (1.4 * 8)
    frequency = 10000.0 ** (-evens / 8)
    want = sum(2 * scale ** (3 / 16) * torch.cos(3 * frequency))
    assert torch.allclose(products[3, 0], want, rtol=1e-5)


def test_refusals_name_the_argument():
    x = torch.randn(1, 4, 2, 8)
    cos, sin = tables(4)
    with pytest.raises(ValueError, match="cos has 20 positions"):
        apply_rotary(x, cos, sin, 17)
    with pytest.raises(ValueError, match="rotary_dim is 16"):
        apply_rotary(x, *tables(8))
    with pytest.raises(ValueError, match="sin"):
        apply_rotary(x, cos, sin[:3])
    with pytest.raises(ValueError, match="max_seqlen"):
        apply_rotary(x[0], cos, sin, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="dimensions"):
        apply_rotary(x[0], cos, sin)
    with pytest.raises(ValueError, match="num_heads_q"):
        rotary.apply_rotary_emb_qkv_(x, cos, sin)
    with pytest.raises(ValueError, match="kv has shape"):
        rotary.apply_rotary_emb_kv_(x, cos, sin)
    with pytest.raises(ValueError, match="max_seqlen"):
        rotary.RotaryEmbedding(8)(torch.randn(1, 4, 3, 2, 8), seqlen_offset=torch.tensor([1]))
