"""examples/serve.py under load on loopback: each of 32 streams is answered as if it were the only
one.

The model is the tiny random one; TILEWISE_TEST_MODEL=smollm2 uses a real one (takes minutes).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paths import ROOT

pytest.importorskip("torch")
import devices
import hf_models

hf_models.require("transformers>=5.20", "fastapi", "uvicorn")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import torch  # noqa: E402

import cascade  # noqa: E402
import generate  # noqa: E402
import models  # noqa: E402
import serve  # noqa: E402
from serve_client import MODEL, PATIENCE, Client, sent, serving  # noqa: E402
from tilewise.serving import Engine, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors]

STREAMS, TOKENS = 32, 24


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if MODEL == models.TINY:  # its matrices are multiplied faster than a thread wakes up
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def client_of() -> Iterator[Callable[[str], Client]]:
    """A server on each device, with slots for all streams but pages for only some of their tokens:
    requests are preempted.
    """
    options = dict(cache_tokens=1024, page_size=3, max_running=STREAMS, max_waiting=8)
    with contextlib.ExitStack() as servers:
        yield functools.cache(lambda device: servers.enter_context(serving(device, **options)))


@pytest.fixture
def client(client_of: Callable[[str], Client], device: devices.Device) -> Client:
    return client_of(str(device.memory))


def requests() -> list[dict[str, Any]]:
    """Different prompts; every other one is greedy, the others are drawn with their own seeds."""
    return [
        dict(
            prompt=f"{i} tiles of {i * i} keys, " * (1 + i % 7),
            max_tokens=TOKENS + i % 5,
            temperature=0.8 * (i % 2),
            top_p=0.9,
            seed=i,
        )
        for i in range(STREAMS)
    ]


def at_once(jobs: list[Any]) -> list[Any]:
    """The results of functions that all run at the same time."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Any) -> Any:
        barrier.wait(PATIENCE)
        return job()

    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(run, jobs))


def test_32_streams_equal_single_requests(client):
    alone = [client.complete(**r) for r in requests()]
    texts = [a["choices"][0]["text"] for a in alone]
    assert len(set(texts)) == STREAMS, "equal answers prove nothing"
    before = client.metrics()
    together = at_once([lambda r=r: client.stream(**r) for r in requests()])
    assert together == texts
    after = client.wait_until_idle()
    count = sum(a["usage"]["completion_tokens"] for a in alone)
    assert after["generated_tokens_total"] - before["generated_tokens_total"] == count
    steps = after["steps_total"] - before["steps_total"]
    assert steps < count / 2, f"{steps} steps for {count} tokens are no batch"
    if MODEL == models.TINY:
        assert after["preemptions_total"] > before["preemptions_total"]


def test_abandoned_streams_free_their_pages(client):
    before = client.metrics()
    expected = client.complete(**requests()[1])["choices"][0]["text"]
    body = dict(prompt="never ending", max_tokens=900, temperature=0)
    with contextlib.ExitStack() as connections:
        for _ in range(4):
            stream = client.answered("POST", "/v1/completions", {**body, "stream": True})
            assert next(sent(connections.enter_context(stream)))
        connections.enter_context(client.requested("POST", "/v1/completions", body))  # not streamed
        deadline = time.monotonic() + PATIENCE
        while client.metrics()["requests_total"] < before["requests_total"] + 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert client.stream(**requests()[1]) == expected
    after = client.wait_until_idle()
    assert after["cancelled_total"] - before["cancelled_total"] == 5
    assert after["pages_free"] == after["pages"]


def test_overload_is_refused_and_loses_no_request(device):
    options = dict(cache_tokens=1024, max_running=3, max_waiting=2, step_tokens=64)
    with serving(str(device.memory), **options) as client:
        alone = [client.complete(**r)["choices"][0]["text"] for r in requests()]

        def patient(request: dict[str, Any]) -> tuple[int, str]:
            """Ask again until there is a slot."""
            refused, deadline = 0, time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                status, answer, headers = client.call("POST", "/v1/completions", request)
                if status == 200:
                    return refused, answer["choices"][0]["text"]
                assert status == 429 and int(headers["retry-after"]) >= 1, answer
                assert "requests are in flight" in answer["error"]["message"]
                refused += 1
                time.sleep(0.05)  # sooner than Retry-After, for more load
            raise TimeoutError

        answers = at_once([lambda r=r: patient(r) for r in requests()])
        assert [text for _, text in answers] == alone
        refused = sum(count for count, _ in answers)
        assert refused > 0 and client.metrics()["refused_total"] == refused


def test_chat_completions(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    body = dict(messages=messages, max_completion_tokens=9, temperature=0)
    status, whole, _ = client.call("POST", "/v1/chat/completions", body)
    assert status == 200 and whole["object"] == "chat.completion"
    message = whole["choices"][0]["message"]
    assert message["role"] == "assistant" and message["content"]
    usage = whole["usage"]
    assert usage["completion_tokens"] <= 9
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    more = dict(stream=True, stream_options={"include_usage": True})
    with client.answered("POST", "/v1/chat/completions", {**body, **more}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        *events, last, done = sent(response)
    assert done == "[DONE]" and json.loads(last)["usage"] == usage
    deltas = [json.loads(e)["choices"][0]["delta"] for e in events]
    assert deltas[0]["role"] == "assistant"
    assert "".join(d.get("content", "") for d in deltas) == message["content"]


def test_models_and_health(client):
    (model,) = client.call("GET", "/v1/models")[1]["data"]
    assert model["id"] == MODEL
    assert client.call("GET", f"/v1/models/{MODEL}")[:2] == (200, model)
    for other in ("org/name", "gpt-4"):
        status, answer, _ = client.call("GET", f"/v1/models/{other}")
        assert status == 404 and answer["error"]["code"] == "model_not_found"
        assert answer["error"]["message"] == f"model is {other!r}, but must be {MODEL!r}"
    assert client.call("GET", "/health")[:2] == (200, {"status": "ok"})


def test_stop_and_harmless_fields(client):
    harmless = dict(n=1, user="me", stop=None, top_p=None, logit_bias={})
    harmless |= dict(
        stream_options=dict(include_usage=None, include_obfuscation=False),
        presence_penalty=0.0,
        repetition_penalty=1.0,
        logprobs=False,
        suffix="",
    )
    whole = client.complete(prompt="abc", max_tokens=12, temperature=0, **harmless)
    text = whole["choices"][0]["text"]
    stop = text[5:7]
    cut = client.complete(prompt="abc", max_tokens=12, temperature=0, stop=stop)["choices"][0]
    assert cut == {**cut, "text": text[: text.index(stop)], "finish_reason": "stop"}


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def hello(**more: Any) -> dict[str, Any]:
    return dict(role="user", content="hello", **more)


# One refusal of each kind in test_serve_requests.py, and those that only an engine can make.
@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"),
    [
        (COMPLETIONS, dict(), "prompt", "prompt is missing, but must be a string, a"),
        (COMPLETIONS, [1], None, r"body is \[1\], but must be an object"),
        (COMPLETIONS, dict(prompt=["a", 1]), "prompt", r"prompt is \['a', 1\], but must be a"),
        (COMPLETIONS, dict(prompt="a", temperature=3), "temperature", "is 3, but .* from 0 to 2"),
        (COMPLETIONS, dict(prompt="a", n=17), "n", "n is 17, but must be an integer from 1 to 16"),
        (COMPLETIONS, dict(prompt=["a"] * 50), "prompt", "50 answers are asked for.* at most 40"),
        (COMPLETIONS, dict(prompt="a", logprobs=-1), "logprobs", "is -1, but must be false or"),
        (COMPLETIONS, dict(prompt="a", stop=[""]), "stop", "stop is"),
        (COMPLETIONS, {"prompt": "a", "\ud800": 1}, "\ud800", "must be left out"),
        (
            COMPLETIONS,
            dict(prompt="a", stream=True, stream_options=dict(continuous_usage_stats=True)),
            "stream_options.continuous_usage_stats",
            "is True, but must be left out: the supported fields are include_usage",
        ),
        (
            CHAT,
            dict(messages=[hello(), dict(role="assistant", content=None, tool_calls=[{"id": 1}])]),
            "messages[1].tool_calls",
            r"is \[{'id': 1}\], but must be left out: the supported fields are role, content",
        ),
        (
            CHAT,
            dict(messages=[dict(role="user", content=[dict(type="image_url", image_url={})])]),
            "messages[0].content[0].type",
            "is 'image_url', but must be 'text'",
        ),
        (COMPLETIONS, dict(prompt=""), "prompt", "^prompt has 0 tokens .* at least 1"),
        (COMPLETIONS, dict(prompt=[1] * 5000), "prompt", "^prompt has 5000 tokens .* at most"),
        (COMPLETIONS, dict(prompt=[1] * 5000, max_tokens=5), "prompt", "^prompt has 5000 tokens"),
        (COMPLETIONS, dict(prompt="a", max_tokens=10**6), "max_tokens", "1000000 would .* at most"),
        (COMPLETIONS, dict(prompt=[1, 10**6]), "prompt", "^prompt has token 1000000"),
        (COMPLETIONS, dict(prompt=[-1], max_tokens=2), "prompt", "^prompt has token -1"),
        (CHAT, dict(messages=[hello()] * 1000), "messages", "^messages: prompt has .* at most"),
        (
            CHAT,
            dict(messages=[hello()], max_completion_tokens=10**6),
            "max_completion_tokens",
            "^max_completion_tokens: prompt has .* 1000000 would .* at most",
        ),
    ],
)
def test_refusals(client, path, body, param, sentence):
    before = client.metrics()["requests_total"]
    status, answer, _ = client.call("POST", path, body)
    error = answer["error"]
    assert status == 400 and re.search(sentence, error["message"]), answer
    assert error == {**error, "type": "invalid_request_error", "param": param, "code": None}
    assert client.metrics()["requests_total"] == before


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, dict(prompt="a")), (CHAT, dict(messages=[hello()]))]
)
def test_unknown_model_is_not_found(client, path, body):
    status, answer, _ = client.call("POST", path, {**body, "model": "other"})
    assert status == 404
    assert answer["error"] == dict(
        message=f"model is 'other', but must be {MODEL!r} or left out",
        type="invalid_request_error",
        param="model",
        code="model_not_found",
    )
    for right in (MODEL, None):
        status, answer, _ = client.call("POST", path, {**body, "model": right, "max_tokens": 1})
        assert status == 200 and answer["model"] == MODEL


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/v1/embeddings", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405)],
)
def test_unknown_path_or_method_gets_an_error_object(client, method, path, status):
    got, answer, headers = client.call(method, path)
    assert got == status and answer["error"]["message"].startswith(f"{method} {path}: ")
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        ("application/json", b'{"prompt": "a"', "body must be JSON: "),
        ("application/json", b"", "body must be JSON: "),
        ("application/json", b"\xff", "body must be JSON: "),
        ("application/json", b"[" * 10**5, "body must be JSON: "),
        ("text/plain", b'{"prompt": "a"}', "content-type is 'text/plain', but must be application"),
        ("application/json; charset=utf-8", b'{"prompt": "a", "max_tokens": 1}', ""),
    ],
)
def test_invalid_json_is_refused(client, kind, text, sentence):
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request("POST", COMPLETIONS, text, {"content-type": kind})
        response = connection.getresponse()
        answer = json.loads(response.read())
    assert response.status == (400 if sentence else 200)
    if sentence:
        assert answer["error"]["message"].startswith(sentence) and answer["error"]["param"] is None


@pytest.mark.tensors("cpu")  # nothing is computed
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--cache-tokens", "3"], "cache_tokens is 3, but must be at least page_size, 16"),
        (["--max-running", "0"], "max_running is 0"),
        (["--host", "not.a.host.invalid"], "serve: "),
        (["--device", "abacus"], "device is 'abacus', but PyTorch cannot use it"),
    ],
)
def test_invalid_engine_options_are_reported(options, sentence, capsys):
    assert serve.main(["--model", "tiny", *options]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.tensors("cpu")  # nothing is loaded
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "65536"], "--port is 65536, but must be from 0 to 65535"),
        (["--max-running", "513"], "--step-tokens is 512, but must be at least --max-running, 513"),
        (["--step-tokens", "31"], "--step-tokens is 31, but must be at least --max-running, 32"),
    ],
)
def test_invalid_options_are_refused_before_the_model_loads(options, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        serve.main(["--model", "not/a-model", *options])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("example", [serve, generate, cascade])
def test_help_describes_every_option_and_its_default(example, capsys):
    with pytest.raises(SystemExit):
        example.parse(["--help"])
    entries = [" ".join(x.split()) for x in capsys.readouterr().out.split("\n  --")[1:]]
    options = vars(example.parse([]))
    assert len(entries) == len(options)
    for entry in entries:
        flag, words = re.match(r"([\w-]+)(?: [A-Z_]+| \{.*\})?(?: (\S.*))?$", entry).groups()
        default = options[flag.replace("-", "_")]
        assert words, f"--{flag} has no description"
        if default is not None and default is not False:
            assert words.endswith(f" (default: {default})"), flag
    assert options["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.tensors("cpu")
def test_more_than_512_requests_run_at_once():
    count = 520
    options = serve.parse(["--max-running", str(count), "--step-tokens", str(count)])
    sizes = dict(max_running=options.max_running, step_tokens=options.step_tokens)
    model, tokenizer = models.load(models.TINY, "cpu", "fp32")
    engine = Engine(model, tokenizer, **sizes)
    params = SamplingParams(6, temperature=0.0)
    some = range(0, count, count // 4)
    alone = [engine.generate([[i % 256]], params)[0].tokens for i in some]
    given: list[list[int | None]] = [[] for _ in range(count)]
    for i in range(count):
        engine.add([i % 256], params, lambda output, i=i: given[i].append(output.token))
    engine.step()
    assert engine.stats()["running"] == count
    while engine.busy:
        engine.step()
    assert [given[i] for i in some] == alone


@pytest.mark.skipif(MODEL != models.TINY, reason="takes long to load")
def test_signal_lets_streams_finish_and_ends_the_server(device):
    command = [sys.executable, str(EXAMPLES / "serve.py"), "--model", "tiny", "--port", "0"]
    command += ["--device", str(device.memory)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = child.stdout.readline()
        client = Client(int(re.search(r":(\d+)$", line.strip())[1]))
        body = dict(prompt="long", max_tokens=400, temperature=0, stream=True)
        with client.answered("POST", "/v1/completions", body) as response:
            events = sent(response)
            first = next(events)
            child.send_signal(signal.SIGTERM)
            *rest, last, done = events
        assert done == "[DONE]" and json.loads(last)["choices"][0]["finish_reason"] == "length"
        text = "".join(json.loads(e)["choices"][0]["text"] for e in (first, *rest, last))
        assert len(text) == 400
        printed, errors = child.communicate(timeout=PATIENCE)
    finally:
        child.kill()
    assert child.returncode == 0, errors
    assert "stopped: 400 tokens generated" in printed and "Traceback" not in errors
    loading, making, ready = errors.splitlines()[:3]
    assert loading == f"loading tiny to {device.memory} ..."
    assert re.match(r"\d+ M parameters of torch\.\w+; allocating the pages \.\.\.$", making)
    assert re.match(r"1024 pages of 16 tokens take \d+ MiB; ready after [\d.]+ s$", ready)
