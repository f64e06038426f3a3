"""Facts about GPUs and about the CUDA code of this build, as the library tells them."""

from __future__ import annotations

import ctypes
import re
from typing import Any

from tilewise import _abi
from tilewise._library import c_library

DTYPES = ("float32", "float32 (TF32)", "bfloat16", "float16")
# Head dimensions at which a kernel might change, odd ones for rows that are not aligned.
HEAD_DIMS = (63, 64, 80, 95, 96, 128, 160, 192, 224, 256, 257, 384, 512)
# What is asked of the planner: a name, and fields of the C struct.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, bias...": {"softcap": 30.0},
    "one row": {"batch": 8, "seqlen_q": 1, "seqlen_k": 16384},
}


def gpus() -> tuple[list[dict[str, Any]], str]:
    """The GPUs, and without one the reason."""
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


def plan(index: int, dtype: str, head_dim: int, case: str, which: int) -> dict[str, Any]:
    """Kernel, tile, splits and reason of the planner on GPU `index`; a refusal has no kernel."""
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
        # The sentence of all head dimensions alike, so that they stand in one line.
        why = re.sub(r" with head_dim \d+", "", library.tilewise_last_error().decode())
        return {"kernel": "-", "tile": "-", "splits": 0, "why": why}
    return {
        "kernel": info.kernel.decode(),
        "tile": f"{info.tile_q}x{info.tile_k}",
        "splits": info.splits,
        "why": info.why.decode(),
    }


def serves(index: int) -> list[dict[str, Any]]:
    """What runs on a GPU by dtype, problem and head dimension; equal neighbours together."""
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
    """E.g. "sm_90"; 0 is the code that serves every GPU, 901 that of sm_90a alone."""
    if table > 200 and table % 10 == 1:
        return f"sm_{table // 10}a"
    return f"sm_{table}" if table else "any"
