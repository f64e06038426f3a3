"""Several answers per request, what is reported about their tokens, access and latencies."""

from __future__ import annotations

import json
import logging
import re
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch")
import devices
import hf_models

hf_models.require("transformers>=5.20", "fastapi", "uvicorn")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import serve  # noqa: E402
from serve_client import Client, sent, serving  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors]

KEY = "secret"
PROMPTS = ["ab", "tiles of keys", "c"]


@pytest.fixture(scope="module")
def client():
    options = dict(cache_tokens=1024, max_running=8, max_waiting=8, step_tokens=64)
    with serving("cpu", **options) as started:
        yield started


@pytest.mark.tensors("cpu")
def test_prompts_and_n(client: Client, device: devices.Device):
    alone = [
        client.complete(prompt=p, max_tokens=6, temperature=0.9, seed=seed)["choices"][0]["text"]
        for p in PROMPTS for seed in (3, 4)
    ]  # fmt: skip
    body = dict(prompt=PROMPTS, n=2, max_tokens=6, temperature=0.9, seed=3)
    whole = client.complete(**body)
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert [c["text"] for c in whole["choices"]] == alone and len(set(alone)) == 6
    assert whole["usage"] == dict(prompt_tokens=16, completion_tokens=36, total_tokens=52)
    with client.answered("POST", "/v1/completions", {**body, "stream": True}) as response:
        *events, done = sent(response)
    texts, finishes = [""] * 6, [0] * 6
    for choice in (json.loads(e)["choices"][0] for e in events):
        texts[choice["index"]] += choice["text"]
        finishes[choice["index"]] += choice["finish_reason"] == "length"
    assert done == "[DONE]" and texts == alone and finishes == [1] * 6


@pytest.mark.tensors("cpu")
def test_logprobs(client: Client):
    body = dict(max_tokens=5, temperature=0)
    (choice,) = client.complete(prompt="ab", logprobs=2, **body)["choices"]
    report = choice["logprobs"]
    assert "".join(report["tokens"]) == choice["text"]
    assert report["text_offset"] == [0, 1, 2, 3, 4]
    for token, x, top in zip(
        report["tokens"], report["token_logprobs"], report["top_logprobs"], strict=True
    ):
        assert top[token] == x == max(top.values()) < 0 and len(top) == 2
    chat = dict(messages=[dict(role="user", content="ab")], logprobs=True, top_logprobs=1, **body)
    _, whole, _ = client.call("POST", "/v1/chat/completions", chat)
    content = whole["choices"][0]["logprobs"]["content"]
    with client.answered("POST", "/v1/chat/completions", {**chat, "stream": True}) as response:
        events = [json.loads(e)["choices"][0] for e in list(sent(response))[:-1]]
    streamed = [x for e in events if e["logprobs"] for x in e["logprobs"]["content"]]
    # The second answer reads pages of the first, so its sums have another order.
    for x, y in zip(streamed, content, strict=True):
        assert x["token"] == y["token"] and x["logprob"] == pytest.approx(y["logprob"], rel=1e-4)
    assert len(content) == 5
    for x in content:
        (first,) = x["top_logprobs"]
        assert first == {k: x[k] for k in ("token", "logprob", "bytes")}
        assert bytes(x["bytes"]).decode() == x["token"]


@pytest.mark.tensors("cpu")
def test_too_many_choices_at_once_leave_nothing_behind(client: Client):
    """16 places: the second half of the choices is refused, and the first half cancelled."""
    with client.requested("POST", "/v1/completions", dict(prompt="a", n=10, max_tokens=900)):
        while client.metrics()["running"] < 8:
            pass
        status, answer, headers = client.call("POST", "/v1/completions", dict(prompt="a", n=10))
        assert status == 429 and headers["retry-after"], answer
    assert client.wait_until_idle()["pages_free"] == client.metrics()["pages"]


@pytest.mark.tensors("cpu")
def test_latencies(client: Client):
    client.complete(prompt="ab", max_tokens=4, temperature=0)
    text = client.call("GET", "/metrics")[1]
    now = client.metrics()
    first = now["time_to_first_token_seconds_count"]
    between = now["inter_token_latency_seconds_count"]
    assert first >= 1 and first + between == now["generated_tokens_total"]
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds"):
        assert f"# TYPE tilewise_{name} histogram" in text
        counts = re.findall(rf'^tilewise_{name}_bucket{{le="(.*)"}} (\d+)$', text, re.MULTILINE)
        values = [int(n) for _, n in counts]
        assert values == sorted(values) and counts[-1] == ("+Inf", str(now[f"{name}_count"]))
        assert re.search(rf"^tilewise_{name}_sum \d+\.\d+$", text, re.MULTILINE)


@pytest.mark.tensors("cpu")
def test_key_and_access_log(caplog):
    caplog.set_level(logging.INFO, "tilewise.access")
    with serving("cpu", api_key=KEY, cache_tokens=256) as client:
        body = json.dumps(dict(prompt="confidential", max_tokens=3))
        for given, status in (
            (None, 401),
            ("Bearer wrong", 401),
            (KEY, 401),
            (f"Bearer {KEY}", 200),
        ):
            headers = {"content-type": "application/json", "x-request-id": f"id-{status}"}
            if given:
                headers["authorization"] = given
            connection = client.connection()
            connection.request("POST", "/v1/completions?prompt=confidential", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
            connection.close()
            assert response.status == status, answer
            assert response.headers["x-request-id"] == f"id-{status}"
            if status == 401:
                assert answer["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        status, _, headers = client.call("GET", "/health")
        assert status == 200 and re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        forged = {"x-request-id": "a POST /v1/completions 200 0.1 s"}
        connection = client.connection()
        connection.request("GET", "/no%0Apath%20200", headers=forged)
        assert re.fullmatch("[0-9a-f]{32}", connection.getresponse().headers["x-request-id"])
        connection.close()
    lines = [r.getMessage() for r in caplog.records if r.name == "tilewise.access"]
    assert any(
        re.fullmatch(
            r"id-200 POST /v1/completions 200 \d+\.\d+ s, 12 prompt tokens, 3 generated",
            x,
        )
        for x in lines
    )
    refused = r"id-401 POST /v1/completions 401 \d+\.\d+ s"
    assert sum(re.fullmatch(refused, x) is not None for x in lines) == 3
    unknown = r"[0-9a-f]{32} GET /no%0Apath%20200 404 \d+\.\d+ s"
    assert sum(re.fullmatch(unknown, x) is not None for x in lines) == 1
    assert not any("confidential" in x or KEY in x or "\n" in x for x in lines)


@pytest.mark.parametrize("key", ["", " ", "two words", "naïve", "line\n"])
def test_keys_that_no_client_can_send(key, monkeypatch):
    monkeypatch.setenv("TILEWISE_API_KEY", key)
    with pytest.raises(ValueError, match=r"TILEWISE_API_KEY .*, but must be one word of printable"):
        serve.api_key(None)
    with pytest.raises(ValueError, match=r"--api-key .*, but must be one word of printable ASCII"):
        serve.api_key(key)


def test_key_of_the_command_line_comes_first(monkeypatch):
    monkeypatch.setenv("TILEWISE_API_KEY", "of-environment")
    assert serve.api_key(None) == "of-environment"
    assert serve.api_key("given") == "given"
    monkeypatch.delenv("TILEWISE_API_KEY")
    assert serve.api_key(None) is None
