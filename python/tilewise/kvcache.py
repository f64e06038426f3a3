"""Attention of new queries to a key/value cache, with the append in the same call."""

from __future__ import annotations

from typing import Any

from ._backend import cache_backend
from ._check import UNBOUNDED, Window
from ._latent import check_given, check_one_tensor


def attention_with_kvcache(
    q: Any, k_cache: Any, v_cache: Any = None, k: Any = None, v: Any = None, *,
    cache_seqlens: Any = None, cache_batch_idx: Any = None, cache_leftpad: Any = None,
    block_table: Any = None, rotary_cos: Any = None, rotary_sin: Any = None,
    rotary_interleaved: bool = True, rotary_seqlens: Any = None, cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None, max_seqlen_q: int | None = None, causal: bool = False,
    window: Window = UNBOUNDED, scale: Any = None, softcap: float = 0.0,
    bias: Any = None, alibi_slopes: Any = None, sinks: Any = None, num_splits: int = 0,
    return_lse: bool = False, tf32: bool = False, check: bool = False,
    batch_invariant: bool = False, q_descale: Any = None, k_descale: Any = None,
    v_descale: Any = None, head_dim_v: int | None = None, indices: Any = None, mask: Any = None,
    return_max_logits: bool = False, out_dtype: Any = None,
) -> Any:  # fmt: skip
    """Appends new keys and values to a cache in place, then attends to all keys in the cache.

    The function is for inference: it has no gradient. If an argument is refused, nothing is
    written. causal, window, scale, softcap, alibi_slopes, sinks, return_lse, tf32 and out_dtype are
    those of ``attention``; the last query is aligned with the last key. B is the batch, S the rows
    of a sequence, T those of all sequences, H the heads and D the head dimension.

    Args:
        q: [B, Sq, Hq, D], or [T, Hq, D] with cu_seqlens_q; float32, float16, bfloat16 or, with
            caches of this dtype, float8_e4m3fn. It is a torch.Tensor or a NumPy array, and all
            other arguments are of the same kind.
        k_cache, v_cache: [cache batch, capacity, Hkv, D] and [..., Dv]; with block_table
            [pages, page_size, Hkv, D] and [..., Dv], for any page size. The dtype is that of q, or,
            for q of float16 or bfloat16, torch.float8_e4m3fn (for arrays that of ml_dtypes). With
            head_dim_v there is no v_cache.
        k, v: New keys [B, Snew, Hkv, D] and values [B, Snew, Hkv, Dv] in the dtype of q (or, where
            that is float8_e4m3fn, float16 or bfloat16), written to
            ``cache_seqlens[b] .. cache_seqlens[b] + Snew - 1``; [Tnew, Hkv, ...] with
            cu_seqlens_k_new.
        cache_seqlens: int or integer [B]: keys already in the cache, including left padding. None
            (allowed without k) means that the caches are full.
        cache_batch_idx: integer [B]: sequence b uses row ``cache_batch_idx[b]`` of the caches.
        cache_leftpad: integer [B]: first key of each sequence; keys before it are not seen.
        block_table: integer [B, width]: entry [b, i] is the page of the keys i * page_size to
            (i + 1) * page_size - 1 of sequence b. Sequences may share pages, but each new key goes
            to a row of its own.
        rotary_cos, rotary_sin: [positions, rotary_dim / 2] in the dtype of q, allowed only with k
            (rotary embedding, arXiv 2104.09864). Row r of k is rotated at position
            ``cache_seqlens[b] + r``. So is row r of q if causal or a window is given; otherwise all
            its rows are rotated at ``cache_seqlens[b]``.
        rotary_interleaved: Rotate pairs (2i, 2i + 1) as GPT-J does; otherwise pairs
            (i, i + rotary_dim / 2) as GPT-NeoX does.
        rotary_seqlens: integer [B]: positions to count rotations from, instead of cache_seqlens.
        cu_seqlens_q: integer [B + 1]: sequence b has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1]``. None means that all sequences have equally many.
        cu_seqlens_k_new: The same for new keys; either may be given without the other.
        max_seqlen_q: Upper bound of the queries of a sequence, if known; never required.
        bias: As in ``attention``, but without a gradient; broadcastable to [B, Hq, Sq, capacity],
            with the capacity of a row of the caches or of block_table. Key 0 is the first key after
            the left padding. With cu_seqlens_q it needs as many rows as the longest sequence has,
            or 1.
        num_splits: Number of key splits that are computed in parallel; 0 chooses it by shape. It
            changes only the rounding.
        check: On a GPU, verify the entries of all index tensors before anything is written. It
            copies them to the host, so it waits for the GPU and can be neither captured nor traced.
            Without it, sequences whose entries are out of range get rows of NaN on a GPU,
            and ``last_index_error`` names the entry. The CPU always verifies.
        batch_invariant: Compute each sequence's rows bitwise as they are without the other
            sequences of the batch. num_splits must then be 0; splits follow from the length of each
            sequence.
        q_descale: float32 [B or 1, Hkv or 1]: factor of q of float8_e4m3fn; None is 1.
        k_descale, v_descale: float32 [B or 1, Hkv or 1]: factors of the stored values of a
            float8_e4m3fn cache. New keys and values are divided by them, rounded to nearest even
            and clamped to +-448. None is 1.
        head_dim_v: Dv, at least 1 and less than D: k_cache is a latent cache (MLA, arXiv
            2405.04434), whose first Dv columns are also the values. v_cache, v and v_descale must
            be None; k has all D columns and is written once. Rotations begin with column Dv of q
            and k, so they change no value.
        indices: integer [B, Sq, keys], or [T, keys] with cu_seqlens_q: each row of q sees only
            these rows of the caches, in any order (top-k sparse attention). Row r of page (or of
            batch row) p is p * page_size + r. An index that is negative or not in the cache selects
            nothing, and one given twice counts twice. Lengths and block_table say only where new
            keys go. Not together with causal, window, bias, mask, alibi_slopes, cache_leftpad and
            rotary embedding, which need the positions of keys.
        mask: One of ``tilewise.masks``: a pair is visible if the mask, causal and window all allow
            it. Key 0 of a mask is the first key after the left padding, and keys count
            on through all pages to the last new one. ``Ranges`` may go beyond the keys of a
            sequence. ``Blocks`` must have Sq rows, and a key for each that a row of the caches or
            of block_table has room for; with cu_seqlens_q they may have any size, and what lies
            outside is hidden. A ``Tree`` says which of its last keys each row of q sees, and has Sq
            rows, with cu_seqlens_q at least those of the longest sequence; it is refused together
            with rotary embedding, since the position of a draft token is not its place.
        return_max_logits: Return max_logits after out and lse.

    Returns:
        out [B, Sq, Hq, Dv] in out_dtype, or (out, lse) with lse float32 [B, Hq, Sq]; with
        cu_seqlens_q out is [T, Hq, Dv] and lse [Hq, T]. With return_max_logits also max_logits,
        float32 [B, Hq], as in ``attention``.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or an entry out of range.
        RuntimeError: no kernel of this build can run the problem on this device.
    """
    check_given(head_dim_v, v_cache)
    check_one_tensor(head_dim_v, v_cache, v, v_descale)
    if mask is not None and rotary_cos is not None:
        from ._mask_tree import refuse_rotation

        refuse_rotation(mask)
    if head_dim_v is not None:
        v, v_descale = k, k_descale
    new = (
        k, v, cache_seqlens, rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens,
        cu_seqlens_k_new,
    )  # fmt: skip
    layout = (
        cache_batch_idx, cache_leftpad, block_table, num_splits, check, cu_seqlens_q, max_seqlen_q,
        head_dim_v, indices,
    )  # fmt: skip
    options = (
        causal, window, scale, softcap, bias, alibi_slopes, sinks, 0.0, return_lse, False, tf32,
        False, batch_invariant, k_descale, v_descale, mask, return_max_logits,
        out_dtype, False, q_descale,
    )  # fmt: skip
    results = cache_backend(q).attention_with_kvcache(q, k_cache, v_cache, new, layout, options)
    if return_lse:
        return results
    return (results[0], results[2]) if return_max_logits else results[0]
