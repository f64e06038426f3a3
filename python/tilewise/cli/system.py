"""Facts about this machine and this build of the library, available without PyTorch."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewise import _abi
from tilewise._capabilities import capabilities
from tilewise._library import c_library

if TYPE_CHECKING:
    from types import ModuleType


def cpu_name() -> str:
    """The name that the processor reports."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def instruction_sets() -> list[tuple[str, bool]]:
    """The CPU instruction sets of this build, best last, and whether this machine has them."""
    library = c_library()
    found: list[tuple[str, bool]] = []
    available = ctypes.c_int32()
    while name := library.tilewise_cpu_isa(len(found), ctypes.byref(available)):
        found.append((name.decode(), bool(available.value)))
    return found


def current_isa() -> str:
    """The instruction set in use."""
    name: bytes = c_library().tilewise_current_cpu()
    return name.decode()


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Uses one instruction set within the context.

    Raises:
        ValueError: the build or the machine lacks the instruction set.
    """
    library, before = c_library(), current_isa()
    _abi.check(library, library.tilewise_select_cpu(name.encode()))
    try:
        yield
    finally:
        _abi.check(library, library.tilewise_select_cpu(before.encode()))


def kernels() -> list[dict[str, Any]]:
    """The support matrix: one row per kernel family and dtype."""
    rows = [dataclasses.asdict(row) for row in capabilities()]
    return [{"kernel": row.pop("name"), **row} for row in rows]


def torch_or_none() -> ModuleType | None:
    """PyTorch, or None if it is not installed or does not load."""
    try:
        import torch
    except (ImportError, OSError):
        return None
    return torch


def cuda_device() -> str | None:
    """The name of the first CUDA device that PyTorch can use, or None."""
    torch = torch_or_none()
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(0))


def device_name(device: str) -> str:
    """The name of the device for a title."""
    return (cuda_device() or "CUDA device") if device == "cuda" else cpu_name()


@functools.cache
def training_device(requested: str) -> str:
    """The device to use for "auto", "cpu" or "cuda".

    CUDA is used only if this build has kernels for it, forward and backward. If "auto" chooses the
    CPU, the first call prints why.

    Raises:
        ValueError: "cuda" was requested and cannot be used.
    """
    if requested == "cpu":
        return "cpu"
    gpu = cuda_device()
    has_kernels = any(
        row["device"] == "cuda" and row["available"] and row["forward"] and row["backward"]
        for row in kernels()
    )
    if gpu and has_kernels:
        return "cuda"
    reason = f"this build has no kernels for {gpu}" if gpu else "there is no CUDA device here"
    if requested == "cuda":
        raise ValueError(f"--device cuda: {reason}")
    print(f"{reason}: running on the CPU", flush=True)
    return "cpu"


def versions() -> dict[str, str | None]:
    """The versions that a bug report needs; None for a package that is not installed."""
    library = c_library()
    found: dict[str, str | None] = {
        "tilewise": library.tilewise_version().decode(),
        "abi": str(library.tilewise_abi_version()),
        "python": platform.python_version(),
    }
    found.update({name: _installed(name) for name in ("numpy", "torch")})
    found["compiler"] = compiler()
    found["system"] = f"{platform.system()} {platform.release()} {platform.machine()}"
    found["libc"] = " ".join(platform.libc_ver()) or None
    return found


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler() -> str | None:
    """The compiler of the library, as it is recorded in the file; None if stripped."""
    path = Path(str(c_library()._name))
    try:
        notes = set(
            re.findall(
                rb"(?:GCC: \([^)\0]*\) [\d.]+|[\w ]*clang version [\w.+~-]+)", path.read_bytes()
            )
        )
    except OSError:
        return None
    return ", ".join(sorted(n.decode(errors="replace").strip() for n in notes)) or None


def library_path() -> Path:
    """The path of the C library."""
    return Path(c_library()._name)


def python_path() -> str:
    """The path of the running interpreter."""
    return sys.executable
