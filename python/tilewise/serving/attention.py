"""The attention function that a model of Transformers calls while an engine runs it.

It is registered in Transformers' ``AttentionInterface`` under ``NAME``, without a mask function:
the step defines which tokens see each other, so Transformers builds no mask.

The step reaches the layers through a context variable, because the decoder layers of some models
(StableLM, Nemotron) do not pass keyword arguments on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

import tilewise
from tilewise import _ops  # noqa: F401 - torch.ops.tilewise

from .pages import PagedCache

NAME = "tilewise_serving"


class Step(NamedTuple):
    """One forward pass over the new tokens of B sequences, which are packed end to end."""

    cache: PagedCache
    cu_seqlens: Tensor  # [B + 1] int32: boundaries of the new tokens of each sequence
    lengths: Tensor  # [B] int32: tokens of each sequence in the cache before this step
    seqused: Tensor  # [B] int32: tokens of each sequence in the cache after this step
    block_table: Tensor  # [B, width] int32
    longest: int  # largest number of new tokens of a sequence
    longest_keys: int  # largest number of tokens of a sequence after this step


_step: ContextVar[Step | None] = ContextVar("tilewise_serving_step", default=None)


@contextlib.contextmanager
def stepping(step: Step) -> Iterator[None]:
    """Makes all calls of the model within the context belong to the step."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Writes new keys and values to their pages and attends to all keys of each sequence.

    Args:
        module: The attention layer, whose ``layer_idx`` selects the pages.
        query: [1, Hq, T, D], the T new tokens of all sequences.
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        attention_mask: None. Layers of some models make a mask, which is refused.
        scaling: Factor of q.k; None is 1 / sqrt(D).
        sliding_window: Number of tokens that a token sees, including itself.
        softcap: c > 0 replaces a score s by c * tanh(s / c).
        s_aux: [Hq], the sinks.

    Returns:
        out [1, T, Hq, Dv], and None in place of the weights.

    Raises:
        RuntimeError: the model is called outside a step.
        ValueError: there is a mask, which attention over pages does not support.
    """
    step = _step.get()
    if step is None:
        raise RuntimeError(
            "this model belongs to a tilewise.serving.Engine: to use it on its own, call "
            "set_attn_implementation() with another name"
        )
    if attention_mask is not None:
        raise ValueError("the layers make an attention_mask, but it must be None")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    k_cache, v_cache = step.cache.layer(module.layer_idx, k, v)
    options: dict[str, Any] = dict(causal=True, scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, 0)
    unused = [None] * 4  # cache row indices, left padding, rotary cosines and sines
    torch.ops.tilewise.append_kv(
        k_cache, v_cache, None, k, v, step.lengths, None, step.cu_seqlens, None,
        step.block_table, *unused, False, False,
    )  # fmt: skip
    out = tilewise.attention_varlen(
        q, k_cache, v_cache, step.cu_seqlens, None, seqused_k=step.seqused,
        block_table=step.block_table, max_seqlen_q=step.longest,
        max_seqlen_k=step.longest_keys, **options,
    )  # fmt: skip
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
