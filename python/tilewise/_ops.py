"""The PyTorch operators ``torch.ops.tilewise.*``: schemas, shapes for tracing, derivatives, vmap.

The kernels come from libtilewise_torch (``bindings/torch``). Schemas are defined here because the
stable ABI can attach tags only from PyTorch 2.12 on, and ``torch.compile`` wants the operators to
be marked compliant on every version.

All tensors are in "bshd" or varlen order whatever their strides; ``heads_first`` only says that new
[batch, row, head, column] tensors are to be stored as [batch, head, row, column].
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import is_transformed, no_forward_mode, no_second_derivative
from ._autograd import register as register_autograd
from ._library import load_torch_adapter

_OPTIONS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? block_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? scale_tensor, Tensor? dropout_state, "
    "float scale, int window_left, int window_right, float softcap, float dropout_p, "
    "int max_seqlen_q, int max_seqlen_k, int num_splits, bool deterministic, bool tf32, "
    "bool check, bool batch_invariant, bool heads_first"
)
# Dense, a scale and a band: tensors are in "bhsd" order when heads_first is set (tilewise._plain).
_PLAIN = (
    "float? scale, int window_left, int window_right, bool deterministic, bool tf32, "
    "bool heads_first"
)
_SCHEMAS = (
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}=False) -> (Tensor out, Tensor lse)",
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, int wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks, "
    "Tensor dscale)",
    f"_plain_forward(Tensor q, Tensor k, Tensor v, {_PLAIN}) -> (Tensor out, Tensor lse)",
    "_plain_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_PLAIN}, int wanted) -> (Tensor dq, Tensor dk, Tensor dv)",
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? q, Tensor? k_new, Tensor? v_new, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor? cu_seqlens_new, Tensor? rotary_seqlens, "
    "Tensor? block_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, bool rotary_interleaved, bool q_single_position, "
    "Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor",
)


class Options(NamedTuple):
    """The arguments of ``forward`` and ``backward`` after the tensors, in the order of the schema.

    Negative windows are unlimited; bounds and splits of 0 are not given. ``scale_tensor`` replaces
    ``scale``; ``dropout_state`` is int64 [2], the seed and the offset of the dropout bits.
    """

    bias: Tensor | None = None  # [B or 1, Hq or 1, Sq or 1, Sk], fp32 or the dtype of q
    alibi_slopes: Tensor | None = None  # [Hq] or [B, Hq] fp32
    sinks: Tensor | None = None  # [Hq] fp32
    cu_seqlens_q: Tensor | None = None  # [B + 1] int32
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None  # [B] int32
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None  # [B, width] int32
    kv_batch_idx: Tensor | None = None  # [B] int32
    leftpad_k: Tensor | None = None  # [B] int32
    k_descale: Tensor | None = None  # [B, Hkv] fp32, of float8_e4m3fn k
    v_descale: Tensor | None = None
    scale_tensor: Tensor | None = None  # [1] fp32
    dropout_state: Tensor | None = None
    scale: float = 1.0
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    num_splits: int = 0
    deterministic: bool = False
    tf32: bool = False
    check: bool = False  # of the index tensors' entries on a GPU; waits for it
    batch_invariant: bool = False
    heads_first: bool = False


# Bits of the argument `wanted` of backward; the values are those of bindings/torch/ops.cpp.
WANT_Q, WANT_K, WANT_V, WANT_BIAS, WANT_SINKS, WANT_SCALE = 1, 2, 4, 8, 16, 32

_OPTION_COUNT = len(Options._fields)
_TENSOR_COUNT = Options._fields.index("scale")  # the leading options are tensors

_library = torch.library.Library("tilewise", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
load_torch_adapter()


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator, by the shortest way through PyTorch's layers."""
    arguments = (q, k, v, *options)
    if torch.compiler.is_compiling():
        return torch.ops.tilewise.forward(*arguments)
    if is_transformed():
        return _Forward.apply(*arguments)
    tensors = (q, k, v, *options[:_TENSOR_COUNT])
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    ):
        return _EagerForward.apply(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.forward(*arguments)


def append_kv(*arguments: Any) -> Tensor:
    """The operator, by the shortest way through PyTorch's layers: it has no derivative."""
    if torch.compiler.is_compiling() or is_transformed() or forward_ad._current_level >= 0:
        return torch.ops.tilewise.append_kv(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.append_kv(*arguments)


def contiguous_columns(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its columns do not lie side by side, or are not in memory at all,
    as those of PyTorch's zero tensors.
    """
    in_memory = torch.compiler.is_compiling() or not tensor._is_zerotensor()
    if in_memory and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


# --- shapes for tracing ---------------------------------------------------------------------------


def _new_rows(like: Tensor, shape: tuple[int, ...], heads_first: bool) -> Tensor:
    if heads_first and len(shape) == 4:
        batch, rows, heads, columns = shape
        return like.new_empty((batch, heads, rows, columns)).transpose(1, 2)
    return like.new_empty(shape)


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(q: Tensor, _k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    option = Options(*options)
    shape = (*q.shape[:-1], v.shape[-1])
    rows, heads = q.shape[-3], q.shape[-2]
    lse_shape = (heads, rows) if option.cu_seqlens_q is not None else (q.shape[0], heads, rows)
    lse = q.new_empty(lse_shape, dtype=torch.float32)
    return _new_rows(q, shape, option.heads_first), lse


@torch.library.register_fake("tilewise::backward", lib=_library)
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    _dout, _dlse, q, k, v, _out, _lse, *options, wanted = arguments
    option = Options(*options)

    def none() -> Tensor:
        return q.new_empty((0,), dtype=torch.float32)

    def rows(like: Tensor, bit: int, keys: bool) -> Tensor:
        if not wanted & bit:
            return none()
        shape: tuple[int, ...] = tuple(like.shape)
        if keys and option.block_table is not None:
            batch, width = option.block_table.shape
            shape = (batch, width * k.shape[1], *like.shape[2:])
        return _new_rows(like, shape, option.heads_first)

    def floats(like: Tensor | None, bit: int) -> Tensor:
        if like is None or not wanted & bit:
            return none()
        return q.new_empty(like.shape, dtype=torch.float32)

    dscale = q.new_empty((1,), dtype=torch.float32) if wanted & WANT_SCALE else none()
    return (
        rows(q, WANT_Q, False),
        rows(k, WANT_K, True),
        rows(v, WANT_V, True),
        floats(option.bias, WANT_BIAS),
        floats(option.sinks, WANT_SINKS),
        dscale,
    )


@torch.library.register_fake("tilewise::append_kv", lib=_library)
def _append_kv_fake(
    k_cache: Tensor, _v_cache: Tensor, q: Tensor | None, k_new: Tensor | None, *_: Any
) -> Tensor:
    like = next(x for x in (q, k_new, k_cache) if x is not None)
    return like.new_empty((0,) if q is None else q.shape)


# --- derivatives ----------------------------------------------------------------------------------


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, *options[:_TENSOR_COUNT])
    ctx.numbers = tuple(options[_TENSOR_COUNT:])


def _position(name: str) -> int:
    """Where an option is among the arguments of ``forward``."""
    return 3 + Options._fields.index(name)


def _materialized_bias(bias: Tensor | None) -> Tensor | None:
    """The bias, copied where it is an expanded view: each of its elements has its own gradient."""
    if bias is None:
        return None
    expanded = any(bias.stride(i) == 0 and bias.shape[i] > 1 for i in range(3))
    return bias.contiguous() if expanded else bias


_WANT_AT = (
    (0, WANT_Q),
    (1, WANT_K),
    (2, WANT_V),
    (_position("bias"), WANT_BIAS),
    (_position("sinks"), WANT_SINKS),
    (_position("scale_tensor"), WANT_SCALE),
)
_SLOPES_AT, _BIAS_AT = _position("alibi_slopes"), _position("bias")


def _wanted(needs: tuple[bool, ...]) -> int:
    if needs[_SLOPES_AT]:
        raise RuntimeError(
            "tilewise: alibi_slopes requires a gradient, but none is defined for it; "
            "pass alibi_slopes.detach(), or a bias made of the slopes"
        )
    return sum(bit for position, bit in _WANT_AT if needs[position])


def _to_pages(rows: Tensor, pages: Tensor, block_table: Tensor) -> Tensor:
    """Adds [B, width * page_size, H, D] gradients of keys into the layout of the pages.

    Table entries past the keys in use may hold anything: the gradients there are 0, and adding them
    to any page changes nothing.
    """
    count, size, heads, columns = pages.shape
    total = rows.new_zeros((count, size, heads, columns), dtype=torch.float32)
    if count == 0 or block_table.numel() == 0:
        return total.to(pages.dtype)
    index = block_table.reshape(-1).to(torch.int64).clamp(0, count - 1)
    per_page = rows.reshape(index.shape[0], size, heads, columns).to(torch.float32)
    return total.index_add(0, index, per_page).to(pages.dtype)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    results: list[Tensor | None] = [None] * (3 + _OPTION_COUNT)
    wanted = _wanted(ctx.needs_input_grad)
    if wanted == 0 or (dout is None and dlse is None):
        return tuple(results)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.numbers)
    if wanted & WANT_BIAS:
        options = options._replace(bias=_materialized_bias(options.bias))
    dout = torch.zeros_like(out) if dout is None else contiguous_columns(dout)
    dlse = None if dlse is None else contiguous_columns(dlse)
    grads = call_backward(dout, dlse, q, k, v, out, lse, *options, wanted)
    for grad, (position, bit) in zip(grads, _WANT_AT, strict=True):
        if wanted & bit:
            results[position] = grad
    if options.block_table is not None:
        for position, pages in ((1, k), (2, v)):
            rows = results[position]
            if rows is not None:
                results[position] = _to_pages(rows, pages, options.block_table)
    if options.bias is not None and wanted & WANT_BIAS:
        results[_BIAS_AT] = grads[3].to(options.bias.dtype)
    return tuple(results)


def _call_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    return (
        _Forward.apply(*arguments) if is_transformed() else torch.ops.tilewise.forward(*arguments)
    )


def call_backward(*arguments: Any) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return torch.ops.tilewise.backward(*arguments)
    if is_transformed():
        return _Backward.apply(*arguments)
    if torch.is_grad_enabled():  # create_graph=True: the operator refuses the second derivative
        return torch.ops.tilewise.backward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.backward(*arguments)


# --- vmap -----------------------------------------------------------------------------------------
# Dense problems fold the mapped dimension into the batch: one call. What has no batch dimension to
# fold into (varlen, pages, a mapped scale or sink, dropout bits counted by batch row) runs one call
# per element, which is always right.


def _foldable(options: Options, dims: tuple[int | None, ...]) -> bool:
    by_name = dict(zip(Options._fields, dims, strict=True))
    sequences = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table",
                 "kv_batch_idx", "leftpad_k", "k_descale", "v_descale")  # fmt: skip
    mapped = (by_name["sinks"], by_name["scale_tensor"])
    return (
        all(getattr(options, name) is None for name in sequences)
        and options.dropout_state is None
        and all(dim is None for dim in mapped)
    )


def _fold(tensor: Tensor, dim: int | None, count: int) -> Tensor:
    """[..., count at dim, ...] with a batch dimension first otherwise -> [count * batch, ...]."""
    front = tensor.expand(count, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
    return contiguous_columns(front.flatten(0, 1))


def _unfold(tensor: Tensor, count: int) -> Tensor:
    return tensor.unflatten(0, (count, tensor.shape[0] // count))


def _fold_options(
    options: Options, dims: tuple[int | None, ...], count: int, batch: int
) -> Options:
    by_name = dict(zip(Options._fields, dims, strict=True))
    bias, slopes = options.bias, options.alibi_slopes
    if bias is not None:
        dim = by_name["bias"]
        front = bias.unsqueeze(0) if dim is None else bias.movedim(dim, 0)
        if dim is not None or front.shape[1] != 1:
            # A batch dimension of 1 cannot stay one next to a mapped dimension.
            front = front.expand(count, batch, *front.shape[2:])
        bias = contiguous_columns(front.flatten(0, 1))
    if slopes is not None:
        dim = by_name["alibi_slopes"]
        front = slopes.unsqueeze(0) if dim is None else slopes.movedim(dim, 0)
        if dim is not None or front.dim() == 3:
            front = front.unsqueeze(1) if front.dim() == 2 else front
            slopes = front.expand(count, batch, front.shape[-1]).flatten(0, 1)
    return options._replace(bias=bias, alibi_slopes=slopes)


def _one_by_one(call: Any, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> Any:
    calls = []
    for i in range(info.batch_size):
        picked = [
            argument.select(dim, i) if dim is not None else argument
            for argument, dim in zip(args, in_dims, strict=True)
        ]
        picked = [
            contiguous_columns(value) if isinstance(value, Tensor) and value.dim() > 1 else value
            for value in picked
        ]
        calls.append(call(*picked))
    results = tuple(torch.stack(outputs) for outputs in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    options = Options(*args[3:])  # without those equal to their default
    in_dims = in_dims + (None,) * (3 + _OPTION_COUNT - len(in_dims))
    args = (*args[:3], *options)
    if not _foldable(options, in_dims[3:]):
        return _one_by_one(_call_forward, info, in_dims, args)
    count = info.batch_size
    q, k, v = (_fold(args[i], in_dims[i], count) for i in range(3))
    folded = _fold_options(options, in_dims[3:], count, q.shape[0] // count)
    results = _call_forward(q, k, v, *folded)
    return tuple(_unfold(result, count) for result in results), (0, 0)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    options, wanted = Options(*args[7:-1]), args[-1]
    # Gradients that are summed over the batch would be summed over the mapped dimension as well.
    summed = wanted & (WANT_BIAS | WANT_SINKS | WANT_SCALE)
    if summed or not _foldable(options, in_dims[7:-1]):
        return _one_by_one(call_backward, info, in_dims, args)
    count = info.batch_size
    tensors = [None if args[i] is None else _fold(args[i], in_dims[i], count) for i in range(7)]
    batch = tensors[2].shape[0] // count if tensors[2] is not None else 0
    folded = _fold_options(options, in_dims[7:-1], count, batch)
    results = call_backward(*tensors, *folded, wanted)
    unfolded = []
    for result, bit in zip(results, (WANT_Q, WANT_K, WANT_V, 0, 0, 0), strict=True):
        unfolded.append(
            _unfold(result, count) if wanted & bit else result.expand(count, *result.shape)
        )
    return tuple(unfolded), (0,) * len(unfolded)


def _append_kv_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """One append per element, into its part of the caches: a view, of which no copy is made."""
    k_dim, v_dim = in_dims[:2]
    if k_dim is None or v_dim is None:
        name = "k_cache" if k_dim is None else "v_cache"
        raise RuntimeError(
            f"tilewise: {name} is not mapped by torch.func.vmap, but every element appends its own "
            "keys: only caches that are mapped, as the keys are, are allowed"
        )
    rotated = []
    for i in range(info.batch_size):
        picked = [
            x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)
        ]
        rest = [contiguous_columns(x) if isinstance(x, Tensor) else x for x in picked[2:]]
        rotated.append(torch.ops.tilewise.append_kv(*picked[:2], *rest))
    return torch.stack(rotated), 0


torch.library.register_vmap("tilewise::forward", _forward_vmap, lib=_library)
torch.library.register_vmap("tilewise::backward", _backward_vmap, lib=_library)
torch.library.register_vmap("tilewise::append_kv", _append_kv_vmap, lib=_library)


# --- autograd -------------------------------------------------------------------------------------
# Both the short way of eager calls and what the operators' kernels for autograd run.


class _EagerForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.tilewise.forward(*arguments)
        _setup_context(ctx, arguments, results)
        return results

    backward = staticmethod(_backward)
    jvp = staticmethod(no_forward_mode)


class _EagerBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tilewise.backward(*arguments)

    backward = staticmethod(no_second_derivative)
    jvp = staticmethod(no_forward_mode)


register_autograd(_library, "forward", _EagerForward)
register_autograd(_library, "backward", _EagerBackward)
register_autograd(_library, "append_kv", None)


# --- torch.func -----------------------------------------------------------------------------------


class _Forward(torch.autograd.Function):
    """The operator for torch.func, which takes derivatives through autograd.Function only."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        return torch.ops.tilewise.forward(*arguments)

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)
    jvp = staticmethod(no_forward_mode)
    vmap = staticmethod(_forward_vmap)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        return torch.ops.tilewise.backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing to keep: there is no second derivative."""

    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(_backward_vmap)
