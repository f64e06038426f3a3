"""Power, clock and energy of a GPU while somebody calls, by NVIDIA's management library.

`nvidia-ml-py` (the module pynvml) is used where it is installed; without it, or on a GPU that does
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

EVERY = 0.02  # seconds; the GPU's own counter moves less often


@dataclass(frozen=True)
class Reading:
    """Means of a while."""

    watts: float
    sm_mhz: float


@dataclass(frozen=True)
class _Sample:
    time: float
    joules: float
    sm_mhz: float


def mean(samples: list[_Sample], since: float) -> Reading | None:
    """Of the samples from then on; None where the energy did not move."""
    late = [s for s in samples if s.time >= since]
    # The counter stands still between its steps: from the first one on that is seen.
    moved = [i for i in range(1, len(late)) if late[i].joules > late[i - 1].joules]
    if len(moved) < 2:
        return None
    first, last = late[moved[0]], late[moved[-1]]
    watts = (last.joules - first.joules) / (last.time - first.time)
    return Reading(watts, fmean(s.sm_mhz for s in late))


class Meter:
    """Watches the current GPU; without one, or without the library, it sees nothing."""

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
        except Exception:  # not installed, not allowed, not supported: all the same here
            self._nvml = None

    def _sample(self) -> _Sample:
        joules = self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3
        clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
        return _Sample(time.perf_counter(), joules, clock)

    def start(self) -> None:
        """Begins to take samples, in a thread of its own."""
        self._samples: list[_Sample] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if self._nvml is not None:
            self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(Exception):  # the time that is measured beside it is worth more
            while not self._stop.wait(EVERY):
                self._samples.append(self._sample())

    def stop(self, since: float) -> Reading | None:
        """The means from that time (of perf_counter) on."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        return mean(self._samples, since)
