"""Short name of ``tilewise.integrations.transformers``: both register on import."""

from .integrations.transformers import NAME, attention, create_mask, register

__all__ = ["NAME", "attention", "create_mask", "register"]
