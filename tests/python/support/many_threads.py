"""A program whose threads call Tilewise at the same time, from the import on.

    python many_threads.py [numpy | torch]

"numpy" needs NumPy and Tilewise alone; "torch" makes the same calls on tensors, and takes gradients
by autograd. Without a GIL it then also imports all modules whose packages are installed. Prints the
number of calls and whether the GIL is on. Fails if results differ or if the GIL was turned on.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

THREADS = 8
ROUNDS = 12

Put: TypeAlias = Callable[[Any], Any]  # makes an argument of an array
Job: TypeAlias = Callable[[int, Put], list[Any]]


def gil_is_on() -> bool:
    """Whether this process has a global interpreter lock now."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def arrays(seed: int, put: Put, *shapes: tuple[int, ...], dtype: Any = np.float32) -> list[Any]:
    """Normally distributed arrays."""
    generator = np.random.default_rng(seed)
    return [put(generator.standard_normal(shape).astype(dtype)) for shape in shapes]


def forward_and_backward(seed: int, put: Put) -> list[Any]:
    import tilewise

    length, dtype = 30 + 7 * seed, (np.float32, np.float16)[seed % 2]
    shapes = ((2, length, 4, 32), (2, length, 2, 32), (2, length, 2, 32))
    q, k, v = arrays(seed, put, *shapes, dtype=dtype)
    options = {"causal": seed % 3 == 0, "window": (16, 4), "softcap": 20.0}
    if put is tensor:
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out, lse = tilewise.attention(*inputs, return_lse=True, **options)
        out.backward(out.detach())
        gradients = [x.grad for x in inputs]
    else:
        out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
        gradients = list(tilewise.attention_backward(out, q, k, v, out, lse, **options)[:3])
    return [out, lse, *gradients, *tilewise.merge_states(out, lse, out, lse)]


def plain(seed: int, put: Put) -> list[Any]:
    """The fast path of tensors, with a gradient."""
    import tilewise

    q, k, v = arrays(seed, put, *[(1, 20 + seed, 2, 16)] * 3)
    if put is tensor:
        q.requires_grad_()
        out = tilewise.attention(q, k, v, causal=True)
        out.sum().backward()
        return [out, q.grad]
    return [tilewise.attention(q, k, v, causal=True)]


def varlen(seed: int, put: Put) -> list[Any]:
    import tilewise

    bounds = put(np.array([0, 5 + seed, 40, 64], np.int32))
    q, k, v = arrays(seed, put, *[(64, 2, 24)] * 3)
    return [tilewise.attention_varlen(q, k, v, bounds, bounds, causal=True)]


def decode(seed: int, put: Put) -> list[Any]:
    import tilewise

    q, k, v = arrays(seed, put, (3, 1, 4, 16), (3, 1, 2, 16), (3, 1, 2, 16))
    k_cache, v_cache = arrays(seed + 1, put, *[(3, 50, 2, 16)] * 2)
    lengths = put(np.array([seed, 20, 49], np.int32))
    out = tilewise.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
    return [out, k_cache, v_cache]


def masked(seed: int, put: Put) -> list[Any]:
    import tilewise

    q, k, v = arrays(seed, put, *[(2, 140, 2, 16)] * 3)
    ranges = tilewise.masks.Ranges.prefixes(put(np.array([60 + seed, 140], np.int32)), 140)
    blocks = tilewise.masks.from_bool(put(ranges.to_bool(140, 140)))
    results = [tilewise.attention(q, k, v, mask=mask) for mask in (ranges, blocks)]
    if put is tensor:  # the mask is a part of PyTorch's trees as soon as it exists
        from torch.utils import _pytree

        results += _pytree.tree_map(lambda leaf: leaf.clone(), blocks).arguments()
    return [*results, np.array(ranges.density(140, 140))]


def refusal(seed: int, put: Put) -> list[Any]:
    """The sentence of an error: it must be that of the call in this thread."""
    import tilewise

    q, k = arrays(seed, put, (1, 4, 2, 8), (1, 4, 2, 8 + seed + 1))
    try:
        tilewise.attention(q, k, k)
    except (ValueError, RuntimeError) as error:
        return [np.array(str(error))]
    raise AssertionError("a head dimension that differs was accepted")


def questions(seed: int, put: Put) -> list[Any]:
    import tilewise

    (q,) = arrays(seed, put, (1, 16, 2, 8 * (seed + 1)))
    return [np.array(str(tilewise.explain(q, q, q))), np.array(str(tilewise.capabilities()))]


JOBS: list[tuple[Job, int]] = [
    (job, seed)
    for job in (forward_and_backward, plain, varlen, decode, masked, refusal, questions)
    for seed in range(4)
]


def tensor(array: Any) -> Any:
    """A tensor of PyTorch with the values of an array."""
    return sys.modules["torch"].from_numpy(array)


def array_of(result: Any) -> Any:
    """A result as an array."""
    return result if isinstance(result, np.ndarray) else result.detach().numpy()


def run_in_threads(put: Put) -> list[dict[int, list[list[Any]]]]:
    """The results of all rounds of each thread, by job; each round has an order of its own."""
    start = threading.Barrier(THREADS)

    def work(thread: int) -> dict[int, list[list[Any]]]:
        found: dict[int, list[list[Any]]] = {index: [] for index in range(len(JOBS))}
        start.wait()  # the first calls, which import modules and load the library, are concurrent
        for round_ in range(ROUNDS):
            order = np.random.default_rng((thread, round_)).permutation(len(JOBS))
            for index in map(int, order):
                job, seed = JOBS[index]
                found[index].append(job(seed, put))
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, range(THREADS)))


def import_all_modules() -> None:
    """Imports the package's modules, except those that need a package which is not installed.

    Triton turns the GIL on, so it is hidden here: PyTorch imports it for its counter of FLOPs and
    for ``torch.compiler.disable``, which ``tilewise.distributed`` uses.
    """
    import tilewise

    sys.modules["triton"] = None  # type: ignore[assignment]
    for module in pkgutil.walk_packages(tilewise.__path__, "tilewise.", onerror=lambda _: None):
        if module.name == "tilewise.__main__":  # the command line
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(f"not imported: {module.name}, which needs {error.name}")
        assert not gil_is_on(), f"{module.name} has turned the GIL on"


def main() -> None:
    """Runs all jobs in all threads and compares the results with those of one thread."""
    before = gil_is_on()
    sys.setswitchinterval(1e-5)
    put: Put = np.asarray
    if sys.argv[1:] == ["torch"]:
        # PyTorch 2.12 crashes where a thread ends that imported it and ran a backward.
        importlib.import_module("torch")
        put = tensor
    results = run_in_threads(put)
    calls = 0
    for index, (job, seed) in enumerate(JOBS):
        wanted = job(seed, put)
        for given in (each for found in results for each in found[index]):
            calls += 1
            for a, b in zip(wanted, given, strict=True):
                message = f"{job.__name__}, seed {seed}"
                np.testing.assert_array_equal(array_of(a), array_of(b), message)
    assert gil_is_on() == before, "a call has turned the GIL on"
    if not before:
        import_all_modules()
    print(f"{calls} calls in {THREADS} threads; the GIL is {'on' if before else 'off'}")


if __name__ == "__main__":
    main()
