"""Gradients of head dimensions above 256 on tensor cores: column warps divide the sums of S and dP,
and the sums of dQ take two passes. Each option once; test_properties.py combines them at random."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import capi
from cases import Built, Case, check, run
from nonfinite_cases import expect

pytestmark = pytest.mark.abi("cuda", "emulator")

# Two tiles of rows and three of keys, the last ones partial.
SIZE = dict(rows=(75,), keys=(70,), group=2, head_dim=512, head_dim_v=512, window=(-1, 0),
            dlse=True)  # fmt: skip
DOCUMENTS = (((0, 30, 0, 40, 0), (30, 75, 20, 70, 1)),)
OPTIONS = {
    "full": {"window": (-1, -1)},
    "causal": {},
    "384 columns": {"head_dim": 320, "head_dim_v": 384},
    "different columns": {"head_dim": 264, "head_dim_v": 400},
    "odd columns": {"head_dim": 257, "head_dim_v": 301, "rows": (40,)},
    "window": {"window": (20, 3)},
    "varlen": {"rows": (3, 0, 70), "keys": (40, 5, 33), "varlen_q": True, "varlen_k": True,
               "group": 1},
    "sinks": {"sinks": True, "scale_ptr": True, "scale": 0.06, "rows": (37,) * 2,
              "keys": (70,) * 2},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": "h", "heads_kv": 2, "group": 1},
    "bias": {"bias": "hr", "bias_hides": True},
    "dropout": {"dropout_p": 0.3},
    "ranges": {"mask_ranges": DOCUMENTS, "window": (-1, -1)},
    "blocks": {"mask_blocks": "h"},
    "pages": {"page_size": 16, "used_k": (70,)},
    "out in float32": {"float32_out": True},
    "deterministic": {"deterministic": True, "head_dim": 384, "head_dim_v": 384},
    "negative scale": {"scale": -0.05},
}  # fmt: skip


def case_of(option: str, dtype: str = "fp16") -> Case:
    return Case(dtype, **{**SIZE, **OPTIONS[option]})


def kernel_of(case: Case) -> str:
    b = Built(case)
    return capi.plan(b.attention, b.gradients()).kernel.decode()


def needs_tensor_cores(case: Case) -> None:
    """Skips where the plain backward has none; otherwise this case must run on them as well."""
    if not kernel_of(case_of("full", case.dtype)).startswith("cuda.mma_sync"):
        pytest.skip("this GPU, or this build, has no such backward on tensor cores")
    assert kernel_of(case).startswith("cuda.mma_sync"), case


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option(option, dtype, device):
    case = case_of(option, dtype)
    needs_tensor_cores(case)
    check(case)


@pytest.mark.parametrize("option", ["full", "causal", "bias"])
def test_deterministic_sums_have_the_same_bits(option, device, monkeypatch):
    """In whichever order the warps of the emulator run."""
    case = dataclasses.replace(case_of(option), deterministic=True)
    needs_tensor_cores(case)
    first = run(Built(case)).grads
    monkeypatch.setenv("TILEWISE_EMULATOR_ORDER", "warps")
    monkeypatch.setenv("TILEWISE_EMULATOR_COPIES", "early")
    for name, values in run(Built(case)).grads.items():
        assert np.array_equal(values, first[name]), name


def test_nan_stays_in_the_rows_that_see_it(device):
    """A key with NaN, of the second tile: rows that do not see it have the gradients of before."""
    case = dataclasses.replace(case_of("causal"), group=1, keys=(75,), wanted=frozenset("qkv"))
    needs_tensor_cores(case)
    clean = run(Built(case)).grads["q"]
    b = Built(case)
    b.k[0, 50, 0, 300] = float("nan")
    seen = np.arange(75)[:, None, None] >= 50
    expect(run(b).grads["q"], clean, np.broadcast_to(seen, clean.shape), "fp16", "dq")
