"""A short name for ``tilewise.integrations.transformers``; importing either one registers it."""

from .integrations.transformers import NAME, attention, create_mask, register

__all__ = ["NAME", "attention", "create_mask", "register"]
