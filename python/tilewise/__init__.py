"""Tilewise: exact attention computed tile by tile, on PyTorch tensors and NumPy arrays.

Importing this package loads no framework: PyTorch is imported when a tensor is passed or
``tilewise.nn`` is used, NumPy when an array is passed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._capabilities import Kernel, capabilities
from ._explain import Explanation, Plan, explain
from ._index_errors import IndexFault, last_index_error
from .api import attention, attention_varlen, merge_states

if TYPE_CHECKING:
    from ._numpy_backward import attention_backward
    from ._numpy_tangents import Tangents, attention_jvp, attention_second
    from ._quantize import QuantizedFp8, quantize_fp8
    from .kvcache import attention_with_kvcache

    __version__: str

__all__ = [
    "Explanation",
    "IndexFault",
    "Kernel",
    "Plan",
    "QuantizedFp8",
    "Tangents",
    "__version__",
    "attention",
    "attention_backward",
    "attention_jvp",
    "attention_second",
    "attention_varlen",
    "attention_with_kvcache",
    "capabilities",
    "explain",
    "last_index_error",
    "masks",
    "merge_states",
    "nn",
    "quantize_fp8",
]

# Names that need a framework, and the modules that define them.
_LAZY = {
    "QuantizedFp8": "_quantize",
    "Tangents": "_numpy_tangents",
    "attention_backward": "_numpy_backward",
    "attention_jvp": "_numpy_tangents",
    "attention_second": "_numpy_tangents",
    "attention_with_kvcache": "kvcache",
    "quantize_fp8": "_quantize",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name == "__version__":  # defined once, in include/tilewise/version.h
        from ._library import c_library

        return c_library().tilewise_version().decode()
    if name in ("nn", "compat", "distributed", "jax", "masks"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
