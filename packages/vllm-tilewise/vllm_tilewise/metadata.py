"""The batch as the kernels need it, which vLLM builds once per step for all layers of a group."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens


@dataclass
class TilewiseMetadata(AttentionMetadata):
    """B requests, whose new tokens are packed end to end. Tensors are on the device."""

    num_actual_tokens: int  # tokens before the padding of query, key, value and output
    query_start_loc: Tensor  # [B + 1] int32: boundaries of the new tokens of each request
    max_query_len: int
    seq_lens: Tensor  # [B] int32: tokens of each request in the cache after this step
    max_seq_len: int  # upper bound of seq_lens
    block_table: Tensor  # [B, width] int32
    slot_mapping: Tensor
    causal: bool = True
    # With decode context parallelism: tokens before this step that this rank stores, and an upper
    # bound of them, which is 0 on all ranks or on none.
    local_context_lens: Tensor | None = None
    max_local_context_len: int = 0


class TilewiseMetadataBuilder(AttentionMetadataBuilder[TilewiseMetadata]):
    """Builds the metadata without waiting for the GPU."""

    # A captured graph keeps max_query_len, which the kernels take as an upper bound: it may serve
    # other batches with as many new tokens per request, but not a longer prompt.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_update_block_table = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self._interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        if self.dcp_world_size > 1:  # a captured graph reads the lengths from here
            size = vllm_config.scheduler_config.max_num_seqs
            self._local_context_lens = torch.zeros(size, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TilewiseMetadata:
        """The metadata of a step. ``common_prefix_len`` is 0 in vLLM 0.33.

        Raises:
            ValueError: some requests are causal and others are not.
        """
        del common_prefix_len, fast_build
        given = common_attn_metadata
        if isinstance(given.causal, Tensor):
            raise ValueError(
                "causal differs from request to request, but this backend takes one value for all"
            )
        metadata = TilewiseMetadata(
            num_actual_tokens=given.num_actual_tokens,
            query_start_loc=given.query_start_loc,
            max_query_len=given.max_query_len,
            seq_lens=given.seq_lens,
            max_seq_len=given.max_seq_len,
            block_table=given.block_table_tensor,
            slot_mapping=given.slot_mapping,
            causal=given.causal,
        )
        if self.dcp_world_size > 1:
            self._add_local_context(metadata, given)
        return metadata

    def update_block_table(
        self, metadata: TilewiseMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> TilewiseMetadata:
        changed = copy.copy(metadata)
        changed.block_table, changed.slot_mapping = blk_table, slot_mapping
        return changed

    def _add_local_context(
        self, metadata: TilewiseMetadata, given: CommonAttentionMetadata
    ) -> None:
        """Sets the lengths of what this rank stores of the tokens before this step."""
        starts, count = given.query_start_loc, given.num_reqs
        context = get_dcp_local_seq_lens(
            given.seq_lens - (starts[1:] - starts[:-1]),
            self.dcp_world_size,
            self.dcp_rank,
            self._interleave,
        )
        self._local_context_lens[:count] = context
        self._local_context_lens[count:] = 0
        metadata.local_context_lens = self._local_context_lens[:count]
        # The bound is 0 on all ranks or on none, because the ranks communicate if it is not 0: it
        # follows from the lengths of whole requests.
        if given.seq_lens_cpu_upper_bound is not None:
            ends = given.query_start_loc_cpu[: count + 1]
            longest = (given.seq_lens_cpu_upper_bound[:count] - (ends[1:] - ends[:-1])).max()
            if not int(longest):
                return
        unit = self.dcp_world_size * self._interleave
        metadata.max_local_context_len = -(-given.max_seq_len // unit) * self._interleave
