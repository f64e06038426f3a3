"""Chunked attention (``attention_chunk``) as variable-length attention: exact and differentiable.

With ``attention_chunk = c``, the query at position p sees only keys of its own chunk, those from
``p // c * c`` to ``p // c * c + c - 1``, in addition to the limits of causal and window. Positions
are aligned bottom-right: row i is at i + Sk - Sq. Each chunk becomes a sequence of its own with the
rows that see it. Its last row has the position of its last key, so causal and windows keep their
meaning.
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from typing import NamedTuple, Optional

import torch
from torch import Tensor


def split_lengths(rows: int, keys: int, chunk: int) -> list[tuple[int, int]]:
    """(rows, keys) of each chunk of one sequence, in order; they add up to rows and keys."""
    offset = keys - rows
    parts = []
    if offset < 0:
        parts.append((-offset, 0))  # these rows are before the first key and see nothing
    for first in range(0, keys, chunk):
        last = min(first + chunk, keys)
        parts.append((max(0, last - max(first, offset)), last - first))
    return parts


class Sequence(NamedTuple):
    """The rows and keys that one packed sequence has room for, and those in use."""

    rows: int
    keys: int
    rows_used: int
    keys_used: int


def split_packed(sequences: list[Sequence], chunk: int, device: torch.device):
    """cu_seqlens_q and cu_seqlens_k of the chunks, and the sequence of each chunk, all int32."""
    rows, keys, owners = [0], [0], []
    for owner, sequence in enumerate(sequences):
        parts = split_lengths(sequence.rows_used, sequence.keys_used, chunk)
        # Unused rows and unused keys become two further sequences, so that these rows see no keys.
        parts.append((sequence.rows - sequence.rows_used, 0))
        parts.append((0, sequence.keys - sequence.keys_used))
        for part_rows, part_keys in parts:
            if part_rows or part_keys:
                rows.append(rows[-1] + part_rows)
                keys.append(keys[-1] + part_keys)
                owners.append(owner)
    return tuple(torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, keys, owners))


class CacheChunks(NamedTuple):
    """Arguments of variable-length attention to a cache, with one sequence per chunk."""

    cu_seqlens_q: Tensor
    seqused_k: Tensor
    leftpad_k: Tensor
    chunks_per_sequence: int


def split_cache(
    rows: Tensor, max_rows: int, seqused_k: Tensor, leftpad_k: Optional[Tensor], chunk: int
) -> CacheChunks:
    """The chunks of queries at the end of a cache, computed without reading tensors on the host.

    Args:
        rows: [B] int32, queries of each sequence, at most max_rows.
        seqused_k: [B] int32, keys of each sequence, including left padding.
        leftpad_k: [B] int32 or None.
    """
    pad = torch.zeros_like(seqused_k) if leftpad_k is None else leftpad_k
    keys = (seqused_k - pad).unsqueeze(-1)
    first_row = keys - rows.unsqueeze(-1)
    chunks_per_sequence = (max_rows + chunk - 1) // chunk + 1
    steps = torch.arange(chunks_per_sequence, device=keys.device, dtype=keys.dtype)
    begin = (torch.div(first_row, chunk, rounding_mode="floor") + steps) * chunk
    end = torch.minimum(begin + chunk, keys)
    chunk_rows = (end - torch.maximum(begin, first_row)).clamp(min=0).flatten()
    cu_seqlens_q = torch.nn.functional.pad(chunk_rows.cumsum(0, dtype=torch.int32), (1, 0))
    last = pad.unsqueeze(-1) + end.clamp(min=0)
    first = torch.minimum(pad.unsqueeze(-1) + begin.clamp(min=0), last)
    return CacheChunks(cu_seqlens_q, last.flatten(), first.flatten(), chunks_per_sequence)
