"""The Hopper kernels that multiply in float8: the planner selects them where it should, and their
results are right. The bound is that of float8_cases.check_built; the exact rows and the long sums
are bounded more tightly here."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import capi
import devices
import tilewise
from cases import Built, Case, run
from float8_cases import FLOAT8, check_built, multiplies_in_float8, with_float8

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
def test_products_in_float8(option):
    case = dataclasses.replace(BASE, **MULTIPLIED_IN_FLOAT8[option])
    b = Built(case)
    with_float8(b, factors=True, signed=option in ("causal", "varlen"), queries=True)
    assert multiplies_in_float8(kernel_of(b)), kernel_of(b)
    check_built(b)
