"""The C ABI as the tests call it: a ctypes mirror of tilewise.h, written by hand and independent of
the Python package, plus buffers that detect stray writes."""

from __future__ import annotations

import contextlib
import ctypes as c
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import devices

OK, INVALID_ARGUMENT, UNSUPPORTED, WORKSPACE_TOO_SMALL = range(4)
FORWARD, BACKWARD, JVP, SECOND = range(4)
OUT_DEFAULT, OUT_FLOAT32 = 0, 1
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FLOAT8_E4M3 = 3

Task = c.CFUNCTYPE(None, c.c_void_p, c.c_int64)
ParallelFor = c.CFUNCTYPE(None, c.c_void_p, c.c_int64, Task, c.c_void_p)


class Tensor(c.Structure):
    _fields_ = [("data", c.c_void_p)] + [
        (f"stride_{n}", c.c_int64) for n in ("batch", "row", "head")
    ]


class Parallel(c.Structure):
    _fields_ = [
        ("parallel_for", ParallelFor),
        ("user", c.c_void_p),
        ("threads", c.c_int32),
        ("reserved", c.c_int32),
    ]


def _fields(*groups: tuple[type, str]) -> list[tuple[str, type]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


class Attention(c.Structure):
    _fields_ = _fields(
        (c.c_uint32, "struct_size"),
        (c.c_int32, "device device_index dtype"),
        (c.c_void_p, "stream"),
        (c.c_int64, "batch seqlen_q seqlen_k heads_q heads_kv head_dim head_dim_v"),
        (Tensor, "q k v out"),
        (c.c_void_p, "lse"),
        (c.c_int64, "lse_stride_batch lse_stride_head window_left window_right"),
        (c.c_float, "scale softcap"),
        (c.c_void_p, "scale_ptr alibi_slopes"),
        (c.c_int64, "alibi_stride_batch"),
        (c.c_void_p, "bias"),
        (c.c_int64, "bias_stride_batch bias_stride_head bias_stride_row"),
        (c.c_int32, "bias_dtype"),
        (c.c_float, "dropout_p"),
        (c.c_uint64, "dropout_seed dropout_offset"),
        (c.c_void_p, "dropout_state sinks cu_seqlens_q cu_seqlens_k seqused_q seqused_k"),
        (c.c_int64, "max_seqlen_q max_seqlen_k"),
        (c.c_void_p, "block_table"),
        (c.c_int64, "block_table_stride block_table_width page_size pages"),
        (c.c_void_p, "kv_batch_idx"),
        (c.c_int64, "kv_batch"),
        (c.c_void_p, "leftpad_k"),
        (c.c_int32, "num_splits deterministic check tf32"),
        (c.c_void_p, "parallel"),
        (c.c_int32, "batch_invariant kv_float8"),
        (c.c_void_p, "k_descale v_descale"),
        (c.c_int64, "k_descale_stride_batch k_descale_stride_head"),
        (c.c_int64, "v_descale_stride_batch v_descale_stride_head"),
        (c.c_void_p, "lse_low diagonal"),
        (c.c_int64, "row_offset key_offset batch_offset head_offset heads_q_total"),
        (c.c_void_p, "mask"),
        (c.c_int32, "out_dtype reserved"),
        (c.c_void_p, "q_descale"),
        (c.c_int64, "q_descale_stride_batch q_descale_stride_head"),
        (c.c_void_p, "max_logits"),
    )


class Mask(c.Structure):
    _fields_ = _fields(
        (c.c_uint32, "struct_size"),
        (c.c_int32, "kind"),
        (c.c_int64, "batch heads rows keys"),
        (c.c_void_p, "first entries"),
        (c.c_int64, "entry_count"),
        (c.c_void_p, "bits"),
        (c.c_int64, "bit_blocks"),
    )


class Gradients(c.Structure):
    _fields_ = _fields(
        (c.c_uint32, "struct_size"),
        (c.c_int32, "reserved"),
        (Tensor, "dout dq dk dv"),
        (c.c_void_p, "dlse"),
        (c.c_int64, "dlse_stride_batch dlse_stride_head"),
        (c.c_void_p, "dbias"),
        (c.c_int64, "dbias_stride_batch dbias_stride_head dbias_stride_row dbias_keys dbias_rows"),
        (c.c_void_p, "dsinks dscale"),
    )


class Tangents(c.Structure):
    _fields_ = _fields(
        (c.c_uint32, "struct_size"),
        (c.c_int32, "reserved"),
        (Tensor, "q k v out"),
        (c.c_void_p, "lse"),
        (c.c_int64, "lse_stride_batch lse_stride_head"),
        (c.c_void_p, "bias"),
        (c.c_int64, "bias_stride_batch bias_stride_head bias_stride_row"),
        (c.c_void_p, "sinks scale"),
        (Tensor, "dout"),
        (c.c_void_p, "dlse"),
        (c.c_int64, "dlse_stride_batch dlse_stride_head"),
    )


class PlanInfo(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32),
        ("threads", c.c_int32),
        ("workspace_bytes", c.c_int64),
        ("splits", c.c_int64),
        ("tile_q", c.c_int32),
        ("tile_k", c.c_int32),
        ("kernel", c.c_char * 64),
        ("why", c.c_char * 256),
    ]


class KvAppend(c.Structure):
    _fields_ = _fields(
        (c.c_uint32, "struct_size"),
        (c.c_int32, "device device_index dtype"),
        (c.c_void_p, "stream"),
        (
            c.c_int64,
            "batch seqlen_q seqlen_new seqlen_k heads_q heads_kv head_dim head_dim_v",
        ),
        (Tensor, "q q_out k_new v_new k_cache v_cache"),
        (c.c_void_p, "cache_seqlens cu_seqlens_q cu_seqlens_new rotary_seqlens block_table"),
        (c.c_int64, "block_table_stride block_table_width page_size pages"),
        (c.c_void_p, "kv_batch_idx"),
        (c.c_int64, "kv_batch"),
        (c.c_void_p, "leftpad_k rotary_cos rotary_sin"),
        (c.c_int64, "rotary_rows rotary_dim"),
        (c.c_int32, "rotary_interleaved q_single_position"),
        (c.c_void_p, "parallel"),
        (c.c_int32, "kv_float8 check"),
        (c.c_void_p, "k_descale v_descale"),
        (c.c_int64, "k_descale_stride_batch k_descale_stride_head"),
        (c.c_int64, "v_descale_stride_batch v_descale_stride_head"),
    )


class KernelInfo(c.Structure):
    _fields_ = [
        ("struct_size", c.c_uint32),
        *((n, c.c_int32) for n in ["device", "dtype", "max_head_dim", "forward", "backward"]),
        *((n, c.c_int32) for n in ["available", "reserved"]),
        ("name", c.c_char * 64),
        ("requires_", c.c_char * 96),
    ]


def _library_path() -> Path:
    name = "libtilewise.dylib" if sys.platform == "darwin" else "libtilewise.so"
    folders = (
        [Path(os.environ["TILEWISE_LIBRARY_DIR"])] if "TILEWISE_LIBRARY_DIR" in os.environ else []
    )
    folders += [Path(p) / "tilewise" / "lib" for p in sys.path]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(
        f"{name}: build it and set TILEWISE_LIBRARY_DIR to its folder, or install the package"
    )


@functools.cache
def library() -> c.CDLL:
    lib = c.CDLL(str(_library_path()))
    lib.tilewise_last_error.restype = c.c_char_p
    lib.tilewise_version.restype = c.c_char_p
    lib.tilewise_cpu_isa.restype = c.c_char_p
    lib.tilewise_current_cpu.restype = c.c_char_p
    lib.tilewise_cpu_isa.argtypes = [c.c_int32, c.c_void_p]
    lib.tilewise_select_cpu.argtypes = [c.c_char_p]
    lib.tilewise_plan.argtypes = [c.c_void_p, c.c_void_p, c.c_int32, c.c_void_p]
    lib.tilewise_forward.argtypes = [c.c_void_p, c.c_void_p, c.c_int64]
    lib.tilewise_backward.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_int64]
    lib.tilewise_plan_tangents.argtypes = [
        c.c_void_p, c.c_void_p, c.c_void_p, c.c_int32, c.c_void_p,
    ]  # fmt: skip
    lib.tilewise_jvp.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_int64]
    lib.tilewise_second.argtypes = [c.c_void_p, c.c_void_p, c.c_void_p, c.c_void_p, c.c_int64]
    lib.tilewise_append_kv.argtypes = [c.c_void_p]
    lib.tilewise_kernel.argtypes = [c.c_int32, c.c_void_p]
    return lib


def last_error() -> str:
    return library().tilewise_last_error().decode()


@functools.cache
def instruction_sets() -> tuple[list[str], list[str]]:
    """The instruction sets of the build: those this machine can run, and those it lacks."""
    ran, missing, index = [], [], 0
    available = c.c_int32()
    while name := library().tilewise_cpu_isa(index, c.byref(available)):
        (ran if available.value else missing).append(name.decode())
        index += 1
    return ran, missing


def targets() -> list[str]:
    """The targets on which a case runs in turn: the CPU's instruction sets, or the one device."""
    device = devices.current()
    return instruction_sets()[0] if device.name == "cpu" else [device.name]


def on(target: str) -> contextlib.AbstractContextManager[None]:
    """Run the body on one of the targets."""
    return cpu(target) if devices.current().name == "cpu" else contextlib.nullcontext()


@contextlib.contextmanager
def cpu(name: str) -> Iterator[None]:
    """Run the body on one instruction set, then restore the best one."""
    status = library().tilewise_select_cpu(name.encode())
    assert status == OK, last_error()
    try:
        yield
    finally:
        assert library().tilewise_select_cpu(None) == OK, last_error()


MARGIN = 96  # elements of poison before and after every buffer


GUARD_BYTES = 64 * mmap.PAGESIZE  # bytes of inaccessible memory on either side of a buffer


def between_guard_pages(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` elements of host memory between inaccessible pages: touching anything past the last
    element, or before the page of the first one, ends the process."""
    page = mmap.PAGESIZE
    size = count * dtype.itemsize
    room = -(-size // page) * page
    memory = mmap.mmap(-1, GUARD_BYTES + room + GUARD_BYTES)
    start = c.addressof(c.c_char.from_buffer(memory))
    for guard in (start, start + GUARD_BYTES + room):
        assert c.CDLL(None).mprotect(c.c_void_p(guard), c.c_size_t(GUARD_BYTES), 0) == 0
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=GUARD_BYTES + room - size)


POISON = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Guarded:
    """A strided view inside a larger allocation whose every other byte is 0xFF (a NaN in every
    floating-point type): a read outside the view poisons the result, a write outside is
    detected."""

    base: torch.Tensor
    view: torch.Tensor

    @property
    def pointer(self) -> int:
        return self.view.data_ptr()

    def stray_writes(self) -> int:
        """Number of elements outside the view that no longer hold the poison."""
        bits = self.base.view(POISON[self.base.element_size()])
        outside = bits != -1
        view = outside.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())
        view.fill_(False)
        return int(outside.sum())

    def poison(self) -> None:
        self.base.view(POISON[self.base.element_size()]).fill_(-1)


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    order: Sequence[int] | None = None,
    pad: Sequence[int] | None = None,
    shift: int = 0,
) -> Guarded:
    """A poisoned buffer of `shape`. `order` lists the dimensions from the outermost in memory to
    the innermost (the last one stays last); `pad` leaves elements unused after each dimension;
    `shift` moves the start by that many elements, so that alignment varies. In host memory, which
    the emulator uses as well, inaccessible pages follow its last element and precede the page of
    its first one."""
    rank = len(shape)
    order = list(range(rank)) if order is None else list(order)
    pad = [0] * rank if pad is None else list(pad)
    strides, step = [0] * rank, 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim]) + pad[dim]
    if devices.current().memory.type == "cpu":
        span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
        base = between_guard_pages(MARGIN + shift + (span if 0 not in shape else 0), dtype)
    else:
        size = step + 2 * MARGIN + shift
        base = torch.empty(size, dtype=dtype, device=devices.current().memory)
    g = Guarded(base, base.as_strided(tuple(shape), strides, MARGIN + shift))
    g.poison()
    return g


def tensor(view: torch.Tensor | None, *, batched: bool = True) -> Tensor:
    """[B, S, H, D] (or with batched=False [S, H, D]) as the ABI's tensor."""
    if view is None:
        return Tensor()
    assert view.stride(-1) == 1 or view.shape[-1] <= 1
    lead = view.stride(0) if batched else 0
    return Tensor(view.data_ptr(), lead, view.stride(-3), view.stride(-2))


def pointer(x: torch.Tensor | Guarded | None) -> int | None:
    if x is None:
        return None
    return x.pointer if isinstance(x, Guarded) else x.data_ptr()


def parallel_hook(
    threads: int, run: Callable[[int, Callable[[int], None]], None] | None = None
) -> Parallel:
    """A hook that reports `threads` threads. `run(tasks, call)` must call `call(i)` for every i;
    the default does so one after the other. Keep the result alive during the call."""

    def parallel_for(_user: int, tasks: int, task: Callable, context: int) -> None:
        call = functools.partial(task, context)
        if run is None:
            for i in range(tasks):
                call(i)
        else:
            run(tasks, call)

    return Parallel(ParallelFor(parallel_for), None, threads, 0)


def plan(attention: Attention, gradients: Gradients | None = None) -> PlanInfo:
    """The plan of a valid problem; the test fails if there is none."""
    info = PlanInfo(struct_size=c.sizeof(PlanInfo))
    g = None if gradients is None else c.byref(gradients)
    direction = FORWARD if gradients is None else BACKWARD
    status = library().tilewise_plan(c.byref(attention), g, direction, c.byref(info))
    assert status == OK, last_error()
    return info


class Workspace:
    """Poisoned memory of exactly `size` usable bytes from a 64-byte boundary on: a kernel that
    relies on zeros, or on leftovers of an earlier call, computes with NaN. The memory is kept for
    the next call, because allocating fresh pages takes longer than a small problem does."""

    spare = threading.local()
    MARGIN = 4096
    FILL = 0xFF

    def __init__(self, size: int) -> None:
        need = size + 2 * self.MARGIN + 64
        memory = devices.current().memory
        self.base = getattr(self.spare, memory.type, None)
        if self.base is None or self.base.numel() < need:
            self.base = torch.empty(need, dtype=torch.uint8, device=memory)
            setattr(self.spare, memory.type, self.base)
        self.begin = (-self.base.data_ptr()) % 64 + self.MARGIN
        self.end = self.begin + size
        self.start = self.base.data_ptr() + self.begin
        if memory.type == "cpu":
            c.memset(self.start - self.MARGIN, self.FILL, size + 2 * self.MARGIN)
        else:
            self.base[self.begin - self.MARGIN : self.end + self.MARGIN].fill_(self.FILL)

    def check(self) -> None:
        margins = (
            self.base[self.begin - self.MARGIN : self.begin],
            self.base[self.end : self.end + self.MARGIN],
        )
        assert all(bool((m == self.FILL).all()) for m in margins), "written outside the workspace"


def forward(attention: Attention) -> PlanInfo:
    """Plan, provide exactly the workspace asked for, run."""
    info = plan(attention)
    workspace = Workspace(info.workspace_bytes)
    status = library().tilewise_forward(c.byref(attention), workspace.start, info.workspace_bytes)
    assert status == OK, last_error()
    workspace.check()
    return info


def jvp(attention: Attention, tangents: Tangents) -> PlanInfo:
    return _with_tangents(library().tilewise_jvp, JVP, attention, tangents)


def second(attention: Attention, tangents: Tangents, gradients: Gradients) -> PlanInfo:
    return _with_tangents(library().tilewise_second, SECOND, attention, tangents, gradients)


def _with_tangents(function: Callable[..., int], which: int, *structs: c.Structure) -> PlanInfo:
    info = PlanInfo(struct_size=c.sizeof(PlanInfo))
    given = [c.byref(s) for s in structs]
    planned = given if len(given) == 3 else [*given, None]
    status = library().tilewise_plan_tangents(*planned, which, c.byref(info))
    assert status == OK, last_error()
    workspace = Workspace(info.workspace_bytes)
    status = function(*given, workspace.start, info.workspace_bytes)
    assert status == OK, last_error()
    workspace.check()
    return info


def backward(attention: Attention, gradients: Gradients) -> PlanInfo:
    info = plan(attention, gradients)
    workspace = Workspace(info.workspace_bytes)
    status = library().tilewise_backward(
        c.byref(attention), c.byref(gradients), workspace.start, info.workspace_bytes
    )
    assert status == OK, last_error()
    workspace.check()
    return info
