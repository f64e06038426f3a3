"""Models that pick one of their own attention classes by the name of the implementation.

SAM's vision encoder and some others look the name up in a table of "eager" and "sdpa", and would
not find "tilewise". Here the table gets a class: that of "sdpa", whose
``scaled_dot_product_attention`` is Tilewise's.
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
        Whether there is such a table, with the name in it.
    """
    served = False
    for table, classes in vars(module).items():
        if not table.endswith("_ATTENTION_CLASSES") or not isinstance(classes, dict):
            continue
        theirs = classes.get("sdpa")
        if name not in classes and theirs is not None and theirs is not classes.get("eager"):
            classes[name] = _served(theirs)
        served = served or name in classes
    return served


def _served(theirs: type) -> type:
    """A class of attention over ``scaled_dot_product_attention``, computed by Tilewise."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions=True asks for the matrix of attention weights, which tilewise "
                'never makes; load the model with attn_implementation="eager"'
            )
        with _ThroughTilewise():
            return theirs.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

    return type(f"Tilewise{theirs.__name__}", (theirs,), dict(forward=forward))


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
    """``scaled_dot_product_attention`` without causality, which no such class asks for."""
    del enable_gqa  # grouped heads are grouped heads
    if is_causal:
        raise ValueError(
            "is_causal=True in an attention class of the model: tilewise serves such classes "
            'without causality only; load the model with attn_implementation="sdpa"'
        )
    from ._attention import as_bias

    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    bias = as_bias("attn_mask", attn_mask, query)
    return tilewise.attention(q, k, v, bias=bias, dropout_p=dropout_p, scale=scale).transpose(1, 2)
