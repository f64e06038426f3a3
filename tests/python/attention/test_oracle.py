"""The oracle itself, checked against torch's float64 autograd, finite differences and published
numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

import oracle


def problem(seed: int, batch=2, rows=5, keys=7, heads=4, heads_kv=2, dim=3, dim_v=5):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch * rows, heads, dim))
    k = rng.standard_normal((batch * keys, heads_kv, dim))
    v = rng.standard_normal((batch * keys, heads_kv, dim_v))
    dout = rng.standard_normal((batch * rows, heads, dim_v))
    dlse = rng.standard_normal((batch * rows, heads))
    return rng, q, k, v, dout, dlse


OPTIONS = [
    dict(),
    dict(window=(-1, 0)),
    dict(window=(2, 1)),
    dict(window=(0, -1), sinks=True),
    dict(softcap=0.7),
    dict(slopes=True, sinks=True),
    dict(bias=(2, 4, 5, 7)),
    dict(bias=(1, 4, 1, 7), softcap=2.0),
    dict(bias=(2, 1, 5, 7), sinks=True, window=(-1, 0)),
    dict(dropout_p=0.3),
    dict(dropout_p=0.5, softcap=1.0, slopes=True, bias=(1, 1, 5, 7), sinks=True, window=(3, 0)),
]


def options(rng: np.random.Generator, chosen: dict) -> oracle.Options:
    chosen = dict(chosen)
    if chosen.pop("slopes", False):
        chosen["slopes"] = rng.uniform(0.1, 1, (2, 4))
    if chosen.pop("sinks", False):
        chosen["sinks"] = rng.standard_normal(4)
    if "bias" in chosen:
        chosen["bias"] = rng.standard_normal(chosen["bias"])
    return oracle.Options(scale=0.6, seed=(5 << 40) + 11, offset=(9 << 33) + 2, **chosen)


def brute_force(q, k, v, o: oracle.Options, rows: int, keys: int, batch: int, leaves: dict):
    """Attention computed one weight at a time, in torch float64 scalars that autograd follows."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    keep = [oracle.kept(o, b, heads, rows, keys) for b in range(batch)]
    out, lse = [], []
    for b, i, h in itertools.product(range(batch), range(rows), range(heads)):
        scores, values = [], []
        for j in range(keys):
            distance = i + keys - rows - j
            if 0 <= o.window[0] < distance or 0 <= o.window[1] < -distance:
                continue
            s = leaves["scale"] * (q[b * rows + i, h] * k[b * keys + j, h // group]).sum()
            if o.softcap > 0:
                s = o.softcap * torch.tanh(s / o.softcap)
            if o.slopes is not None:
                s = s - float(o.slopes[b, h]) * abs(distance)
            if o.bias is not None:
                n = leaves["bias"].shape
                s = s + leaves["bias"][b % n[0], h % n[1], i % n[2], j]
            scores.append(s)
            weight = float(keep[b][h, i, j]) / (1 - float(np.float32(o.dropout_p)))
            values.append(weight * v[b * keys + j, h // group])
        if o.sinks is not None:
            scores.append(leaves["sinks"][h])
            values.append(torch.zeros_like(v[0, 0]))
        if not scores:
            out.append(torch.zeros_like(v[0, 0]))
            lse.append(torch.tensor(-torch.inf, dtype=torch.float64))
            continue
        s = torch.stack(scores)
        out.append(torch.softmax(s, 0) @ torch.stack(values))
        lse.append(torch.logsumexp(s, 0))
    return torch.stack(out).view(-1, heads, v.shape[2]), torch.stack(lse).view(-1, heads)


@pytest.mark.parametrize("rows,keys", [(5, 7), (7, 5)])
@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda c: "-".join(c) or "plain")
def test_agrees_with_autograd(chosen, rows, keys):
    if "bias" in chosen:
        b, h, i, _ = chosen["bias"]
        chosen = {**chosen, "bias": (b, h, rows if i > 1 else 1, keys)}
    rng, q, k, v, dout, dlse = problem(3, rows=rows, keys=keys)
    o = options(rng, chosen)
    sequences = oracle.sequences_of(2, rows, keys)
    r = oracle.attention(q, k, v, sequences, o, dout, dlse)

    leaves = {"scale": torch.tensor(o.scale, dtype=torch.float64)}
    if o.bias is not None:
        leaves["bias"] = torch.from_numpy(o.bias)
    if o.sinks is not None:
        leaves["sinks"] = torch.from_numpy(o.sinks)
    tensors = {**leaves, **{n: torch.from_numpy(x) for n, x in zip("qkv", (q, k, v), strict=True)}}
    for t in tensors.values():
        t.requires_grad_()
    out, lse = brute_force(tensors["q"], tensors["k"], tensors["v"], o, rows, keys, 2, leaves)
    np.testing.assert_allclose(r.out, out.detach(), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(r.lse, lse.detach(), rtol=1e-12, atol=1e-12)
    seen = torch.isfinite(lse)
    loss = (out * torch.from_numpy(dout)).sum() + (lse[seen] * torch.from_numpy(dlse)[seen]).sum()
    loss.backward()
    got = {"q": r.dq, "k": r.dk, "v": r.dv, "scale": r.dscale, "bias": r.dbias, "sinks": r.dsinks}
    for name, t in tensors.items():
        assert t.grad is not None, name
        np.testing.assert_allclose(got[name], t.grad, rtol=1e-10, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("rows,keys", [(5, 7), (7, 5)])
@pytest.mark.parametrize("chosen", [OPTIONS[i] for i in (1, 5, 10)], ids=lambda c: "-".join(c))
def test_tangents_agree_with_autograd(chosen, rows, keys):
    """Tangents, and the gradients of a loss of results and tangents."""
    chosen = {**chosen, "bias": (1, 1, rows, keys)} if "bias" in chosen else chosen
    rng, q, k, v, dout, dlse = problem(4, rows=rows, keys=keys)
    o = options(rng, chosen)
    inputs = {"q": q, "k": k, "v": v, "scale": np.array(o.scale), "bias": o.bias, "sinks": o.sinks}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    along = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}
    dout_t, dlse_t = rng.standard_normal(dout.shape), rng.standard_normal(dlse.shape)

    def forward(*given):
        x = dict(zip(inputs, given, strict=True))
        return brute_force(x["q"], x["k"], x["v"], o, rows, keys, 2, x)

    leaves = tuple(torch.from_numpy(x).requires_grad_() for x in inputs.values())
    tangents = tuple(torch.from_numpy(x) for x in along.values())
    results, result_tangents = torch.autograd.functional.jvp(
        forward, leaves, tangents, create_graph=True
    )
    terms = zip((*results, *result_tangents), (dout, dlse, dout_t, dlse_t), strict=True)
    seen = torch.isfinite(results[1])
    loss = sum(
        ((x if x.dim() == 3 else x[seen]) * (torch.from_numpy(g) if x.dim() == 3
          else torch.from_numpy(g)[seen])).sum()
        for x, g in terms
    )  # fmt: skip
    wanted = torch.autograd.grad(loss, leaves)

    t = oracle.Tangents(**{n: float(x) if n == "scale" else x for n, x in along.items()})
    sequences = oracle.sequences_of(2, rows, keys)
    r = oracle.tangents(q, k, v, sequences, o, t, (dout, dlse, dout_t, dlse_t))
    np.testing.assert_allclose(r.out, result_tangents[0].detach(), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(r.lse, result_tangents[1].detach(), rtol=1e-11, atol=1e-12)
    got = {"q": r.dq, "k": r.dk, "v": r.dv, "scale": r.dscale, "bias": r.dbias, "sinks": r.dsinks}
    for name, gradient in zip(inputs, wanted, strict=True):
        np.testing.assert_allclose(got[name], gradient, rtol=1e-10, atol=1e-11, err_msg=name)


def test_finite_differences_of_every_input():
    rng, q, k, v, dout, dlse = problem(8, rows=3, keys=4, dim=2, dim_v=2)
    o = oracle.Options(
        scale=0.8, window=(3, 1), softcap=1.5, slopes=rng.uniform(0.1, 1, (2, 4)),
        bias=rng.standard_normal((1, 4, 3, 4)), sinks=rng.standard_normal(4), dropout_p=0.25,
    )  # fmt: skip
    sequences = oracle.sequences_of(2, 3, 4)

    def loss() -> float:
        r = oracle.attention(q, k, v, sequences, o)
        return float((r.out * dout).sum() + (r.lse * dlse).sum())

    r = oracle.attention(q, k, v, sequences, o, dout, dlse)
    pairs = [(q, r.dq), (k, r.dk), (v, r.dv), (o.bias, r.dbias), (o.sinks, r.dsinks)]
    h = 1e-5
    for values, gradient in pairs:
        for at in np.ndindex(values.shape):
            old = values[at]
            values[at] = old + h
            up = loss()
            values[at] = old - h
            down = loss()
            values[at] = old
            assert abs((up - down) / (2 * h) - gradient[at]) < 1e-8
    scale = o.scale
    o.scale = scale + h
    up = loss()
    o.scale = scale - h
    assert abs((up - loss()) / (2 * h) - r.dscale) < 1e-8


ONES = 0xFFFFFFFF
PI = ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], (0xA4093822, 0x299F31D0))


@pytest.mark.parametrize(
    "counter,key,rounds,words",
    [
        ([0] * 4, (0, 0), 10, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([ONES] * 4, (ONES, ONES), 10, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (*PI, 10, "d16cfe09 94fdcceb 5001e420 24126ea1"),
        ([0] * 4, (0, 0), 7, "5f6fb709 0d893f64 4f121f81 4f730a48"),
        ([ONES] * 4, (ONES, ONES), 7, "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (*PI, 7, "4dfccaba 190a87f0 c47362ba b6b5242a"),
    ],
)
def test_philox_known_answers(counter, key, rounds, words):
    assert " ".join(f"{int(w):08x}" for w in oracle.philox(counter, key, rounds)) == words


def test_dropout_rate_is_right_and_depends_on_position_only():
    o = oracle.Options(scale=1.0, dropout_p=0.3, seed=77, offset=5)
    whole = oracle.kept(o, 1, 4, 100, 203)
    assert abs(whole.mean() - 0.7) < 0.01
    np.testing.assert_array_equal(whole[:, :50, :101], oracle.kept(o, 1, 4, 50, 101))
    for change in (dict(seed=78), dict(offset=6), dict(seed=77 + (1 << 32))):
        other = oracle.kept(oracle.Options(**{**o.__dict__, **change}), 1, 4, 100, 203)
        assert abs((whole == other).mean() - 0.58) < 0.02  # 0.7^2 + 0.3^2: independent
    assert not np.array_equal(whole, oracle.kept(o, 2, 4, 100, 203))


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropout_of_keys_in_a_block_is_independent(dropout_p):
    """The correlation is within chance: 5 standard deviations of 1/sqrt(80000)."""
    o = oracle.Options(scale=1.0, dropout_p=dropout_p, seed=3, offset=9)
    correlations = np.corrcoef(oracle.kept(o, 0, 8, 10000, 16).reshape(-1, 16).T)
    assert abs(correlations - np.eye(16)).max() < 5 / np.sqrt(80000)


def test_keys_that_share_random_bits_are_nearly_independent():
    """Two keys 8 apart swap the bytes of their 16 bits; the correlation is taken over all 2^16
    bits."""
    byte = np.arange(256)
    number = 256 * byte[:, None] + byte
    for threshold in range(256, 255 * 256, 101):
        kept = number >= threshold
        share = kept.mean()
        correlation = ((kept & kept.T).mean() - share**2) / (share * (1 - share))
        assert abs(correlation) < 1 / 80


def test_masked_rows_and_empty_sequences_are_zero():
    _, q, k, v, dout, dlse = problem(1, batch=1, rows=6, keys=2, heads=2, heads_kv=1)
    for o in (
        oracle.Options(scale=1.0, window=(-1, 0)),  # rows 0..3 see no key
        oracle.Options(scale=1.0, bias=np.full((1, 1, 1, 2), -np.inf)),  # no row sees a key
    ):
        r = oracle.attention(q, k, v, oracle.sequences_of(1, 6, 2), o, dout, dlse)
        no_keys = slice(0, 4) if o.bias is None else slice(0, 6)
        assert (r.out[no_keys] == 0).all() and np.isneginf(r.lse[no_keys]).all()
        assert (r.dq[no_keys] == 0).all()
        for x in (r.out, r.dq, r.dk, r.dv, r.dsinks):
            assert np.isfinite(x).all()
    empty = oracle.attention(
        q, k[:0], v[:0], oracle.sequences_of(1, 6, 0), oracle.Options(scale=1.0), dout, dlse
    )
    assert (empty.out == 0).all() and np.isneginf(empty.lse).all() and empty.dk.shape[0] == 0


def test_sequences_of_varlen_paged_and_padding():
    dense = oracle.sequences_of(2, 3, 4, seqused_q=[3, 1], seqused_k=[4, 2], leftpad_k=[1, 2])
    assert [p.rows.tolist() for p in dense] == [[0, 1, 2], [3]]
    assert [p.keys.tolist() for p in dense] == [[1, 2, 3], []]
    varlen = oracle.sequences_of(2, 9, 9, cu_seqlens_q=[0, 2, 5], cu_seqlens_k=[0, 0, 3])
    assert [p.rows.tolist() for p in varlen] == [[0, 1], [2, 3, 4]]
    assert [p.keys.tolist() for p in varlen] == [[], [0, 1, 2]]
    paged = oracle.sequences_of(
        2, 1, 0, block_table=np.array([[2, 0], [2, 1]]), page_size=3, seqused_k=[5, 6]
    )
    assert [p.keys.tolist() for p in paged] == [[6, 7, 8, 0, 1], [6, 7, 8, 3, 4, 5]]
    assert [p.grad_keys.tolist() for p in paged] == [[0, 1, 2, 3, 4], [6, 7, 8, 9, 10, 11]]
    indexed = oracle.sequences_of(2, 1, 2, kv_batch_idx=[2, 0])
    assert [p.keys.tolist() for p in indexed] == [[4, 5], [0, 1]]
    assert [p.grad_keys.tolist() for p in indexed] == [[0, 1], [2, 3]]
