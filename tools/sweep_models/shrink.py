"""Tiny configurations: shrinks the fields of any configuration class according to their names.

A configuration is tried at several levels, and the first with which the model runs is used:
``WIDTHS`` makes widths, heads, layers, vocabularies and images small; ``LAYERS`` keeps widths and
images, since some of them depend on each other in ways that names do not reveal; ``DEFAULTS`` keeps
everything.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from typing import Any

from . import exceptions


class Level(enum.Enum):
    """How much of a configuration is shrunk."""

    WIDTHS = "widths"
    LAYERS = "layers"
    DEFAULTS = "defaults"


VOCABULARY = 128
MAX_LAYERS = 12
FIRST_FREE_TOKEN = 64  # lower numbers are special tokens

# Patterns match whole names. The first matching rule decides.
_LAYERS = re.compile(r"(.*_)?(num_)?(hidden_)?(n_)?layers?|depth|n_layers?|num_\w*blocks")
_NOT_LAYERS = re.compile(
    r"\w*(dense_layers|kv_shared_layers|mtp_layers|feature_layer|adapter_layers|window_layers"
    r"|fc_layers|lstm_layers|every_n_layers)"
)
_WIDTH = re.compile(
    r"hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|emb_dim|\w*_hidden_size|\w*_hidden_dim"
    r"|embedding_size|embedding_dim|projection_dim|out_hidden_size|word_embed_proj_dim"
    r"|output_dim|output_channels|lru_width|projector_dim|\w*_width|query_dim"
    r"|cross_attention_dim|input_hidden_size"
)
_INNER = re.compile(
    r"\w*intermediate_size|\w*ffn_dim|d_ff|n_inner|mlp_dim|d_inner|\w*intermediate_dim"
    r"|dim_feedforward|encoder_feedforward_dim|ffn_hidden_size"
)
_HEADS = re.compile(
    r"\w*attention_heads|num_heads|n_heads?|\w*_num_heads|\w*_n_heads|encoder_heads"
)
_KV_HEADS = re.compile(
    r"\w*key_value_heads|num_kv_heads|n_kv_heads?|\w*num_key_value_attention_heads"
)
_HEAD_DIM = re.compile(r"\w*head_dim|d_kv|attention_head_size|kv_channels|dim_head|d_head")
_RANK = re.compile(r"\w*lora_rank")
_VOCABULARY = re.compile(r"\w*vocab_size\w*|codebook_size|src_vocab_size|tgt_vocab_size")
_EXPERTS = re.compile(r"(num_|n_|moe_num_)?(local_|routed_)?experts|moe_num_experts")
_CHOSEN = re.compile(r"num_experts_per_tok\w*|moe_topk|moe_k|top_k|num_selected_experts")
_TOKEN = re.compile(
    r"\w*(token_id|token_index)|\w*_(start|end)_id|pad_idx|\w*_pad_id|\w*(bos|eos)_id"
)
_SMALL: dict[str, int] = {
    "sliding_window": 5,
    "sliding_window_size": 5,
    "attention_window_size": 5,
    "attention_chunk_size": 8,
    "local_attention": 6,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_source_positions": 128,
    "max_target_positions": 128,
    "n_ctx": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_groups": 1,
    "query_pre_attn_scalar": 8,
    "num_queries": 7,
    "num_query_tokens": 4,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "index_topk": 4,
    "index_n_heads": 2,
    "global_attn_every_n_layers": 2,
}
# Fields without a default that a model requires.
_EXPERTS_GIVEN = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
_OF_IMAGES = {"image_size": 32, "patch_size": 8, "num_frames": 2, "max_image_size": 32}


def configuration(cls: type[Any], level: Level) -> Any:
    """An instance of this configuration class, as small as the level allows."""
    return cls(**_fields(cls, level, {}))


def _fields(cls: type[Any], level: Level, tokens: dict[str, int]) -> dict[str, Any]:
    """The keyword arguments; ``tokens`` gives a special token the same number everywhere."""
    given = _defaults(cls)
    layers = _layers_for_every_kind(cls) if level is not Level.DEFAULTS else 0
    small: dict[str, Any] = {}
    has_stages = any(
        isinstance(given.get(name), tuple | list) and given.get(name)
        for name in ("num_heads", "num_attention_heads", "depths", "hidden_sizes", "embed_dims")
    )
    for name, value in given.items():
        made = _small(name, value, given, level, tokens, has_stages)
        if made is not None and made != value:
            small[name] = made
    for name, spec in cls.sub_configs_defaults.items():
        if name not in small and not spec.optional:
            sub = _sub(name, spec, level, tokens)
            if sub is not None:
                small[name] = sub
    if layers and "num_hidden_layers" in given:
        small["num_hidden_layers"] = layers
        for name in _KINDS:
            if isinstance(given.get(name), tuple | list):
                small[name] = list(given[name][:layers])
    small.update(exceptions.fields(cls, level.value, given))
    return small


_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "attn_types")


def _layers_for_every_kind(cls: type[Any]) -> int:
    """The number of layers, 3 to MAX_LAYERS, that includes every kind of layer of the default
    configuration; 0 if two suffice, if more would be needed, or if there is no default.
    """
    try:
        default = cls()
    except Exception:  # a configuration without usable defaults
        return 0
    layers = 2
    for name in _KINDS:
        kinds = getattr(default, name, None)
        if isinstance(kinds, list | tuple) and kinds and isinstance(kinds[0], str):
            layers = max(layers, *(kinds.index(kind) + 1 for kind in set(kinds)))
    return layers if 2 < layers <= MAX_LAYERS else 0


def _defaults(cls: type[Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            given[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            given[field.name] = field.default_factory()
    return given


def _sub(name: str, spec: Any, level: Level, tokens: dict[str, int]) -> Any:
    """A small nested configuration, or None to keep the default of the outer configuration."""
    from transformers import PreTrainedConfig

    if name == "backbone_config":
        return exceptions.backbone(spec.model_type)
    cls = spec.config_class
    if not issubclass(cls, PreTrainedConfig):
        cls = spec.get_config_class(spec.model_type)
    fields = _fields(cls, level, tokens)
    known = {field.name for field in dataclasses.fields(cls)}
    given = {key: value for key, value in spec.init_kwargs.items() if key in known}
    for key, value in given.items():
        fields.setdefault(key, _small(key, value, given, level, tokens, False) or value)
    return cls(**fields)


def _small(
    name: str, value: Any, given: dict[str, Any], level: Level, tokens: dict[str, int], staged: bool
) -> Any:
    """The small value of a field, or None to leave the field."""
    if level is Level.DEFAULTS or isinstance(value, bool):
        return None
    if _TOKEN.fullmatch(name):
        return _token(name, value, tokens)
    if isinstance(value, tuple | list):
        return _small_list(name, value)
    if value is None:
        return VOCABULARY if name == "vocab_size" else _EXPERTS_GIVEN.get(name)
    if not isinstance(value, int) or value <= 0:
        return None
    if _LAYERS.fullmatch(name) and not _NOT_LAYERS.fullmatch(name):
        return min(value, 2)
    if _VOCABULARY.fullmatch(name) and value > VOCABULARY and "type" not in name:
        return VOCABULARY
    if _EXPERTS.fullmatch(name):
        return min(value, 4)
    if _CHOSEN.fullmatch(name):
        return min(value, 2)
    if name in _SMALL:
        return min(value, _SMALL[name])
    if level is not Level.WIDTHS or staged:
        return None
    return _small_width(name, value, given)


def _small_width(name: str, value: int, given: dict[str, Any]) -> int | None:
    if name in _OF_IMAGES:
        return min(value, _OF_IMAGES[name])
    if _KV_HEADS.fullmatch(name):
        heads = given.get("num_attention_heads") or value
        return 1 if value == 1 else 2 if isinstance(heads, int) and value < heads else 4
    if _HEADS.fullmatch(name):
        return min(value, 4)
    if _HEAD_DIM.fullmatch(name):
        return min(value, 8)
    if _RANK.fullmatch(name):
        return min(value, 16)
    if name == "rotary_dim":
        return min(value, 4)
    if name == "num_pos_feats":
        return min(value, 16)
    if _INNER.fullmatch(name):
        return min(value, 64)
    if _WIDTH.fullmatch(name):
        return min(value, 32)
    return None


def _small_list(name: str, value: Any) -> Any:
    if name in ("depths", "layers_per_stage", "num_layers_per_stage") and value:
        return type(value)(1 if isinstance(v, int) else v for v in value)
    if name.endswith(("indexes", "indices")) and all(isinstance(v, int) for v in value):
        return type(value)(min(v, 1) for v in value[:2])
    return None


def _token(name: str, value: Any, tokens: dict[str, int]) -> Any:
    """The number of a special token: the same for the same name in all parts of a model."""
    if isinstance(value, tuple | list):
        name, value = name.removesuffix("s"), value[0] if value else 0
    if isinstance(value, int) and value < 0:
        return None
    fixed = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1,
             "eos_token_id": VOCABULARY - 1}  # fmt: skip
    if name in fixed:
        return fixed[name]
    if not isinstance(value, int):
        return None
    return tokens.setdefault(name.replace("_index", "_id"), 3 + len(tokens))
