"""Settings and helpers that the stages share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .processes import PYTHON, ROOT, TIMED_OUT, Ended, python_environment, say

Report = dict[str, Any]
# Values of TILEWISE_FORCE_ARCH: tile tables of this family, which every build has as PTX.
FORCED_FAMILY = "mma_sync"
FORCED = ("80", "75")
# Tile tables of GPUs that are not available, and the lowest compute capability with all
# instructions that they need: the build compiles them as machine code for this GPU.
FOREIGN = {"86": 80, "120": 90}
# GPUs that can run a family that no GPU has proved. With TILEWISE_UNPROVED=1 its kernels get a run
# of their own, as those of a forced tile table do.
WITH_UNPROVED = ("100", "103")
UNPROVED = "unproved"
# MiB of GPU memory per test process: most tests take 2000; those that need 11 GB and more run one
# at a time (tests/python/support/devices.py, much_memory), in the memory that this leaves free.
MEMORY_PER_PROCESS = 5000


@dataclass
class Setup:
    """The settings of one run of tools/gpu_check.py."""

    build: Path
    jobs: int
    architecture: str  # "90"
    cmake: list[str] = field(default_factory=list)
    pytest: list[str] = field(default_factory=list)
    earlier: Report = field(default_factory=dict)  # stages to resume
    # Tests of forced tile tables that passed on the same code of their family, and are kept.
    unchanged: Report = field(default_factory=dict)
    wheels: Path | None = None  # packages of the models stage that this machine lacks
    device: str = "cuda"  # device of the tests
    memory: int = 0  # MiB of the GPU; 0: unknown

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def launch_list(self) -> Path:
        """Where processes record the kernels that they launch; each build starts a new list."""
        return self.build / "launched"

    def processes(self, beside: int = 0) -> int:
        """Number of test processes at once, while `beside` others run."""
        room = self.memory // MEMORY_PER_PROCESS if self.memory else self.jobs + beside
        return max(2, min(self.jobs - 2, room - beside))

    @property
    def foreign(self) -> tuple[str, ...]:
        """Tables of other GPUs that are compiled for this one."""
        return tuple(t for t, least in FOREIGN.items() if least <= self.sm != int(t))

    @property
    def forced(self) -> tuple[str, ...]:
        """Tables to force. On Hopper this includes its own mma_sync table, as the GPU's choice is
        wgmma.
        """
        mma_sync = ("90",) if self.architecture == "90" else ()
        return (*mma_sync, *FORCED, *self.foreign)

    @property
    def unproved(self) -> tuple[str, ...]:
        """The run of the family that is not proved; empty if this GPU has none."""
        return (UNPROVED,) if self.architecture in WITH_UNPROVED else ()

    @property
    def sm(self) -> int:
        return int(self.architecture)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Everything to run, the GPU's own choice first."""
        return ("", *self.unproved, *self.forced)

    def python(self, architecture: str = "") -> dict[str, str]:
        env = python_environment(self.build)
        env["TILEWISE_TEST_DEVICES"] = self.device
        env["CUDA_CACHE_PATH"] = str(self.build / "ptx-cache")
        env["CUDA_CACHE_MAXSIZE"] = str(2**32 - 2**20)
        # An earlier record of `tilewise doctor --prove` on this machine does not count.
        env["TILEWISE_UNPROVED"] = str(int(architecture == UNPROVED))
        if architecture not in ("", UNPROVED):
            env["TILEWISE_FORCE_ARCH"] = architecture
        return env


def failed(ended: Ended, lines: int = 15) -> Report:
    """The report of a command that did not succeed."""
    why = "took too long" if ended.status == TIMED_OUT else f"status {ended.status}"
    for line in ended.tail(lines):
        say(f"    {line}")
    return {"passed": False, "why": why, "tail": ended.tail(lines)}


def driver(*arguments: str) -> list[str]:
    """The command that runs the small problems without PyTorch."""
    return [PYTHON, "-m", "gpu_check.sanitized", *arguments]


def driver_environment(setup: Setup, architecture: str) -> dict[str, str]:
    """The environment for a module of this package."""
    env = setup.python(architecture)
    env["PYTHONPATH"] += f":{ROOT / 'tools'}"
    return env


def label(architecture: str) -> str:
    """The name of a tile table in the report."""
    if architecture == UNPROVED:
        return UNPROVED
    return f"forced-{architecture}" if architecture else "native"
