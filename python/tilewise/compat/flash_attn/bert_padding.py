"""Removing and restoring padding: the functions of ``flash_attn.bert_padding``, differentiable.

Shapes: B sequences of at most S tokens; ``...`` stands for any further dimensions, usually
[heads, head_dim] or [hidden].
"""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
from torch import Tensor


def _scatter_rows(values: Tensor, indices: Tensor, rows: int) -> Tensor:
    """Zeros [rows, ...] in which row ``indices[i]`` is ``values[i]``."""
    out = values.new_zeros((rows, *values.shape[1:]))
    out[indices] = values
    return out


class IndexFirstAxis(torch.autograd.Function):
    """``input[indices]``. The indices are distinct, so the gradient is a plain scatter."""

    @staticmethod
    def forward(ctx, input, indices):
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions, but must have at least 2")
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
            raise ValueError(f"indices has {indices.ndim} dimensions, but must have 1")
        if values.ndim < 2:
            raise ValueError(f"values has {values.ndim} dimensions, but must have at least 2")
        ctx.save_for_backward(indices)
        return _scatter_rows(values, indices, first_axis_dim)

    @staticmethod
    def backward(ctx, grad_output):
        (indices,) = ctx.saved_tensors
        return grad_output[indices], None, None


index_put_first_axis = IndexPutFirstAxis.apply


class IndexFirstAxisResidual(torch.autograd.Function):
    """``(input[indices], input)``; the second output lets a residual branch share one gradient."""

    @staticmethod
    def forward(ctx, input, indices):
        if input.ndim < 2:
            raise ValueError(f"input has {input.ndim} dimensions, but must have at least 2")
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
    """Packs the tokens that the masks mark into one dimension of rows.

    Args:
        hidden_states: [B, S, ...].
        attention_mask: [B, S], bool or int, 1 where a token takes part in attention.
        unused_mask: [B, S], bool or int, 1 where space is reserved for a token that does not take
            part yet. Its row is packed as well, but ``seqused`` does not count it.

    Returns:
        hidden_states [T, ...], where T is the number of tokens marked by either mask;
        indices [T] int64 into the flattened [B * S] tokens;
        cu_seqlens [B + 1] int32, boundaries in the packed rows, including unused ones;
        max_seqlen_in_batch (int);
        seqused [B] int32, tokens per sequence marked by ``attention_mask``.
    """
    batch, seqlen = hidden_states.shape[:2]
    if tuple(attention_mask.shape) != (batch, seqlen):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but must have "
            f"{(batch, seqlen)} like hidden_states"
        )
    packed = attention_mask if unused_mask is None else (attention_mask != 0) | (unused_mask != 0)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    cu_seqlens, max_seqlen = _boundaries(packed.sum(dim=-1, dtype=torch.int32))
    indices = torch.nonzero(packed.flatten(), as_tuple=False).flatten()
    rows = hidden_states.reshape(batch * seqlen, *hidden_states.shape[2:])
    return _gather(rows, indices), indices, cu_seqlens, max_seqlen, seqused


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """``unpad_input`` for batch rows that each hold several sequences end to end.

    Args:
        hidden_states: [B, S, ...].
        attention_mask_in_length: [B, S] int: the lengths of the sequences of row b, then zeros. For
            example, ``[[2, 3, 0, 0, 0, 0], [3, 2, 1, 0, 0, 0]]`` has two sequences in the first row
            and three in the second.

    Returns:
        hidden_states [T, ...], indices [T], cu_seqlens [sequences + 1] int32, max_seqlen_in_batch.
    """
    batch, seqlen = hidden_states.shape[:2]
    if tuple(attention_mask_in_length.shape) != (batch, seqlen):
        raise ValueError(
            f"attention_mask_in_length has shape {tuple(attention_mask_in_length.shape)}, but must "
            f"have {(batch, seqlen)} like hidden_states"
        )
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    positions = torch.arange(seqlen, device=tokens.device, dtype=tokens.dtype)
    indices = torch.nonzero((positions < tokens).flatten(), as_tuple=False).flatten()
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, max_seqlen = _boundaries(lengths[lengths > 0])
    rows = hidden_states.reshape(batch * seqlen, *hidden_states.shape[2:])
    return _gather(rows, indices), indices, cu_seqlens, max_seqlen


def pad_input(hidden_states, indices, batch, seqlen):
    """Restores packed tokens to padded form, the inverse of ``unpad_input``; padding becomes 0.

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
