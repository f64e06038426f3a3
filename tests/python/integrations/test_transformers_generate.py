"""Tiny random decoders generate through Transformers: caches, batches, assistants, batching."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20", "accelerate")

from transformers import masking_utils  # noqa: E402

import tilewise.hf  # noqa: E402, F401
from tilewise.integrations.transformers import _compact, _paged  # noqa: E402

pytestmark = hf_models.MARKS
NEW = 16
TOLERANCE = 1e-5  # of the largest logit
NAMES = ["llama", "mistral_window", "gemma2_softcap_window", "gpt_oss_sinks_window", "gpt2"]


def generated(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    """Generate, with the logits of each new token as [new tokens, batch, vocabulary]."""
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences, torch.stack(result.logits)


CACHES = [
    ("llama", cache, padding) for cache in ("dynamic", "static") for padding in ("none", "hole")
]
CACHES += [(name, cache, "left") for name in NAMES for cache in ("dynamic", "static")]
CACHES += [("llama", "none", "left")]


@pytest.mark.parametrize(("name", "cache", "padding"), CACHES)
def test_caches(name: str, cache: str, padding: str) -> None:
    model, ids = hf_models.decoder(name), hf_models.tokens(3, 20)
    mask = hf_models.paddings(3, 20)[padding]
    # On a GPU, Transformers compiles a model with a static cache, which takes a minute: one does.
    compiles = name == "llama" and padding == "left"
    options = hf_models.cache_options(cache, compiles)
    (sequences, logits), (ours, our_logits) = hf_models.under_both(
        model, lambda m: generated(m, ids, mask, **options)
    )
    assert torch.equal(ours, sequences)
    assert hf_models.relative(our_logits, logits) < TOLERANCE
    assert len(sequences[:, 20:].unique()) > 4, "the text is too repetitive to reveal a difference"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_left_padded_batch_equals_single_prompts(cache: str) -> None:
    model, ids = hf_models.decoder("gemma3_window", "tilewise"), hf_models.tokens(3, 20)
    options = hf_models.cache_options(cache)
    mask = hf_models.paddings(3, 20)["left"]
    assert mask is not None
    together, _ = generated(model, ids, mask, **options)
    for row, kept in enumerate(mask.bool()):
        alone, _ = generated(model, ids[row][kept][None], **options)
        assert torch.equal(together[row, 20:], alone[0, int(kept.sum()) :])


def test_generation_builds_no_rows_x_keys_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a rows x keys mask was built")

    model, ids = hf_models.decoder("gemma2_softcap_window", "tilewise"), hf_models.tokens(3, 20)
    monkeypatch.setattr(_compact.CompactMask, "_expanded", refuse)
    monkeypatch.setattr(masking_utils, "eager_mask", refuse)
    for padding in ("none", "left", "hole"):
        mask = hf_models.paddings(3, 20)[padding]
        generated(model, ids, mask)
        generated(model, ids, mask, **hf_models.cache_options("static"))


def test_beams() -> None:
    model, ids = hf_models.decoder("llama"), hf_models.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    beams, ours = hf_models.under_both(
        model,
        lambda m: m.generate(
            ids, attention_mask=mask, num_beams=3, max_new_tokens=NEW, eos_token_id=None
        ),
    )
    assert torch.equal(ours, beams)


@pytest.mark.parametrize("name", ["llama", "gemma2_softcap_window"])
@pytest.mark.parametrize("assistant", ["model", "prompt"])
def test_assisted_generation_gives_the_greedy_text(name: str, assistant: str) -> None:
    model, ids = hf_models.decoder(name, "tilewise"), hf_models.tokens(1, 12)
    greedy, _ = generated(model, ids)
    options: dict[str, Any] = dict(prompt_lookup_num_tokens=3)
    if assistant == "model":
        helper = hf_models.decoder(name, "tilewise")
        with torch.no_grad():  # the assistant is then often right, but not always
            helper.model.layers[2].self_attn.o_proj.weight.mul_(0.5)
        options = dict(assistant_model=helper)
    given = model.generate(
        ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )
    assert torch.equal(given, greedy)


# --- continuous batching --------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["tilewise", "paged|tilewise"])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gpt_oss_sinks_window"])
def test_continuous_batching_gives_the_text_of_single_prompts(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    calls = []
    real = _paged.paged_attention
    monkeypatch.setattr(
        _paged, "paged_attention", lambda *given: calls.append(None) or real(*given)
    )
    model = hf_models.decoder(name)
    prompts = [hf_models.tokens(length) for length in (5, 23, 30, 3, 11)]
    expected = [generated(model, ids[None])[0][0, len(ids) :].tolist() for ids in prompts]
    hf_models.with_attention(model, implementation)
    results = model.generate_batch(
        [ids.tolist() for ids in prompts],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=40, max_batch_tokens=32, page_size=8
        ),
    )
    assert model.config._attn_implementation == "tilewise"
    given = [results[key].generated_tokens for key in sorted(results, key=request_number)]
    assert given == expected
    # Pages are read in place where Transformers has block tables, which is in layers without a
    # window.
    assert bool(calls) == (name == "llama")


def request_number(key: str) -> int:
    return int(key.rsplit("_", 1)[1])


@pytest.mark.parametrize("sliding_window", [None, 1, 5, 64])
def test_paged_attention_honours_its_window(sliding_window: int | None) -> None:
    """The window has sliding_window keys: the new key and those before it."""
    lengths, page_size, heads, heads_kv, dim = (23, 1, 8), 8, 4, 2, 16
    k_cache, v_cache = (torch.randn(10, page_size, heads_kv, dim) for _ in range(2))
    table = torch.tensor([[7, 2, 4], [1, 9, 9], [3, 9, 9]], dtype=torch.int32)
    query = torch.randn(1, heads, 3, dim)
    key, value = (torch.randn(1, heads_kv, 3, dim) for _ in range(2))
    keys, values = (cache[table.long()].flatten(1, 2) for cache in (k_cache, v_cache))
    expected = torch.empty(1, 3, heads, dim)
    for b, length in enumerate(lengths):
        first = 0 if sliding_window is None else max(length - sliding_window, 0)
        k = torch.cat([keys[b, : length - 1], key[0, :, b][None]])[first:]
        v = torch.cat([values[b, : length - 1], value[0, :, b][None]])[first:]
        k, v = (x.repeat_interleave(heads // heads_kv, 1).double() for x in (k, v))
        weights = (torch.einsum("hd,khd->hk", query[0, :, b].double(), k) * 0.3).softmax(-1)
        expected[0, b] = torch.einsum("hk,khd->hd", weights, v)
    options = dict(scale=0.3, softcap=0.0, sinks=None, dropout_p=0.0)
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cache = dict(k_cache=k_cache, v_cache=v_cache, block_table=table, cu_seq_lens_k=ends)
    out = _paged.paged_attention(query, key, value, sliding_window, options, cache)
    assert hf_models.relative(out, expected) < TOLERANCE
    assert torch.equal(k_cache[4, 6], key[0, :, 0]) and torch.equal(v_cache[3, 7], value[0, :, 2])


def test_paged_attention_refuses_dropout() -> None:
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        _paged.paged_attention(*(torch.zeros(1),) * 3, None, dict(dropout_p=0.1), {})


def test_position_bias_with_pages_is_refused_before_writing() -> None:
    from tilewise.integrations.transformers import attention

    q = torch.zeros(1, 4, 1, 8)
    given: dict = dict(is_causal=True, cache=object(), block_table=torch.zeros(1, 1).int())
    with pytest.raises(ValueError, match="position_bias is given with block_table"):
        attention(torch.nn.Module(), q, q, q, None, position_bias=torch.zeros(4, 1, 9), **given)
