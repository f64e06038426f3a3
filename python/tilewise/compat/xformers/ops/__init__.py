"""The part of ``xformers.ops`` that concerns attention."""

from tilewise.compat.xformers.ops.fmha import (
    AttentionBias,
    LowerTriangularMask,
    memory_efficient_attention,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)

AttentionMask = AttentionBias  # an older name

__all__ = [
    "AttentionBias",
    "AttentionMask",
    "LowerTriangularMask",
    "memory_efficient_attention",
    "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad",
]
