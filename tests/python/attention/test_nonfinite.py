"""NaN and infinity reach everything that depends on them and nothing else; extreme but finite
numbers stay exact. The classic mistakes are 0 * NaN for a masked key in a tile that other rows do
see, and -inf - -inf in rows without visible keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import capi
import devices
import oracle
from bounds import FP32_RELATIVE, LSE_LOW
from cases import Built, Case, Outcome, check, float64, run
from nonfinite_cases import CASES, expect, same

pytestmark = pytest.mark.abi
DTYPES = ["fp32", "bf16", "fp16"]


def seen(b: Built) -> np.ndarray:
    return oracle.visible(b.options(), 0, b.case.rows[0], b.case.keys[0])


def unchanged(got: np.ndarray, clean: np.ndarray, dtype: str) -> bool:
    """Bitwise equal on the CPU; a GPU recomputes tiles with a NaN element by element."""
    if devices.current().name == "cpu":
        return np.array_equal(got, clean)
    return same(got, clean, dtype)


cases = pytest.mark.parametrize(
    ("dtype", "name"),
    [(d, n) for d in DTYPES for n in CASES if d == "bf16" or not n.startswith("aligned")],
)


def everywhere(b: Built, inject) -> list[tuple[str, Outcome, Outcome]]:
    """(where, clean outcome, outcome after `inject`) for everything that the device can run."""
    places = capi.targets()
    results = []
    for place in places:
        with capi.on(place):
            results.append(run(b))
    inject()
    after = []
    for place in places:
        with capi.on(place):
            after.append(run(b))
    return list(zip(places, results, after, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("key", [0, 63, 64, 100, 139])
@cases
def test_value_row(dtype, name, key, value):
    """v affects out, and dq and dk through dp and delta, but never dv, which is p times dout."""
    b = Built(dataclasses.replace(CASES[name], dtype=dtype))
    column = 7
    keep = np.ones((2, b.case.rows[0], 140), bool)
    if b.case.dropout_p:
        keep = oracle.kept(b.options(), 0, 2, *keep.shape[1:])
    rows = seen(b)[:, key]  # rows that see the key
    keys = seen(b)[rows].any(axis=0)  # keys whose dk sums over such a row

    def inject() -> None:
        b.v[0, key, 0, column] = value

    for place, clean, got in everywhere(b, inject):
        where = f"{place} {dtype} {name} v[{key}]={value}"
        # A dropped weight is 0: 0 * inf is NaN in the formula, but the term is absent from the sum.
        # With dropout, a row that sees the key and drops it may be either.
        must = rows[:, None] & keep[:, :, key].T  # [n, Hq]
        may = rows[:, None] & ~must
        out_at = np.zeros(got.out.shape, bool)
        out_at[:, :, column] = must
        free = np.zeros(got.out.shape, bool)
        free[:, :, column] = may
        expect(
            np.where(free, 0, got.out), np.where(free, 0, clean.out), out_at, dtype, f"out {where}"
        )
        assert unchanged(got.lse, clean.lse, dtype), f"lse {where}"
        assert unchanged(got.grads["v"], clean.grads["v"], dtype), f"dv {where}"
        if b.case.dropout_p == 0:
            expect(got.grads["q"], clean.grads["q"], rows[:, None, None], dtype, f"dq {where}")
            expect(got.grads["k"], clean.grads["k"], keys[:, None, None], dtype, f"dk {where}")
        else:
            untouched = ~np.broadcast_to(rows[:, None, None], got.grads["q"].shape)
            assert same(got.grads["q"][untouched], clean.grads["q"][untouched], dtype), where
            untouched = ~np.broadcast_to(keys[:, None, None], got.grads["k"].shape)
            assert same(got.grads["k"][untouched], clean.grads["k"][untouched], dtype), where


@pytest.mark.parametrize("key", [0, 63, 64, 139])
@cases
def test_key_row(dtype, name, key):
    b = Built(dataclasses.replace(CASES[name], dtype=dtype))
    rows = seen(b)[:, key]
    keys = seen(b)[rows].any(axis=0)

    def inject() -> None:
        b.k[0, key, 0, 3] = torch.nan

    for place, clean, got in everywhere(b, inject):
        where = f"{place} {dtype} {name} k[{key}]=nan"
        expect(got.out, clean.out, rows[:, None, None], dtype, f"out {where}")
        expect(got.lse, clean.lse, rows[:, None], dtype, f"lse {where}")
        expect(got.grads["q"], clean.grads["q"], rows[:, None, None], dtype, f"dq {where}")
        expect(got.grads["k"], clean.grads["k"], keys[:, None, None], dtype, f"dk {where}")
        if b.case.dropout_p == 0:
            expect(got.grads["v"], clean.grads["v"], keys[:, None, None], dtype, f"dv {where}")


@pytest.mark.parametrize("which", ["q", "dout"])
@pytest.mark.parametrize("row", [5, 63, 64, 128, 139])
@cases
def test_query_and_dout_row(dtype, name, row, which):
    b = Built(dataclasses.replace(CASES[name], dtype=dtype))
    head, column = 1, 4
    keys = seen(b)[row]
    assert keys.any()

    def inject() -> None:
        getattr(b, which)[0, row, head, column] = torch.nan

    at = np.zeros((b.case.rows[0], 2), bool)
    at[row, head] = True
    for place, clean, got in everywhere(b, inject):
        where = f"{place} {dtype} {name} {which}[{row}]=nan"
        reaches = at if which == "q" else np.zeros_like(at)
        expect(got.out, clean.out, reaches[:, :, None], dtype, f"out {where}")
        expect(got.lse, clean.lse, reaches, dtype, f"lse {where}")
        expect(got.grads["q"], clean.grads["q"], at[:, :, None], dtype, f"dq {where}")
        expect(got.grads["k"], clean.grads["k"], keys[:, None, None], dtype, f"dk {where}")
        assert not np.isfinite(got.grads["scale"]).any(), f"dscale {where}"
        if "sinks" in got.grads:
            expect(got.grads["sinks"], clean.grads["sinks"], np.arange(2) == head, dtype, where)
        if "bias" in got.grads:
            dbias_at = np.zeros(got.grads["bias"].shape, bool)
            dbias_at[0, 0, row, keys] = True
            expect(got.grads["bias"], clean.grads["bias"], dbias_at, dtype, f"dbias {where}")
        if b.case.dropout_p:
            continue
        dv_at = np.zeros(got.grads["v"].shape, bool)
        dv_at[keys, :, column if which == "dout" else slice(None)] = True
        expect(got.grads["v"], clean.grads["v"], dv_at, dtype, f"dv {where}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_does_not_cross_sequences(dtype):
    """Everything of sequence 1 is NaN; sequences 0 and 2 share tiles with it in memory."""
    case = Case(dtype, (9, 7, 13), (20, 11, 5), varlen_q=True, varlen_k=True, group=2, dlse=True)
    b = Built(case)

    def inject() -> None:
        for x in (b.q, b.dout):
            x[9:16] = torch.nan
        for x in (b.k, b.v):
            x[20:31] = torch.nan

    rows, keys = np.zeros(29, bool), np.zeros(36, bool)
    rows[9:16] = keys[20:31] = True
    for place, clean, got in everywhere(b, inject):
        expect(got.out, clean.out, rows[:, None, None], dtype, f"out {place}")
        expect(got.lse, clean.lse, rows[:, None], dtype, f"lse {place}")
        expect(got.grads["q"], clean.grads["q"], rows[:, None, None], dtype, f"dq {place}")
        for name in "kv":
            expect(
                got.grads[name], clean.grads[name], keys[:, None, None], dtype, f"d{name} {place}"
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [0, 1, 3])
def test_decode_with_nan_in_one_sequence(dtype, splits):
    b = Built(Case(dtype, (1, 1), (500, 500), group=4, splits=splits, used_k=(500, 377)))

    def inject() -> None:
        b.v[0, 411] = torch.nan

    rows = np.array([True, False])
    for place, clean, got in everywhere(b, inject):
        expect(got.out, clean.out, rows[:, None, None], dtype, f"out {place}")
        assert unchanged(got.lse, clean.lse, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_with_nan_that_some_rows_see(dtype):
    """The keys of the sequences are split in chunks of equal token counts."""
    used = (640, 0, 129, 577, 70)
    b = Built(Case(dtype, (2,) * 5, (640,) * 5, heads_kv=2, group=2, used_k=used, window=(-1, 0)))

    def inject() -> None:
        for i in (0, 3):
            b.v[i, used[i] - 1, 1] = torch.nan  # only the second row sees it

    out_at = np.zeros((5, 2, 4, 1), bool)
    out_at[[0, 3], 1, 2:] = True
    for place, clean, got in everywhere(b, inject):
        expect(got.out, clean.out, out_at.reshape(-1, 4, 1), dtype, f"out {place}")
        assert unchanged(got.lse, clean.lse, dtype), f"lse {place}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, heads", [(1, 1), (4, 8)])
def test_decode_ignores_keys_before_its_window(dtype, batch, heads):
    """One row, whose window starts inside a key tile: earlier keys share the tile."""
    b = Built(Case(dtype, (1,) * batch, (200,) * batch, heads_kv=heads, group=4, window=(20, 0)))

    def inject() -> None:
        b.k[0, 170] = torch.nan
        b.v[0, 150:179, heads // 2 :] = torch.nan  # the first key in the window is 179

    for place, clean, got in everywhere(b, inject):
        assert np.isfinite(got.out).all(), place
        assert unchanged(got.out, clean.out, dtype), place
        assert unchanged(got.lse, clean.lse, dtype), place
        for name in "qkv":
            assert unchanged(got.grads[name], clean.grads[name], dtype), (place, name)


def test_nan_in_the_last_of_many_sequences():
    """More tiles than the CTAs of the NaN recompute pass examine at once, few of them
    affected."""
    count, first = 250, 237
    b = Built(
        Case(
            "fp16", (2,) * count, (3,) * count, heads_kv=8, head_dim=8, head_dim_v=8, window=(-1, 0)
        )
    )

    def inject() -> None:
        b.v[first:, 2, 5, 3] = torch.nan  # only the second row of a sequence sees key 2

    out_at = np.zeros((count, 2, 8, 8), bool)
    out_at[first:, 1, 5, 3] = True
    keys_at = np.zeros((count, 3, 8, 1), bool)
    keys_at[first:, :, 5] = True
    for place, clean, got in everywhere(b, inject):
        expect(got.out, clean.out, out_at.reshape(-1, 8, 8), "fp16", f"out {place}")
        rows_at = out_at.any(-1, keepdims=True).reshape(-1, 8, 1)
        expect(got.grads["q"], clean.grads["q"], rows_at, "fp16", f"dq {place}")
        expect(got.grads["k"], clean.grads["k"], keys_at.reshape(-1, 8, 1), "fp16", f"dk {place}")
        assert unchanged(got.grads["v"], clean.grads["v"], "fp16"), f"dv {place}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_minus_infinity_hides(dtype):
    """Keys hidden by bias behave like masked ones; a row with all keys hidden is 0, never NaN."""
    b = Built(Case(dtype, (70,), (80,), group=2, bias="hr", dlse=True, head_dim=16))
    assert b.bias is not None
    b.bias[:, :, 5] = -torch.inf
    b.bias[:, 1, 60:] = -torch.inf
    b.bias[:, :, :, 64:] = -torch.inf
    want = b.expected()
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        assert (got.out[5] == 0).all() and np.isneginf(got.lse[5]).all(), place
        assert (got.out[60:, 1] == 0).all() and np.isneginf(got.lse[60:, 1]).all(), place
        assert (got.grads["q"][5] == 0).all() and (got.grads["bias"][0, :, 5] == 0).all(), place
        assert (got.grads["k"][64:] == 0).all() and (got.grads["v"][64:] == 0).all(), place
        size = {"fp32": 1e-6, "bf16": 2**-6, "fp16": 2**-9}[dtype]
        for name, target in (("q", want.dq), ("k", want.dk), ("v", want.dv), ("bias", want.dbias)):
            assert target is not None
            error = np.abs(got.grads[name] - target).max()
            assert error <= size * np.abs(target).max(), (place, name, error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_huge_logits_pick_one_key(dtype, size):
    """Logits of +-size with gaps that leave one key per row: out is the value of that key. The
    numbers are powers of two, so that the scores do not round."""
    n, dim = 100, 128
    case = Case(dtype, (n,), (n,), head_dim=dim, head_dim_v=16, scale=1.0, dlse=True)
    b = Built(case)
    b.q.zero_()
    b.k.zero_()
    big = 2.0 ** int(np.log2(size) / 2)
    pick = devices.put(torch.from_numpy(np.random.default_rng(0).permutation(n)))
    for i in range(n):
        b.q[0, i, 0, i] = big  # row i against key pick[i]: +big^2
        b.k[0, pick[i], 0, i] = big
    for sign in (1, -1):
        b.k.mul_(sign)
        for place in capi.targets():
            with capi.on(place):
                got = run(b)
            for x in (got.out, got.lse, *got.grads.values()):
                assert np.isfinite(x).all(), (place, sign)
            if sign > 0 and big**2 > 100:
                exact = float64(b.v[0, pick])
                unit = 1e-6 if dtype == "fp32" else 0.0
                assert np.abs(got.out - exact).max() <= unit * np.abs(exact).max(), place
                assert np.abs(got.lse - big**2).max() <= 1e-6 * big**2, place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", [0.0, 3e4, -3e4])
def test_equal_logits_average(dtype, level):
    """All logits are the same, however large: out is the mean of the values, and lse is
    level + log(n)."""
    n = 256
    b = Built(Case(dtype, (65,), (n,), head_dim=4, head_dim_v=8, bias=""))
    assert b.bias is not None
    b.k.zero_()
    b.bias.fill_(level)
    mean = float64(b.v).mean(axis=1)
    unit = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[dtype]
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        assert np.abs(got.out - mean).max() <= unit * np.abs(float64(b.v)).max(), place
        lse_unit = FP32_RELATIVE if dtype == "fp32" else LSE_LOW
        assert np.abs(got.lse - (level + np.log(n))).max() <= lse_unit * max(6, abs(level)), place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("step", [1 / 16, 1 / 2])
def test_growing_logits_rescale_often(dtype, window, step):
    """Every logit exceeds all before it: the running maximum changes with every tile, and many
    times within one.
    """
    n = 300
    case = Case(dtype, (n,), (n,), head_dim=4, window=window, alibi="h", dlse=True)
    b = Built(case)
    b.q.zero_()
    b.q[..., 0] = 1
    b.k[..., 0] = devices.put(torch.arange(n)).view(1, n, 1) * step
    want = b.expected()
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        unit = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[dtype]
        assert np.abs(got.out - want.out).max() <= unit * np.abs(want.out).max(), place
        lse_unit = FP32_RELATIVE if dtype == "fp32" else LSE_LOW
        assert np.abs(got.lse - want.lse).max() <= lse_unit * np.abs(want.lse).max(), place


@pytest.mark.parametrize("dtype", DTYPES)
def test_typical_alibi_slopes_over_long_rows(dtype):
    """Slopes 2^-1 to 2^-8, causal, 1500 keys: some distances are beyond where exp underflows."""
    b = Built(Case(dtype, (300,), (1500,), heads_kv=8, window=(-1, 0), alibi="h", head_dim=16))
    assert b.slopes is not None
    b.slopes.copy_(2.0 ** -torch.arange(1, 9))
    want = b.expected()
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        unit = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[dtype]
        assert np.abs(got.out - want.out).max() <= unit * np.abs(want.out).max(), place
        for name in "qkv":
            target = getattr(want, f"d{name}")
            size = unit if dtype == "fp32" else 4 * unit
            assert np.abs(got.grads[name] - target).max() <= size * np.abs(target).max(), (
                place,
                name,
            )


def test_subnormal_and_large_fp16_values():
    """fp16 from its smallest subnormal to 65504 is exact: with one key, out is v."""
    values = np.array([2.0**-24, 3 * 2.0**-24, 2.0**-14, 1 / 3, 65504.0, -65504.0, 0.0, -1.0])
    b = Built(Case("fp16", (3,), (1,), head_dim=8, head_dim_v=8))
    b.v.copy_(torch.from_numpy(values).view(1, 1, 1, 8))
    exact = float64(b.v).reshape(1, 1, 8)
    for place in capi.targets():
        with capi.on(place):
            assert np.array_equal(run(b).out, np.broadcast_to(exact, (3, 1, 8))), place


@pytest.mark.parametrize("dtype", DTYPES)
def test_sink_of_minus_infinity_has_no_effect(dtype):
    case = Case(dtype, (20,), (13,), group=2, sinks=True, window=(-1, 0), dlse=True)
    b = Built(case)
    assert b.sinks is not None
    b.sinks.fill_(-torch.inf)
    without = Built(dataclasses.replace(case, sinks=False))
    for name in ("q", "k", "v", "dout", "dlse"):
        getattr(without, name).copy_(getattr(b, name))
    for place in capi.targets():
        with capi.on(place):
            got, plain = run(b), run(without)
        assert (got.grads["sinks"] == 0).all()
        assert unchanged(got.lse, plain.lse, dtype) and same(got.out, plain.out, dtype), place
        for name in "qkv":
            assert same(got.grads[name], plain.grads[name], dtype), (place, name)


SINK = Case(rows=(70,), keys=(80,), group=2, head_dim=24, head_dim_v=24, sinks=True, dlse=True)
DECODE = dataclasses.replace(SINK, rows=(1,) * 3, keys=(500,) * 3, used_k=(500, 0, 377))
VARLEN = dataclasses.replace(
    SINK, rows=(4,) * 4, keys=(1024,) * 4, used_k=(1000, 70, 0, 300), heads_kv=2, head_dim=64,
    head_dim_v=64, window=(-1, 0), spread=0.5,
)  # fmt: skip
SINKS = {
    "rows": dataclasses.replace(SINK, window=(-1, 0)),
    "tiles": dataclasses.replace(SINK, rows=(300,), keys=(300,), head_dim=64, head_dim_v=64),
    "split": dataclasses.replace(SINK, splits=3),
    "general": dataclasses.replace(SINK, softcap=3.0, alibi="h", bias="r", dropout_p=0.2),
    "decode": DECODE,
    "decode, split": dataclasses.replace(DECODE, splits=3),
    "decode, clusters": dataclasses.replace(DECODE, used_k=None, head_dim=64, head_dim_v=64),
    "decode, varlen": VARLEN,
    "decode, pages": dataclasses.replace(VARLEN, page_size=16),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SINKS)
def test_sink_of_plus_infinity_takes_all_weight(dtype, name):
    """In heads with such a sink out is 0, lse is +inf, and only dlse has an effect: on dsinks."""
    b = Built(dataclasses.replace(SINKS[name], dtype=dtype))
    assert b.sinks is not None and b.dlse is not None
    b.sinks[1::2] = torch.inf
    want = b.expected()
    unit = {"fp32": 2e-6, "bf16": 2**-6, "fp16": 2**-9}[dtype]
    used = np.concatenate([sequence.rows for sequence in b.sequences])
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        assert (got.out[used, 1::2] == 0).all(), place
        assert (got.lse[used, 1::2] == np.inf).all(), place
        assert (got.grads["q"][:, 1::2] == 0).all(), place
        assert same(got.lse[:, ::2], want.lse[:, ::2], "fp16"), place
        for what in ("out", "dq", "dk", "dv", "dsinks", *(["dbias"] if b.bias is not None else [])):
            target = getattr(want, what)
            error = np.abs((got.out if what == "out" else got.grads[what[1:]]) - target).max()
            assert error <= unit * np.abs(target).max(), (place, what, error)


def test_all_keys_masked():
    check(Case(rows=(30,), keys=(4,), window=(0, 0), group=2, seed=3))
    check(Case("bf16", (30,), (4,), window=(-1, 0), sinks=True))


@pytest.mark.parametrize("sequence", [0, 1, 3])
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_value_row_of_a_varlen_decode_batch(dtype, page_size, sequence):
    """Decoding with chunks of equal token counts: sequences of one chunk and of several."""
    used = (1000, 70, 0, 300)
    case = Case(
        dtype=dtype, rows=(4,) * 4, keys=(1024,) * 4, used_k=used, group=2, heads_kv=2,
        head_dim=64, head_dim_v=64, page_size=page_size, window=(-1, 0), spread=0.5,
    )  # fmt: skip
    b = Built(case)
    key, head, column = used[sequence] - 2, 1, 7  # the last two rows see it
    slot, row = sequence, key
    if page_size:
        slot, row = b.meta["block_table"][sequence, key // page_size], key % page_size

    def outputs() -> list[np.ndarray]:
        found = []
        for place in capi.targets():
            with capi.on(place):
                found.append(run(b, backward=False).out)
        return found

    clean = outputs()
    b.v[slot, row, head, column] = torch.nan
    affected = np.zeros(clean[0].shape, bool)
    affected[4 * sequence + 2 : 4 * sequence + 4, 2:, column] = True
    for place, before, after in zip(capi.targets(), clean, outputs(), strict=True):
        expect(after, before, affected, dtype, f"{place} {dtype} sequence {sequence}")
