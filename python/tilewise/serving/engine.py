"""Continuous batching: many requests, one forward pass per step, keys and values in pages."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import index
from typing import Any

import torch
from torch import Tensor

from tilewise import _check

from . import attention
from .pages import PagedCache, PagePool
from .sampling import SamplingParams, sample
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
    finish: str = ""


class Engine:
    """Generates with one model for many requests at once.

    A step takes one token of every request that is decoding and fills up with prompts, a long
    prompt in several steps, to at most ``step_tokens``: one packed forward pass. Pages are taken as
    sequences grow. When they run out, the request that came last gives its pages back and is
    computed again later: nothing is lost, and no request can block one that came before it.

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
        _check_model(model)
        self.pool = PagePool(cache_tokens // page_size, page_size, max_running)
        self.cache = PagedCache(self.pool)
        self.places, self.step_tokens = max_running + max_waiting, step_tokens
        self.model, self.tokenizer = model, tokenizer
        self.context = self.pool.capacity  # tokens of a sequence at most
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions:
            self.context = min(self.context, positions)
        self.vocabulary = model.get_input_embeddings().num_embeddings
        self.stop_tokens = _stop_tokens(model)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # in the order in which they came
        self._lock = threading.Lock()
        self._next_id = 0
        self._counts: Counter[str] = Counter()
        self._seconds_in_flight = 1.0  # of a request, on average
        self._take_over()

    # --- requests -----------------------------------------------------------------------------

    def add(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        deliver: Callable[[Output], None] | None = None,
    ) -> int:
        """Lets a request in.

        Args:
            prompt: Tokens, at least one: a list, or a tensor or array of one dimension.
            params: What to generate.
            deliver: Called in the thread of ``step`` with each output of this request. If it
                raises, that is logged and the request cancelled.

        Returns:
            The number of the request.

        Raises:
            TypeError: the prompt is no sequence of integers.
            ValueError: the prompt is not one of the model, or does not fit with max_tokens.
            OverloadedError: as many requests are in flight as the engine takes.
        """
        params = params or SamplingParams()
        if params.stop and self.tokenizer is None:
            raise ValueError("stop is given, but this engine has no tokenizer to find it with")
        try:
            prompt = [index(token) for token in prompt]
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
            outstanding = len(self._in_flight())
            if outstanding >= self.places:
                self._counts["refused"] += 1
                seconds = self._seconds_in_flight / outstanding  # Little's law: until one leaves
                raise OverloadedError(outstanding, min(60, math.ceil(seconds)))
            self._next_id += 1
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += len(prompt)
            self._waiting.append(
                Sequence(self._next_id, prompt, limit, params, frozenset(stop), text, deliver)
            )
            return self._next_id

    def cancel(self, request: int) -> bool:
        """Ends a request: its pages are free at the next step. False when it is not in flight."""
        with self._lock:
            for s in self._in_flight():
                if s.id == request:
                    s.cancelled = True
                    return True
        return False

    def cancel_all(self) -> None:
        """Ends everything in flight."""
        with self._lock:
            for s in self._in_flight():
                s.cancelled = True

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._waiting or self._running)

    def stats(self) -> dict[str, int]:
        """What is in flight now, and counts since the start."""
        with self._lock:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "pages": self.pool.pages,
                "pages_free": self.pool.free_pages,
                **{name: self._counts[name] for name in _COUNTS},
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
                while len(self._in_flight()) >= self.places:
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
        """One forward pass. Returns what it gave each request that it finished a token of."""
        with self._lock:
            outputs = self._end("cancelled", [s for s in self._in_flight() if s.cancelled])
            work = self._schedule()
        tokens = self._forward(work) if work else []
        with self._lock:
            for s, count in work.items():
                s.cached += count
            for s, token in zip([s for s in work if not s.pending], tokens, strict=True):
                output = s.accept(token)
                outputs.append((s, output))
                if output.finish:
                    self._remove(s, output.finish)
            self._counts["generated_tokens"] += len(tokens)
            self._counts["steps"] += bool(work)
        return _deliver(outputs)

    def fail(self) -> list[Output]:
        """Ends everything in flight with "error": for whoever catches what ``step`` raised."""
        with self._lock:
            outputs = self._end("error", self._in_flight())
        return _deliver(outputs)

    def _in_flight(self) -> list[Sequence]:
        return [*self._running, *self._waiting]

    def _end(self, why: str, ended: list[Sequence]) -> list[tuple[Sequence, Output]]:
        for s in ended:
            self._remove(s, why)
        return [(s, s.end(why)) for s in ended]

    def _remove(self, s: Sequence, why: str) -> None:
        """The place and the pages of a request that has ended are free."""
        if s.row >= 0:
            self._running.remove(s)
            self.pool.release(s.row)
        else:
            self._waiting.remove(s)
        self._seconds_in_flight += 0.2 * (time.monotonic() - s.since - self._seconds_in_flight)
        self._counts[why] += 1

    def _schedule(self) -> dict[Sequence, int]:
        """How many tokens of which sequence the next pass sees."""
        budget = self.step_tokens
        work: dict[Sequence, int] = {}
        preempted = False
        # Decoding goes first: it never waits for a long prompt.
        for s in sorted(self._running, key=lambda s: s.pending > 1):
            count = min(s.pending, budget)
            while count and s.row >= 0 and not self.pool.grow(s.row, s.cached + count):
                victim = self._running.pop()
                budget += work.pop(victim, 0)
                self._preempt(victim)
                preempted = True
            if count and s.row >= 0:
                work[s] = count
                budget -= count
        while self._waiting and budget and self.pool.free_rows and not preempted:
            s = self._waiting[0]
            count = min(s.pending, budget)
            if self.pool.pages_of(len(s.tokens)) > self.pool.free_pages:
                break
            s.row = self.pool.take_row()
            self.pool.grow(s.row, count)
            self._running.append(self._waiting.popleft())
            work[s] = count
            budget -= count
        return work

    def _preempt(self, s: Sequence) -> None:
        """Back to the head of the queue, to be computed again from what it has generated so far."""
        self.pool.release(s.row)
        s.row, s.cached = -1, 0
        self._waiting.appendleft(s)
        self._counts["preemptions"] += 1

    def _forward(self, work: dict[Sequence, int]) -> list[int]:
        """Runs the model; one token for each sequence whose last token it has now seen."""
        device = self.model.device
        sequences, counts = list(work), list(work.values())
        used = [s.cached + n for s, n in work.items()]
        new = [s.tokens[s.cached : end] for s, end in zip(sequences, used, strict=True)]
        positions = [range(s.cached, end) for s, end in zip(sequences, used, strict=True)]
        ends = list(accumulate(counts))

        def on_device(numbers: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(numbers, dtype=dtype, device=device)

        step = attention.Step(
            cache=self.cache,
            cu_seqlens=on_device([0, *ends]),
            lengths=on_device([s.cached for s in sequences]),
            seqused=on_device(used),
            block_table=self.pool.block_table([s.row for s in sequences], max(used)).to(device),
            longest=max(counts),
            longest_keys=max(used),
        )
        complete = [i for i, s in enumerate(sequences) if used[i] == len(s.tokens)]
        with torch.inference_mode():
            logits = self.model(
                input_ids=on_device([[*chain(*new)]], torch.int64),
                position_ids=on_device([[*chain(*positions)]], torch.int64),
                use_cache=False,
                logits_to_keep=on_device([ends[i] - 1 for i in complete], torch.int64),
                tilewise_step=step,
            ).logits[0]
            if not complete:
                return []
            chosen = [sequences[i] for i in complete]
            return sample(logits, [s.params for s in chosen], [s.random.random() for s in chosen])

    # --- the model ----------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Makes the model attend through the pages; one pass proves it, and makes the caches."""
        config = self.model.config.get_text_config()
        unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        if unknown:
            raise ValueError(
                f"model has layers of type {', '.join(sorted(unknown))}, but must have only "
                f"{', '.join(sorted(_LAYER_TYPES))}"
            )
        self.model.eval()
        self.model.set_attn_implementation(attention.NAME)
        probe = Sequence(0, [0], 2, SamplingParams(), frozenset(), None, None)
        probe.row = self.pool.take_row()
        self.pool.grow(probe.row, 1)
        self._forward({probe: 1})
        self.pool.release(probe.row)
        if len(self.cache.layers) != config.num_hidden_layers:
            raise ValueError(
                f"model is a {type(self.model).__name__}, of whose {config.num_hidden_layers} "
                f"layers {len(self.cache.layers)} attend by AttentionInterface; all must"
            )

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def _check_model(model: Any) -> None:
    """Refuses what is no model, the name of one for example; wrappers that pass on are models."""
    needed = ("config", "get_input_embeddings", "set_attn_implementation")
    if all(hasattr(model, name) for name in needed):
        return
    named = isinstance(model, str)
    given = f"model is {model!r}" if named else f"model is a {type(model).__name__}"
    raise TypeError(
        f"{given}, but must be a causal language model of Transformers, as "
        f"AutoModelForCausalLM.from_pretrained({repr(model) if named else '...'}) returns one"
    )


_LAYER_TYPES = {"full_attention", "sliding_attention"}
_COUNTS = (
    "requests", "refused", "prompt_tokens", "generated_tokens", "steps", "preemptions",
    "stop", "length", "cancelled", "error",
)  # fmt: skip


def _stop_tokens(model: Any) -> tuple[int, ...]:
    config = getattr(model, "generation_config", None) or model.config
    eos = config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def _collector(answer: Completion) -> Callable[[Output], None]:
    def deliver(output: Output) -> None:
        if output.token is not None:
            answer.tokens.append(output.token)
        answer.text += output.text
        answer.finish = output.finish or ""

    return deliver


def _deliver(outputs: list[tuple[Sequence, Output]]) -> list[Output]:
    for s, output in outputs:
        if not s.deliver:
            continue
        try:
            s.deliver(output)
        except Exception:  # of the caller's own code: the other requests go on
            _log.exception("output of request %d cannot be delivered: it is cancelled", s.id)
            s.cancelled = True
    return [output for _, output in outputs]
