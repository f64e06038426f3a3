"""The answers of examples/serve.py: completions and chat messages, whole or in pieces, and errors.

A request has one or several choices: the answers to its first prompt, then those to the second,
and so on.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response

from tilewise.serving import Logprobs, Output

# How a request can end without an answer: the HTTP status and type of each error.
FAILURES = {
    "error": (503, "server_error"),
    "cancelled": (503, "server_error"),
    "timeout": (504, "timeout"),
}


def as_json(value: Any, status: int = 200, **headers: str) -> Response:
    """A JSON response in ASCII, because a lone surrogate is valid in JSON, but not in UTF-8."""
    named = {name.replace("_", "-"): x for name, x in headers.items()}
    return Response(json.dumps(value), status, named, "application/json")


def failure(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
    code: str | None = None, **headers: str,
) -> Response:  # fmt: skip
    """An error in the format of this interface; `param` is the field at fault."""
    error = {"message": message, "type": kind, "param": param, "code": code}
    return as_json({"error": error}, status, **headers)


def sentence(output: Output) -> str:
    """The message about a request that ended without an answer."""
    return output.error or f"the request ended: {output.finish}"


@dataclass
class Piece:
    """The part of a choice since its last event, or the whole of it."""

    text: str = ""
    finish: str | None = None
    tokens: list[tuple[int, Logprobs]] = field(default_factory=list)  # if they are reported

    def add(self, output: Output) -> None:
        self.text += output.text
        self.finish = output.finish
        if output.token is not None and output.logprobs is not None:
            self.tokens.append((output.token, output.logprobs))


@dataclass
class Form:
    """The format of the answers to one request: text or a chat message."""

    model: str
    prompt_tokens: int  # of all prompts
    choices: int
    chat: bool
    decode: Callable[[list[int]], str]  # the tokenizer's, for the tokens that are reported

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())
        self._offsets = [0] * self.choices  # characters of the reported tokens so far

    def whole(self, pieces: list[Piece], tokens: int) -> dict[str, Any]:
        """The complete answer. `tokens` is the number of generated ones."""
        choices = [
            self._choice(
                i,
                {"message": {"role": "assistant", "content": piece.text}}
                if self.chat
                else {"text": piece.text},
                piece,
            )
            for i, piece in enumerate(pieces)
        ]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._around(kind, choices), "usage": self.usage(tokens)}

    def beginning(self, index: int) -> dict[str, Any]:
        """The first event of a choice of a chat."""
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._around(self._chunk, [self._choice(index, delta, Piece())])

    def event(self, index: int, piece: Piece) -> dict[str, Any]:
        """An event with a piece of a choice."""
        content: dict[str, Any] = {"text": piece.text}
        if self.chat:
            content = {"delta": {"content": piece.text} if piece.text else {}}
        return self._around(self._chunk, [self._choice(index, content, piece)])

    def last(self, tokens: int) -> dict[str, Any]:
        """The event that has the usage and no choice."""
        return {**self._around(self._chunk, []), "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _around(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def _choice(self, index: int, content: dict[str, Any], piece: Piece) -> dict[str, Any]:
        report = None
        if piece.tokens:
            report = self._of_chat(piece) if self.chat else self._of_text(index, piece)
        return {"index": index, **content, "finish_reason": piece.finish, "logprobs": report}

    def _of_chat(self, piece: Piece) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            text = self.decode([token])
            spelled = [*text.encode("utf-8", "surrogatepass")]
            return {"token": text, "logprob": _finite(logprob), "bytes": spelled}

        return {
            "content": [
                {
                    **entry(token, x.token),
                    "top_logprobs": [entry(*alternative) for alternative in x.top],
                }
                for token, x in piece.tokens
            ]
        }

    def _of_text(self, index: int, piece: Piece) -> dict[str, Any]:
        texts = [self.decode([token]) for token, _ in piece.tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(x.token) for _, x in piece.tokens],
            "top_logprobs": [
                {self.decode([token]): _finite(y) for token, y in x.top} for _, x in piece.tokens
            ],
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    """JSON has no -inf; the value that this interface uses instead."""
    return max(logprob, -9999.0)


async def events(
    outputs: AsyncIterator[tuple[int, Output]], form: Form, with_usage: bool
) -> AsyncIterator[str]:
    """The lines of an event stream, from the outputs of choices by their index."""

    def line(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value)}\n\n"

    for i in range(form.choices if form.chat else 0):
        yield line(form.beginning(i))
    tokens = 0
    pieces = [Piece() for _ in range(form.choices)]
    async for i, output in outputs:
        tokens += output.token is not None
        if output.finish in FAILURES:
            _, kind = FAILURES[output.finish]
            yield line({"error": {"message": sentence(output), "type": kind}})
            break
        pieces[i].add(output)
        if output.text or output.finish:
            yield line(form.event(i, pieces[i]))
            pieces[i] = Piece()
    if with_usage:
        yield line(form.last(tokens))
    yield "data: [DONE]\n\n"


async def collected(outputs: AsyncIterator[tuple[int, Output]], form: Form) -> Response:
    """The complete answer as one response."""
    tokens = 0
    pieces = [Piece() for _ in range(form.choices)]
    async for i, output in outputs:
        tokens += output.token is not None
        if output.finish in FAILURES:
            status, kind = FAILURES[output.finish]
            return failure(status, sentence(output), kind)
        pieces[i].add(output)
    return as_json(form.whole(pieces, tokens))


def metrics_text(stats: dict[str, int], latencies: Iterable[tuple[str, Any]]) -> str:
    """The counters, gauges and histograms in the text format of Prometheus."""
    gauges = ("running", "waiting", "pages", "pages_free")
    lines = []
    for name, value in stats.items():
        full = f"tilewise_{name}" if name in gauges else f"tilewise_{name}_total"
        lines.append(f"# TYPE {full} {'gauge' if name in gauges else 'counter'}")
        lines.append(f"{full} {value}")
    for name, durations in latencies:
        full = f"tilewise_{name}"
        lines.append(f"# TYPE {full} histogram")
        for bound, count in [*durations.below, ("+Inf", durations.count)]:
            lines.append(f'{full}_bucket{{le="{bound}"}} {count}')
        lines.append(f"{full}_sum {durations.total:.6f}")
        lines.append(f"{full}_count {durations.count}")
    return "\n".join(lines) + "\n"
