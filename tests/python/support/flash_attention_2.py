"""Runs models with attn_implementation="flash_attention_2", the name that existing programs use,
and the flash-attn distribution of packages/flash-attn-shim. test_flash_attn_shim.py runs this file
in a process that has the distribution on its path.

Without a GPU, Transformers is told that there is one, because its own checks are part of the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models
import tilewise.compat.flash_attn as ours

hf_models.require("transformers>=5.20", "flash_attn")

pytestmark = hf_models.MARKS
LENGTH, NEW = 20, 12
TOLERANCE = 1e-5  # of the largest number; measured: 1e-6
NAMES = ["llama", "mistral_window", "gemma2_softcap_window"]


@pytest.fixture(autouse=True)
def _a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    yield
    from transformers import modeling_flash_attention_utils as utils

    assert utils._flash_fn is ours.flash_attn_func, "attention was not computed by Tilewise"
    assert utils._flash_varlen_fn is ours.flash_attn_varlen_func


def under_both(model: Any, compute: Any) -> tuple[Any, Any]:
    """Results (eager, flash_attention_2) of a computation with the model."""
    eager = compute(hf_models.with_attention(model, "eager"))
    given = compute(hf_models.with_attention(model, "flash_attention_2"))
    assert model.config._attn_implementation == "flash_attention_2"
    return eager, given


def step(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that are not padding, and gradients of their mean square."""
    model.zero_grad()
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    logits = model(ids, attention_mask=mask, use_cache=False).logits[kept]
    logits.float().pow(2).mean().backward()
    return logits.detach(), hf_models.gradients(model)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_training_step(name: str, padding: str) -> None:
    ids, mask = hf_models.tokens(3, LENGTH), hf_models.paddings(3, LENGTH)[padding]
    (logits, grads), (our_logits, our_grads) = under_both(
        hf_models.decoder(name), lambda model: step(model, ids, mask)
    )
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_eager(dtype: torch.dtype) -> None:
    """Logits are at most twice as far from fp32 as eager's, gradients three times."""
    ids, mask = hf_models.tokens(3, LENGTH), hf_models.paddings(3, LENGTH)["left"]
    exact = step(hf_models.decoder("llama"), ids, mask)
    both = under_both(hf_models.decoder("llama").to(dtype), lambda model: step(model, ids, mask))
    for factor, right, eager, given in zip((2.0, 3.0), exact, *both, strict=True):
        bound = factor * float((eager.float() - right).abs().max())
        assert float((given.float() - right).abs().max()) <= bound


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", NAMES)
def test_generated_tokens_equal_those_of_eager(name: str, padding: str) -> None:
    ids, mask = hf_models.tokens(3, LENGTH), hf_models.paddings(3, LENGTH)[padding]
    mask = torch.ones_like(ids) if mask is None else mask
    expected, given = under_both(
        hf_models.decoder(name),
        lambda model: model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        ),
    )  # fmt: skip
    assert torch.equal(given, expected)
    assert len(expected[:, LENGTH:].unique()) > 4, (
        "the text is too repetitive to reveal a difference"
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("boundaries", [False, True])
def test_packed_sequences(name: str, boundaries: bool) -> None:
    """Sequences packed by position_ids that restart at 0, and also with explicit boundaries, as a
    data collator makes them."""
    lengths = (9, 1, 13, 4)
    sequences = [hf_models.tokens(length) for length in lengths]
    packed: dict[str, Any] = dict(
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None]
    )
    if boundaries:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        packed.update(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=13, max_length_k=13)

    def run(model: Any) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        if model.config._attn_implementation == "eager":  # sequence by sequence
            parts = [model(ids[None], use_cache=False).logits[0] for ids in sequences]
            logits = torch.cat(parts)
        else:
            logits = model(torch.cat(sequences)[None], use_cache=False, **packed).logits[0]
        logits.pow(2).mean().backward()
        return logits.detach(), hf_models.gradients(model)

    (logits, grads), (our_logits, our_grads) = under_both(hf_models.decoder(name), run)
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE
