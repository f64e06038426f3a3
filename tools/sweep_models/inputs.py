"""Inputs of a model, derived from the arguments of its forward and the sizes in its configuration.

The format of a model's images or sounds is not documented in any machine-readable form, so several
candidates are made; the first one with which eager attention runs is used.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .shrink import FIRST_FREE_TOKEN

BATCH, LENGTH, DECODER_LENGTH = 3, 11, 7  # primes, so that a dimension is recognised by its size
PADDINGS: dict[str, tuple[tuple[int, int], ...]] = {  # (left, right) per sequence of a batch
    "left": ((4, 0), (0, 0), (7, 0)),
    "right": ((0, 7), (0, 0), (0, 3)),
    "both": ((3, 2), (0, 0), (1, 6)),
}
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The number of sequences and their lengths."""

    batch: int = BATCH
    length: int = LENGTH
    decoder_length: int = DECODER_LENGTH


@dataclass
class Recipe:
    """A way to make inputs for a model, which can be repeated with other sizes and seeds."""

    model: Any
    names: tuple[str, ...]
    variant: int
    sizes: Sizes = field(default_factory=Sizes)

    def make(self, seed: int, sizes: Sizes | None = None) -> Inputs:
        """The inputs, all sequences at full length."""
        generator = torch.Generator().manual_seed(seed)
        draw = _Draw(self.model.config, sizes or self.sizes, self.variant, generator)
        made: Inputs = {}
        for name in self.names:
            value = _MAKERS[name](draw)
            made.update(value if isinstance(value, dict) else {name: value})
        taken = inspect.signature(self.model.forward).parameters
        return {name: value for name, value in made.items() if name in taken}

    @property
    def is_text(self) -> bool:
        """Whether there are token sequences, which can be padded."""
        return "input_ids" in self.names and "attention_mask" in self.names


def recipes(model: Any) -> Iterator[Recipe]:
    """Candidate inputs of this model, the most likely first."""
    parameters = inspect.signature(model.forward).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    main = model.main_input_name
    mains = [main] if isinstance(main, str) else list(main)
    needed = [name for name in dict.fromkeys(mains + required) if name in _MAKERS]
    if "input_ids" in parameters and "input_ids" not in needed:
        alternatives = [needed, ["input_ids", *needed], ["input_ids"]]
    else:
        alternatives = [needed]
    extra = [name for name in _OPTIONAL if name in parameters and name not in needed]
    alternatives += [[*needed, name] for name in extra]
    if "visual_feats" in parameters:
        alternatives.append([*needed, "visual_feats", "visual_pos"])
    if len(extra) > 1:
        alternatives.append([*needed, *extra])
    if "decoder_input_ids" in parameters:
        with_decoder = [[*names, "decoder_input_ids"] for names in alternatives]
        if getattr(model.config, "is_encoder_decoder", False):
            alternatives = with_decoder + alternatives
        else:
            alternatives += with_decoder
    for names, variant in itertools.product(alternatives, range(VARIANTS)):
        full = list(dict.fromkeys(names))
        if "input_ids" in full and "attention_mask" in parameters:
            full.append("attention_mask")
        if variant and not any(name in _VARIED for name in full):
            continue
        yield Recipe(model, tuple(dict.fromkeys(full)), variant)


def text_input_names(model: Any) -> tuple[str, ...]:
    """The text inputs of a model that does not run without an image."""
    taken = inspect.signature(model.forward).parameters
    return tuple(name for name in ("input_ids", "attention_mask", "qformer_input_ids")
                 if name in taken)  # fmt: skip


def end_of_sequence(config: Any) -> int:
    """The token with which every sequence ends, because some models pool or count it."""
    end = find(config, "eos_token_id", default=1)
    end = end[0] if isinstance(end, list | tuple) else end
    size = find(_text(config), "vocab_size", default=128)
    return min(end, size - 1) if isinstance(end, int) and end >= 0 else 1


def padded(inputs: Inputs, kind: str, config: Any) -> Inputs:
    """The same tokens with padding, and the corresponding mask."""
    made = dict(inputs)
    pad = find(config, "pad_token_id", default=0)
    pad = pad if isinstance(pad, int) and 0 <= pad < find(_text(config), "vocab_size") else 0
    end = end_of_sequence(config)
    ids = inputs["input_ids"].clone()
    mask = torch.ones(ids.shape[:2], dtype=torch.long)
    for row, (left, right) in enumerate(
        itertools.islice(itertools.cycle(PADDINGS[kind]), len(ids))
    ):
        length = ids.shape[1]
        hidden = torch.zeros(length, dtype=torch.bool)
        hidden[: min(left, length - 2)] = True
        if right:
            hidden[max(length - right, 2 if not left else left + 1) :] = True
        ids[row, hidden] = pad
        ids[row, int(torch.where(~hidden)[0][-1])] = end
        mask[row, hidden] = 0
    made.update(input_ids=ids, attention_mask=mask)
    canvas = find(config, "canvas_length")
    if canvas is not None:  # a decoder that reads the cache of the padded prompt
        made["decoder_attention_mask"] = torch.nn.functional.pad(mask, (0, canvas), value=1)
    return made


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the configuration, or one nested in it, has."""
    queue = [config]
    while queue:
        current = queue.pop(0)
        for name in names:
            value = getattr(current, name, None)
            if value is not None and not isinstance(value, dict):
                return value
        queue += [getattr(current, key) for key in getattr(current, "sub_configs", {})
                  if getattr(current, key, None) is not None]  # fmt: skip
    return default


# --- single inputs --------------------------------------------------------------------------------


@dataclass
class _Draw:
    config: Any
    sizes: Sizes
    variant: int
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.generator)

    def tokens(self, length: int, config: Any = None) -> Tensor:
        size = find(config or _text(self.config), "vocab_size", default=128)
        size = size if isinstance(size, int) else 128
        low = min(FIRST_FREE_TOKEN, size // 2)
        made = self.integers(low, size - 1, self.sizes.batch, length)
        made[:, -1] = end_of_sequence(self.config)
        return made


def _text(config: Any) -> Any:
    try:
        return config.get_text_config()
    except (AttributeError, ValueError):
        return config


def _side(size: Any) -> tuple[int, int]:
    if isinstance(size, tuple | list):
        return int(size[0]), int(size[-1])
    return (int(size), int(size)) if isinstance(size, int) else (64, 64)


def _pixels(draw: _Draw) -> Any:
    channels = find(
        draw.config, "num_channels", "in_channels", "num_input_channels", "in_chans", default=3
    )
    channels = channels if isinstance(channels, int) else 3
    height, width = _side(find(draw.config, "image_size", "img_size", "input_size", default=64))
    frames = find(draw.config, "num_frames", "frames_per_clip", default=2)
    batch = draw.sizes.batch
    shapes = (
        (batch, channels, height, width),
        (batch, frames, channels, height, width),
        (batch, channels, 64, 64),
        (batch, channels, 224, 224),
        (batch, 1, channels, height, width),
    )
    if draw.variant < len(shapes):
        return draw.normal(*shapes[draw.variant])
    return _patches(draw, channels)


def _patches(draw: _Draw, channels: int) -> Inputs:
    """Patches of all images end to end, with the grid of each one."""
    side = _side(find(draw.config, "patch_size", default=14))[0]
    deep = find(draw.config, "temporal_patch_size", default=1)
    images, rows, columns = draw.sizes.batch, 4, 4
    values = draw.normal(images * rows * columns, channels * deep * side * side)
    grid = torch.tensor([[1, rows, columns]] * images)
    return {"pixel_values": values, "image_grid_thw": grid}


def _shaped_patches(draw: _Draw) -> Inputs:
    """Padded patches of each image, with its height and width (SigLIP 2)."""
    channels = find(draw.config, "num_channels", default=3)
    side = _side(find(draw.config, "patch_size", default=16))[0]
    shapes = torch.tensor([[4, 4], [2, 3], [3, 5]])[torch.arange(draw.sizes.batch) % 3]
    seen = torch.arange(16) < shapes.prod(1, keepdim=True)
    return {
        "pixel_values": draw.normal(draw.sizes.batch, 16, channels * side * side),
        "pixel_attention_mask": seen.int(),
        "spatial_shapes": shapes,
    }


def _tower(draw: _Draw) -> Inputs:
    """Inputs of a vision tower that takes patches."""
    patches = _patches(draw, find(draw.config, "num_channels", "in_channels") or 3)
    return {"hidden_states": patches["pixel_values"], "grid_thw": patches["image_grid_thw"]}


_BINS = ("num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels",
         "num_mel_features", "feature_projection_input_dim")  # fmt: skip


def _hidden_patches(draw: _Draw) -> Tensor:
    """Every second patch of a video is hidden (VideoMAE)."""
    config = draw.config
    height, width = _side(find(config, "image_size", default=224))
    side = _side(find(config, "patch_size", default=16))[0]
    deep = find(config, "num_frames", default=16) // find(config, "tubelet_size", default=2)
    count = deep * (height // side) * (width // side)
    return (torch.arange(count) % 2 == 0).expand(draw.sizes.batch, count)


def _features(draw: _Draw) -> Tensor:
    bins = find(draw.config, *_BINS, default=80)
    longest = find(draw.config, "max_source_positions", default=64)
    batch = draw.sizes.batch
    shapes = (
        (batch, bins, 2 * longest),
        (batch, 48, bins),
        (batch, bins, 48),
        (batch, bins, 3000),
        (batch, bins),
        (batch, 1, 64, bins),
    )
    return draw.normal(*shapes[draw.variant % len(shapes)])


def _sound(draw: _Draw) -> Tensor:
    batch = draw.sizes.batch
    length = find(draw.config, "max_length", default=64)
    bins = find(draw.config, "num_mel_bins", default=80)
    shapes = (
        (batch, 3600),
        (batch, 1, 3840),
        (batch, length if isinstance(length, int) else 64, bins),
        (batch, 48, bins),
        (batch, 16000),
        (batch, 2, 3840),
    )
    return draw.normal(*shapes[draw.variant])


def _boxes(draw: _Draw) -> Tensor:
    corner = draw.integers(0, 500, draw.sizes.batch, draw.sizes.length, 2)
    return torch.cat([corner, corner + draw.integers(1, 400, *corner.shape)], -1)


def _trajectory(draw: _Draw) -> Inputs:
    """Inputs of a decision transformer."""
    batch, length = draw.sizes.batch, draw.sizes.length
    return {
        "states": draw.normal(batch, length, draw.config.state_dim),
        "actions": draw.normal(batch, length, draw.config.act_dim),
        "rewards": draw.normal(batch, length, 1),
        "returns_to_go": draw.normal(batch, length, 1),
        "timesteps": draw.integers(0, 100, batch, length),
        "attention_mask": torch.ones(batch, length, dtype=torch.long),
    }


def _series(draw: _Draw) -> Inputs:
    """The past of a time series, with as many features as the configuration asks for."""
    config = draw.config
    lags = find(config, "lags_sequence", default=(0,))
    context = find(config, "context_length", "prediction_length", default=16)
    length = context + max(lags) if draw.variant == 0 else context
    channels = find(config, "input_size", "num_input_channels", default=1)
    shape = (draw.sizes.batch, length) if channels == 1 else (draw.sizes.batch, length, channels)
    if draw.variant == 2:
        shape = (draw.sizes.batch, length, channels)
    return {"past_values": draw.normal(*shape)}


def _time_features(draw: _Draw, length: int) -> Tensor:
    count = find(draw.config, "num_time_features", default=0)
    return draw.normal(draw.sizes.batch, length, count)


def _past_length(draw: _Draw) -> int:
    value = _series(draw)["past_values"]
    return int(value.shape[1])


_MAKERS: dict[str, Callable[[_Draw], Any]] = {
    "input_ids": lambda d: d.tokens(d.sizes.length),
    "attention_mask": lambda d: torch.ones(d.sizes.batch, d.sizes.length, dtype=torch.long),
    "decoder_input_ids": lambda d: d.tokens(d.sizes.decoder_length),
    "pixel_values": _pixels,
    "pixel_values_videos": lambda d: _pixels(d),
    "image": lambda d: d.normal(d.sizes.batch, 3, 224, 224),
    "images": _pixels,
    "input_features": _features,
    "input_values": _sound,
    "audio_values": _sound,
    "audio_input_values": _sound,
    "bbox": _boxes,
    "past_values": _series,
    "past_time_features": lambda d: _time_features(d, _past_length(d)),
    "past_observed_mask": lambda d: torch.ones_like(_series(d)["past_values"]),
    "future_time_features": lambda d: _time_features(d, d.config.prediction_length),
    "future_values": lambda d: d.normal(d.sizes.batch, d.config.prediction_length),
    "grid_thw": _tower,
    "hidden_states": _tower,
    "query_embeds": lambda d: d.normal(d.sizes.batch, 4, d.config.hidden_size),
    "encoder_hidden_states": lambda d: d.normal(
        d.sizes.batch, 6, find(d.config, "encoder_hidden_size", "hidden_size")
    ),
    "spatial_shapes": _shaped_patches,
    "bool_masked_pos": _hidden_patches,
    "image_sizes": lambda d: torch.tensor([_pixels(d).shape[-2:]] * d.sizes.batch),
    "input_features_mask": lambda d: torch.ones(d.sizes.batch, _features(d).shape[-1], dtype=int),
    "states": _trajectory,
    "inputs": lambda d: d.tokens(d.sizes.length),
    "visual_feats": lambda d: d.normal(d.sizes.batch, 5, d.config.visual_feat_dim),
    "visual_pos": lambda d: d.normal(d.sizes.batch, 5, 4).abs(),
    "qformer_input_ids": lambda d: d.tokens(d.sizes.length, d.config.qformer_config),
    "task_inputs": lambda d: d.tokens(77),
}
_OPTIONAL = (
    "input_features_mask",
    "pixel_values",
    "input_features",
    "input_values",
    "bbox",
    "encoder_hidden_states",
    "spatial_shapes",
)
_VARIED = {"pixel_values", "images", "input_features", "input_values", "audio_values",
           "pixel_values_videos", "past_values", "audio_input_values"}  # fmt: skip
VARIANTS = 6
