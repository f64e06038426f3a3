"""The public functions of ``tilewise.distributed`` on this rank's rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, api
from .._check import Window
from .._request import Request
from . import choice
from .attend import attend
from .choice import Choice
from .layout import starts_of
from .problem import Call, prepare, prepare_varlen
from .ranks import eager, ranks_of


@eager
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, mesh: Any = None, method: str = "auto",
    layout: str = "zigzag", tensor_layout: str = "bshd", causal: bool = False,
    window: Window = (None, None), scale: Any = None, softcap: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, batch_invariant: bool = False,
    q_descale: Any = None, k_descale: Any = None, v_descale: Any = None, mask: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None, precise_backward: bool = False,
    reduce_replicated: bool = False,
) -> Any:  # fmt: skip
    """Exact attention of one batch of sequences whose rows are sharded across a group.

    All ranks must call it, and must run its backward, with equal arguments except for the rows. q,
    k and v are this rank's rows in the order of ``shard``; the whole sequence has the sum of the
    ranks' rows. Options not listed below are those of ``tilewise.attention`` for the whole
    sequence. The loss is the sum of the losses of the ranks.

    Args:
        q: Queries: [batch, rows of this rank, heads_q, head_dim], of a dtype of
            ``tilewise.attention``.
        k: Keys: [batch, keys of this rank, heads_kv, head_dim]. The whole sequence may have another
            number of keys than of rows.
        v: Values: [batch, keys of this rank, heads_kv, head_dim_v].
        group: A process group; None is the default group.
        mesh: A DeviceMesh of one dimension, instead of group; or of two, with the ranks of the
            group in row-major order: then the ranks of a row exchange heads ("ulysses"), and the
            rows of the mesh exchange keys ("allgather" or "ring").
        method: "ulysses" exchanges rows for heads, "allgather" gathers all keys and values, "auto"
            chooses the one of them with the lower predicted time (see ``explain``). "ring"
            computes over the keys of one rank after another, which needs less memory. With a mesh
            of two dimensions: "ulysses+allgather", which is "auto", or "ulysses+ring".
        layout: How the sequence is cut: "zigzag" or "contiguous".
        tensor_layout: "bshd" or "bhsd", of q, k, v and out: the layout of ``tilewise.attention``.
        scale: As in ``tilewise.attention``; a tensor gets this rank's part of its gradient.
        bias: This rank's rows of the bias, or one row for all, with the keys of the whole sequence.
        alibi_slopes: float32 [heads_q] or [batch, heads_q], the same on all ranks.
        sinks: float32 [heads_q], the same on all ranks; gets this rank's part of its gradient.
        dropout_p: As in ``tilewise.attention``: the weights that are dropped are those of the
            unsharded call after the ``torch.manual_seed`` of rank 0.
        q_descale: As in ``tilewise.attention``, the same on all ranks. Tensors of float8 have no
            backward.
        k_descale: The same.
        v_descale: The same.
        mask: One of ``tilewise.masks`` for the whole sequence, the same on all ranks.
        return_max_logits: Return the largest logits of the whole sequence after out and lse.
        out_dtype: As in ``tilewise.attention``, the same on all ranks; a gradient of out travels in
            the dtype of q.
        precise_backward: As in ``tilewise.attention``, the same on all ranks.
        reduce_replicated: Give scale, sinks and a replicated bias the sum of their gradients over
            ranks, instead of this rank's part, which data-parallel reducers add up.

    Returns:
        This rank's rows of out in the layout of q, with head_dim_v columns, in out_dtype; with
        return_lse also of lse, float32 [batch, heads_q, rows of this rank]; with return_max_logits
        also max_logits, float32 [batch, heads_q], the same on all ranks.

    Raises:
        NotImplementedError: a transform of torch.func is active, and there are several ranks.
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device, range, or differs between ranks.
        RuntimeError: another rank has stopped, or no kernel can run the problem.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    ranks = ranks_of(group, mesh)
    call = Call(
        "attention", q, k, v, ranks, mesh, layout, method, request, reduce_replicated
    )  # fmt: skip
    if ranks.world == 1:
        call.check()
        options = request.arguments()
        del options["check"]  # an option of attention_varlen
        return api.attention(q, k, v, **options, layout=tensor_layout)
    p = prepare(call, tensor_layout)
    out, lse, max_logits = attend(p, choice.choose(p, method).method)
    if _check.heads_first(tensor_layout):
        out = out.transpose(1, 2)
    return request.results(out, lse, max_logits)


@eager
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any = None, *,
    group: Any = None, mesh: Any = None, method: str = "auto", layout: str = "zigzag",
    causal: bool = False, window: Window = (None, None), scale: Any = None, softcap: float = 0.0,
    bias: Any = None, alibi_slopes: Any = None, sinks: Any = None, dropout_p: float = 0.0,
    return_lse: bool = False, deterministic: bool = False, tf32: bool = False,
    batch_invariant: bool = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, mask: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None, precise_backward: bool = False,
    reduce_replicated: bool = False,
) -> Any:  # fmt: skip
    """Exact attention of packed sequences of different lengths, each sharded across ranks.

    All ranks must call it, and must run its backward, with equal arguments except for q, k and v,
    which are this rank's rows in the order of ``shard`` with the same ``cu_seqlens``: its chunks,
    sequence by sequence. Options not listed below are those of ``attention``.

    Args:
        q: Queries: [rows of this rank, heads_q, head_dim].
        k: Keys: [keys of this rank, heads_kv, head_dim].
        v: Values: [keys of this rank, heads_kv, head_dim_v].
        cu_seqlens_q: Integers in CPU memory [sequences + 1], from 0, not decreasing: where the
            sequences of the whole batch begin and end. A tuple, a list or a CPU tensor.
        cu_seqlens_k: The same for keys; None is cu_seqlens_q.
        group: As in ``attention``, like everything below.
        mesh: A DeviceMesh.
        method: The method.
        layout: How each sequence is cut: "zigzag" or "contiguous".
        bias: The whole bias, [sequences or 1, heads_q or 1, rows of the longest sequence or 1, its
            keys or 1], the same on all ranks; gets this rank's part of its gradient.
        alibi_slopes: float32 [heads_q] or [sequences, heads_q].
        mask: One of ``tilewise.masks``, in which rows and keys are counted within a sequence.

    Returns:
        This rank's rows of out [rows of this rank, heads_q, head_dim_v], in out_dtype; with
        return_lse also of lse, float32 [heads_q, rows of this rank]; with return_max_logits also
        max_logits, float32 [sequences, heads_q], the same on all ranks.

    Raises:
        NotImplementedError: a transform of torch.func is active, and there are several ranks.
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device, range, or differs between ranks.
        RuntimeError: another rank has stopped, or no kernel can run the problem.
    """
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    cu_seqlens = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    ranks = ranks_of(group, mesh)
    call = Call(
        "attention_varlen", q, k, v, ranks, mesh, layout, method, request, reduce_replicated
    )
    if ranks.world == 1:
        call.check()
        starts = [
            torch.tensor(starts_of(f"cu_seqlens_{name}", x), dtype=torch.int32, device=q.device)
            for name, x in zip("qk", cu_seqlens, strict=True)
        ]
        return api.attention_varlen(q, k, v, *starts, **request.arguments())
    p = prepare_varlen(call, cu_seqlens)
    out, lse, max_logits = attend(p, choice.choose(p, method).method)
    return request.results(out.squeeze(0), None if lse is None else lse.squeeze(0), max_logits)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, group: Any = None, mesh: Any = None, method: str = "auto",
    layout: str = "zigzag", tensor_layout: str = "bshd", reduce_replicated: bool = False,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, **options: Any,
) -> Choice:  # fmt: skip
    """The method that ``attention`` or ``attention_varlen`` would use, and why; computes nothing.

    All ranks must call it, as they compare their arguments.

    Args:
        q: As in ``attention``, like everything below.
        k: Keys.
        v: Values.
        group: A process group.
        mesh: A DeviceMesh.
        method: The method, or "auto".
        layout: How the sequence is cut.
        tensor_layout: The order of the dimensions.
        reduce_replicated: Whether gradients of replicated inputs are added up.
        cu_seqlens_q: For packed sequences: as in ``attention_varlen``.
        cu_seqlens_k: The same for keys; None is cu_seqlens_q.
        **options: The other options of ``attention``.

    Returns:
        The choice with the predicted bytes, messages and times; print it.

    Raises:
        TypeError: an argument has the wrong type or dtype, or is unknown.
        ValueError: as for ``attention``.
    """
    ranks = ranks_of(group, mesh)
    known = Request().arguments().keys() - {"check"}
    call = Call(
        "explain", q, k, v, ranks, mesh, layout, method,
        Request(**{name: value for name, value in options.items() if name in known}),
        reduce_replicated, tuple(name for name in options if name not in known),
    )  # fmt: skip
    if cu_seqlens_q is None:
        return choice.choose(prepare(call, tensor_layout), method)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k)
    return choice.choose(prepare_varlen(call, cu_seqlens), method)
