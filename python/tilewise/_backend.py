"""Chooses the backend of a call by the kind of its arrays.

A backend is a pair of modules: ``_torch`` and ``_kvcache_torch`` for PyTorch tensors, ``_numpy``
and ``_kvcache_numpy`` for arrays in CPU memory. Each is imported when it is first needed, so
``import tilewise`` needs neither framework. The NumPy backend refuses, by the argument's name,
whatever is neither a tensor nor such an array (``_numpy.as_array``).

The imports are of the form ``import package.module as name``, which is safe while another thread
imports the same module for the first time: it does not rely on the attribute of the package, which
Python sets after the module has become importable.

The public functions pass the arguments of a call to their backend as plain tuples, in the order of
the fields of ``Request``, ``Sequences``, ``NewKeys`` and ``CacheLayout``. The fast path of tensors
needs no more, and building a named tuple costs 3 % of the time of the shortest call.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any


def attention_backend(q: Any) -> ModuleType:
    """The module with ``attention``, ``attention_varlen`` and ``merge_states`` for this array."""
    if hasattr(q, "__torch_function__"):  # _check.is_tensor, without the time of a call
        import tilewise._torch as tensors  # 0.2 us in every call; "from . import" would take 0.6

        return tensors
    import tilewise._numpy as arrays

    return arrays


def cache_backend(q: Any) -> ModuleType:
    """The module with ``attention_with_kvcache`` for this array."""
    if hasattr(q, "__torch_function__"):
        import tilewise._kvcache_torch as tensors

        return tensors
    import tilewise._kvcache_numpy as arrays

    return arrays
