"""NumPy arrays on the device of a test: the functions of ``_numpy_tangents`` compute on the CPU,
and here the C library that they call gets copies of all arrays in the memory of another device."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch

import devices
from tilewise import _numpy, _numpy_tangents

ALIGNMENT = 64


class DeviceArray:
    """The bytes that an array spans, and their copy on the device."""

    def __init__(self, array: np.ndarray, memory: torch.device) -> None:
        self.array = array  # keeps the bytes
        self.begin, self.end = np.lib.array_utils.byte_bounds(array)
        self.size = self.end - self.begin
        content = torch.zeros(self.size, dtype=torch.uint8)
        ctypes.memmove(content.data_ptr(), self.begin, self.size)
        self.copy = content.to(memory)

    def holds(self, address: int) -> bool:
        return self.begin <= address < max(self.end, self.begin + 1)

    def moved(self, address: int) -> int:
        return self.copy.data_ptr() + address - self.begin

    def copy_back(self) -> None:
        content = self.copy.cpu()
        ctypes.memmove(self.begin, content.data_ptr(), self.size)


class DeviceLibrary:
    """The C library, with jvp and second on the device."""

    def __init__(self, library: Any, device: devices.Device) -> None:
        self.library, self.device = library, device
        self.recorded: list[np.ndarray] = []
        self.wants_dscale = True  # the NumPy functions always ask for the gradient of the scale
        self.second_kernel = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.library, name)

    def tilewise_jvp(self, attention: Any, tangents: Any, _workspace: int, _size: int) -> int:
        return self._run("jvp", attention, tangents)

    def tilewise_second(
        self, attention: Any, tangents: Any, gradients: Any, _workspace: int, _size: int
    ) -> int:
        return self._run("second", attention, tangents, gradients)

    def _run(self, name: str, *given: Any) -> int:
        """Plans and launches a pass with copies of its structs and arrays."""
        arrays = [DeviceArray(array, self.device.memory) for array in self.recorded]
        self.recorded.clear()
        structs = [self._moved(x._obj, arrays) for x in given]
        attention = structs[0]
        attention.device, attention.device_index = self.device.code, self.device.index
        attention.stream = self.device.stream
        if name == "second" and not self.wants_dscale:
            structs[2].dscale = None
        size = self._plan(name, structs)
        workspace = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=self.device.memory)
        start = workspace.data_ptr() + -workspace.data_ptr() % ALIGNMENT
        function = getattr(self.library, f"tilewise_{name}")
        status = function(*(ctypes.byref(x) for x in structs), start, size)
        for array in arrays:
            array.copy_back()
        return status

    def _plan(self, name: str, structs: list[Any]) -> int:
        """The workspace of a pass; keeps the name of the kernel of second."""
        gradients = structs[2] if name == "second" else None
        info = _numpy_tangents._describe.plan(self.library, structs[0], gradients, structs[1])
        if name == "second":
            self.second_kernel = info.kernel.decode()
        return info.workspace_bytes

    def _moved(self, struct: Any, arrays: list[DeviceArray]) -> Any:
        """A copy of a struct whose pointers lead to the device."""
        copy = type(struct).from_buffer_copy(struct)
        for name, kind in struct._fields_:
            value = getattr(struct, name)
            if issubclass(kind, ctypes.Structure):
                setattr(copy, name, self._moved(value, arrays))
            elif issubclass(kind, ctypes._Pointer) and value:
                setattr(copy, name, ctypes.pointer(self._moved(value.contents, arrays)))
            elif kind is ctypes.c_void_p and value:
                setattr(copy, name, next(a.moved(value) for a in arrays if a.holds(value)))
        return copy


@contextlib.contextmanager
def tangents_on(device: devices.Device) -> Iterator[DeviceLibrary]:
    """In the body, the functions of ``_numpy_tangents`` compute on the device."""
    library = DeviceLibrary(_numpy_tangents.c_library(), device)
    view = _numpy.view

    def recording_view(array: np.ndarray) -> Any:
        library.recorded.append(array)
        return view(array)

    with (
        mock.patch.object(_numpy, "view", recording_view),
        mock.patch.object(_numpy_tangents, "c_library", lambda: library),
    ):
        yield library
