"""How decoding is split on a GPU: warps per tile, combine, order and placement of CTAs; compared
with the oracle."""

from __future__ import annotations

import re

import numpy as np
import pytest

import capi
import devices
from cases import Built, Case, check
from test_decode import DTYPES, check_repeats, num_sms

pytestmark = pytest.mark.abi


def warps_per_tile_case(seed: int) -> Case:
    """Most SMs have a tile. Either all keys are used, or only the GPU knows the lengths, and some
    tiles have no keys, or keys for only one or two warps.
    """
    r = np.random.default_rng(seed)
    emulated = devices.current().name == "emulator"
    gpu = num_sms()
    fewer = max(1, gpu // 8) if seed // 2 % 2 else 0
    batch = gpu - fewer if emulated else int(r.integers(90, 130))
    head_dim = int(r.choice([64, 128]))
    longest = {64: 900, 128: 450}[head_dim] + int(r.integers(60))
    used = leftpad = None
    if seed % 3:
        used = np.minimum(longest, r.lognormal(4.0, 1.2, batch)).astype(int)
        places = r.permutation(batch)[:4]
        used[places] = (longest, 0, 1, r.integers(1, longest))[: len(places)]
        if seed % 7 == 1:
            leftpad = tuple(int(n) for n in r.integers(0, used + 1))
        used = tuple(int(n) for n in used)
    return Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(1,) * batch, keys=(longest,) * batch, used_k=used,
        group=16 if used else int(r.choice([1, 4, 16])), head_dim=head_dim,
        head_dim_v=head_dim - int(r.choice([0, 24])), page_size=int(r.choice([0, 16, 64])),
        leftpad=leftpad,
        window=((-1, -1), (-1, 0), (-1, -1), (longest - 20, 0))[0 if used else seed % 4],
        scale=float(r.choice([1.0, -1.0])) * head_dim**-0.5, sinks=bool(r.integers(2)), seed=seed,
    )  # fmt: skip


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(24))
def test_two_warps_per_tile(seed):
    b = Built(case := warps_per_tile_case(seed))
    why = capi.plan(b.attention).why
    if b"of table sm_90" in why and b"TMA form" in why and (case.used_k or not case.page_size):
        assert b"two warps per tile" in why, why
        # The emulated GPU has a known speed, which is reached when nearly all SMs are busy.
        if devices.current().name == "emulator":
            most = seed // 2 % 2 == 0 and not case.page_size
            assert (b", 2 stages per warp" in why) == most, why
    check(case, backward=False)
    check_repeats(b)


def some_or_all_used(
    seed: int, r: np.random.Generator, batch: int, longest: int, head_dim: int, pages: list[int],
    window: tuple[int, int],
) -> Case:  # fmt: skip
    """One row per sequence; all keys are used, or some sequences use none, one, few or half."""
    used = tuple(int(n) for n in r.choice([0, 1, 100, longest // 2, longest, longest], batch))
    return Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(1,) * batch, keys=(longest,) * batch,
        used_k=used if seed % 4 else None, group=int(r.choice([1, 4, 16])), head_dim=head_dim,
        head_dim_v=head_dim - int(r.choice([0, 24])), page_size=int(r.choice(pages)),
        leftpad=tuple(int(r.integers(0, n + 1)) for n in used) if seed % 8 == 1 else None,
        window=window, sinks=bool(r.integers(2)), seed=seed,
    )  # fmt: skip


def few_tiles_case(seed: int) -> Case:
    """Few tiles, each for a large cluster; the keys end anywhere inside a key tile."""
    r = np.random.default_rng(seed)
    batch = 1 if devices.current().name == "emulator" else int(r.integers(1, 7))
    head_dim = int(r.choice([64, 128]))
    longest = {64: 2100, 128: 1100}[head_dim] + int(r.integers(600))
    window = ((-1, -1), (-1, 0), (longest - 20, 0))[seed % 3]
    return some_or_all_used(seed, r, batch, longest, head_dim, [0, 16, 32, 64, 128], window)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(32))
def test_few_tiles_use_large_clusters(seed):
    b = Built(case := few_tiles_case(seed))
    why = capi.plan(b.attention).why
    fits = num_sms() * 3 >= 16 * 4  # one cluster fits on three fourths of the SMs
    if b"of table sm_90" in why and b"TMA form" in why and fits:
        assert b"key splits combined in a cluster" in why and b"two warps per tile" in why, why
    check(case, backward=False)
    check_repeats(b)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_few_tiles_of_small_pages_use_large_clusters(dtype, head_dim):
    """No TMA box fits into a page of three keys, so both warps copy rows."""
    keys = {64: 2200, 128: 1190}[head_dim]
    b = Built(case := Case(dtype, rows=(1,), keys=(keys,), group=4, head_dim=head_dim,
                           head_dim_v=head_dim, page_size=3))  # fmt: skip
    why = capi.plan(b.attention).why
    if b"of table sm_90" in why and num_sms() * 3 >= 16 * 4:
        assert b"paged form" in why and b"two warps per tile" in why, why
    check(case, backward=False)
    check_repeats(b)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("half", [False, True])
def test_varlen_uses_clusters_of_four(half, seed):
    """There are half as many tiles as SMs or, with few rows, nearly three fourths as many."""
    emulated = devices.current().name == "emulator"
    gpu = num_sms() if emulated else 132  # H100, H200
    longest = (600 if half else 300) + 97 * seed
    batch = gpu // 2 if half else gpu * 3 // 5
    window = ((-1, -1), (-1, 0))[seed % 2]
    r = np.random.default_rng(seed)
    b = Built(case := some_or_all_used(seed, r, batch, longest, 128, [1, 4, 8, 16, 0], window))
    why = capi.plan(b.attention).why
    varlen = batch > 1 and case.used_k is not None
    more = case.group <= 4 and (case.group > 1 or case.page_size)  # with one row, 16 tiles are few
    if emulated and b"of table sm_90" in why and varlen and (half or more):
        assert re.search(rb"[34] key splits combined in a cluster", why), why
    check(case, backward=False)
    check_repeats(b)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(6))
def test_many_tiles_use_two_warps_of_two_stages(seed):
    emulated = devices.current().name == "emulator"
    r = np.random.default_rng(seed)
    batch = (num_sms() if emulated else 132) * 10 // 3 + 1 + seed
    window = ((-1, -1), (-1, 0), (1100, 0))[seed % 3]
    b = Built(case := some_or_all_used(seed, r, batch, 1090 + 40 * seed, 128, [0], window))
    why = capi.plan(b.attention).why
    if emulated and b"of table sm_90" in why:
        assert b"TMA form" in why and b"two warps per tile, 2 stages per warp" in why, why
    check(case, backward=False)
    check_repeats(b)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(8))
def test_second_ctas_per_sm_are_spread_over_gpcs(seed):
    """More tiles than SMs, but less than twice as many; most sequences are short."""
    r = np.random.default_rng(seed)
    batch = num_sms() * int(r.integers(14, 19)) // 10
    longest = 2100 + int(r.integers(300))
    used = r.choice([0, 1, 100, 300, longest], batch, p=(0.1, 0.1, 0.3, 0.3, 0.2))
    case = Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(1,) * batch, keys=(longest,) * batch,
        used_k=tuple(int(n) for n in (used if seed % 4 else np.full(batch, longest))), group=4,
        heads_kv=1, head_dim=128, page_size=(0, 16, 1, 0)[seed % 4],
        window=((-1, -1), (-1, 0))[seed % 2], sinks=bool(r.integers(2)), seed=seed,
    )  # fmt: skip
    check(case, backward=False)
    check_repeats(Built(case))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [33, 64, 100, 129, 256])
@pytest.mark.parametrize(
    "batch, rows, group, head_dim_v", [(1, 1, 8, 128), (2, 3, 1, 36), (3, 3, 16, 64)]
)
def test_many_splits_are_combined(dtype, splits, batch, rows, group, head_dim_v):
    """With few rows, several warps combine one row; with more rows, one warp does."""
    case = Case(
        dtype=dtype, rows=(rows,) * batch, keys=(1500,) * batch, group=group, head_dim=64,
        head_dim_v=head_dim_v, splits=splits, window=(-1, 0), sinks=splits % 2 == 0, seed=batch,
    )  # fmt: skip
    check(case, backward=False)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(4))
def test_long_sequences_are_scheduled_first(seed):
    """More tiles than one wave, some long enough to go first, and two that are split."""
    r = np.random.default_rng(seed)
    batch = 20 if devices.current().name == "emulator" else 200
    used = r.lognormal(4.9, 0.2, batch).astype(int)
    used[r.permutation(batch)[:4]] = 1600, 1580, 400, 0
    case = Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(1,) * batch, keys=(1664,) * batch,
        used_k=tuple(int(n) for n in used), group=4, heads_kv=3, head_dim=256,
        page_size=(0, 16, 64, 0)[seed % 4], window=((-1, -1), (-1, 0))[seed // 2],
        leftpad=tuple(int(n) for n in r.integers(0, 9, batch)) if seed == 3 else None, seed=seed,
    )  # fmt: skip
    check(case, backward=False)
