"""The options of the PyTorch operators, and helpers for their tensors that all callers share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import _abi


class Options(NamedTuple):
    """The arguments of ``forward`` and ``backward`` after the tensors, in the order of the schema.

    A negative window means no limit; a bound or a number of splits of 0 means "not given".
    ``scale_tensor`` replaces ``scale``; ``dropout_state`` is int64 [2], the seed and the offset of
    the dropout bits. ``row_offset`` to ``heads_q_total`` say where a shard lies
    (``_request.Shard``).
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
    q_descale: Tensor | None = None  # [B, Hkv] fp32, for float8_e4m3fn q
    k_descale: Tensor | None = None  # the same for k
    v_descale: Tensor | None = None
    scale_tensor: Tensor | None = None  # [1] fp32
    dropout_state: Tensor | None = None
    diagonal: Tensor | None = None  # [B] int32, of a shard
    mask_first: Tensor | None = None  # of a mask: see tilewise.masks
    mask_entries: Tensor | None = None
    mask_bits: Tensor | None = None  # of a mask of blocks alone
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
    check: bool = False  # verify the entries of index tensors on a GPU, and wait for it
    batch_invariant: bool = False
    row_offset: int = 0
    key_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    heads_q_total: int = 0  # 0: those of q
    mask_heads: int = 0  # of a mask of blocks, like mask_rows and mask_keys
    mask_rows: int = 0
    mask_keys: int = 0
    out_dtype: int = _abi.OUT_DEFAULT  # tilewise_out_dtype
    heads_first: bool = False


# Bits of the argument `wanted` of backward; the values are those of bindings/torch/attention.h.
WANT_BITS = WANT_Q, WANT_K, WANT_V, WANT_BIAS, WANT_SINKS, WANT_SCALE = 1, 2, 4, 8, 16, 32
WANT_QKV = WANT_Q | WANT_K | WANT_V

OPTION_COUNT = len(Options._fields)
TENSOR_COUNT = Options._fields.index("scale")  # the leading options are tensors
TANGENT_COUNT = len(WANT_BITS)  # of q, k, v, bias, sinks and scale


_OUT_DTYPES: dict[int, torch.dtype] = {
    number: getattr(torch, name) for name, number in _abi.OUT_DTYPES.items()
}


def out_dtype_of(q: Tensor, options: Options) -> torch.dtype:
    """The dtype of out: by default that of q, or bfloat16 if q is float8_e4m3fn."""
    default = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    return _OUT_DTYPES.get(options.out_dtype, default)


def has_lse_low(lse: Tensor, q: Tensor) -> bool:
    """Whether lse, or a gradient of it, is the pair (lse, lse_low) in a leading dimension of 2."""
    return lse.dim() == q.dim()


def contiguous_columns(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its columns are not contiguous or have no memory (zero tensors)."""
    in_memory = torch.compiler.is_compiling() or not tensor._is_zerotensor()
    if in_memory and tensor.stride(-1) == 1:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
