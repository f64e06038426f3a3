"""What `meanflow.py` and `force_field.py` share: attention by two backends, and what a call costs.

PyTorch's fused kernels have neither forward mode nor second derivatives; its MATH backend has both,
and keeps matrices of rows x keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tilewise

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # [batch, rows, heads, head_dim] each


def math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by PyTorch's MATH backend."""
    with sdpa_kernel(SDPBackend.MATH):
        out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    return out.transpose(1, 2)


BACKENDS: dict[str, Attention] = {"tilewise": tilewise.attention, "MATH": math}


def kept_bytes(call: Callable[[], object]) -> int:
    """Bytes of the tensors that autograd saves for the backward during the call."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        call()
    return sum(storages.values())


def measure(call: Callable[[Attention, Tensor, Tensor, Tensor], object], rows: int) -> str:
    """Runs the call with each backend on [1, rows, 4, 32] and says what it costs."""
    q, k, v = torch.randn(3, 1, rows, 4, 32)
    texts = []
    for name, attention in BACKENDS.items():
        kept = kept_bytes(lambda f=attention: call(f, q, k, v))
        start = time.perf_counter()
        call(attention, q, k, v)
        seconds = time.perf_counter() - start
        texts.append(f"{name} {seconds * 1e3:.0f} ms, {kept / 2**20:.0f} MiB kept")
    return f"at {rows} rows: {'; '.join(texts)}"
