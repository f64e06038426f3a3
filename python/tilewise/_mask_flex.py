"""Reads a BlockMask of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._block_lists import Array, Strip


def strip_of_flex(block_mask: Any) -> tuple[Strip, tuple[int, int, int, int]]:
    """The function that expands rows of the mask, and its (batch, heads, rows, keys)."""
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    if not isinstance(block_mask, BlockMask):
        raise TypeError(
            f"block_mask is a {type(block_mask).__name__}, but must be a BlockMask of "
            "torch.nn.attention.flex_attention"
        )
    batch, heads = block_mask.kv_num_blocks.shape[:2]
    rows, keys = block_mask.seq_lengths
    step_q, step_k = block_mask.BLOCK_SIZE
    device = block_mask.kv_num_blocks.device
    partial = _Lists(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = _Lists(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)

    def visible(b: int, h: int, of_rows: tuple[int, int], columns: Tensor) -> Tensor:
        """The pairs of these rows and keys; create_mask evaluates functions from row 0 on."""
        begin, end = of_rows

        def moved(no_b: Tensor, no_h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            seen: Tensor = block_mask.mask_mod(no_b + b, no_h + h, i + begin, columns[j])
            return seen

        return create_mask(moved, 1, 1, end - begin, len(columns), device=device)[0, 0]

    def strip(b: int, h: int, begin: int, end: int) -> Array:
        tile = torch.zeros((end - begin, keys), dtype=torch.bool)
        for block in range(begin // step_q, -(-end // step_q)):
            low, high = max(begin, block * step_q), min(end, (block + 1) * step_q)
            rows_of_block = tile[low - begin : high - begin]
            for at in full.of(b, h, block):
                rows_of_block[:, at * step_k : (at + 1) * step_k] = True
            parts = [
                torch.arange(at * step_k, min((at + 1) * step_k, keys))
                for at in partial.of(b, h, block)
            ]
            if parts:
                columns = torch.cat(parts)
                seen = visible(b, h, (low, high), columns.to(device))
                rows_of_block[:, columns] = seen.cpu()
        return tile.numpy()

    return strip, (batch, heads, rows, keys)


class _Lists:
    """The key blocks of every row block, on the host."""

    def __init__(self, counts: Any, indices: Any) -> None:
        self._counts = None if counts is None else counts.cpu()
        self._indices = None if indices is None else indices.cpu()

    def of(self, b: int, h: int, block: int) -> list[int]:
        if self._counts is None or self._indices is None:
            return []
        count = int(self._counts[b, h, block])
        indices: list[int] = self._indices[b, h, block, :count].tolist()
        return indices
