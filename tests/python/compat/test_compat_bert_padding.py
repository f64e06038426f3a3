"""Removing and restoring padding: shapes, values, metadata, gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import devices  # noqa: E402
from tilewise.compat.flash_attn import bert_padding as padding  # noqa: E402

pytestmark = pytest.mark.tensors


def some_mask(batch=4, seqlen=9, seed=0):
    generator = devices.generator(seed)
    return torch.rand(batch, seqlen, generator=generator) < 0.6


@pytest.mark.parametrize("shape", [(5,), (3, 8), ()])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_round_trip(shape, mask_dtype):
    mask = some_mask()
    x = torch.randn(*mask.shape, *shape)
    packed, indices, cu_seqlens, longest, seqused = padding.unpad_input(x, mask.to(mask_dtype))
    assert torch.equal(packed, x[mask])
    assert torch.equal(indices, mask.flatten().nonzero().flatten())
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, *mask.sum(1).cumsum(0).tolist()]
    assert longest == mask.sum(1).max().item() and isinstance(longest, int)
    assert torch.equal(seqused, mask.sum(1).int())
    back = padding.pad_input(packed, indices, *mask.shape)
    keep = mask.reshape(*mask.shape, *(1 for _ in shape))
    assert torch.equal(back, x * keep)


def test_unused_tokens_keep_their_positions():
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0, 0], [0, 1, 1, 0, 0]])
    x = torch.randn(2, 5, 3)
    packed, indices, cu_seqlens, longest, seqused = padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 5, 6, 7]
    assert cu_seqlens.tolist() == [0, 3, 6]
    assert longest == 3
    assert seqused.tolist() == [2, 1]
    assert torch.equal(packed, x.flatten(0, 1)[indices])


def test_all_tokens_are_padding():
    x = torch.randn(2, 3, 4)
    packed, indices, cu_seqlens, longest, _ = padding.unpad_input(x, torch.zeros(2, 3, dtype=bool))
    assert packed.shape == (0, 4) and longest == 0 and cu_seqlens.tolist() == [0, 0, 0]
    assert torch.equal(padding.pad_input(packed, indices, 2, 3), torch.zeros(2, 3, 4))


def test_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    packed, indices, cu_seqlens, longest = padding.unpad_input_for_concatenated_sequences(
        x, lengths
    )
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16] and cu_seqlens.dtype == torch.int32
    assert longest == 6
    assert torch.equal(packed, torch.cat((x[0, :5], x[1, :5], x[2])))
    expected = x.clone()
    expected[:2, 5] = 0
    assert torch.equal(padding.pad_input(packed, indices, 3, 6), expected)


def test_gradients_by_finite_differences():
    mask = some_mask(2, 4, seed=3)
    indices = mask.flatten().nonzero().flatten()
    x = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(indices.numel(), 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: padding.index_first_axis(x, indices), x)
    assert torch.autograd.gradcheck(lambda y: padding.index_put_first_axis(y, indices, 8), values)
    assert torch.autograd.gradcheck(lambda x: padding.index_first_axis_residual(x, indices), x)


def test_gradient_of_the_round_trip_is_the_mask():
    mask = some_mask()
    x = torch.randn(*mask.shape, 2, 3, requires_grad=True)
    packed, indices, *_ = padding.unpad_input(x, mask)
    padding.pad_input(packed, indices, *mask.shape).sum().backward()
    assert torch.equal(x.grad, mask[:, :, None, None].expand_as(x).float())


def test_wrong_shapes_name_the_argument():
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match="attention_mask"):
        padding.unpad_input(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="attention_mask_in_length"):
        padding.unpad_input_for_concatenated_sequences(x, torch.ones(3, 3))
    with pytest.raises(ValueError, match="input"):
        padding.index_first_axis(torch.ones(4), torch.tensor([1]))
    with pytest.raises(ValueError, match="indices"):
        padding.index_put_first_axis(torch.ones(1, 2), torch.tensor([[1]]), 4)
