"""vLLM's key/value cache as pages of keys and of values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FLOAT8 = torch.float8_e4m3fn
_FLOAT8_MAX = torch.finfo(_FLOAT8).max


def split_cache(
    layer: Any, kv_cache: Tensor, head_size: int, dtype: str
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Views of a layer's cache, and the factors of its stored values.

    Args:
        layer: vLLM's layer, whose ``_k_scale`` and ``_v_scale`` have one element, or Hkv.
        kv_cache: [pages, Hkv, page size, D + Dv] with any strides; uint8 or float8 if quantised.
        head_size: D.
        dtype: vLLM's name of the type of the cache.

    Returns:
        Keys [pages, page size, Hkv, D], values [..., Dv], and k_descale and v_descale, both
        float32 [1, 1 or Hkv], for a float8 cache.
    """
    rows = kv_cache.transpose(1, 2)
    k_cache, v_cache = rows[..., :head_size], rows[..., head_size:]
    if not dtype.startswith("fp8"):
        return k_cache, v_cache, {}
    descales = dict(
        k_descale=layer._k_scale.reshape(1, -1), v_descale=layer._v_scale.reshape(1, -1)
    )
    return k_cache.view(_FLOAT8), v_cache.view(_FLOAT8), descales


def write_cache(
    layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor, dtype: str
) -> None:
    """Stores new keys and values.

    Args:
        layer: As in ``split_cache``.
        key: [T, Hkv, D], with at least as many rows as slots.
        value: [T, Hkv, Dv].
        kv_cache: As in ``split_cache``.
        slots: [tokens], for each token page * page size + row, or -1 for none.
        dtype: As in ``split_cache``.
    """
    k_cache, v_cache, descales = split_cache(layer, kv_cache, key.shape[-1], dtype)
    if kv_cache.is_cuda:
        # vLLM's own kernel skips the slots of -1 without waiting for the GPU.
        from vllm._custom_ops import reshape_and_cache_flash

        if descales:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        reshape_and_cache_flash(
            key, value, k_cache, v_cache, slots, dtype, layer._k_scale, layer._v_scale
        )
        return
    given = (slots >= 0).nonzero().squeeze(1)
    pages, rows = slots[given] // k_cache.shape[1], slots[given] % k_cache.shape[1]
    for new, cache, scale in (
        (key[given], k_cache, descales.get("k_descale")),
        (value[given], v_cache, descales.get("v_descale")),
    ):
        if scale is not None:
            scaled = new.float() / scale.unsqueeze(-1)
            new = scaled.clamp(-_FLOAT8_MAX, _FLOAT8_MAX).to(_FLOAT8)
        cache[pages, rows] = new
