"""The index of full pages by the tokens in and before them, through which requests share pages."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from itertools import count
from typing import NamedTuple


class Prefix(NamedTuple):
    """A sequence of full pages, named by a number that no other sequence of tokens ever gets."""

    number: int = 0
    pages: int = 0  # how many


class PrefixIndex:
    """Finds the pages that hold a prefix of a sequence.

    A page is known by its own tokens and the prefix before it, so that equal tokens after different
    prefixes are different pages. When a page is forgotten, the pages after it are no longer
    found.

    Args:
        page_size: Tokens per page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size, self._numbers = page_size, count(1)
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._known: dict[int, tuple[int, tuple[int, tuple[int, ...]]]] = {}  # page: number, key

    def __contains__(self, page: int) -> bool:
        return page in self._known

    def find(self, tokens: Tokens[int]) -> tuple[Prefix, list[int]]:
        """The longest known prefix that does not contain the last token, and its pages."""
        pages: list[int] = []
        prefix = Prefix()
        while (prefix.pages + 1) * self._page_size < len(tokens):
            page = self._pages.get(self._key(prefix, tokens))
            if page is None:
                break
            pages.append(page)
            prefix = Prefix(self._known[page][0], prefix.pages + 1)
        return prefix, pages

    def add(self, prefix: Prefix, tokens: Tokens[int], pages: Tokens[int]) -> Prefix:
        """Makes known the pages that the tokens fill, except where equal pages are known already.

        Args:
            prefix: The prefix of the tokens whose pages were added before.
            tokens: The tokens of a sequence.
            pages: Its pages.

        Returns:
            The prefix of all full pages.
        """
        while (prefix.pages + 1) * self._page_size <= len(tokens):
            key, page = self._key(prefix, tokens), pages[prefix.pages]
            known = self._pages.setdefault(key, page)
            if known not in self._known:
                self._known[known] = (next(self._numbers), key)
            prefix = Prefix(self._known[known][0], prefix.pages + 1)
        return prefix

    def forget(self, page: int) -> None:
        """Makes a page unknown."""
        _, key = self._known.pop(page)
        del self._pages[key]

    def _key(self, prefix: Prefix, tokens: Tokens[int]) -> tuple[int, tuple[int, ...]]:
        """The key of the page that follows the prefix."""
        begin = prefix.pages * self._page_size
        return prefix.number, tuple(tokens[begin : begin + self._page_size])
