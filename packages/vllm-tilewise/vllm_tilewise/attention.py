"""The attention of one layer: vLLM's cache is written, then read by Tilewise's kernels."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

import tilewise

from .cache import split_cache, write_cache
from .metadata import TilewiseMetadata

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class TilewiseImpl(AttentionImpl[TilewiseMetadata]):
    """See vLLM's ``AttentionImpl``, whose arguments these are.

    Args:
        num_heads: Query heads Hq of this rank.
        head_size: Head dimension D of q and k.
        scale: Factor of q.k.
        num_kv_heads: Key/value heads Hkv of this rank; None is num_heads.
        alibi_slopes: Hq slopes, or None.
        sliding_window: Number of tokens that a token sees, including itself; None is all.
        kv_cache_dtype: "auto", a 16-bit type, "fp8" or "fp8_e4m3".
        logits_soft_cap: c > 0 replaces a score s by c * tanh(s / c).
        attn_type: One of vLLM's ``AttentionType``.
        kv_sharing_target_layer_name: Not used: vLLM passes the cache that is shared.
        sinks: [Hq], the sinks, or None.

    Raises:
        NotImplementedError: decode context parallelism is combined with windows, ALiBi or sinks.
    """

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.attn_type, self.kv_cache_dtype = attn_type, kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sliding_window = sliding_window
        self.sinks = sinks
        self.alibi_slopes = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self._options: dict[str, Any] = dict(
            scale=self.scale,
            softcap=float(logits_soft_cap or 0.0),
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        if self.dcp_world_size > 1:
            self._prepare_dcp()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TilewiseMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the attention of the new tokens to ``output``.

        Args:
            layer: vLLM's layer, with the scales of an fp8 cache.
            query: [T, Hq, D]; rows from ``attn_metadata.num_actual_tokens`` on are padding.
            key: [T, Hkv, D], the new keys, which are in the cache already.
            value: [T, Hkv, Dv].
            kv_cache: [pages, Hkv, page size, D + Dv] with any strides; Dv <= D.
            attn_metadata: None in vLLM's memory profiling, whose output is 0.
            output: [T, Hq, Dv]. Its padding is not written.

        Returns:
            output.

        Raises:
            NotImplementedError: vLLM asks for a quantised output.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("this backend does not quantise its output")
        if attn_metadata is None:
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        q, out = query[:count], output[:count]
        if self.attn_type in _ENCODERS:
            out.copy_(self._attend_new(q, key[:count], value[:count], attn_metadata, False))
        elif self.dcp_world_size > 1:
            out.copy_(self._attend_dcp(layer, q, key[:count], value[:count], kv_cache,
                                       attn_metadata))  # fmt: skip
        else:
            lengths = attn_metadata.seq_lens, attn_metadata.max_seq_len
            band = self._band(attn_metadata.causal)
            out.copy_(self._attend_cache(layer, q, kv_cache, attn_metadata, lengths, **band))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values to the rows of the cache that ``slot_mapping`` names."""
        if self.attn_type not in _ENCODERS:
            write_cache(layer, key, value, kv_cache, slot_mapping, self.kv_cache_dtype)

    def _band(self, causal: bool) -> dict[str, Any]:
        """The options of causality and window, which reaches to both sides without causality."""
        if self.sliding_window is None:
            return dict(causal=causal)
        left = self.sliding_window - 1
        return dict(causal=causal, window=(left, 0 if causal else left))

    def _score_options(self, like: Tensor) -> dict[str, Any]:
        slopes = self.alibi_slopes
        if slopes is not None and slopes.device != like.device:
            slopes = self.alibi_slopes = slopes.to(like.device)
        return dict(self._options, alibi_slopes=slopes, sinks=self.sinks)

    def _attend_cache(
        self,
        layer: Any,
        q: Tensor,
        kv_cache: Tensor,
        metadata: TilewiseMetadata,
        lengths: tuple[Tensor, int],
        **more: Any,
    ) -> Any:
        """Attention to the stored tokens of each request: their numbers, and the largest one."""
        k_cache, v_cache, descales = split_cache(
            layer, kv_cache, self.head_size, self.kv_cache_dtype
        )
        return tilewise.attention_varlen(
            q,
            k_cache,
            v_cache,
            metadata.query_start_loc,
            None,
            seqused_k=lengths[0],
            block_table=metadata.block_table,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=lengths[1],
            **self._score_options(q),
            **descales,
            **more,
        )

    def _attend_new(
        self, q: Tensor, k: Tensor, v: Tensor, metadata: TilewiseMetadata, causal: bool, **more: Any
    ) -> Any:
        """Attention of the new tokens of each request to each other."""
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        return tilewise.attention_varlen(
            q,
            k,
            v,
            starts,
            starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            **self._band(causal),
            **self._score_options(q),
            **more,
        )

    # --- decode context parallelism: ranks store different tokens of a request ------------------

    def _prepare_dcp(self) -> None:
        for name in ("sliding_window", "alibi_slopes", "sinks"):
            if getattr(self, name) is not None:
                raise NotImplementedError(
                    f"this layer has {name}, which decode context parallelism does not support: "
                    "the tokens that a rank stores are not consecutive"
                )
        config = get_current_vllm_config_or_none()
        exchange = config.parallel_config.dcp_comm_backend if config else None
        self._combine = dcp_a2a_lse_reduce if exchange == "a2a" else cp_lse_ag_out_rs

    def _attend_dcp(
        self,
        layer: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        metadata: TilewiseMetadata,
    ) -> Tensor:
        """Attends to the stored tokens of all ranks and to the new ones, and merges the two."""
        new = self._attend_new(q, k, v, metadata, metadata.causal, return_lse=True)
        if not metadata.max_local_context_len:
            return new[0]
        group = get_dcp_group()
        context, lse = self._attend_cache(
            layer,
            group.all_gather(q.contiguous(), dim=1),  # the heads of all ranks
            kv_cache,
            metadata,
            (metadata.local_context_lens, metadata.max_local_context_len),
            causal=False,
            return_lse=True,
        )
        context, lse = self._combine(context, lse.transpose(0, 1), group, return_lse=True)
        lse = lse.transpose(0, 1).contiguous()
        return tilewise.merge_states(context, lse, *new)[0]
