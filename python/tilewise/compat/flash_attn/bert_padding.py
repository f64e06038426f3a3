"""Removing and restoring padding: the functions of ``flash_attn.bert_padding``, differentiable.

Shapes: B sequences of at most S tokens; ``...`` stands for any further dimensions, usually
[heads, head_dim] or [hidden].
"""

# The signatures are those of another package: they stay unannotated where it does not annotate.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
from torch import Tensor


def _scatter_rows(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Zeros [rows, ...] with row ``indices[i]`` set to ``values[i]``."""
    out = values.new_zeros((rows, *values.shape[1:]))
    out[indices] = values
    return out


class IndexFirstAxis(torch.autograd.Function):
    """``input[indices]``. The indices are distinct, so the gradient is a plain scatter."""

    @staticmethod
    def forward(ctx, input, indices):
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions; at least 2 are needed")
        ctx.save_for_backward(indices)
        ctx.rows = input.shape[0]
        return input[indices]

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return _scatter_rows(grad_output, indices, ctx.rows), None


index_first_axis = IndexFirstAxis.apply


class IndexPutFirstAxis(torch.autograd.Function):
    """Zeros of ``first_axis_dim`` rows in which row ``indices[i]`` is ``values[i]``."""

    @staticmethod
    def forward(ctx, values, indices, first_axis_dim):
        if indices.ndim != 1:
            raise ValueError(f"indices has {indices.ndim} dimensions; exactly 1 is allowed")
        if values.ndim < 2:
            raise ValueError(f"values has {values.ndim} dimensions; at least 2 are needed")
        ctx.save_for_backward(indices)
        return _scatter_rows(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return grad_output[indices], None, None


index_put_first_axis = IndexPutFirstAxis.apply


class IndexFirstAxisResidual(torch.autograd.Function):
    """``(input[indices], input)``: the second output lets a residual branch share one gradient."""

    @staticmethod
    def forward(ctx, input, indices):
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions; at least 2 are needed")
        ctx.save_for_backward(indices)
        return input[indices], input.detach()

    @staticmethod
    def backward(ctx, grad_output, grad_residual):
        (indices,) = ctx.saved_tensors
        grad_input = grad_residual.clone()
        grad_input[indices] += grad_output
        return grad_input, None


index_first_axis_residual = IndexFirstAxisResidual.apply


def _boundaries(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens int32 [n + 1] and the largest length."""
    cu_seqlens = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(lengths.max().item()) if lengths.numel() else 0


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Keeps the tokens that the masks mark and packs them into one row dimension.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], bool or int, 1 where a token takes part in attention.
        unused_mask: [B, S], bool or int, 1 where room is kept for a token that takes no part yet
            (its rows are packed too, but ``seqused`` does not count them).

    Returns:
        hidden_states [T, ...], T being the number of tokens marked by either mask;
        indices [T] int64 into the flattened [B * S] tokens;
        cu_seqlens [B + 1] int32, boundaries in the packed rows, unused ones included;
        max_seqlen_in_batch (int);
        seqused [B] int32, tokens per sequence marked by ``attention_mask``.
    """
    batch, seqlen = hidden_states.shape[:2]
    if tuple(attention_mask.shape) != (batch, seqlen):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; "
            f"hidden_states asks for {(batch, seqlen)}"
        )
    kept = attention_mask if unused_mask is None else (attention_mask != 0) | (unused_mask != 0)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    cu_seqlens, max_seqlen = _boundaries(kept.sum(dim=-1, dtype=torch.int32))
    indices = torch.nonzero(kept.flatten(), as_tuple=False).flatten()
    rows = hidden_states.reshape(batch * seqlen, *hidden_states.shape[2:])
    return _gather(rows, indices), indices, cu_seqlens, max_seqlen, seqused


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """``unpad_input`` for rows that each hold several sequences one after the other.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: [B, S] int: the lengths of the sequences of row b, then zeros. For
            example ``[[2, 3, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0]]``: two sequences, then three.

    Returns:
        hidden_states [T, ...], indices [T], cu_seqlens [sequences + 1] int32, max_seqlen_in_batch.
    """
    batch, seqlen = hidden_states.shape[:2]
    if tuple(attention_mask_in_length.shape) != (batch, seqlen):
        raise ValueError(
            f"attention_mask_in_length has shape {tuple(attention_mask_in_length.shape)}; "
            f"hidden_states asks for {(batch, seqlen)}"
        )
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    positions = torch.arange(seqlen, device=tokens.device, dtype=tokens.dtype)
    indices = torch.nonzero((positions < tokens).flatten(), as_tuple=False).flatten()
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, max_seqlen = _boundaries(lengths[lengths > 0])
    rows = hidden_states.reshape(batch * seqlen, *hidden_states.shape[2:])
    return _gather(rows, indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states, indices, batch, seqlen):
    """Puts packed tokens back: the inverse of ``unpad_input``; padding becomes 0.

    Args:
        hidden_states: [T, ...].
        indices: [T] int64, as ``unpad_input`` returned them.
        batch, seqlen: B and S.

    Returns:
        [B, S, ...].
    """
    if hidden_states.ndim == 1:
        return _scatter_rows(hidden_states, indices, batch * seqlen).reshape(batch, seqlen)
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.reshape(batch, seqlen, *hidden_states.shape[1:])


def _gather(rows: Tensor, indices: Tensor) -> Tensor:
    return rows[indices] if rows.ndim == 1 else index_first_axis(rows, indices)
