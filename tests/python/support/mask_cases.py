"""Masks of the tests: dense matrices, written from the definition in tilewise.h, and the structs of
the C ABI made of them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

import capi
import devices

RANGES, BLOCKS = 1, 2
FULL, CAUSAL, INVERSE_CAUSAL, BOTH = range(4)
BLOCK = 128

Range = tuple[int, int, int, int, int]  # row_begin, row_end, key_begin, key_end, kind
Bools = NDArray[np.bool_]


def dense_of_ranges(ranges: Sequence[Range], rows: int, keys: int) -> Bools:
    """[rows, keys]: the pairs that at least one rectangle shows."""
    seen = np.zeros((rows, keys), bool)
    i, j = np.arange(rows)[:, None], np.arange(keys)
    for first_row, end_row, first_key, end_key, kind in ranges:
        inside = (i >= first_row) & (i < end_row) & (j >= first_key) & (j < end_key)
        if kind & CAUSAL:  # the last row sees the last key
            inside = inside & (j - end_key <= i - end_row)
        if kind & INVERSE_CAUSAL:  # the first row sees the first key
            inside = inside & (j - first_key >= i - first_row)
        seen |= inside
    return seen


class MaskStruct:
    """A `tilewise_mask` and the arrays that it points to, in the memory of the current device."""

    def __init__(self, kind: int, first: object, entries: object, width: int, **sizes: int) -> None:
        listed = np.ascontiguousarray(entries, np.int32).reshape(-1, width)
        self.arrays: dict[str, torch.Tensor] = {}
        self.struct = capi.Mask(
            struct_size=ctypes.sizeof(capi.Mask), kind=kind, heads=1,
            first=self.pointer("first", np.ascontiguousarray(first, np.int32)),
            entries=self.pointer("entries", listed), entry_count=len(listed),
        )  # fmt: skip
        for name, value in sizes.items():
            setattr(self.struct, name, value)

    def pointer(self, name: str, array: NDArray[np.int32]) -> int:
        self.arrays[name] = devices.put(torch.from_numpy(array))
        return self.arrays[name].data_ptr()

    @property
    def address(self) -> int:
        return ctypes.addressof(self.struct)


def ranges_struct(sequences: Sequence[Sequence[Range]]) -> MaskStruct:
    """One list of ranges per sequence."""
    first = np.cumsum([0, *map(len, sequences)])
    entries = [entry for ranges in sequences for entry in ranges]
    return MaskStruct(RANGES, first, entries, 5, batch=len(sequences))


def blocks_struct(dense: Bools, rng: np.random.Generator) -> MaskStruct:
    """The struct of a dense mask [batch, heads, rows, keys].

    Neighbouring full blocks are one entry or more, and full blocks are sometimes stored as bits, as
    the format allows.
    """
    batch, heads, rows, keys = dense.shape
    key_blocks = -(-keys // BLOCK)
    first, entries, bits = [0], [], []
    for b, h, start in np.ndindex(batch, heads, -(-rows // BLOCK)):
        tile = np.zeros((BLOCK, key_blocks * BLOCK), bool)
        strip = dense[b, h, start * BLOCK : (start + 1) * BLOCK]
        tile[: len(strip), :keys] = strip
        inside = np.zeros_like(tile)  # pairs beyond the mask are hidden, whatever their bits
        inside[: len(strip), :keys] = True
        for k in range(key_blocks):
            at = slice(k * BLOCK, (k + 1) * BLOCK)
            block = tile[:, at]
            if (block | ~inside[:, at]).all() and rng.random() < 0.8:
                joins = len(entries) > first[-1] and entries[-1][1:] == [k, -1]
                if joins and rng.random() < 0.8:
                    entries[-1][1] = k + 1
                else:
                    entries.append([k, k + 1, -1])
            elif block.any() or rng.random() < 0.1:
                entries.append([k, k + 1, len(bits)])
                bits.append(np.packbits(block | ~inside[:, at], axis=1, bitorder="little"))
        first.append(len(entries))
    mask = MaskStruct(BLOCKS, first, entries, 3, batch=batch, rows=rows, keys=keys)
    mask.struct.heads = heads
    words = np.ascontiguousarray(np.array(bits, np.uint8).reshape(-1, BLOCK, 16)).view(np.int32)
    mask.struct.bits, mask.struct.bit_blocks = mask.pointer("bits", words), len(words)
    return mask


def random_dense(rng: np.random.Generator, shape: tuple[int, ...]) -> Bools:
    """Random pairs, in which many blocks are all visible or all hidden."""
    batch, heads, rows, keys = shape
    states = rng.integers(0, 3, (batch, heads, -(-rows // BLOCK), -(-keys // BLOCK)))
    states = states.repeat(BLOCK, axis=2).repeat(BLOCK, axis=3)[:, :, :rows, :keys]
    density = rng.choice([0.02, 0.5, 0.98])
    return (states == 2) | ((states == 1) & (rng.random(shape) < density))
