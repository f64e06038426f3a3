"""Index arrays with invalid entries, which on a GPU only the kernels read. Whatever the arrays
contain, nothing outside of the tensors is read or written (every buffer lies between inaccessible
pages), valid sequences have their usual results, the others are NaN, and the library says what was
wrong.

TILEWISE_INDEX_CASES is the number of random problems per test; case `i` has seed `i`, counted from
TILEWISE_INDEX_SEED on. TILEWISE_INDEX_DTYPES lists their dtypes, separated by commas.
"""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

import capi
import oracle
import yardstick
from bounds import UNIT, check_lse, check_out, sizes_of
from cases import Built, Case, flat
from cases import run as run_case
from index_faults import (
    DTYPES,
    HIGH,
    SEEDS,
    Expected,
    check_reported_fault,
    damage,
    entries_of,
    expect,
    is_layout,
    last_error,
    random_case,
    sees_bad_page,
)

pytestmark = pytest.mark.abi("cuda", "emulator")


# --- forward and backward -------------------------------------------------------------------------


def reference(b: Built, e: Expected) -> tuple[oracle.Result, object]:
    """The oracle's result for the sequences that are not lost, and the 16-bit yardstick."""
    b.sequences = e.sequences
    want = b.expected()
    yard = None if b.dtype == torch.float32 else yardstick.errors(b, want)
    return want, yard


def check_rows(b: Built, e: Expected, out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Check that lost rows are NaN; returns which rows have to be correct."""
    right = np.zeros(len(out), bool)
    if e.all_lost:
        assert np.isnan(out).all() and np.isnan(lse).all(), f"lost rows: {b.case}"
        return right
    right[:] = True
    for s, (first, last) in enumerate(e.rows):
        rows = slice(first, last)
        if e.lost[s]:
            assert np.isnan(out[rows]).all(), f"out of sequence {s}: {b.case}"
            assert np.isnan(lse[rows]).all(), f"lse of sequence {s}: {b.case}"
            right[rows] = False
        elif e.bad_pages[s]:
            used = e.sequences[s].rows
            affected = used[sees_bad_page(b, e, s)]
            assert np.isnan(out[affected]).all() and np.isnan(lse[affected]).all(), b.case
            # Rows near them may be NaN, but must not be wrong.
            right[used] = ~np.isnan(lse[used]).any(axis=1)
    return right


def compared(b: Built, want: oracle.Result, out: np.ndarray, lse: np.ndarray, right: np.ndarray):
    """(out, lse, want) with rows that need not be correct made equal. A NaN in the inputs, in rows
    that only the damaged arrays use, is not an error either."""
    right = right & np.isfinite(want.out).all(axis=(1, 2)) & ~np.isnan(want.lse).any(axis=1)
    out = np.where(right[:, None, None], out, np.nan_to_num(want.out))
    lse = np.where(right[:, None], lse, np.nan_to_num(want.lse, neginf=-np.inf))
    clean = dataclasses.replace(
        want, out=np.nan_to_num(want.out), lse=np.nan_to_num(want.lse, neginf=-np.inf)
    )
    return out, lse, clean


def built(case: Case) -> tuple[Built, np.random.Generator]:
    b = Built(case)
    # Unused rows and keys are ordinary numbers, so what damaged arrays read has a definite result.
    for name in ("q", "k", "v", "dout"):
        x = getattr(b, name)
        x.copy_(torch.nan_to_num(x, nan=0.25))
    if b.bias is not None:  # its shape gives the bounds
        b.attention.max_seqlen_q = b.bias.shape[2] if "r" in (case.bias or "") else 0
        b.attention.max_seqlen_k = b.bias.shape[3]
    return b, np.random.default_rng([case.seed, 2])


def too_small_bounds(b: Built, r: np.random.Generator) -> None:
    if b.bias is not None:
        return
    if r.integers(6) == 0 and {"cu_seqlens_q", "seqused_q"} & b.meta.keys():
        b.attention.max_seqlen_q = int(r.integers(1, 20))
    if r.integers(6) == 0 and {"cu_seqlens_k", "seqused_k"} & b.meta.keys():
        b.attention.max_seqlen_k = int(r.integers(1, 40))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_entries(dtype, seed):
    check_damaged(random_case(seed, dtype), can_go_backward=True)


@pytest.mark.parametrize("seed", SEEDS[::4])
def test_random_entries_of_latent_caches(seed):
    """The same with few rows, the head dimensions of latent caches and no option beside them."""
    case = random_case(seed, "bf16")
    few = {"rows": tuple(min(n, 4) for n in case.rows)}
    if case.used_q is not None:
        few["used_q"] = tuple(min(n, 4) for n in case.used_q)
    latent = dict(latent=True, head_dim=576, head_dim_v=512, heads_kv=1, softcap=0.0, bias=None)
    check_damaged(dataclasses.replace(case, **few, **latent), can_go_backward=False)


def check_damaged(case: Case, can_go_backward: bool) -> None:
    dtype = case.dtype
    b, r = built(case)
    if not any(x.numel() for x in b.meta.values()):
        return
    last_error()
    backward = bool(r.integers(2)) and can_go_backward
    run_case(b, backward=backward)
    assert last_error() is None, f"valid arrays: {b.case}"
    damage(b, r)
    too_small_bounds(b, r)
    e = expect(b)
    result = run_case(b, backward=False)
    check_reported_fault(b, e, last_error())
    want, yard = reference(b, e)
    where = f"{result.kernels} {b.case}"
    right = check_rows(b, e, result.out, result.lse)
    out, lse, clean = compared(b, want, result.out, result.lse, right)
    check_out(out, clean, dtype, yard, where)
    check_lse(lse, clean.lse, dtype, yard, where)
    if backward:
        check_backward(b, e, want, yard, dtype)


def check_backward(b: Built, e: Expected, want: oracle.Result, yard: object, dtype: str) -> None:
    """Runs the backward once with the forward's results, and once with their NaN replaced."""
    for clean in (False, True):
        if clean:
            b.out.view.copy_(torch.nan_to_num(b.out.view, nan=0.5))
            b.lse.view.copy_(torch.nan_to_num(b.lse.view, nan=0.5, neginf=-np.inf))
        gradients = b.gradients()
        b.attention.stream = b.device.stream
        info = capi.backward(b.attention, gradients)
        where = f"{info.kernel.decode()} clean={clean} {b.case}"
        check_reported_fault(b, e, last_error())
        for name, g in b.grads.items():
            assert g.stray_writes() == 0, f"d{name}: {where}"
        got = {name: flat(b.grads[name].view) for name in b.grads.keys() & set("qkv")}
        check_gradients(b, e, got, want, yard, where)


def check_gradients(
    b: Built, e: Expected, got: dict, want: oracle.Result, yard: object, where: str
) -> None:
    """Rows and keys of lost sequences, and of those with a bad page, are NaN; the others are
    correct."""
    lost = [e.lost[s] or bool(e.bad_pages[s]) or e.all_lost for s in range(b.batch)]
    if not any(lost) and not np.isfinite(want.dq).all():
        return
    rows = np.zeros(len(got["q"]), bool)
    for s, (first, last) in enumerate(e.rows):
        if lost[s]:
            rows_lost = np.arange(first, last) if e.lost[s] else e.sequences[s].rows
            assert np.isnan(got["q"][rows_lost]).all(), f"dq of sequence {s}: {where}"
        else:
            rows[e.sequences[s].rows] = True
    keys = np.zeros(len(got["k"]), bool)
    for s in range(b.batch):
        part = e.sequences[s]
        if not lost[s]:
            keys[part.grad_keys] = True
    for s in range(b.batch):  # with a broken cu_seqlens_k, a key may belong to several sequences
        if lost[s]:
            keys[e.sequences[s].grad_keys] = False
    cu = entries_of(b, "cu_seqlens_k")
    if cu is not None and "block_table" not in b.meta and not is_layout(cu, b.seqlen_k):
        for name in "qkv":
            assert np.isnan(got[name]).all(), f"d{name} without a layout: {where}"
        return
    sizes = sizes_of(b, want)
    unit = UNIT[b.case.dtype]
    for name, mask in (("q", rows), ("k", keys), ("v", keys)):
        target = getattr(want, f"d{name}")
        mask = mask & np.isfinite(target).all(axis=(1, 2))
        largest = float(np.abs(target[mask]).max(initial=0.0))
        if yard is None:
            bound = 1e-5 * largest + 60 * unit * sizes[name]
        else:
            bound = 3 * np.nan_to_num(yard[name], nan=0.1) + unit * (largest + 2 * sizes[name])
        error = np.abs(got[name][mask] - target[mask])
        assert (error <= bound).all(), f"d{name} off by {error.max()}, allowed {bound}: {where}"


# --- minimal cases for the error report ----------------------------------------------------------


PAGED = Case(
    dtype="bf16", rows=(1, 1), keys=(64, 64), used_k=(40, 9), page_size=16, heads_kv=1, group=2,
    head_dim=64, head_dim_v=64, seed=3,
)  # fmt: skip
# A decode whose keys are divided among CTAs: where a first chunk looks up pages ahead, it meets
# those of the next chunk.
CHUNKS = Case(
    dtype="bf16", rows=(4, 1, 0), keys=(258, 258, 258), used_k=(234, 152, 18), varlen_q=True,
    page_size=3, heads_kv=2, head_dim=64, head_dim_v=64, seed=5,
)  # fmt: skip
# The same with pages that hold TMA boxes.
BOXES = dataclasses.replace(CHUNKS, page_size=16, keys=(272, 272, 272))
VARLEN = Case(
    dtype="bf16", rows=(5, 3, 4), keys=(9, 5, 7), varlen_q=True, varlen_k=True, head_dim=64,
    head_dim_v=64, seed=4,
)  # fmt: skip

SINGLE = [
    (PAGED, "block_table", (0, 1), 2**20),
    (PAGED, "block_table", (0, 2), -1),
    *((CHUNKS, "block_table", (0, page), 2**20) for page in range(0, 78, 7)),
    *((BOXES, "block_table", (0, page), 2**20) for page in range(0, 15, 2)),
    (PAGED, "seqused_k", (1,), 65),
    (PAGED, "seqused_k", (0,), -3),
    (PAGED, "seqused_k", (0,), HIGH),
    (VARLEN, "cu_seqlens_q", (3,), 13),
    (VARLEN, "cu_seqlens_q", (1,), -5),
    (VARLEN, "cu_seqlens_q", (2,), 2),
    (VARLEN, "cu_seqlens_k", (3,), HIGH),
    (VARLEN, "cu_seqlens_k", (2,), 3),
    (dataclasses.replace(PAGED, page_size=0, kv_idx=(1, 2)), "kv_batch_idx", (1,), 3),
    (dataclasses.replace(PAGED, leftpad=(3, 4)), "leftpad_k", (0,), -2),
    (dataclasses.replace(PAGED, used_q=(1, 1)), "seqused_q", (1,), 2),
]


@pytest.mark.parametrize("order", ["forward", "reverse"])
@pytest.mark.parametrize("case, name, at, value", SINGLE)
def test_one_entry(case, name, at, value, order, device, monkeypatch):
    """`order`: in which the emulator runs CTAs. The first one that finds a fault records it."""
    if device.name == "emulator":
        monkeypatch.setenv("TILEWISE_EMULATOR_ORDER", order)
    elif order != "forward":
        pytest.skip("the order of CTAs is that of the device")
    b = Built(case)
    last_error()
    b.meta[name][at] = value
    e = expect(b)
    result = run_case(b, backward=False)
    check_rows(b, e, result.out, result.lse)
    error = last_error()
    assert error is not None and error.array.decode() == name, error and error.sentence
    assert error.value == value and error.index == at[0]
    if name == "block_table":
        assert error.entry == at[1]
    assert last_error() is None, "reading clears"


def test_keys_beyond_the_pages_are_counted_with_their_left_padding():
    case = dataclasses.replace(PAGED, used_k=None, leftpad=(3, 4), varlen_k=True)
    b = Built(case)
    last_error()
    b.meta["cu_seqlens_k"][1] = 70  # of sequence 0, whose pages hold 64
    run_case(b, backward=False)
    error = last_error()
    assert error is not None and (error.index, error.value, error.allowed) == (0, 70, 64)
    sentence = "cu_seqlens_k says that sequence 0 has 70 keys: it can have at most "
    assert error.sentence.decode().startswith(sentence)


def test_entries_that_no_row_reads_are_not_faults():
    """Entries past the length of a sequence, which engines leave uninitialised."""
    b = Built(PAGED)
    last_error()
    b.meta["block_table"][0, 3] = -1  # 40 keys lie in three pages
    b.meta["block_table"][1, 1:] = HIGH
    result = run_case(b, backward=False)
    assert last_error() is None
    want = b.expected()
    check_out(result.out, want, "bf16", yardstick.errors(b, want), "")


def test_check_gives_the_same_sentence():
    """`check` refuses with the sentence that is reported without it."""
    for case, name, at, value in SINGLE:
        b = Built(case)
        last_error()
        b.meta[name][at] = value
        run_case(b, backward=False)
        reported_sentence = last_error().sentence.decode()
        b.attention.check = 1
        info = capi.plan(b.attention)
        workspace = capi.Workspace(info.workspace_bytes)
        status = capi.library().tilewise_forward(
            ctypes.byref(b.attention), workspace.start, info.workspace_bytes
        )
        assert status == capi.INVALID_ARGUMENT
        assert capi.last_error() == reported_sentence
        assert last_error() is None
