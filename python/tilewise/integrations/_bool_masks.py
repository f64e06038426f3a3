"""Dense bool masks as ``tilewise.masks.Blocks``, where that saves time.

As a bias, a mask of rows x keys is read in full by every head, and nothing is skipped. In a mask of
blocks the hidden ones cost nothing. On a CPU, reading a mask once into blocks costs about as much
as a third of a head. The blocks are kept as long as the mask exists and does not change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise import _block_lists, _block_tensors, masks
from tilewise._mask_fields import host

from ._masks import prefers_masks

MIN_ROWS = 1024  # below, a call takes less time than looking at its mask may save


class _Costs(NamedTuple):
    """Times in nanoseconds. They are those of one forward, so a decision by them is conservative: a
    backward saves more, and layers that share a mask convert it once.
    """

    convert: float  # per pair of a matrix, at most
    with_bias: float  # per pair of a head
    with_blocks: float  # per pair of a head, if all blocks are partial
    fixed: float = 0.0  # per conversion


# One core of a Zen 5: conversion, 2.0 (blocks all full or hidden) to 3.2 (all partial); attention
# in fp32 with heads of 64.
_ON_CPU = _Costs(convert=3.2, with_bias=8.2, with_blocks=6.5)
# An H200 in bf16 (docs/results/bench-h200-masks.json): from_bool with partial blocks; PyTorch's own
# attention with heads of 128, and ours with the masks of documents.
_ON_HOPPER = _Costs(convert=0.08, with_bias=1.6e-3, with_blocks=1.6e-3, fixed=3e5)
# The same GPU where cuda.mma_sync runs, with half of the pairs visible.
_ON_MMA_SYNC = _ON_HOPPER._replace(with_blocks=3e-3)

_on_gpus = False


def take_on_gpus(taken: bool) -> None:
    """Whether masks on GPUs become blocks as well; off by default."""
    global _on_gpus
    _on_gpus = taken


def taken_on_gpus() -> bool:
    return _on_gpus


_known: Any = WeakTensorKeyDictionary()  # mask: (what the blocks depend on, Blocks or None)


def as_blocks(mask: Tensor, q: Tensor, heads: int, head_dim: int) -> masks.Blocks | None:
    """The blocks of a bool mask, or None if it should stay a bias.

    The result is kept with the mask, and made again after an operation has written to it. Writes
    that have no version are not noticed: by NumPy, through ``.data``, by collectives, and on a GPU
    by the replay of a graph and by kernels of others.

    None is also the answer while operators are recorded or a CUDA graph is captured, because they
    would keep what the mask holds now, and on a GPU for masks without a version.

    Args:
        mask: bool, up to four dimensions [batch or 1, heads or 1, rows, keys], True for the pairs
            that are seen.
        q: The queries, with the sequences in dimension 0.
        heads: Query heads.
        head_dim: The larger one of the two.

    Returns:
        Blocks if they are taken on the device, the mask has at least ``MIN_ROWS`` rows and so few
        blocks are visible that converting it costs less than this call alone saves.
    """
    if not 2 <= mask.dim() <= 4 or mask.shape[-2] < MIN_ROWS or mask.numel() == 0:
        return None
    version = None if mask.is_inference() else mask._version
    if not prefers_masks(mask.device, q.dtype) or torch._C._len_torch_dispatch_stack() > 0:
        return None
    if mask.is_cuda and (not _on_gpus or version is None or _is_capturing(mask.device)):
        return None
    four = mask[(None,) * (4 - mask.dim())]
    # Expanded dimensions repeat one matrix.
    matrices = four[: 1 if four.stride(0) == 0 else None, : 1 if four.stride(1) == 0 else None]
    shared_by = q.shape[0] * heads / (matrices.shape[0] * matrices.shape[1])
    facts = (version, shared_by, head_dim > 128)
    cached = _known.get(mask)
    if cached is not None and version is not None and cached[0] == facts:
        return _used_here(cached[1])
    blocks = None
    with torch.inference_mode(False):  # else a later call could not save them for its backward
        if _pays(matrices, shared_by, head_dim):
            blocks = masks.from_bool(matrices)
    if mask.is_cuda:  # other streams may use the blocks next
        torch.cuda.current_stream(mask.device).synchronize()
    if version is not None:
        _known[mask] = facts, blocks
    return blocks


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _used_here(blocks: masks.Blocks | None) -> masks.Blocks | None:
    """The same blocks, whose memory is not reused before the current stream has read it, even if
    the mask they belong to is gone by then.
    """
    for tensor in [] if blocks is None else blocks.arguments():
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return blocks


def _pays(matrices: Tensor, shared_by: float, head_dim: int) -> bool:
    """Whether a call in which so many heads share each matrix saves more than converting costs."""
    costs, pairs = _costs(matrices.device, head_dim), matrices.numel()
    with_bias = shared_by * costs.with_bias * pairs
    converting = costs.convert * pairs + costs.fixed
    if with_bias <= converting:
        return False
    share = _visible_share(matrices)
    return with_bias - shared_by * costs.with_blocks * pairs * share > converting


def _visible_share(matrices: Tensor) -> float:
    if matrices.is_cuda:
        return _block_tensors.visible_share(matrices)
    return _block_lists.visible_share(host(matrices))


def _costs(device: torch.device, head_dim: int) -> _Costs:
    if device.type == "cpu":
        return _ON_CPU
    on_wgmma = head_dim <= 128 and torch.cuda.get_device_capability(device) == (9, 0)
    return _ON_HOPPER if on_wgmma else _ON_MMA_SYNC
