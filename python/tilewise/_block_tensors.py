"""Masks of blocks from dense bool tensors by operations of PyTorch, for GPUs: the tensor is not
copied to the host. On CPUs NumPy (_block_lists.py) takes a third of the time, or less.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import _block_lists
from ._block_lists import BLOCK, Lists, blocks_of
from ._mask_fields import host

_PIECE = 4096  # partial blocks that are packed at once: 64 MiB of pairs
# Times eight bools, which are bytes of 0 or 1, as one number: bit i of the topmost byte is bool i.
_GATHER = 0x0102040810204080


def visible_share(dense: Tensor) -> float:
    """The share of the blocks of a mask, bool [batch, heads, rows, keys], that show a pair."""
    if dense.device.type != "cpu":
        return float(_tiles(dense).any(3).any(2).float().mean())
    return _block_lists.visible_share(host(dense))


def _tiles(dense: Tensor) -> Tensor:
    """Bool [batch * heads * row blocks, key blocks, 128, 128]; nothing is seen beyond the edges."""
    rows, keys = dense.shape[2:]
    padded = pad(dense, (0, -keys % BLOCK, 0, -rows % BLOCK))
    return padded.reshape(-1, BLOCK, blocks_of(keys), BLOCK).transpose(1, 2)


def lists_of(dense: Tensor) -> Lists:
    """The lists of blocks of a mask, as tensors on its device. It waits for a GPU, since the values
    decide on the number of blocks.

    Args:
        dense: bool [batch, heads, rows, keys].
    """
    batch, heads, rows, keys = dense.shape
    tiles = _tiles(dense)
    counts = tiles.sum((2, 3), dtype=torch.int32)
    height, width = (_sizes(length, dense.device) for length in (rows, keys))
    full = counts == (height[:, None] * width).repeat(batch * heads, 1)
    partial = (counts > 0) & ~full
    which = torch.full_like(counts, -1)
    at = partial.nonzero(as_tuple=True)
    bits, which[at] = _bits(tiles, at)
    # Full blocks that follow each other are one entry.
    starts = partial | (full & ~pad(full[:, :-1], (1, 0)))
    ends = partial | (full & ~pad(full[:, 1:], (0, 1)))
    owner, begin = starts.nonzero(as_tuple=True)
    end = ends.nonzero(as_tuple=True)[1] + 1
    entries = torch.stack((begin, end, which[owner, begin]), 1)
    first = pad(starts.sum(1).cumsum(0), (1, 0))
    return Lists(first.int(), entries.int(), bits)


def _sizes(length: int, device: torch.device) -> Tensor:
    """How many rows or keys each block has."""
    starts = torch.arange(0, length, BLOCK, dtype=torch.int32, device=device)
    return (length - starts).clamp(max=BLOCK)


def _bits(tiles: Tensor, at: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """The different blocks as bits, int32 [m, 128, 4], and for each position the index of its."""
    pieces = zip(*(x.split(_PIECE) for x in at), strict=True)
    eights = (tiles[piece].view(torch.int64).flatten(1) for piece in pieces)
    packed = [(x * _GATHER >> 56).to(torch.uint8).view(torch.int64) for x in eights]
    rows = torch.cat(packed) if packed else at[0].new_empty((0, BLOCK * BLOCK // 64))
    if rows.shape[0] == 0:
        return at[0].new_empty((0, BLOCK, BLOCK // 32), dtype=torch.int32), at[0].int()
    different, index = torch.unique(rows, dim=0, return_inverse=True)
    return different.view(torch.int32).view(-1, BLOCK, BLOCK // 32), index.int()
