"""The public functions on PyTorch tensors: checks, autocast, views in the operators' order."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _autograd, _check, _flop_counters, _max_logits, _ops, _plain
from ._mask_tensors import with_mask
from ._ops import contiguous_columns
from ._options import out_dtype_of
from ._request import Request, Sequences

Result: TypeAlias = Tensor | tuple[Tensor, ...]

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPES = (*_FLOATS.values(), torch.float8_e4m3fn)
_is_compiling = torch.compiler.is_compiling

_flop_counters.register_if_imported()

Prepared: TypeAlias = tuple[Tensor, Tensor, Tensor, _ops.Options]


def attention(q: Any, k: Any, v: Any, layout: str, given: tuple[Any, ...]) -> Result:
    """See ``tilewise.attention``; ``given`` has the fields of ``Request``."""
    (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, _, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    ) = given  # fmt: skip
    if (
        bias is None and alibi_slopes is None and sinks is None and type(softcap) is float
        and softcap == 0.0 and type(dropout_p) is float and dropout_p == 0.0
        and type(return_lse) is bool and batch_invariant is False and return_max_logits is False
        and precise_backward is False and q_descale is None and k_descale is None
        and v_descale is None and mask is None and out_dtype is None
    ):  # fmt: skip
        result: Result | None = _plain.attention(
            q, k, v, causal, window, scale, return_lse, deterministic, tf32, layout
        )
        if result is not None:
            return result
    return general_attention(q, k, v, layout, Request(*given))


def general_attention(q: Tensor, k: Tensor, v: Tensor, layout: str, request: Request) -> Result:
    """``tilewise.attention`` with any options."""
    prepared = prepare_dense(q, k, v, layout, request)
    out, lse, max_logits = _forward(prepared, request)
    if prepared[3].heads_first:
        out = out.transpose(1, 2)
    return request.results(out, lse, max_logits)


def _forward(prepared: Prepared, request: Request) -> tuple[Tensor, Tensor, Tensor | None]:
    """out, lse and, if the request asks for them, max_logits."""
    max_logits: Tensor | None = None
    if _check.flag("return_max_logits", request.return_max_logits):
        out, lse, max_logits = _max_logits.forward(*prepared)
    else:
        out, lse = _ops.forward(*prepared)
    if request.precise_backward:
        # Autograd keeps the float32 out, and the gradient of the rounded one is exact in float32.
        out = out.to(returned_dtype(prepared[0], request))
    return out, lse, max_logits


def attention_varlen(
    q: Any, k: Any, v: Any, sequences: tuple[Any, ...], given: tuple[Any, ...]
) -> Result:
    """See ``tilewise.attention_varlen``; the tuples have the fields of ``Sequences`` and
    ``Request``.
    """
    (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, check, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    ) = given  # fmt: skip
    if (
        bias is None and alibi_slopes is None and sinks is None and type(dropout_p) is float
        and dropout_p == 0.0 and type(return_lse) is bool and check is False
        and return_max_logits is False and precise_backward is False and q_descale is None
        and k_descale is None and v_descale is None and mask is None and out_dtype is None
    ):  # fmt: skip
        results = _plain.varlen(
            q, k, v, sequences, causal, window, scale, softcap, deterministic, tf32,
            batch_invariant,
        )  # fmt: skip
        if results is not None:
            return results if return_lse else results[0]
    request = Request(*given)
    prepared = prepare_varlen(q, k, v, Sequences(*sequences), request)
    return request.results(*_forward(prepared, request))


def prepare_dense(q: Tensor, k: Tensor, v: Tensor, layout: str, request: Request) -> Prepared:
    """Checks equal-length sequences; returns q, k, v in "bshd" order and the operators' options."""
    heads_first = _check.heads_first(layout)
    q, k, v, bias = _autocast(q, k, v, request.bias)
    check_tensors(q, k, v)
    _check.dense(q, k, v, layout)
    if heads_first:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if bias is not None:
        _check_bias(bias, q, returned_dtype(q, request))
        _check.bias(bias, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        bias = _full_keys(bias, k.shape[1])
    options = with_descale(score_options(q, q.shape[0], request), q, k, request)
    options = options._replace(bias=bias, heads_first=heads_first)
    if request.mask is not None:
        options = with_mask(options, q, q.shape[0], request.mask, (q.shape[1], k.shape[1]))
    return *_columns(q, k, v), options


def prepare_varlen(
    q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, request: Request
) -> Prepared:
    """Checks packed sequences; returns q, k, v and the operators' options."""
    q, k, v, bias = _autocast(q, k, v, request.bias)
    check_tensors(q, k, v)
    paged = sequences.block_table is not None
    _check.varlen(q, k, v, paged)
    batch = _check_sequences(q, sequences)
    options = with_descale(score_options(q, batch, request), q, k, request, batch)
    if bias is not None:
        _check_bias(bias, q, returned_dtype(q, request))
        _check.bias(bias, batch, q.shape[1], None, None)
        bias, max_rows, max_keys = _varlen_bias(bias, k, sequences)
    else:
        max_rows = _check.bound("max_seqlen_q", sequences.max_seqlen_q)
        max_keys = _check.bound("max_seqlen_k", sequences.max_seqlen_k)
    options = options._replace(
        bias=bias,
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        seqused_q=sequences.seqused_q,
        seqused_k=sequences.seqused_k,
        block_table=sequences.block_table,
        max_seqlen_q=max_rows,
        max_seqlen_k=max_keys,
    )
    if request.mask is not None:
        options = with_mask(options, q, batch, request.mask, None)
    return *_columns(q, k, v), options


def _check_sequences(q: Tensor, sequences: Sequences) -> int:
    """Checks the types and shapes of the index tensors; returns the number of sequences."""
    batch = batch_of(sequences.cu_seqlens_q)
    for name, size in (
        ("cu_seqlens_q", batch + 1),
        ("cu_seqlens_k", batch + 1),
        ("seqused_q", batch),
        ("seqused_k", batch),
    ):
        check_int32(name, getattr(sequences, name), (size,), q)
    if sequences.block_table is not None:
        check_int32("block_table", sequences.block_table, (batch, None), q)
        if sequences.cu_seqlens_k is not None:
            raise ValueError(
                "cu_seqlens_k and block_table are both given, but pages hold the keys of each "
                "sequence from its start: pass cu_seqlens_k=None and seqused_k"
            )
    elif sequences.cu_seqlens_k is None:
        raise TypeError("cu_seqlens_k is None, but must be int32 [batch + 1] without block_table")
    return batch


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, layout: str
) -> tuple[Tensor, Tensor]:
    """See ``tilewise.merge_states``."""
    for name, tensor in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if tensor.device != out_a.device:
            raise ValueError(
                f"{name} is on {tensor.device}, but must be on {out_a.device} like out_a"
            )
    weight_a, weight_b, lse = _merge_weights(lse_a.float(), lse_b.float())
    heads_second = out_a.dim() == 4 and layout == "bhsd"
    if not heads_second:
        weight_a, weight_b = weight_a.transpose(-1, -2), weight_b.transpose(-1, -2)
    out = weight_a.unsqueeze(-1) * out_a.float() + weight_b.unsqueeze(-1) * out_b.float()
    return out.to(out_a.dtype), lse


def _merge_weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The weights exp(lse_x - lse) of both states, and their common lse.

    They are 0, 0 and -inf where both states are empty. An lse of +inf, which a sink may cause, gets
    all the weight. Where the larger lse is infinite it is replaced by 0, so that neither the
    softmax nor its derivative computes inf - inf.
    """
    top = torch.maximum(lse_a, lse_b)
    infinite, empty = top.isinf(), top == -math.inf
    safe_a, safe_b = (
        torch.where(infinite, torch.where(x == top, 0.0, -math.inf), x) for x in (lse_a, lse_b)
    )
    lse = torch.logaddexp(safe_a, safe_b)
    weight_a = torch.exp(safe_a - lse).masked_fill(empty, 0.0)
    weight_b = torch.exp(safe_b - lse).masked_fill(empty, 0.0)
    return weight_a, weight_b, torch.where(infinite, top.masked_fill(empty, -math.inf), lse)


# --- pieces shared with tilewise.kvcache ----------------------------------------------------------


def score_options(q: Tensor, batch: int, request: Request) -> _ops.Options:
    """The operators' options that every form of attention shares, without the bias."""
    _flop_counters.register_if_active()
    numbers = _check.numbers(request)
    numbers["deterministic"] |= torch.are_deterministic_algorithms_enabled()
    heads, head_dim = q.shape[-2], q.shape[-1]
    scale, scale_tensor = _scale(request.scale, head_dim, q)
    slopes, sinks = request.alibi_slopes, request.sinks
    if slopes is not None:
        _check_float("alibi_slopes", slopes, q)
        _check.alibi(slopes, batch, heads)
        if slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes requires a gradient, but none is defined for it; pass "
                "alibi_slopes.detach(), or a bias computed from the slopes"
            )
        slopes = _contiguous_float32(slopes)
    if sinks is not None:
        _check_float("sinks", sinks, q)
        _check.shape("sinks", sinks, (heads,), "one logit per query head")
        sinks = _contiguous_float32(sinks)
    shard = request.shard
    check_int32("diagonal", shard.diagonal, (batch,), q)
    dropout_state = shard.dropout_state
    if numbers["dropout_p"] > 0.0 and dropout_state is None:
        dropout_state = draw_dropout_state(q.device)
    return _ops.Options(
        alibi_slopes=slopes,
        sinks=sinks,
        scale_tensor=scale_tensor,
        dropout_state=dropout_state,
        diagonal=shard.diagonal,
        scale=scale,
        row_offset=shard.row_offset,
        key_offset=shard.key_offset,
        batch_offset=shard.batch_offset,
        head_offset=shard.head_offset,
        heads_q_total=shard.heads_q_total,
        out_dtype=_check.computed_out_dtype(request, q, _FLOATS),
        **numbers,
    )


def returned_dtype(q: Tensor, request: Request) -> torch.dtype:
    """The dtype of the out that the caller gets, after the checks."""
    return out_dtype_of(q, _ops.Options()) if request.out_dtype is None else request.out_dtype


def with_descale(
    options: _ops.Options, q: Tensor, k: Tensor, request: Request, batch: int | None = None
) -> _ops.Options:
    """The options with the factors of float8_e4m3fn tensors, broadcast to [B, Hkv].

    The batch is by default that of q.
    """
    if request.q_descale is None and request.k_descale is None and request.v_descale is None:
        return options
    shape = (q.shape[0] if batch is None else batch, k.shape[-2])

    def factors(name: str, scaled: Tensor) -> Tensor | None:
        given = getattr(request, name)
        if given is None:
            return None
        _check_float(name, given, q)
        _check.descale(name, given, _check.is_float8(scaled.dtype), *shape)
        return given.to(torch.float32).expand(shape)

    return options._replace(
        q_descale=factors("q_descale", q),
        k_descale=factors("k_descale", k),
        v_descale=factors("v_descale", k),
    )


def check_int32(name: str, tensor: Any, dims: tuple[int | None, ...], q: Tensor) -> None:
    """Checks an optional int32 tensor of the given shape (None: any size) on the device of q."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, but must be a torch.Tensor or None")
    if tensor.dtype != torch.int32:
        raise TypeError(f"{name} has dtype {tensor.dtype}, but must be torch.int32")
    _check.shape(name, tensor, dims, "see tilewise.attention_varlen")
    _same_device(name, tensor, q)
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, but must be contiguous"
        )


def draw_dropout_state(device: torch.device) -> Tensor:
    """Seed and offset of the dropout bits, from the generator that torch.manual_seed sets."""
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def _autocast(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Casts as torch.autocast does for scaled_dot_product_attention; a float32 bias is not cast,
    nor are tensors of float8.
    """
    if not isinstance(q, Tensor) or not autocasts(q.device.type):
        return q, k, v, bias
    dtype = torch.get_autocast_dtype(q.device.type)
    if isinstance(bias, Tensor) and bias.is_floating_point() and bias.dtype != torch.float32:
        bias = bias.to(dtype)
    return _lower(q, dtype), _lower(k, dtype), _lower(v, dtype), bias


def autocasts(device: str) -> bool:
    """Whether torch.autocast is active for this type of device."""
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def _lower(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eligible = isinstance(tensor, Tensor) and tensor.dtype in _FLOATS.values()
    return tensor.to(dtype) if eligible else tensor


def as_array(name: str, value: Any) -> Tensor:
    """The value, which must be a tensor. For arrays, ``_numpy`` has a function of the same name."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but must be a torch.Tensor")
    return value


def check_tensors(
    q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str, str] = ("q", "k", "v")
) -> None:
    """Refuses q, k or v unless it is a dense tensor on q's device, of a dtype that fits q's."""
    for name, tensor in zip(names, (q, k, v), strict=True):
        if as_array(name, tensor).is_nested:
            raise TypeError(
                f"{name} is a nested tensor, but must be a dense one; attention_varlen takes "
                "sequences of different lengths, packed end to end"
            )
        if tensor.layout != torch.strided:
            raise TypeError(f"{name} has layout {tensor.layout}, but must be a dense tensor")
    if q.dtype not in _DTYPES:
        raise TypeError(
            f"q has dtype {q.dtype}, but must be torch.float32, torch.float16, torch.bfloat16 or "
            "torch.float8_e4m3fn"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        _check.differentiable(q)
    for name, tensor in zip(names[1:], (k, v), strict=True):
        _check.key_dtype(name, tensor.dtype, k.dtype, q.dtype)
        _same_device(name, tensor, q)


def check_new_rows(name: str, tensor: Any, q: Tensor) -> None:
    """Checks an optional tensor, which must have the device and the dtype of q."""
    if tensor is None:
        return
    _same_device(name, as_array(name, tensor), q)
    _check.new_row_dtype(name, tensor.dtype, q.dtype)


def integers(name: str, tensor: Any) -> Tensor | None:
    """The optional index tensor, which may have any integer dtype."""
    if tensor is None:
        return None
    given = as_array(name, tensor)
    if given.is_floating_point() or given.is_complex() or given.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {given.dtype}, but must be an integer type")
    return given


def _same_device(name: str, tensor: Tensor, q: Tensor) -> None:
    if tensor.device != q.device:
        raise ValueError(f"{name} is on {tensor.device}, but must be on {q.device} like q")


def _check_float(name: str, tensor: Any, q: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, but must be a torch.Tensor or None")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}, but must be torch.float32")
    _same_device(name, tensor, q)


def _check_bias(bias: Any, q: Tensor, out_dtype: torch.dtype) -> None:
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias is a {type(bias).__name__}, but must be a torch.Tensor or None")
    if bias.dtype == torch.bool:
        raise TypeError(
            "bias has dtype torch.bool, but is added to the scores: for a mask pass "
            "torch.where(mask, 0.0, -math.inf)"
        )
    _check.bias_dtype(bias.dtype, q.dtype, _FLOATS, out_dtype)
    _same_device("bias", bias, q)


def _scale(scale: Any, head_dim: int, q: Tensor) -> tuple[float, Tensor | None]:
    if scale is None:
        return head_dim**-0.5, None
    if isinstance(scale, Tensor):
        if scale.numel() != 1 or not scale.is_floating_point():
            raise ValueError(
                f"scale has shape {list(scale.shape)} and dtype {scale.dtype}, but a tensor must "
                "have one floating-point element"
            )
        _same_device("scale", scale, q)
        return 0.0, scale.reshape(1).to(torch.float32)
    return _check.scale_number(scale), None


def _contiguous_float32(tensor: Tensor) -> Tensor:
    return contiguous_columns(tensor.to(torch.float32))


def _columns(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return contiguous_columns(q), contiguous_columns(k), contiguous_columns(v)


def batch_of(cu_seqlens_q: Any) -> int:
    """The number of sequences."""
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(
            f"cu_seqlens_q is a {type(cu_seqlens_q).__name__}, but must be an int32 torch.Tensor"
        )
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(
            f"cu_seqlens_q has shape {list(cu_seqlens_q.shape)}, but must be [batch + 1]"
        )
    return cu_seqlens_q.shape[0] - 1


def _four_dimensions(bias: Tensor) -> Tensor:
    """The bias with four dimensions, in which expanded dimensions have size 1 again.

    The gradient of an expanded view would be as large as the view. The gradient of its base is the
    sum over the expanded dimensions, which the library computes directly. A view whose own gradient
    the caller can read keeps its size, and is copied.
    """
    gradient_is_visible = bias.requires_grad and (
        bias.is_leaf or _autograd.is_transformed() or (not _is_compiling() and bias.retains_grad)
    )
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    for dim in range(3):
        if bias.shape[dim] > 1 and bias.stride(dim) == 0 and not gradient_is_visible:
            bias = bias.narrow(dim, 0, 1)
    return contiguous_columns(bias)


def _longest(starts: Tensor | None, used: Tensor | None) -> int | None:
    """The length of the longest sequence, or None if the lengths are not in CPU memory."""
    lengths = used if used is not None else None if starts is None else starts.diff()
    if lengths is None or lengths.device.type != "cpu" or not _plain.is_eager():
        return None
    return int(lengths.max()) if lengths.numel() else 0


def _varlen_bias(bias: Tensor, k: Tensor, sequences: Sequences) -> tuple[Tensor, int, int]:
    """The bias with four dimensions and a column per key, and the upper bounds of rows and keys
    that it allows. The library verifies these bounds wherever it verifies lengths.
    """
    bias = _four_dimensions(bias)
    max_rows = _check.bound("max_seqlen_q", sequences.max_seqlen_q)
    max_keys = _check.bound("max_seqlen_k", sequences.max_seqlen_k)
    rows = _longest(sequences.cu_seqlens_q, sequences.seqused_q)
    keys = _longest(sequences.cu_seqlens_k, sequences.seqused_k)
    if keys is None and max_keys == 0 and sequences.block_table is not None:
        keys = sequences.block_table.shape[1] * k.shape[1]
    keys = max_keys if keys is None and max_keys > 0 else keys
    _check.varlen_bias(bias.shape, max_rows if rows is None and max_rows > 0 else rows, keys)
    if bias.shape[3] == 1 and keys is not None and keys > 1:
        bias = bias.expand(-1, -1, -1, keys).contiguous()
    return bias, *_check.bounds_of_bias(bias.shape, max_rows, max_keys)


def _full_keys(bias: Tensor, keys: int) -> Tensor:
    bias = _four_dimensions(bias)
    return bias if bias.shape[3] == keys else bias.expand(-1, -1, -1, keys).contiguous()
