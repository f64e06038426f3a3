"""The public functions of ``tilewise`` on PyTorch tensors and NumPy arrays."""

from __future__ import annotations

from typing import Any

from . import _check
from ._backend import attention_backend
from ._check import UNBOUNDED, Window


def attention(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Window = UNBOUNDED,
    scale: Any = None, softcap: float = 0.0, bias: Any = None, alibi_slopes: Any = None,
    sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, batch_invariant: bool = False,
    k_descale: Any = None, v_descale: Any = None, mask: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None, precise_backward: bool = False,
    q_descale: Any = None, layout: str = "bshd",
) -> Any:  # fmt: skip
    """Exact attention of equal-length sequences, in memory linear in the sequence length.

    Shapes for layout "bshd" (with "bhsd", the two middle dimensions are exchanged):
    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim],
    v [batch, seqlen_k, heads_kv, head_dim_v]. heads_q is a multiple of heads_kv (GQA, MQA). The
    dtype is float32, float16, bfloat16 or (forward only) float8_e4m3fn, the same for all three;
    accumulation is in float32.

    The algorithm is that of FlashAttention (arXiv 2205.14135, 2307.08691, 2407.08608).

    Args:
        q: Queries: a torch.Tensor, or an array in CPU memory (a NumPy array, or an object with
            __array__ or __dlpack__). Masked arrays, and other frameworks' arrays on a GPU, are
            refused.
        k: Keys, of the kind, dtype and device of q.
        v: Values, of the kind, dtype and device of q.
        causal: Row i sees key j if j <= i + seqlen_k - seqlen_q (aligned bottom-right).
        window: (left, right): row i sees at most that many keys before and after its diagonal key
            i + seqlen_k - seqlen_q; None or a number < 0 means no limit. causal sets right to 0.
        scale: Factor of q.k; None is 1 / sqrt(head_dim). A tensor of one element is differentiable.
        softcap: c > 0 replaces a score s by c * tanh(s / c); 0 is off.
        bias: Added to the scores after softcap; broadcastable to [batch, heads_q, seqlen_q,
            seqlen_k], float32 or the dtype of q (of out, for q of float8_e4m3fn). Differentiable.
        alibi_slopes: float32 [heads_q] or [batch, heads_q]:
            ``slope * -|i + seqlen_k - seqlen_q - j|`` is added to the scores (ALiBi, arXiv
            2108.12409).
        sinks: float32 [heads_q]: a logit per head that takes part in the softmax, but has no value.
            Differentiable.
        dropout_p: Probability in [0, 1) of dropping a weight; torch.manual_seed governs the bits.
        return_lse: Return (out, lse) instead of out.
        deterministic: Compute bitwise equal results for equal inputs on one device, as the CPU
            always does; implied by torch.use_deterministic_algorithms.
        tf32: Let a GPU round float32 operands to TF32: faster, with the accuracy of half precision.
        batch_invariant: Compute each sequence's rows of out and lse, and its gradients of q, k and
            v, bitwise as they are without the other sequences of the batch. This holds on one kind
            of GPU or CPU, and without dropout, whose bits are numbered by batch row.
        k_descale: float32 [batch or 1, heads_kv or 1]: factor of k of dtype torch.float8_e4m3fn,
            which is also allowed for q of float16 or bfloat16 (forward only). None is 1.
        v_descale: The same for v.
        mask: A mask of ``tilewise.masks``: only pairs that it shows, and that causal and window
            allow, are visible.
        return_max_logits: Return max_logits after out and lse.
        out_dtype: The dtype of out: that of q (None), or float32, also for q of float16 or
            bfloat16: the sums as they are, not rounded. The gradient of such an out is rounded to
            the dtype of q in the backward, whose products take it in that dtype. For q of
            float8_e4m3fn it is bfloat16 (None), float16 or float32.
        precise_backward: Keep out in float32 for the backward, 4 bytes per element, where q has 16
            bits. Gradients of rows whose softmax is saturated then lose no digits to the rounding
            of out (docs/numerics.md). Not for arrays, which have no autograd.
        q_descale: float32 [batch or 1, heads_kv or 1]: factor of q of dtype torch.float8_e4m3fn,
            the same for all query heads that share a head of k and v. None is 1.
        layout: "bshd" or "bhsd", of q, k, v and out.

    Returns:
        out in the layout of q with head_dim_v columns, in out_dtype; with return_lse also lse,
        float32 [batch, heads_q, seqlen_q] in either layout: the natural logarithm of the softmax's
        denominator. Both have gradients, tangents and second derivatives. A row that sees no key
        has out 0 and lse -inf. With return_max_logits also max_logits, float32 [batch,
        heads_q], without a gradient: the largest scale * q.k over all visible pairs of a sequence,
        before softcap, ALiBi and bias, as QK-clip (arXiv 2507.20534) uses it; -inf without one.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range.
        RuntimeError: no kernel of this build can run the problem on this device.
    """
    options = (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    return attention_backend(q).attention(q, k, v, layout, options)


def attention_varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, seqused_q: Any = None,
    seqused_k: Any = None, block_table: Any = None, causal: bool = False,
    window: Window = UNBOUNDED, scale: Any = None, softcap: float = 0.0, bias: Any = None,
    alibi_slopes: Any = None, sinks: Any = None, dropout_p: float = 0.0, return_lse: bool = False,
    deterministic: bool = False, tf32: bool = False, check: bool = False,
    batch_invariant: bool = False, k_descale: Any = None, v_descale: Any = None, mask: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None, precise_backward: bool = False,
    q_descale: Any = None,
) -> Any:  # fmt: skip
    """Exact attention of sequences of different lengths, packed end to end.

    q [total_q, heads_q, head_dim], k [total_k, heads_kv, head_dim], v [total_k, heads_kv,
    head_dim_v]; sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] and the keys
    cu_seqlens_k[b] to cu_seqlens_k[b + 1]. With block_table, k and v are pages
    [pages, page_size, heads_kv, head_dim or head_dim_v] (PagedAttention, arXiv 2309.06180).

    All other options are those of ``attention``, applied to each sequence.

    Args:
        q: Queries; kinds and dtypes as in ``attention``.
        k: Keys.
        v: Values.
        cu_seqlens_q: int32 [batch + 1], from 0, not decreasing. Rows past the last entry give 0.
        cu_seqlens_k: int32 [batch + 1], or None with block_table.
        max_seqlen_q: Upper bound of the rows of a sequence, if known; never required.
        max_seqlen_k: Upper bound of the keys of a sequence, if known; never required.
        seqused_q: int32 [batch]: the number of rows of each sequence that are in use.
        seqused_k: int32 [batch]: the number of keys of each sequence that are in use.
        block_table: int32 [batch, width]: entry [b, i] is the page of the keys i * page_size to
            (i + 1) * page_size - 1 of sequence b.
        bias: Broadcastable to [batch, heads_q, rows, keys], with rows and keys counted within a
            sequence. Each of the two is at least that of the longest sequence, or 1 (a single key
            on a GPU needs max_seqlen_k). A smaller bias is refused on the CPU; on a GPU it is
            refused if max_seqlen_q or max_seqlen_k exceeds it, or with check=True.
        check: On a GPU, verify the entries of the index tensors before anything is computed, in
            forward and backward. It launches a kernel and waits for it, so the call cannot be
            captured in a CUDA graph. Without it, sequences whose entries are out of range get rows
            of NaN on a GPU, and ``last_index_error`` names the entry. The CPU always verifies.

    Returns:
        out [total_q, heads_q, head_dim_v]; with return_lse also lse, float32 [heads_q, total_q];
        with return_max_logits also max_logits, float32 [batch, heads_q].

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or an entry out of range.
        RuntimeError: no kernel of this build can run the problem on this device.
    """
    sequences = (
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q,
        seqused_k,
        block_table,
    )
    options = (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, dropout_p, return_lse,
        deterministic, tf32, check, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, precise_backward, q_descale,
    )  # fmt: skip
    return attention_backend(q).attention_varlen(q, k, v, sequences, options)


def merge_states(
    out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, layout: str = "bshd"
) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys, from the results over each set.

    This is the merge of FlashDecoding and of cascade attention (arXiv 2501.01005, section 2.2).

    Args:
        out_a: [batch, seqlen_q, heads_q, head_dim_v] ("bshd"), the same with the middle dimensions
            exchanged ("bhsd"), or [total_q, heads_q, head_dim_v].
        lse_a: float32 [batch, heads_q, seqlen_q], or [heads_q, total_q].
        out_b: Shape and dtype of out_a.
        lse_b: Shape and dtype of lse_a.
        layout: "bshd" or "bhsd"; ignored for three dimensions.

    Returns:
        (out, lse) as ``attention(..., return_lse=True)`` over all keys returns them, but computed
        from outputs that have already been rounded to their dtype, which out keeps: with
        ``out_dtype`` float32 they are not rounded. Differentiable for tensors.

    Raises:
        TypeError: an argument is not of the kind of out_a, or its dtype is not floating-point.
        ValueError: shapes or devices do not match.
    """
    _check.heads_first(layout)
    backend = attention_backend(out_a)
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
                f"{name} has dtype {array.dtype}, but must be float32, float16 or bfloat16, like "
                "results of attention"
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
