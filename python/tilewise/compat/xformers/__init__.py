"""xFormers' attention on Tilewise: the same names, arguments and results.

The modules have the places that they have in xFormers, so a caller only has to change the import::

    from tilewise.compat.xformers.ops import LowerTriangularMask, memory_efficient_attention
    from tilewise.compat.xformers.ops.fmha.attn_bias import BlockDiagonalCausalMask

xFormers' own masks are also accepted. CPU tensors, gradients with grouped heads and with every
mask, and dropout with packed sequences work here, where xFormers refuses them.
"""

from tilewise.compat.xformers.ops.fmha import memory_efficient_attention

# The version of the mirrored interface, which callers compare with the version that they need.
__version__ = "0.0.35"

__all__ = ["memory_efficient_attention"]
