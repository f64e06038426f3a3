"""FlashAttention-2's package ``flash_attn`` on Tilewise: the same names, arguments and results.

It accepts calls that the original package refuses: fp32 and CPU tensors, any head dimension up to
512, softcap together with dropout, any page size and gradients of the returned log-sum-exp work
here. Where the original defines a result, only one differs: a row that sees no key has lse = -inf
(+inf in the original), so that partial results can be merged.
"""

from tilewise.compat.flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

# The version of the mirrored interface, which callers compare with the version that they need.
__version__ = "2.8.4"

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
