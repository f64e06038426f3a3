"""A request on its way through the engine, and what it is told."""

from __future__ import annotations

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
    finish: str | None = None  # "stop", "length", "cancelled", "error"; None: there is more


@dataclass(eq=False)
class Sequence:
    """The state of a request. ``tokens[:cached]`` have their keys and values in the pages."""

    id: int
    tokens: list[int]  # the prompt, then what was generated
    limit: int  # tokens in all
    params: SamplingParams
    stop_tokens: frozenset[int]
    text: TextStream | None
    deliver: Callable[[Output], None] | None
    random: random.Random = field(init=False)
    cached: int = 0
    row: int = -1  # of the pool; -1: waiting, no pages
    cancelled: bool = False
    since: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.random = random.Random(self.params.seed)

    @property
    def pending(self) -> int:
        """Tokens that the model has yet to see: 1 while decoding."""
        return len(self.tokens) - self.cached

    def accept(self, token: int) -> Output:
        """Takes over a sampled token."""
        self.tokens.append(token)
        if token in self.stop_tokens:
            return self.end("stop", token)
        text = self.text.push(token) if self.text else ""
        if self.text and self.text.stopped:
            return Output(self.id, token, text, "stop")
        if len(self.tokens) >= self.limit:
            return self.end("length", token, text)
        return Output(self.id, token, text)

    def end(self, why: str, token: int | None = None, text: str = "") -> Output:
        """The last output."""
        return Output(self.id, token, text + (self.text.finish() if self.text else ""), why)
