"""The self-test of `tilewise doctor`: every instruction set of this machine against the oracle.

It calls the C ABI through ctypes, so it needs only NumPy; bf16 values are stored as 16-bit
patterns. A GPU ("gpu0", "gpu1") is tested like an instruction set; PyTorch allocates its memory.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from tilewise import _abi
from tilewise._library import c_library
from tilewise.cli import arrays, oracle, system
from tilewise.cli.oracle import Array

# Bounds of the error relative to the largest magnitude of the tensor. For fp32 they bound the whole
# computation. For fp16 and bf16 they allow a few roundings of the storage type: of the result, of
# the weights before their product with v, and of ds in the backward.
BOUNDS = {
    "float32": {"out": 1e-6, "lse": 1e-6, "dq": 2e-6, "dk": 2e-6, "dv": 2e-6},
    "float16": {"out": 2e-3, "lse": 1e-3, "dq": 4e-3, "dk": 4e-3, "dv": 4e-3},
    "bfloat16": {"out": 1.2e-2, "lse": 2e-3, "dq": 2.5e-2, "dk": 2.5e-2, "dv": 2.5e-2},
}
# fp32 on tensor cores is computed as three TF32 products, which omit the smallest terms.
GPU_FACTOR = {"float32": 4.0, "float16": 1.0, "bfloat16": 1.0}
GPU = "gpu"


@dataclass(frozen=True)
class Setting:
    """A problem of the self-test: its sizes and options."""

    name: str
    rows: int = 67
    keys: int = 131
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    alibi: bool = False
    bias: bool = False
    sinks: bool = False


# The sizes are multiples of no tile size on purpose.
SETTINGS = (
    Setting("full"),
    Setting("causal", rows=131, right=0),
    Setting("window", left=40, right=3),
    Setting("softcap", softcap=1.5, right=0),
    Setting("alibi", alibi=True, right=0),
    Setting("bias", bias=True),
    Setting("sinks", sinks=True, left=20, right=0),
    Setting("all options", left=50, right=9, softcap=2.0, alibi=True, bias=True, sinks=True),
    Setting("more rows than keys", rows=90, keys=33, right=0),
    Setting("decode", rows=1, keys=777, heads=8, head_dim=128, right=0),
    Setting("head dim 1", head_dim=1),
    Setting("head dim 80", head_dim=80, right=0),
    Setting("head dim 256", rows=33, keys=65, head_dim=256, right=0),
)


@dataclass
class Check:
    """One run: its errors relative to the largest magnitude, and the failure if there is one."""

    isa: str
    dtype: str
    setting: str
    kernel: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether there was no failure."""
        return not self.failure

    def to_json(self) -> dict[str, Any]:
        """The fields, and whether it passed."""
        return {**asdict(self), "passed": self.passed}


def plan_of_checks(isas: list[str]) -> list[tuple[str, str, Setting]]:
    """The runs of the self-test: instruction set, dtype, setting."""
    return [(isa, dtype, s) for isa in isas for dtype in BOUNDS for s in SETTINGS]


def run(isas: list[str]) -> Iterator[Check]:
    """Runs the checks one by one, and restores the instruction set afterwards."""
    for isa, dtype, setting in plan_of_checks(isas):
        with nullcontext() if isa.startswith(GPU) else system.forced_isa(isa):
            yield check(isa, dtype, setting)


def check(isa: str, dtype: str, setting: Setting) -> Check:
    """Compares forward and backward of one setting with the oracle."""
    result = Check(isa, dtype, setting.name)
    try:
        problem = _Problem(dtype, setting)
        index = int(isa.removeprefix(GPU)) if isa.startswith(GPU) else None
        result.kernel = problem.run(index)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        result.failure = str(error)
        return result
    expected = problem.expected()
    for name, bound in BOUNDS[dtype].items():
        bound = bound * GPU_FACTOR[dtype] if isa.startswith(GPU) else bound
        found = error_of(problem.results[name], getattr(expected, name))
        result.errors[name] = found
        if not found <= bound and not result.failure:
            result.failure = f"{name}: error {found:.1e}, allowed {bound:.1e}"
    return result


def error_of(found: Array, expected: Array) -> float:
    """The largest difference over the largest magnitude; infinite for a wrong inf or NaN."""
    finite = np.isfinite(expected)
    if not np.array_equal(found[~finite], expected[~finite]):
        return math.inf
    if not np.isfinite(found[finite]).all():
        return math.inf
    scale = np.abs(expected[finite]).max(initial=0.0) or 1.0
    return float(np.abs(found[finite] - expected[finite]).max(initial=0.0) / scale)


class _Problem:
    """The tensors of a setting in their storage type, and its forward and backward calls."""

    def __init__(self, dtype: str, setting: Setting) -> None:
        self.dtype, self.setting = dtype, setting
        s, batch = setting, 2
        random = np.random.default_rng(sum(setting.name.encode()))

        def draw(*shape: int) -> Array:
            return arrays.encode(random.standard_normal(shape), dtype)

        self.q = draw(batch, s.rows, s.heads, s.head_dim)
        self.k = draw(batch, s.keys, s.kv_heads, s.head_dim)
        self.v = draw(batch, s.keys, s.kv_heads, s.head_dim)
        self.dout = draw(*self.q.shape)
        self.slopes = _single(2.0 ** -np.arange(1, s.heads + 1)) if s.alibi else None
        self.bias = _single(random.standard_normal((s.rows, s.keys))) if s.bias else None
        self.sinks = _single(random.standard_normal(s.heads)) if s.sinks else None
        self.scale = s.head_dim**-0.5
        # The outputs start as NaN, so that the comparison finds elements that are not written.
        self.out, self.dq = arrays.poisoned(self.q), arrays.poisoned(self.q)
        self.dk, self.dv = arrays.poisoned(self.k), arrays.poisoned(self.v)
        self.lse = np.full((batch, s.heads, s.rows), np.nan, np.float32)

    @property
    def results(self) -> dict[str, Array]:
        """The results of the library in float64."""
        low = {n: arrays.decode(getattr(self, n), self.dtype) for n in ("out", "dq", "dk", "dv")}
        return {**low, "lse": self.lse.astype(np.float64)}

    def expected(self) -> oracle.Result:
        """The results of the oracle in double precision, from the rounded inputs."""
        s = self.setting
        options = oracle.Options(s.left, s.right, s.softcap, self.slopes, self.bias, self.sinks)
        q, k, v, dout = (arrays.decode(t, self.dtype) for t in (self.q, self.k, self.v, self.dout))
        return oracle.attention(q, k, v, dout, float(np.float32(self.scale)), options)

    def run(self, index: int | None = None) -> str:
        """Forward, then backward, on the CPU or on a GPU. Returns the name of the forward kernel.

        Raises:
            ValueError, NotImplementedError, RuntimeError: the library refused or failed.
        """
        library = c_library()
        memory = arrays.memory_of(index)
        attention, gradients = self._attention(memory), self._gradients(memory)
        if index is not None:
            attention.device, attention.device_index = _abi.CUDA, index
            attention.stream = memory.stream
        none = ctypes.POINTER(_abi.Gradients)()
        plans = []
        for which, given in ((_abi.FORWARD, none), (_abi.BACKWARD, ctypes.byref(gradients))):
            plan = _abi.sized(_abi.PlanInfo)
            status = library.tilewise_plan(
                ctypes.byref(attention), given, which, ctypes.byref(plan)
            )
            _abi.check(library, status)
            plans.append(plan)
        workspace = np.empty(max(p.workspace_bytes for p in plans) + arrays.ALIGNMENT, np.uint8)
        start = arrays.aligned(memory.address(workspace))
        size = [p.workspace_bytes for p in plans]
        status = library.tilewise_forward(ctypes.byref(attention), start, size[0])
        _abi.check(library, status)
        status = library.tilewise_backward(
            ctypes.byref(attention), ctypes.byref(gradients), start, size[1]
        )
        _abi.check(library, status)
        memory.read_back()
        name: bytes = plans[0].kernel
        return name.decode()

    def _attention(self, memory: arrays.HostMemory) -> Any:
        s = self.setting
        a = _abi.sized(_abi.Attention)
        a.device, a.dtype = _abi.CPU, _abi.DTYPES[self.dtype]
        a.batch, a.seqlen_q, a.seqlen_k = self.q.shape[0], s.rows, s.keys
        a.heads_q, a.heads_kv, a.head_dim = s.heads, s.kv_heads, s.head_dim
        a.q, a.k, a.v, a.out = (arrays.view(t, memory) for t in (self.q, self.k, self.v, self.out))
        a.lse = memory.address(self.lse)
        a.lse_stride_batch, a.lse_stride_head = s.heads * s.rows, s.rows
        a.window_left, a.window_right = s.left, s.right
        a.scale, a.softcap = self.scale, s.softcap
        if self.slopes is not None:
            a.alibi_slopes = memory.address(self.slopes)
        if self.bias is not None:
            a.bias, a.bias_stride_row = memory.address(self.bias), s.keys
            a.bias_dtype = _abi.DTYPES["float32"]
        if self.sinks is not None:
            a.sinks = memory.address(self.sinks)
        return a

    def _gradients(self, memory: arrays.HostMemory) -> Any:
        g = _abi.sized(_abi.Gradients)
        given = (self.dout, self.dq, self.dk, self.dv)
        g.dout, g.dq, g.dk, g.dv = (arrays.view(t, memory) for t in given)
        return g


def _single(values: Array) -> Array:
    return np.ascontiguousarray(values, dtype=np.float32)
