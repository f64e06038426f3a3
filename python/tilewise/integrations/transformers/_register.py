"""What importing the integration does to Transformers."""

from __future__ import annotations

import functools
import sys
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ._attention import attention
from ._masks import create_mask
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
    """Models whose code never asks for an attention function would go without any mask."""
    check = PreTrainedModel.get_correct_attn_implementation
    if hasattr(check, "__wrapped__"):
        return

    @functools.wraps(check)
    def checked(self: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> Any:
        if requested_attention is not None and requested_attention.removeprefix("paged|") == NAME:
            model = type(self)
            asks = hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS") and (
                model._supports_sdpa or model._supports_flash_attn
            )
            if not (asks or model._supports_attention_backend):
                raise ValueError(
                    f"{model.__name__} computes attention in its own code, eager, and does not "
                    f'support others, so that attn_implementation="{NAME}" cannot serve it'
                )
        return check(self, requested_attention, *args, **kwargs)

    setattr(PreTrainedModel, "get_correct_attn_implementation", checked)  # noqa: B010
