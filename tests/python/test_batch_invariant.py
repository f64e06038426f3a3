"""batch_invariant: a sequence's results are, to the bit, those it has without the others."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import capi
import devices
from cases import Built, Case, Outcome, run

DTYPES = ["fp32", "bf16", "fp16"]
GRADIENTS = ("q", "k", "v")


def build(case: Case) -> Built:
    b = Built(case)
    b.attention.batch_invariant = 1
    return b


def rows_of(x, index: np.ndarray):
    """Rows of [..., H, D] as a view of [N, H, D], which has to be dense."""
    return x.view(-1, *x.shape[-2:])[index]


def alone(whole: Built, i: int, spare_keys: int) -> Built:
    """Sequence i of a batch by itself, in a cache of other pages and another capacity."""
    c = whole.case
    one = {
        name: None if values is None else (values[i],)
        for name, values in (("used_q", c.used_q), ("used_k", c.used_k), ("leftpad", c.leftpad))
    }
    keys = c.keys[i]
    if c.used_k is not None and not c.varlen_k:
        keys = max(c.used_k[i], keys + spare_keys)
    b = build(dataclasses.replace(c, rows=(c.rows[i],), keys=(keys,), seed=c.seed + 1, **one))
    here, there = b.parts[0], whole.parts[i]
    for name in ("q", "k", "v", "dout"):
        index = "rows" if name in ("q", "dout") else "keys"
        target, source = getattr(b, name), getattr(whole, name)
        target.view(-1, *target.shape[-2:])[getattr(here, index)] = rows_of(
            source, getattr(there, index)
        )
    if whole.sinks is not None:
        b.sinks.copy_(whole.sinks)
    if whole.slopes is not None:
        b.slopes.copy_(whole.slopes[i : i + 1] if c.alibi == "bh" else whole.slopes)
    return b


def same(x: np.ndarray, y: np.ndarray) -> bool:
    return x.shape == y.shape and x.tobytes() == y.tobytes()


def compare(whole: Built, got: Outcome, i: int, b: Built, one: Outcome, where: str) -> None:
    here, there = b.parts[0], whole.parts[i]
    assert same(one.out[here.rows], got.out[there.rows]), f"out of sequence {i}: {where}"
    assert same(one.lse[here.rows], got.lse[there.rows]), f"lse of sequence {i}: {where}"
    for name, grad in one.grads.items():
        index = "rows" if name == "q" else "keys"
        mine, theirs = grad[getattr(here, index)], got.grads[name][getattr(there, index)]
        assert same(mine, theirs), f"d{name} of sequence {i}: {where}"


def check(case: Case, spare_keys: int = 0) -> int:
    """Every sequence of the case alone; the number of splits that the batch has."""
    backward = not case.page_size and case.kv_idx is None
    whole = build(case)
    splits = 0
    for target in capi.targets():
        with capi.on(target):
            got = run(whole, backward=backward)
            splits = max(splits, capi.plan(whole.attention).splits)
            for i in range(len(case.rows)):
                b = alone(whole, i, spare_keys)
                compare(whole, got, i, b, run(b, backward=backward), f"{target} {case}")
    return splits


def random_case(seed: int, dtype: str) -> tuple[Case, int]:
    r = np.random.default_rng(seed)
    emulated = devices.current().name == "emulator"
    batch = int(r.integers(2, 5))
    decode = bool(r.integers(2))
    paged = int(r.choice([0, 0, 1, 5, 16, 64]))
    varlen = bool(r.integers(2))
    most_rows = 9 if decode else (40 if emulated else 150)
    longest = int(r.choice([300, 700])) if emulated else int(r.choice([300, 1500, 4000]))
    if not decode:
        longest = min(longest, 300 if emulated else 700)

    def lengths(most: int, alike: bool) -> tuple[int, ...]:
        if alike:
            return (int(r.integers(1, most)),) * batch
        return tuple(int(n) for n in r.integers(0, most, batch))

    varlen_k = varlen and not paged
    keys = lengths(longest, not varlen_k)
    if paged:
        keys = (-(-keys[0] // paged) * paged,) * batch
    used_k = None
    if not varlen_k and (paged or r.integers(2)):
        used_k = tuple(int(n) for n in r.integers(0, np.array(keys) + 1))
    leftpad = None
    if used_k is not None and r.integers(2):
        leftpad = tuple(int(n) for n in r.integers(0, np.array(used_k) + 1))
    case = Case(
        dtype=dtype, rows=lengths(most_rows, not varlen), keys=keys, varlen_q=varlen,
        varlen_k=varlen_k, page_size=paged, used_k=used_k, leftpad=leftpad,
        heads_kv=int(r.integers(1, 3)), group=int(r.choice([1, 2, 5])),
        head_dim=int(r.choice([24, 64])), head_dim_v=64,
        window=[(-1, -1), (-1, 0), (int(r.integers(1, 300)), 0)][int(r.integers(3))],
        softcap=float(r.choice([0.0, 0.0, 5.0])), alibi=str(r.choice(["", "", "h", "bh"])),
        sinks=bool(r.integers(2)), wanted=frozenset(GRADIENTS), spread=float(r.choice([1.0, 8.0])),
        seed=seed,
    )  # fmt: skip
    return case, int(r.integers(0, 600)) if not paged else paged * int(r.integers(0, 40))


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_sequence_is_what_it_is_alone(dtype, seed):
    case, spare = random_case(seed, dtype)
    check(case, spare)


@pytest.mark.abi
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_is_split_and_still_invariant(dtype, paged):
    lengths = (1100, 3, 700, 260) if devices.current().name == "emulator" else (4000, 3, 2100, 700)
    width = -(-max(lengths) // 16) * 16
    case = Case(
        dtype=dtype, rows=(1,) * 4, keys=(width,) * 4, used_k=lengths, page_size=16 * paged,
        group=4, head_dim=64, head_dim_v=64, sinks=True, wanted=frozenset(GRADIENTS),
    )  # fmt: skip
    assert check(case, spare_keys=320) > 1


@pytest.mark.abi
def test_prompts_and_decoding_in_one_call():
    """More rows than a tile has: none of the others may decide how heads share tiles."""
    emulated = devices.current().name == "emulator"
    rows = (1, 140, 2) if emulated else (1, 300, 2)
    keys = (300, 140, 290) if emulated else (3000, 300, 2500)
    case = Case(
        dtype="bf16", rows=rows, keys=keys, varlen_q=True, varlen_k=True, group=2, head_dim=16,
        head_dim_v=16, wanted=frozenset(GRADIENTS), tail_q=3, spread=8.0,
    )  # fmt: skip
    assert check(case) > 1


@pytest.mark.abi
def test_splits_of_the_caller_are_refused():
    b = build(Case(splits=3))
    info = capi.PlanInfo(struct_size=352)
    status = capi.library().tilewise_plan(capi.c.byref(b.attention), None, 0, capi.c.byref(info))
    assert status == capi.INVALID_ARGUMENT
    assert capi.last_error().startswith("num_splits is 3 with batch_invariant: 0 is allowed")


@pytest.mark.abi
def test_the_result_is_as_exact_as_any():
    from bounds import check_lse, check_out

    b = build(
        Case(rows=(2,) * 3, keys=(2600,) * 3, used_k=(2600, 10, 900), group=2, head_dim=64,
             head_dim_v=64, sinks=True)
        if devices.current().name != "emulator"
        else Case(rows=(2,) * 2, keys=(800,) * 2, used_k=(800, 10), group=2, head_dim=64,
                  head_dim_v=64, sinks=True)
    )  # fmt: skip
    want = b.expected()
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False)
        check_out(got.out, want, "fp32", None, target)
        check_lse(got.lse, want.lse, "fp32", None, target)
