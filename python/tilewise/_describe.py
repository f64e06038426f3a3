"""Fills the C struct of a problem from views (pointer, shape, strides), without a framework."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from . import _abi


class View(NamedTuple):
    """An array as the C ABI sees it; strides count elements."""

    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class OptionalFields(NamedTuple):
    """The fields of ``tilewise_attention`` that may be left out: everything besides q, k and v.

    A negative window means no limit; a bound or a number of splits of 0 means "not given".
    """

    bias: View | None = None
    bias_dtype: int = 0
    alibi_slopes: View | None = None
    sinks: View | None = None
    cu_seqlens_q: View | None = None
    cu_seqlens_k: View | None = None
    seqused_q: View | None = None
    seqused_k: View | None = None
    block_table: View | None = None
    kv_batch_idx: View | None = None
    leftpad_k: View | None = None
    q_descale: View | None = None  # [B, Hkv]
    k_descale: View | None = None
    v_descale: View | None = None
    scale_tensor: View | None = None
    dropout_state: View | None = None
    diagonal: View | None = None
    mask_first: View | None = None
    mask_entries: View | None = None
    mask_bits: View | None = None
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
    check: bool = False
    batch_invariant: bool = False
    kv_float8: bool = False
    row_offset: int = 0
    key_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    heads_q_total: int = 0
    mask_heads: int = 0
    mask_rows: int = 0
    mask_keys: int = 0
    out_dtype: int = _abi.OUT_DEFAULT


def attention(
    q: View,
    k: View,
    v: View,
    dtype: int,
    optional: OptionalFields,
    device: tuple[int, int] = (_abi.CPU, 0),
) -> Any:
    """The C struct of a problem whose shapes have been checked; out and lse are not set."""
    a = _abi.sized(_abi.Attention)
    a.device, a.device_index = device
    a.dtype = dtype
    varlen_q, varlen_k = optional.cu_seqlens_q is not None, optional.cu_seqlens_k is not None
    a.batch = (
        optional.cu_seqlens_q.shape[0] - 1 if optional.cu_seqlens_q is not None else q.shape[0]
    )
    a.seqlen_q, a.heads_q, a.head_dim = q.shape[-3:]
    a.heads_kv, a.head_dim_v = k.shape[-2], v.shape[-1]
    if optional.block_table is not None:
        a.pages, a.page_size = k.shape[:2]
        a.block_table_width = optional.block_table.shape[1]
        a.block_table_stride = optional.block_table.strides[0]
    else:
        a.seqlen_k = k.shape[-3]
        a.kv_batch = 0 if varlen_k or optional.kv_batch_idx is None else k.shape[0]
    a.q, a.k, a.v = rows(q, varlen_q), rows(k, varlen_k), rows(v, varlen_k)
    _fill_score(a, optional)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "block_table",
                 "kv_batch_idx", "leftpad_k"):  # fmt: skip
        setattr(a, name, _pointer(getattr(optional, name)))
    a.max_seqlen_q, a.max_seqlen_k = optional.max_seqlen_q, optional.max_seqlen_k
    a.num_splits = optional.num_splits
    a.deterministic = int(optional.deterministic)
    a.tf32 = int(optional.tf32)
    a.check = int(optional.check)
    a.batch_invariant = int(optional.batch_invariant)
    a.kv_float8 = int(optional.kv_float8)
    a.out_dtype = optional.out_dtype
    set_descale(
        a,
        q_descale=optional.q_descale,
        k_descale=optional.k_descale,
        v_descale=optional.v_descale,
    )
    if optional.mask_first is not None:
        a.mask = ctypes.pointer(_mask(optional))
    return a


def _mask(optional: OptionalFields) -> Any:
    m = _abi.sized(_abi.Mask)
    first, entries, bits = optional.mask_first, optional.mask_entries, optional.mask_bits
    assert first is not None and entries is not None
    m.first, m.entries, m.entry_count = first.pointer, entries.pointer, entries.shape[0]
    lists = first.shape[0] - 1
    if bits is None:
        m.kind, m.heads, m.batch = _abi.MASK_RANGES, 1, lists
        return m
    m.kind, m.heads = _abi.MASK_BLOCKS, optional.mask_heads
    m.rows, m.keys = optional.mask_rows, optional.mask_keys
    m.batch = lists // (m.heads * -(-m.rows // _abi.MASK_BLOCK))
    m.bits, m.bit_blocks = bits.pointer, bits.shape[0]
    return m


def set_descale(a: Any, **given: View | None) -> None:
    """Stores factors of float8_e4m3 numbers, by name, in a struct that has fields for them."""
    for name, factors in given.items():
        if factors is not None:
            setattr(a, name, factors.pointer)
            setattr(a, f"{name}_stride_batch", factors.strides[0])
            setattr(a, f"{name}_stride_head", factors.strides[1])


def set_output(a: Any, out: View, lse: View) -> None:
    """Stores out and lse in the struct of a problem."""
    varlen = a.cu_seqlens_q is not None
    a.out = rows(out, varlen)
    a.lse = lse.pointer
    a.lse_stride_batch, a.lse_stride_head = lse_strides(lse)


def set_max_logits(a: Any, max_logits: View) -> None:
    """Stores max_logits [B, Hq], contiguous, in the struct of a problem."""
    a.max_logits = max_logits.pointer


def lse_strides(lse: View) -> tuple[int, int]:
    """The (batch, head) strides of lse [B, Hq, Sq] or [Hq, T]."""
    return (lse.strides[0], lse.strides[1]) if len(lse.shape) == 3 else (0, lse.strides[0])


def rows(view: View, varlen: bool) -> Any:
    """The C struct of a tensor [batch, row, head, column] or [row, head, column]."""
    return _abi.Tensor(view.pointer, 0 if varlen else view.strides[0], *view.strides[-3:-1])


def bias_strides(view: View) -> tuple[int, int, int]:
    """The (batch, head, row) strides of a bias; 0 where one element is broadcast.

    Without rows or keys nothing is at these strides. They are then 1, so that they still say which
    dimensions are broadcast.
    """
    steps = (1,) * len(view.shape) if 0 in view.shape else view.strides
    strides = [0 if size == 1 else step for size, step in zip(view.shape, steps, strict=True)]
    return strides[0], strides[1], strides[2]


def _fill_score(a: Any, optional: OptionalFields) -> None:
    a.window_left, a.window_right = optional.window_left, optional.window_right
    a.scale, a.softcap = optional.scale, optional.softcap
    a.scale_ptr = _pointer(optional.scale_tensor)
    a.sinks = _pointer(optional.sinks)
    if optional.alibi_slopes is not None:
        a.alibi_slopes = optional.alibi_slopes.pointer
        per_sequence = len(optional.alibi_slopes.shape) == 2
        a.alibi_stride_batch = optional.alibi_slopes.strides[0] if per_sequence else 0
    if optional.bias is not None:
        a.bias = optional.bias.pointer
        a.bias_dtype = optional.bias_dtype
        a.bias_stride_batch, a.bias_stride_head, a.bias_stride_row = bias_strides(optional.bias)
    a.dropout_p = optional.dropout_p
    a.dropout_state = _pointer(optional.dropout_state)
    a.diagonal = _pointer(optional.diagonal)
    a.row_offset, a.key_offset = optional.row_offset, optional.key_offset
    a.batch_offset, a.head_offset = optional.batch_offset, optional.head_offset
    a.heads_q_total = optional.heads_q_total


def _pointer(view: View | None) -> int | None:
    return None if view is None else view.pointer


def plan(library: ctypes.CDLL, a: Any, gradients: Any, tangents: Any = None) -> Any:
    """The PlanInfo of the kernel that would run.

    ``gradients`` is None for the forward and for jvp, ``tangents`` for forward and backward.
    """
    info = _abi.sized(_abi.PlanInfo)
    given = None if gradients is None else ctypes.byref(gradients)
    if tangents is None:
        which = _abi.FORWARD if gradients is None else _abi.BACKWARD
        status = library.tilewise_plan(ctypes.byref(a), given, which, ctypes.byref(info))
    else:
        which = _abi.JVP if gradients is None else _abi.SECOND
        status = library.tilewise_plan_tangents(
            ctypes.byref(a), ctypes.byref(tangents), given, which, ctypes.byref(info)
        )
    _abi.check(library, status)
    return info
