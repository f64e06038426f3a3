"""The assignment of pages to sequences, and the key/value tensors that consist of the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import _check


class PagePool:
    """Pages of equal size, which are assigned to the rows of one block table.

    A row belongs to a sequence in flight. Pages and rows are numbers on the host; the class does
    not access keys and values.

    Args:
        pages: Number of pages.
        page_size: Tokens per page, at least 1.
        rows: Largest number of sequences that hold pages at once.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is less than 1.
    """

    def __init__(self, pages: int, page_size: int, rows: int) -> None:
        for name, value in (("pages", pages), ("page_size", page_size), ("rows", rows)):
            if _check.integer(name, value, "an integer") < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        self.pages, self.page_size, self._rows = pages, page_size, rows
        self._table = torch.zeros(rows, pages, dtype=torch.int32, device="cpu")
        self.reset()

    def reset(self) -> None:
        """Frees all rows and pages."""
        self._free = list(range(self.pages - 1, -1, -1))
        self._free_rows = list(range(self._rows - 1, -1, -1))
        self._owned: list[list[int]] = [[] for _ in range(self._rows)]

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def capacity(self) -> int:
        """The number of tokens that a sequence can have if it is the only one in the pool."""
        return self.pages * self.page_size

    def pages_of(self, tokens: int) -> int:
        """The number of pages that `tokens` tokens need."""
        return -(-tokens // self.page_size)

    def take_row(self) -> int:
        """Takes a free row, which holds no pages. Raises IndexError if no row is free."""
        return self._free_rows.pop()

    def grow(self, row: int, tokens: int) -> bool:
        """Gives the row enough pages for `tokens` tokens, or returns False and takes none."""
        owned = self._owned[row]
        missing = self.pages_of(tokens) - len(owned)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._table[row, len(owned)] = page
            owned.append(page)
        return True

    def release(self, row: int) -> None:
        """Frees the row and all of its pages."""
        self._free.extend(reversed(self._owned[row]))
        self._owned[row].clear()
        self._free_rows.append(row)

    def block_table(self, rows: list[int], tokens: int) -> Tensor:
        """The pages of the rows in order, int32 [len(rows), pages_of(tokens)].

        Entries past the pages of a row are stale, but are not read because of its length.
        """
        return self._table[rows, : self.pages_of(tokens)]


class PagedCache:
    """Keys and values [pages, page_size, Hkv, D] of each layer, allocated at its first use."""

    def __init__(self, pool: PagePool) -> None:
        self._shape = (pool.pages, pool.page_size)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The caches of a layer whose new keys and values are k and v [T, Hkv, D]."""
        if index not in self.layers:
            self.layers[index] = (
                k.new_empty(*self._shape, *k.shape[1:]),
                v.new_empty(*self._shape, *v.shape[1:]),
            )
        return self.layers[index]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for layer in self.layers.values() for x in layer)
