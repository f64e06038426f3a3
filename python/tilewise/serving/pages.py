"""Which page belongs to which sequence, and the key/value tensors that the pages are."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import _check


class PagePool:
    """Pages of equal size, handed out to rows of one block table.

    A row is a sequence in flight. Pages and rows are host-side numbers; nothing here touches keys.

    Args:
        pages: How many there are.
        page_size: Tokens of a page, at least 1.
        rows: Sequences that can hold pages at once.
    """

    def __init__(self, pages: int, page_size: int, rows: int) -> None:
        for name, value in (("pages", pages), ("page_size", page_size), ("rows", rows)):
            if _check.integer(name, value, "an integer") < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        self.pages, self.page_size, self._rows = pages, page_size, rows
        self._table = torch.zeros(rows, pages, dtype=torch.int32, device="cpu")
        self.reset()

    def reset(self) -> None:
        """Takes back all rows and pages."""
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
        """Tokens that a sequence alone in the pool can have."""
        return self.pages * self.page_size

    def pages_of(self, tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-tokens // self.page_size)

    def take_row(self) -> int:
        """A row that holds no page. Raises IndexError when none is free."""
        return self._free_rows.pop()

    def grow(self, row: int, tokens: int) -> bool:
        """Makes room for so many tokens in all; False, and nothing taken, where pages are short."""
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
        """Gives back the row and all of its pages."""
        self._free.extend(reversed(self._owned[row]))
        self._owned[row].clear()
        self._free_rows.append(row)

    def block_table(self, rows: list[int], tokens: int) -> Tensor:
        """int32 [len(rows), pages of so many tokens]: the pages of these rows, in order.

        Entries behind the pages of a row are leftovers, which its length keeps from being read.
        """
        return self._table[rows, : self.pages_of(tokens)]


class PagedCache:
    """Keys and values, [pages, page_size, Hkv, D] for each layer, made at its first use."""

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
