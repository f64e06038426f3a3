"""fp32 on tensor cores: products of pairs of tf32 numbers, whose sums the tensor cores truncate."""

from __future__ import annotations

import dataclasses

import pytest

import capi
from cases import Built, Case, check

pytestmark = pytest.mark.abi("cuda", "emulator")

FEW_COLUMNS = dict(rows=(29,) * 2, keys=(29,) * 2, heads_kv=5, group=1, head_dim=16,
                   head_dim_v=16)  # fmt: skip
SHAPES = {
    "few columns": FEW_COLUMNS,
    # With this option the forward runs on another family: errors of scores do not cancel.
    "few columns, largest logits": dict(FEW_COLUMNS, max_logits=True),
    "one tile of rows": dict(rows=(64,), keys=(300,), heads_kv=2, group=1, head_dim=64,
                             head_dim_v=64),
    "more rows": dict(rows=(130,), keys=(150,), heads_kv=1, group=2, head_dim=64, head_dim_v=64),
    "wide heads": dict(rows=(70,), keys=(100,), heads_kv=1, group=1, head_dim=128, head_dim_v=128),
    "wider heads": dict(rows=(40,), keys=(60,), heads_kv=1, group=1, head_dim=256, head_dim_v=256),
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_tensor_cores(monkeypatch):
    """The emulator rounds by default."""
    monkeypatch.setenv("TILEWISE_EMULATOR_SUMS", "truncated")


@pytest.mark.parametrize("seed", range(1, 7))
@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_is_as_exact_as_fp32(shape, seed):
    case = Case("fp32", dlse=True, seed=seed, **SHAPES[shape])
    b = Built(case)
    kernel = capi.plan(b.attention, b.gradients()).kernel.decode()
    if not kernel.startswith("cuda.mma_sync"):
        pytest.skip("fp32 on tensor cores needs sm_80")
    check(case)


@pytest.mark.parametrize("columns", [(1, 8), (8, 1), (7, 64)])
def test_few_columns_run_elsewhere(columns):
    """The truncated product of two numbers alone is not as exact as that of fp32."""
    dims = dict(zip(("head_dim", "head_dim_v"), columns, strict=True))
    case = Case("fp32", rows=(12,), keys=(31,), group=4, softcap=5.0, dlse=True, spread=0.5, **dims)
    enough = dataclasses.replace(case, head_dim=8, head_dim_v=8)
    if not capi.plan(Built(enough).attention).kernel.decode().startswith("cuda.mma_sync"):
        pytest.skip("fp32 on tensor cores needs sm_80")
    plan = capi.plan(Built(case).attention)
    assert plan.kernel.decode() == "cuda.simt.forward.f32"
    assert "head dimensions of 8 and more" in plan.why.decode()
    check(case)
