"""Reads a BlockMask of ``torch.nn.attention.flex_attention``."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from ._block_lists import Array, Strip


def strip_of_flex(block_mask: Any) -> tuple[Strip, tuple[int, int, int, int]]:
    """The function that expands rows of the mask, and its (batch, heads, rows, keys)."""
    from torch.nn.attention.flex_attention import BlockMask

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

    by_key = torch.vmap(block_mask.mask_mod, (None, None, None, 0))
    visible = torch.vmap(by_key, (None, None, 0, None))

    def strip(b: int, h: int, begin: int, end: int) -> Array:
        tile = torch.zeros((end - begin, keys), dtype=torch.bool, device="cpu")
        where = [torch.tensor(i, device=device) for i in (b, h)]
        for block in range(begin // step_q, -(-end // step_q)):
            low, high = max(begin, block * step_q), min(end, (block + 1) * step_q)
            rows_of_block = tile[low - begin : high - begin]
            for at in full.of(b, h, block):
                rows_of_block[:, at * step_k : (at + 1) * step_k] = True
            parts = [
                torch.arange(at * step_k, min((at + 1) * step_k, keys), device="cpu")
                for at in partial.of(b, h, block)
            ]
            if parts:
                columns = torch.cat(parts)
                own_rows = torch.arange(low, high, device=device)
                with _tensors_as_indices():
                    seen = visible(*where, own_rows, columns.to(device))
                rows_of_block[:, columns] = seen.expand(high - low, len(columns)).cpu()
        return tile.numpy()

    return strip, (batch, heads, rows, keys)


@functools.cache
def _vmap_indexes() -> bool:
    """Whether a tensor can be indexed by a vmapped one, as functions of masks do."""
    pair = torch.arange(2, device="cpu")
    try:
        torch.vmap(lambda i: pair[i])(pair)
    except RuntimeError:  # PyTorch 2.10 takes the index for a number
        return False
    return True


def _tensors_as_indices() -> contextlib.AbstractContextManager[Any]:
    """Lets functions of a mask index tensors by rows and keys. Where PyTorch needs a mode for it,
    which its own masks use, evaluating a function takes three times as long.
    """
    if _vmap_indexes():
        return contextlib.nullcontext()
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


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
