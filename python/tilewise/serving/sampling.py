"""Sampling of the next token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import _check


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
        for token in self.stop_token_ids or ():
            _check.integer("stop_token_ids", token, "integers")


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
    p, tokens = (shifted / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    below = p.cumsum(-1) - p
    nucleus = (below < top_p) | (top_p >= 1.0)  # rounding may take the sum past 1 before the end
    nucleus[:, 0] = True
    p = torch.where(nucleus, p, 0.0)
    total = p.cumsum(-1)
    drawn = torch.searchsorted(total, column(uniform) * total[:, -1:], right=True)
    last = (p > 0.0).sum(-1, keepdim=True) - 1  # rounding may put the draw past the last token
    return tokens.gather(1, torch.minimum(drawn, last)).squeeze(1)
