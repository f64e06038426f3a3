"""Instruction sets: every one that this machine supports runs, is selectable, and agrees."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import capi
from cases import Built, Case, run
from paths import IMPORTS

KNOWN = ["portable", "neon", "neon_bf16", "avx2", "avx512", "avx512_bf16", "amx"]
CASE = Case(
    rows=(70,), keys=(90,), heads_kv=2, group=2, head_dim=40, head_dim_v=72, window=(-1, 0),
    softcap=5.0, sinks=True, dropout_p=0.1,
)  # fmt: skip


def test_build_lists_its_sets_in_order():
    ran, missing = capi.instruction_sets()
    assert ran[0] == "portable", "the portable one runs everywhere"
    assert [name for name in KNOWN if name in ran + missing] == sorted(
        ran + missing, key=KNOWN.index
    )
    assert capi.library().tilewise_cpu_isa(99, None) is None
    assert capi.library().tilewise_cpu_isa(-1, None) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_availability_matches_proc_cpuinfo():
    flags = next(
        (
            set(line.split(":")[1].split())
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))  # x86, Arm
        ),
        None,
    )
    if flags is None:
        pytest.skip("neither x86 nor Arm")
    needs = {
        "portable": set(),
        "neon": {"asimd"},
        "neon_bf16": {"asimd", "bf16"},
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512_bf16": {"avx512_bf16"},
        "amx": {"amx_tile", "amx_bf16"},
    }
    ran, missing = capi.instruction_sets()
    for name in ran:
        assert needs[name] <= flags, name
    for name in missing:
        assert not needs[name] <= flags, f"{name} should be available here"


def test_selecting_an_instruction_set():
    lib = capi.library()
    ran, missing = capi.instruction_sets()
    for name in ran:
        with capi.cpu(name):
            assert lib.tilewise_current_cpu().decode() == name
            kernel = capi.plan(Built(CASE).attention).kernel.decode()
            assert kernel.startswith(f"cpu.{name}."), kernel
    assert lib.tilewise_current_cpu().decode() == ran[-1], "the best one is selected again"
    for name in ["sse9", "", *missing]:
        assert lib.tilewise_select_cpu(name.encode()) != capi.OK
        assert repr(name)[1:-1] in capi.last_error()
        assert lib.tilewise_current_cpu().decode() == ran[-1], "a refusal changes nothing"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_all_agree(dtype):
    b = Built(Case(**{**CASE.__dict__, "dtype": dtype}))
    results = {}
    for isa in capi.instruction_sets()[0]:
        with capi.cpu(isa):
            results[isa] = run(b)
    first = results["portable"]
    unit = {"fp32": 2e-6, "bf16": 2**-6, "fp16": 2**-9}[dtype]
    for isa, got in results.items():
        assert np.abs(got.out - first.out).max() <= unit * np.abs(first.out).max(), isa
        for name, values in got.grads.items():
            error = np.abs(values - first.grads[name]).max()
            assert error <= 2 * unit * np.abs(first.grads[name]).max(), (isa, name)


def current_cpu(value: str) -> subprocess.CompletedProcess:
    program = (
        f"import sys; sys.path[:0] = {IMPORTS!r}; import capi; "
        "print(capi.library().tilewise_current_cpu().decode())"
    )
    return subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TILEWISE_CPU": value},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.mark.parametrize("value", ["abc", "0", "-3", "2.5", "4097", "99999999999"])
def test_invalid_number_of_threads_is_refused(value):
    program = (
        "import numpy as np, tilewise\n"
        "x = np.zeros((1, 2, 1, 8), np.float32)\n"
        "tilewise.attention(x, x, x)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "TILEWISE_NUM_THREADS": value},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    sentence = f'TILEWISE_NUM_THREADS is "{value}": it must be a number from 1 to 4096'
    assert done.returncode == 1 and sentence in done.stderr


def test_runs_with_fewer_threads_when_creation_fails():
    program = (
        "import resource\n"
        "import numpy as np, tilewise\n"
        "x = np.ones((64, 40, 8, 64), np.float32)\n"
        "tilewise.capabilities()\n"  # loads everything that is loaded lazily
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)\n"
        "assert np.array_equal(tilewise.attention(x, x, x), x)"
    )

    def large_stacks() -> None:
        """A few large stacks use up the address space, and what remains suffices for a thread's own
        allocations; with small stacks, glibc occasionally ends the process."""
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (48 << 20, hard))

    done = subprocess.run(
        [sys.executable, "-c", program], preexec_fn=large_stacks,
        env={**os.environ, "TILEWISE_NUM_THREADS": "300", "MALLOC_ARENA_MAX": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_environment_variable_forces_an_instruction_set():
    for isa in capi.instruction_sets()[0]:
        assert current_cpu(isa).stdout.strip() == isa


def test_every_kernel_row_is_consistent():
    info = capi.KernelInfo(struct_size=ctypes.sizeof(capi.KernelInfo))
    ran, missing = capi.instruction_sets()
    rows = 0
    while capi.library().tilewise_kernel(rows, ctypes.byref(info)) == capi.OK:
        rows += 1
        if info.device == 0:
            isa = info.name.decode().split(".")[1]
            assert isa in ran + missing
            assert bool(info.available) == (isa in ran), info.name
            assert info.max_head_dim == 576
            assert info.forward == info.backward == 1
    assert rows >= 3 * len(ran)
