r"""An OpenAI-compatible HTTP server: continuous batching over Tilewise's paged cache.

  python examples/serve.py                          SmolLM2 on http://127.0.0.1:8000
  python examples/serve.py --model org/name --device cuda

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "What is a tile?"}], "stream": true}'

It serves /v1/models, /v1/completions and /v1/chat/completions (with "stream": true as server-sent
events), /health/live, /health/ready and /metrics. It refuses a field that it does not support with
400 and the name of the field, another model with 404, and a body that is too long with 413. A full
server answers 429 with Retry-After. SIGINT and SIGTERM let the requests in flight finish.
docs/serving.md has the details.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
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

import serve_access  # noqa: E402
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
        help="IPv4 or IPv6 address to listen on; 0.0.0.0 or :: is every address of this machine",
    )
    add("--port", type=int, default=8000, help="0: any free port")
    add("--device", default=models.default_device(), help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES],
        help="auto: fp32 on the CPU, bf16 on a GPU")  # fmt: skip
    add("--cache-tokens", type=int, default=16384, help="total number of tokens in the pages")
    add("--page-size", type=int, default=16, help="tokens per page")
    add("--max-running", type=int, default=32, help="requests at once, at most --step-tokens")
    add("--max-waiting", type=int, default=64, help="further requests that wait, before 429")
    add("--step-tokens", type=int, default=512, help="tokens per forward pass")
    limits = Limits()
    add("--max-body-bytes", type=int, default=limits.body_bytes,
        help="largest body of a request, before 413")  # fmt: skip
    add("--request-seconds", type=float, default=limits.seconds,
        help="deadline of a request, from its arrival to its last token")  # fmt: skip
    add("--prefix-caching", choices=["on", "off"], default="on",
        help="whether prompts with the same beginning share its pages")  # fmt: skip
    add("--api-key", help="key that requests below /v1 must send as 'Authorization: Bearer KEY'; "
        "also read from the environment variable TILEWISE_API_KEY")  # fmt: skip
    add("--access-log", choices=["on", "off"], default="on",
        help="whether stderr gets a line for each request")  # fmt: skip
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port is {options.port}, but must be from 0 to 65535")
    for name in ("max_body_bytes", "request_seconds"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {value}, but must be above 0")
    # The engine checks this as well, but only after the model is loaded.
    if options.step_tokens < options.max_running:
        parser.error(
            f"--step-tokens is {options.step_tokens}, but must be at least --max-running, "
            f"{options.max_running}: a forward pass has a token of every running request"
        )
    return options


def loaded(options: argparse.Namespace) -> Engine:
    """Loads the model and makes the engine; reports progress, time and memory."""
    began = time.monotonic()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"loading {options.model} to {options.device} ...")
    model, tokenizer = models.load(options.model, options.device, options.dtype)
    parameters = sum(x.numel() for x in model.parameters())
    say(f"{parameters / 1e6:.0f} M parameters of {model.dtype}; allocating the pages ...")
    engine = Engine(
        model,
        tokenizer,
        cache_tokens=options.cache_tokens,
        page_size=options.page_size,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        step_tokens=options.step_tokens,
        prefix_caching=options.prefix_caching == "on",
    )
    pages = f"{engine.pool.pages} pages of {engine.pool.page_size} tokens"
    seconds = time.monotonic() - began
    say(f"{pages} take {engine.cache.bytes / 2**20:.0f} MiB; ready after {seconds:.1f} s")
    return engine


@contextlib.contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that is bound to its address, but does not listen yet.

    Raises:
        OSError: there is no such address here, or another program uses the port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name may have IPv4 and IPv6 addresses; IPv4 is preferred.
        family, kind, protocol, _, address = min(found, key=lambda x: x[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _at(error, host, port) from error
    with listener:
        if os.name == "posix":  # on other systems this option would allow a port that is in use
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only = address[0] != "::"  # "::" means all addresses, including those of IPv4
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
        try:
            listener.bind(address)
        except OSError as error:
            raise _at(error, host, port) from error
        yield listener


def _at(error: OSError, host: str, port: int) -> OSError:
    """The error in terms of the command line."""
    return OSError(error.errno, f"{error.strerror}: --host {host} --port {port}")


def api_key(given: str | None) -> str | None:
    """The key of --api-key or, without it, of the environment; None if neither is given.

    Raises:
        ValueError: the key is empty, or no client can send it.
    """
    name = "TILEWISE_API_KEY" if given is None else "--api-key"
    key = os.environ.get(name) if given is None else given
    return None if key is None else serve_access.checked_key(name, key)


def log_to_stderr(log: logging.Logger) -> None:
    """Makes a logger write its lines with the time."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False


def run(app: FastAPI, listener: socket.socket) -> None:
    """Serves until a signal stops it."""
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS)
    for number in (signal.SIGINT, signal.SIGTERM):
        # uvicorn handles the signals itself, and raises them again after it has stopped.
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns its exit status."""
    options = parse(arguments)
    with contextlib.ExitStack() as stack:
        try:
            key = api_key(options.api_key)
            # The address is bound before the model is loaded, which takes minutes. Until then the
            # socket does not listen and refuses connections.
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
        if options.access_log == "on":
            log_to_stderr(serve_access.log)
        app = create_app(Service(engine), engine.tokenizer, options.model, limits, key)
        run(app, listener)
        print(f"stopped: {engine.stats()['generated_tokens']} tokens generated")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
