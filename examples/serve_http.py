"""The HTTP application of examples/serve.py. It limits the size of requests; answers are JSON.

All work that takes time in proportion to a request (parsing its JSON, fields and tokens) is done in
worker threads, so that the event loop continues to deliver other answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import serve_requests
from serve_requests import ParsedRequest, RefusedError
from tilewise.serving import (
    Engine,
    Output,
    OverloadedError,
    SamplingParams,
    Service,
    ServiceClosedError,
)

GRACE_SECONDS = 30  # for the requests in flight when the server stops
# The engine ends a request at its deadline, between two steps. If a step hangs, or a client does
# not read its answer, the server gives up this much later.
LATE_SECONDS = 5.0
_READERS = 4  # largest number of requests that are parsed at once


@dataclass(frozen=True)
class Limits:
    """The limits of a request."""

    body_bytes: int = 2**21
    seconds: float = 600.0  # from its arrival to the last token


# --- answers --------------------------------------------------------------------------------------


class Stream:
    """The outputs of one request on the event loop; closing it early cancels the request."""

    def __init__(
        self, service: Service, prompt: list[int], params: SamplingParams, deadline: float
    ) -> None:
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Output]()
        self._service, self._open = service, True
        self.seconds_left = max(deadline - loop.time(), 1e-3)
        self._id = service.submit(
            prompt,
            params,
            lambda output: loop.call_soon_threadsafe(self._queue.put_nowait, output),
            self.seconds_left,
        )

    async def __aiter__(self) -> AsyncIterator[Output]:
        while self._open:
            output = await self._queue.get()
            self._open = not output.finish
            yield output

    def close(self) -> None:
        if self._open:
            self._service.cancel(self._id)


class EventStream(StreamingResponse):
    """The server-sent events of a stream, which is closed together with the connection."""

    def __init__(self, stream: Stream, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, *args: Any) -> None:
        try:
            # After this time the connection is closed, because an event may be partly sent.
            await asyncio.wait_for(
                super().__call__(*args), self._stream.seconds_left + LATE_SECONDS
            )
        finally:
            self._stream.close()


@dataclass
class Form:
    """The format of the answers to one request: text or a chat message."""

    model: str
    prompt_tokens: int
    chat: bool

    def __post_init__(self) -> None:
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created = int(time.time())

    def whole(self, text: str, finish: str, tokens: int) -> dict[str, Any]:
        content = (
            {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        )
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._around(kind, content, finish), "usage": self.usage(tokens)}

    def piece(self, text: str, finish: str | None) -> dict[str, Any]:
        content = {"delta": {"content": text} if text else {}} if self.chat else {"text": text}
        return self._around(
            "chat.completion.chunk" if self.chat else "text_completion", content, finish
        )

    def usage(self, tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    def _around(self, kind: str, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
        choice = {"index": 0, **content, "finish_reason": finish, "logprobs": None}
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "choices": [choice],
        }  # fmt: skip


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


# How a request can end without an answer: the HTTP status and type of each error.
_FAILURES = {
    "error": (503, "server_error"),
    "cancelled": (503, "server_error"),
    "timeout": (504, "timeout"),
}


def sentence(output: Output) -> str:
    """The message about a request that ended without an answer."""
    return output.error or f"the request ended: {output.finish}"


async def events(stream: Stream, form: Form, with_usage: bool) -> AsyncIterator[str]:
    """The lines of an event stream."""

    def event(value: dict[str, Any]) -> str:
        return f"data: {json.dumps(value)}\n\n"

    if form.chat:
        first = form.piece("", None)
        first["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        yield event(first)
    tokens = 0
    async for output in stream:
        tokens += output.token is not None
        if output.finish in _FAILURES:
            _, kind = _FAILURES[output.finish]
            yield event({"error": {"message": sentence(output), "type": kind}})
        elif output.text or output.finish:
            yield event(form.piece(output.text, output.finish))
    if with_usage:
        yield event({**form.piece("", None), "choices": [], "usage": form.usage(tokens)})
    yield "data: [DONE]\n\n"


async def collected(stream: Stream, form: Form) -> Response:
    """The complete answer as one response."""
    pieces, tokens, output = [], 0, Output(0)
    async for output in stream:
        pieces.append(output.text)
        tokens += output.token is not None
    if output.finish in _FAILURES:
        status, kind = _FAILURES[output.finish]
        return failure(status, sentence(output), kind)
    return as_json(form.whole("".join(pieces), output.finish or "", tokens))


async def unless_disconnected(request: Request, stream: Stream, form: Form) -> Response:
    """The complete answer, unless the client disconnects before it is done."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = (asyncio.ensure_future(x) for x in (collected(stream, form), disconnected()))
    try:
        done, _ = await asyncio.wait(
            {answer, gone},
            timeout=stream.seconds_left + LATE_SECONDS,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if answer in done:
            return answer.result()
        if gone in done:
            return failure(499, "the client has disconnected")
        return failure(504, "the request was not done by its deadline", "timeout")
    finally:
        stream.close()
        answer.cancel()
        gone.cancel()


# --- the server -----------------------------------------------------------------------------------


async def body_of(request: Request, max_bytes: int) -> bytes:
    """The body of a JSON request with at most `max_bytes` bytes. Raises RefusedError."""
    kind = request.headers.get("content-type", "")
    # Any web page in a browser may send text or a form to a local server, but not JSON.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(None, f"content-type is {kind!r}, but must be application/json")
    # FastAPI has such a limit, but its error is plain text, which clients of this interface do not
    # expect.
    too_long = RefusedError(None, f"body is too long, but must have at most {max_bytes} bytes", 413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise too_long
    except ClientDisconnect as error:
        raise RefusedError(None, "body is incomplete, but must be complete") from error
    return bytes(body)


class Server:
    """Answers requests with the one model of a service, and its tokenizer."""

    def __init__(self, service: Service, tokenizer: Any, name: str, limits: Limits) -> None:
        self.service, self.tokenizer, self.name, self.limits = service, tokenizer, name, limits
        self._readers = CapacityLimiter(_READERS)
        # The first call may initialise a tokenizer, which must not happen in two threads at once.
        tokenizer.encode("a")

    def read(
        self, body: bytes, kind: Callable[[Any], ParsedRequest]
    ) -> tuple[ParsedRequest, list[int]]:
        """The parsed request, and its prompt as tokens. Raises RefusedError."""
        parsed = kind(serve_requests.parse_json(body))
        if parsed.model not in (None, self.name):
            raise self.no_such_model(parsed.model, " or left out")
        return parsed, parsed.tokens(self.tokenizer)

    async def answer(self, request: Request, kind: Callable[[Any], ParsedRequest]) -> Response:
        """The response to a completion, or a stream of it. Raises RefusedError, OverloadedError."""
        deadline = asyncio.get_running_loop().time() + self.limits.seconds
        engine: Engine = self.service.engine
        engine.require_place()  # a full server need not read the body
        try:
            body = await asyncio.wait_for(
                body_of(request, self.limits.body_bytes), self.limits.seconds
            )
        except asyncio.TimeoutError as error:
            time_limit = f"{self.limits.seconds:g} seconds"
            raise RefusedError(None, f"body must arrive within {time_limit}", 408) from error
        parsed, prompt = await anyio.to_thread.run_sync(
            self.read, body, kind, limiter=self._readers
        )
        try:
            stream = Stream(self.service, prompt, parsed.params, deadline)
        except ValueError as error:
            raise parsed.does_not_fit(prompt, engine.context, error) from error
        form = Form(self.name, len(prompt), parsed.source == "messages")
        if parsed.stream:
            return EventStream(stream, events(stream, form, parsed.include_usage))
        return await unless_disconnected(request, stream, form)

    def no_such_model(self, model: Any, allowed: str = "") -> RefusedError:
        """The error of a request for a model that is not this one."""
        error = serve_requests.refused("model", model, f"{self.name!r}{allowed}")
        return RefusedError(error.param, str(error), 404, "model_not_found")

    def health(self, good: bool) -> Response:
        """A response with status 200 or 503."""
        if good:
            return as_json({"status": "ok"})
        return as_json({"status": "failing", "error": repr(self.service.error)}, 503)


def create_app(
    service: Service, tokenizer: Any, name: str, limits: Limits | None = None
) -> FastAPI:
    """The application, which closes the service when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close, GRACE_SECONDS)

    app = FastAPI(title="Tilewise", lifespan=lifespan)
    server = Server(service, tokenizer, name, limits or Limits())

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await server.answer(request, serve_requests.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await server.answer(request, serve_requests.chat)

    about = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tilewise"}

    @app.get("/v1/models")
    async def list_models() -> Any:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{model:path}")  # names of models on the Hub contain a slash
    async def one_model(model: str) -> Any:
        if model != name:
            raise server.no_such_model(model)
        return about

    @app.get("/health/live")
    async def live() -> Any:
        return server.health(service.alive)

    @app.get("/health")
    @app.get("/health/ready")
    async def ready() -> Any:
        return server.health(service.ready)

    @app.get("/metrics")
    async def metrics() -> Any:
        return PlainTextResponse(metrics_text(service.engine.stats()))

    handle_errors(app)
    return app


def handle_errors(app: FastAPI) -> None:
    """Gives every error the format that clients of this interface expect."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return failure(error.status, str(error), param=error.param, code=error.code)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        target = f"{request.method} {request.url.path}"
        return failure(error.status_code, f"{target}: {error.detail}", **(error.headers or {}))

    @app.exception_handler(OverloadedError)
    async def overloaded(_: Request, error: OverloadedError) -> Response:
        return failure(429, str(error), "overloaded", retry_after=str(error.retry_after))

    @app.exception_handler(ServiceClosedError)
    async def closed(_: Request, error: ServiceClosedError) -> Response:
        return failure(503, str(error), "server_error")

    @app.exception_handler(Exception)  # the exception is also logged
    async def fault(_: Request, error: Exception) -> Response:
        return failure(500, f"internal error of the server: {type(error).__name__}", "server_error")


def metrics_text(stats: dict[str, int]) -> str:
    """The counters and gauges in the text format of Prometheus."""
    gauges = ("running", "waiting", "pages", "pages_free")
    lines = []
    for name, value in stats.items():
        full = f"tilewise_{name}" if name in gauges else f"tilewise_{name}_total"
        lines.append(f"# TYPE {full} {'gauge' if name in gauges else 'counter'}")
        lines.append(f"{full} {value}")
    return "\n".join(lines) + "\n"
