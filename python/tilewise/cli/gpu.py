"""Facts about GPUs and about the kernels that the planner chooses on them."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from tilewise import _abi
from tilewise._library import c_library
from tilewise._proofs import driver_release

DTYPES = ("float32", "float32 (TF32)", "bfloat16", "float16")
# Head dimensions at which the choice of the kernel might change; the rows of odd ones are not
# aligned.
HEAD_DIMS = (63, 64, 80, 95, 96, 128, 160, 192, 224, 256, 257, 384, 512)
# The problems to plan: a name, and the fields of the C struct that differ from the default.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, bias...": {"softcap": 30.0},
    "one row": {"batch": 8, "seqlen_q": 1, "seqlen_k": 16384},
}


def gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs, and the reason if there is none."""
    library = c_library()
    rows: list[dict[str, Any]] = []
    info = _abi.sized(_abi.GpuInfo)
    while library.tilewise_gpu(len(rows), ctypes.byref(info)) == _abi.OK:
        rows.append(
            {
                "index": len(rows),
                "name": info.name.decode(),
                "sm": info.sm,
                "multiprocessors": info.multiprocessors,
                "shared_bytes": info.shared_bytes,
                "l2_bytes": info.l2_bytes,
                "memory_bytes": info.memory_bytes,
                "table": info.table,
                "tensor_cores": bool(info.tensor_cores),
                "plain_cores": bool(info.plain_cores),
            }
        )
    return rows, "" if rows else library.tilewise_last_error().decode()


def cuda_versions() -> dict[str, str | None]:
    """The CUDA version of the library's runtime, the newest one of the driver, and the driver's
    own release; None for what there is not.
    """
    numbers = (ctypes.c_int32(), ctypes.c_int32())
    c_library().tilewise_cuda_versions(*(ctypes.byref(number) for number in numbers))
    runtime, driver = (
        f"{n.value // 1000}.{n.value % 1000 // 10}" if n.value else None for n in numbers
    )
    return {"runtime": runtime, "driver": driver, "driver_release": driver_release()}


def plan(index: int, dtype: str, head_dim: int, case: str, which: int) -> dict[str, Any]:
    """The planner's kernel ("-" for none), tile, splits and reason on GPU `index`."""
    library = c_library()
    name, _, tf32 = dtype.partition(" ")
    fields = {"batch": 4, "seqlen_q": 4096, "seqlen_k": 4096, **CASES[case]}
    a = _abi.sized(_abi.Attention)
    a.device, a.device_index, a.dtype = _abi.CUDA, index, _abi.DTYPES[name]
    a.heads_q = a.heads_kv = heads = 16
    a.head_dim, a.scale, a.tf32 = head_dim, 1.0, int(bool(tf32))
    a.window_left = a.window_right = -1
    for field, value in fields.items():
        setattr(a, field, value)
    row = heads * head_dim
    a.q = a.out = _abi.Tensor(None, a.seqlen_q * row, row, head_dim)
    a.k = a.v = _abi.Tensor(None, a.seqlen_k * row, row, head_dim)
    a.lse_stride_batch, a.lse_stride_head = heads * a.seqlen_q, a.seqlen_q
    g = _abi.sized(_abi.Gradients)
    g.dout = g.dq = a.q
    g.dk = g.dv = a.k
    info = _abi.sized(_abi.PlanInfo)
    gradients = ctypes.byref(g) if which == _abi.BACKWARD else None
    status = library.tilewise_plan(ctypes.byref(a), gradients, which, ctypes.byref(info))
    if status != _abi.OK:
        # Without the head dimension the reasons are equal, so that their rows can be merged.
        why = re.sub(r" with head_dim \d+", "", library.tilewise_last_error().decode())
        return {"kernel": "-", "tile": "-", "splits": 0, "why": why}
    return {
        "kernel": info.kernel.decode(),
        "tile": f"{info.tile_q}x{info.tile_k}",
        "splits": info.splits,
        "why": info.why.decode(),
    }


def planned_kernels(index: int) -> list[dict[str, Any]]:
    """The kernels on a GPU by dtype, problem and head dimension; equal neighbours share a row."""
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for case in CASES:
            begin = len(rows)
            for head_dim in HEAD_DIMS:
                forward = plan(index, dtype, head_dim, case, _abi.FORWARD)
                backward = plan(index, dtype, head_dim, case, _abi.BACKWARD)
                same = {"dtype": dtype, "case": case, "forward": forward, "backward": backward}
                last = rows[-1] if len(rows) > begin else None
                if last is not None and all(last[key] == value for key, value in same.items()):
                    last["head_dims"].append(head_dim)
                else:
                    rows.append({**same, "head_dims": [head_dim]})
    return rows


def table_name(table: int) -> str:
    """A name such as "sm_90"; 0 is the code for every GPU, and 901 is that for sm_90a only."""
    if table > 200 and table % 10 == 1:
        return f"sm_{table // 10}a"
    return f"sm_{table}" if table else "any"
