"""Tilewise as an attention backend of SGLang, selected by ``--attention-backend tilewise``.

SGLang calls ``register`` through the entry point group ``sglang.srt.plugins`` in each of its
processes. docs/integrations/sglang.md describes what the backend supports.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register"]

NAME = "tilewise"


def register() -> None:
    """Registers the backend and adds its name to the choices of ``--attention-backend``.

    Raises:
        ImportError: this SGLang has no registry of attention backends; 0.5.23 has one.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_create)


def _create(runner: Any) -> Any:
    from .backend import TilewiseBackend

    return TilewiseBackend(runner)
