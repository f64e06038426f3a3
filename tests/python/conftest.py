"""Fixtures of the Python tests: fixed random numbers per test, and the devices the tests run on.
Modules that several tests use are in support/, which is importable in all of them.

A module or test marked `abi` runs once per device with its buffers there (devices.put, cases.py);
one marked `tensors` runs once per torch device, with that device as torch's default. Arguments of a
mark name the devices; without a mark a test runs once, on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "support"))

try:
    import devices
except ImportError:  # without torch, only the tests of NumPy arrays run
    devices = None  # type: ignore[assignment]

MARKS = {"abi": ("cpu", "cuda", "emulator"), "tensors": ("cpu", "cuda")}


def pytest_configure(config: pytest.Config) -> None:
    for mark, names in MARKS.items():
        config.addinivalue_line("markers", f"{mark}(*devices): run on {', '.join(names)}")
    config.addinivalue_line("markers", "jax: run on the device that JAX chooses")


def _mark(node: pytest.Item | pytest.FixtureRequest) -> pytest.Mark | None:
    """The mark that is closest to the test."""
    for mark in node.iter_markers():  # type: ignore[union-attr]
        if mark.name in MARKS:
            return mark
    return None


def _selected() -> tuple[str, ...]:
    if devices is None:
        return ("cpu",)
    try:
        return devices.selected()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = _mark(metafunc.definition)
    if mark is None or "device" not in metafunc.fixturenames:
        return
    names = mark.args or MARKS[mark.name]
    chosen: list[object] = [n for n in _selected() if n in names]
    if not chosen:
        left_out = pytest.mark.skip(reason=f"runs on {' and '.join(names)}")
        chosen = [pytest.param(names[0], marks=left_out)]
    metafunc.parametrize("device", chosen, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """When the CPU is not selected, leave out tests that run on the CPU only."""
    selected = _selected()
    if "cpu" in selected:
        return
    by_device: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        runs_here = "cuda" in selected and item.get_closest_marker("jax") is not None
        by_device[runs_here or _mark(item) is not None].append(item)
    config.hook.pytest_deselected(items=by_device[False])
    items[:] = by_device[True]


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[object]:
    """The device of the test; see `devices`."""
    if devices is None:
        yield None
        return
    mark = _mark(request.node)
    with devices.use(getattr(request, "param", "cpu")) as chosen:
        if mark is not None and mark.name == "tensors":
            with devices.default_device(chosen):
                yield chosen
        else:
            yield chosen
    if chosen.name == "cuda":
        lost = devices.context_lost()
        if lost:
            pytest.exit(f"no test can run after this: {lost}", returncode=devices.CONTEXT_LOST)
        devices.return_memory()


@pytest.fixture
def much_memory(device: object) -> Iterator[Callable[[int], None]]:
    """A function that reserves the given number of bytes of the GPU: `devices.much_memory`."""
    with contextlib.ExitStack() as held:
        yield lambda needed: held.enter_context(devices.much_memory(needed))


@pytest.fixture(autouse=True)
def _seeded(device: object) -> None:
    """Each test draws the same numbers regardless of the tests that ran before it."""
    if devices is not None:
        import torch

        torch.manual_seed(20)
