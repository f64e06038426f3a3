"""Tiny random models: the same weights under each attention implementation."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import discover, inputs, pictures, precision, shrink, watch

MAX_PARAMETERS = 80_000_000  # the eager, fp64 and Tilewise models together take 1.5 GB
# The grouped matrix product of experts does not support fp64.
_PLAIN: dict[str, Any] = dict(dtype=torch.float32, experts_implementation="eager")


class NotBuiltError(Exception):
    """No configuration and inputs were found with which eager attention runs."""


@dataclass
class Built:
    """An eager model and inputs with which it runs."""

    model: Any
    recipe: inputs.Recipe | pictures.Pictures
    level: shrink.Level
    seen: watch.Watch  # the calls of one eager forward
    pictures: pictures.Pictures | None = None


def build(target: discover.Target) -> Built:
    """The smallest model of this class with which eager attention runs."""
    classes = discover.classes(target)
    objections = []
    for level in shrink.Level:
        built = _attempt(_with_inputs, *classes, level)
        if isinstance(built, Built):
            return built
        objections.append(f"{level.value}: {error_text(built)}")
    raise NotBuiltError("; ".join(dict.fromkeys(objections)))


def _attempt(make: Callable[..., Any], *args: Any) -> Any:
    """The result of make, or the exception that it raises."""
    try:
        return make(*args)
    except Exception as error:
        return error


def _eager(model_class: Any, config_class: Any, level: shrink.Level) -> Any:
    config = shrink.configuration(config_class, level)
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if model_class.__name__.endswith("EncoderModel"):
        config.is_encoder_decoder = False
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise NotBuiltError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(1)
    model = model_class._from_config(config, attn_implementation="eager", **_PLAIN)
    _randomise_weights(model)
    return model.eval()


def _with_inputs(model_class: Any, config_class: Any, level: shrink.Level) -> Built:
    """A model at this level, and the first inputs with which it runs."""
    model = _eager(model_class, config_class, level)
    watch.count_eager()
    first = None
    for recipe in inputs.recipes(model):
        built = _attempt(_run, model, recipe, level)
        if isinstance(built, Built):
            return built
        first = first or built
        if "out of memory" in str(built) or "allocate" in str(built):
            break
    for candidate in pictures.candidates(model, inputs.text_input_names(model)):
        built = _attempt(_run, model, candidate, level)
        if isinstance(built, Built):
            return built
    raise first or NotBuiltError(f"no inputs are known for {model.main_input_name}")


def _run(model: Any, recipe: inputs.Recipe | pictures.Pictures, level: shrink.Level) -> Built:
    made = recipe.make(0)
    with watch.Watch() as seen:
        out = forward(model, made)
    for name, found in precision.tensors(out):
        if found.is_floating_point() and found.numel() and not bool(found.isfinite().any()):
            raise NotBuiltError(f"eager attention gives no finite number of {name}")
    built = Built(model, recipe, level, seen)
    for candidate in pictures.candidates(model, recipe.names):
        if _attempt(_run_pictures, built, candidate) is built:
            break
    return built


def _run_pictures(built: Built, candidate: pictures.Pictures) -> Built:
    forward(built.model, candidate.make(0))
    built.pictures = candidate
    return built


def forward(model: Any, made: inputs.Inputs) -> Any:
    """One forward; random draws of the model are the same in each."""
    if "MultipleChoice" in type(model).__name__:  # two choices per question
        made = {name: torch.stack([value, value.roll(1, 0)], 1) for name, value in made.items()}
    torch.manual_seed(2)
    with torch.no_grad():
        return model(**made)


def like(model: Any, implementation: str) -> Any:
    """The same model with another attention implementation, built as a user would."""
    config = copy.deepcopy(model.config)
    other = type(model)._from_config(config, attn_implementation=implementation, **_PLAIN)
    other.load_state_dict(model.state_dict())
    return other.eval()


def refusal(target: discover.Target) -> str | None:
    """The error with which Tilewise refuses to load this class, or None."""
    classes = discover.classes(target)
    for level in shrink.Level:
        model = _attempt(_eager, *classes, level)
        if isinstance(model, Exception):
            continue
        loaded = _attempt(like, model, "tilewise")
        is_refusal = isinstance(loaded, ValueError) and "tilewise" in str(loaded)
        return str(loaded) if is_refusal else None
    return None


def _randomise_weights(model: torch.nn.Module) -> None:
    """Draws weights with which scores differ visibly, including those that a model leaves at 0."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = max(parameter[0].numel(), 1) if parameter.dim() else 1
            if not bool(parameter.isfinite().all()):
                parameter.copy_(0.1 * noise)
            elif "log" in name.lower():  # the decay of a state space model
                continue
            elif parameter.dim() > 1 and float(parameter.std()) < 0.15:
                parameter.copy_(min(0.2, 1.2 / fan_in**0.5) * noise)
            elif name.endswith(("sinks", "bias")) and not bool(parameter.any()):
                parameter.copy_(0.1 * noise)


def error_text(error: BaseException) -> str:
    """Kind and message on one line, with file names but no folders."""
    text = re.sub(r"(?<![\w.])/\S*/(?=\S)", "", " ".join(str(error).split()))
    return f"{type(error).__name__}: {text}"[:300]
