r"""An OpenAI-compatible HTTP server: continuous batching over Tilewise's paged cache.

  python examples/serve.py                          SmolLM2 on http://127.0.0.1:8000
  python examples/serve.py --model org/name --device cuda

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is a tile?"}], "stream": true}'

/v1/models, /v1/completions and /v1/chat/completions (with "stream": true as server-sent events),
/health/live, /health/ready, /metrics. What is not honoured is refused with 400 and its name,
another model with 404, a body that is too long with 413; a server that is full answers 429 with
Retry-After. SIGINT and SIGTERM let what is in flight finish.
docs/serving.md says more.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import models

models.require_or_exit("fastapi", "uvicorn", "transformers")
import uvicorn  # noqa: E402
from fastapi import FastAPI  # noqa: E402

from serve_http import GRACE_SECONDS, Limits, create_app  # noqa: E402
from tilewise.serving import Engine, Service  # noqa: E402


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=models.Help)
    add: Callable[..., Any] = parser.add_argument
    add("--model", default=models.SMOLLM2, help="smollm2, tiny, or one of Transformers")
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen on, of IPv4 or IPv6; 0.0.0.0 or ::: any of this machine",
    )
    add("--port", type=int, default=8000, help="0: any that is free")
    add("--device", default=models.default_device(), help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES],
        help="auto: fp32 on the CPU, bf16 on a GPU")  # fmt: skip
    add("--cache-tokens", type=int, default=16384, help="tokens that the pages hold in all")
    add("--page-size", type=int, default=16, help="tokens of a page")
    add("--max-running", type=int, default=32, help="requests at once, at most --step-tokens")
    add("--max-waiting", type=int, default=64, help="requests beyond those before 429")
    add("--step-tokens", type=int, default=512, help="tokens of a forward pass")
    limits = Limits()
    add("--max-body-bytes", type=int, default=limits.body_bytes, help="of a request, before 413")
    add("--request-seconds", type=float, default=limits.seconds,
        help="deadline of a request, from its arrival to its last token")  # fmt: skip
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port is {options.port}, must be from 0 to 65535")
    for name in ("max_body_bytes", "request_seconds"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}, must be above 0")
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


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that has its address and does not listen yet.

    Raises:
        OSError: there is no such address here, or another program listens on the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may have addresses of both kinds.
        family, kind, protocol, _, address = min(found, key=lambda x: x[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _at(error, host, port) from error
    with listener:
        if os.name == "posix":  # elsewhere this would take a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only = address[0] != "::"  # which stands for all addresses, those of IPv4 among them
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        try:
            listener.bind(address)
        except OSError as error:
            raise _at(error, host, port) from error
        yield listener


def _at(error: OSError, host: str, port: int) -> OSError:
    """The error, with the words of the command line."""
    return OSError(error.errno, f"{error.strerror}: --host {host} --port {port}")


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serves until a signal says to stop."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # uvicorn heeds them, and sends them on at its end
    uvicorn.Server(config).run(sockets=[listener])


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its status."""
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        try:
            # The address is taken before the model is loaded, which takes minutes. Nobody is let
            # in until then: a socket that does not listen refuses connections.
            listener = stack.enter_context(bound(options.host, options.port))
            engine = loaded(options)
            listener.listen()
        except (models.MissingError, OSError, ValueError) as error:
            print(f"serve: {error}", file=sys.stderr)
            return 2
        name = f"[{options.host}]" if ":" in options.host else options.host
        port = listener.getsockname()[1]
        print(f"{options.model} on http://{name}:{port}", flush=True)
        limits = Limits(options.max_body_bytes, options.request_seconds)
        run(create_app(Service(engine), engine.tokenizer, options.model, limits), listener)
        print(f"stopped: {engine.stats()['generated_tokens']} tokens generated")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
