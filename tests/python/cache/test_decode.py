"""Decoding: few rows against many keys, with every kind of cache and option, against the oracle."""

from __future__ import annotations

import dataclasses
import os
import re

import numpy as np
import pytest
import torch

import capi
import devices
from cases import Built, Case, check, run

pytestmark = pytest.mark.abi

DTYPES = ["fp32", "bf16", "fp16"]


def random_places(
    r: np.random.Generator, batch: int, used_k: tuple[int, ...] | None, page_size: int
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Where the keys of each sequence begin, and its row of a cache; in most cases neither."""
    leftpad = None
    if used_k is not None and r.integers(4) == 0:
        leftpad = tuple(int(n) for n in r.integers(0, np.array(used_k) + 1))
    kv_idx = None
    if not page_size and r.integers(4) == 0:
        kv_idx = tuple(int(n) for n in r.permutation(batch + 2)[:batch])
    return leftpad, kv_idx


def random_case(seed: int, dtype: str) -> Case:
    """Lengths that differ widely; paged, indexed or contiguous caches; every score option."""
    r = np.random.default_rng(seed)
    emulated = devices.current().name == "emulator"
    batch = int(r.integers(1, 5))
    rows = int(r.choice([1, 1, 1, 2, 3, 4, 5, 8, 16, 33, 64]))
    heads_kv, group = int(r.integers(1, 3)), int(r.choice([1, 2, 4, 5, 8, 16]))
    if emulated and rows > 8:
        heads_kv, group, batch = 1, min(group, 2), min(batch, 2)
    longest = int(r.choice([90, 400])) if emulated else int(r.choice([90, 700, 2500]))
    page_size = int(r.choice([0, 0, 1, 3, 16, 64, 256]))
    room = -(-longest // page_size) * page_size if page_size else longest
    used_k = None
    if batch > 1 or r.integers(2):
        # Log-normal, like the lengths of real requests.
        spread = np.exp(r.standard_normal(batch) - 1.5) * longest
        used_k = tuple(int(n) for n in np.clip(spread, r.integers(0, 2), room))
    leftpad, kv_idx = random_places(r, batch, used_k, page_size)
    return Case(
        dtype=dtype, rows=(rows,) * batch, keys=(room,) * batch, heads_kv=heads_kv, group=group,
        head_dim=int(r.choice([16, 40, 64, 88])), head_dim_v=int(r.choice([64, 64, 24, 80])),
        page_size=page_size, used_k=used_k, leftpad=leftpad, kv_idx=kv_idx,
        window=[(-1, -1), (-1, 0), (int(r.integers(0, 200)), 0), (3, 5)][int(r.integers(4))],
        softcap=float(r.choice([0.0, 0.0, 0.0, 5.0])), alibi=str(r.choice(["", "", "h", "bh"])),
        sinks=bool(r.integers(3) == 0), splits=int(r.choice([0, 0, 0, 1, 3, 8])),
        scale=float(r.choice([1.0, -1.0, 0.3])) * 40**-0.5, pad=int(r.choice([0, 0, 8, 1])),
        spread=0.5 if dtype == "fp32" else 1.0, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_caches(dtype, seed):
    check(random_case(seed, dtype), backward=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 16])
def test_one_long_sequence_among_short_ones(dtype, page_size):
    longest = 600 if devices.current().name == "emulator" else 6000
    longest = -(-longest // 16) * 16
    check(
        Case(dtype=dtype, rows=(1,) * 6, keys=(longest,) * 6, used_k=(9, longest, 0, 1, 40, 64),
             group=4, head_dim=64, head_dim_v=64, page_size=page_size, sinks=True, spread=0.5),
        backward=False,
    )  # fmt: skip


LENGTHS = {
    "full": (640,) * 6,
    "none": (0,) * 6,
    "one": (0, 0, 0, 0, 640, 0),
    "mixed": (640, 1, 0, 577, 64, 130),
    "many": tuple(320 if i % 45 == 7 else i % 4 for i in range(140)),
}


@pytest.mark.parametrize("page_size", [0, 8, 64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_split_size_depends_on_the_keys_of_the_batch(dtype, lengths, rows, page_size):
    used = LENGTHS[lengths]
    heads_kv, room = (1, 320) if lengths == "many" else (2, 640)
    check(
        Case(dtype=dtype, rows=(rows,) * len(used), keys=(room,) * len(used), used_k=used,
             heads_kv=heads_kv, group=2, head_dim=16, head_dim_v=24, page_size=page_size,
             window=(-1, 0) if rows > 1 else (-1, -1), sinks=rows > 1, spread=0.5),
        backward=False,
    )  # fmt: skip


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_task_takes_several_heads(dtype, seed):
    """With more tiles than the threads need, one task takes the rows of several heads."""
    r = np.random.default_rng(seed)
    head_dim, head_dim_v = int(r.choice([8, 40, 64, 128])), int(r.choice([8, 24, 64, 128]))
    check(
        Case(dtype=dtype, rows=(int(r.choice([1, 1, 2, 3])),) * 6, keys=(320,) * 6,
             used_k=tuple(int(n) for n in r.integers(0, 321, 6)),
             heads_kv=int(r.choice([5, 8, 17])), group=int(r.choice([1, 2, 3, 8])),
             head_dim=head_dim, head_dim_v=head_dim_v,
             page_size=int(r.choice([0, 16])), window=[(-1, 0), (40, 0), (-1, -1)][seed % 3],
             softcap=float(r.choice([0.0, 5.0])), alibi=str(r.choice(["", "bh"])),
             bias=[None, "bhr", "r"][int(r.integers(3))], dropout_p=float(r.choice([0, 0.2])),
             sinks=bool(seed % 2), spread=0.5, seed=seed),
        backward=False,
    )  # fmt: skip


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("page_size", [0, 1, 24])
@pytest.mark.parametrize("head_dim", [(32, 72), (72, 8), (100, 32), (256, 104)])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_head_dims_that_end_inside_a_vector_load(dtype, group, head_dim, page_size):
    """Keys end inside a step, pages hold rows anywhere, heads are adjacent or have gaps."""
    check(
        Case(dtype=dtype, rows=(1,) * 4, keys=(312,) * 4, used_k=(1, 17, 160, 303), group=group,
             heads_kv=3, head_dim=head_dim[0], head_dim_v=head_dim[1], page_size=page_size,
             pad=8 * (group % 2), window=(150, 0) if group == 3 else (-1, -1)),
        backward=False,
    )  # fmt: skip


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("isa", capi.instruction_sets()[0])
@pytest.mark.parametrize("rows", [1, 4, 8, 12, 40])
@pytest.mark.parametrize("keys", [5, 37, 293])
@pytest.mark.parametrize("head_dim, head_dim_v", [(72, 40), (88, 80)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_past_a_buffer_is_read(dtype, head_dim, head_dim_v, keys, rows, isa):
    """Every buffer ends at inaccessible memory (capi.guarded)."""
    with capi.cpu(isa):
        check(
            Case(dtype, (rows,), (keys,), heads_kv=2, head_dim=head_dim, head_dim_v=head_dim_v,
                 bias="bhr", spread=0.5),
            backward=False,
        )  # fmt: skip


def cluster_combine_case(seed: int) -> Case:
    """Splits that a cluster combines, with sequences of many splits, one and none."""
    r = np.random.default_rng(seed)
    rows, group = ((1, 4), (1, 16), (2, 8), (3, 5), (1, 1), (4, 2))[seed % 6]
    batch = 1 + seed % 2
    splits = int(r.choice([0, *range(2, 17)])) if batch == 1 else int(r.choice([0, 2, 5, 8]))
    return Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(rows,) * batch, keys=(1024,) * batch, group=group,
        used_k=tuple(int(n) for n in r.choice([0, 1, 63, 64, 500, 1000, 1024], batch)),
        head_dim=int(r.choice([64, 128, 256])), head_dim_v=int(r.choice([40, 64])), splits=splits,
        page_size=int(r.choice([0, 16, 64])), window=((-1, -1), (-1, 0), (300, 0))[seed % 3],
        sinks=bool(r.integers(2)), seed=seed,
    )  # fmt: skip


def num_sms() -> int:
    """SMs of the GPU; on a real GPU, at least as many."""
    if devices.current().name != "emulator":
        return 100
    return int(os.environ.get("TILEWISE_EMULATOR_MULTIPROCESSORS", "4"))


def check_repeats(b: Built) -> None:
    """Two runs give the same bits."""
    once, again = (run(b, backward=False) for _ in range(2))
    assert np.array_equal(once.out, again.out)
    assert np.array_equal(once.lse, again.lse)


def is_for_a_cluster(case: Case, splits: int, tile: int) -> bool:
    """Whether the planner should combine the splits within a cluster (decision 016)."""
    blocks = splits * len(case.rows) * case.heads_kv
    room = num_sms() * (2 if splits <= 8 else 1)
    keys = max(case.keys)
    if min(case.window) >= 0:
        keys = min(keys, sum(case.window) + max(case.rows))
    return 1 < splits <= 16 and blocks <= room and (splits == 2 or keys <= 8 * tile * splits)


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(36))
def test_cluster_combines_splits(seed):
    b = Built(case := cluster_combine_case(seed))
    why = capi.plan(b.attention).why
    if found := re.search(rb"tile 16x(\d+) .* of table sm_90.* (\d+) key splits", why):
        tile, splits = int(found[1]), int(found[2])
        assert (b"key splits combined in a cluster" in why) == is_for_a_cluster(case, splits, tile)
    check(case, backward=False)


def chunk_case(seed: int) -> Case:
    """More tiles than SMs, and a few sequences with many chunks."""
    r = np.random.default_rng(seed)
    batch, longest = (6, 400) if devices.current().name == "emulator" else (200, 900)
    used = np.minimum(longest, r.lognormal(4.5, 0.6, batch)).astype(int)
    used[r.integers(batch, size=2)] = longest, 0
    return Case(
        dtype=("bf16", "fp16")[seed % 2], rows=(int(r.choice([1, 2])),) * batch,
        keys=(longest + 60 * (seed % 4),) * batch, used_k=tuple(int(n) for n in used),
        group=int(r.choice([1, 4, 8])), head_dim=int(r.choice([64, 128, 256])),
        head_dim_v=int(r.choice([40, 64])), page_size=(0, 16, 3, 64)[seed % 4],
        window=((-1, -1), (-1, 0))[seed % 2], sinks=bool(r.integers(2)), seed=seed,
    )  # fmt: skip


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(16))
def test_last_cta_combines_chunks(seed, monkeypatch):
    """The result is correct, and bitwise independent of the workspace's earlier contents."""
    b = Built(case := chunk_case(seed))
    why = capi.plan(b.attention).why
    assert (b"combined by the last CTA" in why) == (b"of table sm_90" in why), why
    check(case, backward=False)
    want = run(b, backward=False)
    for fill in (0x00, 0x01, 0x7F):
        monkeypatch.setattr(capi.Workspace, "FILL", fill)
        got = run(b, backward=False)
        assert np.array_equal(got.out, want.out)
        assert np.array_equal(got.lse, want.lse)


def places(b: Built, sequence: int, keys: torch.Tensor) -> tuple[int | torch.Tensor, torch.Tensor]:
    """Where keys of a sequence are in its cache."""
    size = b.case.page_size
    if not size:
        return sequence, keys
    return b.meta["block_table"][sequence].long()[keys // size], keys % size


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("at_end", [False, True])
def test_infinite_values_survive_an_underflowing_weight(at_end, seed):
    """The weight of one chunk, combined first or last, is below the smallest float."""
    case = chunk_case(seed)
    used = (case.keys[0], *case.used_k[1:])
    b = Built(dataclasses.replace(case, used_k=used, window=(-1, -1), sinks=False))
    why = capi.plan(b.attention).why
    assert (b"combined by the last CTA" in why) == (b"of table sm_90" in why), why
    want = run(b, backward=False)
    keys = torch.arange(used[0])
    keys = keys.flip(0) if at_end else keys
    b.q[0] = 1.0
    b.k[places(b, 0, keys)] = 0.0
    b.k[places(b, 0, keys[: used[0] * 3 // 4])] = -32.0  # scores of at most -256
    b.v[places(b, 0, keys[:30])] = torch.inf
    got = run(b, backward=False)
    rows = case.rows[0]
    assert not np.isfinite(got.out[:rows]).any()
    assert np.array_equal(got.out[rows:], want.out[rows:])


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_cluster_and_kernel_combine_agree(head_dim):
    """Bitwise: a batch with more CTAs than fit at once, against its sequences one at a time."""
    batch = 6 if devices.current().name == "emulator" else 300
    case = Case(
        dtype="bf16", rows=(1,) * batch, keys=(700,) * batch,
        group=16, head_dim=head_dim, head_dim_v=head_dim, splits=3, sinks=True,
    )  # fmt: skip
    b = Built(case)
    together = run(b, backward=False)
    assert b"cluster" not in capi.plan(b.attention).why
    for i in range(6):
        single = Built(dataclasses.replace(case, rows=(1,), keys=(700,)))
        for name in ("q", "k", "v"):
            getattr(single, name).copy_(getattr(b, name)[i : i + 1])
        single.sinks.copy_(b.sinks)
        why = capi.plan(single.attention).why
        assert b"of table sm_90" not in why or b"key splits combined in a cluster" in why
        result = run(single, backward=False)
        assert np.array_equal(result.out[0], together.out[i])
        assert np.array_equal(result.lse[0], together.lse[i])


SHAPES = {
    "one row": dict(rows=(1,) * 3, group=4),
    "two heads": dict(rows=(2,) * 3, heads_kv=2, group=5, sinks=True),
    "window": dict(rows=(4,) * 3, group=2, window=(70, 0)),
    "causal": dict(rows=(16,) * 3, window=(-1, 0), leftpad=(0, 37, 5)),
    "more rows": dict(rows=(20,) * 3, group=2, window=(-1, 0)),
    "splits": dict(rows=(1,) * 3, group=16, splits=3, sinks=True),
    "padded splits": dict(rows=(1,) * 3, group=16, splits=3, leftpad=(130, 0, 20)),
    "invariant": dict(rows=(1,) * 3, group=8),
}


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize(
    "head_dim", [(64, 64), (96, 40), (128, 72), (192, 192), (256, 136), (512, 320)]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 32, 64, 100, 128, 192, 256])
def test_paged_keys_equal_contiguous_keys(page_size, shape, head_dim):
    """Bitwise, if both are split in the same way; block table entries without keys in use are
    ignored."""
    room = -(-300 // page_size) * page_size
    contiguous = Case(
        dtype="bf16", keys=(room,) * 3, used_k=(300, 41, 197), head_dim=head_dim[0],
        head_dim_v=head_dim[1], **SHAPES[shape],
    )  # fmt: skip
    want, b = Built(contiguous), Built(dataclasses.replace(contiguous, page_size=page_size))
    for built in (want, b):
        built.attention.batch_invariant = shape == "invariant"
    b.q.copy_(want.q)
    if b.sinks is not None:
        b.sinks.copy_(want.sinks)
    for name in ("k", "v"):
        to, source = (flat_view(getattr(x, name)) for x in (b, want))
        for here, there in zip(b.sequences, want.sequences, strict=True):
            to[here.keys] = source[there.keys]
    for i, entries in enumerate(b.meta["block_table"]):
        entries[: (contiguous.leftpad or (0,) * 3)[i] // page_size] = -1
        entries[-(-contiguous.used_k[i] // page_size) :] = 2**30
    plan = capi.plan(b.attention)
    assert b"mma_sync" not in plan.kernel or f"{form(b, plan)} form".encode() in plan.why
    if splitting_of(plan) != splitting_of(capi.plan(want.attention)):
        want.attention.num_splits = b.attention.num_splits = 2
    results = [run(x, backward=False) for x in (b, want)]
    for here, there in zip(b.sequences, want.sequences, strict=True):
        assert np.array_equal(results[0].out[here.rows], results[1].out[there.rows])
    assert np.array_equal(results[0].lse, results[1].lse)


def splitting_of(plan):
    """How the keys are split, in the planner's words."""
    return re.findall(rb"\d+ key splits|in \d+ chunks", plan.why)


def form(b, plan):
    """The form of the paged forward. A TMA box lies in one page, and a tile is a whole number of
    boxes."""
    page_size, padded = b.case.page_size, b.case.leftpad is not None
    tile = re.search(rb"tile 16x(\d+) for head_dim \d+ of table sm_90( \(forced\))?,", plan.why)
    if tile is None or padded:
        return "paged"
    keys = int(tile[1])
    whole_boxes = page_size >= 16 and keys % page_size == 0
    return "paged TMA" if whole_boxes or page_size % keys == 0 else "paged"


def flat_view(x):
    """The rows of keys of [..., H, D], one after another."""
    return x.view(-1, *x.shape[-2:])
