"""masks.from_bool: dense matrices as lists of blocks, on the host and by operations of PyTorch."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import tilewise  # noqa: E402
from tilewise import _block_lists, _block_tensors, masks  # noqa: E402

LENGTHS = st.sampled_from((1, 31, 127, 128, 129, 256, 300))


def same(ours: masks.Blocks, other: masks.Blocks) -> bool:
    """Whether both show the same with the same entries; equal bits may have other indices."""
    a, b = ours.on_host(), other.on_host()
    return (
        np.array_equal(a.first, b.first)
        and np.array_equal(a.entries[:, :2], b.entries[:, :2])
        and np.array_equal(a.entries[:, 2] < 0, b.entries[:, 2] < 0)
        and a.bits.shape == b.bits.shape
        and np.array_equal(a.to_bool(), b.to_bool())
    )


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2), heads=st.integers(1, 2), rows=LENGTHS, keys=LENGTHS,
    kind=st.sampled_from(("random", "causal", "documents", "all", "none")), seed=st.integers(0, 99),
)  # fmt: skip
def test_operations_of_pytorch_make_the_lists_of_the_host(batch, heads, rows, keys, kind, seed):
    i, j = torch.arange(rows)[:, None], torch.arange(keys)
    generator = torch.Generator().manual_seed(seed)
    dense = {
        "random": torch.rand(batch, heads, rows, keys, generator=generator) < 0.2,
        "causal": (j <= i).expand(batch, heads, -1, -1),
        "documents": (i // 130 == j // 130).expand(batch, heads, -1, -1),
        "all": torch.ones(batch, heads, rows, keys, dtype=torch.bool),
        "none": torch.zeros(batch, heads, rows, keys, dtype=torch.bool),
    }[kind]
    on_host = masks.from_bool(dense)
    assert np.array_equal(on_host.to_bool(), dense.numpy())
    lists = _block_tensors.lists_of(dense)
    made = masks.Blocks(*lists, rows=rows, keys=keys, heads=heads)
    assert same(made, on_host) and same(masks.from_bool(dense.numpy()), on_host)
    share = pytest.approx((on_host.tiles() > 0).mean())
    assert _block_tensors.visible_share(dense) == share
    assert _block_lists.visible_share(dense.numpy()) == share


@pytest.mark.tensors
@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_of_tensors_stays_on_their_device(heads):
    dense = torch.rand(2, heads, 300, 260) < 0.3
    dense[:, :, :256, 128:] = False  # hidden blocks
    dense[1, :, 128:256, :128] = True  # full ones
    mask = masks.from_bool(dense)
    assert mask.first.device == dense.device
    assert same(mask, masks.from_bool(dense.cpu().numpy()))
    assert _block_tensors.visible_share(dense) == pytest.approx((mask.on_host().tiles() > 0).mean())
    dtype = torch.bfloat16 if dense.is_cuda else torch.float32
    q, k, v = (torch.randn(2, n, 4, 64, dtype=dtype) for n in (300, 260, 260))
    out = tilewise.attention(q, k, v, mask=mask)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) / 8
    weights = scores.masked_fill(~dense, -torch.inf).softmax(-1).nan_to_num(0.0)
    exact = torch.einsum("bhij,bjhd->bihd", weights, v.double())
    assert float((out.double() - exact).abs().max()) < (2e-2 if dense.is_cuda else 2e-6)


def test_any_byte_but_0_is_true_and_any_strides_are_taken():
    seen = torch.randint(0, 256, (300, 260), dtype=torch.uint8)
    odd = torch.empty(300, 261, dtype=torch.uint8)[:, 1:].copy_(seen)
    for dense in (seen[:, None, None].permute(1, 2, 0, 3), odd[None, None]):
        lists = _block_tensors.lists_of(dense.view(torch.bool))
        made = masks.Blocks(*lists, rows=300, keys=260)
        assert np.array_equal(made.to_bool()[0, 0], seen.numpy() != 0)


def test_blocks_with_one_hash_keep_bits_of_their_own(monkeypatch):
    dense = torch.rand(1, 1, 300, 300) < 0.3
    equal = dense[..., :128, :128].repeat(1, 1, 2, 2)
    assert _block_tensors.lists_of(equal).bits.shape[0] == 1
    monkeypatch.setattr(_block_tensors, "_weights", lambda rows: torch.zeros_like(rows[0]))
    lists = _block_tensors.lists_of(dense)
    made = masks.Blocks(*lists, rows=300, keys=300)
    assert lists.bits.shape[0] == 9 and np.array_equal(made.to_bool()[0, 0], dense[0, 0].numpy())
