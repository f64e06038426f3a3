"""What this build can run: the support matrix, and the CUDA code that it contains."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from . import _abi
from ._library import c_library

# A tile table holds the tile sizes for one architecture, whose sm number is its name (901: sm_90a).
# These families have one table of their own, or none (0); all other tables belong to mma_sync.
OWN_TABLE = {"cuda.simt": 0, "cuda.wgmma": 901, "cuda.tcgen05": 1001}


@dataclass(frozen=True)
class Kernel:
    """One row of the support matrix: a kernel family for one dtype.

    Attributes:
        name: The name of the family, such as "cpu.avx2" or "cuda.mma_sync".
        device: "cpu" or "cuda".
        dtype: The dtype of q: "float32", "float16", "bfloat16" or "float8_e4m3fn".
        max_head_dim: The largest head dimension of q and k, and of v.
        forward: Whether the family has a forward.
        backward: Whether it has a backward.
        available: Whether this machine can run it.
        requires: What its instructions need and, for CUDA, which GPUs this build has code for.
        jvp: Whether it computes the tangents of forward mode.
        second: Whether it computes the gradients through these tangents.
    """

    name: str
    device: str
    dtype: str
    max_head_dim: int
    forward: bool
    backward: bool
    available: bool
    requires: str
    jvp: bool = False
    second: bool = False


def capabilities() -> list[Kernel]:
    """All kernels of this build, and whether this machine can run them; the fastest come last."""
    library, code = c_library(), cuda_code()
    rows: list[Kernel] = []
    info = _abi.sized(_abi.KernelInfo)
    while library.tilewise_kernel(len(rows), ctypes.byref(info)) == _abi.OK:
        name, available = info.name.decode(), bool(info.available)
        # A CUDA kernel that is available although the build has no CUDA code is emulated.
        describes_code = info.device == _abi.CUDA and (code or not available)
        rows.append(
            Kernel(
                name=name,
                device=_abi.DEVICE_NAMES[info.device],
                dtype=_abi.DTYPE_NAMES[info.dtype],
                max_head_dim=info.max_head_dim,
                forward=bool(info.forward),
                backward=bool(info.backward),
                available=available,
                requires=info.requires_.decode()
                + (_oldest_code(name, code) if describes_code else ""),
                jvp=bool(info.jvp),
                second=bool(info.second),
            )
        )
    return rows


def cuda_code() -> list[dict[str, Any]]:
    """The CUDA code of this build: tile table (0: none), sm, and whether it is PTX."""
    library = c_library()
    rows: list[dict[str, Any]] = []
    info = _abi.sized(_abi.CudaCodeInfo)
    while library.tilewise_cuda_code(len(rows), ctypes.byref(info)) == _abi.OK:
        rows.append({"table": info.table, "sm": info.sm, "ptx": bool(info.ptx)})
    return rows


def family_of(table: int) -> str:
    """The CUDA family whose kernels use this tile table."""
    families = {number: family for family, number in OWN_TABLE.items()}
    return families.get(table, "cuda.mma_sync")


def _oldest_code(family: str, code: list[dict[str, Any]]) -> str:
    """The oldest GPU that this build has code for, which may be newer than the family needs."""
    versions = [row["sm"] for row in code if family_of(row["table"]) == family]
    if not versions:
        return "; this build has no code for it"
    return f"; its oldest code in this build is for sm_{min(versions)}"
