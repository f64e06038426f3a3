"""Sampling of the next token."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import _check

MAX_LOGPROBS = 20  # alternatives to a token
_STOP_TOKEN_IDS = "a tuple of integers or None"


@dataclass(frozen=True)
class SamplingParams:
    """The sampling options of a request.

    Args:
        max_tokens: Largest number of tokens to generate; None is as many as the context can hold.
        temperature: Number from 0 to 100 that the logits are divided by; 0 takes the most likely
            token.
        top_p: Number above 0 and at most 1: the draw is among the fewest tokens whose probabilities
            reach this sum (nucleus sampling, arXiv 1904.09751).
        seed: Makes the draws reproducible whatever the other requests of the batch are.
        stop: Strings that end the text and are not part of it. They need the engine's tokenizer.
        stop_token_ids: Tokens that end the text; None means those of the model, () means none.
        top_k: Number of most likely tokens that the draw is among; 0 is all. top_p then refers to
            the probabilities of these.
        min_p: Number from 0 to 1: a token must be at least this many times as likely as the most
            likely one (arXiv 2407.01082). top_p then refers to the tokens that remain.
        presence_penalty: Number from -100 to 100, which is subtracted from the logits of tokens
            that have been generated.
        frequency_penalty: Number from -100 to 100, which is subtracted from these logits as often
            as the token has been generated.
        repetition_penalty: Number from 0.01 to 100: positive logits of tokens of the prompt and of
            generated ones are divided by it, negative ones multiplied (arXiv 1909.05858).
        logprobs: Number of alternatives, from 0 to 20, that are reported for each token with their
            log-probabilities; None reports nothing.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    max_tokens: int | None = 128
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: tuple[int, ...] | None = None
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and (
            _check.integer("max_tokens", self.max_tokens, "an integer or None") < 1
        ):
            raise ValueError(f"max_tokens is {self.max_tokens}, but must be at least 1")
        _check.number("temperature", self.temperature, "a number from 0 to 100")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}, but must be from 0 to 100")
        _check.number("top_p", self.top_p, "a number above 0 and at most 1")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, but must be above 0 and at most 1")
        if self.seed is not None:
            _check.integer("seed", self.seed, "an integer or None")
        strings = isinstance(self.stop, Sequence) and all(isinstance(x, str) for x in self.stop)
        if isinstance(self.stop, str) or not strings or not all(self.stop):
            raise (ValueError if strings else TypeError)(
                f"stop is {self.stop!r}, but must be a sequence of non-empty strings"
            )
        if not isinstance(self.stop_token_ids, (Collection, type(None))):
            raise TypeError(
                f"stop_token_ids is {self.stop_token_ids!r}, but must be {_STOP_TOKEN_IDS}"
            )
        for token in self.stop_token_ids or ():
            _check.integer("stop_token_ids", token, _STOP_TOKEN_IDS)
        self._check_cuts_and_penalties()

    def _check_cuts_and_penalties(self) -> None:
        if _check.integer("top_k", self.top_k, "an integer from 0") < 0:
            raise ValueError(f"top_k is {self.top_k}, but must be at least 0")
        _check.number("min_p", self.min_p, "a number from 0 to 1")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p is {self.min_p}, but must be from 0 to 1")
        # Within these limits finite logits stay finite in float32.
        for name, least in (
            ("presence_penalty", -100.0), ("frequency_penalty", -100.0),
            ("repetition_penalty", 0.01),
        ):  # fmt: skip
            value = getattr(self, name)
            _check.number(name, value, f"a number from {least:g} to 100")
            if not least <= value <= 100.0:
                raise ValueError(f"{name} is {value}, but must be from {least:g} to 100")
        if self.logprobs is not None:
            _check.integer("logprobs", self.logprobs, "an integer or None")
            if not 0 <= self.logprobs <= MAX_LOGPROBS:
                raise ValueError(
                    f"logprobs is {self.logprobs}, but must be from 0 to {MAX_LOGPROBS}"
                )

    @property
    def penalises(self) -> bool:
        """Whether logits depend on the tokens before."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, before temperature, penalties and cuts."""

    token: float  # of the token that was drawn
    top: list[tuple[int, float]]  # the most likely tokens, in descending order


class TokenCounts:
    """The tokens of a request so far, as its penalties need them: updated with each token, because
    counting anew would take time quadratic in the length of the answer.

    Args:
        prompt: The tokens of the prompt.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt, self._new = list(prompt), list[int]()
        self._seen = self._generated = torch.empty(0)

    def add(self, token: int) -> None:
        """Counts a generated token."""
        self._new.append(token)

    def of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each token of the vocabulary has occurred, and how often it was generated.

        Args:
            logits: [vocabulary], on whose device the results are.

        Returns:
            bool and float32 [vocabulary].
        """
        if not len(self._seen):
            self._seen = torch.zeros_like(logits, dtype=torch.bool)
            self._seen[torch.tensor(self._prompt, device=logits.device)] = True
            self._generated = torch.zeros_like(logits, dtype=torch.float32)
        for token in self._new:
            self._seen[token] = True
            self._generated[token] += 1.0
        self._new.clear()
        return self._seen, self._generated


def penalised(
    logits: Tensor, params: list[SamplingParams], counts: list[TokenCounts | None]
) -> Tensor:
    """The logits after penalties; those of rows without any are unchanged.

    Args:
        logits: [N, vocabulary], which are not written.
        params: The options of the N rows.
        counts: The tokens of each row so far; None for rows without penalties.

    Returns:
        [N, vocabulary], in float32 if a row has penalties.
    """
    if not any(counts):
        return logits
    logits = logits.float().clone()
    for row, p, counted in zip(logits, params, counts, strict=True):
        if counted is None:
            continue
        seen, generated = counted.of(row)
        factor = p.repetition_penalty
        row.copy_(torch.where(seen, torch.where(row > 0.0, row / factor, row * factor), row))
        row -= p.presence_penalty * (generated > 0.0) + p.frequency_penalty * generated
    return logits


def logprobs(
    logits: Tensor, params: list[SamplingParams], tokens: list[int | None]
) -> list[Logprobs | None]:
    """The reports for the rows that ask for them and have a token.

    Args:
        logits: [N, vocabulary], before penalties.
        params: The options of the N rows.
        tokens: The drawn tokens.
    """
    reports: list[Logprobs | None] = [None] * len(params)
    for i, (p, token) in enumerate(zip(params, tokens, strict=True)):
        if p.logprobs is None or token is None:
            continue
        row = logits[i].float().log_softmax(-1)
        values, top = row.topk(min(p.logprobs, len(row)))
        reports[i] = Logprobs(float(row[token]), [*zip(top.tolist(), values.tolist(), strict=True)])
    return reports


def sample(logits: Tensor, params: list[SamplingParams], uniform: list[float]) -> list[int | None]:
    """Draws one token per row.

    Args:
        logits: [N, vocabulary]; a token with -inf is never drawn.
        params: The options of the N rows.
        uniform: N numbers from [0, 1), which decide the draws. The token of a row depends only on
            its own logits, options and number.

    Returns:
        N tokens; None for a row whose largest logit is infinite or NaN.
    """
    top, token = logits.max(-1)  # NaN counts as the largest logit
    valid = top.isfinite()
    if any(p.temperature for p in params):
        greedy = torch.tensor([not p.temperature for p in params], device=logits.device)
        # Invalid rows become zeros, because NaN would lead to an index outside the vocabulary.
        shifted = torch.where(valid.unsqueeze(1), logits.float() - top.float().unsqueeze(1), 0.0)
        token = torch.where(greedy, token, _draw(shifted, params, uniform))
    tokens = torch.where(valid, token, -1).tolist()
    return [None if t < 0 else t for t in tokens]


def _draw(shifted: Tensor, params: list[SamplingParams], uniform: list[float]) -> Tensor:
    """The tokens [N] drawn from rows of float32 logits whose largest logit is 0."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor([*map(float, values)], device=shifted.device).unsqueeze(1)

    # Below the smallest normal float32, 0 / temperature may be NaN. At that temperature all logits
    # except the largest are -inf already.
    smallest = torch.finfo(torch.float32).tiny
    temperature = column(max(p.temperature, smallest) for p in params)
    top_p = column(p.top_p for p in params)
    min_p = column(p.min_p for p in params)
    most = shifted.shape[-1]
    top_k = column(min(p.top_k, most) or most for p in params)
    p, tokens = (shifted / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(p.shape[-1], device=p.device)
    p = torch.where((rank < top_k) & (p >= min_p * p[:, :1]), p, 0.0)
    below = p.cumsum(-1) - p
    # Rounding may take the sum past its end.
    nucleus = (below < top_p * p.sum(-1, keepdim=True)) | (top_p >= 1.0)
    nucleus[:, 0] = True
    p = torch.where(nucleus, p, 0.0)
    total = p.cumsum(-1)
    drawn = torch.searchsorted(total, column(uniform) * total[:, -1:], right=True)
    last = (p > 0.0).sum(-1, keepdim=True) - 1  # rounding may put the draw past the last token
    return tokens.gather(1, torch.minimum(drawn, last)).squeeze(1)
