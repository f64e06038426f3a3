"""The mask function that Transformers calls.

Transformers calls it once per forward pass and layer type, and passes the result as
``attention_mask`` to the attention function of every such layer. The result is a ``CompactMask`` if
the pattern is recognised, and the mask of eager attention otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from .._masks import prefers_masks
from ._compact import CAUSAL, FULL, Band, CompactMask, Terms
from ._packing import begin_forward, values_are_unavailable
from ._ranges import View, captured, ranges_of


class Pattern(NamedTuple):
    """The meaning of a mask function of Transformers."""

    band: Band
    segments: Tensor | None = None  # [batch, rows]: the packed sequence that each token belongs to


def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    config: Any = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor:
    """The mask function that is registered, with the arguments of ``masking_utils.sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: Sizes of the mask.
        q_offset, kv_offset: Positions of the first query and the first key.
        mask_function: Transformers' description of the pattern.
        attention_mask: [batch, keys seen so far], True for keys that are not padding.
        local_size: Size of the window or of the chunk.
        allow_is_causal_skip, allow_is_bidirectional_skip: Whether the pattern is causal or
            bidirectional, respectively, and not combined with other mask functions.
        use_vmap: Whether the pattern contains functions of the caller.
        dtype: Dtype of the model.
        config: Configuration of the model.
        device: Device of the model.

    Returns:
        A CompactMask, or the mask [batch, 1, rows, keys] of eager attention.
    """
    begin_forward()

    call = _Call(batch_size, q_length, kv_length, q_offset, kv_offset, dtype, torch.device(device))
    mask = None
    if not use_vmap:
        if values_are_unavailable(attention_mask, q_offset):
            pattern = _pattern_by_flags(
                local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config
            )
        else:
            pattern = _pattern(mask_function)
        if pattern is not None:
            mask = _compact(call, pattern, attention_mask)
    if mask is None:
        mask = _of_ranges(call, mask_function, attention_mask)
    if mask is not None:
        return mask
    dense = masking_utils.eager_mask(
        **call._asdict(),
        mask_function=mask_function,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
    )
    assert dense is not None
    return dense


class _Call(NamedTuple):
    """The sizes, offsets, dtype and device that ``create_mask`` was called with."""

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int | Tensor
    kv_offset: int
    dtype: torch.dtype
    device: torch.device


def _compact(call: _Call, pattern: Pattern, attention_mask: Tensor | None) -> Tensor | None:
    """The mask of this pattern and padding, or None if it has no compact form."""
    batch, rows, keys, q_offset, kv_offset, dtype, device = call
    shape, band = (batch, 1, rows, keys), pattern.band
    # PyTorch 2.11 cannot trace terms._replace.
    terms, flagged = (Terms(band, dtype, device, torch.finfo(dtype).min, x) for x in (False, True))
    if pattern.segments is not None:
        if attention_mask is not None or not pattern.segments.shape[-1] == rows == keys:
            return None
        return CompactMask(shape, terms, boundaries=_boundaries(pattern.segments))
    parts: dict[str, Tensor] = {}  # tensors of the CompactMask
    end: int | Tensor | None = None  # end of the keys that the last row may see; None: all keys
    aligned = not isinstance(q_offset, Tensor) and q_offset + rows == kv_offset + keys
    if band != FULL and not aligned:
        end = q_offset + rows - kv_offset
        if not band.causal or not (isinstance(end, Tensor) or 0 <= end <= keys):
            return None  # the last row sees later keys, or its position is not among the keys
        parts = dict(
            offset=_number(end - rows, device), spans=_spans(batch, end, rows, keys, device)
        )
    if attention_mask is None:
        return CompactMask(shape, terms, **parts)
    visible = _visible(attention_mask, keys, kv_offset)
    assert visible is not None
    if visible.shape[0] != batch:
        return None
    if values_are_unavailable(attention_mask, q_offset):
        return CompactMask(shape, flagged, visible=visible, **parts)
    reach = _reach(visible, end)
    if reach.all_visible:
        return CompactMask(shape, terms, **parts)
    parts["visible"] = visible
    if reach.contiguous:
        parts["spans"] = reach.spans(rows, band)
        terms = terms._replace(leftpad=reach.leftpad)
    else:
        terms = flagged
    return CompactMask(shape, terms, **parts)


def _of_ranges(call: _Call, function: Any, attention_mask: Tensor | None) -> Tensor | None:
    """The mask as ranges, or None if there are none, or the device prefers no masks in this dtype.

    The ranges follow from values, so the host waits for a GPU. They are not made while a graph is
    captured or tensors are fake, nor for a decoding step on a GPU, where waiting would cost more
    than the one row of the dense mask.
    """
    batch, rows, keys, q_offset, kv_offset, dtype, device = call
    if values_are_unavailable(attention_mask, q_offset) or not prefers_masks(device, dtype):
        return None
    if torch._guards.detect_fake_mode() is not None:
        return None
    if device.type == "cuda" and (rows == 1 or torch.cuda.is_current_stream_capturing()):
        return None
    visible = _visible(attention_mask, keys, kv_offset)
    if visible is not None and visible.shape[0] != batch:
        return None
    view = View(batch, rows, keys, int(q_offset), kv_offset)
    arrays = ranges_of(function, view, visible)
    shape = (batch, 1, rows, keys)
    if arrays is None or arrays[0].nbytes >= math.prod(shape) * dtype.itemsize:
        return None  # no ranges, or more bytes of them than of the dense mask
    entries, first = (torch.from_numpy(array).to(device) for array in arrays)
    terms = Terms(FULL, dtype, device, torch.finfo(dtype).min)
    return CompactMask(shape, terms, entries=entries, first=first)


def _visible(attention_mask: Tensor | None, keys: int, kv_offset: int) -> Tensor | None:
    """The keys of the mask that are not padding, bool [batch, keys]; None without padding."""
    padding = masking_utils.prepare_padding_mask(attention_mask, keys, kv_offset)
    return None if padding is None else padding[:, kv_offset : kv_offset + keys]


# --- the meaning of a mask function ---------------------------------------------------------------


def _pattern_by_flags(
    local_size: int | None, causal: bool, bidirectional: bool, config: Any
) -> Pattern | None:
    """The pattern that the flags of ``create_mask`` imply, for graphs that are traced or captured.

    causal and bidirectional are the ``allow_is_..._skip`` flags. ``local_size`` is a window, or a
    chunk, which has no compact form.
    """
    if not (causal or bidirectional):
        return None
    if local_size is None:
        return Pattern(CAUSAL if causal else FULL)
    if local_size == getattr(config, "attention_chunk_size", None):
        return None
    if local_size != getattr(config, "sliding_window", None):
        return None
    return Pattern(_causal_window(local_size) if causal else _window_of_both_sides(local_size))


def _pattern(function: Any) -> Pattern | None:
    """The pattern of a mask function, or None if it needs a dense mask."""
    if function is masking_utils.causal_mask_function:
        return Pattern(CAUSAL)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(FULL)
    parts = captured(function, "and_masks.<locals>.and_mask").get("mask_functions")
    if parts is None or len(parts) != 2:
        return None
    outer, inner = parts
    for packing, rest in ((outer, inner), (inner, outer)):  # Transformers 5.23 swaps the two
        packed = captured(packing, "packed_sequence_mask_function.<locals>.inner_mask")
        if packed:
            remapped = captured(rest, "remap_positions_for_packed_sequence.<locals>.inner_mask")
            pattern = _pattern(remapped.get("mask_function", rest))
            return pattern and pattern._replace(segments=packed["packed_sequence_mask"])
    if inner is masking_utils.causal_mask_function:
        overlay = captured(outer, "sliding_window_overlay.<locals>.inner_mask")
        return Pattern(_causal_window(overlay["sliding_window"])) if overlay else None
    if inner is masking_utils.bidirectional_mask_function:
        overlay = captured(outer, "sliding_window_bidirectional_overlay.<locals>.inner_mask")
        return Pattern(_window_of_both_sides(overlay["sliding_window"])) if overlay else None
    return None


def _causal_window(size: int) -> Band:
    """The band of ``sliding_window_overlay``: ``size`` keys, including the row's own."""
    return Band(True, (size - 1, 0))


def _window_of_both_sides(size: int) -> Band:
    """The band of ``sliding_window_bidirectional_overlay``: ``size`` keys on each side."""
    return Band(False, (size, size))


# --- the tensors of a CompactMask -----------------------------------------------------------------


def _number(value: int | Tensor, device: torch.device | str) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(())
    return torch.full((), value, dtype=torch.int64, device=device)


def _spans(
    batch: int, end: int | Tensor, rows: int, keys: int, device: torch.device | str
) -> Tensor:
    """The spans if they are the same for all sequences, computed without a read from the device."""
    spans = torch.empty((3, batch), dtype=torch.int32, device=device)
    spans[0] = 0
    spans[1] = end.clamp(0, keys) if isinstance(end, Tensor) else min(max(end, 0), keys)
    spans[2] = rows
    return spans


class Reach(NamedTuple):
    """The visible keys of the sequences of a batch, and properties that hold for all of them."""

    first: Tensor  # int [batch], the first visible key
    end: Tensor  # int [batch], one past the last visible key
    limit: int | Tensor  # one past the last key that the last row may see
    all_visible: bool
    contiguous: bool  # all keys from first to end are visible
    leftpad: bool  # some sequence has hidden keys before its first visible one

    def spans(self, rows: int, band: Band) -> Tensor:
        in_use = torch.full_like(self.end, rows)
        if band != FULL:  # rows after the last key are padding as well
            in_use = (rows - (self.limit - self.end)).clamp(min=0)
        return torch.stack([self.first, self.end, in_use]).to(torch.int32)


def _reach(visible: Tensor, end: int | Tensor | None) -> Reach:
    """The reach of visible keys [batch, keys] before the end, with one read from the device."""
    keys = visible.shape[1]
    position = torch.arange(1, keys + 1, device=visible.device)
    limit: int | Tensor = keys
    if end is not None:
        limit = end.clamp(max=keys) if isinstance(end, Tensor) else end
        visible = visible & (position <= limit)
    count = visible.sum(-1)
    last = (visible * position).amax(-1)
    first = keys - (visible * position.flip(0)).amax(-1)  # greater than last if no key is visible
    found = [(count == limit).all(), (last - first <= count).all(), (last > count).any()]
    return Reach(last - count, last, limit, *torch.stack(found).tolist())


def _boundaries(segments: Tensor) -> Tensor:
    """cu_seqlens of the rows of all sequences end to end, from the segments [batch, rows]."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = starts.flatten().nonzero().flatten()
    total = first.new_full((1,), segments.numel())
    return torch.cat([first, total]).to(torch.int32)
