"""Scores of any size in the CUDA kernels: rows that are recomputed, also within splits and pages,
and the backward of cuda.mma_sync. Products of q and k are integers, exact in any order; the
reference is softmax in float64 over scores rounded to fp32, as in every fp32 computation. Gradients
of cuda.wgmma are tested with a bias only: docs/numerics.md states the limits of its plain form."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bounds import FP32_RELATIVE, UNIT
from cases import Built, Case, Outcome, flat, float64, run

pytestmark = pytest.mark.abi("cuda", "emulator")
FP32_MIN = float(np.finfo(np.float32).min)

SHAPES = {
    "prefill": Case(rows=(70,), keys=(150,), group=2, head_dim=64, head_dim_v=64),
    "edges": Case(rows=(33,), keys=(90,), head_dim=64, head_dim_v=64, window=(-1, 0)),
    "decoding": Case(rows=(1,), keys=(300,), group=4, head_dim=64, head_dim_v=64),
    "splits": Case(rows=(2,), keys=(700,), group=2, head_dim=64, head_dim_v=64, splits=3),
    "pages": Case(
        rows=(3,), keys=(96,), head_dim=64, head_dim_v=64, page_size=16, wanted=frozenset()
    ),
    "wide": Case(
        rows=(20,),
        keys=(140,),
        group=2,
        head_dim=320,
        head_dim_v=320,
        window=(-1, 0),
    ),
    "wide splits": Case(
        rows=(2,),
        keys=(700,),
        group=2,
        head_dim=512,
        head_dim_v=512,
        splits=3,
        wanted=frozenset(),
    ),
}


def rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


def make(shape: str, dtype: str, **changes: object) -> Built:
    wanted = SHAPES[shape].wanted & {"q", "k", "v"}
    b = Built(dataclasses.replace(SHAPES[shape], dtype=dtype, **{"wanted": wanted, **changes}))
    for x in (b.q, b.k):
        x.copy_(torch.from_numpy(b.rng.integers(-2, 3, x.shape)).to(x.dtype))
    return b


def keys_of(b: Built, x: object) -> np.ndarray:
    """The keys, [M, H, D], in the order of the sequence."""
    if not b.case.page_size:
        return flat(x)
    table = np.asarray(b.meta["block_table"].cpu()).reshape(-1)
    return float64(x)[table].reshape(-1, *x.shape[2:])[: b.case.keys[0]]


def weights(b: Built) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p [H, N, M]; the largest score and the log of the sum of exponentials above it, [H, N]."""
    q = np.moveaxis(flat(b.q), 1, 0)
    k = np.repeat(np.moveaxis(keys_of(b, b.k), 1, 0), b.case.group, axis=0)
    s = rounded(rounded(q @ np.swapaxes(k, 1, 2)) * b.scale)
    if b.bias is not None:
        s = rounded(s + np.broadcast_to(float64(b.bias), (1, *s.shape))[0])
    rows, keys = s.shape[1:]
    if b.case.window[1] == 0:
        later = np.arange(keys)[None, :] > np.arange(rows)[:, None] + keys - rows
        s = np.where(later, -np.inf, s)
    sink = np.full((s.shape[0], 1), -np.inf) if b.sinks is None else float64(b.sinks)[:, None]
    highest = np.maximum(s.max(axis=2), sink)
    base = np.where(np.isneginf(highest), 0.0, highest)
    e = np.exp(s - base[:, :, None])
    total = e.sum(axis=2) + np.exp(sink - base)
    with np.errstate(divide="ignore"):
        return e / np.where(total == 0, 1.0, total)[:, :, None], base, np.log(total)


def compare(b: Built, got: Outcome) -> None:
    dtype, group = b.case.dtype, b.case.group
    p, base, log_l = weights(b)
    where = f"{got.kernels} {b.case}"
    v = np.repeat(np.moveaxis(keys_of(b, b.v), 1, 0), group, axis=0)
    out = np.moveaxis(p @ v, 0, 1)
    bound = (4 * UNIT[dtype] if dtype != "fp32" else FP32_RELATIVE) * np.abs(v).max()
    assert np.abs(got.out - out).max() <= bound, where
    seen = ~np.isneginf(log_l.T)
    lse = (base + log_l).T
    assert np.array_equal(np.isneginf(got.lse), ~seen), where
    error = np.abs(got.lse - lse)[seen]
    assert (error <= 1e-6 * np.maximum(8.0, np.abs(lse[seen]))).all(), where
    if got.grads and (b.bias is not None or "wgmma" not in got.kernels[1]):
        dout = np.moveaxis(flat(b.dout), 1, 0)
        dv = np.swapaxes(p, 1, 2) @ dout
        dv = np.moveaxis(dv.reshape(-1, group, *dv.shape[1:]).sum(axis=1), 0, 1)
        largest = np.abs(dv).max()
        bound = (8 * UNIT[dtype] if dtype != "fp32" else 8e-6) * largest
        assert np.abs(got.grads["v"] - dv).max() <= bound, where
        assert all(np.isfinite(x).all() for x in got.grads.values()), where


def hidden(b: Built, where: str) -> np.ndarray:
    key = np.arange(b.case.keys[0])
    third = len(key) // 3
    return {"left": key < 2 * third, "right": key >= third, "all": key >= 0}[where]


@pytest.mark.parametrize("where", ["left", "right", "all"])
@pytest.mark.parametrize("value", [FP32_MIN, -3.3895314e38, -1e10, 1e10, -1e9, -65504.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_masks_of_large_numbers(dtype, shape, value, where):
    if dtype == "fp32" and value == -65504.0:
        pytest.skip("fp32 rounds such scores to 1/256: sums of products in another order differ")
    b = make(shape, dtype, bias="")
    b.bias.copy_(torch.from_numpy(np.where(hidden(b, where), value, 0.0)))
    compare(b, run(b, backward=bool(b.case.wanted)))


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("value", [FP32_MIN, -1e9])
def test_masks_of_large_numbers_in_the_dtype_of_q(value, head_dim):
    """A bias that a Hopper kernel prefetches, and the kernel of large head dimensions."""
    b = make("edges", "bf16", bias="r", bias_own_dtype=True, head_dim=head_dim, head_dim_v=head_dim)
    values = np.zeros(b.bias.shape)
    values[..., : b.case.rows[0] // 2, :] = max(value, float(torch.finfo(torch.bfloat16).min))
    b.bias.copy_(torch.from_numpy(values))
    compare(b, run(b, backward=True))


@pytest.mark.parametrize("sink", [FP32_MIN, -1e10, 0.5, 1e10])
@pytest.mark.parametrize("shape", ["prefill", "splits", "wide", "wide splits"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_sinks_beside_masks(dtype, shape, sink):
    b = make(shape, dtype, bias="", sinks=True)
    b.bias.copy_(torch.from_numpy(np.where(hidden(b, "all"), -1e10, 0.0)))
    b.sinks.fill_(sink)
    compare(b, run(b, backward=bool(b.case.wanted)))


@pytest.mark.parametrize("size", [300.0, 16384.0, 2.0**33, 2.0**55])
@pytest.mark.parametrize("shape", ["prefill", "edges", "wide"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_large_activations(dtype, shape, size):
    b = make(shape, dtype)
    size = float(torch.tensor(size).bfloat16())
    b.q.fill_(size)
    b.k.fill_(size)
    b.k[:, ::7] = size / 2
    compare(b, run(b, backward=bool(b.case.wanted)))
