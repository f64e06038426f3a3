"""The HTTP application of examples/serve.py. It limits the size of requests; answers are JSON.

All work that takes time in proportion to a request (parsing its JSON, fields and tokens) is done in
worker threads, so that the event loop continues to deliver other answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import serve_requests
from serve_access import Access, Account, account_of
from serve_answers import Form, as_json, collected, events, failure, metrics_text
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
    """The outputs of the choices of one request on the event loop, each with its choice's index.

    Closing it early cancels the choices.
    """

    def __init__(
        self,
        service: Service,
        choices: Sequence[tuple[list[int], SamplingParams]],
        deadline: float,
        account: Account,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._queue = asyncio.Queue[tuple[int, Output]]()
        self._service, self._account = service, account
        self._open: dict[int, int] = {}  # choice: the engine's id of its request
        self.seconds_left = max(deadline - loop.time(), 1e-3)

        def deliver_to(index: int) -> Callable[[Output], None]:
            return lambda output: loop.call_soon_threadsafe(
                self._queue.put_nowait, (index, output)
            )  # fmt: skip

        try:
            for i, (prompt, params) in enumerate(choices):
                self._open[i] = service.submit(prompt, params, deliver_to(i), self.seconds_left)
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while self._open:
            index, output = await self._queue.get()
            self._account.generated_tokens += output.token is not None
            if output.finish:
                del self._open[index]
            yield index, output

    def close(self) -> None:
        for request in self._open.values():
            self._service.cancel(request)


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


async def unless_disconnected(request: Request, stream: Stream, form: Form) -> Response:
    """The complete answer, unless the client disconnects before it is done."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = (
        asyncio.ensure_future(x) for x in (collected(aiter(stream), form), disconnected())
    )
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
    ) -> tuple[ParsedRequest, list[list[int]]]:
        """The parsed request, and its prompts as tokens. Raises RefusedError."""
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
        parsed, prompts = await anyio.to_thread.run_sync(
            self.read, body, kind, limiter=self._readers
        )
        account = account_of(request.scope)
        account.prompt_tokens = sum(map(len, prompts))
        choices = parsed.choices(prompts)
        if len(choices) > engine.places:
            raise parsed.too_many(len(choices), engine.places)
        try:
            stream = Stream(self.service, choices, deadline, account)
        except ValueError as error:
            raise parsed.does_not_fit(prompts, engine.context, error) from error
        chat = parsed.source == "messages"
        form = Form(self.name, account.prompt_tokens, len(choices), chat, self.tokenizer.decode)
        if parsed.stream:
            return EventStream(stream, events(aiter(stream), form, parsed.include_usage))
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
    service: Service, tokenizer: Any, name: str, limits: Limits | None = None,
    api_key: str | None = None,
) -> FastAPI:  # fmt: skip
    """The application, which closes the service when it ends.

    Args:
        service: The service, which only the application may use from now on.
        tokenizer: The tokenizer of its model.
        name: The name of the model for clients.
        limits: The limits of requests.
        api_key: The key that clients must send; None accepts all.

    Raises:
        ValueError: no client can send the key.
    """

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
        engine = service.engine
        return PlainTextResponse(metrics_text(engine.stats(), engine.latencies().items()))

    handle_errors(app)
    app.add_middleware(Access, fault=fault, api_key=api_key)
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


def fault(error: Exception) -> Response:
    """The answer to an exception that no handler knows; uvicorn logs the exception."""
    return failure(500, f"internal error of the server: {type(error).__name__}", "server_error")
