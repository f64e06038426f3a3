"""Tiny random decoders through Transformers: logits, gradients and masks, compared with eager."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20")

import tilewise.hf  # noqa: E402
from tilewise.integrations._masks import prefers_masks  # noqa: E402
from tilewise.integrations.transformers import _attention  # noqa: E402
from tilewise.integrations.transformers._compact import CompactMask  # noqa: E402

pytestmark = hf_models.MARKS
LENGTH = 20
TOLERANCE = 1e-5  # of the largest number; measured: 1e-6


@pytest.fixture
def masks() -> Iterator[list[Tensor | None]]:
    with hf_models.recorded_masks() as seen:
        yield seen


def rows_times_keys(mask: Tensor | None) -> bool:
    """Whether it is a full rows x keys mask, rather than a compact one."""
    return mask is not None and (not isinstance(mask, CompactMask) or bool(mask._dense))


def logits_and_gradients(model: Any, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and gradients of the rows that are tokens."""
    model.zero_grad()
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()
    logits = model(ids, attention_mask=mask, use_cache=False).logits[kept]
    logits.pow(2).mean().backward()
    return logits.detach(), hf_models.gradients(model)


@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "hole"])
@pytest.mark.parametrize("name", list(hf_models.DECODERS))
def test_logits_and_gradients(name: str, padding: str, masks: list[Tensor | None]) -> None:
    model, ids = hf_models.decoder(name), hf_models.tokens(3, LENGTH)
    mask = hf_models.paddings(3, LENGTH)[padding]
    (logits, grads), (our_logits, our_grads) = hf_models.under_both(
        model, lambda m: logits_and_gradients(m, ids, mask)
    )
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE
    assert masks, "attention was not computed by Tilewise"
    if name != hf_models.CHUNKED or prefers_masks(ids.device, torch.float32):
        assert not any(map(rows_times_keys, masks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_eager(dtype: torch.dtype) -> None:
    ids, mask = hf_models.tokens(3, LENGTH), hf_models.paddings(3, LENGTH)["left"]
    exact, _ = logits_and_gradients(hf_models.decoder("llama"), ids, mask)
    model = hf_models.decoder("llama").to(dtype)
    (eager, _), (ours, _) = hf_models.under_both(
        model, lambda m: logits_and_gradients(m, ids, mask)
    )
    error = [float((x.float() - exact).abs().max()) for x in (eager, ours)]
    assert error[1] <= 2.0 * error[0]


# --- the fast path of a layer ---------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap_window"])
def test_fast_and_general_path_agree_bitwise(
    name: str, rows: int, padding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids = hf_models.decoder(name, "tilewise"), hf_models.tokens(3, LENGTH + rows)
    mask = hf_models.paddings(3, LENGTH + rows)[padding]
    real, taken = _attention._fast_path, []

    def step() -> Tensor:
        """Runs some tokens after a cache."""
        with torch.no_grad():
            seen = None if mask is None else mask[:, :LENGTH]
            cache = model(ids[:, :LENGTH], attention_mask=seen).past_key_values
            taken.clear()
            return model(ids[:, LENGTH:], attention_mask=mask, past_key_values=cache).logits

    monkeypatch.setattr(_attention, "_fast_path", lambda *a: taken.append(real(*a)) or taken[-1])
    short = step()
    assert [x is not None for x in taken] == [True] * model.config.num_hidden_layers
    monkeypatch.setattr(_attention, "_fast_path", lambda *_: None)
    assert torch.equal(step(), short)


# --- packed sequences -----------------------------------------------------------------------------


def one_by_one(model: Any, sequences: list[Tensor]) -> Tensor:
    return torch.cat([model(ids[None], use_cache=False).logits[0] for ids in sequences])


# GPT-OSS does not pass its positions to the mask function, whichever attention is used.
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "position_ids"),
        ("mistral_window", "position_ids"),
        ("gpt2", "cu_seq_lens"),
        ("llama", "both"),
        ("gpt_oss_sinks_window", "both"),
    ],
)
def test_packed_sequences(name: str, how: str, masks: list[Tensor | None]) -> None:
    lengths = (9, 1, 13, 4)
    sequences = [hf_models.tokens(length) for length in lengths]
    expected = one_by_one(hf_models.decoder(name, "eager"), sequences)
    arguments: dict[str, Any] = dict(
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None]
    )
    if how != "position_ids":
        boundaries = torch.tensor([0, *torch.tensor(lengths).cumsum(0)])
        arguments.update(
            cu_seq_lens_q=boundaries, cu_seq_lens_k=boundaries, max_length_q=13, max_length_k=13
        )
    model = hf_models.decoder(name, "tilewise")
    given = model(torch.cat(sequences)[None], use_cache=False, **arguments).logits[0]
    assert hf_models.relative(given, expected) < TOLERANCE
    assert not any(map(rows_times_keys, masks))


def test_packed_sequences_in_several_rows() -> None:
    ids, lengths = hf_models.tokens(2, 12), ((5, 7), (12,))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    model = hf_models.decoder("mistral_window")

    def run(m: Any) -> tuple[Tensor, Tensor]:
        m.zero_grad()
        logits = m(ids, position_ids=positions, use_cache=False).logits
        logits.pow(2).mean().backward()
        return logits.detach(), hf_models.gradients(m)

    (logits, grads), (our_logits, our_grads) = hf_models.under_both(model, run)
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert hf_models.relative(our_grads, grads) < TOLERANCE


# --- masks of the caller --------------------------------------------------------------------------


def prefix_mask(length: int, prefix: int) -> Tensor:
    rows, keys = torch.arange(length)[:, None], torch.arange(length)
    return ((keys <= rows) | (keys < prefix))[None, None]


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt_oss_sinks_window"])
def test_custom_masks_replace_causality(name: str) -> None:
    ids, seen = hf_models.tokens(2, LENGTH), prefix_mask(LENGTH, 8)
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(2, -1, -1, -1)
    layered = {"full_attention": additive, "sliding_attention": additive}
    mask: Any = layered if name == "gpt_oss_sinks_window" else additive
    expected, given = hf_models.under_both(
        hf_models.decoder(name), lambda m: m(ids, attention_mask=mask).logits
    )
    assert hf_models.relative(given, expected) < TOLERANCE
    if isinstance(mask, Tensor):
        boolean = hf_models.decoder(name, "tilewise")(ids, attention_mask=seen).logits
        assert hf_models.relative(boolean, expected) < TOLERANCE


def test_fully_masked_position_does_not_affect_others() -> None:
    ids, seen = hf_models.tokens(1, LENGTH), prefix_mask(LENGTH, 0)
    seen[..., 3, :] = False
    seen[..., 4:, 3] = False
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    expected, given = hf_models.under_both(
        hf_models.decoder("llama"), lambda m: m(ids, attention_mask=mask).logits
    )
    kept = torch.arange(LENGTH) != 3
    assert hf_models.relative(given[:, kept], expected[:, kept]) < TOLERANCE
    assert given.isfinite().all()


def test_custom_mask_functions() -> None:
    from transformers import masking_utils

    config = hf_models.configuration("llama")
    config._attn_implementation = "tilewise"
    mask = masking_utils.create_causal_mask(
        config=config,
        inputs_embeds=torch.empty(1, 6, 8),
        attention_mask=None,
        past_key_values=None,
        or_mask_function=lambda batch, head, row, key: key < 3,
    )
    assert torch.equal(mask == 0, prefix_mask(6, 3))
    assert torch.equal(mask == torch.finfo(torch.float32).min, ~prefix_mask(6, 3))


# --- unsupported models and arguments are refused -------------------------------------------------


@pytest.mark.parametrize("kind", ["Bloom", "BigBirdPegasus", "Falcon", "GPTNeo", "Git"])
def test_models_with_only_eager_attention_are_refused(kind: str) -> None:
    import transformers

    with torch.device("meta"), pytest.raises(ValueError, match="computes attention in its own"):
        getattr(transformers, f"{kind}ForCausalLM")._from_config(
            getattr(transformers, f"{kind}Config")(), attn_implementation="tilewise"
        )


def test_layer_that_leaves_its_window_to_the_mask() -> None:
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig

    config = Qwen2MoeConfig(
        **hf_models.SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2,
        moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    assert "sliding_attention" in config.layer_types
    ids, mask = hf_models.tokens(3, LENGTH), hf_models.paddings(3, LENGTH)["left"]
    expected, given = hf_models.under_both(
        model, lambda m: m(ids, attention_mask=mask).logits[mask.bool()]
    )
    assert hf_models.relative(given, expected) < TOLERANCE


def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = True
    return module


def heads(length: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 4, length, 8), torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)


@pytest.mark.parametrize("padding", ["none", "left", "hole"])
def test_double_precision_model_error_says_what_to_do(padding: str) -> None:
    model, ids = hf_models.decoder("llama", "tilewise").double(), hf_models.tokens(3, LENGTH)
    with pytest.raises(TypeError, match=r"query has dtype torch\.float64.*call model\.float\(\)"):
        model(ids, attention_mask=hf_models.paddings(3, LENGTH)[padding])
    model.float()(ids)


@pytest.mark.tensors("cpu")  # nothing is computed
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (dict(output_attentions=True), "output_attentions is True, but tilewise never"),
        (dict(indices=torch.zeros(2, 6, 1)), "indices, the keys that each row selects, are"),
        (dict(block_indices=torch.zeros(1)), "Module passes block_indices to its attention"),
        (dict(mask=torch.ones(2, 1, 6, 6).long()), "attention_mask has dtype torch.int64"),
        (dict(mask=torch.ones(2, 6)), r"attention_mask \[batch, keys\] has dtype torch.float32"),
        (dict(mask=torch.ones(2, 7).bool()), r"attention_mask has shape \[2, 7\]"),
        (dict(mask=torch.ones(2, 6, 6).bool()), r"attention_mask has shape \[2, 6, 6\]"),
        (
            dict(cu_seq_lens_q=torch.zeros(2), cu_seq_lens_k=torch.zeros(2),
                 mask=torch.ones(2, 6).bool()),
            "cu_seq_lens_q and attention_mask are both given",
        ),
    ],
)  # fmt: skip
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    mask = arguments.pop("mask", None)
    with pytest.raises(ValueError, match=sentence):
        tilewise.hf.attention(layer(), *heads(), mask, **arguments)


def test_short_name_is_the_same_module() -> None:
    from tilewise.integrations import transformers as long_name

    assert tilewise.hf.attention is long_name.attention
    assert tilewise.hf.NAME == "tilewise"
