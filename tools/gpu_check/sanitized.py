"""Runs the small problems of `shapes` through the C ABI, under compute-sanitizer.

  python -m gpu_check.sanitized [--share 2/8] [--only bf16-d64] [--emulated]
  python -m gpu_check.sanitized --queue FOLDER --until 1790000000   shares them with other processes

Results are not compared here; the tests do that. The workspace is memory that has not been written,
so that initcheck detects a kernel that reads it too early.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewise import _abi
from tilewise._library import c_library

from . import append
from .device_memory import Gpu, Host
from .shapes import Shape, groups, problems

CODES = {"bf16": 2, "fp16": 1, "fp32": 0, "tf32": 0}
Memory = Gpu | Host
# Bytes of the flag at the start of a backward's workspace (take_far_rows). Plain wgmma and simt
# have no flag; there the first two statistics of rows are hidden from initcheck.
FAR_ROWS_FLAG = 8


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values converted to the dtype's bits."""
    values = np.asarray(values, np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16) if dtype == "fp16" else values


class Call:
    """The buffers and structures of a shape."""

    def __init__(self, shape: Shape, memory: Memory) -> None:
        self.shape, self.memory = shape, memory
        self.rng = np.random.default_rng(1)
        self.size = 4 if shape.dtype in ("fp32", "tf32") else 2
        s = shape
        self.batch = len(s.rows)
        self.dim_v = s.head_dim_v or s.head_dim
        self.total_q = sum(s.rows) + s.tail if s.varlen else self.batch * s.rows[0]
        self.total_k = sum(s.keys) + s.tail if s.varlen else self.batch * s.keys[0]
        self.width = -(-s.keys[0] // s.page_size) if s.page_size else 0
        self.a: Any = _abi.sized(_abi.Attention)
        self._describe()
        self._tensors()
        self._lengths()
        self._score()
        self._results()

    def _describe(self) -> None:
        a, s = self.a, self.shape
        a.device, a.dtype = _abi.CUDA, CODES[s.dtype]
        if s.float8_queries:
            a.dtype = _abi.DTYPES["float8_e4m3fn"]
        a.batch, a.heads_q, a.heads_kv = self.batch, s.heads, s.heads_kv
        a.seqlen_q = self.total_q if s.varlen else s.rows[0]
        a.seqlen_k = self.total_k if s.varlen else s.keys[0]
        a.head_dim, a.head_dim_v = s.head_dim, self.dim_v
        a.window_left, a.window_right = s.window
        a.num_splits, a.deterministic, a.check = s.splits, s.deterministic, s.check
        a.tf32 = s.dtype == "tf32"

    def _random(self, rows: int, heads: int, dim: int, nan_row: int = -1) -> int:
        values = self.rng.standard_normal((rows, heads, dim), dtype=np.float32)
        if nan_row >= 0:
            values[nan_row] = np.nan
        return self.memory.upload(stored(values, self.shape.dtype))

    def _float8(self, rows: int, heads: int, dim: int, nan_row: int = -1) -> int:
        """float8 bytes of numbers up to 2, of either sign."""
        size = (rows, heads, dim)
        bits = self.rng.integers(0, 0x40, size) | self.rng.integers(0, 2, size) << 7
        if nan_row >= 0:
            bits[nan_row] = 0x7F
        return self.memory.upload(bits.astype(np.uint8))

    def _factors(self, name: str) -> None:
        heads = self.shape.heads_kv
        values = self.rng.uniform(0.5, 2.0, (self.batch, heads)).astype(np.float32)
        setattr(self.a, name, self.memory.upload(values))
        setattr(self.a, f"{name}_stride_batch", heads)
        setattr(self.a, f"{name}_stride_head", 1)

    def _view(self, data: int, heads: int, dim: int, rows: int) -> Any:
        return _abi.Tensor(data, rows * heads * dim, heads * dim, dim)

    def _tensors(self) -> None:
        a, s = self.a, self.shape
        rows = s.rows[0] if self.batch else 0
        self.rows_k, total_rows = s.keys[0], self.total_k
        if s.page_size:
            pages = self.batch * self.width + 2
            self.rows_k, total_rows = s.page_size, pages * s.page_size
            table = self.rng.permutation(pages)[: self.batch * self.width]
            a.block_table = self.memory.upload(table.astype(np.int32))
            a.block_table_stride = a.block_table_width = self.width
            a.page_size, a.pages = s.page_size, pages
        draw = self._float8 if s.float8_queries else self._random
        a.q = self._view(draw(self.total_q, s.heads, s.head_dim), s.heads, s.head_dim, rows)
        nan_row = 70 if s.nan else -1
        a.kv_float8 = s.float8
        draw = self._float8 if s.float8 else self._random
        keys_alone = (("k", s.head_dim),)
        for name, dim in keys_alone if s.latent else (*keys_alone, ("v", self.dim_v)):
            data = draw(total_rows, s.heads_kv, dim, nan_row)
            setattr(a, name, self._view(data, s.heads_kv, dim, self.rows_k))
            if s.float8:
                self._factors(f"{name}_descale")
        if s.latent:
            a.v = a.k
        out_size = 4 if s.float32_out else self.size
        out = self.memory.empty(self.total_q * s.heads * self.dim_v * out_size)
        a.out = self._view(out, s.heads, self.dim_v, rows)
        a.lse = self.memory.empty(4 * self.total_q * s.heads)
        a.lse_stride_head = self.total_q if s.varlen else rows
        a.lse_stride_batch = 0 if s.varlen else rows * s.heads

    def _int32(self, values: Any) -> int:
        return self.memory.upload(np.asarray(values, np.int32))

    def _lengths(self) -> None:
        a, s = self.a, self.shape
        if s.varlen:
            a.cu_seqlens_q = self._int32([0, *np.cumsum(s.rows)])
            if not s.page_size:
                a.cu_seqlens_k = self._int32([0, *np.cumsum(s.keys)])
        if s.used:
            a.seqused_q = self._int32([max(n - 7 * i, 0) for i, n in enumerate(s.rows)])
            a.seqused_k = self._int32([max(n - 33 * i, 1) for i, n in enumerate(s.keys)])
        if s.varlen_decode:
            a.seqused_k = self._int32([n if i == 3 else 40 + i for i, n in enumerate(s.keys)])
        if s.leftpad:
            a.leftpad_k = self._int32([min(5 * i + 3, n - 1) for i, n in enumerate(s.keys)])

    def _score(self) -> None:
        a, s = self.a, self.shape
        a.scale = s.head_dim**-0.5
        if s.sinks:
            a.sinks = self.memory.upload(self.rng.standard_normal(s.heads, dtype=np.float32))
        if "softcap" in s.options:
            a.softcap = 5.0
        if "dropout" in s.options:
            a.dropout_p, a.dropout_seed, a.dropout_offset = 0.2, 7, 9
        if "alibi" in s.options:
            a.alibi_slopes = self.memory.upload(np.full(s.heads, 0.02, np.float32))
        if "bias" in s.options:
            self._bias()

    def _bias(self) -> None:
        """fp32 together with other options, the problem's own dtype otherwise."""
        a, s = self.a, self.shape
        heads, batch = (1, 1) if s.bias_broadcast else (s.heads, self.batch)
        self.bias_rows = max(s.rows)
        self.bias_keys = self.width * s.page_size if s.page_size else max(s.keys)
        bias = self.rng.standard_normal(
            (batch, heads, self.bias_rows, self.bias_keys), dtype=np.float32
        )
        a.bias_dtype = CODES["fp32" if s.general else s.dtype]
        a.bias = self.memory.upload(stored(bias, "fp32" if s.general else s.dtype))
        a.bias_stride_row = self.bias_keys
        if not s.bias_broadcast:
            a.bias_stride_head = self.bias_rows * self.bias_keys
            a.bias_stride_batch = s.heads * a.bias_stride_head

    def _results(self) -> None:
        """A mask, and results that a call may ask for."""
        a, s = self.a, self.shape
        if s.float32_out:
            a.out_dtype = _abi.OUT_DTYPES["float32"]
        if s.max_logits:
            a.max_logits = self.memory.empty(4 * self.batch * s.heads)
        if s.mask:
            self.mask = self._mask_of_ranges() if s.mask == "ranges" else self._mask_of_blocks()
            a.mask = ctypes.pointer(self.mask)

    def _mask_of_ranges(self) -> Any:
        """The same for every sequence: the first rows see the first keys, the others a band."""
        rows, keys = max(self.shape.rows), max(self.shape.keys)
        entries = [[0, rows // 3, 0, keys // 2, 0], [rows // 3, rows, keys // 4, keys, 1]]
        mask = _abi.sized(_abi.Mask)
        mask.kind, mask.batch, mask.heads, mask.keys = _abi.MASK_RANGES, 1, 1, keys
        mask.first, mask.entries = self._int32([0, 2]), self._int32(entries)
        mask.entry_count = len(entries)
        return mask

    def _mask_of_blocks(self) -> Any:
        """The same for every sequence and head: in each row of blocks a partial block, then every
        other one full.
        """
        rows, keys = max(self.shape.rows), max(self.shape.keys)
        if self.shape.page_size:
            keys = self.width * self.shape.page_size
        row_blocks, key_blocks = (-(-n // _abi.MASK_BLOCK) for n in (rows, keys))
        row = [[0, 1, 0], *([b, b + 1, -1] for b in range(2, key_blocks, 2))]
        mask = _abi.sized(_abi.Mask)
        mask.kind, mask.batch, mask.heads = _abi.MASK_BLOCKS, 1, 1
        mask.rows, mask.keys = rows, keys
        mask.first = self._int32(np.arange(row_blocks + 1) * len(row))
        mask.entries, mask.entry_count = self._int32(row * row_blocks), len(row) * row_blocks
        bits = self.rng.integers(0, 2**32, (1, _abi.MASK_BLOCK, 4), dtype=np.uint32)
        mask.bits, mask.bit_blocks = self.memory.upload(bits), 1
        return mask

    def tangents(self) -> Any:
        """Tangents of q, k, v, bias and sinks, and gradients of the results' tangents."""
        t, a, s = _abi.sized(_abi.Tangents), self.a, self.shape
        rows, keys = s.rows[0], self.rows_k
        for name, heads, dim, count, total in (
            ("q", s.heads, s.head_dim, rows, self.total_q),
            ("k", s.heads_kv, s.head_dim, keys, self.total_k),
            ("v", s.heads_kv, self.dim_v, keys, self.total_k),
            ("dout", s.heads, self.dim_v, rows, self.total_q),
        ):
            setattr(t, name, self._view(self._random(total, heads, dim), heads, dim, count))
        out = self.memory.empty(self.total_q * s.heads * self.dim_v * self.size)
        t.out = self._view(out, s.heads, self.dim_v, rows)
        t.lse = self.memory.empty(4 * self.total_q * s.heads)
        for name in ("lse", "dlse"):
            setattr(t, f"{name}_stride_batch", a.lse_stride_batch)
            setattr(t, f"{name}_stride_head", a.lse_stride_head)
        t.dlse = self.memory.upload(
            self.rng.standard_normal(self.total_q * s.heads, dtype=np.float32)
        )
        if a.bias:
            t.bias = a.bias
            for name in ("batch", "head", "row"):
                setattr(t, f"bias_stride_{name}", getattr(a, f"bias_stride_{name}"))
        if a.sinks:
            t.sinks = self.memory.upload(self.rng.standard_normal(s.heads, dtype=np.float32))
        return t

    def gradients(self) -> Any:
        g, a, s = _abi.sized(_abi.Gradients), self.a, self.shape
        rows = s.rows[0]
        dout = self._random(self.total_q, s.heads, self.dim_v)
        g.dout = self._view(dout, s.heads, self.dim_v, rows)
        dq = self.memory.empty(self.total_q * s.heads * s.head_dim * self.size)
        g.dq = self._view(dq, s.heads, s.head_dim, rows)
        keys = self.width * s.page_size if s.page_size else s.keys[0]
        total = self.batch * keys if s.page_size else self.total_k
        for name, dim in (("dk", s.head_dim), ("dv", self.dim_v)):
            data = self.memory.empty(total * s.heads_kv * dim * self.size)
            setattr(g, name, self._view(data, s.heads_kv, dim, keys))
        g.dlse = self.memory.upload(
            self.rng.standard_normal(self.total_q * s.heads, dtype=np.float32)
        )
        g.dlse_stride_batch, g.dlse_stride_head = a.lse_stride_batch, a.lse_stride_head
        g.dscale = self.memory.empty(4)
        if s.sinks:
            g.dsinks = self.memory.empty(4 * s.heads)
        if "bias" in s.options:
            count = self.bias_rows * self.bias_keys
            count *= 1 if s.bias_broadcast else s.heads * self.batch
            g.dbias = self.memory.empty(4 * count)
            g.dbias_stride_row, g.dbias_stride_head = a.bias_stride_row, a.bias_stride_head
            g.dbias_stride_batch = a.bias_stride_batch
            g.dbias_rows, g.dbias_keys = self.bias_rows, self.bias_keys
        return g


class Pass(NamedTuple):
    """One pass over a problem: its name in the C library, its number, the structures it takes."""

    name: str
    number: int
    structures: tuple[Any, ...]

    def plan(self, call: Call) -> Any:
        library, info = c_library(), _abi.sized(_abi.PlanInfo)
        if self.number in (_abi.FORWARD, _abi.BACKWARD):
            gradients = self.structures[0] if self.structures else None
            status = library.tilewise_plan(call.a, gradients, self.number, info)
        else:
            tangents, gradients = (*self.structures, None)[:2]
            status = library.tilewise_plan_tangents(call.a, tangents, gradients, self.number, info)
        _abi.check(library, status)
        return info


def passes(call: Call) -> Iterator[Pass]:
    """The passes of a problem in an order in which each finds its inputs written."""
    yield Pass("forward", _abi.FORWARD, ())
    if call.shape.backward:
        yield Pass("backward", _abi.BACKWARD, (call.gradients(),))
    if call.shape.tangents:
        tangents = call.tangents()
        yield Pass("jvp", _abi.JVP, (tangents,))
        gradients = call.gradients()
        shape = call.shape
        if shape.dtype in ("bf16", "fp16") and shape.head_dim <= 128 and not shape.general:
            gradients.dscale = None  # tensor cores compute the others
        yield Pass("second", _abi.SECOND, (tangents, gradients))


def run(call: Call) -> list[str]:
    """Runs every pass of a problem; returns the names of the kernels."""
    library = c_library()
    names: list[str] = []
    for each in passes(call):
        info = each.plan(call)
        workspace = call.memory.empty(info.workspace_bytes)
        if call.shape.varlen_decode:  # arrival counters are read, and must work with any contents
            call.memory.fill(workspace, info.workspace_bytes, 0x5A)
        elif each.name == "backward":  # so must the flag of far rows (BackwardParams::far_rows)
            call.memory.fill(workspace, min(FAR_ROWS_FLAG, info.workspace_bytes), 0x5A)
        launch = getattr(library, f"tilewise_{each.name}")
        _abi.check(library, launch(call.a, *each.structures, workspace, info.workspace_bytes))
        call.memory.synchronize()
        names.append(f"{info.kernel.decode()} tile {info.tile_q}x{info.tile_k} x{info.splits}")
    return names


def take(mark: Path) -> bool:
    """Creates the mark. False if another process has created it before."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def taken(folder: Path, only: str, until: float) -> Iterator[str]:
    """Names of problems that no other process of this folder has taken, until that time
    (time.time): first whole groups, whose problems share kernels, then what remains of other
    groups.
    """
    grouped = (n for i, g in enumerate(groups(only)) if take(folder / f"group-{i}") for n in g)
    for name in itertools.chain(grouped, problems(only)):
        if time.time() > until:
            return
        if take(folder / name):
            yield name


def attempt(name: str, shape: Shape | None, memory: Memory) -> bool:
    """Runs a problem and prints the outcome, which the stages parse."""
    kernels = ["append"]
    try:
        if shape is None:
            append.run(name, memory)
        else:
            kernels = run(Call(shape, memory))
    except (ValueError, NotImplementedError) as error:
        print(f"failed {name}: {error}", flush=True)
        return False
    memory.free()
    print(f"ran {name}: {'; '.join(kernels)}", flush=True)
    return True


def main() -> int:
    """Runs a share of the problems, or takes problems from a queue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--share", default="0/1", help="K/N: every N-th problem, beginning with number K (from 0)"
    )
    parser.add_argument("--queue", type=Path, help="an empty folder; excludes --share")
    parser.add_argument(
        "--until", type=float, default=1e12, help="take no problem from the queue after this time"
    )
    parser.add_argument("--emulated", action="store_true", help="a build that emulates the GPU")
    parser.add_argument("--only", default="", help="problems whose name contains this")
    given = parser.parse_args()
    share, count = (int(x) for x in given.share.split("/"))
    memory: Memory = Host() if given.emulated else Gpu()
    known = problems(given.only)
    wanted: Any = list(known)[share::count]
    if given.queue:
        wanted = taken(given.queue, given.only, given.until)
    done, name = [], ""
    try:
        for name in wanted:
            done.append(attempt(name, known[name], memory))
    except RuntimeError as error:  # a GPU error, after which this process cannot use the GPU
        print(f"ended {name}: {error}", flush=True)
        return 1
    print(f"{sum(done)} of {len(done)} shapes run")
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
