"""Masks on tensor cores: which kernels run, which tiles they leave out, and results at the limits
of what a CTA keeps in shared memory. Random masks with every option are in test_properties.py."""

from __future__ import annotations

import dataclasses
import re

import pytest

import capi
from cases import Built, Case, check

pytestmark = pytest.mark.abi("cuda", "emulator")

SIZE = {"rows": (300,), "keys": (300,), "head_dim": 32, "head_dim_v": 32}
ON_HOPPER = {"softcap": 20.0}  # beside it, masks run on these kernels there as well
DOCUMENTS = tuple((begin, end, begin, end, 1) for begin, end in ((0, 70), (70, 270), (270, 300)))


def kernels(case: Case) -> tuple[str, str]:
    b = Built(case)
    forward = capi.plan(b.attention).kernel.decode()
    return forward, capi.plan(b.attention, b.gradients()).kernel.decode()


@pytest.fixture(autouse=True)
def tensor_cores(device):
    for kernel in kernels(Case("fp16", **SIZE)):
        if kernel.startswith("cuda.simt"):
            pytest.skip("no tensor cores on this GPU or no kernels of them in this build")


@pytest.mark.parametrize("kind", [{"mask_ranges": (DOCUMENTS,)}, {"mask_blocks": "h"}])
def test_masks_of_16_bits_run_on_tensor_cores(kind):
    for kernel in kernels(Case("fp16", heads_kv=2, **SIZE, **kind)):
        assert not kernel.startswith("cuda.simt")
    for kernel in kernels(Case("fp32", **SIZE, **kind)):
        assert kernel.startswith("cuda.simt")


@pytest.mark.abi("emulator")
def test_tiles_that_a_mask_hides_are_neither_loaded_nor_computed(monkeypatch, capfd):
    monkeypatch.setenv("TILEWISE_EMULATOR_REPORT", "1")

    def work(*ranges) -> list[tuple[int, int]]:
        """Products and copied bytes of the main kernels of forward and backward."""
        capfd.readouterr()
        check(Case("fp16", **SIZE, **ON_HOPPER, mask_ranges=(ranges,)))
        found = re.findall(r", (\d+) mma, (\d+) bytes by cp.async", capfd.readouterr().err)
        return [(int(mma), int(copied)) for mma, copied in found if mma != "0"]

    every, corner = work((0, 300, 0, 300, 0)), work((0, 40, 0, 30, 0))
    assert len(every) == len(corner) == 2
    for (products, copied), (few_products, few_copied) in zip(every, corner, strict=True):
        assert 0 < 6 * few_products <= products
        assert 2 * few_copied < copied or few_copied == 0  # Turing has no cp.async
    assert work() == []


def test_more_ranges_than_a_cta_lists():
    ranges = tuple((i, i + 5, i, i + 9, 0) for i in range(0, 200, 2))
    case = Case("fp16", rows=(200,), keys=(230,), head_dim=16, head_dim_v=16, **ON_HOPPER)
    check(dataclasses.replace(case, mask_ranges=(ranges,)))


@pytest.mark.parametrize("heads", ["", "h"])
def test_more_tiles_than_a_cta_has_bits_for(heads):
    """More than 1024 tiles of 128 keys in a forward with one split, and of 64 rows in a backward:
    each bit then stands for several tiles."""
    last = ((0, 1, 0, 90, 0), (0, 1, 70_000, 70_100, 0), (0, 1, 131_150, 131_200, 0))
    check(
        Case("fp16", rows=(1,), keys=(131_200,), head_dim_v=8, splits=1, mask_ranges=(last,)),
        backward=False,
    )
    rows, keys = (70_000,), (3,)
    mask = (
        {"mask_blocks": "h"}
        if heads
        else {"mask_ranges": (((5, 300, 0, 3, 1), (69_900, 70_000, 0, 2, 2)),)}
    )
    case = Case("fp16", rows=rows, keys=keys, group=2, head_dim=8, head_dim_v=8, **ON_HOPPER)
    check(dataclasses.replace(case, **mask))


@pytest.mark.parametrize("mask", [{"mask_ranges": (DOCUMENTS,)}, {"mask_blocks": "h"}])
def test_deterministic_sums_with_a_mask(mask):
    check(Case("fp16", heads_kv=1, group=2, deterministic=True, **SIZE, **ON_HOPPER, **mask))
