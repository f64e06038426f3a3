"""Short name of ``tilewise.integrations.transformers``: importing either registers the attention."""

from .integrations.transformers import NAME, attention, create_mask, register

__all__ = ["NAME", "attention", "create_mask", "register"]
