"""Attention on PyTorch tensors and NumPy arrays: the functions a caller of ``tilewise`` sees.

Tensors and arrays are handled by ``_torch`` and ``_numpy``; each is imported when first needed, so
that ``import tilewise`` needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import _check
from ._check import Window
from ._request import Request, Sequences

_UNBOUNDED: Window = (None, None)
# The short ways of tensors (_plain.attention and varlen), there once PyTorch has been needed.
_plain: Callable[..., Any] | None = None
_varlen: Callable[..., Any] | None = None


def _backend(q: Any) -> ModuleType:
    """The module for this kind of array: PyTorch for tensors, NumPy for everything else."""
    if hasattr(q, "__torch_function__"):
        import tilewise._torch  # every call comes by: 0.2 us, "from . import" takes 0.6

        return tilewise._torch
    import tilewise._numpy

    return tilewise._numpy


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = _UNBOUNDED,
    scale: Any = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None,
    sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, batch_invariant: bool = False,
    k_descale: Any = None, v_descale: Any = None, layout: str = "bshd",
) -> Any:  # fmt: skip
    """Exact attention of equal-length sequences, in memory linear in the sequence length.

    Shapes for layout "bshd" (with "bhsd", the two middle dimensions are exchanged):
    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim],
    v [batch, seqlen_k, heads_kv, head_dim_v]. heads_q is a multiple of heads_kv (GQA, MQA). dtypes
    float32, float16 and bfloat16, the same for all three; accumulation is float32.

    Args:
        q: Queries: a torch.Tensor, or an array in the memory of the CPU (of NumPy, or with
            __array__ or __dlpack__). Masked arrays, and arrays on a GPU of other frameworks, are
            refused.
        k: Keys, of the same kind, dtype and device.
        v: Values, likewise.
        causal: Row i sees key j when j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window: (left, right): row i sees at most so many keys before and after its diagonal; None
            or a negative number is no limit. causal closes the right side.
        scale: Factor of q.k; None is 1 / sqrt(head_dim). A tensor of one element may be learned.
        softcap: c > 0 replaces a score s by c * tanh(s / c).
        bias: Added to the scores after softcap; broadcastable to [batch, heads_q, seqlen_q,
            seqlen_k], float32 or the dtype of q. Differentiable.
        alibi_slopes: float32 [heads_q] or [batch, heads_q]:
            ``slope * -|i + seqlen_k - seqlen_q - j|`` is added to the scores.
        sinks: float32 [heads_q]: a logit per head that takes part in the softmax. Differentiable.
        dropout_p: Probability in [0, 1) of dropping a weight; torch.manual_seed governs the bits.
        return_lse: Return (out, lse) instead of out.
        deterministic: Bitwise equal results for equal inputs on one device (the CPU always is so);
            implied by torch.use_deterministic_algorithms.
        tf32: Let a GPU round float32 operands to TF32: faster, with the accuracy of half precision.
        batch_invariant: Give each sequence's rows of out and lse, to the bit, what they are without
            the other sequences of the batch: on one kind of GPU or CPU, without dropout, whose bits
            are numbered by batch row. Gradients of q, k and v likewise.
        k_descale: float32 [batch, heads_kv], either may be 1: factor of k of torch.float8_e4m3fn,
            which q of float16 or bfloat16 takes (forward only). None is 1.
        v_descale: Likewise of v.
        layout: "bshd" or "bhsd", of q, k, v and out.

    Returns:
        out in the layout of q with head_dim_v columns, in the dtype of q; with return_lse also lse,
        float32 [batch, heads_q, seqlen_q] in either layout: the natural logarithm of the softmax's
        denominator. Both are differentiable once. A row that sees no key gives 0 and -inf.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range.
        RuntimeError: no kernel of this build serves the problem on this device.
    """
    backend = _backend(q)  # sets _plain: before it is read, or a compiler takes down the old one
    if (
        _plain is not None
        and bias is None
        and alibi_slopes is None
        and sinks is None
        and type(softcap) is float
        and softcap == 0.0
        and type(dropout_p) is float
        and dropout_p == 0.0
        and not batch_invariant
        and k_descale is None
        and v_descale is None
    ):
        result = _plain(q, k, v, causal, window, scale, return_lse, deterministic, tf32, layout)
        if result is not None:
            return result
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale,
    )  # fmt: skip
    return backend.attention(q, k, v, layout, request)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Any = None,
    seqused_k: Any = None, block_table: Any = None, causal: bool = False,
    window: Window = _UNBOUNDED, scale: Any = None, softcap: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, check: bool = False,
    batch_invariant: bool = False, k_descale: Any = None, v_descale: Any = None,
) -> Any:  # fmt: skip
    """Exact attention of sequences of different lengths, laid end to end.

    q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v [total_k, heads_kv,
    head_dim_v]; sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys
    cu_seqlens_k[b] to cu_seqlens_k[b + 1]. With block_table, k and v are
    [pages, page_size, heads_kv, head_dim], and cu_seqlens_k is None.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        cu_seqlens_q: int32 [batch + 1], from 0, not decreasing. Rows past the last entry give 0.
        cu_seqlens_k: int32 [batch + 1], or None with block_table.
        max_seqlen_q: Upper bound of the rows of a sequence, when known; never required.
        max_seqlen_k: Upper bound of the keys of a sequence, likewise.
        seqused_q: int32 [batch]: how many rows of each sequence are in use.
        seqused_k: int32 [batch]: how many keys of each sequence are in use.
        block_table: int32 [batch, width]: the page of each run of page_size keys.
        causal: As in ``attention``, for each sequence.
        window: Likewise.
        scale: Likewise.
        softcap: Likewise.
        bias: Broadcastable to [batch, heads_q, rows, keys], row and key counted within a sequence;
            rows and keys are at least those of the longest sequence, or 1 (keys on a GPU: with
            max_seqlen_k). What has fewer is refused on the CPU, and on a GPU by a bound of the
            lengths or check=True.
        alibi_slopes: As in ``attention``.
        sinks: Likewise.
        dropout_p: Likewise.
        return_lse: Likewise.
        deterministic: Likewise.
        tf32: Likewise.
        check: Verify the entries of the index tensors on a GPU before anything is computed, in
            forward and backward: a kernel, and the call waits for the GPU, so that it cannot be
            captured in a CUDA graph. Without it, the rows of entries that do not fit become NaN
            there, and ``last_index_error`` names the entry. The CPU always verifies.
        batch_invariant: As in ``attention``.
        k_descale: Likewise.
        v_descale: Likewise.

    Returns:
        out [total_q, heads_q, head_dim_v]; with return_lse also lse, float32 [heads_q, total_q].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or entries that do not fit.
        RuntimeError: no kernel of this build serves the problem on this device.
    """
    backend = _backend(q)
    if (
        _varlen is not None and bias is None and alibi_slopes is None and sinks is None
        and type(dropout_p) is float and dropout_p == 0.0 and not check and k_descale is None
        and v_descale is None
    ):  # fmt: skip
        short = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k,
            block_table, causal, window, scale, softcap, deterministic, tf32, batch_invariant,
        )  # fmt: skip
        if short is not None:
            return short if return_lse else short[0]
    sequences = Sequences(
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k, block_table
    )
    request = Request(
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, check, batch_invariant, k_descale, v_descale,
    )  # fmt: skip
    return backend.attention_varlen(q, k, v, sequences, request)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bshd"
) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the results over each.

    Args:
        out_a: [batch, seqlen_q, heads_q, head_dim_v] ("bshd"), the same with the middle dimensions
            exchanged ("bhsd"), or [total_q, heads_q, head_dim_v].
        lse_a: float32 [batch, heads_q, seqlen_q], or [heads_q, total_q].
        out_b: As out_a.
        lse_b: As lse_a.
        layout: "bshd" or "bhsd"; not read for three dimensions.

    Returns:
        (out, lse) as ``attention(..., return_lse=True)`` over all keys gives them, but computed
        from outputs that have been rounded to their dtype. Differentiable for tensors.

    Raises:
        TypeError: an argument is of another kind than out_a, or of no floating-point dtype.
        ValueError: shapes or devices do not belong together.
    """
    _check.heads_first(layout)
    backend = _backend(out_a)
    out_a, lse_a = backend.as_array("out_a", out_a), backend.as_array("lse_a", lse_a)
    out_b, lse_b = backend.as_array("out_b", out_b), backend.as_array("lse_b", lse_b)
    rank = len(out_a.shape)
    if rank not in (3, 4):
        raise ValueError(
            f"out_a has shape {list(out_a.shape)}, but must have 3 or 4 dimensions: "
            f"{_check.LAYOUTS[layout]} or {_check.VARLEN}"
        )
    for name, array in (
        ("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b),
    ):  # fmt: skip
        if "float" not in str(array.dtype):
            raise TypeError(
                f"{name} has dtype {array.dtype}, but must be of attention's results: float32, "
                "float16 or bfloat16"
            )
    rows, heads = (1, 2) if layout == "bshd" else (2, 1)
    expected = (
        (out_a.shape[1], out_a.shape[0])
        if rank == 3
        else (out_a.shape[0], out_a.shape[heads], out_a.shape[rows])
    )
    _check.shape("out_b", out_b, tuple(out_a.shape), "the shape of out_a")
    _check.shape("lse_a", lse_a, expected, "one number per head and row of out_a")
    _check.shape("lse_b", lse_b, expected, "one number per head and row of out_b")
    return backend.merge_states(out_a, lse_a, out_b, lse_b, layout)
