"""Invalid index arrays of an append: a key without a place in the cache is not written, and rows
outside of the rotary tables become NaN. See test_index_errors.py."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import capi
import devices
from cases import flat, offsets
from index_faults import DTYPES, HIGH, LOW, SEEDS, is_layout, last_error

pytestmark = pytest.mark.abi("cuda", "emulator")


@dataclass
class Appending:
    """New keys for a cache, with rotary embedding, and the index arrays that describe them."""

    a: capi.KvAppend
    arrays: dict[str, torch.Tensor]
    buffers: dict[str, capi.Guarded]
    rows_q: int
    rows_new: int


def appending(seed: int, dtype: torch.dtype) -> Appending:
    r = np.random.default_rng([seed, 3])
    batch, heads, dim = int(r.integers(1, 4)), int(r.integers(1, 3)), 32
    capacity, page_size = int(r.integers(8, 40)), int(r.choice([0, 0, 1, 4, 16]))
    varlen, rotary = bool(r.integers(2)), bool(r.integers(4))
    new, rows = int(r.integers(1, 5)), int(r.integers(1, 5))
    width = -(-capacity // page_size) if page_size else 0
    pages = batch * width + 2
    room = width * page_size if page_size else capacity
    before = r.integers(0, room - new + 1, batch)
    values = {"cache_seqlens": before}
    if r.integers(2):
        values["leftpad_k"] = r.integers(0, before + 1)
    if r.integers(2):
        values["rotary_seqlens"] = r.integers(0, room - max(new, rows) + 1, batch).clip(0)
    if page_size:
        values["block_table"] = r.permutation(pages)[: batch * width].reshape(batch, width)
    elif r.integers(2):
        values["kv_batch_idx"] = r.permutation(batch + 1)[:batch]
    if varlen:
        values["cu_seqlens_new"] = np.array(offsets((new,) * batch))
        values["cu_seqlens_q"] = np.array(offsets((rows,) * batch))
    kv_batch = batch + 1 if "kv_batch_idx" in values else batch
    lead = (pages, page_size) if page_size else (kv_batch, capacity)
    flat_or_not = lambda n: (batch * n,) if varlen else (batch, n)  # noqa: E731
    shapes = {
        "q": (*flat_or_not(rows), heads, dim), "q_out": (*flat_or_not(rows), heads, dim),
        "k_new": (*flat_or_not(new), heads, dim), "v_new": (*flat_or_not(new), heads, dim),
        "k_cache": (*lead, heads, dim), "v_cache": (*lead, heads, dim),
    }  # fmt: skip
    tables = room + 8
    shapes |= dict.fromkeys(("rotary_cos", "rotary_sin"), (tables, dim // 2))
    buffers = {name: capi.guarded(shape, dtype) for name, shape in shapes.items()}
    rng = np.random.default_rng([seed, 4])
    for g in buffers.values():
        g.view.copy_(torch.from_numpy(rng.standard_normal(g.view.shape).astype(np.float32)))
    arrays = {name: int32_of(x) for name, x in values.items()}
    a = capi.KvAppend(
        struct_size=ctypes.sizeof(capi.KvAppend), device=devices.current().code,
        device_index=devices.current().index, dtype=capi.DTYPE_CODES[dtype], batch=batch,
        seqlen_q=batch * rows if varlen else rows, seqlen_new=batch * new if varlen else new,
        seqlen_k=0 if page_size else capacity, heads_q=heads, heads_kv=heads, head_dim=dim,
        head_dim_v=dim, page_size=page_size, pages=pages if page_size else 0,
        block_table_width=width, block_table_stride=width, kv_batch=kv_batch, rotary_rows=tables,
        rotary_dim=dim, stream=devices.current().stream,
    )  # fmt: skip
    for name in ("q", "q_out", "k_new", "v_new"):
        setattr(a, name, capi.tensor(buffers[name].view, batched=not varlen))
    for name in ("k_cache", "v_cache"):
        setattr(a, name, capi.tensor(buffers[name].view))
    if rotary:
        a.rotary_cos, a.rotary_sin = buffers["rotary_cos"].pointer, buffers["rotary_sin"].pointer
    for name, x in arrays.items():
        setattr(a, name, x.data_ptr())
    return Appending(a, arrays, buffers, rows, new)


def int32_of(values: np.ndarray) -> torch.Tensor:
    g = capi.guarded(values.shape, torch.int32)
    g.view.copy_(torch.from_numpy(values.astype(np.int32)))
    return g.view


def append(x: Appending) -> dict[str, np.ndarray]:
    """The caches and q_out after the append; checks that nothing else has changed."""
    for name in ("k_cache", "v_cache"):
        x.buffers[name].view.fill_(7.0)
    x.buffers["q_out"].poison()
    status = capi.library().tilewise_append_kv(ctypes.byref(x.a))
    assert status == capi.OK, capi.last_error()
    for name, g in x.buffers.items():
        assert g.stray_writes() == 0, name
    names = ("k_cache", "v_cache", "q_out")
    return {n: x.buffers[n].view.detach().cpu().double().numpy().copy() for n in names}


def sequence_of_row(x: Appending, name: str, row: int, rows: int) -> tuple[int, int] | None:
    """(sequence, index) of a row of q or of the new keys, which have `rows` rows per sequence
    unless they are packed; None where it belongs to no sequence."""
    if name not in x.arrays:
        return divmod(row, rows)
    cu = x.arrays[name].tolist()
    if not is_layout(cu, x.a.seqlen_new if "new" in name else x.a.seqlen_q):
        return None  # the layout is invalid, so any sequence or none
    for s in range(x.a.batch):
        if cu[s] <= row < cu[s + 1]:
            return s, row - cu[s]
    return None


def entry(x: Appending, name: str, s: int, otherwise: int = 0) -> int:
    return int(x.arrays[name][s]) if name in x.arrays else otherwise


def position(x: Appending, s: int) -> int:
    if "rotary_seqlens" in x.arrays:
        return entry(x, "rotary_seqlens", s)
    return entry(x, "cache_seqlens", s) - entry(x, "leftpad_k", s)


def rotated(x: Appending, vector: np.ndarray, at: int) -> np.ndarray:
    """[heads, dim] rotated in halves; NaN where the tables have no such row."""
    if not x.a.rotary_cos:
        return vector
    if not 0 <= at < x.a.rotary_rows:
        return np.full_like(vector, np.nan)
    cos, sin = (x.buffers[f"rotary_{n}"].view[at].cpu().double().numpy() for n in ("cos", "sin"))
    low, high = np.split(vector, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, low * sin + high * cos], axis=-1)


def place(x: Appending, s: int, key: int) -> tuple[int, int] | None:
    a = x.a
    room = a.block_table_width * a.page_size if a.page_size else a.seqlen_k
    if entry(x, "cache_seqlens", s) < 0 or key >= room:
        return None
    if a.page_size:
        page = int(x.arrays["block_table"][s, key // a.page_size])
        return (page, key % a.page_size) if 0 <= page < a.pages else None
    slot = entry(x, "kv_batch_idx", s, s)
    return (slot, key) if 0 <= slot < a.kv_batch else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_appends(dtype, seed):
    x = appending(seed, capi.DTYPES[dtype])
    last_error()
    append(x)
    assert last_error() is None
    r = np.random.default_rng([seed, 5])
    for _ in range(int(r.integers(1, 3))):
        names = list(x.arrays)
        entries = x.arrays[names[int(r.integers(len(names)))]]
        at = tuple(int(r.integers(n)) for n in entries.shape)
        old = int(entries[at])
        values = [-1, LOW, HIGH, 2**20, old + 1, old + 40, int(r.integers(LOW, HIGH))]
        entries[at] = min(HIGH, int(r.choice(values)))
    got = append(x)
    error = last_error()
    flat_new = {n: flat(x.buffers[n].view) for n in ("k_new", "v_new", "q")}
    want = {n: np.full_like(got[n], 7.0) for n in ("k_cache", "v_cache")}
    written: dict[tuple[int, int], int] = {}
    broken = any(
        n in x.arrays and not is_layout(x.arrays[n].tolist(), rows)
        for n, rows in (("cu_seqlens_new", x.a.seqlen_new), ("cu_seqlens_q", x.a.seqlen_q))
    )
    fault = broken
    for row in range(len(flat_new["k_new"])):
        found = sequence_of_row(x, "cu_seqlens_new", row, x.rows_new)
        if found is None:
            continue
        s, i = found
        to = place(x, s, entry(x, "cache_seqlens", s) + i)
        at = position(x, s) + i
        fault |= to is None or bool(x.a.rotary_cos and not 0 <= at < x.a.rotary_rows)
        if to is None:
            continue
        written[to] = written.get(to, 0) + 1
        want["k_cache"][to] = rotated(x, flat_new["k_new"][row], at)
        want["v_cache"][to] = flat_new["v_new"][row]
    layout = "cu_seqlens_new" not in x.arrays or is_layout(
        x.arrays["cu_seqlens_new"].tolist(), x.a.seqlen_new
    )
    if layout:
        for to, times in written.items():  # written twice, either value may remain
            if times > 1:
                for n in ("k_cache", "v_cache"):
                    want[n][to] = got[n][to]
        for n in ("k_cache", "v_cache"):
            np.testing.assert_allclose(got[n], want[n], rtol=2e-2, atol=3e-2, err_msg=n)
    out = got["q_out"].reshape(-1, *got["q_out"].shape[-2:])
    if "cu_seqlens_q" not in x.arrays or is_layout(x.arrays["cu_seqlens_q"].tolist(), x.a.seqlen_q):
        for row in range(len(out)):
            found = sequence_of_row(x, "cu_seqlens_q", row, x.rows_q)
            expected = flat_new["q"][row]
            if found is not None:
                at = position(x, found[0]) + found[1]
                fault |= bool(x.a.rotary_cos and not 0 <= at < x.a.rotary_rows)
                expected = rotated(x, expected, at)
            np.testing.assert_allclose(out[row], expected, rtol=2e-2, atol=3e-2)
    if not broken:
        assert (error is not None) == fault, error and error.sentence
