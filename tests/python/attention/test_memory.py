"""Memory is linear in the sequence length, both in the plan and in a process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import capi
from cases import Built, Case
from paths import IMPORTS

MIB = 2**20


def workspace(case: Case, rows: int, keys: int, *, backward: bool, threads: int = 2) -> int:
    """Workspace bytes of the plan for `case` at other lengths (plans do not read the tensors)."""
    import ctypes

    b = Built(case)
    hook = capi.parallel_hook(threads)
    b.attention.parallel = ctypes.addressof(hook)
    b.attention.seqlen_q, b.attention.seqlen_k = rows, keys
    b.attention.lse_stride_head = rows
    b.attention.lse_stride_batch = rows * case.heads
    for name in ("q", "k", "v", "out"):
        t = getattr(b.attention, name)
        t.stride_batch = 2**40
    gradients = None
    if backward:
        gradients = b.gradients()
        for name in ("dout", "dq", "dk", "dv"):
            getattr(gradients, name).stride_batch = 2**40
    return capi.plan(b.attention, gradients).workspace_bytes


@pytest.mark.parametrize("isa", capi.instruction_sets()[0])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backward", [False, True])
def test_workspace_is_linear(backward, dtype, isa):
    """Twice the length needs at most twice the workspace; per token it is at most a few times the
    size of the fp32 gradients, and never a row of scores."""
    heads, dim = 4, 64
    case = Case(dtype, (8,), (8,), heads_kv=heads, head_dim=dim, head_dim_v=dim, window=(-1, 0))
    with capi.cpu(isa):
        sizes = [workspace(case, n, n, backward=backward) for n in (2**14, 2**15, 2**18)]
    assert sizes[1] <= 2 * sizes[0] + MIB
    assert sizes[2] <= 16 * sizes[0] + MIB
    per_token = 4 * heads * (dim * 8 + 8)  # eight fp32 rows (dq, dk, dv, packed operands) per token
    assert sizes[2] <= per_token * 2**18 + 64 * MIB


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("backward", [False, True])
def test_workspace_of_a_gpu_is_linear(backward, dtype):
    """The GPU workspace has the fp32 dq, row statistics and flags: a few fp32 rows per token and
    head."""
    case = Case(dtype, (8,), (8,), heads_kv=4, head_dim=64, head_dim_v=64, window=(-1, 0))
    sizes = [workspace(case, n, n, backward=backward) for n in (2**14, 2**15, 2**18)]
    assert sizes[1] <= 2 * sizes[0] + MIB
    assert sizes[2] <= 16 * sizes[0] + MIB
    assert sizes[2] <= 4 * 4 * (64 * 2 + 8) * 2**18 + 64 * MIB


PROGRAM = """
import json, resource, sys
sys.path[:0] = {paths!r}
import capi, torch, ctypes
from cases import Built, Case

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

capi.library().tilewise_select_cpu({isa!r}.encode())
case = Case({dtype!r}, ({rows},), ({keys},), head_dim=64, head_dim_v=64, window=(-1, 0))
b = Built(case)
gradients = b.gradients()
if not {backward}:
    info = capi.plan(b.attention)
else:
    capi.forward(b.attention)
    info = capi.plan(b.attention, gradients)
workspace = torch.empty(info.workspace_bytes + 64, dtype=torch.uint8)
start = -(-workspace.data_ptr() // 64) * 64
lib = capi.library()
before = peak()
# The address space is limited as well: an allocation that exceeds the allowance fails.
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + {allowance}, now + {allowance}))
if {backward}:
    status = lib.tilewise_backward(ctypes.byref(b.attention), ctypes.byref(gradients), start,
                                   info.workspace_bytes)
else:
    status = lib.tilewise_forward(ctypes.byref(b.attention), start, info.workspace_bytes)
after = peak()
finite = bool(torch.isfinite(b.out.view).all())
if {backward}:
    finite = all(bool(torch.isfinite(g.view).all()) for g in b.grads.values())
print(json.dumps(dict(status=status, grown=after - before, workspace=info.workspace_bytes,
                      finite=finite, error=capi.last_error())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and relies on RLIMIT_AS")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "backward,limit",
    [
        # One row of score tiles would be 256 x 262144 x 4 bytes = 256 MiB.
        (False, 48 * MIB),
        # dk and dv of 262144 keys in fp32 are 64 MiB each; the limit is those two and the tiles.
        (True, 160 * MIB),
    ],
)
def test_256k_tokens(backward, limit, dtype):
    """For 256 causal rows that see 256k keys, workspace, peak resident memory and address space
    stay within a fixed limit."""
    program = PROGRAM.format(
        paths=IMPORTS, isa=capi.instruction_sets()[0][-1], dtype=dtype,
        rows=256, keys=262144, backward=backward, allowance=limit + 64 * MIB,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == capi.OK, report
    assert report["finite"], report
    assert report["workspace"] <= limit, report
    assert report["grown"] <= limit, report


def test_no_memory_is_kept_between_calls():
    """A thousand calls of varying sizes leave the process no larger."""
    program = """
import resource, sys
sys.path[:0] = {paths!r}
from cases import Built, Case, run
builts = [Built(Case("bf16", (n,), (2 * n,), group=2, dropout_p=0.1)) for n in range(1, 120, 7)]
for b in builts:
    run(b)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(40):
    for b in builts:
        run(b)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program.format(paths=IMPORTS)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * 1024  # KiB; Python's own memory varies by a few MiB
