"""Which requests the next step works on, and on how many of their tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as List

from .pages import PagePool
from .sequence import Sequence


def shares(pending: List[int], budget: int) -> list[int]:
    """Divides the tokens of a step among prompts.

    Half of the budget belongs to the prompt that came first, so no stream of short prompts can
    starve a long one. The rest goes to the shortest prompts first, so no long prompt holds up a
    short one. What those do not need falls back to the first.

    Args:
        pending: Tokens that each prompt still has to show the model, in order of arrival.
        budget: Tokens that may be handed out.

    Returns:
        Tokens for each prompt, between 0 and what is pending, of which there are
        min(budget, sum(pending)) in all.
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


class Scheduler:
    """The queue of requests, the running batch, and the pages they hold.

    Requests are let in in order of arrival, each with the pages of all its tokens so far. Decoding
    takes further pages as it goes on; when none is left, the request that came last gives its
    pages back and returns to the head of the queue. So the oldest request always advances.

    Args:
        pool: The pages; one row for each request that runs.
        step_tokens: Tokens of a step, at least as many as the pool has rows.
    """

    def __init__(self, pool: PagePool, step_tokens: int) -> None:
        self.pool, self.step_tokens = pool, step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of arrival
        self.preemptions = 0

    def in_flight(self) -> list[Sequence]:
        """The requests that run, then those that wait."""
        return [*self.running, *self.waiting]

    def plan(self) -> dict[Sequence, int]:
        """How many tokens of which sequence the next step shows the model. Takes their pages."""
        self._grow()
        self._admit()
        decoding = [s for s in self.running if s.pending == 1]
        prompts = [s for s in self.running if s.pending > 1]
        # Decoding goes first: the budget has a token for every row, so it never waits for prompts.
        work = dict.fromkeys(decoding, 1)
        counts = shares([s.pending for s in prompts], self.step_tokens - len(work))
        work.update((s, n) for s, n in zip(prompts, counts, strict=True) if n)
        return work

    def remove(self, s: Sequence) -> None:
        """Takes out a request that has ended; its row and its pages are free."""
        if s.row >= 0:
            self.running.remove(s)
            self.pool.release(s.row)
        else:
            self.waiting.remove(s)

    def clear(self) -> list[Sequence]:
        """Takes out all requests, whatever state an exception has left them and the pool in."""
        removed = self.in_flight()
        self.running.clear()
        self.waiting.clear()
        self.pool.reset()
        return removed

    def _grow(self) -> None:
        """Takes the page that a new token needs, in order of arrival; preempts the latest."""
        for s in list(self.running):
            while s.row >= 0 and not self.pool.grow(s.row, len(s.tokens)):
                victim = self.running.pop()
                self.pool.release(victim.row)
                victim.row, victim.cached = -1, 0
                self.waiting.appendleft(victim)
                self.preemptions += 1

    def _admit(self) -> None:
        """Lets requests in while there are rows, and pages for all of their tokens."""
        while self.waiting and self.pool.free_rows:
            s = self.waiting[0]
            if self.pool.pages_of(len(s.tokens)) > self.pool.free_pages:
                return
            s.row = self.pool.take_row()
            self.pool.grow(s.row, len(s.tokens))
            self.running.append(self.waiting.popleft())
