"""Power, clock and energy of a GPU during calls, from NVIDIA's management library.

`nvidia-ml-py` (the module pynvml) is used where it is installed. Without it, or on a GPU that does
not count its energy, there are no readings.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

EVERY = 0.02  # seconds; the GPU's own counter advances less often


@dataclass(frozen=True)
class Reading:
    """Means over an interval."""

    watts: float
    sm_mhz: float


@dataclass(frozen=True)
class _Sample:
    time: float
    joules: float
    sm_mhz: float


def mean(samples: list[_Sample], since: float) -> Reading | None:
    """Means of the samples from `since` on; None if the energy counter did not advance."""
    late = [s for s in samples if s.time >= since]
    # The counter is constant between its steps: measure from its first step in the interval.
    moved = [i for i in range(1, len(late)) if late[i].joules > late[i - 1].joules]
    if len(moved) < 2:
        return None
    first, last = late[moved[0]], late[moved[-1]]
    watts = (last.joules - first.joules) / (last.time - first.time)
    return Reading(watts, fmean(s.sm_mhz for s in late))


class Meter:
    """Samples the current GPU; without a GPU or the library there are no readings."""

    def __init__(self, device: str) -> None:
        self._nvml: Any = None
        if device != "cuda":
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            if pynvml.nvmlDeviceGetCount() == 1:
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            else:
                uuid = str(torch.cuda.get_device_properties().uuid).removeprefix("GPU-")
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            self._nvml = pynvml
            self._sample()
        except Exception:  # not installed, not permitted, not supported: no readings
            self._nvml = None

    def _sample(self) -> _Sample:
        joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        return _Sample(time.perf_counter(), joules, clock)

    def start(self) -> None:
        """Starts sampling in a separate thread."""
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._nvml is not None:
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # a failure must not end the timing
            while not self._stop.wait(EVERY):
                self._samples.append(self._sample())

    def stop(self, since: float) -> Reading | None:
        """Means of the samples from `since` on, a time of `perf_counter`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        return mean(self._samples, since)
