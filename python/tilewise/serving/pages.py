"""The assignment of pages to sequences, and the key/value tensors that consist of the pages."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise import _check

from .prefixes import Prefix, PrefixIndex


class PagePool:
    """Pages of equal size, which are assigned to the rows of one block table.

    A row belongs to a sequence in flight. Pages and rows are numbers on the host; the class does
    not access keys and values. Rows with the same prefix share its full pages, also after the
    row that filled them is released, until the pages are needed for something else: those that
    have not been used for the longest time go first.

    Args:
        pages: Number of pages.
        page_size: Tokens per page, at least 1.
        rows: Largest number of sequences that hold pages at once.
        share_prefixes: Whether rows share pages.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: an argument is less than 1.
    """

    def __init__(self, pages: int, page_size: int, rows: int, share_prefixes: bool = True) -> None:
        for name, value in (("pages", pages), ("page_size", page_size), ("rows", rows)):
            if _check.integer(name, value, "an integer") < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        self.pages, self.page_size, self._rows = pages, page_size, rows
        self._share_prefixes = share_prefixes
        self._table = torch.zeros(rows, pages, dtype=torch.int32, device="cpu")
        self.reset()

    def reset(self) -> None:
        """Frees all rows and pages, and forgets what the pages hold."""
        self._free = list(range(self.pages - 1, -1, -1))  # pages that hold nothing of use
        self._idle: dict[int, None] = {}  # known pages without a holder, the oldest first
        self._holders = [0] * self.pages
        self._free_rows = list(range(self._rows - 1, -1, -1))
        self._owned: list[list[int]] = [[] for _ in range(self._rows)]
        self._prefixes = PrefixIndex(self.page_size)
        self._published = [Prefix()] * self._rows  # the part of each row in the index

    @property
    def free_pages(self) -> int:
        return len(self._free) + len(self._idle)

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

    def admit(self, tokens: list[int]) -> tuple[int, int] | None:
        """Takes a row and pages for all tokens, and shares as many of the pages as possible.

        Returns:
            The row, and the number of tokens whose keys and values its pages hold already, which is
            less than the number of tokens; or None if there are not enough rows or pages.
        """
        prefix, shared = self._prefixes.find(tokens)
        missing = self.pages_of(len(tokens)) - len(shared)
        idle = sum(page in self._idle for page in shared)
        if not self._free_rows or missing > self.free_pages - idle:
            return None
        row = self.take_row()
        self._published[row] = prefix
        for page in shared:
            self._idle.pop(page, None)
            self._hold(row, page)
        self.grow(row, len(tokens))
        return row, len(shared) * self.page_size

    def sharable(self, filling: list[int], tokens: list[int]) -> int:
        """The number of tokens whose pages a sequence will find once those of `filling` are full.

        Args:
            filling: The tokens of the sequence whose pages are being filled.
            tokens: The tokens of the sequence that looks for pages.
        """
        size, count = self.page_size, 0
        last = min(len(filling), len(tokens) - 1) if self._share_prefixes else 0
        while (
            count + size <= last and filling[count : count + size] == tokens[count : count + size]
        ):
            count += size
        return count

    def grow(self, row: int, tokens: int) -> bool:
        """Gives the row enough pages for `tokens` tokens, or returns False and takes none."""
        missing = self.pages_of(tokens) - len(self._owned[row])
        if missing > self.free_pages:
            return False
        for _ in range(missing):
            self._hold(row, self._take())
        return True

    def publish(self, row: int, tokens: list[int], count: int) -> None:
        """Lets other rows share the full pages of the row.

        Args:
            row: The row.
            tokens: The tokens of its sequence.
            count: How many of them have their keys and values in the pages.
        """
        full = count // self.page_size
        if self._share_prefixes and full > self._published[row].pages:
            self._published[row] = self._prefixes.add(
                self._published[row], tokens[: full * self.page_size], self._owned[row]
            )

    def forget(self, row: int) -> None:
        """Keeps further rows from sharing the pages of the row."""
        for page in self._owned[row]:
            if page in self._prefixes:
                self._prefixes.forget(page)

    def release(self, row: int) -> None:
        """Frees the row, and the pages that no other row holds."""
        owned = self._owned[row]
        for page in reversed(owned):  # the first pages serve more sequences than the last
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._prefixes:
                    self._idle[page] = None
                else:
                    self._free.append(page)
        owned.clear()
        self._published[row] = Prefix()
        self._free_rows.append(row)

    def block_table(self, rows: list[int], tokens: int) -> Tensor:
        """The pages of the rows in order, int32 [len(rows), pages_of(tokens)].

        Entries past the pages of a row are stale, but are not read because of its length.
        """
        return self._table[rows, : self.pages_of(tokens)]

    def _take(self) -> int:
        """A free page."""
        if self._free:
            return self._free.pop()
        page = next(iter(self._idle))
        del self._idle[page]
        self._prefixes.forget(page)
        return page

    def _hold(self, row: int, page: int) -> None:
        owned = self._owned[row]
        self._table[row, len(owned)] = page
        self._holders[page] += 1
        owned.append(page)


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
