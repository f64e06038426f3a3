"""A request on its way through the engine, and what it is told."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .sampling import SamplingParams
from .text import TextStream


class Output(NamedTuple):
    """What a step gave one request."""

    id: int
    token: int | None = None  # None: the request ended without one
    text: str = ""  # empty without a tokenizer
    # "stop", "length", "cancelled", "timeout", "error"; None: there is more to come
    finish: str | None = None
    error: str | None = None  # with "timeout" and "error": a sentence that says what happened


@dataclass(eq=False)
class Sequence:
    """The state of a request. ``tokens[:cached]`` have their keys and values in the pages."""

    id: int
    tokens: list[int]  # the prompt, then what was generated
    limit: int  # tokens in all
    params: SamplingParams
    stop_tokens: frozenset[int]
    text: TextStream | None = None
    deliver: Callable[[Output], None] | None = None
    timeout: float | None = None  # seconds from now
    random: random.Random = field(init=False)
    deadline: float = field(init=False)  # on the clock of time.monotonic
    cached: int = 0
    row: int = -1  # of the pool; -1: waiting, no pages
    cancelled: bool = False
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        seed = self.params.seed
        self.random = random.Random(None if seed is None else int(seed))
        self.deadline = math.inf if self.timeout is None else self.since + self.timeout

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to see: 1 while decoding."""
        return len(self.tokens) - self.cached

    def accept(self, token: int) -> Output:
        """Takes over a sampled token. Raises what the tokenizer raises."""
        self.tokens.append(token)
        text, finish = "", None
        if token in self.stop_tokens:
            finish = "stop"
        elif self.text:
            text = self.text.push(token)
            finish = "stop" if self.text.stopped else None
        if not finish and len(self.tokens) >= self.limit:
            finish = "length"
        if finish and self.text:
            text += self.text.finish()
        return Output(self.id, token, text, finish)

    def end(self, why: str, error: str | None = None) -> Output:
        """The last output of a request that ends without a token.

        Text that was held back is part of it, unless the tokenizer raises.
        """
        text = ""
        if self.text:
            with contextlib.suppress(Exception):
                text = self.text.finish()
        return Output(self.id, None, text, why, error)
