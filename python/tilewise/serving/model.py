"""Makes a model of Transformers attend over pages, and checks that its logits stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from . import attention
from .pages import PagedCache, PagePool
from .sampling import SamplingParams
from .sequence import Sequence

_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Largest difference of logits, relative to their spread, that rounding can cause. In 16 bits
# rounding may also route tokens to other experts. A wrong mask or wrong positions cause a
# difference of at least 0.4.
_ROUNDING = {torch.float32: 0.02, torch.float64: 0.02}
_ROUNDING_16_BITS = 0.25


def logits_of(
    model: Any, pool: PagePool, cache: PagedCache, new_tokens: dict[Sequence, int]
) -> tuple[Tensor, list[Sequence]]:
    """Runs one forward pass over the given number of new tokens of each sequence.

    Returns:
        The logits [N, vocabulary] after the last tokens of N sequences, and these sequences. They
        are the ones whose last token the model has now seen.
    """
    device = model.device
    sequences, counts = list(new_tokens), list(new_tokens.values())
    used = [s.cached + n for s, n in new_tokens.items()]
    new = [s.tokens[s.cached : end] for s, end in zip(sequences, used, strict=True)]
    positions = [range(s.cached, end) for s, end in zip(sequences, used, strict=True)]
    ends = list(accumulate(counts))

    def on_device(numbers: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=device)

    step = attention.Step(
        cache=cache,
        cu_seqlens=on_device([0, *ends]),
        lengths=on_device([s.cached for s in sequences]),
        seqused=on_device(used),
        block_table=pool.block_table([s.row for s in sequences], max(used)).to(device),
        longest=max(counts),
        longest_keys=max(used),
    )
    complete = [i for i, s in enumerate(sequences) if used[i] == len(s.tokens)]
    with attention.stepping(step):
        logits = model(
            input_ids=on_device([[*chain(*new)]], torch.int64),
            position_ids=on_device([[*chain(*positions)]], torch.int64),
            use_cache=False,
            logits_to_keep=on_device([ends[i] - 1 for i in complete], torch.int64),
        ).logits[0]
    return logits, [sequences[i] for i in complete]


def stop_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a text according to the model's configuration."""
    config = getattr(model, "generation_config", None) or model.config
    eos = config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


def take_over(model: Any) -> None:
    """Makes the model attend over pages, after a check that this does not change its logits.

    Raises:
        TypeError: this is not a model of Transformers.
        ValueError: pages do not support its kind of attention; the model is left unchanged.
    """
    _check_model(model)
    config = model.config.get_text_config()
    unknown = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if unknown:
        raise ValueError(
            f"model has layers of type {', '.join(sorted(unknown))}, but must have only "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )
    model.eval()
    before = config._attn_implementation
    if before == attention.NAME:  # the model belonged to another engine
        before = "eager"
        model.set_attn_implementation(before)
    try:
        with torch.inference_mode(), _refusing(model):
            expected = _own_logits(model)
            model.set_attn_implementation(attention.NAME)
            cache, given = _paged_logits(model)
        _compare(model, config.num_hidden_layers, len(cache.layers), given, expected)
    except BaseException:
        model.set_attn_implementation(before)
        raise


@contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """Turns the exceptions of a model that needs more than tokens into a ValueError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise ValueError(
            f"model is a {type(model).__name__}, but must be one for which tokens and their "
            f"positions are enough: {error!r}"
        ) from error


def _texts(model: Any) -> tuple[list[int], list[int]]:
    """Two sequences of tokens from the middle of the vocabulary, where no token is special."""
    vocabulary = model.get_input_embeddings().num_embeddings
    tokens = [(vocabulary // 4 + 7 * i) % vocabulary for i in range(17)]
    return tokens[:11], tokens[11:]


def _own_logits(model: Any) -> Tensor:
    """Logits [3, vocabulary]: after the last token of one text, and the last two of the other."""
    first, second = (
        model(input_ids=torch.tensor([text], device=model.device), use_cache=False).logits[0]
        for text in _texts(model)
    )
    return torch.cat((first[-1:], second[-2:]))


def _paged_logits(model: Any) -> tuple[PagedCache, Tensor]:
    """The same logits from packed passes over pages, with a split prompt and a decoded token."""
    pool = PagePool(16, 3, 2)
    cache = PagedCache(pool)
    first, second = (
        Sequence(0, text, len(text), SamplingParams(), frozenset()) for text in _texts(model)
    )
    last = second.tokens.pop()

    def run(new_tokens: dict[Sequence, int]) -> Tensor:
        for s, count in new_tokens.items():
            s.row = s.row if s.row >= 0 else pool.take_row()
            pool.grow(s.row, s.cached + count)
        logits, complete = logits_of(model, pool, cache, new_tokens)
        if len(logits) != len(complete):
            raise ValueError("logits_to_keep is not honoured")
        for s, count in new_tokens.items():
            s.cached += count
        return logits

    (penultimate,) = run({first: 4, second: len(second.tokens)})
    second.tokens.append(last)
    after_second, after_first = run({second: 1, first: 7})
    return cache, torch.stack((after_first, penultimate, after_second))


def _compare(model: Any, layers: int, paged: int, given: Tensor, expected: Tensor) -> None:
    """Raises ValueError unless all layers attend over pages and the logits are the same."""
    name = type(model).__name__
    if paged != layers:
        raise ValueError(
            f"model is a {name}, but must use AttentionInterface in all of its {layers} layers: it "
            f"does so in {paged}"
        )
    bound = _ROUNDING.get(expected.dtype, _ROUNDING_16_BITS)
    given, expected = given.float(), expected.float()
    spread = expected - expected.mean(-1, keepdim=True)
    differences = (given - expected).norm(dim=-1) / spread.norm(dim=-1)
    worst = float(differences.max())
    if worst > bound:  # false for NaN, because a model without finite logits cannot be checked
        raise ValueError(
            f"model is a {name}, whose logits are {worst:.2g} off (relative to their spread; "
            f"rounding allows {bound}) if its keys are in pages: its attention must be causal, "
            "follow from position_ids, and need no mask"
        )


def _check_model(model: Any) -> None:
    """Refuses an object that is not a model, such as a name; a wrapper of a model is accepted."""
    needed = ("config", "get_input_embeddings", "set_attn_implementation")
    if all(hasattr(model, name) for name in needed):
        return
    is_name = isinstance(model, str)
    given = f"model is {model!r}" if is_name else f"model is a {type(model).__name__}"
    raise TypeError(
        f"{given}, but must be a causal language model of Transformers, as "
        f"AutoModelForCausalLM.from_pretrained({repr(model) if is_name else '...'}) returns"
    )
