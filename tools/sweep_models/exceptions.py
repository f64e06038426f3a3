"""Values of tiny configurations that the rules for field names cannot give, and backbones."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

_SERIES = {"prediction_length": 6, "context_length": 12}

# Fields by configuration class: _WIDTHS apply only at the level "widths", _ALWAYS at every level.
_WIDTHS: dict[str, dict[str, Any]] = {
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "MimiConfig": {"upsample_groups": 32, "codebook_dim": 16},
    "Mamba2Config": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "Glm4vMoeTextConfig": {"head_dim": 16},
    "Glm5NextTextConfig": {"index_kpool": 2},
    "DepthAnythingConfig": {
        "reassemble_hidden_size": 32,
        "neck_hidden_sizes": [16, 16, 32, 32],
        "fusion_hidden_size": 16,
        "head_hidden_size": 16,
    },
    "WavTokenizerConfig": {"codebook_dim": 32},
    "WavTokenizerEncoderConfig": {"codebook_dim": 32},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "EvollaConfig": {
        "resampler_dim_head": 8,
        "resampler_heads": 4,
        "resampler_depth": 1,
        "resampler_num_latents": 4,
        "aligner_num_add_layers": 1,
        "protein_encoder_config": dict(
            vocab_size=128,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=128,
        ),
    },
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "NemotronAsrStreamingEncoderConfig": {"default_num_lookahead_tokens": 1},
    "SamHQMaskDecoderConfig": {"vit_dim": 32},
    "YolosConfig": {"image_size": [32, 48], "num_detection_tokens": 5},
    "VJEPA2Config": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "num_pooler_layers": 1,
        "pred_num_attention_heads": 4,
    },
    "Emu3VQVAEConfig": {"base_channels": 32, "z_channels": 32, "embed_dim": 32},
}
_ALWAYS: dict[str, dict[str, Any]] = {
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "Zamba2Config": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "Step3p7TextConfig": {"sliding_window": 5},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 5},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 5},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "MusicgenDecoderConfig": {"num_codebooks": 1},
    "MusicgenMelodyDecoderConfig": {"num_codebooks": 1},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "AutoformerConfig": _SERIES,
    "InformerConfig": _SERIES,
    "TimeSeriesTransformerConfig": _SERIES,
    "Dots3NoteConfig": {"per_layer_config": None},
    "DbrxConfig": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 2}},
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64},
    "ConvNextConfig": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
    "ConvNextV2Config": {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]},
    "FocalNetConfig": {"hidden_sizes": [192, 384, 768, 768], "depths": [1, 1, 1, 1]},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "HunYuanDenseV1Config": {"head_dim": 8},
    "HunYuanMoEV1Config": {"head_dim": 8},
    "HunYuanVLTextConfig": {"head_dim": 8},
    "MinistralConfig": {"head_dim": 8},
    "NemotronConfig": {"head_dim": 8, "num_key_value_heads": 2},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Blip2Config": {"image_token_index": 3},
    "InstructBlipConfig": {"image_token_index": 3},
    "InstructBlipVideoConfig": {"video_token_index": 3},
    "BambaConfig": {"attn_layer_indices": [1]},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 3, "IMGIMGA": 4}},
    "Emu3Config": {"vocabulary_map": {"<image>": 3, "IMGIMGA": 4}},
}

# Classes that pool the first token of a sequence, which is padding in a left-padded batch: such a
# row may see no key, and eager attention then gives meaningless numbers.
POOLS_FIRST = re.compile(
    r"(ModernBert|ModernVBert|UltraVBert|Ultrabert)For(SequenceClassification|MultipleChoice)"
    r"|PeAudioModel"
)
# Classes that append a token to the text, so that outputs have a row more than attention_mask.
APPENDS_TOKEN = re.compile("VideoPrismClipModel")


def fields(cls: type[Any], level: str, given: dict[str, Any]) -> dict[str, Any]:
    """The fields that this configuration needs in addition to the rules."""
    made = dict(_ALWAYS.get(cls.__name__, {}))
    if level == "widths":
        made.update(_WIDTHS.get(cls.__name__, {}))
    if level == "widths" and "rope_parameters" in given and _has_sections(cls):
        made.setdefault(
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        )
    if level != "defaults" and "pad_token_id" in given:
        made.setdefault("pad_token_id", 0)
    if "use_timm_backbone" in given:
        made["use_timm_backbone"] = False
    if "use_pretrained_backbone" in given:
        made["use_pretrained_backbone"] = False
    return made


def _has_sections(cls: type[Any]) -> bool:
    """Whether the model uses multimodal RoPE: three sections that add up to head_dim / 2."""
    files = (inspect.getfile(cls), inspect.getfile(cls).replace("configuration_", "modeling_"))
    return any("mrope_section" in Path(file).read_text() for file in files if Path(file).exists())


def backbone(model_type: str | None) -> Any:
    """A small convolutional backbone, or a small transformer where that is the model's default."""
    from transformers import Dinov2Config, ResNetConfig, SwinConfig

    if model_type == "swin":
        return SwinConfig(
            image_size=64,
            embed_dim=24,
            depths=[1, 1, 1, 1],
            num_heads=[2, 2, 2, 2],
            window_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )
    if model_type == "dinov2":
        return Dinov2Config(
            image_size=56,
            hidden_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            out_features=["stage1", "stage2", "stage3", "stage4"],
            reshape_hidden_states=False,
        )
    if model_type not in (None, "resnet", "timm_backbone"):
        return None
    return ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 24, 32, 48],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
