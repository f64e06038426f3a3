"""Functions shared by both FlashAttention interfaces: argument conversion and operator calls."""

# The signatures are those of another package, so they lack the annotations that it lacks.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from tilewise import _check, _ops, _plain
from tilewise._check import max_head_dim
from tilewise._kvcache_torch import index_tensor
from tilewise._options import WANT_K, WANT_Q, WANT_V, Options
from tilewise._request import Request
from tilewise._torch import as_array, check_tensors, draw_dropout_state, score_options


def maybe_contiguous(x):
    """x, copied if its last dimension is not contiguous; None stays None."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def round_multiple(x, m):
    """The smallest multiple of m that is at least x."""
    return (x + m - 1) // m * m


_PYTHON_NUMBERS = (int, float, bool, type(None))


def scalar(value):
    """The Python number in a tensor or NumPy array of one element; other values are unchanged.

    The original packages pass numbers to a C++ extension, which converts every object that has
    ``__index__`` or ``__float__``. A tensor on a GPU makes the host wait, as it does there.
    """
    if type(value) in _PYTHON_NUMBERS:
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value
    if type(value).__module__ == "numpy" and getattr(value, "size", 0) == 1:
        return value.item()
    return value


def window_of(window_size) -> tuple:
    """(left, right) of a pair in any container: tuple, list, tensor or NumPy array."""
    if type(window_size) is tuple and len(window_size) == 2:
        return scalar(window_size[0]), scalar(window_size[1])
    if isinstance(window_size, Tensor) or type(window_size).__module__ == "numpy":
        window_size = window_size.tolist()
    if not isinstance(window_size, Sequence) or len(window_size) != 2:
        raise ValueError(f"window_size is {window_size!r}, but must be a pair (left, right)")
    left, right = (scalar(side) for side in window_size)
    return left, right


def softcap_of(value):
    """The softcap; None and 0 switch it off."""
    return 0.0 if value is None else scalar(value)


def splits_of(num_splits) -> int:
    """The number of key splits; 0 or a negative number leaves the choice to the planner."""
    if type(num_splits) is int and 0 <= num_splits <= _check.MAX_SPLITS:
        return num_splits
    num_splits = _check.integer("num_splits", scalar(num_splits), "an integer")
    return _check.split_count(max(num_splits, 0))


def scale_for(q: Tensor, softmax_scale):
    """The scale as a number, or as a tensor if it is on q's device and may have a gradient."""
    if type(softmax_scale) in _PYTHON_NUMBERS:
        return softmax_scale
    if isinstance(softmax_scale, Tensor):
        differentiable = softmax_scale.device == q.device and softmax_scale.is_floating_point()
        return softmax_scale if differentiable else scalar(softmax_scale)
    return scalar(softmax_scale)


def bound(name: str, value) -> int:
    """An optional upper bound of the lengths; 0 if it is unknown.

    A bound in GPU memory counts as unknown, because a hint is not worth a synchronisation.
    """
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return 0
    return _check.bound(name, scalar(value))


def int32(name: str, x: Optional[Tensor]) -> Optional[Tensor]:
    """An index tensor as contiguous int32; out-of-range entries stay out of range."""
    return None if x is None else index_tensor(name, x, as_array(name, x).device)


def lengths_of(cache_seqlens, batch: int):
    """cache_seqlens as a number or a tensor [batch]; a 0-d tensor applies to all sequences."""
    if not isinstance(cache_seqlens, Tensor):
        return scalar(cache_seqlens)
    return cache_seqlens if cache_seqlens.dim() > 0 else cache_seqlens.expand(batch).contiguous()


def check_room(block_table, page_size: int, lengths, new_keys: int) -> None:
    """Refuses lengths that exceed the block table, if the host knows the lengths.

    Raises:
        RuntimeError: the block table is too short. The original raises the same error, but also
            waits for lengths in GPU memory.
    """
    if not isinstance(block_table, Tensor) or block_table.dim() != 2:
        return
    if isinstance(lengths, Tensor):
        if lengths.device.type != "cpu" or lengths.numel() == 0 or not _plain.is_eager():
            return
        lengths = lengths.max().item()
    room = block_table.shape[1] * page_size
    if type(lengths) is int and lengths + new_keys > room:
        raise RuntimeError(
            f"block_table has {block_table.shape[1]} pages of {page_size} keys for a sequence, but "
            f"cache_seqlens has {lengths} and {new_keys} keys are new: at most {room} are allowed"
        )


def slopes_of(alibi_slopes: Optional[Tensor]) -> Optional[Tensor]:
    """The slopes, detached because no gradient is defined for them."""
    return alibi_slopes.detach() if isinstance(alibi_slopes, Tensor) else alibi_slopes


def unpacked(name: str, x: Tensor, dim: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that are packed in dimension `dim` of x."""
    if as_array(name, x).dim() <= dim or x.shape[dim] != count:
        raise ValueError(f"{name} has shape {list(x.shape)}, but dimension {dim} must be {count}")
    return x.unbind(dim)


def options_of(
    q: Tensor,
    *,
    softmax_scale: Optional[float],
    causal: bool,
    window_size,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_state: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    batch: Optional[int] = None,
) -> Options:
    """The options that dense and variable-length calls share; the batch is by default that of q."""
    request = Request(
        causal=bool(causal),
        window=window_of(window_size),
        scale=scale_for(q, softmax_scale),
        softcap=softcap_of(softcap),
        alibi_slopes=slopes_of(alibi_slopes),
        deterministic=bool(deterministic),
    )
    batch = q.shape[0] if batch is None else batch
    return score_options(q, batch, request)._replace(
        dropout_p=_check.dropout(scalar(dropout_p)), dropout_state=dropout_state
    )


def new_dropout_state(dropout_p: float, device: torch.device) -> Optional[Tensor]:
    """The seed and offset of a call, drawn from PyTorch's generator; None without dropout.

    This is also the ``rng_state`` of the private functions.
    """
    if _check.dropout(scalar(dropout_p)) == 0.0:
        return None
    return draw_dropout_state(device)


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention, differentiable."""
    check_tensors(q, k, v)
    q, k, v = (maybe_contiguous(x) for x in (q, k, v))
    return _ops.forward(q, k, v, options)


def write_to(name: str, given: Tensor, result: Tensor) -> Tensor:
    """The caller's tensor `given` with the result copied into it; shapes and dtypes must match."""
    if given.shape != result.shape or given.dtype != result.dtype:
        raise ValueError(
            f"{name} has shape {list(given.shape)} and dtype {given.dtype}, but must have "
            f"{list(result.shape)} and {result.dtype}"
        )
    return given.copy_(result)


@torch.no_grad()
def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]],
    options: Options,
) -> Tensor:
    """Writes dq, dk and dv into the given tensors.

    Returns:
        The sums over head_dim of dout * out, fp32 in the shape of lse.
    """
    bits = (WANT_Q, WANT_K, WANT_V)
    wanted = sum(bit for bit, x in zip(bits, gradients, strict=True) if x is not None)
    inputs = tuple(maybe_contiguous(x) for x in (q, k, v, out))
    lse = maybe_contiguous(lse.float())
    results = torch.ops.tilewise.backward(
        maybe_contiguous(dout), None, *inputs, lse, *options, wanted
    )
    for name, given, result in zip(("dq", "dk", "dv"), gradients, results, strict=False):
        if given is not None:
            write_to(name, given, result)
    sums = (dout.float() * out.float()).sum(dim=-1)
    return sums.transpose(-1, -2).contiguous()


@torch.no_grad()
def attention_probabilities(q: Tensor, k: Tensor, options: Options, max_seqlen_k: int) -> Tensor:
    """The matrix of probabilities, negated where dropout removed the entry; for tests.

    Args:
        q, k: [B, S, H, D], or packed [T, H, D].

    Returns:
        [B, Hq, Sq, Sk], or packed [Hq, T, max_seqlen_k] with query t in row t, in the dtype of q.
    """
    equal_weights = options._replace(scale=0.0, alibi_slopes=None, softcap=0.0)
    survives = _probe(q, k, equal_weights, max_seqlen_k) > 0
    no_dropout = options._replace(dropout_p=0.0, dropout_state=None)
    p = _probe(q, k, no_dropout, max_seqlen_k)
    return torch.where(survives, p, -p)


def _probe(q: Tensor, k: Tensor, options: Options, max_seqlen_k: int) -> Tensor:
    """The probabilities, which are the outputs of attention if the values are unit vectors."""
    if options.cu_seqlens_k is None:
        key = torch.arange(k.shape[1], device=k.device)
    else:
        rows = torch.arange(k.shape[0], device=k.device)
        starts = options.cu_seqlens_k.to(torch.int64)
        key = rows - starts[torch.searchsorted(starts, rows, right=True) - 1]
    parts, widest = [], max_head_dim(q.device.type)
    for first in range(0, max_seqlen_k, widest):
        columns = torch.arange(first, min(first + widest, max_seqlen_k), device=k.device)
        units = (key.unsqueeze(-1) == columns).to(q.dtype)
        shape = (*k.shape[:-1], columns.numel())
        values = units.unsqueeze(-2).expand(shape)  # [..., rows, heads, columns]
        out, _ = attend(q, k, values, options)
        parts.append(out.transpose(-2, -3))
    if not parts:
        return q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3], 0))
    return torch.cat(parts, dim=-1)
