"""What a model's mask becomes on its way to the attention function.

Transformers asks the mask function once per forward and kind of layer, and hands its result to the
attention function of every such layer as ``attention_mask``. Here that is one of

* a float mask [batch, 1, rows, keys] that says it all, causality and window included: for patterns
  that are none of the following;
* a ``Form``: integers of shape [form, 1 + causal, 1 + window, ...]. Layers need not tell the
  attention function whether they are causal and have a window, and some are wrong about it.

They have four dimensions because ``generate`` hands masks made ahead of time to the model, which
leaves alone what has four and reshapes what has fewer, and types that nobody else has for masks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils


class Form(enum.IntEnum):
    """The compact masks, by their first dimension, or by their type."""

    PLAIN = 0  # uint32 [0, ., ., 1]: the last row is aligned with the last key, and that is all
    PACKED = 1  # uint32 [1, ., ., sequences + 1]: boundaries of packed sequences
    SPANS = 3  # uint32 [3, ., ., batch]: first key, end of keys and rows in use of each sequence,
    #            the last such row aligned with the last key: padding, and caches that are not full
    KEYS = -1  # int16 [batch, ., ., keys]: the keys to be seen, beside causality and window; for
    #            padding amid them, and while values may not be looked at (tracing, CUDA graphs)


_NUMBERS, _FLAGS = torch.uint32, torch.int16
_NUMBERED = {0: Form.PLAIN, 1: Form.PACKED, 3: Form.SPANS}  # every layer asks: no call of Form()


def form_of(mask: Tensor | None) -> Form | None:
    """The form of a compact mask; None for all others."""
    if mask is None:
        return None
    dtype = mask.dtype
    if dtype == _NUMBERS:
        return _NUMBERED.get(mask.shape[0])
    return Form.KEYS if dtype == _FLAGS else None


class Said(NamedTuple):
    """What a mask says."""

    form: Form | None = None  # None: it is no compact one, and what follows is not set
    causal: bool = False
    window: bool = False
    boundaries: Tensor | None = None  # int32 [sequences + 1] of PACKED
    spans: tuple[Tensor, ...] | None = None  # int32 [batch] each of SPANS: first, end, rows


_NOTHING = Said()


def said_by(mask: Tensor) -> Said:
    """What a mask says. Every layer asks the same mask: the answer is kept with it."""
    if torch.compiler.is_compiling():
        return _read(mask)
    said: Said | None = getattr(mask, "_tilewise_said", None)
    if said is None:
        said = _read(mask)
        mask._tilewise_said = said
    return said


def _read(mask: Tensor) -> Said:
    form = form_of(mask)
    if form is None:
        return _NOTHING
    _, causal, window, _ = mask.shape
    said = Said(form, causal == 2, window == 2)
    if form is Form.PACKED:
        return said._replace(boundaries=_numbers(mask)[0])
    return said._replace(spans=_numbers(mask).unbind(0)) if form is Form.SPANS else said


def _numbers(mask: Tensor) -> Tensor:
    return mask[:, 0, 0].contiguous().view(torch.int32)


def _marked(mask: Tensor, pattern: Pattern) -> Tensor:
    """[form, numbers] with what the pattern is in between."""
    return mask[:, None, None].expand(-1, 1 + pattern.causal, 1 + pattern.window, -1)


class Pattern(NamedTuple):
    """A mask function of Transformers, understood."""

    causal: bool
    window: bool = False
    segments: Tensor | None = None  # [batch, rows]: which packed sequence a token belongs to


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
    """The mask function that is registered; arguments as those of ``masking_utils.sdpa_mask``.

    Args:
        batch_size, q_length, kv_length: Sizes of the mask.
        q_offset, kv_offset: Positions of the first query and the first key.
        mask_function: Transformers' description of the pattern.
        attention_mask: [batch, keys seen so far]: what is not padding.
        local_size: Window or chunk.
        allow_is_causal_skip, allow_is_bidirectional_skip: Set for the unaltered pattern.
        use_vmap: Set for patterns with functions of the caller.
        dtype: Of the model.
        config: Of the model.
        device: Of the model.

    Returns:
        A mask as the heading of this module describes them.
    """

    def everything() -> Tensor:
        seen = masking_utils.sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert seen is not None
        return additive(seen, dtype)

    blind = _blind(attention_mask, q_offset)
    if use_vmap:
        return everything()
    if blind:
        pattern = _pattern_by_flags(
            local_size, allow_is_causal_skip, allow_is_bidirectional_skip, config
        )
    else:
        pattern = _pattern(mask_function)
    if pattern is None:
        return everything()
    if pattern.segments is not None:
        return _marked(_boundaries(pattern.segments), pattern)

    end: int | Tensor | None = None  # of the keys that the last row may see; None: all
    if pattern.causal or pattern.window:
        aligned = not isinstance(q_offset, Tensor) and (
            q_offset + q_length == kv_offset + kv_length
        )
        if not aligned and not pattern.causal:
            return everything()
        if not aligned:
            end = q_offset + q_length - kv_offset
    if attention_mask is None:
        if end is not None:
            return _marked(_spans(batch_size, end, q_length, kv_length, device), pattern)
        return _marked(torch.empty((0, 1), dtype=_NUMBERS, device=device), pattern)
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    assert padding is not None
    visible = padding[:, kv_offset : kv_offset + kv_length]
    if blind:
        return _marked(visible.to(_FLAGS), pattern) if end is None else everything()
    mask = _described(visible, end, q_length, pattern)
    return everything() if mask is None else _marked(mask, pattern)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a boolean mask is True, minus infinity elsewhere."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, -math.inf)


def _blind(*tensors: Any) -> bool:
    """Whether values must not be looked at: while a graph is traced or captured."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    on_gpu = any(isinstance(tensor, Tensor) and tensor.is_cuda for tensor in tensors)
    return on_gpu and torch.cuda.is_current_stream_capturing()


# --- what a mask function means -------------------------------------------------------------------


def _pattern_by_flags(
    local_size: int | None, causal: bool, bidirectional: bool, config: Any
) -> Pattern | None:
    """Without looking at the function, which cannot be traced: the flags mark unaltered patterns.

    ``local_size`` is a window, or the chunk of a pattern that is not ours.
    """
    if not (causal or bidirectional):
        return None
    if local_size is None:
        return Pattern(causal)
    if local_size == getattr(config, "attention_chunk_size", None):
        return None
    return Pattern(causal, True) if local_size == getattr(config, "sliding_window", None) else None


def _pattern(function: Any) -> Pattern | None:
    """The pattern of a mask function, if it is one that needs no mask of rows times keys."""
    if function is masking_utils.causal_mask_function:
        return Pattern(True)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern(False)
    parts = _captured(function, "and_masks.<locals>.and_mask").get("mask_functions")
    if parts is None or len(parts) != 2:
        return None
    outer, inner = parts
    for packing, rest in ((outer, inner), (inner, outer)):  # the order of 5.23, and of the others
        packed = _captured(packing, "packed_sequence_mask_function.<locals>.inner_mask")
        if packed:
            remapped = _captured(rest, "remap_positions_for_packed_sequence.<locals>.inner_mask")
            pattern = _pattern(remapped.get("mask_function", rest))
            return pattern and pattern._replace(segments=packed["packed_sequence_mask"])
    if inner is masking_utils.causal_mask_function:
        overlay = _captured(outer, "sliding_window_overlay.<locals>.inner_mask")
        return Pattern(True, True) if overlay else None
    if inner is masking_utils.bidirectional_mask_function:
        overlay = _captured(outer, "sliding_window_bidirectional_overlay.<locals>.inner_mask")
        return Pattern(False, True) if overlay else None
    return None


def _captured(function: Any, name: str) -> dict[str, Any]:
    """The variables that a function of masking_utils with this name has captured, or nothing."""
    if getattr(function, "__qualname__", None) != name:
        return {}
    if function.__module__ != masking_utils.__name__:
        return {}
    cells = function.__closure__ or ()
    return {
        variable: cell.cell_contents
        for variable, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


# --- the compact forms ----------------------------------------------------------------------------


def _spans(
    batch: int, end: int | Tensor, rows: int, keys: int, device: torch.device | str
) -> Tensor:
    """Spans that are the same for each sequence; nothing is read back from the device."""
    spans = torch.empty((3, batch), dtype=torch.int32, device=device)
    spans[0] = 0
    spans[1] = end.clamp(0, keys) if isinstance(end, Tensor) else min(max(end, 0), keys)
    spans[2] = rows
    return spans.view(_NUMBERS)


def _described(
    visible: Tensor, end: int | Tensor | None, rows: int, pattern: Pattern
) -> Tensor | None:
    """The cheapest form for these visible keys [batch, keys], if any; one look at the device."""
    keys = visible.shape[1]
    position = torch.arange(1, keys + 1, device=visible.device)
    limit: int | Tensor = keys
    if end is not None:
        limit = end.clamp(max=keys) if isinstance(end, Tensor) else min(end, keys)
        visible = visible & (position <= limit)
    count = visible.sum(-1)
    last = (visible * position).amax(-1)
    first = keys - (visible * position.flip(0)).amax(-1)  # behind last where nothing is visible
    all_visible, one_run = torch.stack([visible.all(), (last - first <= count).all()]).tolist()
    if all_visible:
        return torch.empty((0, 1), dtype=_NUMBERS, device=visible.device)
    if not one_run:
        return visible.to(_FLAGS) if end is None else None
    in_use = torch.full_like(last, rows)
    if pattern.causal or pattern.window:  # rows behind the last key are padding, too
        in_use = (rows - (limit - last)).clamp(min=0)
    return torch.stack([last - count, last, in_use]).to(torch.int32).view(_NUMBERS)


def _boundaries(segments: Tensor) -> Tensor:
    """cu_seqlens of the rows of [batch, rows] laid end to end, from the segment of each token."""
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = starts.flatten().nonzero().flatten()
    total = first.new_full((1,), segments.numel())
    return torch.cat([first, total]).to(torch.int32).view(_NUMBERS)[None]
