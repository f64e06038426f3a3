"""Shared by the tests of the serving engine: a tiny engine, prompts, and a collector of outputs."""

from __future__ import annotations

import threading
from typing import Any

import tiny_llama
from tilewise.serving import Engine, Output, SamplingParams

COUNT = 12
GREEDY = SamplingParams(COUNT, temperature=0.0)
PROMPTS = tiny_llama.prompts(1, 5, 17, 40, 90, 3)


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(0x100 + t) for t in tokens)


def engine(model: Any = None, **options: Any) -> Engine:
    settings = dict(cache_tokens=480, page_size=4, max_running=4, max_waiting=8, step_tokens=64)
    return Engine(model or tiny_llama.make(), **{**settings, **options})


def all_free(e: Engine) -> bool:
    stats = e.stats()
    return stats["pages_free"] == stats["pages"] and not e.busy


class Answer:
    """Collects the outputs of a request."""

    def __init__(self) -> None:
        self.tokens: list[int | None] = []
        self.finish = ""
        self.error: str | None = None
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.tokens.append(output.token)
        if output.finish:
            self.finish, self.error = output.finish, output.error
            self.done.set()
