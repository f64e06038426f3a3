"""Masks of blocks from dense bool tensors by operations of PyTorch, for GPUs: the tensor is not
copied to the host. On CPUs, _block_lists.py with NumPy takes a third of the time, or less.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ._block_lists import BLOCK, Lists, blocks_of

_PIECE = 4096  # partial blocks that are packed at once: 64 MiB of pairs
# Eight bools viewed as an int64: this value means that all are true.
_ALL = 0x0101010101010101
# Multiplying such a value by this gathers its bools in the topmost byte, the first one in bit 0.
_GATHER = 0x0102040810204080


def visible_share(dense: Tensor) -> float:
    """The share of the blocks of a mask, bool [batch, heads, rows, keys], that show a pair."""
    return float(_visible(_words(dense, False)).float().mean())


def lists_of(dense: Tensor) -> Lists:
    """The lists of blocks of a mask, as tensors on its device. It waits for a GPU, since the values
    decide on the number of blocks.

    Args:
        dense: bool [batch, heads, rows, keys].
    """
    words = _words(dense, False)
    visible = _visible(words)
    is_whole = dense.shape[2] % BLOCK == 0 and dense.shape[3] % BLOCK == 0
    full = (words if is_whole else _words(dense, True)).amin((1, 3)) == _ALL
    partial = visible & ~full
    which = visible.new_full(visible.shape, -1, dtype=torch.int32)
    at = partial.nonzero(as_tuple=True)
    bits, which[at] = _bits(words.transpose(1, 2), at)
    # Full blocks that follow each other are one entry.
    starts = partial | (full & ~pad(full[:, :-1], (1, 0)))
    ends = partial | (full & ~pad(full[:, 1:], (0, 1)))
    owner, begin = starts.nonzero(as_tuple=True)
    end = ends.nonzero(as_tuple=True)[1] + 1
    entries = torch.stack((begin, end, which[owner, begin]), 1)
    first = pad(starts.sum(1).cumsum(0), (1, 0))
    return Lists(first.int(), entries.int(), bits)


def _words(dense: Tensor, beyond: bool) -> Tensor:
    """The pairs of the lists, eight as a number: int64 [lists, 128 rows, key blocks, 16]. A list is
    a sequence, head and block of rows; `beyond` are the pairs beyond the edges of the mask.
    """
    batch, heads, rows, keys = dense.shape
    shape = (batch, heads, blocks_of(rows), BLOCK, blocks_of(keys), BLOCK // 8)
    words = dense.new_full(shape, _ALL if beyond else 0, dtype=torch.int64)
    whole = words.view(torch.bool).view(batch, heads, shape[2] * BLOCK, shape[4] * BLOCK)
    whole[:, :, :rows, :keys] = dense != 0  # bytes of 0 and 1, whatever a bool consists of
    return words.view(-1, *shape[3:])


def _visible(words: Tensor) -> Tensor:
    """Whether a block shows a pair: bool [lists, key blocks]."""
    return words.amax((1, 3)) != 0


def _bits(blocks: Tensor, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The different blocks at these positions as bits, int32 [m, 128, 4], and for each position the
    index of its bits.
    """
    pieces = zip(*(x.split(_PIECE) for x in at), strict=True)
    eights = (blocks[piece].flatten(1) for piece in pieces)
    packed = [(x * _GATHER >> 56).to(torch.uint8).view(torch.int64) for x in eights]
    different, index = _unique(torch.cat(packed))
    return different.view(torch.int32).view(-1, BLOCK, BLOCK // 32), index


def _unique(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The different rows of int64 [n, m], and for each row the index of its equal, int32 [n]. They
    are told apart by a hash: comparing whole rows, as torch.unique does, takes milliseconds.
    """
    number = torch.arange(rows.shape[0], device=rows.device)
    hashes, group = torch.unique((rows * _weights(rows)).sum(1), return_inverse=True)
    last = torch.zeros_like(hashes).scatter_reduce(0, group, number, "amax")
    different = rows[last]
    if torch.equal(different[group], rows):
        return different, group.int()
    return rows, number.int()  # different rows have one hash: no row shares its bits


def _weights(rows: Tensor) -> Tensor:
    """Odd numbers without a pattern, a factor for every column."""
    column = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    mixed = column * -0x61C8864680B583EB
    return ((mixed ^ (mixed >> 29)) * -0x4B47D0C5A1A8E3A3) | 1
