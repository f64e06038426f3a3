"""A server of examples/serve.py in a thread, and its client, shared by the server's tests.

The model is the tiny random one; TILEWISE_TEST_MODEL=smollm2 uses a real one (takes minutes).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from paths import ROOT

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import uvicorn  # noqa: E402

import models  # noqa: E402
import serve  # noqa: E402
import serve_http  # noqa: E402
from tilewise.serving import Engine, Service  # noqa: E402

MODEL = os.environ.get("TILEWISE_TEST_MODEL", models.TINY)
PATIENCE = 120.0 if MODEL == models.TINY else 900.0  # seconds, for every wait


class Client:
    """One connection per request. Every method has a time limit, in seconds."""

    def __init__(self, port: int, host: str = "127.0.0.1", patience: float = PATIENCE) -> None:
        self.port, self.host, self.patience = port, host, patience
        self.service: Any = None  # the server's service, where it runs in this process

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=self.patience)

    @contextlib.contextmanager
    def requested(
        self, method: str, path: str, body: Any = None
    ) -> Iterator[http.client.HTTPConnection]:
        """A connection on which the request has been sent; it is closed at the end."""
        connection = self.connection()
        payload = body if body is None or isinstance(body, bytes) else json.dumps(body)
        with contextlib.closing(connection):
            connection.request(method, path, payload, {"content-type": "application/json"})
            yield connection

    @contextlib.contextmanager
    def answered(
        self, method: str, path: str, body: Any = None
    ) -> Iterator[http.client.HTTPResponse]:
        with self.requested(method, path, body) as connection, connection.getresponse() as response:
            yield response

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        with self.answered(method, path, body) as response:
            text = response.read().decode()
            is_json = response.headers["content-type"].startswith("application/json")
            return response.status, json.loads(text) if is_json else text, dict(response.headers)

    def complete(self, **body: Any) -> Any:
        status, answer, _ = self.call("POST", "/v1/completions", body)
        assert status == 200, answer
        return answer

    def stream(self, **body: Any) -> str:
        """The joined text of a streamed completion."""
        with self.answered("POST", "/v1/completions", {**body, "stream": True}) as response:
            assert response.status == 200, response.read()
            events = list(sent(response))
        assert events[-1] == "[DONE]"
        choices = [json.loads(e)["choices"][0] for e in events[:-1]]
        assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] in ("length", "stop")
        return "".join(c["text"] for c in choices)

    def metrics(self) -> dict[str, int]:
        status, text, _ = self.call("GET", "/metrics")
        assert status == 200
        return {k: int(v) for k, v in re.findall(r"^tilewise_(\w+) (\d+)$", text, re.MULTILINE)}

    def wait_until_idle(self) -> dict[str, int]:
        deadline = time.monotonic() + PATIENCE
        while (now := self.metrics())["running"] + now["waiting"]:
            assert time.monotonic() < deadline, now
            time.sleep(0.02)
        return now


def sent(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of the server-sent events."""
    for line in response:
        if line.startswith(b"data: "):
            yield line[6:].decode().strip()


@contextlib.contextmanager
def serving(
    device: str, tokenizer: Any = None, limits: serve_http.Limits | None = None,
    host: str = "127.0.0.1", api_key: str | None = None, **options: Any,
) -> Iterator[Client]:  # fmt: skip
    """A server with its own engine in a thread of this process; on exit, everything must be free.

    The model runs in float32: in bfloat16 two tokens might be equally likely.
    """
    model, default = models.load(MODEL, device, "fp32")
    tokenizer = tokenizer or default
    service = Service(Engine(model, tokenizer, **options))
    app = serve_http.create_app(service, tokenizer, MODEL, limits, api_key)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5))
    with serve.bound(host, 0) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        client = Client(listener.getsockname()[1], host)
        client.service = service
        try:
            yield client
            idle = client.wait_until_idle()
            assert idle["pages_free"] == idle["pages"]
        finally:
            server.should_exit = True
            thread.join(PATIENCE)
    assert not thread.is_alive() and not service._thread.is_alive()
