"""A program whose threads call NumPy's interface at the same time, from the import on.

It needs NumPy and Tilewise alone, so that a free-threaded Python can run it before other packages
support that. Prints the number of calls, and whether the GIL is on.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

THREADS = 8
ROUNDS = 12


def gil_is_on() -> bool:
    """Whether this process has a global interpreter lock now."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def arrays(seed: int, *shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    """Normally distributed arrays."""
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def forward_and_backward(seed: int) -> list[Any]:
    import tilewise

    length, dtype = 30 + 7 * seed, (np.float32, np.float16)[seed % 2]
    shapes = ((2, length, 4, 32), (2, length, 2, 32), (2, length, 2, 32))
    q, k, v = arrays(seed, *shapes, dtype=dtype)
    options = {"causal": seed % 3 == 0, "window": (16, 4), "softcap": 20.0}
    out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    gradients = tilewise.attention_backward(out, q, k, v, out, lse, **options)
    merged = tilewise.merge_states(out, lse, out, lse)
    return [out, lse, *gradients[:3], *merged]


def varlen(seed: int) -> list[Any]:
    import tilewise

    bounds = np.array([0, 5 + seed, 40, 64], np.int32)
    q, k, v = arrays(seed, *[(64, 2, 24)] * 3)
    return [tilewise.attention_varlen(q, k, v, bounds, bounds, causal=True)]


def decode(seed: int) -> list[Any]:
    import tilewise

    q, k, v = arrays(seed, (3, 1, 4, 16), (3, 1, 2, 16), (3, 1, 2, 16))
    k_cache, v_cache = arrays(seed + 1, *[(3, 50, 2, 16)] * 2)
    lengths = np.array([seed, 20, 49], np.int32)
    out = tilewise.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    return [out, k_cache, v_cache]


def refusal(seed: int) -> list[Any]:
    """The sentence of an error: it must be that of the call in this thread."""
    import tilewise

    q, k = arrays(seed, (1, 4, 2, 8), (1, 4, 2, 8 + seed + 1))
    try:
        tilewise.attention(q, k, k)
    except (ValueError, RuntimeError) as error:
        return [np.array(str(error))]
    raise AssertionError("a head dimension that differs was accepted")


def questions(seed: int) -> list[Any]:
    import tilewise

    (q,) = arrays(seed, (1, 16, 2, 8 * (seed + 1)))
    return [np.array(str(tilewise.explain(q, q, q))), np.array(str(tilewise.capabilities()))]


JOBS: list[tuple[Callable[[int], list[Any]], int]] = [
    (job, seed)
    for job in (forward_and_backward, varlen, decode, refusal, questions)
    for seed in range(6)
]


def main() -> None:
    """Runs all jobs in all threads, each in an order of its own, and compares all results."""
    before = gil_is_on()
    sys.setswitchinterval(1e-5)
    start = threading.Barrier(THREADS)

    def work(thread: int) -> dict[int, list[list[Any]]]:
        found: dict[int, list[list[Any]]] = {index: [] for index in range(len(JOBS))}
        start.wait()  # the first calls, which import modules and load the library, are concurrent
        for round_ in range(ROUNDS):
            order = np.random.default_rng((thread, round_)).permutation(len(JOBS))
            for index in map(int, order):
                job, seed = JOBS[index]
                found[index].append(job(seed))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        results = list(pool.map(work, range(THREADS)))
    calls = 0
    for index, (job, seed) in enumerate(JOBS):
        wanted = job(seed)
        for given in (each for found in results for each in found[index]):
            calls += 1
            for a, b in zip(wanted, given, strict=True):
                np.testing.assert_array_equal(a, b, f"{job.__name__}, seed {seed}")
    assert gil_is_on() == before, "tilewise has turned the GIL on"
    print(f"{calls} calls in {THREADS} threads; the GIL is {'on' if before else 'off'}")


if __name__ == "__main__":
    main()
