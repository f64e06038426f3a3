"""Where the tests run: this CPU, a GPU, or the CUDA kernels compiled for the host.

`cuda` is a real GPU, with torch's memory and current stream. `emulator` is a library built with
TILEWISE_CUDA_EMULATOR=ON: the problem names CUDA as its device, but its memory is host memory.
TILEWISE_TEST_DEVICES=cpu,cuda,emulator chooses; by default every available device is tested.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import filelock
import pytest
import torch

if TYPE_CHECKING:
    from cases import Case

CPU_CODE, CUDA_CODE = 0, 1
# Largest rows * keys * head_dim of a problem that runs in the emulator.
EMULATOR_WORK = float(os.environ.get("TILEWISE_EMULATOR_WORK", "1.2e7"))


@dataclass(frozen=True)
class Device:
    name: str
    code: int  # tilewise_device
    memory: torch.device

    @property
    def index(self) -> int:
        return self.memory.index or 0

    @property
    def stream(self) -> int | None:
        """torch's current stream, on which the buffers are filled and read."""
        if self.memory.type != "cuda":
            return None
        return torch.cuda.current_stream(self.memory).cuda_stream


ALL = {
    "cpu": Device("cpu", CPU_CODE, torch.device("cpu")),
    "cuda": Device("cuda", CUDA_CODE, torch.device("cuda", 0)),
    "emulator": Device("emulator", CUDA_CODE, torch.device("cpu")),
}
_current = ALL["cpu"]


def current() -> Device:
    return _current


@contextlib.contextmanager
def use(name: str) -> Iterator[Device]:
    """In the body, buffers are allocated and problems are run on this device."""
    global _current
    before, _current = _current, ALL[name]
    try:
        yield _current
    finally:
        _current = before


def work(case: Case) -> int:
    """Multiply-adds of Q K^T and P V: rows times keys times elements."""
    rows, keys = max(case.rows, default=0), max(case.keys, default=0)
    return len(case.rows) * rows * keys * case.heads * (case.head_dim + case.head_dim_v)


def fits(case: Case) -> None:
    """Skip the test when the problem is too large for the emulator, which runs lane by lane."""
    if _current.name == "emulator" and work(case) > EMULATOR_WORK:
        pytest.skip(f"too large for the emulator: {work(case):.1e} products")


CONTEXT_LOST = 86  # exit status of a test process that lost its GPU context to an error


@contextlib.contextmanager
def default_device(device: Device) -> Iterator[None]:
    """Make the device torch's default."""
    torch.set_default_device(device.memory)
    try:
        yield
    finally:
        torch.set_default_device(None)


def context_lost() -> str:
    """The GPU's error from which this process cannot recover, such as an access outside its memory;
    empty when there is none."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""


CACHED = 2**30  # bytes of a GPU that a process may keep between tests, beside other processes


def return_memory() -> None:
    """Release torch's cached GPU memory where there is a lot of it."""
    if torch.cuda.memory_reserved() > CACHED:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def captured(stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Captures what the block launches in the graph that it yields.

    Only calls of this thread can end the capture: JAX, whose tests share the process, has threads
    that call the driver at any time.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield graph


@contextlib.contextmanager
def much_memory(needed: int, patience: float = 60) -> Iterator[None]:
    """The body needs this many bytes of the GPU. One process at a time may hold them, and the test
    is skipped where they are not free after `patience` seconds."""
    with filelock.FileLock(Path(tempfile.gettempdir()) / "tilewise-much-gpu-memory.lock"):
        last = time.monotonic() + patience
        while (free := torch.cuda.mem_get_info()[0]) < needed:
            if time.monotonic() > last:
                pytest.skip(f"{needed / 1e9:.0f} GB on the GPU are needed, {free / 1e9:.0f} free")
            time.sleep(0.5)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def put(x: torch.Tensor) -> torch.Tensor:
    return x.to(_current.memory)


def moved(value: object) -> object:
    """Tensors, made before the test and held in dictionaries, moved to torch's device with their
    strides: Tensor.to makes a view with gaps contiguous."""
    if isinstance(value, torch.Tensor):
        whole = torch.empty(0, dtype=value.dtype, device=value.device)
        whole.set_(value.untyped_storage())
        whole = whole.to(torch.get_default_device())
        return whole.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, dict):
        return {name: moved(x) for name, x in value.items()}
    return value


# The difference that another order of additions may make on a GPU, relative to the largest number.
UNITS = {
    torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-6, torch.float8_e4m3fn: 2**-3
}  # fmt: skip


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality on the CPU; on a GPU equality up to the order of additions, which is fixed
    only with `deterministic` and equal strides."""
    unit = UNITS[a.dtype]
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    if a.dtype == torch.float8_e4m3fn:  # torch compares no float8
        a, b = a.float(), b.float()
    if a.device.type == "cpu":
        return same_kind and torch.equal(a, b)
    if not same_kind or not torch.equal(a.isfinite(), b.isfinite()):
        return False
    seen = a.isfinite()
    a, b = a[seen].double(), b[seen].double()
    return a.numel() == 0 or bool((a - b).abs().max() <= unit * b.abs().max())


def generator(seed: int) -> torch.Generator:
    """A generator on torch's default device: torch.randn refuses one of another device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextlib.contextmanager
def disturbed(seed: int) -> Iterator[None]:
    """On a GPU, another stream keeps some SMs busy during the body."""
    if _current.name != "cuda":
        yield
        return
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        a = torch.randn(256 + 128 * seed, 2048, device="cuda")
        for _ in range(4):
            a = torch.tanh(a @ a.T) @ a
    yield
    other.synchronize()


@functools.cache
def cuda_kernels() -> tuple[int, int, bool]:
    """(CUDA rows of the support matrix, how many are available here, whether they are emulated)."""
    import ctypes

    import capi

    info = capi.KernelInfo(struct_size=ctypes.sizeof(capi.KernelInfo))
    rows = available = index = 0
    emulated = False
    while capi.library().tilewise_kernel(index, ctypes.byref(info)) == capi.OK:
        index += 1
        if info.device == CUDA_CODE:
            rows += 1
            available += info.available
            emulated |= b"emulat" in info.requires_
    return rows, available, emulated


@functools.cache
def missing() -> dict[str, str]:
    """Devices that are not available here, each with the reason."""
    why = {}
    try:
        rows, available, emulated = cuda_kernels()
    except (OSError, ImportError) as error:
        return dict.fromkeys(("cuda", "emulator"), f"no library: {error}")
    if rows == 0:
        why["cuda"] = "this build has no CUDA kernel"
    elif emulated:
        why["cuda"] = "this build emulates the CUDA kernels"
    elif not torch.cuda.is_available():
        why["cuda"] = "torch sees no GPU"
    elif not available:
        why["cuda"] = "no kernel of this build runs on this GPU"
    if not emulated:
        why["emulator"] = "this build does not emulate CUDA"
    return why


@functools.cache
def selected() -> tuple[str, ...]:
    """Devices of this run, in order."""
    chosen = os.environ.get("TILEWISE_TEST_DEVICES", "")
    if not chosen:
        return tuple(name for name in ALL if name not in missing())
    names = tuple(name.strip() for name in chosen.split(",") if name.strip())
    for name in names:
        if name not in ALL:
            raise ValueError(
                f"TILEWISE_TEST_DEVICES names {name!r}; each name must be one of {', '.join(ALL)}"
            )
        if name in missing():
            raise ValueError(f"TILEWISE_TEST_DEVICES names {name}, but {missing()[name]}")
    return names
