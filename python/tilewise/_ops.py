"""The PyTorch operators ``torch.ops.tilewise.*``: schemas, shapes for tracing, derivatives, vmap.

The kernels come from libtilewise_torch (``bindings/torch``). The schemas are defined here because
the stable ABI can attach tags only from PyTorch 2.12 on, and ``torch.compile`` needs the tag
``pt2_compliant_tag`` on every version.

All tensors are in "bshd" or varlen order whatever their strides; ``heads_first`` only says that new
[batch, row, head, column] tensors are stored as [batch, head, row, column].

``with_lse_low`` of a forward adds a leading dimension of 2 to its lse: lse itself, and ``lse_low``,
the error of rounding it to fp32. A backward takes lse in either form. With lse_low its weights are
exact for any lse; without it they are off by |lse| * 6e-8. Autograd saves both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import is_transformed, no_forward_mode, no_second_derivative
from ._autograd import register as register_autograd
from ._fold import fold, fold_lse, fold_options, foldable, one_by_one, unfold
from ._library import load_torch_adapter
from ._options import (
    OPTION_COUNT,
    TENSOR_COUNT,
    WANT_BIAS,
    WANT_K,
    WANT_Q,
    WANT_SCALE,
    WANT_SINKS,
    WANT_V,
    Options,
    contiguous_columns,
    has_lse_low,
)

_OPTIONS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? block_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? scale_tensor, Tensor? dropout_state, Tensor? diagonal, "
    "Tensor? mask_first, Tensor? mask_entries, Tensor? mask_bits, "
    "float scale, int window_left, int window_right, float softcap, float dropout_p, "
    "int max_seqlen_q, int max_seqlen_k, int num_splits, bool deterministic, bool tf32, "
    "bool check, bool batch_invariant, int row_offset, int key_offset, int batch_offset, "
    "int head_offset, int heads_q_total, int mask_heads, int mask_rows, int mask_keys, "
    "bool heads_first"
)
# The options of the fast path of equal lengths (tilewise._plain). Here heads_first means that the
# tensors themselves are in "bhsd" order.
_PLAIN_OPTIONS = (
    "float? scale, int window_left, int window_right, bool deterministic, bool tf32, "
    "bool heads_first"
)
_SCHEMAS = (
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}=False, bool with_lse_low=False) "
    "-> (Tensor out, Tensor lse)",
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, int wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks, "
    "Tensor dscale)",
    f"_plain_forward(Tensor q, Tensor k, Tensor v, {_PLAIN_OPTIONS}, bool with_lse_low=False) "
    "-> (Tensor out, Tensor lse)",
    "_plain_backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {_PLAIN_OPTIONS}, int wanted) -> (Tensor dq, Tensor dk, Tensor dv)",
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? q, Tensor? k_new, Tensor? v_new, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_q, Tensor? cu_seqlens_new, Tensor? rotary_seqlens, "
    "Tensor? block_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, bool rotary_interleaved, bool q_single_position, "
    "Tensor? k_descale=None, Tensor? v_descale=None) -> Tensor",
)


WITH_LSE_LOW = True  # the last argument of a forward whose lse a backward takes

_library = torch.library.Library("tilewise", "FRAGMENT")
for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
load_torch_adapter()


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator, through as few of PyTorch's dispatch layers as possible."""
    arguments = (q, k, v, *options)
    tensors = (q, k, v, *options[:TENSOR_COUNT])
    if torch.compiler.is_compiling():
        if not (
            torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
        ):
            return torch.ops.tilewise.forward(*arguments)
        return _without_lse_low(torch.ops.tilewise.forward(*arguments, WITH_LSE_LOW), q)
    if is_transformed():
        return _without_lse_low(_Forward.apply(*arguments, WITH_LSE_LOW), q)
    if forward_ad._current_level >= 0 or (
        torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)
    ):
        return _EagerForward.apply(*arguments, WITH_LSE_LOW)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.forward(*arguments)


def append_kv(*arguments: Any) -> Tensor:
    """The operator, which has no derivative, through as few dispatch layers as possible."""
    if torch.compiler.is_compiling() or is_transformed() or forward_ad._current_level >= 0:
        return torch.ops.tilewise.append_kv(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tilewise.append_kv(*arguments)


def _without_lse_low(results: tuple[Tensor, Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = results
    return out, lse[0] if has_lse_low(lse, q) else lse


# --- shapes for tracing ---------------------------------------------------------------------------


def _options_of(arguments: tuple[Any, ...]) -> tuple[Options, bool]:
    """The options and ``with_lse_low`` of a forward; PyTorch may omit trailing default values."""
    return Options(*arguments[:OPTION_COUNT]), arguments[OPTION_COUNT:] == (True,)


def _new_rows(like: Tensor, shape: tuple[int, ...], heads_first: bool) -> Tensor:
    if heads_first and len(shape) == 4:
        batch, rows, heads, columns = shape
        return like.new_empty((batch, heads, rows, columns)).transpose(1, 2)
    return like.new_empty(shape)


@torch.library.register_fake("tilewise::forward", lib=_library)
def _forward_fake(q: Tensor, _k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    option, with_lse_low = _options_of(options)
    shape = (*q.shape[:-1], v.shape[-1])
    rows, heads = q.shape[-3], q.shape[-2]
    lse_shape = (heads, rows) if option.cu_seqlens_q is not None else (q.shape[0], heads, rows)
    lse_shape = (2, *lse_shape) if with_lse_low else lse_shape
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
    ctx.save_for_backward(q, k, v, *output, *options[:TENSOR_COUNT])
    ctx.numbers = tuple(options[TENSOR_COUNT:OPTION_COUNT])


def _position(name: str) -> int:
    """The index of an option among the arguments of ``forward``."""
    return 3 + Options._fields.index(name)


def _materialized_bias(bias: Tensor | None) -> Tensor | None:
    """The bias, copied if it is an expanded view, because each of its elements gets a gradient."""
    if bias is None:
        return None
    expanded = any(bias.stride(i) == 0 and bias.shape[i] > 1 for i in range(3))
    return bias.contiguous() if expanded else bias


# The position of each argument of ``forward`` that can have a gradient, and its WANT bit.
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
    """The WANT bits of the arguments of ``forward`` that need a gradient."""
    if needs[_SLOPES_AT]:
        raise RuntimeError(
            "tilewise: alibi_slopes requires a gradient, but none is defined for it; "
            "pass alibi_slopes.detach(), or a bias computed from the slopes"
        )
    return sum(bit for position, bit in _WANT_AT if needs[position])


def _to_pages(rows: Tensor, pages: Tensor, block_table: Tensor) -> Tensor:
    """The sum per page of the gradients of keys, from [B, width * page_size, H, D].

    Table entries past the keys in use may have any value: the gradients there are 0, so adding them
    to some page changes nothing.
    """
    count, size, heads, columns = pages.shape
    total = rows.new_zeros((count, size, heads, columns), dtype=torch.float32)
    if count == 0 or block_table.numel() == 0:
        return total.to(pages.dtype)
    index = block_table.reshape(-1).to(torch.int64).clamp(0, count - 1)
    per_page = rows.reshape(index.shape[0], size, heads, columns).to(torch.float32)
    return total.index_add(0, index, per_page).to(pages.dtype)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    results: list[Tensor | None] = [None] * (3 + OPTION_COUNT + 1)  # the last is with_lse_low
    wanted = _wanted(ctx.needs_input_grad)
    if wanted == 0 or (dout is None and dlse is None):
        return tuple(results)
    q, k, v, out, lse, *tensors = ctx.saved_tensors
    options = Options(*tensors, *ctx.numbers)
    if wanted & WANT_BIAS:
        options = options._replace(bias=_materialized_bias(options.bias))
    dout = torch.zeros_like(out) if dout is None else contiguous_columns(dout)
    if dlse is not None:
        dlse = contiguous_columns(dlse[0] if has_lse_low(dlse, q) else dlse)
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
# Problems of equal lengths fold the mapped dimension into the batch and need one call. Problems
# without a batch dimension to fold into (varlen, pages, a mapped scale or sink, dropout bits that
# are numbered by batch row) make one call per element, which is always correct.


def _forward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    options, with_lse_low = _options_of(args[3:])
    in_dims = in_dims + (None,) * (3 + OPTION_COUNT + 1 - len(in_dims))
    args = (*args[:3], *options, with_lse_low)
    if not foldable(options, in_dims[3:-1]):
        return one_by_one(_call_forward, info, in_dims, args)
    count = info.batch_size
    q, k, v = (fold(args[i], in_dims[i], count) for i in range(3))
    folded = fold_options(options, in_dims[3:-1], count, q.shape[0] // count)
    out, lse = _call_forward(q, k, v, *folded, with_lse_low)
    if with_lse_low:
        lse = lse.unflatten(1, (count, lse.shape[1] // count))
        return (unfold(out, count), lse), (0, 1)
    return (unfold(out, count), unfold(lse, count)), (0, 0)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    options, wanted = Options(*args[7:-1]), args[-1]
    # Gradients that are summed over the batch would also be summed over the mapped dimension.
    summed = wanted & (WANT_BIAS | WANT_SINKS | WANT_SCALE)
    if summed or not foldable(options, in_dims[7:-1]):
        return one_by_one(call_backward, info, in_dims, args)
    count = info.batch_size
    tensors: list[Any] = [
        None if args[i] is None else fold(args[i], in_dims[i], count) for i in range(6)
    ]
    q = tensors[2]
    lse = fold_lse(args[6], in_dims[6], count, q.dim())
    folded = fold_options(options, in_dims[7:-1], count, q.shape[0] // count)
    results = call_backward(*tensors, lse, *folded, wanted)
    unfolded = []
    for result, bit in zip(results, (WANT_Q, WANT_K, WANT_V, 0, 0, 0), strict=True):
        unfolded.append(
            unfold(result, count) if wanted & bit else result.expand(count, *result.shape)
        )
    return tuple(unfolded), (0,) * len(unfolded)


def _append_kv_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
    """One append per element, into a view of its slice of the caches."""
    k_dim, v_dim = in_dims[:2]
    if k_dim is None or v_dim is None:
        name = "k_cache" if k_dim is None else "v_cache"
        raise RuntimeError(
            f"tilewise: {name} is not mapped by torch.func.vmap, but every element appends its own "
            "keys: the caches must be mapped like the keys"
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


class _EagerForward(torch.autograd.Function):
    """The operator for eager calls, which skip the overhead of its autograd kernel."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.tilewise.forward(*arguments)
            returned = _without_lse_low(results, arguments[0])
        _setup_context(ctx, arguments, results)
        return returned

    backward = staticmethod(_backward)
    jvp = staticmethod(no_forward_mode)


class _OperatorForward(torch.autograd.Function):
    """The function that the autograd kernel of ``forward`` applies."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.tilewise.forward(*arguments)
        _setup_context(ctx, arguments, results)
        return results

    backward = staticmethod(_backward)


class _OperatorBackward(torch.autograd.Function):
    """The function that the autograd kernel of ``backward`` applies."""

    @staticmethod
    def forward(_ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tilewise.backward(*arguments)

    backward = staticmethod(no_second_derivative)


register_autograd(_library, "forward", _OperatorForward)
register_autograd(_library, "backward", _OperatorBackward)
register_autograd(_library, "append_kv", None)


# --- torch.func -----------------------------------------------------------------------------------


class _Forward(torch.autograd.Function):
    """The operator for torch.func, which differentiates only through autograd.Function."""

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
        """Saves nothing, because there is no second derivative."""

    backward = staticmethod(no_second_derivative)
    vmap = staticmethod(_backward_vmap)
