"""Masks of problems with few rows."""

from __future__ import annotations

import math

import numpy as np
import pytest

import tilewise
from cases import Built, Case, check, run
from tilewise import masks


@pytest.mark.abi
@pytest.mark.parametrize("kind", ["mask_ranges", "mask_blocks"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("splits", [0, 3])
def test_decoding_reads_masks(kind, dtype, splits, device):
    """Rows of several heads against the oracle; a hidden key may hold anything."""
    ranges = (((0, 1, 0, 90, 0), (0, 1, 260, 300, 0), (1, 2, 90, 500, 3)),)
    value = ranges if kind == "mask_ranges" else "h"
    case = Case(
        dtype=dtype, rows=(2,), keys=(500,), heads_kv=2, group=2, head_dim=32, head_dim_v=32,
        splits=splits, spread=0.5, **{kind: value},
    )  # fmt: skip
    check(case)
    clean, dirty = Built(case), Built(case)
    seen = np.broadcast_to(clean.mask[0], (4, 2, 500))
    key = int(np.argmax((~seen).any((0, 1)) & seen.any((0, 1))))
    dirty.k[0, key], dirty.v[0, key] = math.nan, math.inf
    want, got = run(clean, backward=False), run(dirty, backward=False)
    hidden = ~seen[:, :, key].T  # [rows, heads]
    assert hidden.any() and not hidden.all()
    # Kernels of tensor cores leave a tile with a NaN to others, which add in another order.
    slack = 0.0 if device.name == "cpu" else 2**-7 if dtype == "bf16" else 1e-5
    np.testing.assert_allclose(got.out[hidden], want.out[hidden], slack, slack)
    np.testing.assert_allclose(got.lse[hidden], want.lse[hidden], slack, slack)
    assert np.isnan(got.out[~hidden]).all()


def test_few_rows_with_a_mask_are_decoded():
    q, k = np.zeros((1, 1, 4, 32), np.float32), np.zeros((1, 500, 2, 32), np.float32)
    plan = tilewise.explain(q, k, k, mask=masks.Ranges([[0, 1]], [[0, 90]])).forward
    assert "stream" in plan.why


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["mask_ranges", "mask_blocks"])
def test_huge_scores_of_splits_do_not_reach_hidden_keys(dtype, kind):
    """Splits with such scores are not combined: their rows are computed again, with the mask. The
    largest score has all the weight."""
    value = (((0, 1, 0, 90, 0), (0, 1, 260, 300, 0), (1, 2, 90, 500, 3)),)
    case = Case(
        dtype=dtype, rows=(2,), keys=(500,), heads_kv=2, group=2, head_dim=32, head_dim_v=32,
        splits=3, scale=1e25, **{kind: value if kind == "mask_ranges" else "h"},
    )  # fmt: skip
    b = Built(case)
    got = run(b, backward=False)
    seen = np.broadcast_to(b.mask[0], (4, 2, 500))
    q, k, v = (x[0].double().cpu().numpy() for x in (b.q, b.k, b.v))
    for row, head in np.ndindex(2, 4):
        scores = np.where(seen[head, row], k[:, head // 2] @ q[row, head], -np.inf)
        want = v[scores.argmax(), head // 2] if seen[head, row].any() else np.zeros(32)
        np.testing.assert_allclose(got.out[row, head], want, 1e-6, 1e-6)
