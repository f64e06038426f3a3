"""Shards: what a part of a larger problem computes equals that part of the whole problem.

test_properties.py has random shards; test_shard_parts.py compares a whole call with its parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import capi
import oracle
from bounds import FP32_RELATIVE
from cases import Built, Case, check, run

FULL = (-1, -1)
CAUSAL = (-1, 0)


def spread(dtype: str) -> float:
    """The spread of q, as in strategies.py: fp32 sums then round within the bounds."""
    return 0.5 if dtype == "fp32" else 1.0


def dropout_case(**changes: object) -> Case:
    return Case(**{
        "rows": (70, 70), "keys": (100, 100), "heads_kv": 2, "head_dim": 64, "head_dim_v": 64,
        "dropout_p": 0.4, "row_offset": 1000, "batch_offset": 2, "head_offset": 3, "more_heads": 2,
        **changes,
    })  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("key_offset", [0, 48, 1, 15, 4099])
@pytest.mark.parametrize("window", [FULL, CAUSAL, (30, 40)])
def test_dropout_counts_from_the_offsets(dtype, key_offset, window):
    check(dropout_case(dtype=dtype, key_offset=key_offset, window=window, spread=spread(dtype)))


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("diagonal", [1, -1, 17, -33, 64, -64, 99, -99, 130, -169, 500, -500])
@pytest.mark.parametrize("window", [CAUSAL, (0, -1), (20, 9), (64, 0), (0, 64)])
def test_bands_follow_the_diagonal(dtype, diagonal, window):
    """Some rows see no keys, at either end; some see all."""
    case = Case(
        dtype=dtype, rows=(130,), keys=(100,), group=2, head_dim=64, head_dim_v=64, window=window,
        diagonal=(diagonal,), deterministic=diagonal % 2 == 0, dlse=True, spread=spread(dtype),
    )  # fmt: skip
    check(case)


@pytest.mark.abi
@pytest.mark.parametrize("options", [
    dict(alibi="bh"), dict(alibi="h", softcap=5.0), dict(alibi="h", dropout_p=0.2, key_offset=7),
    dict(bias="bhr", bias_own_dtype=True), dict(bias="h", dropout_p=0.2, key_offset=32),
    dict(softcap=3.0), dict(sinks=True),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("window", [FULL, CAUSAL])
def test_score_options_of_a_moved_band(dtype, options, window):
    case = Case(
        dtype=dtype, rows=(90, 90, 90), keys=(110, 110, 110), group=2, head_dim=64, head_dim_v=64,
        window=window, diagonal=(-31, 0, 45), spread=spread(dtype), **options,
    )  # fmt: skip
    check(case)


@pytest.mark.abi
@pytest.mark.parametrize("paged", [0, 16, 64])
@pytest.mark.parametrize("window", [CAUSAL, (100, 0), (50, 60)])
@pytest.mark.parametrize("splits", [0, 3])
def test_decoding_with_a_moved_band(paged, window, splits):
    """Keys that only the device counts, and a diagonal per sequence that hides some, none or all
    of them."""
    used = (300, 290, 0, 300, 17, 300, 1, 120)
    case = Case(
        dtype="bf16", rows=(2,) * 8, keys=(300,) * 8, used_k=used, group=4, head_dim=64,
        head_dim_v=64, page_size=paged, window=window, splits=splits,
        diagonal=(0, -200, -1, -299, -16, -400, 5, 2**31 - 1),
    )  # fmt: skip
    check(case, backward=False)


@pytest.mark.abi
def test_a_diagonal_of_zeros_changes_nothing():
    case = Case(dtype="bf16", rows=(70, 70), keys=(90, 90), head_dim=64, head_dim_v=64,
                window=CAUSAL, deterministic=True)  # fmt: skip
    plain, shard = Built(case), Built(case)
    zeros = torch.zeros(2, dtype=torch.int32, device=shard.device.memory)
    shard.attention.diagonal = zeros.data_ptr()
    for target in capi.targets():
        with capi.on(target):
            a, b = run(plain), run(shard)
        np.testing.assert_array_equal(a.out, b.out)
        np.testing.assert_array_equal(a.lse, b.lse)


def test_kept_weights_of_a_shard_are_those_of_the_whole():
    whole = oracle.Options(1.0, dropout_p=0.3, seed=5, offset=6)
    bits = oracle.kept(whole, 3, 8, 40, 100)
    shard = oracle.Shard(row=10, key=37, batch=2, head=4, heads=8)
    part = oracle.kept(oracle.Options(**{**whole.__dict__, "shard": shard}), 1, 3, 20, 50)
    np.testing.assert_array_equal(part, bits[4:7, 10:30, 37:87])


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize(("window", "diagonal", "hidden"), [
    (CAUSAL, -5, slice(95, 100)), ((100, -1), 90, slice(0, 20)), ((300, -1), 290, slice(0, 20)),
])  # fmt: skip
def test_nan_in_keys_that_no_row_sees_stays_hidden(dtype, rows, window, diagonal, hidden):
    """Without a diagonal, all windows but the causal one of 70 rows would hide no key at all."""
    case = Case(
        dtype=dtype, rows=(rows,), keys=(100,), group=2, head_dim=64, head_dim_v=64, window=window,
        diagonal=(diagonal + (rows if diagonal > 0 else 0),),
    )  # fmt: skip
    b = Built(case)
    for target in capi.targets():
        with capi.on(target):
            b.k[0, hidden] = b.v[0, hidden] = 0.5
            clean = run(b)
            b.k[0, hidden] = b.v[0, hidden] = torch.nan
            got = run(b)
        # Another kernel may compute tiles with NaN; each is within FP32_RELATIVE of the oracle.
        bound = 1e-2 if dtype == "bf16" else 2 * FP32_RELATIVE * np.abs(clean.out).max()
        np.testing.assert_allclose(got.out, clean.out, rtol=0, atol=bound)
        for name in "qkv":
            bound = 3e-2 if dtype == "bf16" else 1e-5
            np.testing.assert_allclose(got.grads[name], clean.grads[name], atol=bound)
