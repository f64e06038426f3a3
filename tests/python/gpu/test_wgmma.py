"""The Hopper kernels: the planner selects them where it should, and their results are right.

Random problems of test_properties.py mostly have unaligned rows, which other kernels take. Here
rows start at multiples of 16 bytes. TILEWISE_TEST_EXAMPLES=<n> draws n new problems per dtype
instead of the default ones; TILEWISE_TEST_EXAMPLES_PER_DTYPE=<n> limits the default ones to n.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

import capi
import devices
import growing_scores
import nonfinite_cases
import oracle
from bounds import LSE_LOW
from cases import Built, Case, check, run
from strategies import cases

THOROUGH = int(os.environ.get("TILEWISE_TEST_EXAMPLES", "0"))
SHARDS = 8
EXAMPLES = {"cuda": 600, "emulator": 120}
if "TILEWISE_TEST_EXAMPLES_PER_DTYPE" in os.environ:
    EXAMPLES = dict.fromkeys(EXAMPLES, int(os.environ["TILEWISE_TEST_EXAMPLES_PER_DTYPE"]))
FAMILY = "cuda.wgmma"


def aligned(case: Case) -> Case:
    """The same problem with the alignment that these kernels require."""
    return dataclasses.replace(
        case,
        head_dim=min(256, -(-case.head_dim // 8) * 8),
        head_dim_v=min(256, -(-case.head_dim_v // 8) * 8),
        shift=0,
        pad=case.pad // 8 * 8,
    )


def kernels(case: Case) -> tuple[str, str]:
    """The kernels that the planner selects for forward and backward."""
    b = Built(case)
    forward = capi.plan(b.attention).kernel.decode()
    return forward, capi.plan(b.attention, b.gradients()).kernel.decode()


@pytest.fixture(autouse=True)
def hopper(device):
    if device.name == "cpu":
        pytest.skip("CUDA kernels")
    for kernel in kernels(Case("bf16", rows=(100,), keys=(100,), head_dim=64, head_dim_v=64)):
        if not kernel.startswith(FAMILY):
            pytest.skip(f"no {FAMILY} on this GPU or in this build, or another table is forced")


@pytest.mark.abi
@pytest.mark.parametrize("name", [n for n in nonfinite_cases.CASES if n.startswith("aligned")])
def test_nan_cases_run_on_wgmma(name):
    """The cases of test_nonfinite.py must not be planned for other kernels."""
    case = dataclasses.replace(nonfinite_cases.CASES[name], dtype="bf16")
    assert all(kernel.startswith(FAMILY) for kernel in kernels(case)), kernels(case)


# Rows past those of the sequences count when kernels are chosen, and cost nothing.
MANY = dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True, varlen_k=True,
            tail_q=2100, window=(-1, -1))  # fmt: skip
BASE = Case("bf16", rows=(150,) * 2, keys=(170,) * 2, heads_kv=2, group=2, head_dim=64,
            head_dim_v=64, window=(-1, 0))  # fmt: skip
OPTIONS = {
    "full": dict(window=(-1, -1)),
    "causal": {},
    "window": dict(window=(40, 20)),
    "left window": dict(window=(33, -1)),
    "more rows than keys": dict(keys=(60,) * 2),
    "varlen": dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True, varlen_k=True,
                   tail_q=5, tail_k=3),
    "varlen keys": dict(rows=(150,) * 3, keys=(90, 0, 300), varlen_k=True),
    "used": dict(used_q=(150, 99), used_k=(130, 5)),
    "left padding": dict(leftpad=(3, 160)),
    "cache index": dict(kv_idx=(1, 0)),
    "paged": dict(page_size=16, used_k=(170, 31)),
    "pages of 48": dict(page_size=48, used_k=(170, 49), window=(60, 20)),
    "pages of 64": dict(page_size=64, used_k=(130, 64)),
    "pages of 256": dict(page_size=256, keys=(700, 300), used_k=(521, 256)),
    "pages, varlen": dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True,
                          varlen_k=True, page_size=32),
    "shared pages": dict(page_size=32, share_pages=True, softcap=5.0),
    "pages, head dim 128": dict(page_size=16, used_k=(170, 31), head_dim=128, head_dim_v=128),
    "pages, head dim 192": dict(page_size=64, head_dim=192, head_dim_v=192),
    "pages, head dim 256": dict(page_size=64, used_k=(167, 95), head_dim=256, head_dim_v=256),
    "softcap": dict(softcap=5.0),
    "ALiBi": dict(alibi="bh"),
    "bias": dict(bias="bhr", bias_hides=True),
    "broadcast bias": dict(bias="h", bias_own_dtype=True),
    "aligned bias": dict(bias="hr", bias_own_dtype=True, rows=(290,) * 2, keys=(304,) * 2),
    "sinks": dict(sinks=True),
    "dropout": dict(dropout_p=0.3),
    "dropout of everything": dict(dropout_p=0.999999),
    "dropout of almost nothing": dict(dropout_p=1e-6),
    "every score option": dict(softcap=30.0, alibi="h", bias="b", sinks=True, dropout_p=0.1),
    "learned scale": dict(scale_ptr=True, dlse=True),
    "negative scale": dict(scale=-0.2),
    "zero scale": dict(scale=0.0),
    "deterministic": dict(deterministic=True),
    "strides": dict(order=(0, 2, 1, 3), pad=8),
    "many heads": dict(rows=(70,), keys=(70,), heads_kv=12, window=(-1, -1)),
    "many rows": MANY,
    "many rows, softcap": dict(MANY, softcap=5.0),
    "long": dict(rows=(1100,), keys=(1100,), heads_kv=1),
    "fp16": dict(dtype="fp16"),
    **{f"head dim {d}": dict(head_dim=d, head_dim_v=d) for d in (8, 72, 80, 96, 128, 192, 256)},
    "head dim 192/128": dict(head_dim=192, head_dim_v=128),
    "head dim 40/200": dict(head_dim=40, head_dim_v=200),
    "head dim 128, softcap": dict(head_dim=128, head_dim_v=128, softcap=5.0),
    "head dim 128, every score option": dict(
        softcap=30.0, alibi="h", bias="hr", bias_own_dtype=True, dropout_p=0.1, keys=(312,) * 2,
        head_dim=128, head_dim_v=128),
    "head dim 128, full": dict(head_dim=128, head_dim_v=128, window=(-1, -1)),
    "head dim 256, many rows": dict(MANY, head_dim=256, head_dim_v=256),
    "head dim 256, many rows, softcap": dict(MANY, head_dim=256, head_dim_v=256, softcap=5.0),
    "fp16, many rows": dict(MANY, dtype="fp16"),
    "fp16, many rows, softcap": dict(MANY, dtype="fp16", softcap=5.0),
    "fp16, head dim 256, many rows": dict(MANY, dtype="fp16", head_dim=256, head_dim_v=256),
    "fp16, head dim 256, many rows, softcap": dict(
        MANY, dtype="fp16", head_dim=256, head_dim_v=256, softcap=5.0),
    "head dim 256, dropout": dict(head_dim=256, head_dim_v=256, dropout_p=0.3),
    "head dim 256, deterministic": dict(head_dim=256, head_dim_v=256, deterministic=True),
}  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_and_is_right(option, device):
    case = dataclasses.replace(BASE, **OPTIONS[option])
    for kernel in kernels(case):
        assert kernel.startswith(FAMILY), kernel
    check(case)


@pytest.mark.abi
@pytest.mark.parametrize("pages", [dict(page_size=3), dict(page_size=16, leftpad=(5, 0))])
def test_pages_that_tma_cannot_read_use_mma_sync(pages, device):
    case = dataclasses.replace(BASE, **pages)
    forward, backward = kernels(case)
    assert forward.startswith("cuda.mma_sync"), forward
    assert backward.startswith(FAMILY), backward
    check(case)


# Tiles of a partial last wave, whose keys all CTAs share (Stream-K), on the emulated GPU and
# others.
STREAM_K = {
    "one": {},
    "rows and keys end anywhere": dict(rows=(67,), keys=(1207,), head_dim=56, head_dim_v=56),
    "sinks, lse": dict(sinks=True, dlse=True),
    "negative scale": dict(scale=-0.2),
    "strides": dict(order=(0, 2, 1, 3), pad=8),
    "fp16": dict(dtype="fp16"),
    "head dim 128": dict(head_dim=128, head_dim_v=128),
    "head dim 192/128": dict(head_dim=192, head_dim_v=128),
    "head dim 256": dict(head_dim=256, head_dim_v=256),
    "more tiles than CTAs": dict(rows=(300,) * 2, keys=(4000,) * 2, heads_kv=50),
    "grouped heads": dict(rows=(500,), keys=(3000,), heads_kv=8, group=9, head_dim=128,
                          head_dim_v=128),
    "D 256, more tiles": dict(rows=(300,), keys=(3000,), heads_kv=45, head_dim=256, head_dim_v=256),
    "many shares": dict(rows=(100,), keys=(40000,)),
}  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("option", STREAM_K)
def test_stream_k_tiles_are_right(option, device, monkeypatch):
    monkeypatch.setattr(devices, "EMULATOR_WORK", 3e8)
    values = dict(rows=(70,), keys=(1100,), heads_kv=5, group=1, window=(-1, -1)) | STREAM_K[option]
    case = dataclasses.replace(BASE, **values)
    plan = capi.plan(Built(case).attention)
    assert plan.kernel.decode().startswith(FAMILY)
    assert "Stream-K over the last" in plan.why.decode()
    check(case, backward=False)


# Steps over full tiles compute no maximum: their weights are relative to the maximum of the first
# tiles until sums have grown. Keys are visited from the last one to the first.
GROWING = {
    "full": dict(window=(-1, -1)),
    "causal": {},
    "rows of the first tile see no key": dict(rows=(600,), keys=(557,)),
    "packed heads": dict(rows=(20,), group=8),
    "pages": dict(page_size=16, used_k=(530,)),
    "ALiBi": dict(alibi="h"),
    "two-sided ALiBi": dict(alibi="h", window=(-1, -1)),
    "sinks, lse": dict(sinks=True, dlse=True),
    "varlen": dict(rows=(600, 3), keys=(600, 450), varlen_q=True, varlen_k=True),
    "head dim 128": dict(head_dim=128, head_dim_v=128),
    "head dim 192/128": dict(head_dim=192, head_dim_v=128),
    "head dim 256": dict(head_dim=256, head_dim_v=256),
    "narrow": dict(rows=(300,), keys=(600,)),
    "Stream-K": dict(rows=(70,), keys=(1100,), heads_kv=5, group=1, window=(-1, -1)),
}  # fmt: skip


# Next to a sink, weights of e^-150 vanish entirely.
FAR_FROM_SINKS = ("sinks, lse", "far below")


@pytest.mark.abi
@pytest.mark.parametrize(
    ("option", "level"),
    [x for x in itertools.product(GROWING, growing_scores.LEVELS) if x != FAR_FROM_SINKS],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_scores_that_grow(dtype, option, level):
    values = dict(rows=(600,), keys=(600,), heads_kv=1, scale=1.0) | GROWING[option]
    case = dataclasses.replace(BASE, dtype=dtype, **values)
    assert kernels(case)[0].startswith(FAMILY), kernels(case)
    b = Built(case)
    growing_scores.add_level(b, level)
    want = b.expected()
    growing_scores.check(b, run(b, backward=False), want)


@pytest.mark.abi
@pytest.mark.parametrize("head_dim", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_row_whose_first_tile_is_full(dtype, head_dim, device):
    """No earlier tile tells the row where its scores are: here they are as far from 0 as
    possible."""
    case = dataclasses.replace(BASE, dtype=dtype, rows=(320,), keys=(640,), scale=1.0,
                               head_dim=head_dim[0], head_dim_v=head_dim[1])  # fmt: skip
    tile = capi.plan(Built(case).attention).tile_k
    for more in (
        tile - 1,
        tile,
        tile + 63,
    ):  # with and without a tile that ends at a warpgroup's first row
        b = Built(dataclasses.replace(case, keys=(320 + more,)))
        b.q.mul_(0.25)
        b.q[..., 0] = 1
        b.k[..., 0] = -150
        want, got = b.expected(), run(b, backward=False)
        assert got.kernels[0].startswith(FAMILY), got.kernels
        unit = {"bf16": 2**-6, "fp16": 2**-9}[dtype]
        assert np.abs(got.out - want.out).max() <= unit * np.abs(want.out).max()
        assert np.abs(got.lse - want.lse).max() <= LSE_LOW * np.abs(want.lse).max()


@pytest.mark.abi
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("hides", [-np.inf, -1e4, -3e38])
@pytest.mark.parametrize("bias", ["", "hr"])
def test_bias_that_hides_the_last_keys(bias, hides, head_dim, device):
    """Maxima of hidden tiles say nothing about later scores, whose weights would overflow."""
    values = dict(rows=(150,), keys=(900,), window=(-1, -1), scale=1.0)
    values |= dict(bias=bias, bias_own_dtype=True)
    case = dataclasses.replace(BASE, head_dim=head_dim, head_dim_v=head_dim, **values)
    b = Built(case)
    b.q.mul_(0.25)
    b.q[..., 0] = 1
    b.k[..., 0] = -150
    b.bias[..., 500:] = hides
    b.bias[..., 100:140, :] = -np.inf  # if the bias has rows
    want, got = b.expected(), run(b, backward=False)
    assert got.kernels[0].startswith(FAMILY), got.kernels
    assert np.abs(got.out - want.out).max() <= 2**-6 * np.abs(want.out).max()
    seen = np.isfinite(want.lse)
    assert np.array_equal(seen, np.isfinite(got.lse))
    assert np.abs(got.lse[seen] - want.lse[seen]).max() <= LSE_LOW * np.abs(want.lse[seen]).max()


# A bias in the dtype of q is loaded one key tile ahead, 16 bytes or one element at a time.
BIASES = {
    "whole tiles": dict(rows=(256,), keys=(384,)),
    "aligned": dict(rows=(290,) * 2, keys=(304,) * 2, window=(-1, 0)),
    "aligned, keys end anywhere": dict(
        rows=(70,) * 4, keys=(301, 304, 130, 5), varlen_k=True, bias="bhr"),
    "not aligned": dict(rows=(290,), keys=(301,)),
    "not aligned, even": dict(rows=(150,) * 2, keys=(290,) * 2, window=(-1, 0), bias="bhr"),
    "few keys": dict(rows=(140,), keys=(24,)),
    "window": dict(rows=(420,), keys=(424,), window=(40, 20)),
    "window, not aligned": dict(rows=(420,), keys=(421,), window=(40, 20)),
    "per head": dict(rows=(150,) * 2, keys=(400,) * 2, bias="h"),
    "one row": dict(rows=(150,) * 2, keys=(400,) * 2, bias=""),
    "per sequence": dict(rows=(150,) * 3, keys=(400, 0, 77), varlen_k=True, bias="b"),
    "packed heads": dict(rows=(20,) * 2, keys=(304,) * 2, group=8, bias="bhr"),
    "packed heads, not aligned": dict(rows=(20,) * 2, keys=(303,) * 2, group=8, bias="bhr"),
    "splits": dict(rows=(20,), keys=(904,), group=8, splits=3),
    "splits, not aligned": dict(rows=(20,), keys=(903,), group=8, splits=3),
    "pages": dict(rows=(150,) * 2, keys=(304,) * 2, page_size=16, used_k=(290, 31)),
    "many tiles": dict(rows=(130, 3, 240, 64), keys=(90, 20, 300, 150), varlen_q=True,
                       varlen_k=True, heads_kv=3, bias="bhr", window=(-1, 0)),
    "with ALiBi": dict(rows=(290,), keys=(304,), alibi="h"),
    "with -inf": dict(rows=(290,), keys=(304,), bias_hides=True),
    "in fp32": dict(rows=(290,), keys=(304,), bias_own_dtype=False),
}  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("head_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192),
                                      (256, 256)])  # fmt: skip
@pytest.mark.parametrize("bias", BIASES)
def test_bias_is_right(bias, head_dim, device):
    values = dict(bias="hr", bias_own_dtype=True, window=(-1, -1)) | BIASES[bias]
    case = dataclasses.replace(BASE, head_dim=head_dim[0], head_dim_v=head_dim[1], **values)
    assert kernels(case)[0].startswith(FAMILY), kernels(case)
    check(case, backward=False)


CONTAMINATED = {
    "causal": dict(rows=(300,) * 2, keys=(310,) * 2),
    "window": dict(rows=(300,) * 2, keys=(310,) * 2, window=(70, 20)),
    "sinks": dict(sinks=True),
    "score": dict(softcap=9.0, alibi="bh", bias="hr"),
    "packed heads": dict(rows=(20,) * 2, keys=(300,) * 2, group=8),
    "packed heads, splits, sinks": dict(
        rows=(20,) * 2, keys=(300,) * 2, group=8, splits=3, sinks=True),
    "pages": dict(page_size=16, used_k=(170, 31)),
    "head dim 96": dict(head_dim=96, head_dim_v=96),
    "head dim 40/200": dict(head_dim=40, head_dim_v=200),
}  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("behind", [1, 5, 15])
@pytest.mark.parametrize("option", CONTAMINATED)
def test_hidden_nan_stays_hidden(option, behind):
    """Rows of a tile with a NaN in keys that they do not see are recomputed by other code."""
    case = dataclasses.replace(BASE, **CONTAMINATED[option])
    assert kernels(case)[0].startswith(FAMILY), kernels(case)
    b = Built(case)
    key = case.keys[0] - behind
    place = (0, key)
    if case.page_size:
        place = (int(b.meta["block_table"][0, key // case.page_size]), key % case.page_size)
    clean = run(b, backward=False)
    b.k[place] = b.v[place] = torch.nan
    got = run(b, backward=False)
    see = np.zeros(got.out.shape[0], bool)
    see[: case.rows[0]] = oracle.visible(b.options(), 0, case.rows[0], case.keys[0])[:, key]
    nonfinite_cases.expect(got.out, clean.out, see[:, None, None], "bf16", f"out {option}")
    nonfinite_cases.expect(got.lse, clean.lse, see[:, None], "bf16", f"lse {option}")


def random_problems(dtype: str, shard: int, device: str, served: Counter):
    @settings(
        max_examples=(THOROUGH or EXAMPLES[device]) // SHARDS,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
    )
    @given(case=cases(dtype, small=device == "emulator").map(aligned))
    def body(case: Case) -> None:
        served.update(name.rpartition(".")[0] for name in check(case))

    return body if THOROUGH else seed(shard)(body)


@pytest.mark.abi
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_random_problems(dtype, shard, device, record_property):
    served: Counter = Counter()
    random_problems(dtype, shard, device.name, served)()
    record_property("served", dict(served))
    # Few rows go to another kernel; the others run on the kernels tested here.
    share = sum(n for name, n in served.items() if name.startswith(FAMILY)) / served.total()
    assert share > 0.3 and len([n for n in served if n.startswith(FAMILY)]) == 2, served


@pytest.mark.abi
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("varlen", [False, True])
def test_repeated_runs_are_bitwise_equal(head_dim, varlen, device):
    """Repeated runs reveal races sooner or later: without races all results are bitwise equal."""
    launches = 2 if device.name == "emulator" else 50
    case = dataclasses.replace(
        BASE, rows=(300, 190), keys=(310, 200), head_dim=head_dim, head_dim_v=head_dim,
        varlen_q=True, varlen_k=True, deterministic=True,
    ) if varlen else dataclasses.replace(
        BASE, rows=(700,), keys=(700,), head_dim=head_dim, head_dim_v=head_dim, deterministic=True
    )  # fmt: skip
    b = Built(case)
    first = run(b)
    for _ in range(launches - 1):
        again = run(b)
        assert again.out.tobytes() == first.out.tobytes()
        assert again.lse.tobytes() == first.lse.tobytes()
        for name, grad in first.grads.items():
            assert again.grads[name].tobytes() == grad.tobytes(), name
