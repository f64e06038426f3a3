"""How the next token is drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise import _check


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for.

    Args:
        max_tokens: Tokens to generate at most; None: as many as the context holds.
        temperature: Divides the logits; 0 takes the most likely token.
        top_p: Draws among the fewest tokens whose probabilities reach this sum.
        seed: Makes the draws repeatable, whatever else is in the batch.
        stop: Strings that end the text; they are not part of it. Need the engine's tokenizer.
        stop_token_ids: Tokens that end it; None: the model's own, () none.
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
    """One token per row.

    Args:
        logits: [N, vocabulary]; -inf is a token that is never drawn.
        params: N of them.
        uniform: N numbers from [0, 1), which decide the draws: a row's token depends on nothing
            but its own logits, parameters and number.

    Returns:
        N tokens; None for a row without a largest finite logit, or with a NaN.
    """
    top, token = logits.max(-1)  # a NaN counts as the largest
    valid = top.isfinite()
    if any(p.temperature for p in params):
        greedy = torch.tensor([not p.temperature for p in params], device=logits.device)
        # Zeros in place of invalid rows: NaN would lead to an index outside of the vocabulary.
        shifted = torch.where(valid.unsqueeze(1), logits.float() - top.float().unsqueeze(1), 0.0)
        token = torch.where(greedy, token, _draw(shifted, params, uniform))
    tokens = torch.where(valid, token, -1).tolist()
    return [None if t < 0 else t for t in tokens]


def _draw(shifted: Tensor, params: list[SamplingParams], uniform: list[float]) -> Tensor:
    """[N]: a token of each row of float32 logits whose largest is 0."""

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor([*map(float, values)], device=shifted.device).unsqueeze(1)

    # Below the least normal float32, 0 / temperature may be NaN. All but the largest logits
    # are -inf there already.
    least = torch.finfo(torch.float32).tiny
    temperature = column(max(p.temperature, least) for p in params)
    top_p = column(p.top_p for p in params)
    p, tokens = (shifted / temperature).softmax(-1).sort(dim=-1, descending=True, stable=True)
    below = p.cumsum(-1) - p
    kept = (below < top_p) | (top_p >= 1.0)  # rounding may take the sum past 1 before the end
    kept[:, 0] = True
    p = torch.where(kept, p, 0.0)
    total = p.cumsum(-1)
    drawn = torch.searchsorted(total, column(uniform) * total[:, -1:], right=True)
    last = (p > 0.0).sum(-1, keepdim=True) - 1  # where rounding puts the draw behind the end
    return tokens.gather(1, torch.minimum(drawn, last)).squeeze(1)
