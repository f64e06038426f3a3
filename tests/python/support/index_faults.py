"""Index arrays with invalid entries: random problems with damaged entries, the expected results,
and the fault that the library should report."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

import numpy as np

import capi
import devices
import oracle
from cases import Built, Case

CASES = int(os.environ.get("TILEWISE_INDEX_CASES", "40"))
FIRST = int(os.environ.get("TILEWISE_INDEX_SEED", "0"))
SEEDS = range(FIRST, FIRST + CASES)
DTYPES = os.environ.get("TILEWISE_INDEX_DTYPES", "bf16,fp32").split(",")
LOW, HIGH = -(2**31), 2**31 - 1


class IndexError(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint32),
        ("found", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("index", "entry", "value", "allowed")),
        ("array", ctypes.c_char * 32),
        ("sentence", ctypes.c_char * 256),
    ]


def last_error() -> IndexError | None:
    """The fault that the kernels found since the last call."""
    error = IndexError(struct_size=ctypes.sizeof(IndexError))
    status = capi.library().tilewise_last_index_error(devices.current().index, ctypes.byref(error))
    assert status == capi.OK, capi.last_error()
    return error if error.found else None


# --- random problems ------------------------------------------------------------------------------


def random_case(seed: int, dtype: str) -> Case:
    """Decoding or prefill with dense, varlen or paged keys, with every kind of index array."""
    r = np.random.default_rng([seed, 1])
    batch = int(r.integers(1, 5))
    varlen_q, varlen_k = bool(r.integers(2)), bool(r.integers(3) == 0)
    few = bool(r.integers(2))
    page_size = int(r.choice([0, 0, 1, 3, 16, 64, 128]))
    max_rows, max_keys = (4, 260) if few else (140, 140)
    if r.integers(4) == 0:
        max_rows, max_keys = 9, 20

    def lengths(varlen: bool, most: int) -> tuple[int, ...]:
        if varlen:
            return tuple(int(n) for n in r.integers(0, most + 1, batch))
        return (int(r.integers(1, most + 1)),) * batch

    rows, keys = lengths(varlen_q, max_rows), lengths(varlen_k, max_keys)
    if page_size and not varlen_k:
        keys = tuple(-(-n // page_size) * page_size for n in keys)
    used_k = tuple(int(r.integers(0, n + 1)) for n in keys) if r.integers(3) else None
    leftpad = None
    if r.integers(4) == 0:
        leftpad = tuple(int(r.integers(0, n + 1)) for n in used_k or keys)
    kv_idx = None
    if not page_size and not varlen_k and r.integers(3) == 0:
        kv_idx = tuple(int(n) for n in r.integers(0, batch + 1, batch))
    group = int(r.choice([1, 1, 2, 4]))
    dim = int(r.choice([64, 64, 64, 40]))
    return Case(
        dtype=dtype, rows=rows, keys=keys, varlen_q=varlen_q, varlen_k=varlen_k,
        tail_q=int(r.integers(3)) if varlen_q else 0, page_size=page_size, used_k=used_k,
        tail_k=int(r.integers(3)) if varlen_k and not page_size else 0,
        used_q=tuple(int(r.integers(0, n + 1)) for n in rows) if r.integers(4) == 0 else None,
        leftpad=leftpad, kv_idx=kv_idx, heads_kv=int(r.integers(1, 3)), group=group,
        head_dim=dim, head_dim_v=dim, splits=int(r.choice([0, 0, 1, 3])),
        window=[(-1, -1), (-1, 0), (int(r.integers(0, 60)), 0)][int(r.integers(3))],
        softcap=float(r.choice([0.0, 0.0, 0.0, 5.0])), sinks=bool(r.integers(4) == 0),
        bias="h" if r.integers(6) == 0 else None, deterministic=bool(r.integers(3) == 0),
        pad=int(r.choice([0, 0, 8])), spread=0.5 if dtype == "fp32" else 1.0, seed=seed,
    )  # fmt: skip


def damage(b: Built, r: np.random.Generator) -> None:
    """Replace one to three entries by other values, mostly invalid ones."""
    names = [name for name, x in b.meta.items() if x.numel()]
    for _ in range(int(r.integers(1, 4))):
        entries = b.meta[names[int(r.integers(len(names)))]]
        at = tuple(int(r.integers(n)) for n in entries.shape)
        old = int(entries[at])
        values = [-1, LOW, HIGH, 2**20, old + 1, old - 1, old + 40, int(r.integers(LOW, HIGH))]
        entries[at] = min(HIGH, max(LOW, int(r.choice(values))))


# --- expected results -----------------------------------------------------------------------------


@dataclass
class Expected:
    """The behaviour that the library must show for the arrays as they are."""

    lost: list[bool]  # per sequence: whether one of its entries is invalid
    bad_pages: list[set[int]]  # per sequence: the keys in use that have no page
    sequences: list[oracle.SequenceIndices]  # lost sequences have no rows and no keys
    rows: list[tuple[int, int]]  # per sequence, used or not; none when cu_seqlens_q is invalid
    all_lost: bool


def entries_of(b: Built, name: str) -> list[int] | None:
    return b.meta[name].tolist() if name in b.meta else None


def is_layout(cu: list[int], rows: int) -> bool:
    return cu[0] == 0 and all(np.diff(cu) >= 0) and cu[-1] <= rows


def has_pages(b: Built) -> bool:
    """Whether there is a block table; the library takes one without entries for none."""
    return "block_table" in b.meta and b.meta["block_table"].numel() > 0


def used_keys(b: Built, s: int) -> tuple[int, int, bool]:
    """(first, end, whether the arrays are valid) of the keys of a sequence, ignoring pages."""
    cu, used = entries_of(b, "cu_seqlens_k"), entries_of(b, "seqused_k")
    padding, slots = entries_of(b, "leftpad_k"), entries_of(b, "kv_batch_idx")
    paged = has_pages(b)
    room = length = b.seqlen_k
    fits = slots is None or 0 <= slots[s] < b.kv_batch
    if cu is not None:
        length = cu[s + 1] - cu[s]
        if not paged:
            room = length
            fits = fits and 0 <= cu[s] <= cu[s + 1] <= b.seqlen_k
    end = length if used is None else used[s]
    begin = 0 if padding is None else padding[s]
    fits = fits and 0 <= end <= room and 0 <= begin <= room
    most = b.attention.max_seqlen_k
    fits = fits and (most == 0 or end - begin <= most)
    return begin, end, fits


def expect(b: Built) -> Expected:
    cu, used = entries_of(b, "cu_seqlens_q"), entries_of(b, "seqused_q")
    all_lost = cu is not None and not is_layout(cu, b.seqlen_q)
    result = Expected([], [], [], [], all_lost)
    table = b.meta["block_table"].cpu().numpy() if "block_table" in b.meta else None
    for s in range(b.batch):
        first, last = (s * b.seqlen_q, (s + 1) * b.seqlen_q) if cu is None else (cu[s], cu[s + 1])
        begin, end, fits = used_keys(b, s)
        rows = last - first if used is None else used[s]
        fits = fits and not all_lost and 0 <= rows <= last - first
        fits = fits and (b.attention.max_seqlen_q == 0 or rows <= b.attention.max_seqlen_q)
        result.lost.append(not fits)
        result.rows.append((0, 0) if all_lost else (first, last))
        result.bad_pages.append(set())
        empty = np.zeros(0, int)
        if not fits:
            result.sequences.append(oracle.SequenceIndices(s, empty, empty, empty))
            continue
        keys = np.arange(begin, max(begin, end))
        if table is not None:
            size = b.case.page_size
            pages = table[s].astype(int)
            bad = [k for k in keys.tolist() if not 0 <= pages[k // size] < b.pages]
            result.bad_pages[s] = {k - begin for k in bad}
            places = np.clip(pages, 0, b.pages - 1)[keys // size] * size + keys % size
            grad_keys = s * b.seqlen_k + keys
        elif "cu_seqlens_k" in b.meta:
            places = grad_keys = b.meta["cu_seqlens_k"][s].item() + keys
        else:
            slots = entries_of(b, "kv_batch_idx")
            places = (s if slots is None else slots[s]) * b.seqlen_k + keys
            grad_keys = s * b.seqlen_k + keys
        result.sequences.append(
            oracle.SequenceIndices(s, first + np.arange(rows), places, grad_keys)
        )
    return result


def sees_bad_page(b: Built, e: Expected, s: int) -> np.ndarray:
    """For each row in use of a sequence, whether it sees a key that has no page."""
    rows, keys = len(e.sequences[s].rows), len(e.sequences[s].keys)
    left, right = b.case.window
    i = np.arange(rows)[:, None] + keys - rows
    j = np.array(sorted(e.bad_pages[s]), int)[None, :]
    seen = np.ones((rows, j.shape[1]), bool)
    if left >= 0:
        seen &= j >= i - left
    if right >= 0:
        seen &= j <= i + right
    return seen.any(axis=1)


def check_reported_fault(b: Built, e: Expected, error: IndexError | None) -> None:
    """A fault is reported whenever rows meet one, and only real faults are reported."""
    met = e.all_lost or any(
        (e.lost[s] and first < last) or sees_bad_page(b, e, s).any()
        for s, (first, last) in enumerate(e.rows)
    )
    # A cu_seqlens_k that does not start at 0 is invalid as well, but kernels need not notice it.
    cu = entries_of(b, "cu_seqlens_k")
    lie_well = cu is None or is_layout(cu, b.seqlen_k) or has_pages(b)
    none = lie_well and not e.all_lost and not any(e.lost) and not any(e.bad_pages)
    sentence = error.sentence.decode() if error else "nothing"
    assert error or not met, f"no fault was reported: {b.case}"
    assert not (error and none), f"{sentence}: {b.case}"
    if error is None:
        return
    name = error.array.decode()
    assert sentence.startswith(name) and str(error.allowed) in sentence, sentence
    if name == "block_table":
        assert b.meta[name][error.index, error.entry] == error.value, sentence
        assert not 0 <= error.value < b.pages
    elif name == "cu_seqlens_k" and "sequence" in sentence:
        assert error.value > error.allowed, sentence
    elif name in b.meta:
        assert b.meta[name][error.index] == error.value, sentence
    else:
        assert name in ("max_seqlen_q", "max_seqlen_k") and error.value > error.allowed, sentence
