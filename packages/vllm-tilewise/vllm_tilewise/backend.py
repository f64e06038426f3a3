"""Tells vLLM what the backend supports; vLLM asks before it builds a model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from .attention import TilewiseImpl
from .metadata import TilewiseMetadataBuilder

_MAX_HEAD_SIZE = 512
_OLDEST_GPU = DeviceCapability(7, 5)


class TilewiseBackend(AttentionBackend):
    """Attention over vLLM's paged key/value cache by Tilewise's kernels."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = [
        "auto", "float16", "bfloat16", "fp8", "fp8_e4m3",
    ]  # fmt: skip
    # vLLM calls do_kv_cache_update before forward, so that layers which share a cache skip it.
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the member of the enum by whose name vLLM looks the backend up

    @staticmethod
    def get_impl_cls() -> type[TilewiseImpl]:
        return TilewiseImpl

    @staticmethod
    def get_builder_cls() -> type[TilewiseMetadataBuilder]:
        return TilewiseMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Multiples of 16, which GPUs read fastest; the kernels take pages of any size."""
        del kv_cache_spec
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= _MAX_HEAD_SIZE

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability | None) -> bool:
        return capability is None or capability >= _OLDEST_GPU  # None: no GPU

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *_: Any, **__: Any
    ) -> str | None:
        """Why the kernels cannot read a cache of this type with queries of ``dtype``, or None."""
        del head_size
        if kv_cache_dtype in (None, "auto"):
            return None
        if kv_cache_dtype.startswith("fp8"):
            if dtype != torch.float32:
                return None
            return f"a cache of {kv_cache_dtype} needs a 16-bit model, but this one is float32"
        if getattr(torch, kv_cache_dtype, None) == dtype:
            return None
        return f"a cache of {kv_cache_dtype} needs a model of that type, but this one is {dtype}"
