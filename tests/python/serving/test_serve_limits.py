"""examples/serve.py under hostile requests and faults: each ends only itself, with a message."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paths import ROOT

pytest.importorskip("torch")
import hf_models

hf_models.require("transformers>=5.20", "fastapi", "uvicorn")
sys.path.insert(0, str(ROOT / "examples"))
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import models  # noqa: E402
import serve  # noqa: E402
import serve_http  # noqa: E402
import serve_requests  # noqa: E402
from serve_client import Client, sent, serving  # noqa: E402
from serve_http import Limits  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.usefixtures("one_thread")]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
PATIENCE = 20.0  # seconds
ENDLESS = dict(prompt="never ending", max_tokens=900, temperature=0)


@contextlib.contextmanager
def server(**options: Any) -> Iterator[Client]:
    with serving("cpu", **options) as client:
        client.patience = PATIENCE
        yield client


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with server(cache_tokens=256) as client:
        yield client


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def in_threads(jobs: list[Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Start all jobs; calling the result waits for what they return."""
    results: list[Any] = [None] * len(jobs)

    def keep(i: int) -> None:
        results[i] = jobs[i]()

    threads = [threading.Thread(target=keep, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()

    def wait() -> list[Any]:
        for thread in threads:
            thread.join(PATIENCE)
        return results

    return wait


class Gate(models.Characters):
    """A tokenizer that blocks on one text while the gate is closed, and fails on another."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.poison = -1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("slow"):
            self.reached.set()
            assert self.open.wait(PATIENCE)
        return super().encode(text)

    def decode(self, tokens: Any, **_: Any) -> str:
        if self.poison in list(tokens):
            raise KeyError("unknown token")
        return super().decode(tokens)


# --- bodies ---------------------------------------------------------------------------------------


def announced(client: Client, count: int) -> tuple[int, Any]:
    """Status and error of a request whose headers announce a body of this many bytes, never
    sent."""
    with contextlib.closing(client.connection()) as connection:
        connection.putrequest("POST", COMPLETIONS)
        for name, value in {**JSON, "content-length": str(count)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, json.loads(response.read())["error"]


def test_body_announced_as_too_long_is_not_read(client):
    status, error = announced(client, 10**8)
    assert status == 413
    assert error["message"] == f"body is too long, but must have at most {2**21} bytes"


def test_reading_an_endless_body_stops_at_the_limit(client):
    """The body is chunked and never ends: the answer comes once the limit is exceeded."""
    with socket.create_connection((client.host, client.port), timeout=PATIENCE) as raw:
        raw.sendall(
            f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        for _ in range(2**21 // 2**16 + 1):
            raw.sendall(b"10000\r\n" + b" " * 2**16 + b"\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 413 ")


def test_body_limit_of_the_command_line():
    with server(cache_tokens=64, limits=Limits(body_bytes=100)) as client:
        assert client.call("POST", COMPLETIONS, b" " * 101)[0] == 413
        body = json.dumps(dict(prompt="a", max_tokens=1)).encode().ljust(100)
        assert client.call("POST", COMPLETIONS, body)[0] == 200


def test_missing_body_times_out():
    with server(cache_tokens=64, limits=Limits(seconds=0.3)) as client:
        status, error = announced(client, 10)
    assert status == 408 and error["message"] == "body must arrive within 0.3 seconds"


def test_tokenizing_does_not_block_the_event_loop():
    tokenizer = Gate()
    with server(tokenizer=tokenizer, cache_tokens=256) as client:
        body = dict(prompt="slow", max_tokens=2, temperature=0)
        wait = in_threads([lambda: client.complete(**body)] * 2)
        assert tokenizer.reached.wait(PATIENCE)
        assert client.call("GET", "/health/live")[0] == 200
        assert client.complete(**{**body, "prompt": "quick"})
        tokenizer.open.set()
        assert all(answer["choices"] for answer in wait())


@pytest.mark.parametrize("stop", [["a"] * 5, ["x" * 257], "x" * 257, ["a"] * 10**5])
def test_stop_strings_are_few_and_short(client, stop):
    status, answer, _ = client.call("POST", COMPLETIONS, dict(prompt="a", stop=stop))
    assert status == 400 and answer["error"]["param"] == "stop"
    allowed = "a string or a list of at most 4 strings, of 1 to 256 characters"
    assert answer["error"]["message"].endswith(f", but must be {allowed}")
    most = [c * 256 for c in "\x01\x02\x03\x04"]
    assert client.complete(prompt="a", stop=most, max_tokens=1)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_invalid_json_numbers_are_refused(client, value):
    body = f'{{"prompt": "a", "user": {value}}}'.encode()
    status, answer, _ = client.call("POST", COMPLETIONS, body)
    assert status == 400 and f"{value} is not a JSON number" in answer["error"]["message"]


# --- arbitrary requests --------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, -(10**4000), 1e-40, 5e-324]),
    st.floats(allow_nan=True, allow_infinity=True),
)
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(["", "\x00", "\ud800", "\U0001f600" * 9]))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda x: st.lists(x, max_size=6) | st.dictionaries(TEXTS, x, max_size=4),
    max_leaves=12,
)
MESSAGES = st.lists(
    st.one_of(
        VALUES,
        st.fixed_dictionaries(
            {}, optional=dict(role=TEXTS | VALUES, content=TEXTS | VALUES, name=VALUES)
        ),
    ),
    max_size=4,
)
FIELDS = dict(
    model=VALUES, max_tokens=NUMBERS | VALUES, max_completion_tokens=NUMBERS | VALUES,
    temperature=NUMBERS | VALUES, top_p=NUMBERS | VALUES, stop=st.lists(TEXTS, max_size=6) | VALUES,
    seed=NUMBERS | VALUES, stream=st.booleans() | VALUES, stream_options=VALUES,
    n=st.integers(0, 3) | NUMBERS, top_k=NUMBERS, min_p=NUMBERS, presence_penalty=NUMBERS,
    repetition_penalty=NUMBERS, ignore_eos=VALUES, top_logprobs=NUMBERS,
    logprobs=VALUES, tools=VALUES, user=VALUES, logit_bias=VALUES, response_format=VALUES,
)  # fmt: skip
PROMPTS = TEXTS | st.lists(NUMBERS | st.integers(0, 255), max_size=40) | VALUES
BODIES = {
    COMPLETIONS: st.fixed_dictionaries({}, optional=dict(prompt=PROMPTS, **FIELDS)),
    CHAT: st.fixed_dictionaries({}, optional=dict(messages=MESSAGES | VALUES, **FIELDS)),
}
READ = {COMPLETIONS: serve_requests.completion, CHAT: serve_requests.chat}
FUZZ = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=300, **FUZZ)
@given(data=st.data())
def test_any_fields_are_read_or_refused(path, data):
    body = data.draw(BODIES[path] | VALUES)
    try:
        parsed = READ[path](body)
        parsed.tokens(models.Characters())
    except serve_requests.RefusedError as error:
        assert len(str(error)) < 1000 and error.status == 400
    else:
        assert 0 <= parsed.params.temperature <= 2 and 0 < parsed.params.top_p <= 1


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, **FUZZ)
@given(data=st.data())
def test_any_body_is_answered_or_refused(client, path, data):
    body = data.draw(BODIES[path])
    status, answer, _ = client.call("POST", path, body)
    if status == 200:
        return  # the answer may be a stream, which has been read to its end
    assert status in (400, 404), answer
    assert {"message", "type", "param", "code"} == set(answer["error"])


@settings(max_examples=60, **FUZZ)
@given(st.binary(max_size=60) | st.text("{}[]\",:0123456789eE+-.truefalsn \\u", max_size=60).map(
    str.encode))  # fmt: skip
@example(b"9" * 5000)
@example(b"1." + b"9" * 10**6)
@example(b"[" * 10**6)
@example(b'{"a":' * 10**5)
@example(b'{"prompt": [' + b"1," * 10**6 + b"1]}")
@example(b'{"messages": [' + b"{}," * 5 * 10**5 + b"{}]}")
@example(json.dumps(dict(messages=[dict(role="user", content="a")] * 40000)).encode())
@example(json.dumps(dict(prompt="a" * 2 * 10**6)).encode())
def test_any_bytes_are_answered_or_refused(client, body):
    for path in BODIES:
        assert client.call("POST", path, body)[0] in (400, 404)


# --- faults of one request, of a step, of the engine's thread -------------------------------------


def test_temperature_near_zero_does_not_affect_other_requests(client):
    bodies = [dict(prompt=f"{i} tiles", max_tokens=12, temperature=0.8, seed=i) for i in range(4)]
    alone = [client.complete(**a)["choices"] for a in bodies]
    cold = dict(prompt="cold", max_tokens=12, temperature=1e-40)
    greedy = client.complete(**{**cold, "temperature": 0})["choices"]
    wait = in_threads([lambda a=a: client.complete(**a)["choices"] for a in [*bodies, cold]])
    assert wait() == [*alone, greedy]


def test_undecodable_tokens_end_one_request():
    tokenizer = Gate()
    with server(tokenizer=tokenizer, cache_tokens=256) as client:
        bodies = [dict(prompt=p, max_tokens=12, temperature=0) for p in ("one", "two", "six")]
        texts = [client.complete(**a)["choices"][0]["text"] for a in bodies]
        letters = [set(t) for t in texts]
        only = (letters[1] - letters[0] - letters[2]).pop()
        tokenizer.poison = ord(only) if ord(only) < 256 else ord(only) - 0x100
        got = in_threads([lambda a=a: client.call("POST", COMPLETIONS, a) for a in bodies])()
        assert [status for status, *_ in got] == [200, 503, 200]
        assert [got[i][1]["choices"][0]["text"] for i in (0, 2)] == [texts[0], texts[2]]
        assert "the tokens cannot be decoded: KeyError" in got[1][1]["error"]["message"]
        with client.answered("POST", COMPLETIONS, {**bodies[1], "stream": True}) as response:
            *_, last, done = sent(response)
        assert done == "[DONE]" and "cannot be decoded" in json.loads(last)["error"]["message"]
        assert client.call("GET", "/health/ready")[0] == 200


def test_server_recovers_from_a_failed_step_without_traffic(monkeypatch, caplog):
    with server(cache_tokens=256) as client:
        engine = client.service.engine
        forward, broken = engine._forward, [True]

        def fails(work: Any) -> Any:
            if broken:
                raise MemoryError("no memory")
            return forward(work)

        monkeypatch.setattr(engine, "_forward", fails)
        status, answer, _ = client.call("POST", COMPLETIONS, dict(prompt="a"))
        assert status == 503
        assert answer["error"]["message"] == "a step failed: MemoryError('no memory')"
        for path, expected in (("/health", 503), ("/health/ready", 503), ("/health/live", 200)):
            assert client.call("GET", path)[0] == expected, path
        broken.clear()
        eventually(lambda: client.call("GET", "/health/ready")[0] == 200)
        assert client.call("GET", "/health")[:2] == (200, {"status": "ok"})


def test_server_reports_that_its_engine_has_ended(monkeypatch, caplog):
    with server(cache_tokens=256) as client:
        assert client.call("GET", "/health/live")[0] == 200

        def ends(work: Any) -> Any:
            raise SystemExit(7)

        monkeypatch.setattr(client.service.engine, "_forward", ends)
        for _ in range(2):  # one in flight, one afterwards
            status, answer, _ = client.call("POST", COMPLETIONS, dict(prompt="a"))
            assert status == 503
            assert answer["error"]["message"] == "the engine's thread has ended: SystemExit(7)"
        for path in ("/health/live", "/health/ready", "/health"):
            status, answer, _ = client.call("GET", path)
            assert status == 503 and "SystemExit(7)" in answer["error"], path


def test_internal_error_has_the_usual_error_object(client, monkeypatch):
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(client.service.engine, "require_place", broken)
    status, answer, headers = client.call("POST", COMPLETIONS, dict(prompt="a"))
    assert status == 500
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert answer["error"]["message"] == "internal error of the server: ZeroDivisionError"


# --- deadlines and clients that leave -------------------------------------------------------------


def test_deadline_ends_the_answer_and_the_stream():
    with server(cache_tokens=1024, limits=Limits(seconds=0.4)) as client:
        status, answer, _ = client.call("POST", COMPLETIONS, ENDLESS)
        assert status == 504 and answer["error"]["type"] == "timeout"
        assert answer["error"]["message"] == "the request was not done by its deadline"
        with client.answered("POST", COMPLETIONS, {**ENDLESS, "stream": True}) as response:
            *_, last, done = sent(response)
        assert done == "[DONE]" and json.loads(last)["error"]["type"] == "timeout"
        now = client.metrics()
        assert now["timeout_total"] == 2 and now["pages_free"] == now["pages"]


def test_hanging_step_does_not_block_clients(monkeypatch):
    monkeypatch.setattr(serve_http, "LATE_SECONDS", 0.2)
    with server(cache_tokens=256, limits=Limits(seconds=0.2)) as client:
        engine, go_on = client.service.engine, threading.Event()
        forward = engine._forward

        def hangs(work: Any) -> Any:
            assert go_on.wait(PATIENCE)
            return forward(work)

        monkeypatch.setattr(engine, "_forward", hangs)
        status, answer, _ = client.call("POST", COMPLETIONS, dict(prompt="a"))
        assert status == 504 and answer["error"]["type"] == "timeout"
        go_on.set()


@pytest.mark.parametrize("stream", [True, False])
def test_client_that_leaves_before_its_first_token_frees_its_slot(stream):
    with server(cache_tokens=1024, max_running=1) as client:
        with client.answered("POST", COMPLETIONS, {**ENDLESS, "stream": True}) as first:
            assert next(sent(first))
            with client.requested("POST", COMPLETIONS, {**ENDLESS, "stream": stream}):
                eventually(lambda: client.metrics()["waiting"] == 1)
            eventually(lambda: client.metrics()["waiting"] == 0)
            assert client.metrics()["running"] == 1
        eventually(lambda: client.metrics()["running"] == 0)
        now = client.metrics()
        assert now["cancelled_total"] == 2 and now["pages_free"] == now["pages"]


# --- addresses ------------------------------------------------------------------------------------


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_server_on_an_ipv6_address():
    with server(host="::1", cache_tokens=64) as client:
        assert client.complete(prompt="a", max_tokens=2)["choices"]
    with serve.bound("::", 0) as listener:  # any address, IPv4 included
        listener.listen()
        for host in ("::1", "127.0.0.1"):
            socket.create_connection((host, listener.getsockname()[1]), PATIENCE).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_busy_port_is_reported_before_the_model_loads(host, capsys):
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as busy:
        port = str(busy.getsockname()[1])
        assert serve.main(["--model", "not/a-model", "--host", host, "--port", port]) == 2
    said = capsys.readouterr().err
    assert said.startswith("serve: ") and f"--host {host} --port {port}" in said
    assert "in use" in said and "loading" not in said


def test_connections_are_refused_before_the_model_loads():
    with serve.bound("127.0.0.1", 0) as listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), PATIENCE)


@pytest.mark.parametrize(
    "option", ["--max-body-bytes=0", "--request-seconds=0", "--request-seconds=nan"]
)
def test_limits_of_the_command_line_are_checked(option, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(["--model", "not/a-model", option])
    assert ended.value.code == 2
    assert f"{option.split('=')[0]} is" in capsys.readouterr().err
