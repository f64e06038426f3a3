"""The choice of the requests that the next step advances, and by how many tokens."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence as List

from .pages import PagePool
from .sequence import Sequence


def split_budget(pending: List[int], budget: int) -> list[int]:
    """Divides the tokens of a step among prompts.

    Half of the budget belongs to the prompt that arrived first, so that a stream of short prompts
    cannot starve a long one. The rest goes to the shortest prompts first, so that a long prompt
    does not delay a short one. Tokens that those do not need go to the first prompt.

    Args:
        pending: Tokens of each prompt that the model has not seen yet, in order of arrival.
        budget: Number of tokens to divide.

    Returns:
        Tokens for each prompt, from 0 to its pending ones; their sum is
        min(budget, sum(pending)).
    """
    given = [0] * len(pending)
    if not pending:
        return given
    given[0] = min(pending[0], budget - budget // 2)
    budget -= given[0]
    for i in sorted(range(len(pending)), key=pending.__getitem__):
        more = min(pending[i] - given[i], budget)
        given[i] += more
        budget -= more
    return given


def _arrival(s: Sequence) -> int:
    return s.id


class Scheduler:
    """The queue of requests, the running batch, and the pages that it holds.

    Requests are admitted in order of arrival, each with pages for all of its tokens so far. One
    waits longer if a running prompt is about to fill the pages of at least half of its tokens, so
    that several answers to a prompt compute it once. Decoding takes further pages as sequences
    grow. When no page is free, the request that arrived last is preempted: it frees its pages and
    waits again. The oldest running request therefore always advances.

    Args:
        pool: The pages, with one row for each running request.
        step_tokens: Tokens per step, at least as many as the pool has rows.
    """

    def __init__(self, pool: PagePool, step_tokens: int) -> None:
        self.pool, self.step_tokens = pool, step_tokens
        self.waiting: deque[Sequence] = deque()  # in order of arrival
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0
        self.shared_tokens = 0  # tokens that were in pages when their request was admitted

    def in_flight(self) -> list[Sequence]:
        """The running requests, followed by the waiting ones."""
        return [*self.running, *self.waiting]

    def plan(self) -> dict[Sequence, int]:
        """The number of tokens by which the next step advances each sequence. Takes their pages."""
        self._grow()
        self._admit()
        decoding = [s for s in self.running if s.pending == 1]
        prompts = [s for s in self.running if s.pending > 1]
        # Decoding comes first and never waits for prompts: the budget has a token for every row.
        new_tokens = dict.fromkeys(decoding, 1)
        counts = split_budget([s.pending for s in prompts], self.step_tokens - len(new_tokens))
        new_tokens.update((s, n) for s, n in zip(prompts, counts, strict=True) if n)
        return new_tokens

    def remove(self, s: Sequence) -> None:
        """Removes a request that has ended, and frees its row and its pages."""
        if s.row >= 0:
            self.running.remove(s)
            self.pool.release(s.row)
        else:
            self.waiting.remove(s)

    def clear(self) -> list[Sequence]:
        """Removes all requests, whatever state an exception has left them and the pool in."""
        removed = self.in_flight()
        self.running.clear()
        self.waiting.clear()
        self.pool.reset()
        return removed

    def _grow(self) -> None:
        """Takes the pages that new tokens need, in order of arrival; preempts the last arrivals."""
        for s in list(self.running):
            while s.row >= 0 and not self.pool.grow(s.row, len(s.tokens)):
                victim = self.running.pop()
                self.pool.release(victim.row)
                victim.row, victim.cached = -1, 0
                bisect.insort(self.waiting, victim, key=_arrival)
                self.preemptions += 1

    def _admit(self) -> None:
        """Admits requests while there are rows, and pages for all of their tokens."""
        for s in list(self.waiting):
            if self._is_held_back(s):
                continue
            admitted = self.pool.admit(s.tokens)
            if admitted is None:
                return
            s.row, s.cached = admitted
            self.shared_tokens += s.cached
            self.waiting.remove(s)
            bisect.insort(self.running, s, key=_arrival)

    def _is_held_back(self, s: Sequence) -> bool:
        """Whether running prompts will fill the pages of at least half of the request's tokens."""
        for other in self.running:
            if other.pending > 1:
                count = self.pool.sharable(other.tokens, s.tokens)
                if other.cached < count and 2 * count >= len(s.tokens):
                    return True
        return False
