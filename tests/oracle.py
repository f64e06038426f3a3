"""Exact attention in float64, forward and backward: the reference that every kernel is compared
with, and its tangents (forward mode) and second derivatives.

Written from the definition of the options (the comment in tilewise.h), not from the kernels, with
explicit formulas for every gradient. It uses NumPy only and one dense N x N matrix per sequence:
small and slow on purpose. Rows and keys are flat lists, and a `SequenceIndices` says which of them
belong to one sequence, so dense batches, variable lengths, paged caches and left padding are all
the same to the mathematics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass
class SequenceIndices:
    """One sequence: its index in the batch, and where its rows and keys are in the flat tensors."""

    batch: int
    rows: Index  # of q, out, lse
    keys: Index  # of k, v
    grad_keys: Index  # of dk, dv; each sequence has its own where sequences may share keys


@dataclass
class Options:
    """How scores are modified. Windows below 0 are unlimited; arrays cover the whole batch."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: Array | None = None  # [B, Hq]
    bias: Array | None = None  # [B, Hq, rows, keys], any of the first three may be 1
    sinks: Array | None = None  # [Hq]
    dropout_p: float = 0.0
    seed: int = 0
    offset: int = 0
    shard: Shard | None = None
    mask: NDArray[np.bool_] | None = None  # [B or 1, Hq or 1, rows, keys] of the longest sequence


@dataclass
class Shard:
    """Where a problem lies in a larger one: how far each sequence's band is moved to the right,
    and what is added to the numbers of rows, keys, sequences and heads that dropout counts by."""

    diagonal: Sequence[int] | None = None  # [B]
    row: int = 0
    key: int = 0
    batch: int = 0
    head: int = 0
    heads: int | None = None  # query heads of the larger problem; None: as many as here


@dataclass
class Result:
    """Forward: out [N, Hq, Dv], lse [N, Hq], max_logits [B, Hq]. Backward: the gradients, shaped
    as their inputs."""

    out: Array
    lse: Array
    max_logits: Array  # the largest scale * q.k of visible pairs, or -inf
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array
    dscale: float
    # Magnitudes of what is summed, to judge cancellation (dp - delta is exactly 0 for a single
    # key): the largest norm of the terms p_ij v_j of an element of out; per sequence, p_ij times
    # the norm of the terms of dp_i; the norms, over all rows, of the terms of dv (if dout were 1),
    # dsinks and dscale.
    out_size: float
    ds_sizes: list[Array]
    dv_size: float
    dsinks_size: Array
    dscale_size: float


@dataclass
class Tangents:
    """Derivatives of the inputs along one direction, in their shapes; None is 0."""

    q: Array | None = None
    k: Array | None = None
    v: Array | None = None
    bias: Array | None = None
    sinks: Array | None = None
    scale: float | None = None


@dataclass
class TangentResult:
    """Tangents of out [N, Hq, Dv] and lse [N, Hq]; and the gradients of a loss of out, lse and
    these tangents, shaped as their inputs."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dbias: Array | None
    dsinks: Array
    dscale: float
    # Norms of what is summed, to judge cancellation, as in Result: of the terms of an element of
    # out and lse; per sequence, of the terms of the gradients of each score and its tangent; of
    # those of an element of dv, dsinks and dscale; and of those of an element of dv by the tangents
    # of the scores and of lse, which cancel where these are equal.
    out_size: float = 0.0
    lse_size: float = 0.0
    ds_sizes: list[Array] = field(default_factory=list)
    dv_size: float = 0.0
    dv_scores_size: float = 0.0
    dsinks_size: float = 0.0
    dscale_size: float = 0.0


def sequences_of(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    cu_seqlens_q: Sequence[int] | None = None,
    cu_seqlens_k: Sequence[int] | None = None,
    seqused_q: Sequence[int] | None = None,
    seqused_k: Sequence[int] | None = None,
    block_table: NDArray[np.int64] | None = None,
    page_size: int = 0,
    kv_batch_idx: Sequence[int] | None = None,
    leftpad_k: Sequence[int] | None = None,
) -> list[SequenceIndices]:
    """Where the rows and keys of every sequence are. A sequence uses its first seqused_q rows and
    its keys up to seqused_k, which counts the left padding; its keys start after leftpad."""
    sequences = []
    for b in range(batch):
        first, rows = b * seqlen_q, seqlen_q
        if cu_seqlens_q is not None:
            first, rows = cu_seqlens_q[b], cu_seqlens_q[b + 1] - cu_seqlens_q[b]
        if seqused_q is not None:
            rows = seqused_q[b]
        if block_table is not None:
            pages = np.asarray(block_table[b])
            keys = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
            grad_keys = b * keys.size + np.arange(keys.size)
        elif cu_seqlens_k is not None:
            keys = grad_keys = np.arange(cu_seqlens_k[b], cu_seqlens_k[b + 1])
        else:
            batch_row = b if kv_batch_idx is None else kv_batch_idx[b]
            keys = batch_row * seqlen_k + np.arange(seqlen_k)
            grad_keys = b * seqlen_k + np.arange(seqlen_k)
        end = keys.size
        if cu_seqlens_k is not None:  # with pages, it only says how many keys each sequence has
            end = cu_seqlens_k[b + 1] - cu_seqlens_k[b]
        end = end if seqused_k is None else seqused_k[b]
        begin = min(end, 0 if leftpad_k is None else leftpad_k[b])
        sequences.append(
            SequenceIndices(b, first + np.arange(rows), keys[begin:end], grad_keys[begin:end])
        )
    return sequences


def philox(
    counter: Sequence[NDArray[np.uint64] | int], key: tuple[int, int], rounds: int
) -> list[NDArray[np.uint64]]:
    """Philox4x32 (Salmon et al., SC11): four 32-bit words from a counter and a key."""
    mask = np.uint64(0xFFFFFFFF)
    c = [np.asarray(x, np.uint64) & mask for x in counter]
    k0, k1 = key
    for _ in range(rounds):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        high_a, high_b = a >> np.uint64(32), b >> np.uint64(32)
        c = [high_b ^ c[1] ^ np.uint64(k0), b & mask, high_a ^ c[3] ^ np.uint64(k1), a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def kept(o: Options, batch: int, heads: int, rows: int, keys: int) -> NDArray[np.bool_]:
    """Whether dropout keeps each weight of one sequence, [heads, rows, keys].

    Each key has a number of 16 random bits, and it is kept if the number is at least
    round(p * 65536). One block of Philox with 7 rounds serves 16 keys: its four words are eight
    half words. Bit 8 + i of the number of key j is bit j of half word i, and bit i of the number is
    bit j XOR 8 of that half word. A shard has the numbers of the larger problem.
    """
    at = o.shard or Shard()
    blocks = (at.key % 16 + keys + 15) // 16
    head, row, block = np.ogrid[:heads, :rows, :blocks]
    number = (batch + at.batch) * (heads if at.heads is None else at.heads) + head + at.head
    counter = np.broadcast_arrays(block + at.key // 16, row + at.row, number, o.offset & 0xFFFFFFFF)
    words = philox(counter, (o.seed & 0xFFFFFFFF, (o.seed >> 32) ^ (o.offset >> 32)), 7)
    halves = [(w >> np.uint64(sh)) & np.uint64(0xFFFF) for w in words for sh in (0, 16)]
    j = np.arange(16, dtype=np.uint64)
    numbers = np.zeros((heads, rows, blocks, 16), np.uint64)
    for i, half in enumerate(halves):
        bit = half[..., None] >> j & np.uint64(1)
        numbers |= bit << np.uint64(8 + i) | bit[..., j ^ np.uint64(8)] << np.uint64(i)
    bits = numbers.reshape(heads, rows, 16 * blocks)[:, :, at.key % 16 :][:, :, :keys]
    return bits >= int(float(np.float32(o.dropout_p)) * 65536 + 0.5)


def aligned(o: Options, batch: int, rows: int, keys: int) -> Index:
    """The key that each row is aligned with, [rows, 1]: bottom-right, moved by the diagonal."""
    moved = 0 if o.shard is None or o.shard.diagonal is None else o.shard.diagonal[batch]
    return np.arange(rows)[:, None] + keys - rows + np.clip(moved, -(2**30), 2**30)


def visible(o: Options, batch: int, rows: int, keys: int) -> NDArray[np.bool_]:
    """Whether the band lets each row see each key, [rows, keys]."""
    left, right = o.window
    j, diagonal = np.arange(keys), aligned(o, batch, rows, keys)
    seen = np.ones((rows, keys), bool)
    if left >= 0:
        seen &= j >= diagonal - left
    if right >= 0:
        seen &= j <= diagonal + right
    return seen


def sequence_mask(o: Options, batch: int, rows: int, keys: int) -> NDArray[np.bool_]:
    """The mask of one sequence, broadcastable to [Hq, rows, keys]."""
    if o.mask is None:
        return np.ones((1, 1, 1), bool)
    return o.mask[batch if o.mask.shape[0] > 1 else 0, :, :rows, :keys]


def seen_pairs(o: Options, batch: int, rows: int, keys: int) -> NDArray[np.bool_]:
    """Whether band and mask let each row see each key, broadcastable to [Hq, rows, keys]."""
    return visible(o, batch, rows, keys) & sequence_mask(o, batch, rows, keys)


def sequence_bias(o: Options, batch: int, rows: int, keys: int) -> Array:
    """The bias of one sequence, broadcastable to [Hq, rows, keys]."""
    if o.bias is None:
        return np.zeros((1, 1, 1))
    b = o.bias[batch if o.bias.shape[0] > 1 else 0]
    return b[:, : rows if b.shape[1] > 1 else 1, :keys]


def scores(o: Options, batch: int, raw: Array) -> tuple[Array, Array, Array]:
    """Scores from q.k [Hq, n, m], in the order scale, softcap, ALiBi, bias, band and mask;
    and the first and second derivative of the softcap."""
    n, m = raw.shape[1:]
    s = o.scale * raw
    capped, bent = np.ones_like(s), np.zeros_like(s)
    if o.softcap > 0:
        t = np.tanh(s / o.softcap)
        s, capped, bent = o.softcap * t, 1 - t * t, -2 * t * (1 - t * t) / o.softcap
    if o.slopes is not None:
        s = s - o.slopes[batch][:, None, None] * np.abs(aligned(o, batch, n, m) - np.arange(m))
    s = s + sequence_bias(o, batch, n, m)
    return np.where(seen_pairs(o, batch, n, m), s, -np.inf), capped, bent


def exp_of_sink(sink: Array, base: Array) -> Array:
    """exp(sink - base), which is 1 where the two are equal, even at +inf, where no score has
    weight."""
    with np.errstate(invalid="ignore"):
        return np.where(sink == base, 1.0, np.exp(sink - base))


@dataclass
class Weights:
    """The softmax of one sequence, and the tensors that it is made of, per query head."""

    q: Array  # [Hq, n, D]
    k: Array  # [Hq, m, D]
    v: Array  # [Hq, m, Dv]
    raw: Array  # q.k [Hq, n, m]
    capped: Array  # first derivative of the softcap
    bent: Array  # second derivative of the softcap
    lse: Array  # [Hq, n]
    p: Array
    p_sink: Array  # [Hq, n]
    drop: Array  # factors of dropout

    group: int  # query heads per head of k and v

    def per_kv_head(self, x: Array) -> Array:
        """[Hq, m, :] summed over the group, as [m, Hkv, :]."""
        return (
            x.reshape(len(x) // self.group, self.group, *x.shape[1:]).sum(axis=1).transpose(1, 0, 2)
        )


def by_head(x: Array, indices: Index, group: int = 1) -> Array:
    """The rows of one sequence as [Hq, n, :]."""
    return np.repeat(x[indices], group, axis=1).transpose(1, 0, 2)


def weights(q: Array, k: Array, v: Array, sequence: SequenceIndices, o: Options) -> Weights:
    """Softmax with an optional sink; a row that sees no key has lse = -inf and p = 0."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    qh = by_head(q, sequence.rows)
    kh, vh = by_head(k, sequence.keys, group), by_head(v, sequence.keys, group)
    raw = qh @ kh.transpose(0, 2, 1)
    s, capped, bent = scores(o, sequence.batch, raw)
    sink = np.full(heads, -np.inf) if o.sinks is None else o.sinks
    top = np.maximum(s.max(axis=2, initial=-np.inf), sink[:, None])
    base = np.where(np.isneginf(top), 0.0, top)
    total = np.exp(s - base[:, :, None]).sum(axis=2) + exp_of_sink(sink[:, None], base)
    with np.errstate(divide="ignore"):
        lse = base + np.log(total)
    safe = np.where(np.isneginf(lse), 0.0, lse)
    p = np.exp(s - safe[:, :, None])
    drop = np.ones_like(p)
    if o.dropout_p > 0:
        keep = kept(o, sequence.batch, heads, *raw.shape[1:])
        drop = keep / (1 - float(np.float32(o.dropout_p)))
    p_sink = exp_of_sink(sink[:, None], safe)
    return Weights(qh, kh, vh, raw, capped, bent, lse, p, p_sink, drop, group)


def add_to_bias(dbias: Array | None, ds: Array, batch: int) -> None:
    """Adds the gradient of the scores [Hq, n, m] of one sequence, summed over the dimensions in
    which the bias has size 1."""
    if dbias is None:
        return
    batch_size, bias_heads, bias_rows = dbias.shape[:3]
    reduced = ds.sum(axis=0, keepdims=True) if bias_heads == 1 else ds
    reduced = reduced.sum(axis=1, keepdims=True) if bias_rows == 1 else reduced
    at = batch if batch_size > 1 else 0
    dbias[at, :, : reduced.shape[1], : ds.shape[2]] += reduced


def attention(
    q: Array,
    k: Array,
    v: Array,
    sequences: list[SequenceIndices],
    o: Options,
    dout: Array | None = None,
    dlse: Array | None = None,
    grad_keys: int | None = None,
) -> Result:
    """q [N, Hq, D], k [M, Hkv, D], v [M, Hkv, Dv], dout [N, Hq, Dv], dlse [N, Hq] or None (zero).
    `grad_keys` rows in dk and dv (default M)."""
    heads = q.shape[1]
    grad_keys = k.shape[0] if grad_keys is None else grad_keys
    r = Result(
        out=np.zeros((*q.shape[:2], v.shape[2])), lse=np.full(q.shape[:2], -np.inf),
        max_logits=np.full((len(sequences), heads), -np.inf),
        dq=np.zeros(q.shape), dk=np.zeros((grad_keys, *k.shape[1:])),
        dv=np.zeros((grad_keys, *v.shape[1:])), dsinks=np.zeros(heads),
        dbias=None if o.bias is None else np.zeros(o.bias.shape), dscale=0.0, out_size=0.0,
        ds_sizes=[], dv_size=0.0, dsinks_size=np.zeros(heads), dscale_size=0.0,
    )  # fmt: skip
    for sequence in sequences:
        n = len(sequence.rows)
        w = weights(q, k, v, sequence, o)
        qh, kh, vh, raw, lse = w.q, w.k, w.v, w.raw, w.lse
        p, p_sink, drop = w.p, w.p_sink, w.drop
        r.out[sequence.rows] = ((p * drop) @ vh).transpose(1, 0, 2)
        r.out_size = max(r.out_size, np.sqrt(np.nanmax((p * drop) ** 2 @ vh**2, initial=0)))
        r.lse[sequence.rows] = lse.T
        logits = np.where(seen_pairs(o, sequence.batch, *raw.shape[1:]), o.scale * raw, -np.inf)
        r.max_logits[sequence.batch] = logits.max(axis=(1, 2), initial=-np.inf)
        if dout is None:
            continue

        # Backward. With L the loss: dp = dL/dp, delta_i = sum_j p_ij dp_ij, and every score's
        # gradient is p (dp - delta), plus p dlse because d lse_i / d s_ij = p_ij.
        doh = by_head(dout, sequence.rows)
        dl = np.zeros((heads, n)) if dlse is None else dlse[sequence.rows].T
        dp = drop * (doh @ vh.transpose(0, 2, 1))
        delta = (p * dp).sum(axis=2)
        ds = p * (dp - delta[:, :, None] + dl[:, :, None])
        d_scaled = ds * w.capped

        r.dq[sequence.rows] += (o.scale * d_scaled @ kh).transpose(1, 0, 2)
        np.add.at(
            r.dk, sequence.grad_keys, w.per_kv_head(o.scale * d_scaled.transpose(0, 2, 1) @ qh)
        )
        np.add.at(r.dv, sequence.grad_keys, w.per_kv_head((p * drop).transpose(0, 2, 1) @ doh))
        r.dsinks += (p_sink * (dl - delta)).sum(axis=1)
        r.dscale += float((d_scaled * raw).sum())
        add_to_bias(r.dbias, ds, sequence.batch)

        norm = drop * np.sqrt((doh**2) @ (vh**2).transpose(0, 2, 1))
        row = np.where(np.isneginf(lse), 0.0, norm.max(axis=2, initial=0) + np.abs(dl))
        r.ds_sizes.append(p * row[:, :, None])
        sums = w.per_kv_head((p * drop).transpose(0, 2, 1) ** 2 @ np.ones((heads, n, 1)))
        r.dv_size = max(r.dv_size, float(np.sqrt(sums.max(initial=0))))
        r.dsinks_size += ((p_sink * row) ** 2).sum(axis=1)
        r.dscale_size += float((((p * np.abs(raw)).sum(axis=2) * row) ** 2).sum())
    r.dsinks_size, r.dscale_size = np.sqrt(r.dsinks_size), float(np.sqrt(r.dscale_size))
    return r


def tangents(
    q: Array,
    k: Array,
    v: Array,
    sequences: list[SequenceIndices],
    o: Options,
    t: Tangents,
    incoming: tuple[Array, Array, Array, Array] | None = None,
    grad_keys: int | None = None,
) -> TangentResult:
    """The tangents of out and lse along t. Given `incoming`, the gradients of out, lse and these
    two tangents, also the gradients of q, k, v, bias, sinks and scale, with `grad_keys` rows in dk
    and dv (default: those of k)."""
    group, grad_keys = q.shape[1] // k.shape[1], len(k) if grad_keys is None else grad_keys
    r = TangentResult(
        out=np.zeros((*q.shape[:2], v.shape[2])), lse=np.zeros(q.shape[:2]), dq=np.zeros(q.shape),
        dk=np.zeros((grad_keys, *k.shape[1:])), dv=np.zeros((grad_keys, *v.shape[1:])),
        dsinks=np.zeros(q.shape[1]), dscale=0.0,
        dbias=None if o.bias is None else np.zeros(o.bias.shape),
    )  # fmt: skip
    qt = np.zeros(q.shape) if t.q is None else t.q
    kt = np.zeros(k.shape) if t.k is None else t.k
    vt = np.zeros(v.shape) if t.v is None else t.v
    scale_t = 0.0 if t.scale is None else t.scale
    sink_t = np.zeros(q.shape[1]) if t.sinks is None else t.sinks
    for sequence in sequences:
        w = weights(q, k, v, sequence, o)
        qth = by_head(qt, sequence.rows)
        kth, vth = by_head(kt, sequence.keys, group), by_head(vt, sequence.keys, group)
        raw_t = qth @ w.k.transpose(0, 2, 1) + w.q @ kth.transpose(0, 2, 1)
        scaled_t = o.scale * raw_t + scale_t * w.raw
        s_t = w.capped * scaled_t
        if t.bias is not None:
            bias_of = Options(o.scale, bias=t.bias)
            s_t = s_t + sequence_bias(bias_of, sequence.batch, *s_t.shape[1:])
        pd = w.p * w.drop
        mean = (w.p * s_t).sum(axis=2) + w.p_sink * sink_t[:, None]
        centred = s_t - mean[:, :, None]
        r.out[sequence.rows] = (pd @ vth + (pd * centred) @ w.v).transpose(1, 0, 2)
        r.lse[sequence.rows] = mean.T
        terms = pd**2 @ vth**2 + (pd * centred) ** 2 @ w.v**2
        r.out_size = max(r.out_size, float(np.sqrt(terms.max(initial=0))))
        r.lse_size = max(r.lse_size, float(np.sqrt(((w.p * s_t) ** 2).sum(axis=2).max(initial=0))))
        if incoming is None:
            continue

        # With L the loss: dp = dL/dp, where lse_t = sum of p s_t also depends on p.
        dout, dlse, dout_t, dlse_t = (x[sequence.rows] for x in incoming)
        a, b = dout.transpose(1, 0, 2), dout_t.transpose(1, 0, 2)
        e = w.drop * (b @ w.v.transpose(0, 2, 1))
        through_mean = (w.p * e).sum(axis=2) - dlse_t.T
        ds_t = w.p * (e - through_mean[:, :, None])
        dp = w.drop * (a @ w.v.transpose(0, 2, 1) + b @ vth.transpose(0, 2, 1))
        dp = dp + centred * e - s_t * through_mean[:, :, None]
        dp_sink = -sink_t[:, None] * through_mean
        mean_dp = (w.p * dp).sum(axis=2) + w.p_sink * dp_sink
        ds = w.p * (dp + (dlse.T - mean_dp)[:, :, None])
        dz_t = w.capped * ds_t
        dz = w.capped * ds + w.bent * scaled_t * ds_t
        dx, dx_t = o.scale * dz + scale_t * dz_t, o.scale * dz_t
        r.dq[sequence.rows] += (dx @ w.k + dx_t @ kth).transpose(1, 0, 2)
        dk = dx.transpose(0, 2, 1) @ w.q + dx_t.transpose(0, 2, 1) @ qth
        dv = pd.transpose(0, 2, 1) @ a + (pd * centred).transpose(0, 2, 1) @ b
        np.add.at(r.dk, sequence.grad_keys, w.per_kv_head(dk))
        np.add.at(r.dv, sequence.grad_keys, w.per_kv_head(dv))
        r.dsinks += (w.p_sink * (dp_sink - mean_dp + dlse.T)).sum(axis=1)
        r.dscale += float((dz * w.raw + dz_t * raw_t).sum())
        add_to_bias(r.dbias, ds, sequence.batch)
        norm = np.sqrt(a**2 @ (w.v**2).transpose(0, 2, 1) + b**2 @ (vth**2).transpose(0, 2, 1))
        norm = norm + (1 + np.abs(centred)) * np.sqrt(b**2 @ (w.v**2).transpose(0, 2, 1))
        row = (w.drop * norm).max(axis=2, initial=0) + np.abs(dlse.T) + np.abs(dlse_t.T)
        row = row * (1 + np.abs(s_t).max(axis=2, initial=0) + np.abs(mean))
        r.ds_sizes.append(w.p * row[:, :, None])
        keys_pd, keys_centred = pd.transpose(0, 2, 1), centred.transpose(0, 2, 1)
        dv_terms = keys_pd**2 @ a**2 + (keys_pd * keys_centred) ** 2 @ b**2
        r.dv_size = max(r.dv_size, float(np.sqrt(w.per_kv_head(dv_terms).max(initial=0))))
        apart = pd * (np.abs(s_t) + np.abs(mean)[:, :, None])
        dv_terms = w.per_kv_head(apart.transpose(0, 2, 1) ** 2 @ b**2)
        r.dv_scores_size = max(r.dv_scores_size, float(np.sqrt(dv_terms.max(initial=0))))
        r.dsinks_size = float(np.hypot(r.dsinks_size, np.linalg.norm(w.p_sink * row)))
        of_scale = (w.p * (np.abs(w.raw) + np.abs(raw_t))).sum(axis=2) * row
        r.dscale_size = float(np.hypot(r.dscale_size, np.linalg.norm(of_scale)))
    return r
