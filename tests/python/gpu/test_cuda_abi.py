"""The C ABI on a GPU: streams, graphs, forced tile tables, workspaces with arbitrary contents."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import capi
import devices
from bounds import FORWARD_FACTOR, GRADIENT_FACTOR, largest
from cases import Built, Case, Outcome, check, flat, float64, run
from paths import IMPORTS

DTYPES = ["fp32", "bf16", "fp16"]
PLAIN = Case(
    rows=(110, 110), keys=(170, 170), heads_kv=1, group=2, window=(-1, 0), head_dim=64,
    head_dim_v=64, dlse=True, sinks=True,
)  # fmt: skip
GENERAL = dataclasses.replace(
    PLAIN, softcap=5.0, alibi="h", bias="hr", dropout_p=0.1, rows=(60, 110), keys=(130, 70),
    varlen_q=True, varlen_k=True, tail_q=5,
)  # fmt: skip
DECODE = Case(rows=(1,) * 2, keys=(900,) * 2, group=8, head_dim=64, head_dim_v=64, splits=3)
CASES = {"plain": PLAIN, "general": GENERAL, "decode": DECODE}


def same(a: Outcome, b: Outcome) -> list[str]:
    """Names of the results that are not bitwise equal."""
    pairs = {"out": (a.out, b.out), "lse": (a.lse, b.lse)}
    pairs |= {f"d{n}": (a.grads[n], b.grads[n]) for n in a.grads}
    return [name for name, (x, y) in pairs.items() if not np.array_equal(x, y)]


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_workspace_is_written_before_it_is_read(dtype, name, monkeypatch):
    """Zeros, ones, NaN bytes and large numbers in the workspace give the same bits."""
    b = Built(dataclasses.replace(CASES[name], dtype=dtype, deterministic=True))
    results = []
    for fill in (0xFF, 0x00, 0x01, 0x7F):
        monkeypatch.setattr(capi.Workspace, "FILL", fill)
        results.append(run(b))
    for fill, other in zip((0x00, 0x01, 0x7F), results[1:], strict=True):
        assert same(results[0], other) == [], f"workspace of {fill:#04x}"


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, 2, 3, 5])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_pointers_not_aligned_to_16_bytes(head_dim, shift, dtype):
    """Some or all tensors are misaligned: the kernels copy 16 bytes at a time where they can."""
    case = dataclasses.replace(PLAIN, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim)
    check(dataclasses.replace(case, shift=shift, rows=(70, 70), keys=(90, 90)))
    b = Built(dataclasses.replace(case, pad=8 - shift, rows=(33, 33), keys=(65, 65)))
    want = b.expected()
    got = run(b)
    unit = {"fp32": 2e-6, "bf16": 2**-6, "fp16": 2**-9}[dtype]
    assert np.abs(got.out - want.out).max() <= unit * largest(want.out)


@pytest.mark.abi("cuda", "emulator")
def test_missing_gpu_is_refused():
    count = torch.cuda.device_count() if devices.current().name == "cuda" else 1
    b = Built(PLAIN)
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    for index in (count, 99):
        b.attention.device_index = index
        plan = capi.library().tilewise_plan
        assert plan(ctypes.byref(b.attention), None, 0, ctypes.byref(info)) != capi.OK
        assert f"device_index is {index}" in capi.last_error()


FORCED = """
import sys
sys.path[:0] = {paths!r}
import capi, ctypes, devices
from cases import Built, Case, check
with devices.use({device!r}):
    case = Case({dtype!r}, rows=(100,), keys=(130,), head_dim=64, head_dim_v=64, window=(-1, 0))
    b = Built(case)
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    status = capi.library().tilewise_plan(ctypes.byref(b.attention), None, 0, ctypes.byref(info))
    if status == capi.OK:
        check(case)
        print("checked", info.kernel.decode(), "|", info.why.decode())
    else:
        print("refused", capi.last_error())
"""


def forced(architecture: str, dtype: str = "fp16") -> str:
    program = FORCED.format(paths=IMPORTS, device=devices.current().name, dtype=dtype)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TILEWISE_FORCE_ARCH": architecture},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["75", "80", "90", "120"])
def test_forced_tile_table(architecture, dtype):
    """The forced table computes the same result, or the error says that this build lacks its
    code."""
    said = forced(architecture, dtype)
    if said.startswith("refused"):
        assert architecture in said and "TILEWISE_FORCE_ARCH" in said, said
    else:
        assert "checked cuda." in said


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("architecture", ["77", "hopper", "-1", "1e3"])
def test_invalid_forced_arch_is_refused(architecture):
    said = forced(architecture)
    assert said.startswith("refused") and "TILEWISE_FORCE_ARCH" in said and architecture in said


@pytest.mark.abi("cuda", "emulator")
def test_plan_refuses_more_blocks_than_a_grid_can_have():
    b = Built(PLAIN)
    a = b.attention
    a.batch, a.heads_q, a.heads_kv, a.seqlen_q, a.seqlen_k = 2**31 - 1, 2, 2, 1, 1
    a.out.stride_batch, a.out.stride_row, a.out.stride_head, a.lse = 128, 128, 64, None
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    status = capi.library().tilewise_plan(ctypes.byref(a), None, 0, ctypes.byref(info))
    assert status == capi.UNSUPPORTED
    assert capi.last_error() == (
        "batch 2147483647, seqlen_q 1, keys 1, heads_q 2, heads_kv 2 and num_splits 0 together "
        "take 4294967294 blocks of a GPU: at most 2147483647 are allowed"
    )


# The rest of the file needs a GPU --------------------------------------------------------------


def launch(b: Built, gradients: capi.Gradients | None, workspace: torch.Tensor) -> None:
    """Launch asynchronously on torch's current stream."""
    b.attention.stream = b.device.stream
    lib, start = capi.library(), -(-workspace.data_ptr() // 64) * 64
    size = workspace.numel() - 64
    attention = ctypes.byref(b.attention)
    if gradients is None:
        status = lib.tilewise_forward(attention, start, size)
    else:
        status = lib.tilewise_backward(attention, ctypes.byref(gradients), start, size)
    assert status == capi.OK, capi.last_error()


def area(b: Built, gradients: capi.Gradients | None) -> torch.Tensor:
    size = capi.plan(b.attention, gradients).workspace_bytes
    return torch.empty(size + 64, dtype=torch.uint8, device=b.device.memory)


@pytest.mark.abi("cuda")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_capture_and_replay(dtype, name):
    """A graph is captured once and replayed on other numbers: an allocation or a synchronisation in
    a launch would end the capture."""
    case = dataclasses.replace(CASES[name], dtype=dtype, deterministic=True)
    b = Built(case)
    want = run(b)
    gradients = b.gradients()
    spaces = area(b, None), area(b, gradients)
    with devices.captured() as graph:
        launch(b, None, spaces[0])
        launch(b, gradients, spaces[1])
    results = [b.out, b.lse, *b.grads.values()]
    for numbers in (1, 2):
        if numbers == 2:
            fresh = Built(dataclasses.replace(case, seed=77))
            for part in ("q", "k", "v", "dout"):
                getattr(b, part).copy_(getattr(fresh, part))
            want = run(b)  # into new gradient buffers: the graph writes the old ones
        for x in results:
            x.poison()
        for space in spaces:
            space.fill_(0xFF)
        graph.replay()
        assert np.array_equal(flat(results[0].view), want.out), numbers
        assert np.array_equal(b.by_row(results[1].view), want.lse)
        for part, got in zip(want.grads, results[2:], strict=True):
            values = flat(got.view) if part in "qkv" else float64(got.view)
            assert np.array_equal(values, want.grads[part]), (numbers, part)


@pytest.mark.abi("cuda")
def test_check_is_refused_during_graph_capture():
    """The argument is refused without ending the capture or adding to it."""
    b = Built(dataclasses.replace(PLAIN, varlen_q=True, varlen_k=True))
    want = run(b)
    b.attention.check = 1
    checked, b.attention.check = area(b, None), 0
    plain = area(b, None)
    with devices.captured() as graph:
        b.attention.check, b.attention.stream = 1, b.device.stream
        start = -(-checked.data_ptr() // 64) * 64
        status = capi.library().tilewise_forward(
            ctypes.byref(b.attention), start, checked.numel() - 64
        )
        said = capi.last_error()
        b.attention.check = 0
        launch(b, None, plain)
    assert status == capi.INVALID_ARGUMENT
    assert said == (
        "check is 1 while the stream is being captured: it waits for the GPU, so it must be 0"
    )
    b.out.poison()
    graph.replay()
    assert np.array_equal(flat(b.out.view), want.out)


@pytest.mark.abi("cuda")
@pytest.mark.parametrize("dtype", DTYPES)
def test_separate_stream(dtype):
    """The inputs arrive on another stream, after work that takes a while."""
    b = Built(dataclasses.replace(PLAIN, dtype=dtype, deterministic=True))
    want = run(b)
    right = b.k.clone()
    b.k.zero_()
    gradients = b.gradients()
    spaces = area(b, None), area(b, gradients)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        b.k.copy_(right)
        launch(b, None, spaces[0])
        launch(b, gradients, spaces[1])
    stream.synchronize()
    assert np.array_equal(flat(b.out.view), want.out)
    for part in "qkv":
        assert np.array_equal(flat(b.grads[part].view), want.grads[part]), part


@pytest.mark.abi("cuda")
@pytest.mark.parametrize("name", CASES)
def test_launch_is_asynchronous(name):
    b = Built(CASES[name])
    gradients = b.gradients()
    spaces = area(b, None), area(b, gradients)
    launch(b, None, spaces[0])  # the first launch loads code, which takes time
    launch(b, gradients, spaces[1])
    torch.cuda.synchronize()
    begin = time.perf_counter()
    torch.cuda._sleep(3_000_000_000)  # more than a second
    launch(b, None, spaces[0])
    launch(b, gradients, spaces[1])
    launched = time.perf_counter() - begin
    torch.cuda.synchronize()
    assert launched < 0.5 * (time.perf_counter() - begin)


@pytest.mark.abi("cuda")
def test_gpu_other_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    other = dataclasses.replace(devices.ALL["cuda"], memory=torch.device("cuda", 1))
    devices.ALL["other"] = other
    try:
        with devices.use("other"):
            check(PLAIN)
            check(GENERAL)
    finally:
        del devices.ALL["other"]
    assert torch.cuda.current_device() == 0


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("head_dim", [64, 128, 200])
@pytest.mark.parametrize("case", [PLAIN, GENERAL], ids=["plain", "general"])
def test_tf32_error_is_near_that_of_plain_tf32_products(case, head_dim):
    import yardstick

    case = dataclasses.replace(case, head_dim=head_dim, head_dim_v=head_dim, tf32=True)
    b = Built(case)
    want, got = b.expected(), run(b)
    yard = yardstick.errors(b, want)
    targets = {"out": want.out, "q": want.dq, "k": want.dk, "v": want.dv}
    for name, target in targets.items():
        values = got.out if name == "out" else got.grads[name]
        error = np.abs(values - target).max()
        allowed = (FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR) * yard[name]
        assert error <= allowed + 1e-6 * largest(target), f"{name}: {error:.2e} > {allowed:.2e}"
    seen = np.isfinite(want.lse)
    assert np.array_equal(np.isfinite(got.lse), seen)
    assert np.abs(got.lse[seen] - want.lse[seen]).max() < 1e-2


@pytest.mark.abi("emulator")
@pytest.mark.parametrize("case", [PLAIN, GENERAL], ids=["plain", "general"])
def test_tf32_is_close_to_exact(case):
    """Operands have 11 significant bits: errors are within a few units of that."""
    b = Built(dataclasses.replace(case, tf32=True))
    want, got = b.expected(), run(b)
    assert np.abs(got.out - want.out).max() < 2**-8 * largest(want.out)
    for name, target in {"q": want.dq, "k": want.dk, "v": want.dv}.items():
        assert np.abs(got.grads[name] - target).max() < 2**-7 * largest(target), name
