"""The state of a request in the engine, and the outputs that it gets."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .sampling import Logprobs, SamplingParams, TokenCounts
from .text import TextStream


class Output(NamedTuple):
    """The result of one step for one request."""

    id: int
    token: int | None = None  # None: the request ended without a token
    text: str = ""  # empty without a tokenizer
    # "stop", "length", "cancelled", "timeout", "error"; None: the request continues
    finish: str | None = None
    error: str | None = None  # with "timeout" and "error": a sentence that says what happened
    logprobs: Logprobs | None = None  # of the token, if the request asks for it


@dataclass(eq=False)
class Sequence:
    """The state of a request. The keys and values of ``tokens[:cached]`` are in the pages."""

    id: int
    tokens: list[int]  # the prompt, then the generated tokens
    limit: int  # largest number of tokens, including the prompt
    params: SamplingParams
    stop_tokens: frozenset[int]
    text: TextStream | None = None
    deliver: Callable[[Output], None] | None = None
    timeout: float | None = None  # seconds after `since`
    prompt: int = field(init=False)  # number of tokens of the prompt
    random: random.Random = field(init=False)
    counts: TokenCounts | None = field(init=False)  # None without penalties
    deadline: float = field(init=False)  # on the clock of time.monotonic
    cached: int = 0
    row: int = -1  # row in the pool; -1 while waiting, without pages
    cancelled: bool = False
    since: float = field(default_factory=time.monotonic)
    last_token: float | None = None  # when it was generated, on the clock of time.monotonic

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.counts = TokenCounts(self.tokens) if self.params.penalises else None
        seed = self.params.seed
        self.random = random.Random(None if seed is None else int(seed))
        self.deadline = math.inf if self.timeout is None else self.since + self.timeout

    @property
    def pending(self) -> int:
        """The number of tokens that the model has not seen yet; 1 while decoding."""
        return len(self.tokens) - self.cached

    def accept(self, token: int, logprobs: Logprobs | None = None) -> Output:
        """Appends a sampled token. Exceptions of the tokenizer propagate."""
        self.tokens.append(token)
        if self.counts:
            self.counts.add(token)
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
        return Output(self.id, token, text, finish, None, logprobs)

    def end(self, finish: str, error: str | None = None) -> Output:
        """The last output of a request that ends without a token.

        It contains the text that was held back, unless the tokenizer raises an exception.
        """
        text = ""
        if self.text:
            with contextlib.suppress(Exception):
                text = self.text.finish()
        return Output(self.id, None, text, finish, error)
