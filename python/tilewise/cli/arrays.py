"""NumPy arrays as arguments of the C ABI, on the host and on a GPU.

bf16 values are stored as 16-bit patterns. PyTorch allocates the memory of a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tilewise import _abi
from tilewise.cli import gpu
from tilewise.cli.oracle import Array

ALIGNMENT = 64  # of a workspace


def encode(values: Array, dtype: str) -> Array:
    """The values in their storage type; bf16 is the upper half of the bits, rounded to even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(values.astype(dtype))
    bits = np.ascontiguousarray(values.astype(np.float32)).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decode(stored: Array, dtype: str) -> Array:
    """The stored values in float64."""
    if dtype == "bfloat16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


class HostMemory:
    """Memory of the host, which the library reads and writes in place."""

    stream: int | None = None

    def address(self, array: Array) -> int:
        """The address at which the library finds the array."""
        return int(array.ctypes.data)

    def read_back(self, *arrays: Array) -> None:
        """Copies these arrays back, or all without an argument; here they are in place already."""

    def synchronize(self) -> None:
        """Waits for all launches; here none is asynchronous."""


class GpuMemory(HostMemory):
    """Copies of the arrays on a GPU, through PyTorch."""

    def __init__(self, index: int) -> None:
        import torch

        self._device = torch.device("cuda", index)
        self._copies: list[tuple[Array, Any]] = []
        self.stream = torch.cuda.current_stream(self._device).cuda_stream

    def address(self, array: Array) -> int:
        import torch

        copy = torch.from_numpy(array.view(np.uint8).reshape(-1)).to(self._device)
        self._copies.append((array, copy))
        return int(copy.data_ptr())

    def read_back(self, *arrays: Array) -> None:
        for array, copy in self._copies:
            if not arrays or any(array is one for one in arrays):
                array.view(np.uint8).reshape(-1)[:] = copy.cpu().numpy()

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize(self._device)


def aligned(address: int) -> int:
    """The first aligned address at or after this one."""
    return address + -address % ALIGNMENT


def memory_of(index: int | None) -> HostMemory:
    """The memory of GPU `index`, or of the host: for the CPU and for the emulated GPU of tests."""
    return HostMemory() if index is None or emulated(index) else GpuMemory(index)


def emulated(index: int) -> bool:
    """Whether a GPU is emulated for the tests, so that its memory is that of the host."""
    return gpu.gpus()[0][index]["memory_bytes"] == 0


def poisoned(like: Array) -> Array:
    """An array of the same shape whose elements are NaN in every format."""
    result = np.empty_like(like)
    result.view(np.uint8).fill(0xFF)
    return result


def view(array: Array, memory: HostMemory) -> Any:
    """The C struct of an array [batch, rows, heads, columns]."""
    batch, row, head, _ = (stride // array.itemsize for stride in array.strides)
    return _abi.Tensor(memory.address(array), batch, row, head)
