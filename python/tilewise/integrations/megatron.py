"""Attention of Megatron-Core on Tilewise: ``TilewiseAttention`` for a layer's ``core_attention``.

Put it into the specification of the layers::

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from tilewise.integrations.megatron import TilewiseAttention

    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = TilewiseAttention
    model = GPTModel(config, transformer_layer_spec=spec, ...)
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import (
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch import Tensor

import tilewise

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
# A mask is read only for these; as in Transformer Engine, the others say everything by themselves.
_MASKED = (AttnMaskType.padding, AttnMaskType.padding_causal, AttnMaskType.arbitrary)


class TilewiseAttention(MegatronModule):
    """Exact attention in linear memory, for the formats sbhd and thd (packed sequences).

    The arguments are those of Megatron's ``DotProductAttention`` and ``TEDotProductAttention``. It
    follows these options of the configuration: attention_dropout, window_size and
    window_attn_skip_freq, softmax_type, deterministic_mode, batch_invariant_mode, qk_clip and
    log_max_attention_logit.

    Attributes:
        current_max_attn_logits: float32 [heads], the largest logits since Megatron last set it to
            None, for its ``clip_qk``; None unless qk_clip or log_max_attention_logit is on.

    Raises:
        NotImplementedError: the configuration asks for context parallelism.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        num_splits: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        del attention_type, k_channels, v_channels, cp_comm_type  # shapes say everything
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise NotImplementedError(
                f"context_parallel_size is {config.context_parallel_size}, but must be 1"
            )
        self.current_max_attn_logits: Tensor | None = None
        self.keeps_max_logits = any(
            getattr(config, name, False) for name in ("qk_clip", "log_max_attention_logit")
        )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp"])
        self.tp_group = pg_collection.tp
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attention_dropout = float(dropout)
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = tuple(config.window_size) if windowed else (None, None)
        self.batch_invariant = num_splits == 1 or getattr(config, "batch_invariant_mode", False)
        self._make_softmax_offset()

    def _make_softmax_offset(self) -> None:
        """A logit per head that takes part in the softmax: constant, a parameter, or None."""
        config = self.config
        self.softmax_offset: Tensor | None
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // self.tp_group.size()
        offset = torch.zeros(heads, device=device, dtype=config.params_dtype)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        if config.perform_initialization:
            config.init_method(offset)
        self.softmax_offset = torch.nn.Parameter(offset)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Attention of all heads, concatenated.

        Args:
            query: [rows, batch, heads, head_dim] (sbhd), or [rows of all sequences, heads,
                head_dim] (thd).
            key: [keys, batch, groups, head_dim], or [keys of all sequences, groups, head_dim].
            value: [keys, batch, groups, head_dim_v], or likewise.
            attention_mask: Boolean, True: the key is hidden; broadcastable to [batch, heads, rows,
                keys]. It is read only if the type of the mask is padding, padding_causal or
                arbitrary.
            attn_mask_type: The type of this call; None is that of the module. Causality is aligned
                with the last row and key.
            attention_bias: Added to the scores; broadcastable to [batch, heads, rows, keys].
            packed_seq_params: Megatron's ``PackedSeqParams`` of the format thd.
            num_splits: 1 makes results independent of the rest of the batch.

        Returns:
            [rows, batch, heads * head_dim_v], or [rows of all sequences, heads * head_dim_v].
        """
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        offset = self.softmax_offset
        options: dict[str, Any] = dict(
            causal=kind in _CAUSAL,
            window=self.window,
            scale=self.softmax_scale,
            sinks=None if offset is None else offset.float(),
            dropout_p=self.attention_dropout if self.training else 0.0,
            deterministic=self.config.deterministic_mode,
            batch_invariant=self.batch_invariant or num_splits == 1,
            bias=attention_bias,
            return_max_logits=self.keeps_max_logits,
        )
        with self._dropout_numbers(options["dropout_p"]):
            if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
                if attention_mask is not None and kind == AttnMaskType.arbitrary:
                    raise NotImplementedError(
                        "attention_mask is given with the type arbitrary, but packed sequences "
                        "(thd) have no matrix of scores to which it could belong"
                    )
                out = _packed(query, key, value, packed_seq_params, options)
                return self._without_logits(out).flatten(1)
            if attention_mask is not None and kind in _MASKED:
                options["bias"] = _with_mask(attention_bias, attention_mask, query)
            q, k, v = (x.transpose(0, 1) for x in (query, key, value))
            out = tilewise.attention(q, k, v, **options)
            return self._without_logits(out).transpose(0, 1).flatten(2)

    def _without_logits(self, results: Any) -> Tensor:
        """The output alone; the logits are kept, if they were returned."""
        if not self.keeps_max_logits:
            return results
        out, logits = results
        if len(logits) > 0:
            highest = logits.amax(dim=0)
            kept = self.current_max_attn_logits
            self.current_max_attn_logits = highest if kept is None else torch.maximum(kept, highest)
        return out

    def _dropout_numbers(self, p: float) -> contextlib.AbstractContextManager[Any]:
        """Random numbers that differ between tensor-parallel ranks, as Megatron's do."""
        tracker = tensor_parallel.get_cuda_rng_tracker()
        if p == 0.0 or self.config.sequence_parallel or not tracker.is_initialized():
            return contextlib.nullcontext()
        return tracker.fork()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """The learnable offsets of the softmax, which are sharded by heads."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _with_mask(bias: Tensor | None, mask: Tensor, query: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        raise TypeError(f"attention_mask has dtype {mask.dtype}, but must be torch.bool")
    if bias is None:
        bias = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, -torch.inf, bias)


def _packed(query: Tensor, key: Tensor, value: Tensor, packed: Any, options: dict[str, Any]) -> Any:
    """The format thd; ``cu_seqlens_*_padded`` may give a sequence more room than it fills."""
    starts, lengths = [], []
    for side in ("q", "kv"):
        used = getattr(packed, f"cu_seqlens_{side}")
        places = getattr(packed, f"cu_seqlens_{side}_padded", None)
        starts.append(used if places is None else places)
        lengths.append(None if places is None else used.diff())
    return tilewise.attention_varlen(
        query, key, value, *starts, max_seqlen_q=_bound(packed.max_seqlen_q),
        max_seqlen_k=_bound(packed.max_seqlen_kv), seqused_q=lengths[0], seqused_k=lengths[1],
        **options,
    )  # fmt: skip


def _bound(length: Any) -> int | None:
    """The length if it is an int; None for a tensor, because reading it may wait for the GPU."""
    return length if isinstance(length, int) else None
