"""Continuous batching: attention to a paged cache, and its registration in Transformers."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

import tilewise


def paged_attention(
    query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, options: dict[str, Any],
    kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Appends one new token per sequence to its pages, and attends to all tokens in them.

    Args:
        query: [1, heads, sequences, head_dim].
        key, value: [1, heads_kv, sequences, head_dim], not in the cache yet.
        sliding_window: As in ``attention``.
        options: scale, softcap, sinks and dropout_p.
        kwargs: k_cache and v_cache [pages, page_size, heads_kv, head_dim], block_table [sequences,
            pages of a sequence], and cu_seq_lens_k [sequences + 1], the cumulative lengths
            including the new tokens.

    Returns:
        [1, sequences, heads, head_dim].

    Raises:
        ValueError: dropout is on.
    """
    if options.pop("dropout_p"):
        raise ValueError("dropout is on, but must be off with a paged cache: call model.eval()")
    q, k, v = (tensor.squeeze(0).transpose(0, 1).unsqueeze(1) for tensor in (query, key, value))
    sequences = q.shape[0]
    ends = kwargs["cu_seq_lens_k"][: sequences + 1]
    out = tilewise.attention_with_kvcache(
        q,
        kwargs["k_cache"],
        kwargs["v_cache"],
        k,
        v,
        # Sequences that pad the batch have no keys and no pages; they use page 0, which is scratch.
        cache_seqlens=(ends.diff() - 1).clamp(min=0),
        block_table=kwargs["block_table"][:sequences].clamp(min=0),
        causal=True,
        window=(None if sliding_window is None else sliding_window - 1, None),
        **options,
    )
    return out.squeeze(1).unsqueeze(0)


def allow_continuous_batching(name: str) -> None:
    """Lets ``generate_batch`` use the implementation of this name.

    Transformers accepts only its own names and those that contain "flash", for which it would load
    a package or a kernel from the Hub. It has no way to register another name, so this patches it.
    """
    from transformers.generation.continuous_batching import continuous_api, initialization

    manager = continuous_api.ContinuousBatchingManager
    switch = getattr(manager, "switch_to_cb_friendly_attn", None)
    if switch is None or hasattr(switch, "by_tilewise"):
        return  # for older versions the registered name with the prefix "paged|" is enough

    @functools.wraps(switch)
    def switch_others(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        if model.config._attn_implementation != name:
            switch(self, model, *args, **kwargs)

    setattr(switch_others, "by_tilewise", True)  # noqa: B010
    setattr(manager, "switch_to_cb_friendly_attn", switch_others)  # noqa: B010

    restrict = initialization.ensure_decode_fast_path_is_available

    @functools.wraps(restrict)
    def restrict_others(config: Any, cb_config: Any, user_requested: bool) -> None:
        ours = config._attn_implementation == name
        types = initialization.group_layers_by_attn_type(config) if ours else ()
        supported = ours and all(
            initialization.ATTN_TYPE_TO_ALLOCATOR[kind].supports_block_table for kind in types
        )
        if not supported:
            restrict(config, cb_config, user_requested)

    initialization.ensure_decode_fast_path_is_available = restrict_others
