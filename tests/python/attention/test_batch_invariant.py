"""batch_invariant: a sequence has bitwise the same results as when it is computed by itself."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import capi
import devices
import tilewise
from cases import Built, Case, Outcome, run

DTYPES = ["fp32", "bf16", "fp16"]
GRADIENTS = ("q", "k", "v")


def build(case: Case) -> Built:
    b = Built(case)
    b.attention.batch_invariant = 1
    return b


def rows_of(x, index: np.ndarray):
    """The given rows of [..., H, D], taken from a view as [N, H, D], which has to be dense."""
    return x.view(-1, *x.shape[-2:])[index]


def by_itself(whole: Built, i: int, spare_keys: int) -> Built:
    """Sequence i of a batch by itself, in a cache with other pages and another capacity."""
    c = whole.case
    one = {
        name: None if values is None else (values[i],)
        for name, values in (("used_q", c.used_q), ("used_k", c.used_k), ("leftpad", c.leftpad))
    }
    keys = c.keys[i]
    if c.used_k is not None and not c.varlen_k:
        keys = max(c.used_k[i], keys + spare_keys)
    b = build(dataclasses.replace(c, rows=(c.rows[i],), keys=(keys,), seed=c.seed + 1, **one))
    here, there = b.sequences[0], whole.sequences[i]
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
    here, there = b.sequences[0], whole.sequences[i]
    assert same(one.out[here.rows], got.out[there.rows]), f"out of sequence {i}: {where}"
    assert same(one.lse[here.rows], got.lse[there.rows]), f"lse of sequence {i}: {where}"
    for name, grad in one.grads.items():
        index = "rows" if name == "q" else "keys"
        alone, in_batch = grad[getattr(here, index)], got.grads[name][getattr(there, index)]
        assert same(alone, in_batch), f"d{name} of sequence {i}: {where}"


def check(case: Case, spare_keys: int = 0) -> int:
    """Compares every sequence with the same one computed alone; returns the batch's splits."""
    backward = not case.page_size and case.kv_idx is None
    whole = build(case)
    splits = 0
    for target in capi.targets():
        with capi.on(target):
            got = run(whole, backward=backward)
            splits = max(splits, capi.plan(whole.attention).splits)
            for i in range(len(case.rows)):
                b = by_itself(whole, i, spare_keys)
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

    def lengths(most: int, uniform: bool) -> tuple[int, ...]:
        if uniform:
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
def test_sequence_equals_itself_computed_without_the_batch(dtype, seed):
    case, spare = random_case(seed, dtype)
    check(case, spare)


@pytest.mark.abi
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("paged", [False, True])
def test_split_decoding_is_invariant(dtype, paged):
    lengths = (1100, 3, 700, 260) if devices.current().name == "emulator" else (4000, 3, 2100, 700)
    width = -(-max(lengths) // 16) * 16
    case = Case(
        dtype=dtype, rows=(1,) * 4, keys=(width,) * 4, used_k=lengths, page_size=16 * paged,
        group=4, head_dim=64, head_dim_v=64, sinks=True, wanted=frozenset(GRADIENTS),
    )  # fmt: skip
    assert check(case, spare_keys=320) > 1


@pytest.mark.abi
def test_prefill_and_decoding_in_one_call():
    """With more rows than a tile has, no other sequence may affect how heads share tiles."""
    emulated = devices.current().name == "emulator"
    rows = (1, 140, 2) if emulated else (1, 300, 2)
    keys = (300, 140, 290) if emulated else (3000, 300, 2500)
    case = Case(
        dtype="bf16", rows=rows, keys=keys, varlen_q=True, varlen_k=True, group=2, head_dim=16,
        head_dim_v=16, wanted=frozenset(GRADIENTS), tail_q=3, spread=8.0,
    )  # fmt: skip
    assert check(case) > 1


@pytest.mark.abi
def test_explicit_num_splits_is_refused():
    b = build(Case(splits=3))
    info = capi.PlanInfo(struct_size=352)
    status = capi.library().tilewise_plan(capi.c.byref(b.attention), None, 0, capi.c.byref(info))
    assert status == capi.INVALID_ARGUMENT
    assert capi.last_error().startswith("num_splits is 3 with batch_invariant: it must be 0")


@pytest.mark.abi
def test_result_meets_the_usual_bounds():
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


# --- Python entry points -------------------------------------------------------------------------

# With this many sequences a CPU splits the keys of none, but it splits those of a single one.
BATCH, KEYS, PAGE = 32, 2048, 256
LENGTHS = [KEYS - 37 * i for i in range(BATCH)]  # for varlen and the caches


def inputs(way: str) -> dict[str, torch.Tensor]:
    """Arguments of a whole batch, by name."""
    g = devices.generator(6)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    if way == "attention":
        return dict(q=draw(BATCH, 1, 2, 16), k=draw(BATCH, KEYS, 2, 16), v=draw(BATCH, KEYS, 2, 16))
    if way == "varlen":
        starts = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
        k, v = (draw(sum(LENGTHS), 2, 16) for _ in range(2))
        q_starts = torch.arange(BATCH + 1, dtype=torch.int32)
        return dict(q=draw(BATCH, 2, 16), k=k, v=v, cu_seqlens_q=q_starts, cu_seqlens_k=starts)
    rows = BATCH * KEYS // PAGE if way == "paged" else BATCH
    k, v = (draw(rows, PAGE if way == "paged" else KEYS, 2, 16) for _ in range(2))
    given = dict(q=draw(BATCH, 1, 2, 16), k_cache=k, v_cache=v,
                 cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32))  # fmt: skip
    if way == "paged":
        given["block_table"] = torch.arange(rows, dtype=torch.int32).flip(0).view(BATCH, -1)
    return given


def single(given: dict, i: int) -> dict:
    """Sequence i of the arguments by itself."""
    one = {name: x[i : i + 1] for name, x in given.items()}
    if "cu_seqlens_k" in given:
        begin, end = (int(x) for x in given["cu_seqlens_k"][i : i + 2])
        one |= {name: given[name][begin:end] for name in ("k", "v")}
        one["cu_seqlens_k"] = given["cu_seqlens_k"][i : i + 2] - begin
        one["cu_seqlens_q"] = given["cu_seqlens_q"][:2]
    elif "block_table" in given:
        one |= {name: given[name] for name in ("k_cache", "v_cache")}
    return one


FUNCTIONS = {"attention": tilewise.attention, "varlen": tilewise.attention_varlen}


def rows_that_differ(way: str, given: dict, **options: object) -> int:
    """How many of a few sequences give other bits by themselves than in their batch."""
    call = FUNCTIONS.get(way, tilewise.attention_with_kvcache)
    out, lse = call(**given, return_lse=True, **options)
    lse = lse.T if way == "varlen" else lse
    different = 0
    for i in (0, 7, BATCH - 1):
        one, one_lse = call(**single(given, i), return_lse=True, **options)
        one_lse = one_lse.T if way == "varlen" else one_lse
        equal = (one == out[i : i + 1]).all() and (one_lse == lse[i : i + 1]).all()
        different += not equal
    return different


WAYS = ["attention", "varlen", "cache", "paged"]


@pytest.mark.tensors
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("way", WAYS)
def test_tensors_pass_batch_invariant_to_the_library(way, long, monkeypatch):
    """On a GPU the batch may have the same number of splits; the bits must be equal there as
    well."""
    from tilewise import _plain  # loads the torch adapter, if the build has it

    given, taken = inputs(way), []
    real = _plain.indexed
    monkeypatch.setattr(_plain, "indexed", lambda *a: taken.append(real(*a)) or taken[-1])
    options = dict(sinks=torch.zeros(2)) if long else {}
    assert rows_that_differ(way, given, batch_invariant=True, **options) == 0
    short = not long and way != "attention"  # attention has no fast path with this option
    assert [x is not None for x in taken] == [True] * (4 * short)
    if devices.current().name == "cpu":
        assert rows_that_differ(way, given, **options) > 0, "the test is void if bits never differ"


@pytest.mark.parametrize("way", WAYS)
def test_arrays_pass_batch_invariant_to_the_library(way):
    given = {name: x.numpy() for name, x in inputs(way).items()}
    assert rows_that_differ(way, given, batch_invariant=True) == 0
    assert rows_that_differ(way, given) > 0, "the test is void if bits never differ"
