"""Registers Tilewise in Transformers when the integration is imported."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ._attention import attention
from ._masks import create_mask
from ._own_classes import add_own_classes
from ._paged import allow_continuous_batching

NAME = "tilewise"  # "flash", "sdpa", "/" and "|" would have a special meaning in the name


def register() -> None:
    """Registers attention and mask functions as "tilewise"; further calls have no effect."""
    AttentionInterface.register(NAME, attention)
    # Without a mask function, Transformers would silently omit every mask.
    AttentionMaskInterface.register(NAME, create_mask)
    AttentionInterface.register(f"paged|{NAME}", attention)
    allow_continuous_batching(NAME)
    _refuse_unsupported_models()


def _refuse_unsupported_models() -> None:
    """Makes Transformers refuse models whose own code computes attention.

    Such models never call the registered attention function, and would misread compact masks.
    """
    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "by_tilewise"):
        return

    @functools.wraps(check)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention is not None and requested_attention.removeprefix("paged|") == NAME:
            model = type(self)
            module = sys.modules[model.__module__]
            has_table = add_own_classes(module, NAME)
            calls_interface = hasattr(module, "ALL_ATTENTION_FUNCTIONS") and (
                model._supports_sdpa or model._supports_flash_attn
            )
            supported = calls_interface or has_table or model._supports_attention_backend
            own = () if supported else _own_attention(module)
            if own:
                raise ValueError(
                    f"{model.__name__} computes attention in its own code "
                    f"({', '.join(own)}) and calls no attention function, so that "
                    f'attn_implementation="{NAME}" has no effect on it: load the model with '
                    '"eager", or with another implementation that it supports'
                )
        return check(self, requested_attention, *args, **kwargs)

    setattr(checked, "by_tilewise", True)  # noqa: B010
    setattr(PreTrainedModel, "get_correct_attn_implementation", checked)  # noqa: B010


# Names that the code of an attention layer refers to if it computes attention itself.
_ATTENTION_OPERATIONS = frozenset(
    ("Linear", "matmul", "bmm", "baddbmm", "einsum", "softmax", "Softmax",
     "scaled_dot_product_attention")
)  # fmt: skip


@functools.cache
def _own_attention(module: ModuleType) -> tuple[str, ...]:
    """The classes of a model's file that compute attention without calling an attention function.

    If there is none, the model is supported: it may be convolutional, for example, or consist of
    models from other files, which are checked separately.
    """
    layers = {
        name: _names_in_code(value)
        for name, value in tuple(vars(module).items())
        if "attention" in name.lower() and _is_layer(value, module)
    }
    return tuple(
        name
        for name, used in layers.items()
        # A class that refers to another one leaves the computation to it.
        if used & _ATTENTION_OPERATIONS
        and "ALL_ATTENTION_FUNCTIONS" not in used
        and used.isdisjoint(layers)
    )


def _names_in_code(cls: type) -> set[str]:
    """The names that the methods of a class refer to, without those in their decorators."""
    methods = (inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f))
    return {name for method in methods for name in method.__code__.co_names}


def _is_layer(value: Any, module: ModuleType) -> bool:
    """Whether the value is a layer class that the file itself defines."""
    is_layer = isinstance(value, type) and issubclass(value, torch.nn.Module)
    return is_layer and value.__module__ == module.__name__
