"""The attention that a model of Transformers calls while an engine drives it.

Registered in Transformers' ``AttentionInterface`` under ``NAME``, without a mask function: which
token sees which follows from the step alone, so Transformers builds no mask.

The step reaches the layers through a context variable. Keyword arguments of the model would not do:
the decoder layers of some models (StableLM, Nemotron) do not hand them on.
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
    """One forward pass over the new tokens of B sequences, laid end to end."""

    cache: PagedCache
    cu_seqlens: Tensor  # [B + 1] int32: where the new tokens of each sequence begin
    lengths: Tensor  # [B] int32: tokens of each in the cache, before this step
    seqused: Tensor  # [B] int32: the same after it
    block_table: Tensor  # [B, width] int32
    longest: int  # most new tokens of a sequence
    longest_keys: int  # most tokens of a sequence after this step


_step: ContextVar[Step | None] = ContextVar("tilewise_serving_step", default=None)


@contextlib.contextmanager
def stepping(step: Step) -> Iterator[None]:
    """Calls of the model inside of this block belong to the step."""
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
    """Writes new keys and values into their pages and attends to all of each sequence.

    Args:
        module: The attention layer; ``layer_idx`` says whose pages are meant.
        query: [1, Hq, T, D], T new tokens of all sequences.
        key: [1, Hkv, T, D].
        value: [1, Hkv, T, Dv].
        attention_mask: None. The layers of some models make one of their own.
        scaling: Factor of q.k; None: 1/sqrt(D).
        sliding_window: Tokens that a token sees, itself included.
        softcap: c turns a score s into c * tanh(s / c).
        s_aux: [Hq], the sinks.

    Returns:
        out [1, T, Hq, Dv], and None for the weights.

    Raises:
        RuntimeError: the model is called outside of a step.
        ValueError: there is a mask, which pages cannot follow.
    """
    step = _step.get()
    if step is None:
        raise RuntimeError(
            "this model belongs to a tilewise.serving.Engine; call set_attn_implementation() "
            "with another name to use it on its own"
        )
    if attention_mask is not None:
        raise ValueError("the layers make an attention_mask, but must leave it None")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D]
    k_cache, v_cache = step.cache.layer(module.layer_idx, k, v)
    options: dict[str, Any] = dict(causal=True, scale=scaling, softcap=softcap or 0.0, sinks=s_aux)
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, 0)
    no_rotation = [None] * 4  # nor rows of a batch, nor left padding
    torch.ops.tilewise.append_kv(
        k_cache, v_cache, None, k, v, step.lengths, None, step.cu_seqlens, None,
        step.block_table, *no_rotation, False, False,
    )  # fmt: skip
    out = tilewise.attention_varlen(
        q, k_cache, v_cache, step.cu_seqlens, None, seqused_k=step.seqused,
        block_table=step.block_table, max_seqlen_q=step.longest,
        max_seqlen_k=step.longest_keys, **options,
    )  # fmt: skip
    return out.unsqueeze(0), None


AttentionInterface.register(NAME, paged_attention)
