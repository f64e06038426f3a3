r"""An OpenAI-compatible HTTP server: continuous batching over Tilewise's paged cache.

  python examples/serve.py                          SmolLM2 on http://127.0.0.1:8000
  python examples/serve.py --model org/name --device cuda

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is a tile?"}], "stream": true}'

/v1/models, /v1/completions and /v1/chat/completions (with "stream": true as server-sent events),
/health, /metrics. What is not honoured is refused with 400 and its name, another model with 404;
a server that is full answers 429 with Retry-After. SIGINT and SIGTERM let what is in flight finish.
docs/serving.md says more.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import models

models.require_or_exit("fastapi", "uvicorn", "transformers")
import uvicorn  # noqa: E402
from fastapi import FastAPI, Request  # noqa: E402
from fastapi.responses import (  # noqa: E402
    JSONResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.exceptions import HTTPException  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

import serve_requests  # noqa: E402
from serve_requests import Asked, RefusedError  # noqa: E402
from tilewise.serving import (  # noqa: E402
    Engine,
    Output,
    OverloadedError,
    SamplingParams,
    Service,
    ServiceClosedError,
)

GRACE_SECONDS = 30  # for what is in flight at the end

# --- what clients get -----------------------------------------------------------------------------


class Stream:
    """The outputs of one request, on the event loop. Closed before the end, it is cancelled."""

    def __init__(self, service: Service, prompt: list[int], params: SamplingParams) -> None:
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[Output]()
        self._service, self._open = service, True
        self._id = service.submit(
            prompt, params, lambda output: loop.call_soon_threadsafe(self._queue.put_nowait, output)
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
    """Server-sent events of a stream, which ends with the connection, whoever closes it."""

    def __init__(self, stream: Stream, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._stream = stream

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._stream.close()


@dataclass
class Form:
    """How the answers to one request are written down: as text, or as a chat message."""

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


def failure(
    status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
    code: str | None = None, **headers: str,
) -> Response:  # fmt: skip
    """An error as clients of this interface expect it; param: the field that is at fault."""
    body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    # Escaped: half a character is allowed in the name of a JSON field, and is no UTF-8.
    text, headers = json.dumps(body), {k.replace("_", "-"): v for k, v in headers.items()}
    return Response(text, status, headers, "application/json")


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
        if output.finish in ("error", "cancelled"):
            yield event({"error": {"message": f"ended: {output.finish}", "type": "server_error"}})
        elif output.text or output.finish:
            yield event(form.piece(output.text, output.finish))
    if with_usage:
        yield event({**form.piece("", None), "choices": [], "usage": form.usage(tokens)})
    yield "data: [DONE]\n\n"


async def collected(stream: Stream, form: Form) -> Response:
    """The answer in one piece."""
    text, tokens, finish = "", 0, ""
    async for output in stream:
        text += output.text
        tokens += output.token is not None
        finish = output.finish or ""
    if finish in ("error", "cancelled"):
        return failure(503, f"the request ended: {finish}", "server_error")
    return JSONResponse(form.whole(text, finish, tokens))


async def unless_disconnected(request: Request, stream: Stream, form: Form) -> Response:
    """The answer, given up as soon as nobody waits for it."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    answer, gone = (asyncio.ensure_future(x) for x in (collected(stream, form), disconnected()))
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else failure(499, "the client went away")
    finally:
        stream.close()
        answer.cancel()
        gone.cancel()


# --- the server -----------------------------------------------------------------------------------


async def body_of(request: Request) -> Any:
    """The JSON that was sent. Raises RefusedError."""
    kind = request.headers.get("content-type", "")
    # Any page in a browser may send text or a form to a server on this machine, but not JSON.
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(None, f"content-type is {kind!r}, but must be application/json")
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError, ClientDisconnect) as error:
        raise RefusedError(None, f"body is not JSON, but must be: {error}") from error


def create_app(service: Service, tokenizer: Any, name: str) -> FastAPI:
    """The application; it closes the service when it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close, GRACE_SECONDS)

    app = FastAPI(title="Tilewise", lifespan=lifespan)
    started = int(time.time())

    def no_such_model(asked: Any, allowed: str = "") -> Response:
        error = serve_requests.refused("model", asked, f"{name!r}{allowed}")
        return failure(404, str(error), param=error.param, code="model_not_found")

    async def answer(request: Request, read: Callable[[Any], Asked]) -> Response:
        asked = read(await body_of(request))
        if asked.model not in (None, name):
            return no_such_model(asked.model, " or left out")
        prompt = asked.tokens(tokenizer)
        try:
            stream = Stream(service, prompt, asked.params)
        except ValueError as error:
            raise asked.does_not_fit(prompt, service.engine.context, error) from error
        form = Form(name, len(prompt), asked.source == "messages")
        if asked.stream:
            return EventStream(stream, events(stream, form, asked.include_usage))
        return await unless_disconnected(request, stream, form)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await answer(request, serve_requests.completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await answer(request, serve_requests.chat)

    about = {"id": name, "object": "model", "created": started, "owned_by": "tilewise"}

    @app.get("/v1/models")
    async def list_models() -> Any:
        return {"object": "list", "data": [about]}

    @app.get("/v1/models/{model:path}")  # names of the Hub have a slash
    async def one_model(model: str) -> Any:
        return about if model == name else no_such_model(model)

    @app.get("/health")
    async def health() -> Any:
        if service.error is not None:
            return JSONResponse({"status": "failing", "error": repr(service.error)}, 503)
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Any:
        return PlainTextResponse(metrics_text(service.engine.stats()))

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return failure(400, str(error), param=error.param)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> Response:
        asked = f"{request.method} {request.url.path}"
        return failure(error.status_code, f"{asked}: {error.detail}", **(error.headers or {}))

    @app.exception_handler(OverloadedError)
    async def overloaded(_: Request, error: OverloadedError) -> Response:
        return failure(429, str(error), "overloaded", retry_after=str(error.retry_after))

    @app.exception_handler(ServiceClosedError)
    async def closed(_: Request, error: ServiceClosedError) -> Response:
        return failure(503, str(error), "server_error")

    return app


def metrics_text(stats: dict[str, int]) -> str:
    """Counters and gauges in the text format of Prometheus."""
    gauges = ("running", "waiting", "pages", "pages_free")
    lines = []
    for name, value in stats.items():
        full = f"tilewise_{name}" if name in gauges else f"tilewise_{name}_total"
        lines.append(f"# TYPE {full} {'gauge' if name in gauges else 'counter'}")
        lines.append(f"{full} {value}")
    return "\n".join(lines) + "\n"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=models.Help)
    add: Callable[..., Any] = parser.add_argument
    add("--model", default=models.SMOLLM2, help="smollm2, tiny, or one of Transformers")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: any of this machine")
    add("--port", type=int, default=8000, help="0: any that is free")
    add("--device", default=models.default_device(), help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES],
        help="auto: fp32 on the CPU, bf16 on a GPU")  # fmt: skip
    add("--cache-tokens", type=int, default=16384, help="tokens that the pages hold in all")
    add("--page-size", type=int, default=16, help="tokens of a page")
    add("--max-running", type=int, default=32, help="requests at once, at most --step-tokens")
    add("--max-waiting", type=int, default=64, help="requests beyond those before 429")
    add("--step-tokens", type=int, default=512, help="tokens of a forward pass")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port is {options.port}, must be from 0 to 65535")
    # The engine says so, too, but not before the model is loaded.
    if options.step_tokens < options.max_running:
        parser.error(
            f"--step-tokens is {options.step_tokens}, but must be at least --max-running, "
            f"{options.max_running}: a forward pass has a token of every request it works on"
        )
    return options


def loaded(options: argparse.Namespace) -> Engine:
    """The engine, with words about what takes long and what it takes."""
    began = time.monotonic()

    def say(what: str) -> None:
        print(what, file=sys.stderr, flush=True)

    say(f"loading {options.model} to {options.device} ...")
    model, tokenizer = models.load(options.model, options.device, options.dtype)
    parameters = sum(x.numel() for x in model.parameters())
    say(f"{parameters / 1e6:.0f} M parameters of {model.dtype}; making the pages ...")
    engine = Engine(
        model,
        tokenizer,
        cache_tokens=options.cache_tokens,
        page_size=options.page_size,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        step_tokens=options.step_tokens,
    )
    pages = f"{engine.pool.pages} pages of {engine.pool.page_size} tokens"
    seconds = time.monotonic() - began
    say(f"{pages} take {engine.cache.bytes / 2**20:.0f} MiB; ready after {seconds:.1f} s")
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is told to stop."""
    options = parse(arguments)
    try:
        engine = loaded(options)
        listener = socket.create_server((options.host, options.port))
    except (models.MissingError, OSError, ValueError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    app = create_app(Service(engine), engine.tokenizer, options.model)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    with listener:
        port = listener.getsockname()[1]
        print(f"{options.model} on http://{options.host}:{port}", flush=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(
                number, lambda *_: None
            )  # uvicorn heeds them, and sends them on at its end
        uvicorn.Server(config).run(sockets=[listener])
    print(f"stopped: {engine.stats()['generated_tokens']} tokens generated")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
