"""The attention function that Transformers calls in every layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.utils import output_capturing

import tilewise
from tilewise import _ops, _plain, _torch
from tilewise._check import is_one_or
from tilewise._request import Request

from .._bool_masks import as_blocks
from .._masks import as_bias
from ._compact import CAUSAL, FULL, Band, CompactMask
from ._packing import packed_boundaries, values_are_unavailable

# Arguments that change the result in a way that this function does not support.
_UNSUPPORTED = ("block_indices", "head_mask")
# The keyword arguments that rule out the fast path; position_ids do so only for packed sequences.
_RELEVANT = frozenset(
    (
        *_UNSUPPORTED,
        "output_attentions",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "block_table",
        "indices",
        "sinks",
    )
)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, as ``transformers.AttentionInterface`` defines it.

    Args:
        module: The layer, whose ``is_causal`` applies unless it is given here or in the mask.
        query: [batch, heads, rows, head_dim], float32, float16 or bfloat16.
        key: [batch, heads_kv, keys, head_dim].
        value: [batch, heads_kv, keys, head_dim_v].
        attention_mask: The result of ``create_mask``; or [batch, keys], True for the keys that are
            seen; or [batch, 1 or heads, rows, keys], boolean (True: seen) or added to the scores. A
            mask of four dimensions replaces causality and window.
        dropout: Probability of dropping a weight.
        scaling: Factor of the scores; None is 1 / sqrt(head_dim).
        sliding_window: Number of keys that a row sees, including its own (bidirectional: on each
            side). As in eager attention, the window is ignored if there is no mask, no boundaries
            and no paged cache.
        softcap: As in ``tilewise.attention``.
        is_causal: Whether rows see no later keys.
        s_aux: [heads], the sinks: a logit of each head beside its keys, without a value.
        position_bias: [1 or batch, heads, rows, keys], added to the scores.
        cache: A paged cache of continuous batching that does not contain the new keys yet.
        kwargs: ``cu_seq_lens_q`` and ``_k``, ``max_length_q`` and ``_k`` of packed sequences; the
            arguments of ``paged_attention`` for a paged cache; ``position_ids``; ``indices``
            [batch, rows, selected] of the keys that each row selects; ``sinks`` [batch, heads,
            rows, 1], a finite logit of each row beside its keys, without a value. Others are
            ignored.

    Returns:
        [batch, rows, heads, head_dim_v], and None in place of the matrix of weights.

    Raises:
        TypeError: the query is float64.
        ValueError: the layer needs something that cannot be computed exactly.
    """
    compact: CompactMask | None = None
    if kwargs.get("indices") is not None:
        attention_mask = _selected(attention_mask, kwargs["indices"], key)
    if isinstance(attention_mask, CompactMask):
        compact = _if_applicable(attention_mask, query, key)
        if compact is None:
            attention_mask = attention_mask.dense()
    if compact is not None:
        band = compact.terms.band  # as in eager attention, the mask replaces causality and window
    else:
        causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
        band = _band(causal, sliding_window if _has_window(attention_mask, cache, kwargs) else None)
    boundaries = None
    if "position_ids" in kwargs and query.shape[2] > 1:
        boundaries = _boundaries_by_positions(query, key, attention_mask, compact, kwargs)
    if (
        dropout == 0.0 and s_aux is None and position_bias is None and cache is None
        and (compact is not None or attention_mask is None) and boundaries is None
        and _RELEVANT.isdisjoint(kwargs) and not _collects_weights()
    ):  # fmt: skip
        out = _fast_path(query, key, value, compact, band, scaling, softcap or 0.0)
        if out is not None:
            return out, None
    _refuse(module, query, kwargs)
    options: dict[str, Any] = dict(
        scale=scaling, softcap=softcap or 0.0, sinks=s_aux, dropout_p=dropout
    )
    sinks = kwargs.get("sinks")
    if sinks is not None:
        _check_row_sinks(sinks, query)
        options["return_lse"] = True
    has_pages = kwargs.get("block_table") is not None
    for name, given in (("position_bias", position_bias), ("sinks", sinks)):
        if has_pages and given is not None:
            raise ValueError(
                f"{name} is given with block_table, but tilewise does not support it with a "
                "paged cache: pass None, or load the model with another attn_implementation"
            )
    if cache is not None:  # from Transformers 5.24 on, the layer itself updates the cache
        key, value = cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
        )
    if has_pages:
        from ._paged import paged_attention

        return paged_attention(query, key, value, sliding_window, options, kwargs), None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    packed = kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None
    # For continuous batching, older versions of Transformers pass equivalent boundaries as well as
    # a dense mask.
    if packed and (cache is None or attention_mask is None or compact is not None):
        result = _packed(q, k, v, attention_mask, position_bias, band, options, kwargs)
    elif boundaries is not None:
        _refuse_bias_of_packed(position_bias)
        result = _packed_rows(q, k, v, band, options, boundaries, boundaries)
    elif compact is not None:
        result = _compactly_masked(q, k, v, compact, position_bias, options)
    else:
        result = _masked(q, k, v, attention_mask, position_bias, band, options)
    if sinks is not None:
        out, lse = result
        result = _beside_row_sinks(out, lse, sinks)
    return result, None


def _check_row_sinks(sinks: Tensor, query: Tensor) -> None:
    expected = [*query.shape[:3], 1]
    if list(sinks.shape) != expected:
        raise ValueError(
            f"sinks has shape {list(sinks.shape)}, but must be [batch, heads, rows, 1], here "
            f"{expected}; a sink of each head is named s_aux"
        )


def _beside_row_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The output [batch, rows, heads, head_dim] if a sink of each row takes part in the softmax.

    The keys keep the share exp(lse) / (exp(lse) + exp(sink)) of the weight; lse is [batch, heads,
    rows].
    """
    share = torch.sigmoid(lse.unsqueeze(-1) - sinks.float())
    return (out * share.transpose(1, 2)).to(out.dtype)


def _selected(mask: Tensor | None, indices: Tensor, key: Tensor) -> Tensor:
    """The mask in which each row sees only the keys of indices [batch, rows, selected]."""
    if mask is None:
        raise ValueError(
            "indices, the keys that each row selects, are given, but attention_mask is None: pass "
            "a mask [batch, 1, rows, keys], from which tilewise removes the other keys"
        )
    dense = mask.dense() if isinstance(mask, CompactMask) else mask
    shape = (*indices.shape[:2], key.shape[2])
    hidden = torch.ones(shape, dtype=torch.bool, device=key.device)
    hidden = hidden.scatter(-1, indices.long(), False)[:, None]
    if dense.dtype == torch.bool:
        return dense & ~hidden
    return dense.masked_fill(hidden, torch.finfo(dense.dtype).min)


def _has_window(mask: Tensor | None, cache: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the window of a layer applies.

    The window is part of every mask that Transformers makes. A model that passes None therefore
    attends to every key, as DiffusionGemma's decoder does although its layers have a window.
    """
    if mask is not None or cache is not None:
        return True
    return kwargs.get("cu_seq_lens_q") is not None or kwargs.get("block_table") is not None


def _if_applicable(mask: CompactMask, query: Tensor, key: Tensor) -> CompactMask | None:
    """The mask, if its description is valid for the rows and keys of this layer."""
    batch, _, rows, keys = mask.shape
    fits = query.shape[0] == batch and query.shape[2] == rows and key.shape[2] == keys
    return mask if fits and (torch.compiler.is_compiling() or not mask.is_changed()) else None


def _boundaries_by_positions(
    query: Tensor, key: Tensor, mask: Tensor | None, compact: CompactMask | None,
    kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """cu_seqlens of packed sequences if only position_ids describe them, no mask or argument."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        return None
    if kwargs.get("cu_seq_lens_q") is not None or kwargs.get("block_table") is not None:
        return None
    if compact is None:
        if mask is not None:
            return None
    elif not compact.is_band():
        return None
    return packed_boundaries(kwargs["position_ids"], query.shape[2], compact is not None)


def _fast_path(
    query: Tensor, key: Tensor, value: Tensor, mask: CompactMask | None, band: Band, scaling: Any,
    softcap: float,
) -> Tensor | None:  # fmt: skip
    """The result of a layer without further options, or None: use the general path.

    With padding or a softcap, only calls without a gradient can take it.
    """
    first = end = rows = None
    if mask is not None:
        if mask.terms.flagged or mask.boundaries is not None or mask.entries is not None:
            return None
        if mask.spans is not None:
            first, end, rows = mask.spans
    if first is None and not softcap:
        causal, window = band
        if query.shape[2] == 1:  # one row has the same memory layout as "bshd" and as "bhsd"
            out = _plain.attention(
                query, key, value, causal, window, scaling, False, False, False, "bhsd"
            )
            return None if out is None else out.transpose(1, 2)
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        result: Tensor | None = _plain.attention(
            q, k, v, causal, window, scaling, False, False, False, "bshd"
        )
        return result
    if torch.is_grad_enabled():
        return None
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    results = _plain.indexed(
        q, k, v, None, None, rows, end, None, None, first, *band, scaling, softcap, 0, 0, 0,
        False, False, False,
    )  # fmt: skip
    return None if results is None else results[0]


def _collects_weights() -> bool:
    """Whether the model collects attention weights, which some models do not tell their layers."""
    if torch.compiler.is_compiling():
        return False
    collected = output_capturing._active_collector.get()
    return bool(collected) and any(name.endswith("attentions") for name in collected)


def _refuse(module: torch.nn.Module, query: Tensor, kwargs: dict[str, Any]) -> None:
    if query.dtype == torch.float64:
        raise TypeError(
            "query has dtype torch.float64, but must be torch.float32, torch.float16 or "
            "torch.bfloat16: call model.float(), or load the model with dtype=torch.float32 or "
            'with attn_implementation="eager"'
        )
    if kwargs.get("output_attentions") or _collects_weights():
        raise ValueError(
            "output_attentions is True, but tilewise never computes the matrix of attention "
            'weights: load the model with attn_implementation="eager"'
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} passes {name} to its attention function, but tilewise "
                "does not support it: load the model with another attn_implementation"
            )


def _band(causal: bool, sliding_window: int | None) -> Band:
    if sliding_window is None:
        return CAUSAL if causal else FULL
    return Band(causal, (sliding_window - 1, 0 if causal else sliding_window - 1))


# --- dense: each row of the batch is one sequence -------------------------------------------------
# The functions below return out, and lse as well if `options` has return_lse.


def _compactly_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: CompactMask, position_bias: Tensor | None,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Attention with a compact mask, computed from its description."""
    if mask.boundaries is not None:
        _refuse_bias_of_packed(position_bias)
        return _packed_rows(q, k, v, mask.terms.band, options, mask.boundaries, mask.boundaries)
    band, spans, flagged = mask.terms.band, mask.spans, mask.terms.flagged
    bias = as_bias("position_bias", position_bias, q)
    if bias is not None and mask.terms.leftpad:
        # The columns of the bias count from key 0, so keys before a span must not be skipped.
        assert spans is not None
        flagged, spans = True, torch.stack([torch.zeros_like(spans[0]), spans[1], spans[2]])
    if flagged:
        assert mask.visible is not None
        bias = _sum(bias, as_bias("attention_mask", mask.visible[:, None, None], q))
    if spans is None and mask.entries is None:
        return tilewise.attention(
            q, k, v, causal=band.causal, window=band.window, bias=bias, **options
        )
    options = dict(options)
    return_lse = options.pop("return_lse", False)
    request = Request(causal=band.causal, window=band.window, bias=bias, **options)
    q, k, v, prepared = _torch.prepare_dense(q, k, v, "bshd", request)
    if spans is not None:
        prepared = prepared._replace(leftpad_k=spans[0], seqused_k=spans[1], seqused_q=spans[2])
    prepared = prepared._replace(mask_entries=mask.entries, mask_first=mask.first)
    out, lse = _ops.forward(q, k, v, prepared)[:2]
    return (out, lse) if return_lse else out


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor | None, band: Band,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    """Attention with a mask of four dimensions, with a mask [batch, keys], or without a mask."""
    bias = as_bias("position_bias", position_bias, q)
    if mask is None:
        pass
    elif mask.dim() == 2:
        seen = _visible_keys(mask, q.shape[0], k.shape[1])
        k, v = k[:, : seen.shape[-1]], v[:, : seen.shape[-1]]
        bias = _sum(bias, as_bias("attention_mask", seen, q))
    elif mask.dim() == 4:
        band = FULL
        _check_dense_mask(mask, q, k)
        if mask.dtype == torch.bool and mask.shape[2:] == (q.shape[1], k.shape[1]):
            blocks = None
            if not values_are_unavailable(mask):
                head_dim = max(q.shape[3], v.shape[3])
                blocks = as_blocks(mask, q, q.shape[2], head_dim)
            if blocks is not None:
                return tilewise.attention(q, k, v, mask=blocks, bias=bias, **options)
        bias = _sum(bias, as_bias("attention_mask", mask, q))
    else:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)} and dtype {mask.dtype}, but must be "
            "[batch, keys] or [batch, 1 or heads, rows, keys]"
        )
    return tilewise.attention(q, k, v, causal=band.causal, window=band.window, bias=bias, **options)


def _check_dense_mask(mask: Tensor, q: Tensor, k: Tensor) -> None:
    """Refuses a mask that cannot be broadcast to [batch, heads, rows, keys]."""
    expected = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if any(size not in (1, full) for size, full in zip(mask.shape, expected, strict=True)):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, but this layer needs [batch, 1 or "
            f"heads, rows, keys], here {list(expected)}"
        )


def _visible_keys(mask: Tensor, batch: int, keys: int) -> Tensor:
    """The mask [batch, keys] as booleans [batch, 1, 1, keys]."""
    if mask.is_floating_point():
        raise ValueError(
            f"attention_mask [batch, keys] has dtype {mask.dtype}, but must be boolean or integer; "
            "a mask that is added to the scores has four dimensions"
        )
    if not is_one_or(mask.shape[0], batch) or mask.shape[-1] > keys or mask.numel() == 0:
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, but must be [batch, keys], here "
            f"{[batch, keys]}"
        )
    return mask.bool().reshape(mask.shape[0], 1, 1, mask.shape[-1])


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


# --- packed: the rows of all sequences laid end to end --------------------------------------------


def _packed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, position_bias: Tensor | None, band: Band,
    options: dict[str, Any], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Attention of packed sequences whose boundaries are given.

    A mask that Transformers made from position_ids describes the same sequences, and is ignored.
    """
    redundant = mask is None or (
        isinstance(mask, CompactMask) and (mask.boundaries is not None or mask.is_band())
    )
    if not redundant or position_bias is not None:
        name = "position_bias" if position_bias is not None else "attention_mask"
        raise ValueError(
            f"cu_seq_lens_q and {name} are both given, but tilewise computes packed sequences only "
            "from their boundaries: pass one of them"
        )
    return _packed_rows(
        q,
        k,
        v,
        band,
        options,
        kwargs["cu_seq_lens_q"],
        kwargs["cu_seq_lens_k"],
        _bound(kwargs, "q"),
        _bound(kwargs, "k"),
    )


def _refuse_bias_of_packed(position_bias: Tensor | None) -> None:
    if position_bias is not None:
        raise ValueError(
            "position_bias is given, but tilewise does not support it with packed sequences"
        )


def _bound(kwargs: dict[str, Any], side: str) -> int | None:
    """The longest sequence, which has two names; None for a tensor, to avoid a synchronisation."""
    value = kwargs.get(f"max_length_{side}", kwargs.get(f"max_seqlen_{side}"))
    return value if isinstance(value, int) and value > 0 else None


def _packed_rows(
    q: Tensor, k: Tensor, v: Tensor, band: Band, options: dict[str, Any], boundaries_q: Tensor,
    boundaries_k: Tensor, max_q: int | None = None, max_k: int | None = None,
) -> Any:  # fmt: skip
    result = tilewise.attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        boundaries_q.to(torch.int32),
        boundaries_k.to(torch.int32),
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        causal=band.causal,
        window=band.window,
        **options,
    )
    if not options.get("return_lse"):
        return result.unflatten(0, (q.shape[0], -1))
    out, lse = result  # lse is [heads, rows of all sequences]
    return out.unflatten(0, (q.shape[0], -1)), lse.unflatten(1, (q.shape[0], -1)).transpose(0, 1)
