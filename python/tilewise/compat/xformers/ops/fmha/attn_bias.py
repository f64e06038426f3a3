"""The masks of xFormers' ``attn_bias``: which keys a row of the attention matrix sees.

Each mask is a band (causal, a window, or everything), for equal lengths or, in the block-diagonal
masks, for sequences that lie end to end in one batch row. Fields have the names that they have in
xFormers.

Lengths and starts of sequences are lists of integers that count rows or keys. ``device`` is where
their tensors are made: None is CUDA if it is available, otherwise the CPU, as in xFormers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import torch
from torch import Tensor

from tilewise.compat.xformers.ops.fmha._bands import band_of, check_at_least, matrix_of
from tilewise.compat.xformers.ops.fmha._lengths import (
    Device,
    _GappySeqInfo,
    _PaddedSeqLenInfo,
    _SeqLenInfo,
    integers,
)


class AttentionBias:
    """A mask: the base of every class below."""

    def to(self, device: Device) -> Any:
        """The mask with its tensors on the device."""
        return self

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        """0 where a row sees a key and -inf elsewhere, [..., rows, keys]; for tests."""
        return matrix_of(band_of(self), shape[-2], shape[-1], device).to(dtype).expand(shape)


# --- equal lengths --------------------------------------------------------------------------------


class LowerTriangularMask(AttentionBias):
    """Row i sees the keys up to i, also where rows and keys differ in number."""

    def __init__(self, device: Device = None) -> None:
        pass

    def add_bias(self, bias: Tensor) -> LowerTriangularMaskWithTensorBias:
        """This mask and a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """``LowerTriangularMask`` and a tensor [B, H, rows, keys] that is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def to(self, device: Device) -> Any:
        return type(self)(self._bias.to(device))

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal so that the last row sees the last key."""

    def make_local_attention(
        self, window_size: int
    ) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """The mask that also hides all but the last window_size keys that a row sees."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal; a row sees at most _window_size keys."""

    _window_size: int

    def __post_init__(self) -> None:
        check_at_least("window_size", self._window_size, 1)


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """A row sees window_left keys before and window_right keys after its diagonal key."""

    window_left: int
    window_right: int

    def __post_init__(self) -> None:
        check_at_least("window_left", self.window_left, 0)
        check_at_least("window_right", self.window_right, 0)


# --- sequences that lie end to end ----------------------------------------------------------------


@dataclass
class _Packed(AttentionBias):
    q_seqinfo: _SeqLenInfo
    k_seqinfo: Any

    def to(self, device: Device) -> Any:
        q_seqinfo = self.q_seqinfo.to(device)
        same = self.k_seqinfo is self.q_seqinfo
        return replace(
            self, q_seqinfo=q_seqinfo, k_seqinfo=q_seqinfo if same else self.k_seqinfo.to(device)
        )

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: Device = "cpu"
    ) -> Tensor:
        if hasattr(self, "block_tables"):
            raise NotImplementedError("the matrix of a mask with pages is not implemented")
        matrix = torch.full(shape[-2:], -math.inf, device=device)
        band = band_of(self)
        sequences = zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals(), strict=True)
        for (row, row_end), (key, key_end) in sequences:
            block = matrix_of(band, row_end - row, key_end - key, device)
            matrix[row:row_end, key:key_end] = block
        return matrix.to(dtype).expand(shape)


@dataclass
class BlockDiagonalMask(_Packed):
    """The rows of sequence b see the keys of sequence b."""

    _batch_sizes: Optional[Sequence[int]] = None

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Optional[Sequence[int]] = None,
        *,
        device: Device = None,
    ) -> Any:
        """The mask for these numbers of rows and keys; kv_seqlen is by default q_seqlen."""
        rows = integers("q_seqlen", q_seqlen)
        keys = rows if kv_seqlen is None else integers("kv_seqlen", kv_seqlen)
        q_seqinfo = k_seqinfo = _SeqLenInfo.from_seqlens(rows, device=device)
        if keys != rows:
            _check_count(rows, keys)
            k_seqinfo = _SeqLenInfo.from_seqlens(keys, device=device)
        return cls(q_seqinfo, k_seqinfo)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """The mask of tensors [B_i, M_i, ...], and the tensors end to end, [1, total, ...]."""
        mask, joined, _, _ = cls.from_tensor_lists_qkv(tensors, tensors)
        return mask, joined

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[Tensor],
        tensors_k: Sequence[Tensor],
        tensors_v: Optional[Sequence[Tensor]] = None,
    ) -> tuple[Any, Tensor, Tensor, Optional[Tensor]]:
        """The mask of lists of queries and keys, and each list end to end."""
        if not tensors_q:
            raise ValueError("the list of tensors is empty, but must have at least one tensor")
        lengths = [
            [x.shape[1] for x in tensors for _ in range(x.shape[0])]
            for tensors in (tensors_q, tensors_k)
        ]
        mask = cls.from_seqlens(*lengths, device=tensors_q[0].device)
        mask._batch_sizes = [x.shape[0] for x in tensors_q]
        q, k, v = (None if x is None else _joined(x) for x in (tensors_q, tensors_k, tensors_v))
        return mask, q, k, v

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of which [1, rows, ...] consists."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of which [1, keys, ...] consists."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """``split_queries`` of a mask with as many rows as keys."""
        if self.k_seqinfo is not self.q_seqinfo:
            raise ValueError("rows and keys differ in number: call split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Causal in each sequence: its first row sees its first key."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Causal in each sequence: its last row sees its last key."""
        return BlockDiagonalCausalFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes
        )

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """``make_causal`` with at most window_size keys for a row."""
        return BlockDiagonalCausalLocalAttentionMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """``make_causal_from_bottomright`` with at most window_size keys for a row."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], dim=1)


def _check_count(q_seqlen: Sequence[int], kv_seqlen: Sequence[int]) -> None:
    if len(q_seqlen) != len(kv_seqlen):
        raise ValueError(
            f"kv_seqlen has {len(kv_seqlen)} sequences, but must have {len(q_seqlen)} like q_seqlen"
        )


@dataclass
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Causal in each sequence: its first row sees its first key."""


@dataclass
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """Causal in each sequence: its last row sees its last key."""


@dataclass
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """``BlockDiagonalCausalMask`` with at most _window_size keys for a row."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_at_least("window_size", self._window_size, 1)


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """``BlockDiagonalCausalFromBottomRightMask`` with at most _window_size keys for a row."""

    _window_size: int = 0

    def __post_init__(self) -> None:
        check_at_least("window_size", self._window_size, 1)


# --- sequences of a cache: only a part of the keys is in use --------------------------------------


@dataclass
class BlockDiagonalPaddedKeysMask(_Packed):
    """The rows of sequence b see its keys in use: the first ones of a slot of kv_padding keys."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Device = None,
    ) -> Any:
        """The mask for the rows of each sequence, the size of a slot, and the keys in use.

        causal_diagonal is ignored, as in xFormers.
        """
        return cls._of_lengths(q_seqlen, kv_padding, kv_seqlen, device=device)

    @classmethod
    def _of_lengths(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
        **window: int,
    ) -> Any:
        q_seqlen, kv_seqlen = integers("q_seqlen", q_seqlen), integers("kv_seqlen", kv_seqlen)
        _check_count(q_seqlen, kv_seqlen)
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device),
            **window,
        )

    def make_local_attention(
        self, window_left: int, window_right: int
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """The mask with a window around the diagonal, on which the last row meets the last key."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(
            self.q_seqinfo, self.k_seqinfo, window_left, window_right
        )

    def make_paged(self, block_tables: Tensor, page_size: int, paged_type: Any) -> Any:
        """The mask of the class paged_type for a cache in pages; see its fields."""
        slots = replace(self.k_seqinfo, padding=block_tables.shape[1] * page_size)
        return paged_type(self.q_seqinfo, slots, block_tables, page_size)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal in each sequence: its last row sees its last key in use."""

    causal_diagonal: Any = None  # ignored, as in xFormers


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """A window around the diagonal of each sequence: its last row meets its last key in use."""

    window_left: int
    window_right: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> Any:
        """The mask for lengths as in ``from_seqlens``, and the window."""
        return cls._of_lengths(
            q_seqlen, kv_padding, kv_seqlen, window_left=window_left, window_right=window_right
        )


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """Causal in each sequence, with at most _window_size keys for a row."""

    _window_size: int

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_size: int,
    ) -> Any:
        """The mask for lengths as in ``from_seqlens``; a row sees at most window_size keys."""
        return cls._of_lengths(q_seqlen, kv_padding, kv_seqlen, _window_size=window_size)


@dataclass
class BlockDiagonalGappyKeysMask(_Packed):
    """The rows of sequence b see its keys, kv_seqlen[b] of them from kv_seqstarts[b] on.

    The sequences must not overlap, and their starts must not decrease.
    """

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: Device = None,
    ) -> Any:
        """kv_seqstarts has one entry more than sequences: the number of keys in all."""
        q_seqlen, kv_seqlen = integers("q_seqlen", q_seqlen), integers("kv_seqlen", kv_seqlen)
        kv_seqstarts = integers("kv_seqstarts", kv_seqstarts)
        _check_count(q_seqlen, kv_seqlen)
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, False, device=device),
        )

    def make_paged(
        self, block_tables: Tensor, page_size: int, notional_padding: int, paged_type: Any
    ) -> Any:
        """The mask of the class paged_type for a cache in pages.

        Sequence b must have its keys in the notional_padding keys from b * notional_padding on.
        """
        count = len(self.k_seqinfo.seqlen_py)
        slots = range(0, count * notional_padding, notional_padding)
        starts = zip(self.k_seqinfo.seqstart_py, slots, strict=False)
        return paged_type(
            self.q_seqinfo,
            _GappySeqInfo.from_seqlens_gappy(
                [start - slot for start, slot in starts],
                self.k_seqinfo.seqlen_py,
                True,
                device=self.k_seqinfo.seqstart.device,
            ),
            block_tables,
            page_size,
        )


@dataclass
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """Causal in each sequence: its last row sees its last key."""


@dataclass
class _Paged(_Packed):
    block_tables: Tensor
    page_size: int

    def to(self, device: Device) -> Any:
        return replace(super().to(device), block_tables=self.block_tables.to(device))


@dataclass
class PagedBlockDiagonalPaddedKeysMask(_Paged):
    """``BlockDiagonalPaddedKeysMask`` of keys [1, pages * page_size, H, K] in pages.

    block_tables is an integer tensor [sequences, width]: the pages of each sequence in order.
    """

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """The mask for the rows and the keys in use of each sequence."""
        q_seqlen, kv_seqlen = integers("q_seqlen", q_seqlen), integers("kv_seqlen", kv_seqlen)
        _check_count(q_seqlen, kv_seqlen)
        slots = _PaddedSeqLenInfo.from_seqlens_padded(
            kv_seqlen, block_tables.shape[1] * page_size, device=device
        )
        q_seqinfo = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        return cls(q_seqinfo, slots, block_tables, page_size)


@dataclass
class PagedBlockDiagonalCausalWithOffsetPaddedKeysMask(PagedBlockDiagonalPaddedKeysMask):
    """Causal in each sequence: its last row sees its last key in use."""


@dataclass
class PagedBlockDiagonalGappyKeysMask(_Paged):
    """``PagedBlockDiagonalPaddedKeysMask`` of sequences that start later in their pages."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: Tensor,
        page_size: int,
        *,
        device: Device = None,
    ) -> Any:
        """kv_seqstarts, one per sequence, counts keys from the first page of the sequence.

        The device is by default that of block_tables.
        """
        q_seqlen, kv_seqlen = integers("q_seqlen", q_seqlen), integers("kv_seqlen", kv_seqlen)
        kv_seqstarts = integers("kv_seqstarts", kv_seqstarts)
        _check_count(q_seqlen, kv_seqlen)
        device = block_tables.device if device is None else device
        return cls(
            _SeqLenInfo.from_seqlens(q_seqlen, device=device),
            _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, True, device=device),
            block_tables,
            page_size,
        )


@dataclass
class PagedBlockDiagonalCausalWithOffsetGappyKeysMask(PagedBlockDiagonalGappyKeysMask):
    """Causal in each sequence: its last row sees its last key."""
