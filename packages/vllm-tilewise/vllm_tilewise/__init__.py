"""Tilewise as an attention backend of vLLM, selected by ``--attention-backend CUSTOM``.

vLLM calls ``register`` through the entry point group ``vllm.general_plugins`` in each of its
processes. docs/integrations/vllm.md describes what the backend supports.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Registers the backend under the name CUSTOM. Repeated calls change nothing.

    Raises:
        ImportError: this vLLM has no registry of attention backends; 0.33 has one.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "vllm_tilewise.backend.TilewiseBackend")
