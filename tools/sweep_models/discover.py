"""The model classes that the auto-mappings of the installed Transformers name."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """One class, with the mappings in which it appears, such as ``CAUSAL_LM``."""

    name: str
    model_type: str
    mappings: tuple[str, ...]


@functools.cache
def targets() -> dict[str, Target]:
    """All classes by name, in alphabetical order."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, list[str]]] = {}
    for attribute, mapping in sorted(vars(modeling_auto).items()):
        if not (attribute.startswith("MODEL_") and attribute.endswith("_NAMES")):
            continue
        for model_type, names in mapping.items():
            for name in (names,) if isinstance(names, str) else names:
                found.setdefault(name, (model_type, []))[1].append(_short(attribute))
    return {
        name: Target(name, model_type, tuple(sorted(set(mappings))))
        for name, (model_type, mappings) in sorted(found.items())
    }


def _short(attribute: str) -> str:
    """MODEL_FOR_CAUSAL_LM_MAPPING_NAMES becomes CAUSAL_LM, MODEL_MAPPING_NAMES becomes BASE."""
    name = attribute.removeprefix("MODEL_").removesuffix("_NAMES").removesuffix("MAPPING")
    return name.removeprefix("FOR_").strip("_") or "BASE"


def classes(target: Target) -> tuple[type[Any], type[Any]]:
    """The model class and its configuration class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    model = MODEL_MAPPING._load_attr_from_module(target.model_type, target.name)
    configuration = getattr(model, "config_class", None)
    return model, configuration or CONFIG_MAPPING[target.model_type]
