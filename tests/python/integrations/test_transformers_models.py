"""Tiny random models that read their mask, add a bias to the scores, or pack by positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20", "accelerate")

import transformers  # noqa: E402

import tilewise.hf  # noqa: E402, F401

pytestmark = hf_models.MARKS
LENGTH = 20
TOLERANCE = 1e-5  # of the largest number; measured: 6e-6 with Gemma 4, 1e-6 elsewhere
SPECIAL = dict(
    vocab_size=97, decoder_start_token_id=0, pad_token_id=0, bos_token_id=1, eos_token_id=2
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
    v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    moe_intermediate_size=32, index_n_heads=2, index_head_dim=16, index_topk=8,
)  # fmt: skip
# Models that compute with their mask or select keys: (class, configuration class, sizes).
READERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "doge": ("DogeForCausalLM", "DogeConfig", dict(keep_window_size=8)),
    "deepseek_v32": (
        "DeepseekV32ForCausalLM", "DeepseekV32Config", LATENT | dict(first_k_dense_replace=1),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaForCausalLM", "GlmMoeDsaConfig",
        LATENT | dict(num_hidden_layers=2, mlp_layer_types=["dense", "sparse"]),
    ),
    "gemma4_shared_keys": (
        "Gemma4ForCausalLM", "Gemma4TextConfig",
        dict(num_hidden_layers=6, head_dim=12, global_head_dim=16, sliding_window=7,
             num_kv_shared_layers=3, vocab_size_per_layer_input=97, hidden_size_per_layer_input=8,
             layer_types=["sliding_attention", "full_attention"] * 3),
    ),
}  # fmt: skip


def built(model: str, config: Any, factor: float = 3.0) -> Any:
    """The random model, with weights enlarged so that scores differ visibly."""
    torch.manual_seed(1)
    with torch.device("cpu"), torch.no_grad():
        made = getattr(transformers, model)._from_config(config, attn_implementation="eager")
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return made.to(torch.get_default_device()).eval()


def reader(name: str) -> Any:
    model, config, sizes = READERS[name]
    if not hasattr(transformers, config):
        pytest.skip(f"this Transformers has no {config}")
    return built(model, getattr(transformers, config)(**(hf_models.SIZES | sizes)))


def assert_near(model: Any, compute: Callable[[Any], list[Tensor]]) -> None:
    eager, ours = hf_models.under_both(model, compute)
    assert ours
    for given, expected in zip(ours, eager, strict=True):
        assert hf_models.relative(given, expected) < TOLERANCE


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "hole"])
@pytest.mark.parametrize("name", list(READERS))
def test_models_that_read_their_mask(name: str, padding: str, cache: bool) -> None:
    model, ids = reader(name), hf_models.tokens(3, LENGTH)
    mask = hf_models.paddings(3, LENGTH)[padding]
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()

    @torch.no_grad()
    def compute(m: Any) -> list[Tensor]:
        return [m(ids, attention_mask=mask, use_cache=cache).logits[kept]]

    assert_near(model, compute)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", list(READERS))
def test_models_that_read_their_mask_generate(name: str, padding: str, cache: str) -> None:
    model, ids = reader(name), hf_models.tokens(3, 14)
    mask = hf_models.paddings(3, 14)[padding]
    options = hf_models.cache_options(cache)

    def compute(m: Any) -> Any:
        return m.generate(
            ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=6,
            do_sample=False, eos_token_id=None, pad_token_id=0, **options,
        )  # fmt: skip

    eager, ours = hf_models.under_both(model, compute)
    assert torch.equal(ours, eager)


# --- encoders and decoders ------------------------------------------------------------------------


def encoder_decoder(kind: str) -> Any:
    if kind in ("T5", "UMT5"):
        sizes = dict(d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4)
        config = getattr(transformers, f"{kind}Config")(**sizes, **SPECIAL)
        return built(f"{kind}ForConditionalGeneration", config, 1.0)  # its scores are not scaled
    if not hasattr(transformers, f"{kind}Config"):
        pytest.skip(f"this Transformers has no {kind}Config")
    text = dict(hf_models.SIZES, head_dim=12, sliding_window=4, query_pre_attn_scalar=12)
    encoder, more = text, {}
    if kind == "T5Gemma2":
        vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                      num_attention_heads=4, image_size=16, patch_size=4)  # fmt: skip
        encoder = dict(text_config=text, vision_config=vision, image_token_index=96,
                       boi_token_index=95, eoi_token_index=94, mm_tokens_per_image=4)  # fmt: skip
        more = dict(image_token_index=96)
    config = getattr(transformers, f"{kind}Config")(
        encoder=encoder, decoder=dict(text), **SPECIAL, **more
    )
    return built(f"{kind}ForConditionalGeneration", config)


@pytest.mark.parametrize("padding", ["none", "left", "right", "both", "hole"])
@pytest.mark.parametrize("kind", ["T5", "UMT5", "T5Gemma", "T5Gemma2"])
def test_encoders_and_decoders(kind: str, padding: str) -> None:
    """T5 and UMT5 add a learned bias to the scores; T5Gemma has two-sided windows; T5Gemma 2 joins
    its own mask with its encoder's.
    """
    model = encoder_decoder(kind)
    ids, target = hf_models.tokens(3, LENGTH).clamp(max=90), hf_models.tokens(3, 7).clamp(max=90)
    mask = hf_models.paddings(3, LENGTH)[padding]
    kept = torch.ones_like(ids).bool() if mask is None else mask.bool()

    @torch.no_grad()
    def compute(m: Any) -> list[Tensor]:
        out = m(ids, attention_mask=mask, decoder_input_ids=target)
        return [out.encoder_last_hidden_state[kept], out.logits]

    assert_near(model, compute)

    def generate(m: Any) -> Any:
        seen = torch.ones_like(ids) if mask is None else mask
        return m.generate(
            ids, attention_mask=seen, max_new_tokens=5, do_sample=False, eos_token_id=None
        )

    eager, ours = hf_models.under_both(model, generate)
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("kind", ["T5", "UMT5"])
def test_gradients_of_a_position_bias_under_padding(kind: str) -> None:
    model, ids = encoder_decoder(kind), hf_models.tokens(3, LENGTH)
    mask = hf_models.paddings(3, LENGTH)["both"]

    def compute(m: Any) -> list[Tensor]:
        m.zero_grad()
        m(ids, attention_mask=mask, labels=ids[:, :9].contiguous()).loss.backward()
        return [hf_models.gradients(m)]

    assert_near(model, compute)


# --- vision ---------------------------------------------------------------------------------------


def test_siglip2_repeats_its_mask() -> None:
    config = transformers.Siglip2VisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_patches=16, patch_size=4,
    )  # fmt: skip
    model, pixels = built("Siglip2VisionModel", config), torch.randn(2, 16, 48)
    mask, shapes = torch.ones(2, 16).long(), torch.tensor([[4, 4], [3, 4]])
    mask[1, 12:] = 0

    @torch.no_grad()
    def compute(m: Any) -> list[Tensor]:
        out = m(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)
        return [out.last_hidden_state[mask.bool()], out.pooler_output]

    assert_near(model, compute)


@pytest.mark.parametrize("kind", ["Sam", "SamHQ"])
def test_sam_finds_its_attention_class(kind: str) -> None:
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, mlp_dim=32)
    image = dict(image_size=64, patch_size=8)
    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(hidden_size=32, output_channels=16, window_size=3, num_pos_feats=8,
                           global_attn_indexes=[1], **sizes, **image),
        prompt_encoder_config=dict(hidden_size=16, mask_input_channels=4, **image),
        mask_decoder_config=dict(hidden_size=16, iou_head_hidden_dim=16, **sizes)
        | (dict(vit_dim=32) if kind == "SamHQ" else {}),
    )  # fmt: skip
    models = {}
    for implementation in ("eager", "tilewise"):
        torch.manual_seed(1)
        with torch.device("cpu"):
            model = getattr(transformers, f"{kind}Model")._from_config(
                config, attn_implementation=implementation
            )
        models[implementation] = model.to(torch.get_default_device()).eval()
        with torch.no_grad():
            for name, parameter in models[implementation].named_parameters():
                if "rel_pos" in name:  # they are zeros in a random model
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    pixels, points = torch.randn(1, 3, 64, 64), torch.rand(1, 1, 2, 2) * 64
    outs = []
    for model in models.values():
        model.zero_grad()
        out = model(pixel_values=pixels, input_points=points).pred_masks
        out.pow(2).mean().backward()
        outs.append((out.detach(), hf_models.gradients(model)))
    for plain, given in zip(*outs, strict=True):
        assert hf_models.relative(given, plain) < 1e-5
    layers = models["tilewise"].vision_encoder.layers
    assert type(layers[0].attn).__name__ == f"Tilewise{kind}VisionSdpaAttention"
    with pytest.raises(ValueError, match="output_attentions is True, but tilewise never"):
        models["tilewise"](pixel_values=pixels, input_points=points, output_attentions=True)


# --- unsupported arguments are refused ------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_attention_weights_are_refused_for_every_model(name: str) -> None:
    model, ids = hf_models.decoder(name, "tilewise"), hf_models.tokens(1, 5)
    with pytest.raises(ValueError, match="output_attentions is True, but tilewise never"):
        model(ids, output_attentions=True)
    model(ids, output_hidden_states=True)


# --- packed by positions --------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "ones"])
@pytest.mark.parametrize("cache", ["default", "off", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_packed_by_positions(name: str, cache: str, mask: str) -> None:
    """As flash_attention_2 supports it: with or without a cache, with a mask of ones or none."""
    lengths = (9, 1, 13, 4)
    sequences = [hf_models.tokens(length) for length in lengths]
    model = hf_models.decoder(name, "eager")
    expected = torch.cat([model(ids[None], use_cache=False).logits[0] for ids in sequences])
    ids = torch.cat(sequences)[None]
    given: dict[str, Any] = dict(
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None]
    )
    if mask == "ones":
        given["attention_mask"] = torch.ones_like(ids)
    if cache != "default":
        given["use_cache"] = cache == "dynamic"
    logits = hf_models.with_attention(model, "tilewise")(ids, **given).logits[0]
    assert hf_models.relative(logits, expected) < 1e-5


def test_left_padded_sequence_is_not_packed() -> None:
    ids, model = hf_models.tokens(1, 12), hf_models.decoder("llama")
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)

    def compute(m: Any) -> Tensor:
        return m(ids, attention_mask=mask, position_ids=positions).logits[:, 4:]

    expected, given = hf_models.under_both(model, compute)
    assert hf_models.relative(given, expected) < 1e-5
