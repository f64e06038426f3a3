"""Invalid input is refused before anything is written, in one sentence that names the argument, the
value and what is allowed. The C++ tests corrupt every field once; these tests make the mistakes
that callers make, through another language, on every entry point that takes the field."""

from __future__ import annotations

import ctypes
import dataclasses
import random

import pytest
import torch

import capi
import devices
from cases import Built, Case, int32

pytestmark = pytest.mark.abi

DENSE = Case(
    rows=(6, 6), keys=(9, 9), group=2, heads_kv=2, window=(-1, 0), bias="bhr", sinks=True,
    alibi="bh", dlse=True, seed=1,
)  # fmt: skip
VARLEN = dataclasses.replace(
    DENSE, rows=(4, 6), keys=(9, 5), varlen_q=True, varlen_k=True, tail_q=2, tail_k=3
)
USED = dataclasses.replace(DENSE, used_q=(6, 2), used_k=(9, 4), leftpad=(0, 1))
PAGED = dataclasses.replace(DENSE, page_size=4, used_k=(9, 4))
INDEXED = dataclasses.replace(DENSE, kv_idx=(1, 2))

NAN, INF = float("nan"), float("inf")

# case, what to corrupt (a field, "tensor.field", "gradients.field" or an index array's entry),
# value
MISTAKES = [
    (DENSE, "dtype", 7), (DENSE, "dtype", -1), (DENSE, "device", 9), (DENSE, "device_index", 3),
    (DENSE, "batch", -1), (DENSE, "seqlen_q", -6), (DENSE, "seqlen_k", -1),
    (DENSE, "heads_q", 0), (DENSE, "heads_q", 3), (DENSE, "heads_kv", 0), (DENSE, "heads_kv", 3),
    (DENSE, "head_dim", 0), (DENSE, "head_dim", 577), (DENSE, "head_dim_v", -8),
    (DENSE, "head_dim_v", 1024), (DENSE, "scale", NAN), (DENSE, "scale", INF),
    (DENSE, "softcap", -1.0), (DENSE, "softcap", NAN), (DENSE, "dropout_p", 1.0),
    (DENSE, "dropout_p", -0.1), (DENSE, "dropout_p", NAN), (DENSE, "bias_dtype", 1),
    (DENSE, "bias_dtype", 99), (DENSE, "num_splits", -1), (DENSE, "deterministic", 2),
    (DENSE, "max_seqlen_q", -1), (DENSE, "max_seqlen_q", 5), (DENSE, "max_seqlen_k", 8),
    (DENSE, "tf32", 2), (DENSE, "batch", 2**62), (DENSE, "seqlen_q", 2**62),
    (DENSE, "heads_q", 2**62), (DENSE, "q.data", None), (DENSE, "k.data", None),
    (DENSE, "v.data", None), (DENSE, "out.data", None), (DENSE, "k.stride_batch", 2**61),
    (VARLEN, "cu_seqlens_q[0]", 1), (VARLEN, "cu_seqlens_q[1]", -4),
    (VARLEN, "cu_seqlens_q[1]", 11), (VARLEN, "cu_seqlens_q[2]", 13),
    (VARLEN, "cu_seqlens_k[0]", -1), (VARLEN, "cu_seqlens_k[2]", 18),
    (VARLEN, "cu_seqlens_k[1]", 15), (USED, "seqused_q[0]", 7), (USED, "seqused_q[1]", -1),
    (USED, "seqused_k[1]", 10), (USED, "seqused_k[0]", -2), (USED, "leftpad_k[1]", -1),
    (USED, "leftpad_k[0]", 10), (PAGED, "block_table[0]", -1), (PAGED, "block_table[1]", 8),
    (PAGED, "page_size", 0), (PAGED, "page_size", -4), (PAGED, "pages", 1),
    (PAGED, "block_table_width", -1), (INDEXED, "kv_batch_idx[0]", 3),
    (INDEXED, "kv_batch_idx[1]", -1), (INDEXED, "kv_batch", 2), (INDEXED, "kv_batch", -1),
]  # fmt: skip
# These are valid for tensors that are only read, whose rows may overlap.
FORWARD_MISTAKES = [
    (DENSE, "out.stride_row", 0), (DENSE, "out.stride_head", 1), (DENSE, "out.stride_batch", 0),
    (DENSE, "lse_stride_head", 0), (DENSE, "lse_stride_batch", 1), (VARLEN, "out.stride_row", 0),
]  # fmt: skip
GRADIENT_MISTAKES = [
    (DENSE, "gradients.dout.data", None), (DENSE, "gradients.dq.stride_row", 0),
    (DENSE, "gradients.dk.stride_head", 0), (DENSE, "gradients.dv.stride_batch", 0),
    (DENSE, "gradients.dbias_stride_row", 0), (DENSE, "gradients.dbias_keys", 8),
    (DENSE, "gradients.dbias_rows", 5), (DENSE, "gradients.reserved", 1), (DENSE, "lse", None),
    (DENSE, "bias", None), (DENSE, "sinks", None),
]  # fmt: skip


def corrupt(b: Built, g: capi.Gradients, what: str, value: object) -> str:
    """Make one thing invalid; returns the name that the message has to mention."""
    if "[" in what:
        name, index = what.rstrip("]").split("[")
        b.meta[name].view(-1)[int(index)] = value
        return name
    *path, field = what.split(".")
    at: object = b.attention
    if path and path[0] == "gradients":
        at, path = g, path[1:]
    for step in path:
        at = getattr(at, step)
    setattr(at, field, value)
    return path[0] if path else field


def memory(size: int) -> tuple[torch.Tensor, int]:
    """A workspace and its first 64-byte boundary."""
    area = torch.empty(size + 64, dtype=torch.uint8, device=devices.current().memory)
    return area, -(-area.data_ptr() // 64) * 64


def built(case: Case) -> Built:
    """The case built with index checks on: a GPU reads index entries only when asked to; the CPU
    always does."""
    b = Built(case)
    b.attention.check = 1
    b.attention.stream = devices.current().stream
    return b


def untouched(b: Built) -> bool:
    guards = [b.out, b.lse, *b.grads.values()]
    return all(bool((x.base.view(capi.POISON[x.base.element_size()]) == -1).all()) for x in guards)


def refused(status: int, name: str, value: object) -> None:
    message = capi.last_error()
    assert status == capi.INVALID_ARGUMENT, f"status {status}: {message}"
    # An overflowing product may be named by its factors, and a gradient by the tensor it belongs
    # to.
    assert name in message, f"{name!r} is not named in {message!r}"
    assert len(message) < 300 and "\n" not in message, message
    if isinstance(value, int) and abs(value) < 1000:
        assert str(value) in message, f"{value} is not given in {message!r}"


def ids(mistakes: list) -> list[str]:
    return [f"{what}={value}" for _, what, value in mistakes]


@pytest.mark.parametrize("case,what,value", MISTAKES, ids=ids(MISTAKES))
def test_attention(case, what, value):
    b = built(case)
    g = b.gradients()
    lib, (_area, start) = capi.library(), memory(2**22)
    name = corrupt(b, g, what, value)
    args = (start, 2**22)
    refused(lib.tilewise_forward(ctypes.byref(b.attention), *args), name, value)
    assert untouched(b)
    refused(lib.tilewise_backward(ctypes.byref(b.attention), ctypes.byref(g), *args), name, value)
    assert untouched(b)


@pytest.mark.parametrize("case,what,value", FORWARD_MISTAKES, ids=ids(FORWARD_MISTAKES))
def test_outputs_that_overlap(case, what, value):
    b = built(case)
    g = b.gradients()
    _area, start = memory(2**22)
    name = corrupt(b, g, what, value)
    status = capi.library().tilewise_forward(ctypes.byref(b.attention), start, 2**22)
    refused(status, name.removesuffix("_stride_head").removesuffix("_stride_batch"), value)
    assert untouched(b)


@pytest.mark.parametrize("case,what,value", GRADIENT_MISTAKES, ids=ids(GRADIENT_MISTAKES))
def test_gradients(case, what, value):
    b = built(case)
    g = b.gradients()
    _area, start = memory(2**22)
    name = corrupt(b, g, what, value)
    status = capi.library().tilewise_backward(
        ctypes.byref(b.attention), ctypes.byref(g), start, 2**22
    )
    refused(status, name, value)
    assert untouched(b)


def test_null_structs_and_small_workspace():
    lib = capi.library()
    b = built(DENSE)
    g = b.gradients()
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    refused(lib.tilewise_plan(None, None, 0, ctypes.byref(info)), "attention", None)
    refused(lib.tilewise_forward(None, None, 0), "attention", None)
    refused(lib.tilewise_backward(ctypes.byref(b.attention), None, None, 0), "gradients", None)
    refused(lib.tilewise_plan(ctypes.byref(b.attention), None, 0, None), "plan", None)
    refused(lib.tilewise_plan(ctypes.byref(b.attention), None, 5, ctypes.byref(info)), "pass", 5)
    for gradients in (None, g):
        need = capi.plan(b.attention, gradients).workspace_bytes
        if need == 0:
            continue
        _area, start = memory(need)
        for workspace, size, expected in (
            (start, need - 1, capi.WORKSPACE_TOO_SMALL),
            (start, 0, capi.WORKSPACE_TOO_SMALL),
            (None, need, capi.INVALID_ARGUMENT),
            (start + 4, need, capi.INVALID_ARGUMENT),
        ):
            if gradients is None:
                status = lib.tilewise_forward(ctypes.byref(b.attention), workspace, size)
            else:
                status = lib.tilewise_backward(
                    ctypes.byref(b.attention), ctypes.byref(g), workspace, size
                )
            assert status == expected, (workspace, size, capi.last_error())
            assert "workspace" in capi.last_error()
            assert untouched(b)


def test_error_message_is_that_of_the_last_call():
    b = built(DENSE)
    b.attention.head_dim = 600
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    plan = capi.library().tilewise_plan
    assert plan(ctypes.byref(b.attention), None, 0, ctypes.byref(info)) == capi.INVALID_ARGUMENT
    assert "600" in capi.last_error() and "576" in capi.last_error()
    b.attention.head_dim = 8
    assert plan(ctypes.byref(b.attention), None, 0, ctypes.byref(info)) == capi.OK
    assert capi.last_error() == ""


NUMBERS = [0, 1, 2, 3, 8, 63, 64, 512, 577, 2**31, 2**40, 2**62, 2**63 - 1, -1, -(2**63)]


def mutate(rng: random.Random, a: capi.Attention, g: capi.Gradients) -> None:
    kinds = (ctypes.c_int64, ctypes.c_int32)
    integers = [name for name, kind in capi.Attention._fields_ if kind in kinds]
    for _ in range(rng.randint(1, 4)):
        setattr(a, rng.choice(integers), rng.choice(NUMBERS))
    if rng.random() < 0.3:
        view = rng.choice([a.q, a.k, a.v, a.out, g.dq, g.dk, g.dv, g.dout])
        stride = rng.choice(["stride_batch", "stride_row", "stride_head"])
        setattr(view, stride, rng.choice(NUMBERS))


@pytest.mark.parametrize("case", [DENSE, VARLEN, PAGED, INDEXED], ids=["d", "v", "p", "i"])
def test_random_structs_are_planned_or_refused(case):
    """For structs of random numbers, a plan has a sane workspace size, a refusal has an error
    message, and nothing crashes."""
    rng = random.Random(7)
    b = built(case)
    g = b.gradients()
    info = capi.PlanInfo(struct_size=ctypes.sizeof(capi.PlanInfo))
    planned = 0
    for _ in range(3000):
        a, h = capi.Attention(), capi.Gradients()
        ctypes.memmove(ctypes.byref(a), ctypes.byref(b.attention), ctypes.sizeof(a))
        ctypes.memmove(ctypes.byref(h), ctypes.byref(g), ctypes.sizeof(h))
        mutate(rng, a, h)
        backward = rng.random() < 0.5
        gradients = ctypes.byref(h) if backward else None
        status = capi.library().tilewise_plan(
            ctypes.byref(a), gradients, int(backward), ctypes.byref(info)
        )
        if status == capi.OK:
            planned += 1
            assert info.workspace_bytes >= 0 and info.splits >= 1 and info.tile_q >= 1
            assert info.kernel and info.why
        else:
            assert status in (capi.INVALID_ARGUMENT, capi.UNSUPPORTED)
            assert capi.last_error()
    assert planned > 100, "some mutations are valid"


def test_entries_are_read_as_int32():
    """A negative last entry and int32's extremes must not wrap into valid numbers."""
    b = built(VARLEN)
    for entries in ([0, 4, -(2**31)], [0, 2**31 - 1, 2**31 - 1], [0, -1, 4]):
        cu = int32([0, 0, 0])
        cu.copy_(torch.tensor(entries))
        b.attention.cu_seqlens_q = cu.data_ptr()
        _area, start = memory(2**20)
        status = capi.library().tilewise_forward(ctypes.byref(b.attention), start, 2**20)
        refused(status, "cu_seqlens_q", None)
