"""Sinks of each row, a logit beside the keys that has no value (Inkling 2), under every mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20")

from transformers import masking_utils  # noqa: E402

import tilewise.hf  # noqa: E402

pytestmark = hf_models.MARKS
ROWS = 6
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 0, 0, 0]]).bool()
HOLE = torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6, [1] * 6]).bool()
CALLS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padded": dict(attention_mask=PADDING),
    "hole": dict(attention_mask=HOLE),
    "window": dict(mask_function=masking_utils.sliding_window_causal_mask_function(3)),
    "bidirectional": dict(mask_function=masking_utils.bidirectional_mask_function),
}


def masks(name: str) -> tuple[Tensor, Tensor]:
    """Tilewise's mask and that of eager attention."""
    call: dict[str, Any] = dict(batch_size=3, q_length=ROWS, kv_length=ROWS) | CALLS[name]
    call["device"] = torch.get_default_device()
    if "attention_mask" in call:
        call["attention_mask"] = call["attention_mask"].to(call["device"])
    return tilewise.hf.create_mask(**call), masking_utils.eager_mask(**call)


def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = True
    return module


def leaves(dtype: torch.dtype = torch.float32, batch: int = 3) -> list[Tensor]:
    """q, k, v and sinks, of which some take most of the weight."""
    torch.manual_seed(6)
    q, sinks = torch.randn(batch, 4, ROWS, 8), 3 * torch.randn(batch, 4, ROWS, 1)
    made = q, *torch.randn(2, batch, 2, ROWS, 8), sinks
    return [x.to(dtype).requires_grad_() for x in made]


def plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, added: Any) -> Tensor:
    """Attention in fp64; the mask is added to the scores."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = q.double() @ k.mT / q.shape[-1] ** 0.5 + added
    weights = torch.cat([scores, sinks.double()], -1).softmax(-1)[..., :-1]
    return (weights @ v).transpose(1, 2)


def agree(given: Tensor, expected: Tensor, tensors: list[Tensor], seen: Tensor) -> None:
    """Compares the outputs of rows that are tokens, and the gradients of the tensors."""
    given, expected = given * seen, expected * seen
    assert float((given - expected).abs().max()) < 3e-6
    weights = torch.randn_like(expected)
    ours, theirs = (torch.autograd.grad((x * weights).sum(), tensors) for x in (given, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).abs().max()) < 3e-6 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_layer_equals_eager_attention(name: str, biased: bool) -> None:
    ours, eager = masks(name)
    q, k, v, sinks = leaves()
    bias = torch.randn(1, 4, ROWS, ROWS) if biased else torch.zeros(())
    given = dict(position_bias=bias) if biased else {}
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, sinks=sinks, **given)
    expected = plain(q, k, v, sinks, eager.double() + bias.double())
    seen = eager[:, 0].diagonal(0, -2, -1) == 0  # rows of tokens, which see themselves
    agree(out, expected, [q, k, v, sinks], seen.expand(3, ROWS)[..., None, None])
    with torch.no_grad():  # a layer that could take the fast path
        again, _ = tilewise.hf.attention(layer(), q, k, v, ours, sinks=sinks, **given)
    assert torch.allclose(again, out, atol=1e-6)


@pytest.mark.parametrize("how", ["cu_seq_lens", "position_ids"])
def test_packed_sequences(how: str) -> None:
    q, k, v, sinks = leaves(batch=1)
    boundaries = torch.tensor([0, 4, 6], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1]])
    given: dict[str, Any] = dict(position_ids=positions)
    if how == "cu_seq_lens":
        given = dict(cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries)
    out, _ = tilewise.hf.attention(layer(), q, k, v, None, sinks=sinks, **given)
    document = torch.tensor([0, 0, 0, 0, 1, 1])
    row = torch.arange(ROWS)
    seen = (document[:, None] == document) & (row[:, None] >= row)
    added = torch.zeros(ROWS, ROWS).masked_fill(~seen, -torch.inf).double()
    agree(out, plain(q, k, v, sinks, added), [q, k, v, sinks], torch.ones(()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    ours, eager = masks("causal")
    q, k, v, sinks = (x.detach() for x in leaves(dtype))
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, sinks=sinks)
    assert out.dtype == dtype
    expected = plain(q, k, v, sinks, eager.double())
    assert float((out - expected).abs().max()) < 4 * torch.finfo(dtype).eps


def test_a_row_of_padding_is_zero_and_has_no_gradient() -> None:
    ours, _ = masks("padded")
    q, k, v, sinks = leaves()
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, sinks=sinks)
    grads = torch.autograd.grad(out.sum(), (q, sinks))
    assert not bool(out[0, :2].any())
    assert all(not bool(x[0, :, :2].any()) and bool(x.isfinite().all()) for x in grads)


@pytest.mark.tensors("cpu")  # nothing is computed
def test_refusals() -> None:
    q, k, v, sinks = leaves()
    expected = r"sinks has shape \[4\], but must be .*here \[3, 4, 6, 1\]; .* is named s_aux"
    with pytest.raises(ValueError, match=expected):
        tilewise.hf.attention(layer(), q, k, v, None, sinks=sinks[0, :, 0, 0])
    with pytest.raises(ValueError, match="sinks is given with block_table"):
        tilewise.hf.attention(layer(), q, k, v, None, sinks=sinks, block_table=torch.zeros(1, 1))
