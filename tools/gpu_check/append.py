"""Small calls of tilewise_append_kv: contiguous and paged caches, both kinds of rotary
embedding.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tilewise import _abi
from tilewise._kvcache_numpy import KvAppend
from tilewise._library import c_library

from .device_memory import Gpu, Host

BATCH, NEW, CAPACITY, HEADS, HEADS_KV, DIM, DIM_V = 3, 5, 96, 4, 2, 40, 24


def run(name: str, memory: Gpu | Host) -> None:
    """Appends five keys to each of three sequences."""
    _, dtype, cache, rotary = name.split("-")
    size = 4 if dtype == "fp32" else 2
    rng = np.random.default_rng(1)

    def tensor(slots: int, rows: int, heads: int, dim: int, float8: bool = False) -> Any:
        bits = rng.integers(0, 0x3C00, slots * rows * heads * dim)  # numbers below 1 in every type
        kind: Any = np.uint32 if size == 4 else np.uint16
        if float8:
            bits, kind = bits >> 8, np.uint8
        data = memory.upload((bits << 16 if size == 4 else bits).astype(kind))
        return _abi.Tensor(data, rows * heads * dim, heads * dim, dim)

    def integers(values: Any) -> int:
        return memory.upload(np.asarray(values, np.int32))

    a = KvAppend(struct_size=ctypes.sizeof(KvAppend), device=_abi.CUDA)
    a.dtype = {"bf16": 2, "fp16": 1, "fp32": 0}[dtype]
    a.batch, a.seqlen_q, a.seqlen_new, a.seqlen_k = BATCH, NEW, NEW, CAPACITY
    a.heads_q, a.heads_kv, a.head_dim, a.head_dim_v = HEADS, HEADS_KV, DIM, DIM_V
    a.cache_seqlens = integers([0, 17, CAPACITY - NEW])
    a.k_new, a.v_new = tensor(BATCH, NEW, HEADS_KV, DIM), tensor(BATCH, NEW, HEADS_KV, DIM_V)
    slots, rows = (BATCH, CAPACITY)
    if cache == "paged":
        slots, rows = 8 * BATCH, 12
        a.block_table = integers(rng.permutation(slots))
        a.block_table_stride = a.block_table_width = 8
        a.page_size, a.pages = rows, slots
    elif cache == "indexed":
        slots = a.kv_batch = BATCH + 2
        a.kv_batch_idx = integers([4, 0, 2])
    a.kv_float8 = cache == "float8"
    if a.kv_float8:
        factors = memory.upload(np.full((BATCH, HEADS_KV), 0.5, np.float32))
        a.k_descale = a.v_descale = factors
        a.k_descale_stride_batch = a.v_descale_stride_batch = HEADS_KV
        a.k_descale_stride_head = a.v_descale_stride_head = 1
    a.k_cache = tensor(slots, rows, HEADS_KV, DIM, a.kv_float8)
    a.v_cache = tensor(slots, rows, HEADS_KV, DIM_V, a.kv_float8)
    if rotary != "plain":
        a.q, a.q_out = tensor(BATCH, NEW, HEADS, DIM), tensor(BATCH, NEW, HEADS, DIM)
        table = tensor(1, CAPACITY + NEW, 1, DIM // 2).data
        a.rotary_cos = a.rotary_sin = table
        a.rotary_rows, a.rotary_dim = CAPACITY + NEW, DIM
        a.rotary_interleaved = rotary == "pairs"
    library = c_library()
    library.tilewise_append_kv.argtypes = [ctypes.c_void_p]
    _abi.check(library, library.tilewise_append_kv(ctypes.byref(a)))
    memory.synchronize()
