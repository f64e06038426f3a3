"""Builds and runs peaks.cpp, which measures the limits that benchmark results are divided by."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).with_name("peaks.cpp")

# The limit with which a kernel of an instruction set is compared, by dtype. On an AMX machine, fp16
# runs as products of two bf16 halves, also on the tile unit. peaks.cpp measures the limits of the
# machine that it runs on.
LIMITS = {
    "portable": {"fp32": "portable.fma", "bf16": "portable.fma", "fp16": "portable.fma"},
    "neon": {"fp32": "neon.fma", "bf16": "neon.fma", "fp16": "neon.fma"},
    "neon_bf16": {"fp32": "neon.fma", "bf16": "neon_bf16.dot", "fp16": "neon.fma"},
    "avx2": {"fp32": "avx2.fma", "bf16": "avx2.fma", "fp16": "avx2.fma"},
    "avx512": {"fp32": "avx512.fma", "bf16": "avx512.fma", "fp16": "avx512.fma"},
    "avx512_bf16": {"fp32": "avx512.fma", "bf16": "avx512_bf16.dot", "fp16": "avx512.fma"},
    "amx": {"fp32": "avx512.fma", "bf16": "amx.tile", "fp16": "amx.tile"},
}


class PeaksError(RuntimeError):
    """The program could not be built or run; the message says why."""


def build(directory: Path | None = None) -> Path:
    """Compiles peaks.cpp once per source text. Returns the program's path.

    Raises:
        PeaksError: There is no C++ compiler (g++, $CXX or clang++), or it failed.
    """
    # g++ comes first: the FMA loops of clang 14 reach two thirds of the rate of those of g++ 12.
    compiler = shutil.which("g++") or os.environ.get("CXX") or shutil.which("clang++")
    if not compiler:
        raise PeaksError("no C++ compiler found: install g++, or set CXX")
    digest = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:16]
    directory = directory or Path(tempfile.gettempdir()) / f"tilewise-bench-{os.getuid()}"
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    program = directory / f"peaks-{digest}"
    if not program.exists():
        partial = program.with_suffix(f".{os.getpid()}")
        command = [compiler, "-O3", "-std=c++20", "-pthread", str(SOURCE), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PeaksError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
        partial.replace(program)
    return program


def measure(threads: int, *, repetitions: int = 15) -> dict[str, Any]:
    """Runs the program on `threads` threads.

    Returns:
        {"flops": {name: {"best", "median"}}, ...}, per second.

    Raises:
        PeaksError: It could not be built or run.
    """
    arguments = {"threads": threads, "repetitions": repetitions}
    command = [str(build())]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeaksError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def limit(peaks: dict[str, Any], isa: str, dtype: str) -> tuple[str, float] | None:
    """The measured limit for kernels of `isa` on `dtype`: (its name, flop per second)."""
    name = LIMITS.get(isa, {}).get(dtype)
    if name is None or name not in peaks["flops"]:
        return None
    return name, float(peaks["flops"][name]["best"])
