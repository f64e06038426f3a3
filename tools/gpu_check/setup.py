"""What the stages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import PYTHON, ROOT, TIMED_OUT, Ended, python_environment, say

Report = dict[str, Any]
# What TILEWISE_FORCE_ARCH is set to: tile tables of mma_sync, which every build has as PTX.
FORCED = ("80", "75")
# Tile tables of GPUs that are not at hand, and the least compute capability that has all the
# instructions they ask for: the build compiles them as machine code for this GPU.
FOREIGN = {"86": 80, "120": 90}
# MiB of a GPU for each process that runs tests: most take 2000; those that need 11 GB and more
# take turns (tests/python/devices.py, much_memory), beside what this leaves free.
OF_A_PROCESS = 5000


@dataclass
class Setup:
    """Of one run of tools/gpu_check.py."""

    build: Path
    jobs: int
    architecture: str  # "90"
    cmake: list[str] = field(default_factory=list)
    pytest: list[str] = field(default_factory=list)
    earlier: Report = field(default_factory=dict)  # stages to be resumed
    wheels: Path | None = None  # packages of the models stage that this machine lacks
    device: str = "cuda"  # of the tests
    memory: int = 0  # MiB of the GPU; 0: not known

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def launch_list(self) -> Path:
        """Where processes write which kernels they launch; each run begins a list anew."""
        return self.build / "launched"

    def processes(self, beside: int = 0) -> int:
        """That run tests at once, while so many others do."""
        room = self.memory // OF_A_PROCESS if self.memory else self.jobs + beside
        return max(2, min(self.jobs - 2, room - beside))

    @property
    def foreign(self) -> tuple[str, ...]:
        """Tables of other GPUs, compiled for this one."""
        return tuple(t for t, least in FOREIGN.items() if least <= self.sm != int(t))

    @property
    def forced(self) -> tuple[str, ...]:
        """On Hopper mma_sync has to be asked for: the GPU's own choice is wgmma."""
        own = ("90",) if self.architecture == "90" else ()
        return (*own, *FORCED, *self.foreign)

    @property
    def sm(self) -> int:
        return int(self.architecture)

    @property
    def architectures(self) -> tuple[str, ...]:
        """What runs: the GPU's own choice first."""
        return ("", *self.forced)

    def python(self, architecture: str = "") -> dict[str, str]:
        env = python_environment(self.build)
        env["TILEWISE_TEST_DEVICES"] = self.device
        env["CUDA_CACHE_PATH"] = str(self.build / "ptx-cache")
        env["CUDA_CACHE_MAXSIZE"] = str(2**32 - 2**20)
        if architecture:
            env["TILEWISE_FORCE_ARCH"] = architecture
        return env


def failed(ended: Ended, lines: int = 15) -> Report:
    """The report of a command that did not succeed."""
    why = "took too long" if ended.status == TIMED_OUT else f"status {ended.status}"
    for line in ended.tail(lines):
        say(f"    {line}")
    return {"passed": False, "why": why, "tail": ended.tail(lines)}


def driver(*arguments: str) -> list[str]:
    """The small problems without PyTorch."""
    return [PYTHON, "-m", "gpu_check.sanitized", *arguments]


def driver_environment(setup: Setup, architecture: str) -> dict[str, str]:
    """Of a module of this package."""
    env = setup.python(architecture)
    env["PYTHONPATH"] += f":{ROOT / 'tools'}"
    return env


def label(architecture: str) -> str:
    """How the report names a tile table."""
    return f"forced-{architecture}" if architecture else "native"
