"""Support for models that select one of their own attention classes by the implementation's name.

SAM's vision encoder and some others look the name up in a table that has only "eager" and "sdpa".
This module adds "tilewise" to the table: the class of "sdpa", in which Tilewise computes
``scaled_dot_product_attention``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import tilewise


def add_own_classes(module: ModuleType, name: str) -> bool:
    """Adds a class under this name to each table of attention classes in a model's file.

    Returns:
        Whether there is a table that now contains the name.
    """
    supported = False
    for table, classes in tuple(vars(module).items()):
        if not table.endswith("_ATTENTION_CLASSES") or not isinstance(classes, dict):
            continue
        original = classes.get("sdpa")
        if name not in classes and original is not None and original is not classes.get("eager"):
            classes[name] = _computed_by_tilewise(original)
        supported = supported or name in classes
    return supported


def _computed_by_tilewise(original: type) -> type:
    """A subclass of an attention class whose ``scaled_dot_product_attention`` is Tilewise's."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions is True, but tilewise never computes the matrix of attention "
                'weights: load the model with attn_implementation="eager"'
            )
        with _ThroughTilewise():
            return original.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(f"Tilewise{original.__name__}", (original,), dict(forward=forward))


class _ThroughTilewise(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.nn.functional.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` without causality, which no such class uses."""
    del enable_gqa  # the shapes say whether heads are grouped
    if is_causal:
        raise ValueError(
            "an attention class of the model passes is_causal=True, but tilewise supports such "
            'classes only without causality: load the model with attn_implementation="sdpa"'
        )
    from .._masks import as_bias

    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    bias = as_bias("attn_mask", attn_mask, query)
    return tilewise.attention(q, k, v, bias=bias, dropout_p=dropout_p, scale=scale).transpose(1, 2)
