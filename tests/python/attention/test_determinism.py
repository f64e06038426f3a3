"""Results have the same bits for every number of threads and every order of the tasks."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import capi
import devices
from bounds import FP32_RELATIVE, LSE_LOW
from cases import Built, Case, Outcome, check, run

DTYPES = ["fp32", "bf16", "fp16"]
CASES = {
    "many_heads": Case(
        rows=(150, 150), keys=(170, 170), heads_kv=2, group=2, window=(-1, 0), head_dim=32,
        head_dim_v=32, dlse=True,
    ),
    "one_head": Case(rows=(300,), keys=(500,), head_dim=64, head_dim_v=64, bias="r", sinks=True),
    # A task has 512 rows with one thread and 256 with seven.
    "long_rows": Case(rows=(1100,), keys=(300,), heads_kv=2, window=(-1, 0), head_dim=32,
                      head_dim_v=32),
    "decode": Case(rows=(1,), keys=(3000,), group=8, head_dim=64, head_dim_v=64),
    "decode_of_many_heads": Case(
        rows=(2,) * 4, keys=(400,) * 4, heads_kv=8, group=2, head_dim=64, head_dim_v=64,
        window=(300, 0), sinks=True,
    ),
    "everything": Case(
        rows=(1, 200, 33), keys=(900, 64, 300), varlen_q=True, varlen_k=True, group=3, heads_kv=2,
        window=(100, 0), softcap=5.0, alibi="bh", bias="h", sinks=True, dropout_p=0.2, dlse=True,
    ),
}  # fmt: skip


def bits(o: Outcome) -> dict[str, bytes]:
    arrays = {"out": o.out, "lse": o.lse, **{f"d{n}": g for n, g in o.grads.items()}}
    return {name: x.tobytes() for name, x in arrays.items()}


def different(a: Outcome, b: Outcome) -> list[str]:
    x, y = bits(a), bits(b)
    return [name for name in x if x[name] != y[name]]


def in_reverse(tasks, call) -> None:
    for i in reversed(range(tasks)):
        call(i)


def shuffled(tasks, call) -> None:
    order = list(range(tasks))
    random.Random(3).shuffle(order)
    for i in order:
        call(i)


def threaded(tasks, call) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(tasks)))


HOOKS = {
    "1": (1, None), "2": (2, None), "3": (3, None), "7": (7, None),
    "reverse": (4, in_reverse), "shuffled": (5, shuffled), "threads": (4, threaded),
}  # fmt: skip


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_equal_for_every_thread_count_and_order(dtype, name):
    b = Built(dataclasses.replace(CASES[name], dtype=dtype))
    for place in capi.targets():
        with capi.on(place):
            pool = run(b)
            assert different(pool, run(b)) == [], f"{place}: two runs differ"
            for kind, (threads, how) in HOOKS.items():
                hook = capi.parallel_hook(threads, how)
                assert different(pool, run(b, hook=hook)) == [], f"{place}: hook {kind}"


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [(-1, 0), (200, 0), (-1, -1)])
@pytest.mark.parametrize("splits", [0, 2])
def test_infinite_values_do_not_depend_on_the_number_of_threads(dtype, window, splits):
    """A tile whose V holds an infinity is computed by another code path, whichever rows share its
    task."""
    case = dataclasses.replace(
        CASES["long_rows"], dtype=dtype, keys=(1000,), window=window, splits=splits
    )
    b = Built(case)
    for key in (3, 255, 256, 700):
        b.v[:, key, :, 1] = float("inf")
    for place in capi.targets():
        results, rows = [], []
        for threads in (1, 7):
            hook = capi.parallel_hook(threads, None)
            with capi.on(place):
                results.append(run(b, backward=False, hook=hook))
                b.attention.parallel = ctypes.addressof(hook)
                rows.append(capi.plan(b.attention).tile_q)
        assert different(*results) == [], place
        if place == "amx" and dtype != "fp32":
            assert rows == [512, 256]


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_runs_are_bitwise_equal(dtype, name):
    """Ten runs in poisoned workspaces, beside other GPU work that changes the placement of CTAs."""
    b = Built(dataclasses.replace(CASES[name], dtype=dtype, deterministic=True))
    first = run(b)
    for turn in range(1 if devices.current().name == "emulator" else 9):
        with devices.disturbed(turn):
            assert different(first, run(b)) == [], f"run {turn + 2}"


@pytest.mark.abi("cpu")
@pytest.mark.parametrize("name", CASES)
def test_hook_runs_every_task_and_limits_the_threads(name):
    """The library passes tasks to the hook, and the plan uses at most the hook's threads."""
    b = Built(CASES[name])
    seen: list[int] = []

    def count(tasks, call) -> None:
        seen.append(tasks)
        for i in range(tasks):
            call(i)

    hook = capi.parallel_hook(3, count)
    run(b, hook=hook)
    # A single task may run directly; more tasks than threads at once would need more scratch
    # memory.
    assert all(tasks > 0 for tasks in seen)
    import ctypes

    b.attention.parallel = ctypes.addressof(hook)
    assert capi.plan(b.attention).threads <= 3
    b.attention.parallel = None


@pytest.mark.abi
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 70])
def test_splits_agree(rows, dtype):
    """Forced key splits change the order of additions and nothing else."""
    base = Case(
        dtype, (rows, rows), (700, 700), group=4, head_dim=40, window=(600, 0), sinks=True,
        used_k=(700, 3), softcap=20.0,
    )  # fmt: skip
    whole = run(Built(dataclasses.replace(base, splits=1)), backward=False)
    for splits in range(1, 8):
        case = dataclasses.replace(base, splits=splits)
        check(case, backward=False)
        split = run(Built(case), backward=False)
        unit = {"fp32": 1e-6, "bf16": 2**-8, "fp16": 2**-11}[
            dtype
        ]  # each result may be off by one unit
        assert np.abs(split.out - whole.out).max() <= 2 * unit * np.abs(whole.out).max()
        unit = FP32_RELATIVE if dtype == "fp32" else LSE_LOW
        assert np.abs(split.lse - whole.lse).max() <= 2 * unit * np.abs(whole.lse).max()


@pytest.mark.abi
def test_forced_splits_are_used():
    b = Built(Case(rows=(1,), keys=(4096,), splits=5))
    assert capi.plan(b.attention).splits == 5


@pytest.mark.abi
@pytest.mark.parametrize("dtype", DTYPES)
def test_sequence_does_not_depend_on_the_batch(dtype):
    """Batch invariance with explicit splits: a sequence gives the same bits by itself and in a
    batch."""
    lengths = [(1, 900), (1, 64), (1, 300)]
    rows, keys = zip(*lengths, strict=True)
    case = Case(dtype, rows, keys, varlen_q=True, varlen_k=True, group=2, splits=2, head_dim=32)
    together = Built(case)
    whole = run(together, backward=False)
    begin_k = 0
    for i, (n, m) in enumerate(lengths):
        single = Built(dataclasses.replace(case, rows=(n,), keys=(m,)))
        single.q.copy_(together.q[i : i + 1])
        single.k.copy_(together.k[begin_k : begin_k + m])
        single.v.copy_(together.v[begin_k : begin_k + m])
        begin_k += m
        assert np.array_equal(run(single, backward=False).out, whole.out[i : i + 1])


@pytest.mark.abi("cpu", "cuda")
def test_calls_from_several_threads_at_once():
    """The library has no hidden shared state: problems solved concurrently keep their results."""
    builts = [
        Built(dataclasses.replace(CASES["everything"], dtype=d, seed=s, deterministic=True))
        for s, d in enumerate(DTYPES * 3)
    ]
    single = [run(b) for b in builts]
    with ThreadPoolExecutor(len(builts)) as pool:
        for _ in range(3):
            together = list(pool.map(run, builts))
            assert [different(a, t) for a, t in zip(single, together, strict=True)] == [[]] * 9
