"""The schemas of the PyTorch operators ``torch.ops.tilewise.*``, and the shapes of their results.

The kernels come from libtilewise_torch (``bindings/torch``). The schemas are defined here because
the stable ABI can attach tags only from PyTorch 2.12 on, and ``torch.compile`` needs the tag
``pt2_compliant_tag`` on every version.

All tensors are in "bshd" or varlen order whatever their strides; ``heads_first`` only says that new
[batch, row, head, column] tensors are stored as [batch, head, row, column].

``with_lse_low`` of a forward adds a leading dimension of 2 to its lse: lse itself, and ``lse_low``,
the error of rounding it to fp32. ``backward``, ``jvp`` and ``second`` take lse in either form. With
lse_low their weights are exact for any lse; without it they are off by |lse| * 6e-8. Autograd saves
both.

``forward_max_logits`` is ``forward`` with a third result: float32 [batch, heads_q], the largest
scale * q.k over the visible pairs of each sequence.

``jvp`` computes the tangents of out and lse from those of the inputs, each of which may be None,
which means zero. ``second`` computes the gradients of

    <dout, out> + <dlse, lse> + <dout_tangent, out_tangent> + <dlse_tangent, lse_tangent>

for q, k, v, bias, sinks and scale; out_tangent and lse_tangent also depend on them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._library import load_torch_adapter
from ._options import (
    OPTION_COUNT,
    TANGENT_COUNT,
    WANT_BIAS,
    WANT_K,
    WANT_Q,
    WANT_SCALE,
    WANT_SINKS,
    WANT_V,
    Options,
    out_dtype_of,
)

_OPTIONS = (
    "Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? block_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, Tensor? scale_tensor, Tensor? dropout_state, Tensor? diagonal, "
    "Tensor? mask_first, Tensor? mask_entries, Tensor? mask_bits, "
    "float scale, int window_left, int window_right, float softcap, float dropout_p, "
    "int max_seqlen_q, int max_seqlen_k, int num_splits, bool deterministic, bool tf32, "
    "bool check, bool batch_invariant, int row_offset, int key_offset, int batch_offset, "
    "int head_offset, int heads_q_total, int mask_heads, int mask_rows, int mask_keys, "
    "int out_dtype, bool heads_first"
)
# The options of the fast path of equal lengths (tilewise._plain). Here heads_first means that the
# tensors themselves are in "bhsd" order.
_PLAIN_OPTIONS = (
    "float? scale, int window_left, int window_right, bool deterministic, bool tf32, "
    "bool heads_first"
)
_TANGENTS = (
    "Tensor? q_tangent, Tensor? k_tangent, Tensor? v_tangent, Tensor? bias_tangent, "
    "Tensor? sinks_tangent, Tensor? scale_tangent"
)
_GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks, Tensor dscale)"
_SCHEMAS = (
    f"forward(Tensor q, Tensor k, Tensor v, {_OPTIONS}=False, bool with_lse_low=False) "
    "-> (Tensor out, Tensor lse)",
    f"forward_max_logits(Tensor q, Tensor k, Tensor v, {_OPTIONS}=False, bool with_lse_low=False) "
    "-> (Tensor out, Tensor lse, Tensor max_logits)",
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_OPTIONS}, int wanted) -> {_GRADIENTS}",
    f"jvp(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_TANGENTS}, {_OPTIONS}) "
    "-> (Tensor out_tangent, Tensor lse_tangent)",
    "second(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor out_tangent, "
    f"Tensor lse_tangent, {_TANGENTS}, Tensor? dout, Tensor? dlse, Tensor dout_tangent, "
    f"Tensor? dlse_tangent, {_OPTIONS}, int wanted) -> {_GRADIENTS}",
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


library = torch.library.Library("tilewise", "FRAGMENT")
for _schema in _SCHEMAS:
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
load_torch_adapter()


# --- shapes for tracing ---------------------------------------------------------------------------


def options_of(arguments: tuple[Any, ...]) -> tuple[Options, bool]:
    """The options and ``with_lse_low`` of a forward; PyTorch may omit trailing default values."""
    return Options(*arguments[:OPTION_COUNT]), arguments[OPTION_COUNT:] == (True,)


def _new_rows(
    like: Tensor, shape: tuple[int, ...], heads_first: bool, dtype: torch.dtype | None = None
) -> Tensor:
    if heads_first and len(shape) == 4:
        batch, rows, heads, columns = shape
        return like.new_empty((batch, heads, rows, columns), dtype=dtype).transpose(1, 2)
    return like.new_empty(shape, dtype=dtype)


def _new_out(q: Tensor, v: Tensor, options: Options) -> Tensor:
    shape = (*q.shape[:-1], v.shape[-1])
    return _new_rows(q, shape, options.heads_first, out_dtype_of(q, options))


def _new_lse(q: Tensor, options: Options, leading: tuple[int, ...] = ()) -> Tensor:
    batch = () if options.cu_seqlens_q is not None else (q.shape[0],)
    return q.new_empty((*leading, *batch, q.shape[-2], q.shape[-3]), dtype=torch.float32)


@torch.library.register_fake("tilewise::forward", lib=library)
def _forward_fake(q: Tensor, _k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    option, with_lse_low = options_of(options)
    return _new_out(q, v, option), _new_lse(q, option, (2,) if with_lse_low else ())


@torch.library.register_fake("tilewise::forward_max_logits", lib=library)
def _forward_max_logits_fake(
    q: Tensor, k: Tensor, v: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    starts = options_of(options)[0].cu_seqlens_q
    batch = q.shape[0] if starts is None else starts.shape[0] - 1
    max_logits = q.new_empty((batch, q.shape[-2]), dtype=torch.float32)
    return *_forward_fake(q, k, v, *options), max_logits


@torch.library.register_fake("tilewise::backward", lib=library)
def _backward_fake(*arguments: Any) -> tuple[Tensor, ...]:
    _dout, _dlse, q, k, v, _out, _lse, *options, wanted = arguments
    return _new_gradients(q, k, v, Options(*options), wanted)


@torch.library.register_fake("tilewise::jvp", lib=library)
def _jvp_fake(
    q: Tensor, _k: Tensor, v: Tensor, _out: Tensor, _lse: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    option = Options(*rest[TANGENT_COUNT:])
    return _new_out(q, v, option), _new_lse(q, option)


@torch.library.register_fake("tilewise::second", lib=library)
def _second_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _new_gradients(q, k, v, Options(*rest[-OPTION_COUNT - 1 : -1]), rest[-1])


def _new_gradients(
    q: Tensor, k: Tensor, v: Tensor, option: Options, wanted: int
) -> tuple[Tensor, ...]:
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


@torch.library.register_fake("tilewise::append_kv", lib=library)
def _append_kv_fake(
    k_cache: Tensor, _v_cache: Tensor, q: Tensor | None, k_new: Tensor | None, *_: Any
) -> Tensor:
    like = next(x for x in (q, k_new, k_cache) if x is not None)
    return like.new_empty((0,) if q is None else q.shape)
