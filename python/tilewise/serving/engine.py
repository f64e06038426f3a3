"""Continuous batching: many requests, one forward pass per step, keys and values in pages."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch

from tilewise import _check

from .model import logits_of, stop_tokens, take_over
from .pages import PagedCache, PagePool
from .sampling import SamplingParams, sample
from .schedule import Scheduler
from .sequence import Output, Sequence
from .text import TextStream

_log = logging.getLogger(__name__)


class OverloadedError(RuntimeError):
    """All places are taken; nothing was changed. ``retry_after``: seconds until one may be free."""

    def __init__(self, outstanding: int, retry_after: int) -> None:
        super().__init__(f"{outstanding} requests are in flight, which is all this engine takes")
        self.retry_after = retry_after


@dataclass
class Completion:
    """The whole answer to one prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # as of the last Output
    error: str | None = None


class Engine:
    """Generates with one model for many requests at once.

    A step takes one token of every request that is decoding and fills up with parts of prompts to
    at most ``step_tokens``: one packed forward pass. Prompts share it (``schedule.shares``), so a
    long one does not hold up a short one. Pages are taken as sequences grow. When they run out, the
    request that came last gives its pages back and is computed again later: nothing is lost, and no
    request can block one that came before it.

    ``add``, ``cancel`` and ``stats`` may be called from any thread, ``step`` from one at a time.

    Args:
        model: A causal language model of Transformers whose layers attend by
            ``AttentionInterface``, on the device it is to run on. It is the engine's from now on.
        tokenizer: Turns tokens into text; whatever has ``decode(tokens, skip_special_tokens=)``.
            Without one, outputs have no text and ``stop`` is refused.
        cache_tokens: Tokens that the pages hold in all.
        page_size: Tokens of a page, from 1.
        max_running: Requests that are worked on at once.
        max_waiting: Requests beyond those that are let in.
        step_tokens: Tokens of a forward pass, at least max_running.

    Raises:
        TypeError: a number is no integer, or the model none of Transformers.
        ValueError: a number is out of range, or the model attends in a way this engine does not.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        cache_tokens: int = 16384,
        page_size: int = 16,
        max_running: int = 32,
        max_waiting: int = 64,
        step_tokens: int = 512,
    ) -> None:
        for name, value, least, what in (
            ("page_size", page_size, 1, ""),
            ("cache_tokens", cache_tokens, page_size, "page_size, "),
            ("max_running", max_running, 1, ""),
            ("max_waiting", max_waiting, 0, ""),
            ("step_tokens", step_tokens, max_running, "max_running, "),
        ):
            if _check.integer(name, value, "an integer") < least:
                raise ValueError(f"{name} is {value}, but must be at least {what}{least}")
        take_over(model)
        self.pool = PagePool(cache_tokens // page_size, page_size, max_running)
        self.cache = PagedCache(self.pool)
        self.places = max_running + max_waiting
        self.model, self.tokenizer = model, tokenizer
        self.context = self.pool.capacity  # tokens of a sequence at most
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions:
            self.context = min(self.context, positions)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.stop_tokens = stop_tokens(model)
        self._scheduler = Scheduler(self.pool, step_tokens)
        self._lock = threading.Lock()
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._seconds_in_flight = 1.0  # of a request, on average
        self.probe()  # makes the caches

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        deliver: Callable[[Output], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Lets a request in.

        Args:
            prompt: Tokens, at least one: a list, or a tensor or array of one dimension.
            params: What to generate.
            deliver: Called in the thread of ``step`` with each output of this request. If it
                raises, that is logged and the request cancelled.
            timeout: Seconds after which it ends with "timeout", wherever it is by then; None: it
                has no deadline.

        Returns:
            The number of the request.

        Raises:
            TypeError: the prompt is no sequence of integers, or timeout no number.
            ValueError: the prompt is not one of the model, or does not fit with max_tokens;
                timeout is not above 0.
            OverloadedError: as many requests are in flight as the engine takes.
        """
        params = params or SamplingParams()
        if timeout is not None:
            _check.number("timeout", timeout, "a number of seconds or None")
            if not timeout > 0.0:
                raise ValueError(f"timeout is {timeout}, but must be above 0")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop is given, but this engine has no tokenizer to find it with")
        try:
            prompt = [*map(index, prompt)]
        except TypeError:
            raise TypeError(
                f"prompt is a {type(prompt).__name__}, but must be tokens: a sequence of integers"
            ) from None
        asked = len(prompt) + (params.max_tokens or 1)
        if not prompt or asked > self.context:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and {params.max_tokens or 1} are to follow, but "
                f"must have at least 1, and at most {self.context} in all"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            wrong = next(t for t in prompt if not 0 <= t < self.vocabulary)
            raise ValueError(
                f"prompt has token {wrong}, but must have those from 0 to {self.vocabulary - 1}"
            )
        text = None
        if self.tokenizer is not None:
            text = TextStream(self._decode, params.stop)
        stop = self.stop_tokens if params.stop_token_ids is None else params.stop_token_ids
        limit = self.context if params.max_tokens is None else asked
        with self._lock:
            self._require_place()
            self._next_id += 1
            request = Sequence(
                self._next_id, prompt, limit, params, frozenset(stop), text, deliver, timeout
            )
            self._scheduler.waiting.append(request)
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(prompt)
            return request.id

    def require_place(self) -> None:
        """Raises OverloadedError unless a request would find a place now."""
        with self._lock:
            self._require_place()

    def cancel(self, request: int) -> bool:
        """Ends a request: its pages are free at the next step. False when it is not in flight."""
        with self._lock:
            for s in self._scheduler.in_flight():
                if s.id == request:
                    s.cancelled = True
                    return True
        return False

    def cancel_all(self) -> None:
        """Ends everything in flight."""
        with self._lock:
            for s in self._scheduler.in_flight():
                s.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def stats(self) -> dict[str, int]:
        """What is in flight now, and counts since the start."""
        with self._lock:
            counts = {**self._counts, "preemptions": self._scheduler.preemptions}
            return {
                "running": len(self._scheduler.running),
                "waiting": len(self._scheduler.waiting),
                "pages": self.pool.pages,
                "pages_free": self.pool.free_pages,
                **{name: counts.get(name, 0) for name in _COUNTS},
            }

    def generate(
        self, prompts: Iterable[Tokens[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answers all prompts, as many at once as there are places.

        Raises:
            TypeError, ValueError: as ``add``. Those before the refused one are cancelled then, and
                when a step fails.
        """
        answers: list[Completion] = []
        requests: list[int] = []
        try:
            for prompt in prompts:
                while len(self._scheduler.in_flight()) >= self.places:
                    self.step()
                answer = Completion()
                requests.append(self.add(prompt, params, _collector(answer)))
                answers.append(answer)
            while self.busy:
                self.step()
        except BaseException:
            for request in requests:
                self.cancel(request)
            raise
        return answers

    # --- one step -----------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """One forward pass. Returns what it gave each request that it finished a token of.

        A request that is cancelled or past its deadline ends before the pass. One whose token
        cannot be drawn, or whose text cannot be decoded, ends with "error", alone.

        Raises:
            Exception: whatever the model raises. What is in flight stays so; see ``fail``.
        """
        with self._lock:
            ended = self._end_due()
        outputs = _deliver(ended)  # now: they must be told even if the pass raises
        with self._lock:
            work = self._scheduler.plan()
        tokens = self._forward(work) if work else []
        with self._lock:
            for s, count in work.items():
                s.cached += count
            complete = [s for s in work if not s.pending]
            given = [(s, self._accept(s, t)) for s, t in zip(complete, tokens, strict=True)]
            for s, output in given:
                if output.finish:
                    self._scheduler.remove(s)
                    self._account(s, output.finish)
            self._counts["generated_tokens"] += sum(o.token is not None for _, o in given)
            self._counts["steps"] += bool(work)
        return outputs + _deliver(given)

    def fail(self, error: str = "a step failed") -> list[Output]:
        """Ends everything in flight with "error": for whoever catches what ``step`` raised.

        Args:
            error: The sentence that the requests are given.
        """
        with self._lock:
            failed = self._scheduler.clear()
            for s in failed:
                self._account(s, "error")
        return _deliver([(s, s.end("error", error)) for s in failed])

    def probe(self) -> None:
        """Runs the model on one token of no request, while nothing is in flight.

        Raises:
            Exception: whatever the model raises.
        """
        probe = Sequence(0, [0], 2, SamplingParams(), frozenset())
        with self._lock:
            probe.row = self.pool.take_row()
            self.pool.grow(probe.row, 1)
        try:
            self._forward({probe: 1})
        finally:
            with self._lock:
                self.pool.release(probe.row)

    def _require_place(self) -> None:
        outstanding = len(self._scheduler.in_flight())
        if outstanding >= self.places:
            self._counts["refused"] += 1
            seconds = self._seconds_in_flight / outstanding  # Little's law: until one leaves
            raise OverloadedError(outstanding, min(60, math.ceil(seconds)))

    def _end_due(self) -> list[tuple[Sequence, Output]]:
        """Takes out the requests that are cancelled or past their deadline."""
        now = time.monotonic()
        ended = []
        for s in self._scheduler.in_flight():
            if s.cancelled:
                output = s.end("cancelled")
            elif now >= s.deadline:
                output = s.end("timeout", "the request was not done by its deadline")
            else:
                continue
            self._scheduler.remove(s)
            self._account(s, str(output.finish))
            ended.append((s, output))
        return ended

    def _accept(self, s: Sequence, token: int | None) -> Output:
        """What a token gives a request. What goes wrong here is the fault of this request alone."""
        if token is None:
            return s.end("error", "no token can be drawn: the model's logits are not finite")
        try:
            return s.accept(token)
        except Exception as error:  # of the tokenizer
            _log.exception("tokens of request %d cannot be decoded: it ends with an error", s.id)
            return Output(s.id, None, "", "error", f"the tokens cannot be decoded: {error!r}")

    def _account(self, s: Sequence, why: str) -> None:
        """Counts a request that has ended."""
        self._seconds_in_flight += 0.2 * (time.monotonic() - s.since - self._seconds_in_flight)
        self._counts[why] += 1

    def _forward(self, work: dict[Sequence, int]) -> list[int | None]:
        """Runs the model; one token for each sequence whose last token it has now seen."""
        with torch.inference_mode():
            logits, complete = logits_of(self.model, self.pool, self.cache, work)
            if not complete:
                return []
            uniform = [s.random.random() for s in complete]
            return sample(logits, [s.params for s in complete], uniform)

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


_COUNTS = (
    "requests", "refused", "prompt_tokens", "generated_tokens", "steps", "preemptions",
    "stop", "length", "cancelled", "timeout", "error",
)  # fmt: skip


def _collector(answer: Completion) -> Callable[[Output], None]:
    def deliver(output: Output) -> None:
        if output.token is not None:
            answer.tokens.append(output.token)
        answer.text += output.text
        answer.finish, answer.error = output.finish or "", output.error

    return deliver


def _deliver(outputs: list[tuple[Sequence, Output]]) -> list[Output]:
    """Tells each request; one that cannot be told is cancelled, and the others are told."""
    ending: BaseException | None = None
    for s, output in outputs:
        if not s.deliver:
            continue
        try:
            s.deliver(output)
        except BaseException as error:  # of the caller's own code
            _log.exception("output of request %d cannot be delivered: it is cancelled", s.id)
            s.cancelled = True
            if not isinstance(error, Exception):
                ending = ending or error
    if ending:  # SystemExit or KeyboardInterrupt: meant for the thread, not for a request
        raise ending
    return [output for _, output in outputs]
