"""Masks on the Hopper kernels: which kernels run, and their results for every kind of mask beside
what their masked forms serve. Random masks with every option are in test_properties.py."""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import capi
import devices
import growing_scores
import mask_damage
import nonfinite_cases
from bounds import LSE_LOW
from cases import Built, Case, check, run
from strategies import mask_ranges

pytestmark = pytest.mark.abi("cuda", "emulator")
FAMILY = "cuda.wgmma"

# More rows than a tile shares among heads.
BASE = Case("bf16", rows=(300,) * 2, keys=(330,) * 2, heads_kv=1, group=2, head_dim=64,
            head_dim_v=64, window=(-1, -1))  # fmt: skip
DOCUMENTS = tuple((begin, end, begin, end, 1) for begin, end in ((0, 70), (70, 270), (270, 300)))


def plans(case: Case) -> list[tuple[str, str]]:
    """The kernels that the planner selects for forward and backward, and why."""
    b = Built(case)
    found = [capi.plan(b.attention), capi.plan(b.attention, b.gradients())]
    return [(plan.kernel.decode(), plan.why.decode()) for plan in found]


def serves(case: Case) -> bool:
    return all(kernel.startswith(FAMILY) for kernel, _ in plans(case))


@pytest.fixture(autouse=True)
def hopper(device):
    if not serves(BASE):
        pytest.skip(f"no {FAMILY} on this GPU or in this build, or another table is forced")


MASKS = {
    "documents": dict(mask_ranges=(DOCUMENTS,)),
    "causal": dict(mask_ranges=(((0, 300, 0, 330, 1),),)),
    "window and first tokens": dict(mask_ranges=(((0, 300, 0, 4, 1), (40, 300, 30, 330, 3)),)),
    "images": dict(
        mask_ranges=(((0, 300, 0, 330, 1), (20, 60, 20, 60, 0), (150, 290, 150, 290, 0)),)
    ),
    "inverse causal": dict(mask_ranges=(((5, 280, 0, 290, 2),),)),
    "everything": dict(mask_ranges=(((0, 300, 0, 330, 0),),)),
    "nothing": dict(mask_ranges=((),)),
    "one pair": dict(mask_ranges=(((130, 131, 7, 8, 0),),)),
    "few rows": dict(mask_ranges=(((0, 50, 0, 330, 0), (190, 200, 300, 310, 0)),)),
    "of each sequence": dict(mask_ranges=(DOCUMENTS, ((0, 300, 0, 200, 2),))),
    "more ranges than a warp lists": dict(
        mask_ranges=(tuple((i, i + 9, i, i + 9, 0) for i in range(0, 290, 2)),)
    ),
    "blocks": dict(mask_blocks=""),
    "blocks per head": dict(mask_blocks="h"),
    "blocks per sequence and head": dict(mask_blocks="bh"),
}  # fmt: skip
VARLEN = dict(rows=(300, 0, 3, 257), keys=(330, 20, 0, 300), varlen_q=True, varlen_k=True)
OPTIONS = {
    "alone": {},
    "causal": dict(window=(-1, 0)),
    "window": dict(window=(40, 20)),
    "left window": dict(window=(33, -1)),
    "more rows than keys": dict(keys=(60,) * 2, window=(-1, 0)),
    "varlen": dict(VARLEN, tail_q=5, tail_k=3, window=(-1, 0)),
    "many rows": dict(VARLEN, tail_q=2100),
    "used": dict(used_q=(300, 99), used_k=(230, 5)),
    "left padding": dict(leftpad=(3, 160)),
    "cache index": dict(kv_idx=(1, 0)),
    "sinks": dict(sinks=True),
    "learned scale": dict(scale_ptr=True, dlse=True),
    "negative scale": dict(scale=-0.2),
    "zero scale": dict(scale=0.0),
    "strides": dict(order=(0, 2, 1, 3), pad=8),
    "fp16": dict(dtype="fp16"),
    "head dim 40": dict(head_dim=40, head_dim_v=40),
    "head dim 128": dict(head_dim=128, head_dim_v=128),
    "head dim 128, causal": dict(head_dim=128, head_dim_v=128, window=(-1, 0)),
    "head dim 128, varlen": dict(VARLEN, head_dim=128, head_dim_v=128, sinks=True),
}  # fmt: skip


def masked(option: str, mask: str) -> Case | None:
    """A case, unless the mask has lists for another number of sequences."""
    case = dataclasses.replace(BASE, **OPTIONS[option], **MASKS[mask])
    return None if len(case.mask_ranges or ()) not in (0, 1, len(case.rows)) else case


CASES = [c for c in itertools.product(OPTIONS, MASKS) if masked(*c) is not None]


@pytest.mark.parametrize(("option", "mask"), CASES)
def test_every_mask_runs_and_is_right(option, mask):
    case = masked(option, mask)
    assert serves(case), plans(case)
    check(case)


@seed(1)
@settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate],
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    data=st.data(), option=st.sampled_from(list(OPTIONS)),
    blocks=st.sampled_from([None, None, "", "h", "bh"]),
)  # fmt: skip
def test_random_masks(data, option, blocks):
    case = dataclasses.replace(BASE, **OPTIONS[option])
    if blocks is None:
        case = dataclasses.replace(case, mask_ranges=data.draw(mask_ranges(case)))
    else:
        case = dataclasses.replace(case, mask_blocks=blocks)
    assert serves(case), plans(case)
    check(case)


NOT_SERVED = {
    "softcap": (dict(softcap=5.0), "no score option"),
    "ALiBi": (dict(alibi="h"), "no score option"),
    "bias": (dict(bias="h"), "no score option"),
    "dropout": (dict(dropout_p=0.3), "no score option"),
    "pages": (dict(page_size=16), "no score option, pages"),
    "packed heads": (dict(rows=(100,) * 2), "neither packs heads nor splits keys"),
    "splits": (dict(splits=3), "neither packs heads nor splits keys"),
    "few tiles of many keys": (dict(rows=(70,), keys=(4000,), group=1), "nor splits keys"),
}  # fmt: skip


@pytest.mark.parametrize("option", NOT_SERVED)
def test_other_options_beside_a_mask_run_on_mma_sync(option):
    values, why = NOT_SERVED[option]
    case = dataclasses.replace(BASE, mask_ranges=(((0, 300, 0, 330, 1),),), **values)
    forward, backward = plans(case)
    assert forward[0].startswith("cuda.mma_sync")
    assert "cuda.wgmma" in forward[1] and why in forward[1]
    if "no score option" in why:
        assert backward[0].startswith("cuda.mma_sync")
        assert "cuda.wgmma" in backward[1] and why in backward[1]
    else:  # what concerns the forward alone
        assert backward[0].startswith(FAMILY)


# 4200 keys are 33 tiles of 128 keys and 66 of 64: two or three windows, some of them empty.
MANY_TILES = (
    ((0, 100, 0, 4200, 0),),
    ((0, 100, 3, 9, 0), (0, 100, 4100, 4200, 1)),
    ((0, 70, 100, 4000, 3), (80, 100, 0, 20, 0)),
    ((0, 100, 4199, 4200, 0),),
)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ranges", MANY_TILES)
def test_more_tiles_than_a_window(head_dim, ranges):
    heads = 4 if devices.current().name == "emulator" else 256  # a tile for each SM
    case = dataclasses.replace(BASE, rows=(100,), keys=(4200,), heads_kv=heads, group=1,
                               head_dim=head_dim, head_dim_v=head_dim, mask_ranges=(ranges,),
                               sinks=True)  # fmt: skip
    assert serves(case), plans(case)
    check(case)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ranges", MANY_TILES)
def test_more_row_tiles_than_a_window(head_dim, ranges):
    transposed = tuple((c, d, a, b, kind) for a, b, c, d, kind in ranges)
    case = dataclasses.replace(BASE, rows=(4200,), keys=(100,), head_dim=head_dim,
                               head_dim_v=head_dim, mask_ranges=(transposed,),
                               dlse=True)  # fmt: skip
    assert serves(case), plans(case)
    check(case)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (40, -1)])
@pytest.mark.parametrize("mask", ["documents", "few rows", "nothing", "blocks per head"])
def test_deterministic_sums(mask, window, head_dim):
    """Row tiles that the mask hides are visited, because their semaphores count them."""
    case = dataclasses.replace(BASE, head_dim=head_dim, head_dim_v=head_dim, window=window,
                               deterministic=True, **MASKS[mask])  # fmt: skip
    assert serves(case), plans(case)
    check(case)
    b = Built(case)
    first, second = run(b), run(b)
    for name, values in first.grads.items():
        assert np.array_equal(values, second.grads[name]), name


@pytest.mark.abi("emulator")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tiles_that_a_mask_hides_are_neither_loaded_nor_computed(head_dim, monkeypatch, capfd):
    monkeypatch.setenv("TILEWISE_EMULATOR_REPORT", "1")

    def products(*ranges) -> int:
        capfd.readouterr()
        case = dataclasses.replace(
            BASE, head_dim=head_dim, head_dim_v=head_dim, mask_ranges=(ranges,)
        )
        check(case)
        found = re.findall(r"(\d+) wgmma", capfd.readouterr().err)
        return sum(map(int, found))

    every, corner = products((0, 300, 0, 330, 0)), products((0, 40, 0, 30, 0))
    assert 0 < 6 * corner <= every
    assert products() == 0


@pytest.mark.parametrize("kind", ["mask_ranges", "mask_blocks"])
@pytest.mark.parametrize("damage", ["first", "entries"])
def test_invalid_entries_only_hide_pairs(kind, damage):
    value = (((0, 90, 0, 70, 0), (90, 300, 70, 330, 1), (150, 160, 0, 330, 0)),)
    value = value if kind == "mask_ranges" else "h"
    case = dataclasses.replace(BASE, window=(-1, 0), **{kind: value})
    kernels = mask_damage.check(case, damage)
    assert all(kernel.startswith(FAMILY) for kernel in kernels)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "mask", ["documents", "few rows", "more ranges than a warp lists", "blocks per head"]
)
def test_hidden_keys_may_hold_anything(mask, head_dim):
    """A NaN in a tile that some rows see in part. Those that it reaches are computed again, without
    the keys that the mask hides."""
    case = dataclasses.replace(BASE, rows=(300,), keys=(330,), head_dim=head_dim,
                               head_dim_v=head_dim, **MASKS[mask])  # fmt: skip
    clean, dirty = Built(case), Built(case)
    dirty.k[0, 65], dirty.v[0, 65] = np.nan, np.inf
    want, got = clean.expected(), run(dirty, backward=False)
    assert got.kernels[0].startswith(FAMILY)
    seen = np.broadcast_to(clean.mask[0], (2, 300, 330))[..., 65]
    for head in range(2):
        rows = ~seen[head]
        assert rows.any() and not rows.all()
        unit = 2**-7 * np.abs(want.out).max()
        assert np.abs(got.out[rows, head] - want.out[rows, head]).max() <= unit
        np.testing.assert_allclose(got.lse[rows, head], want.lse[rows, head], LSE_LOW, LSE_LOW)
        assert np.isnan(got.out[~rows, head]).all()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("mask", ["documents", "few rows", "blocks per head"])
def test_a_nan_reaches_the_gradients_of_what_sees_it(mask, head_dim):
    case = dataclasses.replace(BASE, rows=(300,), keys=(330,), head_dim=head_dim,
                               head_dim_v=head_dim, **MASKS[mask])  # fmt: skip
    b = Built(case)
    clean = run(b)
    b.k[0, 65], b.v[0, 65] = np.nan, np.inf
    got = run(b)
    assert all(kernel.startswith(FAMILY) for kernel in got.kernels)
    seen = np.broadcast_to(b.mask[0], (2, 300, 330))
    rows = seen[:, :, 65].T  # [row, head]
    keys = np.einsum("rh,hrk->k", rows.astype(int), seen.astype(int)) > 0
    assert rows.any() and not rows.all()
    nonfinite_cases.expect(got.grads["q"], clean.grads["q"], rows[..., None], "bf16", "dq")
    for name in "kv":
        nonfinite_cases.expect(got.grads[name], clean.grads[name], keys[:, None, None], "bf16",
                               f"d{name}")  # fmt: skip


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_and_keys_that_see_nothing_may_hold_anything(deterministic, head_dim):
    ranges = ((0, 90, 0, 60, 1), (110, 300, 0, 60, 0), (0, 60, 75, 330, 0))
    case = dataclasses.replace(BASE, rows=(300,), keys=(330,), head_dim=head_dim,
                               head_dim_v=head_dim, deterministic=deterministic, dlse=True,
                               mask_ranges=(ranges,))  # fmt: skip
    clean, dirty = Built(case), Built(case)
    dirty.q[0, 90:110], dirty.dout[0, 90:110] = np.nan, np.inf
    dirty.k[0, 60:75], dirty.v[0, 60:75] = np.inf, np.nan
    want, got = run(clean), run(dirty)
    assert all(kernel.startswith(FAMILY) for kernel in got.kernels)
    for name in "qkv":
        nonfinite_cases.expect(got.grads[name], want.grads[name], np.False_, "bf16", f"d{name}")
    assert not got.grads["q"][90:110].any()
    assert not got.grads["k"][60:75].any() and not got.grads["v"][60:75].any()


# Rows whose first visible tile is hidden from them have no maximum when a full tile follows.
LEVELS = ("slowly", "too fast", "in the end", "up and down", "far below")
STEPPED = {
    "everything": ((0, 600, 0, 600, 0),),
    "causal": ((0, 600, 0, 600, 1),),
    "rows begin late": ((0, 600, 0, 400, 0), (0, 40, 500, 510, 0)),
    "rows in turn": ((0, 600, 0, 200, 0), (0, 600, 420, 425, 1), (200, 600, 200, 420, 0)),
}  # fmt: skip


@pytest.mark.parametrize(("mask", "level"), itertools.product(STEPPED, LEVELS))
@pytest.mark.parametrize(("dtype", "head_dim"), [("bf16", 128), ("fp16", 128), ("bf16", 64)])
def test_scores_that_grow(dtype, head_dim, mask, level):
    case = dataclasses.replace(BASE, dtype=dtype, rows=(600,), keys=(600,), group=1, scale=1.0,
                               head_dim=head_dim, head_dim_v=head_dim,
                               mask_ranges=(STEPPED[mask],))  # fmt: skip
    b = Built(case)
    growing_scores.add_level(b, level)
    want, got = b.expected(), run(b, backward=False)
    assert got.kernels[0].startswith(FAMILY), got.kernels
    growing_scores.check(b, got, want)
