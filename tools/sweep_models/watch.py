"""Detects what computes attention in a forward: Tilewise, the eager function, or the model
itself.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
_SOFTMAX = re.compile(r"aten::(_safe)?_?softmax$|scaled_dot_product|flash_attention")


class Watch(TorchDispatchMode):
    """Counts calls while it is active.

    Attributes:
        tilewise: Calls of Tilewise's attention function.
        eager: Calls of the eager function of a model's file.
        own: Softmaxes elsewhere, by the class of the innermost attention module around them, or of
            the innermost module.
    """

    active: Watch | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tilewise = self.eager = 0
        self.own: collections.Counter[str] = collections.Counter()
        self._within = 0  # depth of attention functions, which may use softmax
        self._modules: list[str] = []

    @property
    def own_attention(self) -> dict[str, int]:
        """Softmaxes in modules whose names say attention."""
        return {name: count for name, count in self.own.items() if _ATTENTION.search(name)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._within and _SOFTMAX.search(func._schema.name):
            attention = [name for name in self._modules if _ATTENTION.search(name)]
            self.own[(attention or self._modules or ["?"])[-1]] += 1
        return func(*args, **kwargs or {})

    @contextlib.contextmanager
    def _attending(self) -> Iterator[None]:
        self._within += 1
        try:
            yield
        finally:
            self._within -= 1

    def __enter__(self) -> Watch:
        Watch.active = self
        module = torch.nn.modules.module
        self._hooks = [
            module.register_module_forward_pre_hook(
                lambda module, _: self._modules.append(type(module).__name__)
            ),
            module.register_module_forward_hook(
                lambda *_: self._modules.pop() and None, always_call=True
            ),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        Watch.active = None


def _counted(function: Any, attribute: str) -> Any:
    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        watch = Watch.active
        if watch is None:
            return function(*args, **kwargs)
        setattr(watch, attribute, getattr(watch, attribute) + 1)
        with watch._attending():
            return function(*args, **kwargs)

    counting._counts = attribute  # type: ignore[attr-defined]
    return counting


def count_tilewise() -> None:
    """Registers Tilewise's attention function with a counter around it."""
    from transformers import AttentionInterface

    from tilewise.integrations.transformers import NAME, _own_classes, attention

    AttentionInterface.register(NAME, _counted(attention, "tilewise"))
    if not hasattr(_own_classes._attention, "_counts"):  # used by models with tables of classes
        _own_classes._attention = _counted(_own_classes._attention, "tilewise")


def count_eager() -> None:
    """Wraps the eager function of every loaded model file in a counter."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models."):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute.endswith("eager_attention_forward") and not hasattr(value, "_counts"):
                setattr(module, attribute, _counted(value, "eager"))


def attention_modules(model: torch.nn.Module) -> list[str]:
    """Classes of modules whose names say attention."""
    return sorted(
        {type(m).__name__ for m in model.modules() if _ATTENTION.search(type(m).__name__)}
    )
