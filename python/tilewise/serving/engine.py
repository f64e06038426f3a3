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

from .histogram import Durations, Histogram
from .model import logits_of, stop_tokens, take_over
from .pages import PagedCache, PagePool
from .sampling import Logprobs, SamplingParams, logprobs, penalised, sample
from .schedule import Scheduler
from .sequence import Output, Sequence
from .text import TextStream

_log = logging.getLogger(__name__)


class OverloadedError(RuntimeError):
    """The engine is full. ``retry_after`` is the number of seconds until a place may be free."""

    def __init__(self, outstanding: int, retry_after: int) -> None:
        super().__init__(f"{outstanding} requests are in flight, which is the limit of this engine")
        self.retry_after = retry_after


@dataclass
class Completion:
    """The complete answer to one prompt."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""  # ``Output.finish`` of the last output
    error: str | None = None
    logprobs: list[Logprobs] = field(default_factory=list)  # of the tokens, if asked for


class Engine:
    """Generates tokens with one model for many requests at once.

    A step is one packed forward pass over at most ``step_tokens`` tokens: one token of every
    request that is decoding. Chunks of prompts take the remaining tokens, which
    ``schedule.split_budget`` divides so that a long prompt does not delay a short one. Sequences
    take pages as they grow. If no page is left, the request that arrived last frees its pages and
    is computed again later, so that no tokens are lost, and no request can block an earlier one.

    ``add``, ``cancel`` and ``stats`` may be called from any thread, ``step`` by only one at a time.

    Args:
        model: A causal language model of Transformers on its device, whose layers use
            ``AttentionInterface``. From now on it belongs to the engine.
        tokenizer: An object with ``decode(tokens, skip_special_tokens=)``. Without it, outputs have
            no text and ``stop`` is refused.
        cache_tokens: Total number of tokens that fit into the pages.
        page_size: Tokens per page, at least 1.
        max_running: Largest number of requests that are computed at once.
        max_waiting: Largest number of further requests that wait.
        step_tokens: Tokens per forward pass, at least max_running.
        prefix_caching: Whether requests that begin with the same tokens share the pages of these.
            They are computed once, so a request's time to its first token reveals that another one
            began with the same tokens.

    Raises:
        TypeError: a number is not an integer, or the model is not one of Transformers.
        ValueError: a number is out of range, or this engine does not support the model's attention.
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
        prefix_caching: bool = True,
    ) -> None:
        for name, value, minimum, minimum_name in (
            ("page_size", page_size, 1, ""),
            ("cache_tokens", cache_tokens, page_size, "page_size, "),
            ("max_running", max_running, 1, ""),
            ("max_waiting", max_waiting, 0, ""),
            ("step_tokens", step_tokens, max_running, "max_running, "),
        ):
            if _check.integer(name, value, "an integer") < minimum:
                raise ValueError(f"{name} is {value}, but must be at least {minimum_name}{minimum}")
        take_over(model)
        self.pool = PagePool(
            cache_tokens // page_size,
            page_size,
            max_running,
            _check.flag("prefix_caching", prefix_caching),
        )
        self.cache = PagedCache(self.pool)
        self.places = max_running + max_waiting
        self.model, self.tokenizer = model, tokenizer
        self.context = self.pool.capacity  # largest number of tokens of a sequence
        text_config = model.config.get_text_config()  # of a model that also reads images or audio
        positions = getattr(text_config, "max_position_embeddings", None)
        if positions:
            self.context = min(self.context, positions)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.stop_tokens = stop_tokens(model)
        self._scheduler = Scheduler(self.pool, step_tokens)
        self._lock = threading.Lock()
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._seconds_in_flight = 1.0  # average time of a request
        self._to_first_token, self._between_tokens = Histogram(), Histogram()
        self.probe()  # allocates the caches

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        deliver: Callable[[Output], None] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Adds a request.

        Args:
            prompt: At least one token: a list, or a tensor or array of one dimension.
            params: The sampling options.
            deliver: Called in the thread of ``step`` with each output of this request. If it
                raises, the exception is logged and the request cancelled.
            timeout: Seconds after which the request ends with "timeout", even if it still waits.
                None means that it has no deadline.

        Returns:
            The id of the request.

        Raises:
            TypeError: the prompt is not a sequence of integers, or timeout is not a number.
            ValueError: the prompt has a token that the model does not have; prompt and max_tokens
                exceed the context; or timeout is not above 0.
            OverloadedError: as many requests are in flight as the engine allows.
        """
        params = params or SamplingParams()
        if timeout is not None:
            _check.number("timeout", timeout, "a number of seconds or None")
            if not timeout > 0.0:
                raise ValueError(f"timeout is {timeout}, but must be above 0")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop is given, but this engine has no tokenizer, which it needs")
        try:
            prompt = [*map(index, prompt)]
        except TypeError:
            raise TypeError(
                f"prompt is a {type(prompt).__name__}, but must be tokens: a sequence of integers"
            ) from None
        total = len(prompt) + (params.max_tokens or 1)
        if not prompt or total > self.context:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and {params.max_tokens or 1} would follow, but "
                f"it must have at least 1, and both together at most {self.context}"
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            wrong = next(t for t in prompt if not 0 <= t < self.vocabulary)
            raise ValueError(
                f"prompt has token {wrong}, but tokens must be from 0 to {self.vocabulary - 1}"
            )
        text = None
        if self.tokenizer is not None:
            text = TextStream(self._decode, params.stop)
        stop = self.stop_tokens if params.stop_token_ids is None else params.stop_token_ids
        limit = self.context if params.max_tokens is None else total
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
        """Raises OverloadedError if the engine has no place for another request now."""
        with self._lock:
            self._require_place()

    def cancel(self, request: int) -> bool:
        """Ends a request, whose pages the next step frees. False if it is not in flight."""
        with self._lock:
            for s in self._scheduler.in_flight():
                if s.id == request:
                    s.cancelled = True
                    return True
        return False

    def cancel_all(self) -> None:
        """Ends all requests in flight."""
        with self._lock:
            for s in self._scheduler.in_flight():
                s.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether there are requests in flight."""
        return bool(self._scheduler.waiting or self._scheduler.running)

    def stats(self) -> dict[str, int]:
        """The number of requests and free pages now, and counters since the start."""
        with self._lock:
            counts = {
                **self._counts,
                "preemptions": self._scheduler.preemptions,
                "shared_tokens": self._scheduler.shared_tokens,
            }
            return {
                "running": len(self._scheduler.running),
                "waiting": len(self._scheduler.waiting),
                "pages": self.pool.pages,
                "pages_free": self.pool.free_pages,
                **{name: counts.get(name, 0) for name in _COUNTS},
            }

    def latencies(self) -> dict[str, Durations]:
        """The times from a request to its first token, and from each token to the next."""
        with self._lock:
            return {
                "time_to_first_token_seconds": self._to_first_token.durations(),
                "inter_token_latency_seconds": self._between_tokens.durations(),
            }

    def generate(
        self, prompts: Iterable[Tokens[int]], params: SamplingParams | None = None
    ) -> list[Completion]:
        """Answers all prompts, as many at once as the engine has places for.

        Raises:
            TypeError, ValueError: ``add`` refuses a prompt. If that happens, or if a step fails,
                all prompts that were added are cancelled.
        """
        answers: list[Completion] = []
        requests: list[int] = []
        try:
            for prompt in prompts:
                while self._is_full():
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
        """Runs one forward pass. Returns an output for each request that got a token or ended.

        A request that is cancelled or past its deadline ends before the pass. If the token of a
        request cannot be drawn, or its text cannot be decoded, only this request ends, with
        "error".

        Raises:
            Exception: the model raised it. All requests stay in flight; see ``fail``.
        """
        with self._lock:
            ended = self._end_due()
        outputs = _deliver(ended)  # before the pass, which may raise
        with self._lock:
            new_tokens = self._scheduler.plan()
        draws = self._forward(new_tokens) if new_tokens else []
        with self._lock:
            for s, count in new_tokens.items():
                s.cached += count
                self.pool.publish(s.row, s.tokens, s.cached)
            complete = [s for s in new_tokens if not s.pending]
            accepted = [(s, self._accept(s, *d)) for s, d in zip(complete, draws, strict=True)]
            for s, output in accepted:
                if output.finish == "error":
                    self.pool.forget(s.row)  # its keys and values may not be finite
                if output.finish:
                    self._scheduler.remove(s)
                    self._account(s, output.finish)
            self._counts["generated_tokens"] += sum(o.token is not None for _, o in accepted)
            self._counts["steps"] += bool(new_tokens)
        return outputs + _deliver(accepted)

    def fail(self, error: str = "a step failed") -> list[Output]:
        """Ends all requests in flight with "error", for callers that catch exceptions of ``step``.

        Args:
            error: The sentence in the outputs of these requests.
        """
        with self._lock:
            failed = self._scheduler.clear()
            for s in failed:
                self._account(s, "error")
        return _deliver([(s, s.end("error", error)) for s in failed])

    def probe(self) -> None:
        """Runs the model on one token that belongs to no request, while no request is in flight.

        Raises:
            Exception: the model raised it.
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

    def _is_full(self) -> bool:
        with self._lock:
            return len(self._scheduler.in_flight()) >= self.places

    def _require_place(self) -> None:
        outstanding = len(self._scheduler.in_flight())
        if outstanding >= self.places:
            self._counts["refused"] += 1
            seconds = self._seconds_in_flight / outstanding  # until one ends, by Little's law
            raise OverloadedError(outstanding, min(60, math.ceil(seconds)))

    def _end_due(self) -> list[tuple[Sequence, Output]]:
        """Removes the requests that are cancelled or past their deadline."""
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

    def _accept(self, s: Sequence, token: int | None, report: Logprobs | None) -> Output:
        """The output of a request for a token; an error here ends only this request."""
        if token is None:
            return s.end("error", "no token can be drawn: the model's logits are not finite")
        now = time.monotonic()
        if s.last_token is None:
            self._to_first_token.observe(now - s.since)
        else:
            self._between_tokens.observe(now - s.last_token)
        s.last_token = now
        try:
            return s.accept(token, report)
        except Exception as error:  # raised by the tokenizer
            _log.exception("tokens of request %d cannot be decoded: it ends with an error", s.id)
            return Output(s.id, None, "", "error", f"the tokens cannot be decoded: {error!r}")

    def _account(self, s: Sequence, finish: str) -> None:
        """Counts a request that has ended, and updates the average time of a request."""
        self._seconds_in_flight += 0.2 * (time.monotonic() - s.since - self._seconds_in_flight)
        self._counts[finish] += 1

    def _forward(self, new_tokens: dict[Sequence, int]) -> list[tuple[int | None, Logprobs | None]]:
        """Runs the model; returns a draw per sequence whose last token the model has now seen."""
        with torch.inference_mode():
            logits, complete = logits_of(self.model, self.pool, self.cache, new_tokens)
            if not complete:
                return []
            params = [s.params for s in complete]
            uniform = [s.random.random() for s in complete]
            counts = [s.counts for s in complete]
            tokens = sample(penalised(logits, params, counts), params, uniform)
            return [*zip(tokens, logprobs(logits, params, tokens), strict=True)]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


_COUNTS = (
    "requests", "refused", "prompt_tokens", "shared_tokens", "generated_tokens", "steps",
    "preemptions",
    "stop", "length", "cancelled", "timeout", "error",
)  # fmt: skip


def _collector(answer: Completion) -> Callable[[Output], None]:
    def deliver(output: Output) -> None:
        if output.token is not None:
            answer.tokens.append(output.token)
        if output.logprobs is not None:
            answer.logprobs.append(output.logprobs)
        answer.text += output.text
        answer.finish, answer.error = output.finish or "", output.error

    return deliver


def _deliver(outputs: list[tuple[Sequence, Output]]) -> list[Output]:
    """Delivers the outputs; a request whose delivery fails is cancelled, and the others go on."""
    ending: BaseException | None = None
    for s, output in outputs:
        if not s.deliver:
            continue
        try:
            s.deliver(output)
        except BaseException as error:  # raised by the caller's own code
            _log.exception("output of request %d cannot be delivered: it is cancelled", s.id)
            s.cancelled = True
            if not isinstance(error, Exception):
                ending = ending or error
    if ending:  # SystemExit or KeyboardInterrupt must end the thread, not a request
        raise ending
    return [output for _, output in outputs]
