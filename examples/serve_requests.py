"""The requests to examples/serve.py, whose fields are either supported or refused by name.

A field at any depth that would change the answer and is not supported raises RefusedError, because
readers of the answers would notice a silently ignored field too late. A field that is null counts
as left out, because many clients send null for all fields that they know.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import models
from tilewise.serving import MAX_LOGPROBS, SamplingParams

# Fields that have no effect on the answer, whatever their values are.
_WITHOUT_EFFECT = frozenset({"user", "metadata", "store", "service_tier"})
# An unsupported field is accepted with a value that has no effect: false, zero or empty, or for
# these fields one of the listed values. An empty tuple means that every value has an effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "prompt_logprobs": (),  # even 0 asks for those of the prompt
    "tool_choice": ("none",), "function_call": ("none",), "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},), "modalities": (["text"],),
    "web_search_options": (),  # an empty object requests a search with all defaults
    "skip_special_tokens": (True,), "add_generation_prompt": (True,),
}  # fmt: skip

# Each token is compared with all stop strings, in the thread that all requests wait for.
MAX_STOPS, MAX_STOP_LENGTH = 4, 256
MAX_CHOICES = 16  # answers to a prompt

_brief = reprlib.Repr()  # an error message must not contain a picture in base64
_brief.maxlevel, _brief.maxlist, _brief.maxdict, _brief.maxstring = 3, 4, 4, 60


class RefusedError(ValueError):
    """A request that is refused.

    Args:
        param: The field at fault; None is the body as a whole.
        sentence: The error message.
        status: The HTTP status.
        code: A name of the error for programs.
    """

    def __init__(
        self, param: str | None, sentence: str, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(sentence)
        self.param, self.status, self.code = param, status, code


def refused(param: str, given: Any, allowed: str) -> RefusedError:
    """The error of a field whose value is not allowed."""
    return RefusedError(param, f"{param} is {_brief.repr(given)}, but must be {allowed}")


def parse_json(body: bytes) -> Any:
    """The JSON value of the body. Raises RefusedError."""

    def refuse_constant(name: str) -> Any:  # NaN and Infinity are extensions of Python
        raise ValueError(f"{name} is not a JSON number")

    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(None, f"body must be JSON: {error}") from error


class Fields:
    """The fields of a JSON object, which are taken by name; `close` refuses the remaining ones.

    Args:
        value: The value that was sent as the object.
        where: The name of the object in the request; empty for the body.
    """

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            if where:
                raise refused(where, value, "an object")
            raise RefusedError(None, f"body is {_brief.repr(value)}, but must be an object")
        self._dot, self._is_body = where and where + ".", not where
        self._left = {name: x for name, x in value.items() if x is not None}
        self._supported: list[str] = []
        self._missing: list[tuple[str, str]] = []

    def take(
        self, name: str, allowed: str, fits: Callable[[Any], bool], default: Any = None,
        required: bool = False,
    ) -> Any:  # fmt: skip
        """The value of a field, or the default.

        Raises:
            RefusedError: ``fits`` does not accept the value; ``allowed`` describes those it does.
        """
        self._supported.append(name)
        if name not in self._left:
            if required:
                self._missing.append((name, allowed))
            return default
        value = self._left.pop(name)
        if not fits(value):
            raise refused(self._dot + name, value, allowed)
        return value

    def close(self) -> None:
        """Raises RefusedError for a field that was not taken, or else for one that is missing.

        The order matters: a message with tool_calls has no content, but tool_calls is the error.
        """
        for name, value in self._left.items():
            if self._is_body and (name in _WITHOUT_EFFECT or _is_neutral(name, value)):
                continue
            if self._is_body and _NEUTRAL.get(name):
                allowed = " or ".join(map(repr, _NEUTRAL[name]))
                raise refused(name, value, f"{allowed}: this server supports nothing else")
            if value or self._is_body:
                known = ", ".join(self._supported)
                raise refused(
                    self._dot + name, value, f"left out: the supported fields are {known}"
                )
        for name, allowed in self._missing:
            param = self._dot + name
            raise RefusedError(param, f"{param} is missing, but must be {allowed}")


def _is_neutral(name: str, value: Any) -> bool:
    """Whether a field of the body has no effect. True and 1 differ in JSON."""
    if name not in _NEUTRAL:
        return not value
    return any(
        value == x and isinstance(value, bool) == isinstance(x, bool) for x in _NEUTRAL[name]
    )


# --- kinds of values ------------------------------------------------------------------------------


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _is_flag(x: Any) -> bool:
    return isinstance(x, bool)


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)  # True is an int in Python


def _is_count(x: Any) -> bool:
    return _is_integer(x) and x >= 1


def _is_number(x: Any) -> bool:
    return _is_integer(x) or isinstance(x, float)


def _is_between(least: float, most: float) -> Callable[[Any], bool]:
    return lambda x: _is_number(x) and least <= x <= most


def _is_prompt(x: Any) -> bool:
    return _is_text(x) or (isinstance(x, list) and all(map(_is_integer, x)))


def _is_prompts(x: Any) -> bool:
    return (
        isinstance(x, list)
        and bool(x)
        and all(type(y) is type(x[0]) for y in x)
        and all(map(_is_prompt, x))
    )


def _is_stop(x: Any) -> bool:
    strings = x if isinstance(x, list) else [x]
    if len(strings) > MAX_STOPS:
        return False
    return all(_is_text(s) and 0 < len(s) <= MAX_STOP_LENGTH for s in strings)


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParsedRequest:
    """A request of a client."""

    model: str | None
    source: str  # the name of the field that contained the prompt
    prompts: list[Any]  # text, tokens, or messages in the form that templates take
    n: int  # number of answers to each
    limit: str | None  # the name of the field that contained max_tokens, if there was one
    params: SamplingParams
    stream: bool
    include_usage: bool

    def tokens(self, tokenizer: Any) -> list[list[int]]:
        """The prompts as tokens. Raises RefusedError."""
        try:
            if self.source == "messages":
                return [models.chat_prompt(tokenizer, prompt) for prompt in self.prompts]
            return [tokenizer.encode(x) if _is_text(x) else x for x in self.prompts]
        except Exception as error:  # raised by the model's own template or tokenizer
            raiser = "template" if self.source == "messages" else "tokenizer"
            detail = str(error)[:300]  # it may contain the whole text
            sentence = f"{self.source} must fit the model's {raiser}, which says: {detail}"
            raise RefusedError(self.source, sentence) from error

    def choices(self, prompts: list[list[int]]) -> list[tuple[list[int], SamplingParams]]:
        """The prompt and the options of each answer. Those to one prompt have their own seeds."""
        seed = self.params.seed
        params = [
            self.params if seed is None else replace(self.params, seed=seed + i)
            for i in range(self.n)
        ]
        return [(prompt, p) for prompt in prompts for p in params]

    def too_many(self, count: int, most: int) -> RefusedError:
        """The error of a request for more answers than the engine has places for."""
        at_fault = "n" if self.n > 1 else self.source
        return RefusedError(
            at_fault,
            f"{at_fault}: {count} answers are asked for, but must be at most {most} per request",
        )

    def does_not_fit(
        self, prompts: Sequence[Sequence[int]], context: int, error: ValueError
    ) -> RefusedError:
        """The engine's error about one of the prompts, with the name of the field at fault."""
        longest = max(map(len, prompts))
        too_long = longest + (self.params.max_tokens or 1) > context
        at_fault = self.source
        if self.limit and too_long and 0 < longest < context:
            at_fault = self.limit  # the prompts alone would fit
        same_name = at_fault == "prompt"  # the engine uses this name as well
        return RefusedError(at_fault, str(error) if same_name else f"{at_fault}: {error}")


def completion(body: Any) -> ParsedRequest:
    """The request of POST /v1/completions: texts or tokens to continue. Raises RefusedError."""
    fields = Fields(body)
    prompt = fields.take(
        "prompt",
        "a string, a list of tokens (integers), or a list of such prompts",
        lambda x: _is_prompt(x) or _is_prompts(x),
        default="", required=True,
    )  # fmt: skip
    logprobs = fields.take(
        "logprobs",
        f"false or an integer from 0 to {MAX_LOGPROBS}",
        lambda x: x is False or (_is_integer(x) and 0 <= x <= MAX_LOGPROBS),
        False,
    )
    prompts = [prompt] if _is_prompt(prompt) else prompt
    return _common(
        fields, "prompt", prompts, ("max_tokens",), 16, None if logprobs is False else logprobs
    )


def chat(body: Any) -> ParsedRequest:
    """The request of POST /v1/chat/completions: a conversation to answer. Raises RefusedError."""
    fields = Fields(body)
    messages = fields.take(
        "messages", "a list of at least one message", lambda x: isinstance(x, list) and bool(x),
        default=[], required=True,
    )  # fmt: skip
    prompt = [message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    reported = fields.take("logprobs", "true or false", _is_flag, False)
    top = fields.take(
        "top_logprobs",
        f"an integer from 0 to {MAX_LOGPROBS}" if reported else "0 without logprobs",
        lambda x: _is_integer(x) and 0 <= x <= (MAX_LOGPROBS if reported else 0),
        0,
    )
    limits = ("max_completion_tokens", "max_tokens")
    return _common(fields, "messages", [prompt], limits, None, top if reported else None)


def message(value: Any, where: str) -> dict[str, str]:
    """A message of the conversation in the form that templates take. Raises RefusedError."""
    fields = Fields(value, where)
    role = fields.take("role", "a string", _is_text, required=True)
    content = fields.take(
        "content", "a string or a list of text parts", lambda x: isinstance(x, str | list),
        default="", required=True,
    )  # fmt: skip
    fields.close()
    if isinstance(content, list):
        content = "".join(_part(p, f"{where}.content[{j}]") for j, p in enumerate(content))
    return {"role": role, "content": content}


def _part(value: Any, where: str) -> str:
    """The text of a part of a message."""
    fields = Fields(value, where)
    # The type comes first: a picture has no text, but its type is the error.
    fields.take("type", "'text'", lambda x: x == "text", required=True)
    text = fields.take("text", "a string", _is_text, required=True)
    fields.close()
    return text


def _common(
    fields: Fields, source: str, prompts: list[Any], limits: Sequence[str], default: int | None,
    logprobs: int | None,
) -> ParsedRequest:  # fmt: skip
    """The request, with the fields that both kinds of requests have."""
    model = fields.take("model", "a string", _is_text)
    max_tokens = {name: fields.take(name, "an integer from 1", _is_count) for name in limits}
    given = [name for name in limits if max_tokens[name] is not None]
    if len({max_tokens[name] for name in given}) > 1:
        first, second = given
        allowed = f"left out beside {first}, or equal to it, {max_tokens[first]}"
        raise refused(second, max_tokens[second], allowed)
    sampling = _sampling(fields)
    n = fields.take(
        "n", f"an integer from 1 to {MAX_CHOICES}",
        lambda x: _is_count(x) and x <= MAX_CHOICES, 1,
    )  # fmt: skip
    stream = fields.take("stream", "true or false", _is_flag, False)
    options = Fields(
        fields.take("stream_options", "an object", lambda x: isinstance(x, dict), {}),
        "stream_options",
    )
    usage = options.take("include_usage", "true or false", _is_flag, False)
    options.close()
    fields.close()
    params = SamplingParams(
        max_tokens[given[0]] if given else default, logprobs=logprobs, **sampling
    )
    limit = given[0] if given else None
    return ParsedRequest(model, source, prompts, n, limit, params, stream, usage)


def _sampling(fields: Fields) -> dict[str, Any]:
    """The arguments of ``SamplingParams`` that have fields of the same name, and ignore_eos."""
    stop = fields.take(
        "stop",
        f"a string or a list of at most {MAX_STOPS} strings, of 1 to {MAX_STOP_LENGTH} characters",
        _is_stop,
        [],
    )
    ignores_end = fields.take("ignore_eos", "true or false", _is_flag, False)
    top_p = fields.take(
        "top_p", "a number above 0 and at most 1", lambda x: _is_number(x) and 0 < x <= 1, 1.0
    )
    top_k = fields.take(
        "top_k", "an integer from -1; -1 and 0 are all tokens",
        lambda x: _is_integer(x) and x >= -1, 0,
    )  # fmt: skip
    numbers = {
        name: fields.take(
            name, f"a number from {least:g} to {most:g}", _is_between(least, most), default
        )
        for name, least, most, default in (
            ("temperature", 0, 2, 1.0),
            ("min_p", 0, 1, 0.0),
            ("presence_penalty", -2, 2, 0.0),
            ("frequency_penalty", -2, 2, 0.0),
            ("repetition_penalty", 0.01, 100, 1.0),
        )
    }
    return dict(
        numbers,
        seed=fields.take("seed", "an integer", _is_integer),
        top_p=top_p,
        top_k=max(top_k, 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=() if ignores_end else None,
    )
