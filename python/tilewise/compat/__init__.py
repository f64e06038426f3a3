"""Interfaces of other attention packages, implemented by Tilewise's kernels.

``tilewise.compat.flash_attn`` mirrors the module tree of FlashAttention-2 (``flash_attn``), and
``tilewise.compat.flash_attn_interface`` the single module of FlashAttention-3.
``tilewise.compat.xformers`` has xFormers' attention. A caller only has to change the import::

    from tilewise.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache
    from tilewise.compat.flash_attn.bert_padding import pad_input, unpad_input
"""

from __future__ import annotations

import importlib
from typing import Any

from tilewise._requirements import require

require("tilewise.compat", "torch")

__all__ = ["flash_attn", "flash_attn_interface", "xformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
