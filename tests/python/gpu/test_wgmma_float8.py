"""The Hopper kernels that multiply in float8: the planner selects them where it should, and their
results are right. The oracle gets the values that the bytes represent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import capi
import devices
import growing_scores
import tilewise
import yardstick
from bounds import LSE_LOW, check_lse, check_out
from cases import Built, Case, run
from float8_cases import (
    check_built,
    multiplies_in_float8,
    one_head,
    softmax64,
    with_float8,
    with_needle,
)
from index_faults import last_error

BASE = Case("bf16", rows=(150,) * 2, keys=(170,) * 2, heads_kv=2, group=1, head_dim=64,
            head_dim_v=64, window=(-1, 0))  # fmt: skip
MULTIPLIED_IN_FLOAT8 = {
    "full": dict(window=(-1, -1)),
    "causal": {},
    "fp16": dict(dtype="fp16"),
    "window": dict(window=(40, 20)),
    "left window": dict(window=(33, -1)),
    "more rows than keys": dict(keys=(60,) * 2),
    "more keys than rows": dict(keys=(700,) * 2, window=(-1, -1)),
    "equal scores": dict(keys=(700,) * 2, window=(-1, -1), scale=0.0),
    "grouped heads": dict(rows=(300,), keys=(290,), group=3),
    "varlen": dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True, varlen_k=True,
                   tail_q=5, tail_k=3),
    "varlen keys": dict(rows=(150,) * 3, keys=(90, 0, 300), varlen_k=True),
    "used": dict(used_q=(150, 99), used_k=(130, 5)),
    "left padding": dict(leftpad=(3, 160)),
    "cache index": dict(kv_idx=(1, 0)),
    "sinks": dict(sinks=True),
    "negative scale": dict(scale=-0.2),
    "zero scale": dict(scale=0.0),
    "learned scale": dict(scale_ptr=True),
    "strides": dict(order=(0, 2, 1, 3), pad=16),
    "many heads": dict(rows=(70,), keys=(70,), heads_kv=12, window=(-1, -1)),
    "head dim 16": dict(head_dim=16, head_dim_v=16),
    "head dim 80/112": dict(head_dim=80, head_dim_v=112),
    "head dim 128": dict(head_dim=128, head_dim_v=128),
    "head dim 128, full": dict(head_dim=128, head_dim_v=128, keys=(400,) * 2, window=(-1, -1)),
    "head dim 192/128": dict(head_dim=192, head_dim_v=128),
    "head dim 128, varlen": dict(rows=(130, 0, 3, 257), keys=(90, 20, 0, 300), varlen_q=True,
                                 varlen_k=True, head_dim=128, head_dim_v=128),
}  # fmt: skip


def kernel_of(b: Built) -> str:
    return capi.plan(b.attention).kernel.decode()


@pytest.fixture(autouse=True)
def float8_products(device):
    b = Built(BASE)
    with_float8(b, factors=False, queries=True)
    if device.name == "cpu" or not multiplies_in_float8(kernel_of(b)):
        pytest.skip("this device, or this build, has no products in float8")


@pytest.mark.abi
@pytest.mark.parametrize("option", MULTIPLIED_IN_FLOAT8)
def test_every_option_multiplies_in_float8(option):
    case = dataclasses.replace(BASE, **MULTIPLIED_IN_FLOAT8[option])
    b = Built(case)
    with_float8(b, factors=True, signed=option in ("causal", "varlen"), queries=True)
    if case.head_dim > 128 and devices.current().name == "emulator":
        pytest.skip("the emulator's usual build has no tile of this head dimension")
    assert multiplies_in_float8(kernel_of(b)), kernel_of(b)
    check_built(b)


@pytest.mark.abi
def test_a_nan_in_a_value_reaches_the_rows_that_see_it():
    """Row i sees the keys up to i + 20; the NaN is in an edge tile of the rows before it."""
    case = dataclasses.replace(BASE, heads_kv=1)
    b = Built(case)
    with_float8(b, factors=True, queries=True)
    want = b.expected().out
    b.bytes["v"][0, 100, 0, 3] = 0x7F
    for target in capi.targets():
        with capi.on(target):
            out = run(b, backward=False).out
        sees = np.arange(150) >= 80
        assert np.isnan(out[:150][sees, 0, 3]).all(), target
        seen_by_none = out.copy()
        seen_by_none[:150][sees, 0, 3] = want[:150][sees, 0, 3]
        assert np.abs(seen_by_none - want).max() <= 2**-4 * np.abs(want).max(), target


@pytest.mark.abi
@pytest.mark.parametrize("level", growing_scores.LEVELS)
@pytest.mark.parametrize("window", [(-1, -1), (300, 0)])
@pytest.mark.parametrize("share", [1.0, 1 / 16])
def test_scores_that_grow(share, window, level, device):
    """m moves when weights would exceed the range of float8."""
    exact = device.name == "emulator"  # by default
    if share == 1.0 and not exact:
        pytest.skip("tensor cores lose what is small beside a product of 64 and more")
    b = Built(
        dataclasses.replace(
            BASE, rows=(600,), keys=(600,), heads_kv=1, scale=1.0, window=window, seed=2
        )
    )
    growing_scores.add_level(b, level, share)
    with_float8(b, factors=False, queries=True)
    assert multiplies_in_float8(kernel_of(b)), kernel_of(b)
    # 64 products, each truncated to 14 bits of the largest one: 0.9e-3 with truncated sums.
    lse_unit = LSE_LOW if exact else 2**-9
    growing_scores.check(b, run(b, backward=False), b.expected(), unit=2**-4, lse_unit=lse_unit)


@pytest.mark.abi
def test_the_largest_weight_of_a_row_is_not_rounded():
    """Few weights of a row count where scores have a deviation of 3. With another largest weight
    than a power of two the error is twice as large."""
    b = Built(Case("fp16", rows=(128,), keys=(700,), heads_kv=2, head_dim=64, head_dim_v=64,
                   spread=3.0))  # fmt: skip
    with_float8(b, factors=False, queries=True)
    want = b.expected().out
    for target in capi.targets():
        with capi.on(target):
            error = run(b, backward=False).out - want
        assert np.linalg.norm(error) <= 2**-6 * np.linalg.norm(want), target


@pytest.mark.abi
def test_scores_beyond_the_range_of_exponents_are_recomputed():
    """Rows whose weights fp32 exponents would round are computed again, without float8."""
    case = dataclasses.replace(BASE, window=(-1, -1), scale=300.0)
    b = Built(case)
    with_float8(b, factors=False, queries=True)
    want = b.expected()
    yard = yardstick.errors(b, want)
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False)
        check_out(got.out, want, case.dtype, yard, target)
        check_lse(got.lse, want.lse, case.dtype, yard, target)


@pytest.mark.abi
def test_keys_out_of_order_lose_every_sequence():
    """The tiles of their transposed values overlap, also with those of sequences that fit."""
    b = Built(dataclasses.replace(BASE, rows=(150,) * 3, keys=(200, 180, 300), varlen_q=True,
                                  varlen_k=True))  # fmt: skip
    with_float8(b, factors=False, queries=True)
    assert multiplies_in_float8(kernel_of(b)), kernel_of(b)
    last_error()
    assert np.isfinite(run(b, backward=False).out).all() and last_error() is None
    b.meta["cu_seqlens_k"][1:3] = torch.tensor([400, 150])
    got = run(b, backward=False)
    assert np.isnan(got.out).all() and np.isnan(got.lse).all()
    error = last_error()
    assert error is not None and error.array.decode() == "cu_seqlens_k" and error.value == 150


@pytest.mark.abi
def test_sums_of_14_bits_end_after_a_key_tile(monkeypatch, device):
    """Each key tile has a sum of its own, so that means of positive values lose little."""
    if device.name != "emulator":
        pytest.skip("an emulated GPU may keep all bits")
    b = Built(Case("fp16", rows=(80,), keys=(2000,), head_dim=64, head_dim_v=64))
    b.v.abs_()
    with_float8(b, factors=False, queries=True)
    assert multiplies_in_float8(kernel_of(b)), kernel_of(b)
    outs = []
    for sums in ("rounded", "truncated"):
        monkeypatch.setenv("TILEWISE_EMULATOR_SUMS", sums)
        outs.append(run(b, backward=False).out)
    assert 0 < 1 - (outs[1] / outs[0]).mean() < 2**-10


# --- accuracy over long sequences -----------------------------------------------------------------

HEADS = 80  # so many tiles that their keys are not split


def error_of(q, k, v) -> tuple[np.ndarray, np.ndarray]:
    """out of one of many equal heads minus the exact one, and the exact one."""
    heads = [devices.put(x)[None, :, None].expand(1, len(x), HEADS, 64) for x in (q, k, v)]
    assert "cuda.wgmma.forward.f8" in str(tilewise.explain(*heads))
    out = tilewise.attention(*heads)
    want = softmax64(*(x.double().cpu().numpy() for x in (q, k, v)))
    return out[0, :, 0].double().cpu().numpy() - want, want


@pytest.mark.tensors
def test_the_error_does_not_grow_with_the_keys():
    def relative(keys: int) -> float:
        error, want = error_of(*one_head(128, keys))
        return float(np.linalg.norm(error) / np.linalg.norm(want))

    # The rounding of weights to four bits: 2^-4 or less of each, 2^-5.3 in the mean.
    assert relative(65536) <= 1.25 * relative(4096) <= 1.25 * 2**-5


@pytest.mark.tensors
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.77, 1.0])
def test_a_needle_in_128k_keys(depth):
    q, k, v = with_needle(128, depth)
    error, want = error_of(q, k, v)
    assert want.min() > 2.0 and np.abs(error).max() <= 2**-4 * np.abs(want).max()
