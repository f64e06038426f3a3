"""GPU memory through the driver's own library, without PyTorch, so that under compute-sanitizer
every kernel is one of Tilewise's. `Host` is the same over host memory, for a build that emulates
the GPU.
"""

from __future__ import annotations

import ctypes

import numpy as np


class Host:
    """Allocates host memory and keeps it alive."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def upload(self, values: np.ndarray) -> int:
        values = np.ascontiguousarray(values)
        area = self.empty(values.nbytes)
        ctypes.memmove(area, values.ctypes.data, values.nbytes)
        return area

    def fill(self, area: int, size: int, value: int) -> None:
        ctypes.memset(area, value, size)

    def empty(self, size: int) -> int:
        """The address of 64-byte aligned memory; its bytes are 0xFF, so reading it gives NaN."""
        area = np.full(size + 64, 0xFF, np.uint8)
        self.kept.append(area)
        return -(-area.ctypes.data // 64) * 64

    def synchronize(self) -> None:
        pass

    def free(self) -> None:
        self.kept.clear()


class Gpu:
    """The primary context of GPU 0, which the CUDA runtime inside the library also uses."""

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.areas: list[int] = []
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self.driver, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name} gave CUDA error {status}")

    def empty(self, size: int) -> int:
        area = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(area), ctypes.c_size_t(max(size, 4)))
        self.areas.append(area.value)
        return area.value

    def fill(self, area: int, size: int, value: int) -> None:
        self._call(
            "cuMemsetD8_v2", ctypes.c_uint64(area), ctypes.c_ubyte(value), ctypes.c_size_t(size)
        )

    def upload(self, values: np.ndarray) -> int:
        values = np.ascontiguousarray(values)
        area = self.empty(values.nbytes)
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(area), ctypes.c_void_p(values.ctypes.data),
            ctypes.c_size_t(values.nbytes),
        )  # fmt: skip
        return area

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def free(self) -> None:
        for area in self.areas:
            self._call("cuMemFree_v2", ctypes.c_uint64(area))
        self.areas.clear()
