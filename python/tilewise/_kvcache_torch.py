"""Attention to a key/value cache on PyTorch tensors: the append, and the attention after it."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import _autograd, _check, _latent, _mask_tensors, _ops, _plain, _selected
from ._cache import (
    CacheLayout,
    Entries,
    NewKeys,
    check_cache,
    check_entries,
    check_max_rows,
    check_new,
    check_pages,
    check_rotary_columns,
    check_starts,
    common_length,
    in_python,
)
from ._ops import Options
from ._options import out_dtype_of
from ._request import Request
from ._torch import (
    _check_bias,
    _full_keys,
    _longest,
    as_array,
    batch_of,
    check_new_rows,
    check_tensors,
    contiguous_columns,
    integers,
    score_options,
    with_descale,
)

_WIDER_THAN_INT32 = (torch.int64, torch.uint32, torch.uint64)


def index_tensor(name: str, x: Any, device: torch.device) -> Tensor | None:
    """An optional index tensor as contiguous int32 on the device; out-of-range entries stay so."""
    x = integers(name, x)
    if x is None:
        return None
    if x.dtype in _WIDER_THAN_INT32:
        x = x.to(torch.int64).clamp(*_check.INT32)
    return x.to(device=device, dtype=torch.int32).contiguous()


def cache_lengths(cache_seqlens: Any, batch: int, device: torch.device) -> Tensor | None:
    """The int32 tensor [batch] on the device of cache_seqlens, which is an int or a tensor."""
    if cache_seqlens is None:
        return None
    if not isinstance(cache_seqlens, Tensor):
        length = common_length(cache_seqlens)
        return torch.full((batch,), length, dtype=torch.int32, device=device)
    _check.shape("cache_seqlens", cache_seqlens, (batch,), "one length per sequence")
    return index_tensor("cache_seqlens", cache_seqlens, device)


def _has_values() -> bool:
    """Whether the entries of tensors can be read here."""
    return not torch.compiler.is_compiling() and not _autograd.is_transformed()


def _appends(new: NewKeys, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: int) -> bool:
    """Whether there are new keys; refuses those that do not match q and the caches."""
    for name in ("k", "v", "rotary_cos", "rotary_sin"):
        check_new_rows(name, getattr(new, name), q)
    if not check_new(new):
        return False
    rows: tuple[int | None, ...] = (batch, None)
    meaning = "[batch, new keys, heads_kv, columns] of the caches"
    if new.cu_seqlens is not None:
        rows, meaning = (None,), "[new keys, heads_kv, columns] of the caches"
    _check.shape("k", new.k, (*rows, *k_cache.shape[2:]), meaning)
    _check.shape("v", new.v, (*new.k.shape[:-2], *v_cache.shape[2:]), "as many rows as k")
    if new.rotary_cos is not None:
        check_rotary_columns(new.rotary_cos, k_cache.shape[3])
    return True


def append(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: Options,
    new: NewKeys,
    single_position: bool | None = None,
) -> tuple[Tensor, Options]:
    """Writes the new keys; returns q, rotated if there are tables, and options with all keys.

    ``check_cache`` must have checked the caches. With single_position, all rows of q are rotated
    at one position; that is the default if neither causal nor a window limits what they see.
    """
    appended = q, k_cache, v_cache
    if not _check_append(appended, options, new):
        return q, options._replace(seqused_k=new.lengths)
    return _write(appended, options, new, single_position)


def _check_append(appended: tuple[Tensor, Tensor, Tensor], options: Options, new: NewKeys) -> bool:
    """Whether there are new keys, after the checks of everything that ``_write`` takes."""
    q, k_cache, v_cache = appended
    batch = q.shape[0] if options.cu_seqlens_q is None else batch_of(options.cu_seqlens_q)
    if not _appends(new, q, k_cache, v_cache, batch):
        return False
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not torch.compiler.is_compiling() and cache.is_neg():
            raise ValueError(
                f"{name} is a negative view (torch.Tensor.is_neg), but k and v must be written "
                "to it: only a tensor that stores its values unnegated is allowed"
            )
    table = options.block_table
    if table is not None and table.device.type == "cpu" and _has_values():
        check_pages(torch, table, k_cache, _grown(new), options.leftpad_k)
    return True


def _grown(new: NewKeys) -> Tensor:
    """The number of keys of each sequence, new ones included."""
    count = new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff()
    grown: Tensor = new.lengths + count
    return grown


def _write(
    appended: tuple[Tensor, Tensor, Tensor],
    options: Options,
    new: NewKeys,
    single_position: bool | None = None,
) -> tuple[Tensor, Options]:
    """``append`` of checked new keys."""
    q, k_cache, v_cache = appended
    rotates, positions = new.rotary_cos is not None, new.rotary_lengths
    if rotates and positions is None and options.leftpad_k is not None:
        # Positions count from the start of the cache row, because the prefill of the FlashAttention
        # packages rotates that way. (Scores depend only on distances, which are the same.)
        positions = new.lengths
    if single_position is None:
        single_position = options.window_left < 0 and options.window_right < 0
    rotated = _ops.append_kv(
        k_cache,
        v_cache,
        q if rotates else None,
        contiguous_columns(new.k),
        contiguous_columns(new.v),
        new.lengths,
        options.cu_seqlens_q,
        new.cu_seqlens,
        positions,
        options.block_table,
        options.kv_batch_idx,
        options.leftpad_k,
        new.rotary_cos,
        new.rotary_sin,
        bool(new.rotary_interleaved),
        single_position,
        options.k_descale,
        options.v_descale,
    )
    return rotated if rotates else q, options._replace(seqused_k=_grown(new))


def _numbers(x: Tensor | None) -> Any:
    return None if x is None else x.tolist()


def _rows(starts: Tensor | None, batch: int, rows: int) -> list[int]:
    return [rows] * batch if starts is None else starts.diff().tolist()


def _entries(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options, new: NewKeys
) -> Entries:
    """The entries of all index tensors, copied to the host once their shapes are checked."""
    starts, table = options.cu_seqlens_q, options.block_table
    batch = q.shape[0] if starts is None else batch_of(starts)
    for name, index in (
        ("cache_batch_idx", options.kv_batch_idx),
        ("cache_leftpad", options.leftpad_k),
    ):
        if index is not None:
            _check.shape(name, index, (batch,), "one number per sequence")
    _appends(new, q, k_cache, v_cache, batch)
    rows, page_size = k_cache.shape[:2]
    capacity = page_size if table is None else table.shape[1] * page_size
    packed = [] if starts is None else [("cu_seqlens_q", starts.tolist(), q.shape[0])]
    if new.cu_seqlens is not None:
        packed.append(("cu_seqlens_k_new", new.cu_seqlens.tolist(), new.k.shape[0]))
    return Entries(
        lengths=[capacity] * batch if new.lengths is None else _numbers(new.lengths),
        rows=_rows(starts, batch, q.shape[1]),
        appended=_rows(new.cu_seqlens, batch, 0 if new.k is None else new.k.shape[1]),
        capacity=capacity,
        leftpad=_numbers(options.leftpad_k),
        batch_idx=_numbers(options.kv_batch_idx),
        cache_batch=rows,
        table=_numbers(table),
        pages=rows,
        page_size=page_size,
        starts=tuple(packed),
        max_rows=options.max_seqlen_q,
        rotary_rows=None if new.rotary_cos is None else new.rotary_cos.shape[0],
        rotary_lengths=_numbers(new.rotary_lengths),
        single_position=options.window_left < 0 and options.window_right < 0,
    )


def _with_bias(options: Options, bias: Any, q: Tensor, k_cache: Tensor, batch: int) -> Options:
    """The options with the bias, which gets a column for each key that fits into the cache."""
    if bias is None:
        return options
    _check_bias(bias, q, out_dtype_of(q, options))
    table, packed = options.block_table, options.cu_seqlens_q is not None
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    _check.bias(bias, batch, q.shape[-2], None if packed else q.shape[1], capacity)
    bias = _full_keys(bias, capacity)
    if not packed:
        return options._replace(bias=bias)
    longest = _longest(options.cu_seqlens_q, None)
    _check.varlen_bias(bias.shape, longest or options.max_seqlen_q or None, capacity)
    max_rows, _ = _check.bounds_of_bias(bias.shape, options.max_seqlen_q, capacity)
    return options._replace(bias=bias, max_seqlen_q=max_rows)


def prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, request: Request,
    layout: CacheLayout,
) -> Options:  # fmt: skip
    """The options of a checked problem without new keys."""
    options = _prepare(q, k_cache, v_cache, lengths, request, layout, False)
    if request.mask is None:
        return options
    return _mask_tensors.with_mask_of_cache(options, q, k_cache, request.mask, NewKeys())


def _prepare(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Any, request: Request,
    layout: CacheLayout, appends: bool,
) -> Options:  # fmt: skip
    """``prepare`` without the mask. If the call appends, seqused_k does not count the new keys."""
    check_tensors(q, k_cache, v_cache, ("q", "k_cache", "v_cache"))
    starts = index_tensor("cu_seqlens_q", layout.cu_seqlens_q, q.device)
    packed = None if starts is None else batch_of(starts)
    table = index_tensor("block_table", layout.block_table, q.device)
    pool = layout.indices is not None and not appends
    batch = check_cache(q, k_cache, v_cache, table, layout.cache_batch_idx, packed, pool)
    max_rows = layout.max_rows()
    if starts is not None and starts.device.type == "cpu" and _plain.is_eager():
        # The library checks them as well, but only after an append has written to the caches.
        check_starts("cu_seqlens_q", starts.tolist(), q.shape[0])
        check_max_rows(max_rows, _longest(starts, None) or 0)
    options = with_descale(score_options(q, batch, request), q, k_cache, request, batch)._replace(
        cu_seqlens_q=starts,
        max_seqlen_q=max_rows,
        seqused_k=cache_lengths(lengths, batch, q.device),
        kv_batch_idx=index_tensor("cache_batch_idx", layout.cache_batch_idx, q.device),
        leftpad_k=index_tensor("cache_leftpad", layout.cache_leftpad, q.device),
        block_table=table,
        num_splits=_check.split_count(layout.num_splits, request.batch_invariant),
    )
    return _with_bias(options, request.bias, q, k_cache, batch)


def _indices_of(new: NewKeys, batch: int, device: torch.device) -> NewKeys:
    """The new keys with their index tensors as contiguous int32 on the device."""
    given = (
        ("rotary_seqlens", new.rotary_lengths, batch),
        ("cu_seqlens_k_new", new.cu_seqlens, batch + 1),
    )
    tensors = []
    for name, value, size in given:
        index = index_tensor(name, value, device)
        if index is not None:
            _check.shape(name, index, (size,), "see tilewise.attention_with_kvcache")
        tensors.append(index)
    return new._replace(rotary_lengths=tensors[0], cu_seqlens=tensors[1])


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any, new: tuple[Any, ...], layout: tuple[Any, ...],
    given: tuple[Any, ...],
) -> tuple[Tensor, ...]:  # fmt: skip
    """(out, lse) and, if requested, max_logits; see ``tilewise.attention_with_kvcache``. The tuples
    have the fields of ``NewKeys``, ``CacheLayout`` and ``Request``.
    """
    k, v, lengths, cos, sin, _, rotary_lengths, starts_new = new
    batch_idx, leftpad, table, num_splits, check, starts, max_rows, head_dim_v, indices = layout
    (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, _, return_lse, _, tf32, _,
        batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, _, q_descale,
    ) = given  # fmt: skip
    if head_dim_v is not None:
        v_cache = _latent.values_of(as_array("k_cache", k_cache), v_cache, head_dim_v)
    if (
        k is None and v is None and cos is None and sin is None and rotary_lengths is None
        and starts is None and starts_new is None and max_rows is None and bias is None
        and alibi_slopes is None and sinks is None and k_descale is None and v_descale is None
        and type(return_lse) is bool and check is False and return_max_logits is False
        and indices is None and mask is None and out_dtype is None and q_descale is None
    ):  # fmt: skip
        results = _plain.indexed(
            q, k_cache, v_cache, None, None, None, lengths, table, batch_idx, leftpad, causal,
            window, scale, softcap, 0, 0, num_splits, False, tf32, batch_invariant,
        )  # fmt: skip
        if results is not None:
            return results
    return _general(q, k_cache, v_cache, NewKeys(*new), Request(*given), CacheLayout(*layout))


class Checked(NamedTuple):
    """A call whose arguments have been checked, before anything is written."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    options: Options  # seqused_k does not count new keys
    new: NewKeys
    appends: bool
    appended: tuple[Tensor, Tensor, Tensor]  # q and the caches as the append takes them
    columns: int  # of the values in a latent cache
    selected: tuple[Tensor, Tensor, Tensor, Options] | None
    forward: Any  # the operator


@torch.no_grad()
def _general(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, new: NewKeys, request: Request, layout: CacheLayout
) -> tuple[Tensor, ...]:
    """``attention_with_kvcache`` with any options, and with an append."""
    call = checked(q, k_cache, v_cache, new, request, layout)
    return run(call if request.mask is None else with_mask(call, request.mask))


def checked(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, new: NewKeys, request: Request, layout: CacheLayout
) -> Checked:
    """The call after all checks but those of the mask, which ``with_mask`` adds."""
    forward: Any = _ops.forward_alone
    if _check.flag("return_max_logits", request.return_max_logits):
        forward = _ops.forward_max_logits_alone
    _selected.check_options(layout, new, request)
    options = _prepare(q, k_cache, v_cache, new.lengths, request, layout, new.k is not None)
    selected = None
    if layout.indices is not None:
        selected = select(q, k_cache, v_cache, options, layout.indices)
    batch = q.shape[0] if options.cu_seqlens_q is None else batch_of(options.cu_seqlens_q)
    new = _indices_of(new._replace(lengths=options.seqused_k), batch, q.device)
    appended, columns = (q, k_cache, v_cache), layout.head_dim_v or 0
    if columns > 0 and new.k is not None:
        appended, new = _latent.split_append(q, k_cache, new, as_array("k", new.k), columns)
    if _check.flag("check", layout.check):
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "check is True while the stream is being captured, but it waits for the GPU: only "
                "False is allowed"
            )
        check_entries(_entries(*appended, options, new))
    try:
        appends = _check_append(appended, options, new)
    except ValueError as error:
        _raise_in_python(error, appended, options, new)
    return Checked(q, k_cache, v_cache, options, new, appends, appended, columns, selected, forward)


def with_mask(call: Checked, mask: Any) -> Checked:
    """The call with a mask."""
    options = _mask_tensors.with_mask_of_cache(call.options, call.q, call.k_cache, mask, call.new)
    if call.appends and _has_values():
        _mask_tensors.check_entries(options, call.q)
    return call._replace(options=options)


def run(call: Checked) -> tuple[Tensor, ...]:
    """(out, lse) and, if requested, max_logits, after the append."""
    q, options, new, columns = call.q, call.options, call.new, call.columns
    try:
        if call.appends:
            rotated, grown = _write(call.appended, options, new)
        else:
            rotated, grown = call.appended[0], options._replace(seqused_k=new.lengths)
        if call.appended[0] is not q:  # its columns after the values of a latent cache
            rotates = new.rotary_cos is not None
            rotated = torch.cat((q[..., :columns], rotated), dim=-1) if rotates else q
        if call.selected is None:
            return call.forward(rotated, call.k_cache, call.v_cache, grown)
        return _results_like(q, options.cu_seqlens_q, *call.forward(*call.selected))
    except ValueError as error:
        _raise_in_python(error, call.appended, options, new)


def _raise_in_python(
    error: ValueError, appended: tuple[Tensor, Tensor, Tensor], options: Options, new: NewKeys
) -> NoReturn:
    """Raises the error with the names of Python's arguments."""
    if appended[0].device.type == "cpu" and _plain.is_eager():
        _raise_entry_error(appended, options, new)
    raise ValueError(in_python(str(error))) from None


def select(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options, indices: Any
) -> tuple[Tensor, Tensor, Tensor, Options]:
    """The problem of rows of q that see only the rows of the caches that indices select.

    Each row of q is a sequence of its own, and each row of the caches a page.
    """
    lead, starts, device = q.shape[:-2], options.cu_seqlens_q, q.device
    indices = index_tensor("indices", indices, device)
    _check.shape("indices", indices, (*lead, None), "[rows of q, selected keys]")
    k = _selected.single_rows("k_cache", k_cache)
    v = _selected.single_rows("v_cache", v_cache)
    rows = lead.numel()
    batch = q.shape[0] if starts is None else batch_of(starts)
    owners = _owners(q, starts)
    unused = (owners == batch).unsqueeze(1)
    owners = owners.clamp(max=batch - 1)

    def per_row(factors: Tensor | None) -> Tensor | None:
        return None if factors is None else factors[owners]

    flat = indices.reshape(rows, indices.shape[-1])
    table, keys = _selected.tables(torch, torch.take_along_dim, flat, k.shape[0], unused)
    options = options._replace(
        cu_seqlens_q=None,
        max_seqlen_q=0,
        seqused_k=keys.to(torch.int32),
        block_table=table,
        kv_batch_idx=None,
        q_descale=per_row(options.q_descale),
        k_descale=per_row(options.k_descale),
        v_descale=per_row(options.v_descale),
    )
    return q.reshape(rows, 1, *q.shape[-2:]), k, v, options


def _results_like(
    q: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor, *max_logits: Tensor
) -> tuple[Tensor, ...]:
    """The results of sequences of one row for q and cu_seqlens_q.

    They are out [rows, 1, H, Dv], lse [rows, H, 1] and, if requested, max_logits [rows, H].
    """
    lead, heads = q.shape[:-2], q.shape[-2]
    lse = lse.reshape(*lead, heads).transpose(-1, -2).contiguous()
    out = out.reshape(*lead, *out.shape[-2:])
    return out, lse, *(_largest_of_sequences(x, q, starts) for x in max_logits)


def _largest_of_sequences(of_rows: Tensor, q: Tensor, starts: Tensor | None) -> Tensor:
    """The largest entries [B, H] of each sequence, from those of each row [rows, H]."""
    batch, heads = q.shape[0] if starts is None else batch_of(starts), q.shape[-2]
    owners = _owners(q, starts)[:, None].expand(-1, heads)
    result = of_rows.new_full((batch + 1, heads), -torch.inf)
    return result.scatter_reduce_(0, owners, of_rows, "amax")[:batch]


def _owners(q: Tensor, starts: Tensor | None) -> Tensor:
    """The sequence [rows] of each row of q; that of rows of no sequence is the number of them."""
    if starts is None:
        return torch.arange(q.shape[0], device=q.device).repeat_interleave(q.shape[1])
    numbers = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
    return torch.searchsorted(starts, numbers, right=True) - 1


def _raise_entry_error(
    appended: tuple[Tensor, Tensor, Tensor], options: Options, new: NewKeys
) -> None:
    """Raises the error of the first bad entry, if any, in terms of the caller's arguments.

    The library's own sentence is about lengths after the append; the caller gave those before it.
    """
    try:
        check_entries(_entries(*appended, options, new))
    except ValueError as error:
        raise error from None
