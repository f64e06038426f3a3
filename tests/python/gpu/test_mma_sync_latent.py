"""Latent caches of 576 columns (MLA) on tensor cores: a tile of keys is also that of the values."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import capi
from cases import Built, Case, check, run
from nonfinite_cases import expect
from test_huge_scores_cuda import compare

pytestmark = pytest.mark.abi("cuda", "emulator")

LATENT = Case("bf16", rows=(1,), keys=(150,), group=16, latent=True, head_dim=576, head_dim_v=512,
              scale=192**-0.5)  # fmt: skip


def latent(**changes: object) -> Case:
    return dataclasses.replace(LATENT, **changes)


def kernel(case: Case) -> str:
    return capi.plan(Built(case).attention).kernel.decode()


@pytest.fixture(autouse=True)
def has_kernels():
    """Kernels from sm_80 on, unless only a part of the library is built."""
    info = capi.plan(Built(LATENT).attention)
    if not info.kernel.decode().startswith("cuda.mma_sync"):
        pytest.skip(info.why.decode())


CASES = {
    # At most 16 rows and heads together: a tile of 16 rows.
    "full lengths": latent(),
    "lengths": latent(rows=(1,) * 3, keys=(150,) * 3, used_k=(143, 0, 33), sinks=True),
    "two splits": latent(dtype="fp16", splits=2),
    "five splits": latent(keys=(260,), used_k=(251,), splits=5),
    "causal rows": latent(dtype="fp16", rows=(4,), group=4, window=(-1, 0), splits=1),
    "few heads": latent(dtype="fp16", group=5, window=(40, 0)),
    "pages of 1": latent(rows=(1,) * 2, keys=(120,) * 2, page_size=1, used_k=(120, 31)),
    "pages of 16": latent(dtype="fp16", rows=(2,) * 2, keys=(144,) * 2, group=8, page_size=16,
                          used_k=(17, 140), window=(-1, 0), sinks=True),
    "pages of 64": latent(rows=(1,) * 3, keys=(192,) * 3, page_size=64, used_k=(192, 0, 65),
                          splits=5),
    "pages of 256": latent(dtype="fp16", keys=(512,), page_size=256, used_k=(300,)),
    "shared pages": latent(rows=(1,) * 2, keys=(96,) * 2, page_size=48, share_pages=True),
    "padding": latent(rows=(1,) * 2, keys=(80,) * 2, page_size=16, used_k=(80, 60),
                      leftpad=(3, 17), scale=-0.05),
    "rows of a cache": latent(dtype="fp16", rows=(1,) * 2, keys=(90,) * 2, kv_idx=(2, 0), pad=8),
    "narrower": latent(head_dim=544, head_dim_v=480),
    "several key heads": latent(heads_kv=2, group=8, keys=(70,), pad=8),
    # Tiles of more rows, of which some are full and several belong to a sequence.
    "64 heads": latent(group=64, keys=(100,), window=(-1, 0)),
    "rows of 16 heads": latent(dtype="fp16", rows=(4,), keys=(100,), window=(-1, 0), sinks=True,
                               splits=2),
    "two rows of 16 heads": latent(rows=(2,) * 2, keys=(64,) * 2, page_size=16, used_k=(64, 41),
                                   window=(-1, 0)),
    "128 heads": latent(group=128, keys=(80,), page_size=16, used_k=(67,), splits=2),
    "rows of 128 heads": latent(dtype="fp16", rows=(2,), group=128, keys=(40,), window=(-1, 0)),
    "lengths of 24 heads": latent(rows=(2,) * 3, keys=(64,) * 3, group=24, page_size=64,
                                  used_k=(1, 0, 50), window=(30, 0)),
    "packed": latent(dtype="fp16", rows=(5, 0, 1), keys=(35, 9, 20), varlen_q=True, varlen_k=True,
                     tail_q=2, window=(-1, 0)),
    "prefill": latent(rows=(70,), keys=(90,), group=1, window=(-1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_oracle(name):
    assert kernel(CASES[name]).startswith("cuda.mma_sync")
    check(CASES[name], backward=False)


@pytest.mark.parametrize("name", ["lengths", "padding", "lengths of 24 heads"])
def test_repeats(name):
    b = Built(CASES[name])
    once, again = (run(b, backward=False) for _ in range(2))
    assert np.array_equal(once.out, again.out) and np.array_equal(once.lse, again.lse)


ELSEWHERE = {
    "values of their own": (dict(latent=False), "values that are the first 512 columns"),
    "more values": (dict(head_dim_v=544), "values that are the first 512 columns"),
    "softcap": (dict(softcap=5.0), "take no softcap"),
    "bias": (dict(bias="h"), "take no softcap"),
    "out": (dict(float32_out=True), "out of another dtype"),
    "mask": (dict(mask_ranges=(((0, 1, 0, 60, 0),),)), "take no softcap"),
    "alignment": (dict(pad=1), "multiples of 16 bytes"),
    "columns": (dict(head_dim=570), "multiples of 16 bytes"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_other_options_run_elsewhere(name):
    changes, reason = ELSEWHERE[name]
    case = latent(keys=(70,), group=4, **changes)
    b = Built(case)
    info = capi.plan(b.attention)
    assert info.kernel.decode().startswith("cuda.simt") and reason in info.why.decode(), info.why
    check(case, backward=False)


@pytest.mark.parametrize("column", [7, 570])
@pytest.mark.parametrize("name", ["causal rows", "rows of 16 heads"])
def test_nan_reaches_the_rows_that_see_it(name, column):
    """A masked key of the last tile is recomputed, because 0 * NaN is NaN on tensor cores."""
    b = Built(case := CASES[name])
    clean = run(b, backward=False)
    keys = case.keys[0]
    b.k[0, keys - 2, 0, column] = torch.nan
    got = run(b, backward=False)
    sees = np.arange(case.rows[0]) >= case.rows[0] - 2
    expect(got.out, clean.out, sees[:, None, None], case.dtype, f"{name} out")
    expect(got.lse, clean.lse, sees[:, None], case.dtype, f"{name} lse")


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30, -1e6])
@pytest.mark.parametrize("name", ["causal rows", "five splits", "64 heads"])
def test_scores_of_any_size(name, scale):
    b = Built(latent(**{**vars(CASES[name]), "used_k": None, "scale": scale}))
    for x in (b.q, b.k):
        x.copy_(torch.from_numpy(b.rng.integers(-2, 3, x.shape)).to(x.dtype))
    compare(b, run(b, backward=False))
