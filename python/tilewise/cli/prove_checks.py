"""The checks of `tilewise doctor --prove`, which run in a child process (`prove`).

A family that no GPU has proved is compared with attention in double precision and with the family
that serves without it, and then timed against that one. The child writes one JSON object per line:
the number of steps, the name of each step before it runs, and the outcome. Whatever happens to the
child, its parent knows the step.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tilewise import _abi, _proofs
from tilewise._library import c_library
from tilewise._proofs import Record
from tilewise.cli import arrays, gpu, oracle, selftest, timing
from tilewise.cli.arrays import Array

# Head dimensions that are timed: the largest of each tile. The family is used for tiles that were
# faster.
HEAD_DIMS = (64, 96, 128)
DTYPES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Effort:
    """How much is checked."""

    problems: int  # random ones
    long: tuple[int, int]  # rows and keys of the problems that repeat
    repeats: int
    timed: tuple[tuple[int, int, int], ...]  # batch, heads, rows and keys
    seconds: float  # of each timing


ON_A_GPU = Effort(60, (1024, 8192), 40, ((16, 16, 1024), (4, 16, 4096), (1, 16, 16384)), 0.3)
EMULATED = Effort(4, (264, 400), 1, ((1, 1, 300),), 0.0)


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a forward."""

    dtype: str
    batch: int
    rows: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    left: int = -1
    right: int = -1
    sinks: bool = False
    spread: float = 1.0  # factor of the scores
    negative: bool = False  # the scale
    seed: int = 0

    def __str__(self) -> str:
        window = f", window {self.left} {self.right}" if (self.left, self.right) != (-1, -1) else ""
        return (
            f"{self.dtype}, batch {self.batch}, {self.rows} rows x {self.keys} keys, {self.heads} "
            f"heads over {self.kv_heads}, head dim {self.head_dim}{window}"
            f"{', sinks' if self.sinks else ''}{', negative scale' if self.negative else ''}, "
            f"seed {self.seed}"
        )


class WrongResultError(Exception):
    """A result was wrong."""


class Launch:
    """The tensors of a problem on a GPU, and its forward."""

    def __init__(self, problem: Problem, index: int) -> None:
        p = self.problem = problem
        random = np.random.default_rng(p.seed)

        def draw(heads: int, rows: int, spread: float = 1.0) -> Array:
            values = random.standard_normal((p.batch, rows, heads, p.head_dim), np.float32)
            return arrays.encode(values * np.float32(spread), p.dtype)

        self.q = draw(p.heads, p.rows, p.spread)
        self.k, self.v = draw(p.kv_heads, p.keys), draw(p.kv_heads, p.keys)
        self.sinks = random.standard_normal(p.heads).astype(np.float32) if p.sinks else None
        self.out = arrays.poisoned(self.q)
        self.lse = np.full((p.batch, p.heads, p.rows), np.nan, np.float32)
        self.scale = float(np.float32(p.head_dim**-0.5)) * (-1 if p.negative else 1)
        self.memory = arrays.memory_of(index)
        self.attention = self._attention(index)
        self.workspace_bytes = -1

    def _attention(self, index: int) -> Any:
        p, a = self.problem, _abi.sized(_abi.Attention)
        a.device, a.device_index, a.dtype = _abi.CUDA, index, _abi.DTYPES[p.dtype]
        a.stream = self.memory.stream
        a.batch, a.seqlen_q, a.seqlen_k = p.batch, p.rows, p.keys
        a.heads_q, a.heads_kv, a.head_dim = p.heads, p.kv_heads, p.head_dim
        tensors = (self.q, self.k, self.v, self.out)
        a.q, a.k, a.v, a.out = (arrays.view(t, self.memory) for t in tensors)
        a.lse = self.memory.address(self.lse)
        a.lse_stride_batch, a.lse_stride_head = p.heads * p.rows, p.rows
        a.window_left, a.window_right, a.scale = p.left, p.right, self.scale
        if self.sinks is not None:
            a.sinks = self.memory.address(self.sinks)
        return a

    def plan(self) -> Any:
        """The plan of the forward."""
        info, none = _abi.sized(_abi.PlanInfo), ctypes.POINTER(_abi.Gradients)()
        library = c_library()
        status = library.tilewise_plan(
            ctypes.byref(self.attention), none, _abi.FORWARD, ctypes.byref(info)
        )
        _abi.check(library, status)
        return info

    def launch(self) -> None:
        """Runs the forward."""
        library, size = c_library(), self.plan().workspace_bytes
        if size > self.workspace_bytes:  # the families need different sizes
            self.workspace = np.empty(size + arrays.ALIGNMENT, np.uint8)
            self.workspace_at = arrays.aligned(self.memory.address(self.workspace))
            self.workspace_bytes = size
        status = library.tilewise_forward(ctypes.byref(self.attention), self.workspace_at, size)
        _abi.check(library, status)

    def results(self) -> tuple[Array, Array]:
        """out, as it is stored, and lse of a forward."""
        self.launch()
        self.memory.read_back(self.out, self.lse)
        return self.out.copy(), self.lse.copy()

    def expected(self) -> tuple[Array, Array]:
        """The exact out and lse, in double precision."""
        p = self.problem
        q, k, v = (arrays.decode(t, p.dtype) for t in (self.q, self.k, self.v))
        return oracle.forward(
            q, k, v, self.scale, oracle.Options(p.left, p.right, sinks=self.sinks)
        )


class Checks:
    """The checks of one family on one GPU."""

    def __init__(self, family: str, index: int, effort: Effort) -> None:
        row = gpu.gpus()[0][index]
        driver = ctypes.c_int32()
        c_library().tilewise_cuda_versions(None, ctypes.byref(driver))
        # A record of this process alone, which turns the family on and off.
        self.record = Record(family, row["name"], row["sm"], driver.value, None, "", "", "", True)
        self.family, self.index, self.effort = family, index, effort
        self.multiprocessors: int = row["multiprocessors"]
        self.timings: list[dict[str, Any]] = []

    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        """The steps: what each one does, and its function."""
        compare = [(str(p), partial(self.compare, p)) for p in random_problems(self.effort)]
        repeat = [
            (f"repeated launches: {p}", partial(self.repeat, p)) for p in self.long_problems()
        ]
        time = [(f"time: {p}", partial(self.time, p)) for p in self.timed_problems()]
        return [*compare, *repeat, *time]

    def use(self, on: bool) -> None:
        """Has the planner use the family, or leave it alone."""
        _proofs.set_proof(c_library(), self.record, HEAD_DIMS if on else ())

    def launch(self, problem: Problem) -> Launch:
        """The problem, with the family on.

        Raises:
            WrongResultError: another family serves it.
        """
        self.use(True)
        launch = Launch(problem, self.index)
        kernel = launch.plan().kernel.decode()
        if not kernel.startswith(self.family):
            raise WrongResultError(f"{kernel} serves the problem: {launch.plan().why.decode()}")
        return launch

    def compare(self, problem: Problem) -> None:
        """Two launches of the family, beside exact results and those of the other family."""
        launch = self.launch(problem)
        expected = launch.expected()
        found = launch.results()
        self._check_errors(launch, found, expected, "double precision")
        if not _equal(found, launch.results()):
            raise WrongResultError("a second launch has other bits")
        self._compare_with_other(launch, found)

    def repeat(self, problem: Problem) -> None:
        """The same bits from launches of many key tiles on a full GPU.

        Scores overwrite weights that a queued product may still have to read; the ISA promises no
        order for these products. If it did not hold, results would differ from those of the other
        family and from launch to launch.
        """
        launch = self.launch(problem)
        first = launch.results()
        for _ in range(self.effort.repeats):
            if not _equal(first, launch.results()):
                raise WrongResultError("a repeated launch has other bits")
        self._compare_with_other(launch, first)

    def time(self, problem: Problem) -> None:
        """Seconds of a forward of the family and of the other one."""
        launch = self.launch(problem)

        def run(on: bool, _: int) -> None:
            self.use(on)
            launch.launch()
            launch.memory.synchronize()

        calls = {"family": partial(run, True), "other": partial(run, False)}
        found = timing.interleave(calls, seconds=self.effort.seconds)
        self.use(False)
        sizes = {name: getattr(problem, name) for name in ("batch", "heads", "rows", "head_dim")}
        self.timings.append(
            {
                **sizes,
                "causal": problem.right == 0,
                "seconds": found["family"].median,
                "other": launch.plan().kernel.decode(),
                "other_seconds": found["other"].median,
            }
        )

    def faster(self) -> list[int]:
        """The head dimensions whose timings were all at least as fast as the other family's."""
        slower = {t["head_dim"] for t in self.timings if t["seconds"] > t["other_seconds"]}
        return [d for d in HEAD_DIMS if d not in slower]

    def long_problems(self) -> Iterator[Problem]:
        """Problems of many key tiles, with more work tiles of 256 rows than the GPU has SMs."""
        rows, keys = self.effort.long
        heads = max(1, self.multiprocessors // 2)
        for seed, head_dim in enumerate(HEAD_DIMS):
            for right in (-1, 0):
                yield Problem(
                    DTYPES[seed % 2], 1, rows, keys, heads, 1 if right else heads, head_dim,
                    right=right, spread=2.0, seed=1000 + seed,
                )  # fmt: skip

    def timed_problems(self) -> Iterator[Problem]:
        """Problems whose time decides where the family is used."""
        for head_dim in HEAD_DIMS:
            for right in (-1, 0):
                for batch, heads, rows in self.effort.timed:
                    yield Problem(
                        "bfloat16", batch, rows, rows, heads, heads, head_dim, right=right
                    )

    def _compare_with_other(self, launch: Launch, found: tuple[Array, Array]) -> None:
        """Results of the family beside those of the family that serves without it."""
        self.use(False)
        out, lse = launch.results()
        other = arrays.decode(out, launch.problem.dtype), lse.astype(np.float64)
        self._check_errors(launch, found, other, launch.plan().kernel.decode(), 2.0)

    @staticmethod
    def _check_errors(
        launch: Launch, found: tuple[Array, Array], expected: tuple[Array, Array], what: str,
        factor: float = 1.0,
    ) -> None:  # fmt: skip
        dtype = launch.problem.dtype
        results = {"out": arrays.decode(found[0], dtype), "lse": found[1].astype(np.float64)}
        for (name, result), right in zip(results.items(), expected, strict=True):
            error, bound = selftest.error_of(result, right), factor * selftest.BOUNDS[dtype][name]
            if not error <= bound:
                raise WrongResultError(
                    f"{name} differs from {what} by {error:.1e}, allowed {bound:.1e}"
                )


def random_problems(effort: Effort) -> Iterator[Problem]:
    """Problems of any sizes with the options that the family has."""
    random = np.random.default_rng(7)

    def between(low: int, high: int) -> int:
        return int(random.integers(low, high, endpoint=True))

    for seed in range(effort.problems):
        group = between(1, 3)
        kv_heads = between(1, 2)
        left, right = ((-1, -1), (-1, 0), (between(0, 200), between(0, 100)))[seed % 3]
        yield Problem(
            DTYPES[seed % 2], between(1, 2),
            # Heads of a group share tiles of other kernels up to 256 rows.
            between(257 if group > 1 else 65, 600), between(1, 900), group * kv_heads, kv_heads,
            8 * between(1, 16), left, right, bool(between(0, 1)), float(random.choice((1, 4, 30))),
            seed % 4 == 3, seed,
        )  # fmt: skip


def _equal(first: tuple[Array, Array], second: tuple[Array, Array]) -> bool:
    return all(
        np.array_equal(a.view(np.uint8), b.view(np.uint8))
        for a, b in zip(first, second, strict=True)
    )


def run(checks: Checks, say: Callable[[dict[str, Any]], None]) -> None:
    """Runs all steps up to the first wrong one, and reports them."""
    steps = checks.steps()
    say({"steps": len(steps)})
    for name, step in steps:
        say({"step": name})
        try:
            step()
        except (WrongResultError, ValueError, NotImplementedError, RuntimeError) as error:
            say({"failed": str(error)})
            return
    say({"faster": checks.faster(), "timings": checks.timings})


def main(arguments: list[str]) -> None:
    """The child: proves the family arguments[0] on GPU arguments[1]."""
    family, index = arguments[0], int(arguments[1])
    effort = EMULATED if arrays.emulated(index) else ON_A_GPU
    run(Checks(family, index, effort), lambda event: print(json.dumps(event), flush=True))


if __name__ == "__main__":
    main(sys.argv[1:])
