"""The attention backend: SGLang's token pools, read by Tilewise's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch import Tensor

import tilewise


@dataclass
class Metadata:
    """B requests, whose new tokens are packed end to end."""

    cu_seqlens: Tensor  # [B + 1] int32: boundaries of the new tokens of each request
    longest: int  # largest number of new tokens of a request
    lengths: Tensor  # [B] int32: tokens of each request after this step
    longest_keys: int  # upper bound of lengths
    table: Tensor  # [B, width] int32: pages
    # For layers with a sliding window, where these have a pool of their own:
    window_table: Tensor | None = None
    window_slots: Tensor | None = None  # slots of the new tokens


class TilewiseBackend(AttentionBackend):
    """Attention over SGLang's paged key/value pool.

    Args:
        runner: SGLang's ``ModelRunner``.

    Raises:
        NotImplementedError: the model uses MLA, or speculative decoding or context parallelism is
            on.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        if runner.use_mla_backend:
            raise NotImplementedError("this backend does not support MLA")
        if getattr(runner.server_args, "speculative_algorithm", None):
            raise NotImplementedError("this backend does not support speculative decoding")
        for name in ("attn_cp_size", "dcp_size"):
            if (getattr(runner.server_args, name, None) or 1) > 1:
                raise NotImplementedError(
                    f"{name} is {getattr(runner.server_args, name)}, but this backend does not "
                    "support context parallelism: it must be 1"
                )
        # The method with which models ask for a mask that shows image tokens to each other.
        self._masks_images = hasattr(getattr(runner, "model", None), "prepare_attn_masks")
        self._device, self._page_size = runner.device, runner.page_size
        self._context = runner.model_config.context_len
        # SGLang itself reads these two attributes.
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = pool = runner.token_to_kv_pool
        self._has_window_pool = isinstance(pool, SWAKVPool) and pool.swa_layer_nums > 0
        self._graph: Metadata | None = None  # the tensors that captured graphs read

    # --- the batch ------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Builds the metadata of a step that runs without a CUDA graph."""
        self.forward_metadata = self._metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the tensors that graphs of decoding steps read."""
        del max_num_tokens

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        width = -(-self._context // self._page_size)
        self._graph = Metadata(
            cu_seqlens=torch.arange(max_bs + 1, dtype=torch.int32, device=self._device),
            longest=1,
            lengths=integers(max_bs),
            longest_keys=self._context,  # a bound for every replay, not only the capture
            table=integers(max_bs, width),
            window_table=integers(max_bs, width) if self._has_window_pool else None,
            window_slots=integers(max_bs, dtype=torch.int64) if self._has_window_pool else None,
        )

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fills the tensors that a graph reads, before it is captured or replayed."""
        del in_capture
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise NotImplementedError(
                f"forward_mode is {forward_batch.forward_mode.name}, but this backend supports "
                "CUDA graphs only for decoding"
            )
        graph, now = self._graph, self._metadata(forward_batch)
        assert graph is not None, "SGLang calls init_cuda_graph_state first"
        count, width = now.table.shape
        views = dict(lengths=graph.lengths[:count], table=graph.table[:count])
        views["lengths"].copy_(now.lengths)
        views["table"][:, :width].copy_(now.table)
        if now.window_table is not None and now.window_slots is not None:
            assert graph.window_table is not None and graph.window_slots is not None
            views["window_table"] = graph.window_table[:count]
            views["window_table"][:, :width].copy_(now.window_table)
            views["window_slots"] = graph.window_slots[: len(now.window_slots)]
            views["window_slots"].copy_(now.window_slots)
        self.forward_metadata = Metadata(
            cu_seqlens=graph.cu_seqlens[: count + 1],
            longest=1,
            longest_keys=graph.longest_keys,
            **views,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1  # the length of the requests that pad a batch

    def _metadata(self, batch: Any) -> Metadata:
        mode = batch.forward_mode
        if mode.is_target_verify() or mode.is_draft_extend_v2() or mode.is_dllm_extend():
            raise NotImplementedError(f"forward_mode is {mode.name}, which is not supported")
        if batch.encoder_lens is not None:
            raise NotImplementedError("this backend does not support encoder-decoder models")
        if self._masks_images and mode.is_extend() and batch.contains_image_inputs():
            raise NotImplementedError(
                "a request contains an image, whose tokens see each other in this model, but this "
                "backend supports causal masks only"
            )
        count, device = batch.batch_size, batch.seq_lens.device
        longest_keys = self._context
        if batch.seq_lens_cpu is not None and batch.seq_lens_cpu.numel():
            longest_keys = int(batch.seq_lens_cpu.max())
        if mode.is_decode_or_idle():
            longest = 1
            cu_seqlens = torch.arange(count + 1, dtype=torch.int32, device=device)
        else:
            longest = max(batch.extend_seq_lens_cpu)
            ends = batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
            cu_seqlens = torch.nn.functional.pad(ends, (1, 0))
        # The slots of the first token of each page; a slot is page * page size + row.
        first = self.req_to_token_pool.req_to_token[:, : longest_keys : self._page_size]
        slots = first[batch.req_pool_indices]
        metadata = Metadata(
            cu_seqlens=cu_seqlens,
            longest=longest,
            lengths=batch.seq_lens.to(torch.int32),
            longest_keys=longest_keys,
            table=slots // self._page_size,
        )
        if self._has_window_pool:
            translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
            metadata.window_table = translate(slots).to(torch.int32) // self._page_size
            metadata.window_slots = translate(batch.out_cache_loc)
        return metadata

    # --- a layer --------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **other: Any,
    ) -> Tensor:
        """Stores the new keys and values, and attends to all keys of each request.

        Args:
            q: [T, Hq * D]; rows past the last new token are padding, for which the result is 0.
            k: [T, Hkv, D], or None if the cache has the new keys and values already.
            v: [T, Hkv, Dv], or None.
            layer: SGLang's ``RadixAttention``.
            forward_batch: The batch of ``init_forward_metadata``.
            save_kv_cache: Whether to store k and v.
            sinks: [Hq], the sinks.
            other: Options of other backends, which must be off.

        Returns:
            [T, Hq * Dv].

        Raises:
            NotImplementedError: an option is not supported.
        """
        for name, value in other.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"{name} is given, which this backend does not support")
        if layer.is_cross_attention or layer.xai_temperature_len > 0:
            raise NotImplementedError(
                "the layer has cross-attention or a temperature that grows with the length, which "
                "this backend does not support"
            )
        metadata = self.forward_metadata
        if save_kv_cache and k is not None and v is not None:
            where = KVWriteLoc.for_layer(forward_batch, layer, swa_loc=metadata.window_slots)
            self.token_to_kv_pool.set_kv_buffer(layer, where, k, v, layer.k_scale, layer.v_scale)
        out = self._attend(
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim), layer, metadata, sinks
        )
        return out.flatten(1)

    forward_decode = forward_extend

    def _attend(self, q: Tensor, layer: Any, metadata: Metadata, sinks: Tensor | None) -> Tensor:
        causal = layer.attn_type == AttentionType.DECODER
        options: dict[str, Any] = dict(
            causal=causal, scale=layer.scaling, softcap=layer.logit_cap or 0.0, sinks=sinks
        )
        table = metadata.table
        if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
            left = layer.sliding_window_size  # SGLang counts the keys before the token itself
            options["window"] = (left, 0 if causal else left)
            table = table if metadata.window_table is None else metadata.window_table
        pages_k, pages_v = (
            self._pages(x)
            for x in (
                self.token_to_kv_pool.get_key_buffer(layer.layer_id),
                self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            )
        )
        if pages_k.dtype == torch.float8_e4m3fn:
            for name, scale in (("k_descale", layer.k_scale), ("v_descale", layer.v_scale)):
                options[name] = None if scale is None else scale.reshape(1, 1).float()
        return tilewise.attention_varlen(
            q,
            pages_k,
            pages_v,
            metadata.cu_seqlens,
            None,
            seqused_k=metadata.lengths,
            block_table=table,
            max_seqlen_q=metadata.longest,
            max_seqlen_k=metadata.longest_keys,
            **options,
        )

    def _pages(self, rows: Tensor) -> Tensor:
        """Slots [slots, H, D] of the pool as pages [pages, page size, H, D]."""
        if rows.dim() != 3:
            raise NotImplementedError(
                f"the pool's tensors have {rows.dim()} dimensions, but this backend reads tensors "
                "of 3: unset SGLANG_USE_HND_KVCACHE"
            )
        pages = rows.shape[0] // self._page_size
        return rows[: pages * self._page_size].unflatten(0, (pages, self._page_size))
