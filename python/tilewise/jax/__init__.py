"""Tilewise for JAX: exact attention through XLA's foreign function interface, without PyTorch.

The functions take and return JAX arrays on CPUs and NVIDIA GPUs, and work under ``jax.jit``,
``jax.grad``, ``jax.jvp``, ``jax.hessian``, ``jax.vmap`` and ``jax.shard_map``.
The page docs/integrations/jax.md says what was run where.
"""

from __future__ import annotations

from tilewise._requirements import require, require_version

require("tilewise.jax", "jax")
require_version("tilewise.jax", "jax")

from ._attention import attention, attention_varlen, attention_with_kvcache
from ._nn import dot_product_attention

__all__ = [
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "dot_product_attention",
]
