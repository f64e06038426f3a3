"""The kernels of datacenter Blackwell: where the planner takes them, and that they are right.

No GPU has proved them, so the planner takes them only with TILEWISE_UNPROVED=1, and no other test
runs them. The emulator runs them with TILEWISE_EMULATOR_SM=100.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import capi
import oracle
from cases import Built, Case, check, run
from nonfinite_cases import expect, same

FAMILY = "cuda.tcgen05"


def kernel(case: Case) -> str:
    """The kernel that the planner selects for the forward."""
    return capi.plan(Built(case).attention).kernel.decode()


# Rows of grouped heads share a tile of other kernels up to 256, so there are more.
BASE = Case("bf16", rows=(300,) * 2, keys=(280,) * 2, heads_kv=1, group=2, head_dim=64,
            head_dim_v=64, window=(-1, 0))  # fmt: skip


@pytest.fixture
def blackwell(device):
    if device.name == "cpu":
        pytest.skip("CUDA kernels")
    if not kernel(BASE).startswith(FAMILY):
        pytest.skip(f"no {FAMILY} on this GPU or in this build, or TILEWISE_UNPROVED is not 1")


VARLEN = dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True, varlen_k=True,
              group=1)  # fmt: skip
OPTIONS = {
    "full": dict(window=(-1, -1)),
    "causal": {},
    "window": dict(window=(40, 20)),
    "left window": dict(window=(33, -1)),
    "more rows than keys": dict(keys=(60,) * 2),
    "more keys than rows": dict(keys=(700,) * 2),
    "no keys": dict(keys=(0,) * 2),
    "one tile": dict(rows=(100,), keys=(100,), group=1),
    "several heads": dict(rows=(270,), keys=(130,), heads_kv=3),
    "varlen": dict(VARLEN, tail_q=5, tail_k=3),
    "varlen, full": dict(VARLEN, window=(-1, -1)),
    "varlen keys": dict(rows=(300,) * 3, keys=(90, 0, 300), varlen_k=True),
    "used": dict(used_q=(300, 99), used_k=(130, 5)),
    "left padding": dict(leftpad=(3, 160)),
    "cache index": dict(kv_idx=(1, 0)),
    "sinks": dict(sinks=True),
    "sinks without keys": dict(sinks=True, keys=(60,) * 2),
    "negative scale": dict(scale=-0.2),
    "zero scale": dict(scale=0.0),
    "large scale": dict(scale=9.0),
    "learned scale": dict(scale_ptr=True),
    "strides": dict(order=(0, 2, 1, 3), pad=8),
    "long": dict(rows=(1100,), keys=(1100,), group=1),
    "fp16": dict(dtype="fp16"),
    "fp16, window": dict(dtype="fp16", window=(40, 20), head_dim=128, head_dim_v=128),
    **{f"head dim {d}": dict(head_dim=d, head_dim_v=d) for d in (8, 40, 72, 80, 96, 104, 128)},
    "fp16, head dim 96": dict(dtype="fp16", head_dim=96, head_dim_v=96),
    "head dim 40/96": dict(head_dim=40, head_dim_v=96),
    "head dim 128, full": dict(head_dim=128, head_dim_v=128, window=(-1, -1), keys=(600,) * 2),
    "head dim 128, varlen": dict(VARLEN, head_dim=128, head_dim_v=128),
}  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_and_is_right(option, blackwell):
    case = dataclasses.replace(BASE, **OPTIONS[option])
    assert kernel(case).startswith(FAMILY), kernel(case)
    check(case, backward=False)


REFUSED = {
    "few rows": dict(rows=(20,), keys=(100,)),
    "grouped heads that share a tile": dict(rows=(200,), keys=(100,)),
    "softcap": dict(softcap=5.0),
    "ALiBi": dict(alibi="bh"),
    "bias": dict(bias="bhr"),
    "dropout": dict(dropout_p=0.3),
    "pages": dict(page_size=32),
    "head dim": dict(head_dim=136, head_dim_v=136),
    "rows that are not aligned": dict(head_dim=60, head_dim_v=60),
}


@pytest.mark.abi
@pytest.mark.parametrize("option", REFUSED)
def test_others_serve_what_it_does_not_compute(option, blackwell):
    assert not kernel(dataclasses.replace(BASE, **REFUSED[option])).startswith(FAMILY)


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(2))
def test_results_do_not_change_from_run_to_run(seed, blackwell):
    case = dataclasses.replace(BASE, seed=seed, head_dim=128, head_dim_v=128)
    first, second = (run(Built(case), backward=False) for _ in range(2))
    assert np.array_equal(first.out, second.out)
    assert np.array_equal(first.lse, second.lse)


@pytest.mark.abi
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("key", [0, 127, 200])
def test_what_is_not_finite_reaches_only_rows_that_see_it(key, value, tensor, blackwell):
    b = Built(dataclasses.replace(BASE, head_dim=128, head_dim_v=128))
    clean = run(b, backward=False)
    getattr(b, tensor)[0, key, 0, 7] = value
    got = run(b, backward=False)
    rows = oracle.visible(b.options(), 0, b.case.rows[0], b.case.keys[0])[:, key]
    columns = np.arange(128) == 7 if tensor == "v" else np.ones(128, bool)
    n = len(rows)  # of the first sequence; out has the rows of all sequences
    affected = np.zeros(got.out.shape, bool)
    affected[:n] = rows[:, None, None] & columns
    if tensor == "v" or np.isnan(value):
        expect(got.out, clean.out, affected, "bf16", f"{tensor}[{key}]={value}")
    unseen = np.concatenate([~rows, np.ones(len(got.out) - n, bool)])
    assert same(got.out[unseen], clean.out[unseen], "bf16")


@pytest.mark.abi
@pytest.mark.parametrize("tensor", ["k", "v"])
def test_rows_behind_the_keys_of_a_sequence_may_hold_anything(tensor, blackwell):
    """The same bits as with zeros there: the kernel zeroes them and recomputes no tile."""
    used = (130, 5)
    b = Built(dataclasses.replace(BASE, used_k=used, window=(-1, -1)))
    results = []
    for filler in (0.0, np.nan):
        for sequence, keys in enumerate(used):
            getattr(b, tensor)[sequence, keys:] = filler
        results.append(run(b, backward=False))
    assert np.array_equal(results[0].out, results[1].out)
    assert np.array_equal(results[0].lse, results[1].lse)


@pytest.mark.abi
def test_scores_beyond_the_range_of_exponents_are_recomputed(blackwell):
    check(dataclasses.replace(BASE, spread=4000.0, scale=1.0), backward=False)
