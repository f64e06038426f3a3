"""What importing the integration does to Transformers."""

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

NAME = "tilewise"  # without "flash", "sdpa", "/" or "|", which have a meaning in such names


def register() -> None:
    """Registers attention and mask functions as "tilewise"; again is no harm."""
    AttentionInterface.register(NAME, attention)
    # Without a mask function, Transformers would leave out every mask in silence.
    AttentionMaskInterface.register(NAME, create_mask)
    AttentionInterface.register(f"paged|{NAME}", attention)
    allow_continuous_batching(NAME)
    _refuse_models_of_their_own()


def _refuse_models_of_their_own() -> None:
    """Models whose own code computes attention would be given our masks and not understand them."""
    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention is not None and requested_attention.removeprefix("paged|") == NAME:
            model = type(self)
            module = sys.modules[model.__module__]
            served = add_own_classes(module, NAME)
            asks = hasattr(module, "ALL_ATTENTION_FUNCTIONS") and (
                model._supports_sdpa or model._supports_flash_attn
            )
            asks = asks or served or model._supports_attention_backend
            own = () if asks else _own_attention(module)
            if own:
                raise ValueError(
                    f"{model.__name__} computes attention in its own code "
                    f"({', '.join(own)}), which asks for no attention function, so that "
                    f'attn_implementation="{NAME}" cannot serve it: load the model with '
                    '"eager", or with another one that it supports'
                )
        return check(self, requested_attention, *args, **kwargs)

    setattr(PreTrainedModel, "get_correct_attn_implementation", checked)  # noqa: B010


# What attention is made of, by the names that its code refers to.
_PARTS = frozenset(
    ("Linear", "matmul", "bmm", "baddbmm", "einsum", "softmax", "Softmax",
     "scaled_dot_product_attention")
)  # fmt: skip


@functools.cache
def _own_attention(module: ModuleType) -> tuple[str, ...]:
    """The classes of a model's file that compute attention without asking for a function.

    A model without any (a convolutional one, or one made of other models, which are asked
    themselves) has nothing that Tilewise could not serve.
    """
    layers = {
        name: _names_in_code(value)
        for name, value in vars(module).items()
        if "attention" in name.lower() and _is_layer(value, module)
    }
    return tuple(
        name
        for name, used in layers.items()
        # One that is made of another one leaves the computation to it.
        if used & _PARTS and "ALL_ATTENTION_FUNCTIONS" not in used and used.isdisjoint(layers)
    )


def _names_in_code(cls: type) -> set[str]:
    """The names that the methods of a class refer to, behind their decorators."""
    methods = (inspect.unwrap(f) for f in vars(cls).values() if inspect.isfunction(f))
    return {name for method in methods for name in method.__code__.co_names}


def _is_layer(value: Any, module: ModuleType) -> bool:
    """Whether this is a layer that the file itself defines."""
    is_layer = isinstance(value, type) and issubclass(value, torch.nn.Module)
    return is_layer and value.__module__ == module.__name__
