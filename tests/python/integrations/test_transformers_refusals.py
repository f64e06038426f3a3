"""Models that Tilewise refuses when they are built, and the sentences of the errors."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch

import hf_models

hf_models.require("transformers>=5.20")

import tilewise.hf  # noqa: E402, F401

pytestmark = hf_models.MARKS
SMALL = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
)


def build(config: Any, cls: Any) -> Any:
    torch.manual_seed(1)
    return cls._from_config(config, attn_implementation="tilewise").eval()


@pytest.mark.parametrize(
    ("name", "own"), [("Falcon", "FalconAttention"), ("Bloom", "BloomAttention")]
)
def test_models_with_their_own_attention_code_are_refused(name: str, own: str) -> None:
    import transformers

    small = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    config = getattr(transformers, f"{name}Config")(**small)
    with pytest.raises(ValueError, match=rf"^{name}Model computes .* own code \({own}\)"):
        build(config, getattr(transformers, f"{name}Model"))


@pytest.mark.parametrize(
    "name",
    ["MraModel", "ProphetNetModel", "MptModel", "MegatronBertModel", "MvpModel", "YosoModel"],
)
def test_decorated_and_distributed_attention_is_refused(name: str) -> None:
    """Attention behind a decorator, or in functions of the file, also counts as the model's own."""
    import transformers

    cls = getattr(transformers, name)
    with torch.device("meta"), pytest.raises(ValueError, match=r"in its own code \(\w+Attention"):
        cls._from_config(cls.config_class(), attn_implementation="tilewise")


def test_convolutional_backbone_is_not_attention() -> None:
    from transformers import DetrConfig, DetrModel, ResNetConfig, ResNetModel

    resnet = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic",
        out_features=["stage2"],
    )  # fmt: skip
    build(resnet, ResNetModel)
    config = DetrConfig(
        backbone_config=resnet, use_timm_backbone=False, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_queries=7,
    )  # fmt: skip
    ours = build(config, DetrModel)
    pixels = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        given = ours(pixels).last_hidden_state
        ours.set_attn_implementation("eager")
        expected = ours(pixels).last_hidden_state
    assert hf_models.relative(given, expected) < 1e-5


def test_composite_model_is_judged_by_its_submodels() -> None:
    from transformers import (
        BertConfig,
        BloomConfig,
        EncoderDecoderConfig,
        EncoderDecoderModel,
    )

    encoder = BertConfig(**SMALL)
    decoder = BertConfig(**SMALL, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    ours = build(config, EncoderDecoderModel)
    ids = hf_models.tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        given = ours(ids, mask, decoder_input_ids=ids[:, :5]).logits
        ours.set_attn_implementation("eager")
        expected = ours(ids, mask, decoder_input_ids=ids[:, :5]).logits
    assert hf_models.relative(given, expected) < 1e-5

    bloom = BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(bloom, decoder)
    with pytest.raises(ValueError, match=r"^BloomModel .* \(BloomAttention\)"):
        build(config, EncoderDecoderModel)


def test_wrapper_of_another_package_does_not_switch_the_refusals_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import FalconConfig, FalconModel, PreTrainedModel

    from tilewise.integrations.transformers import _register

    plain = inspect.unwrap(PreTrainedModel.get_correct_attn_implementation)

    @functools.wraps(plain)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    monkeypatch.setattr(PreTrainedModel, "get_correct_attn_implementation", theirs)
    _register._refuse_unsupported_models()
    ours = PreTrainedModel.get_correct_attn_implementation
    _register._refuse_unsupported_models()
    assert PreTrainedModel.get_correct_attn_implementation is ours, "wrapped twice"
    small = dict(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    with pytest.raises(ValueError, match=r"^FalconModel computes"):
        build(FalconConfig(**small), FalconModel)
