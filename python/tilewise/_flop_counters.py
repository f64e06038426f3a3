"""Registers the FLOP formulas of ``_flops`` with PyTorch, once PyTorch's counter is in use.

The counter's module imports Triton where it is installed. That takes 0.1 s, and turns on the GIL of
a free-threaded Python, so this package never imports the module itself.
"""

from __future__ import annotations

import sys

import torch

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack


def register_if_imported() -> None:
    """Registers the formulas if the caller has imported the counter."""
    if "torch.utils.flop_counter" in sys.modules:
        import tilewise._flops as _flops  # noqa: F401


def register_if_active() -> None:
    """The same, without a cost where nothing counts: a counter is a dispatch mode.

    Graphs that torch.compile made before the counter was imported run no function of this package,
    and are not counted.
    """
    if not _is_compiling() and _dispatch_modes():
        register_if_imported()
