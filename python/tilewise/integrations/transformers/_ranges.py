"""Mask functions of Transformers as ``tilewise.masks.Ranges``.

A mask function says whether a row sees a key: f(batch, head, row, key). Transformers composes it of
the functions in ``masking_utils``, whose captured variables say what they mean: a window, chunks,
spans within which tokens see each other, packed sequences. Each of them is a few trapezoids, so
that the whole function is as well, and nothing of the size of rows times keys is needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import masking_utils

from tilewise._mask_fields import host
from tilewise._trapezoids import Set, intersection, lists, rectangles, to_ranges, trapezoid

Numbers = npt.NDArray[np.int64]

_MOST = 2**16  # trapezoids of one sequence


class View(NamedTuple):
    """The rows and keys of a mask."""

    batch: int
    rows: int
    keys: int
    row_offset: int  # position of the first row
    key_offset: int  # position of the first key


def ranges_of(
    function: Any, view: View, visible: Tensor | None
) -> tuple[npt.NDArray[np.int32], ...] | None:
    """The arrays (entries, first) of ``Ranges`` with the meaning of a mask function.

    Args:
        function: The mask function.
        view: The rows and keys.
        visible: bool [batch, keys], False for padding; None: there is none.

    Returns:
        None if the function contains one that is not known here, or if it has too many pieces.
    """
    shown = None if visible is None else host(visible)
    read = _Reader()
    try:
        sets = [_of_sequence(function, b, view, shown, read) for b in range(view.batch)]
    except _UnknownFunctionError:
        return None
    return lists([to_ranges(of_sequence) for of_sequence in sets])


def captured(function: Any, name: str) -> dict[str, Any]:
    """The captured variables of a function of masking_utils with this name; {} for others."""
    if getattr(function, "__qualname__", None) != name:
        return {}
    if function.__module__ != masking_utils.__name__:
        return {}
    cells = function.__closure__ or ()
    return {
        variable: cell.cell_contents
        for variable, cell in zip(function.__code__.co_freevars, cells, strict=True)
    }


class _UnknownFunctionError(Exception):
    """The mask function has a part that is not known here, or too many pieces."""


class _Reader:
    """Reads tensors that a mask function has captured, each once for all sequences. The function
    keeps them alive, so an identity belongs to one tensor.
    """

    def __init__(self) -> None:
        self._copies: dict[int, npt.NDArray[Any]] = {}  # by the identity of the tensor

    def __call__(self, tensor: Tensor) -> npt.NDArray[Any]:
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = host(tensor)
        return self._copies[id(tensor)]


def _of_sequence(function: Any, b: int, view: View, visible: Any, read: _Reader) -> Set:
    """The trapezoids of one sequence, with rows and keys counted from the first of the view."""
    _, rows, keys, row_offset, key_offset = view
    row_span = (row_offset, row_offset + rows)
    key_span = (key_offset, key_offset + keys)
    sequence = _Sequence(b, row_span, key_span, read)
    parts = [trapezoid(row_span, key_span), sequence.trapezoids(function)]
    if visible is not None:
        spans, shown = _runs(visible[b])
        parts.append(rectangles(np.array(row_span), spans[shown.astype(bool)] + key_offset))
    common = _common(parts)
    shift = row_offset - key_offset
    moves = (row_offset, row_offset, key_offset, key_offset, -shift, -shift)
    return common - np.array(moves, np.int64)


class _Sequence(NamedTuple):
    """The sequence of a batch that a mask function is evaluated for."""

    number: int
    rows: tuple[int, int]  # begin and end of their positions
    keys: tuple[int, int]
    read: _Reader
    packed: Numbers | None = None  # number of the packed sequence that each token belongs to
    position: Numbers | None = None  # of each token in its packed sequence, if functions take these

    def trapezoids(self, function: Any) -> Set:
        """The trapezoids of a mask function, by position."""
        if function is masking_utils.causal_mask_function:
            return trapezoid(self.rows, self.keys, high=0)
        if function is masking_utils.bidirectional_mask_function:
            return trapezoid(self.rows, self.keys)
        if found := captured(function, "sliding_window_overlay.<locals>.inner_mask"):
            return trapezoid(self.rows, self.keys, low=1 - found["sliding_window"])
        if found := captured(function, "sliding_window_bidirectional_overlay.<locals>.inner_mask"):
            size = found["sliding_window"]
            return trapezoid(self.rows, self.keys, low=-size, high=size)
        if found := captured(function, "and_masks.<locals>.and_mask"):
            return self._of_all(found["mask_functions"])
        if found := captured(function, "or_masks.<locals>.or_mask"):
            return np.concatenate([self.trapezoids(part) for part in found["mask_functions"]])
        remapped = captured(function, "remap_positions_for_packed_sequence.<locals>.inner_mask")
        if remapped:
            return self._at(remapped["position_ids"]).trapezoids(remapped["mask_function"])
        return self._of_groups(function)

    def _of_all(self, functions: Any) -> Set:
        """The trapezoids of functions that must all show a pair."""
        packed = self.packed
        for function in functions:
            if found := captured(function, "packed_sequence_mask_function.<locals>.inner_mask"):
                packed = self._numbers(found["packed_sequence_mask"])
        within = self._replace(packed=packed)
        return _common([within.trapezoids(function) for function in functions])

    def _at(self, position_ids: Tensor) -> _Sequence:
        """The sequence for functions of positions within packed sequences.

        Differences of positions are those of tokens if both are in the same packed sequence, whose
        other pairs the function of packed sequences hides.
        """
        if self.packed is None:
            raise _UnknownFunctionError
        position = self._numbers(position_ids)
        same = np.diff(self.packed) == 0
        if len(position) != len(self.packed) or (np.diff(position)[same] != 1).any():
            raise _UnknownFunctionError
        return self._replace(position=position)

    def _of_groups(self, function: Any) -> Set:
        """The trapezoids of a function that shows the pairs of tokens with the same number."""
        if found := captured(function, "packed_sequence_mask_function.<locals>.inner_mask"):
            return _of_equal(*_runs(self._numbers(found["packed_sequence_mask"])))
        if found := captured(function, "blockwise_overlay.<locals>.inner_mask"):
            numbers = self._numbers(found["block_sequence_ids"])
            if self.position is not None:
                numbers = _taken(numbers, self.position)
            spans, groups = self._groups(numbers)
            in_span = numbers[spans[:, 0]] >= 0
            return _of_equal(spans[in_span], groups[in_span])
        if found := captured(function, "chunked_overlay.<locals>.inner_mask"):
            position = self.position
            if position is None:
                position = np.arange(max(self.rows[1], self.keys[1]))
            first = int(self.read(found["left_padding"])[self.number])
            return _of_equal(*self._groups((position - first) // found["chunk_size"]))
        raise _UnknownFunctionError

    def _groups(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The runs of tokens with the same number; with positions, packed sequences have groups of
        their own.
        """
        if self.position is not None and self.packed is not None:
            both = np.stack([self.packed, numbers])
            numbers = np.unique(both, axis=1, return_inverse=True)[1].reshape(-1)
        return _runs(numbers)

    def _numbers(self, of_tokens: Tensor) -> Numbers:
        """The sequence's numbers of a tensor [batch, tokens]."""
        if self.number >= of_tokens.shape[0]:
            raise _UnknownFunctionError
        numbers: Numbers = self.read(of_tokens)[self.number].astype(np.int64)
        if len(numbers) < max(self.rows[1], self.keys[1]):
            raise _UnknownFunctionError
        return numbers


def _common(sets: list[Set]) -> Set:
    """The trapezoids that all sets have in common."""
    common, *others = sets
    for other in others:
        if len(common) * len(other) > _MOST * 16:
            raise _UnknownFunctionError
        common = intersection(common, other)
    if len(common) > _MOST:
        raise _UnknownFunctionError
    return common


def _taken(numbers: Numbers, position: Numbers) -> Numbers:
    if position.min() < 0 or position.max() >= len(numbers):
        raise _UnknownFunctionError
    taken: Numbers = numbers[position]
    return taken


def _runs(numbers: npt.NDArray[Any]) -> tuple[Numbers, Numbers]:
    """The spans [n, 2] of tokens in a row that have the same number, and their numbers [n]."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(numbers)) + 1]).astype(np.int64)
    ends = np.concatenate([starts[1:], [len(numbers)]])
    return np.stack([starts, ends], axis=1), numbers[starts].astype(np.int64)


def _of_equal(spans: Numbers, groups: Numbers) -> Set:
    """The pairs of tokens in spans of the same group; the arrays are the results of ``_runs``."""
    order = np.argsort(groups, kind="stable")
    _, first, size = np.unique(groups[order], return_index=True, return_counts=True)
    if (size**2).sum() > _MOST:
        raise _UnknownFunctionError
    of_span = np.repeat(size, size)  # spans in the group of each span, in this order
    total = int(of_span.sum())
    number = np.arange(total) - np.repeat(np.cumsum(of_span) - of_span, of_span)
    left = np.repeat(np.arange(len(spans)), of_span)
    right = np.repeat(np.repeat(first, size), of_span) + number
    return rectangles(spans[order[left]], spans[order[right]])
