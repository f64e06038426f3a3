"""The fields of a request that examples/serve.py reads; all others are refused by name.

Nothing is computed and no model is created; test_serve_http.py repeats some of this over HTTP.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from paths import ROOT

pytest.importorskip("torch")
import hf_models

hf_models.require("transformers>=5.20")

EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))
import models  # noqa: E402
import serve_requests  # noqa: E402
from serve_requests import ParsedRequest, RefusedError  # noqa: E402
from tilewise.serving import SamplingParams  # noqa: E402

pytestmark = pytest.mark.models

USER = dict(role="user", content="hello")
KINDS: dict[str, tuple[Callable[[Any], ParsedRequest], dict[str, Any]]] = {
    "completion": (serve_requests.completion, dict(prompt="hello")),
    "chat": (serve_requests.chat, dict(messages=[USER])),
}


def refusal(read: Callable[[Any], ParsedRequest], body: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        read(body)
    return caught.value


def refused_message(fields: dict[str, Any]) -> RefusedError:
    """The refusal of a conversation whose second message has these fields."""
    return refusal(serve_requests.chat, dict(messages=[USER, fields]))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[Callable[[Any], ParsedRequest], dict[str, Any]]:
    return KINDS[request.param]


# --- fields of both kinds of requests -------------------------------------------------------------

LEFT_OUT = "left out: the supported fields are "
NOTHING_ELSE = ": this server supports nothing else"
WRONG = [
    ("model", 3, "a string"),
    *[("max_tokens", x, "an integer from 1") for x in (0, -1, 1.5, True, "5", [5])],
    *[
        ("temperature", x, "a number from 0 to 2")
        for x in (3, -0.1, float("nan"), float("inf"), "1", True)
    ],
    *[("top_p", x, "a number above 0 and at most 1") for x in (0, 1.5, "1", True)],
    *[
        ("stop", x, "a string or a list of at most 4 strings, of 1 to 256 characters")
        for x in ("", [""], ["a", ""], [1], 5, {"a": 1}, [None])
    ],
    *[("seed", x, "an integer") for x in (1.5, "1", True)],
    *[("stream", x, "true or false") for x in (1, "yes", [])],
    *[("stream_options", x, "an object") for x in ([], True, "a")],
    *[("n", x, "an integer from 1 to 16") for x in (0, 17, True, 1.0)],
    *[("best_of", x, "1" + NOTHING_ELSE) for x in (0, 3)],
    *[("repetition_penalty", x, "a number from 0.01 to 100") for x in (0, 101, "1")],
    *[
        (name, x, "a number from -2 to 2")
        for name in ("presence_penalty", "frequency_penalty") for x in (-2.1, 3, True)
    ],
    *[("min_p", x, "a number from 0 to 1") for x in (-0.1, 1.1, "0")],
    *[("top_k", x, "an integer from -1; -1 and 0 are all tokens") for x in (-2, 1.5, True)],
    *[("ignore_eos", x, "true or false") for x in (1, "yes")],
    *[("tool_choice", x, "'none'" + NOTHING_ELSE) for x in ("auto", {})],
    ("function_call", "auto", "'none'" + NOTHING_ELSE),
    *[
        ("response_format", x, "{'type': 'text'}" + NOTHING_ELSE)
        for x in ({"type": "json_object"}, {})
    ],
    ("modalities", ["text", "audio"], "['text']" + NOTHING_ELSE),
    ("skip_special_tokens", False, "True" + NOTHING_ELSE),
    ("add_generation_prompt", False, "True" + NOTHING_ELSE),
    *[("web_search_options", x, LEFT_OUT) for x in ({}, {"search_context_size": "low"})],
    *[("prompt_logprobs", x, LEFT_OUT) for x in (0, 1)],
    *[
        (name, x, LEFT_OUT)
        for name, x in dict(
            tools=[{"type": "function"}], functions=[{"name": "f"}], logit_bias={"1": 2},
            echo=True, suffix="end", audio={"voice": "a"}, prediction={"type": "content"},
            reasoning_effort="low", nonsense="x",
        ).items()
    ],
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "allowed"), WRONG)
def test_unsupported_field_is_named(kind, name, value, allowed):
    read, body = kind
    read(body)
    error = refusal(read, {**body, name: value})
    assert error.param == name
    assert str(error).startswith(f"{name} is {value!r}, but must be {allowed}")


def test_refusal_lists_the_supported_fields(kind):
    read, body = kind
    message = str(refusal(read, {**body, "nonsense": 1}))
    supported = message.partition(LEFT_OUT)[2].split(", ")
    of_chat = {"max_completion_tokens", "top_logprobs"} if read is serve_requests.chat else set()
    assert set(supported) == of_chat | {*body} | {
        "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "stop", "ignore_eos", "seed", "n", "logprobs",
        "stream", "stream_options",
    }  # fmt: skip
    assert read({**body, **dict.fromkeys(supported[1:])}) == read(body)


@pytest.mark.parametrize("name", sorted({name for name, *_ in WRONG}))
def test_null_means_left_out(kind, name):
    read, body = kind
    assert read({**body, name: None}) == read(body)


NEUTRAL = dict(
    n=1, best_of=1, repetition_penalty=1.0, logprobs=False, tool_choice="none", tools=[],
    function_call="none", functions=[], parallel_tool_calls=False, modalities=["text"],
    response_format={"type": "text"}, skip_special_tokens=True, add_generation_prompt=True,
    logit_bias={}, presence_penalty=0.0, frequency_penalty=0, top_logprobs=0, echo=False,
    suffix="", user="me", metadata={"a": "b"}, store=True, service_tier="auto", model=None,
)  # fmt: skip


def test_neutral_values_are_accepted(kind):
    read, body = kind
    assert read({**body, **NEUTRAL}) == read(body)


def test_stream_options(kind):
    read, body = kind
    assert not read(body).include_usage
    parsed = read({**body, "stream_options": dict(include_usage=True, other=None, more=False)})
    assert parsed.include_usage
    for name, value, allowed in (
        ("include_usage", 2, "true or false"),
        ("continuous_usage_stats", True, LEFT_OUT + "include_usage"),
    ):
        error = refusal(read, {**body, "stream_options": {name: value}})
        assert error.param == f"stream_options.{name}"
        assert str(error) == f"{error.param} is {value!r}, but must be {allowed}"


def test_supported_fields_are_passed_on(kind):
    read, body = kind
    given = dict(max_tokens=3, temperature=0, top_p=0.5, seed=-7, stop="x", stream=True)
    parsed = read({**body, **given, "model": "m"})
    assert parsed.params == SamplingParams(3, 0, 0.5, -7, ("x",))
    assert (parsed.model, parsed.stream, parsed.limit, parsed.n) == ("m", True, "max_tokens", 1)
    more = dict(top_k=5, min_p=0.1, presence_penalty=0.5, frequency_penalty=-1)
    parsed = read({**body, **more, "repetition_penalty": 1.2, "ignore_eos": True, "n": 3})
    assert parsed.params == SamplingParams(
        read(body).params.max_tokens, stop_token_ids=(), repetition_penalty=1.2, **more
    )
    assert parsed.n == 3 and read({**body, "top_k": -1}).params.top_k == 0
    assert read({**body, "stop": ["x", "y"]}).params.stop == ("x", "y")


@pytest.mark.parametrize("body", [[1], "text", None, 3])
def test_body_that_is_not_an_object(kind, body):
    error = refusal(kind[0], body)
    assert error.param is None and str(error) == f"body is {body!r}, but must be an object"


# --- prompts --------------------------------------------------------------------------------------


def test_logprobs():
    completion, chat = serve_requests.completion, serve_requests.chat
    text, messages = dict(prompt="a"), dict(messages=[USER])
    assert completion(text).params.logprobs is None and chat(messages).params.logprobs is None
    assert completion({**text, "logprobs": 0}).params.logprobs == 0
    assert completion({**text, "logprobs": 5}).params.logprobs == 5
    assert chat({**messages, "logprobs": True}).params.logprobs == 0
    assert chat({**messages, "logprobs": True, "top_logprobs": 4}).params.logprobs == 4
    for read, body, name, allowed in (
        (completion, {**text, "logprobs": True}, "logprobs", "false or an integer from 0 to 20"),
        (completion, {**text, "logprobs": 21}, "logprobs", "false or an integer from 0 to 20"),
        (completion, {**text, "top_logprobs": 2}, "top_logprobs", LEFT_OUT),
        (chat, {**messages, "logprobs": 1}, "logprobs", "true or false"),
        (chat, {**messages, "top_logprobs": 2}, "top_logprobs", "0 without logprobs"),
    ):
        error = refusal(read, body)
        assert error.param == name
        assert str(error).startswith(f"{name} is {body[name]!r}, but must be {allowed}")


@pytest.mark.parametrize(
    "prompt", [["a", 1], ["a", [1]], [[1, "a"]], [1, True], [1.0], [1, None], {"a": 1}, 5, True]
)
def test_prompt_of_the_wrong_kind(prompt):
    error = refusal(serve_requests.completion, dict(prompt=prompt))
    assert error.param == "prompt"
    assert str(error) == (
        f"prompt is {prompt!r}, but must be a string, a list of tokens (integers), or a list of "
        "such prompts"
    )


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["a", "bc"], [[1], [2, 3]]])
def test_prompts(prompt):
    parsed = serve_requests.completion(dict(prompt=prompt))
    expected = {str: [[*b"text"]], int: [[1, 2, 3]], "a": [[*b"a"], [*b"bc"]]}
    key = str if isinstance(prompt, str) else "a" if prompt[0] == "a" else type(prompt[0])
    assert parsed.tokens(models.Characters()) == expected.get(key, prompt)
    assert parsed.params == SamplingParams(16) and parsed.limit is None


def test_choices_have_their_own_seeds():
    body = dict(prompt=["a", "b"], n=2, seed=5)
    choices = serve_requests.completion(body).choices([[1], [2]])
    assert [(prompt, p.seed) for prompt, p in choices] == [([1], 5), ([1], 6), ([2], 5), ([2], 6)]


@pytest.mark.parametrize(("read", "name"), [(r, *body) for r, body in KINDS.values()])
@pytest.mark.parametrize("given", [{}, None])
def test_missing_prompt(read, name, given):
    error = refusal(read, {} if given == {} else {name: None})
    assert error.param == name and str(error).startswith(f"{name} is missing, but must be a ")


def test_prompt_that_is_not_unicode_is_refused():
    parsed = serve_requests.completion(dict(prompt="half a character: \ud800"))
    with pytest.raises(RefusedError, match="prompt must fit the model's tokenizer, which") as e:
        parsed.tokens(models.Characters())
    assert e.value.param == "prompt"


def test_max_tokens_has_two_names_in_a_chat():
    body = dict(messages=[USER])
    for name in ("max_tokens", "max_completion_tokens"):
        parsed = serve_requests.chat({**body, name: 5})
        assert parsed.params.max_tokens == 5 and parsed.limit == name
    assert serve_requests.chat(body).params.max_tokens is None
    equal = serve_requests.chat({**body, "max_tokens": 5, "max_completion_tokens": 5})
    assert equal.params.max_tokens == 5
    error = refusal(serve_requests.chat, {**body, "max_tokens": 9, "max_completion_tokens": 5})
    assert error.param == "max_tokens"
    assert re.search("is 9, but must be left out beside max_completion_tokens, or", str(error))
    error = refusal(serve_requests.completion, dict(prompt="a", max_completion_tokens=5))
    assert error.param == "max_completion_tokens"


# --- messages -------------------------------------------------------------------------------------

UNSUPPORTED = dict(
    tool_calls=[dict(function=dict(name="f"))], tool_call_id="call_1", name="Bob",
    function_call=dict(name="f"), audio=dict(id="a"), refusal="no", annotations=[dict(type="url")],
    prefix=True, n=1, user="me",
)  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("content", ["hello", None])
def test_unsupported_field_of_a_message(name, content):
    value = UNSUPPORTED[name]
    error = refused_message(dict(role="assistant", content=content) | {name: value})
    assert error.param == f"messages[1].{name}"
    assert str(error) == f"{error.param} is {value!r}, but must be {LEFT_OUT}role, content"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_null_and_empty_fields_of_a_message_are_accepted(name):
    expected = serve_requests.chat(dict(messages=[USER]))
    for nothing in (None, type(UNSUPPORTED[name])()):
        assert serve_requests.chat(dict(messages=[{**USER, name: nothing}])) == expected


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ("hello", "", "is 'hello', but must be an object"),
        (dict(content="a"), ".role", "is missing, but must be a string"),
        (dict(role=None, content="a"), ".role", "is missing, but must be a string"),
        (dict(role=3, content="a"), ".role", "is 3, but must be a string"),
        (dict(role="user"), ".content", "is missing, but must be a string or a list of text parts"),
        (dict(role="user", content=None), ".content", "is missing, but must be a string or a list"),
        (dict(role="user", content=3), ".content", "is 3, but must be a string or a list of text"),
        (dict(role="user", content=dict(type="text", text="a")), ".content", "is {'text': 'a', "),
    ],
)
def test_invalid_messages(fields, param, sentence):
    error = refused_message(fields)
    assert error.param == "messages[1]" + param
    assert str(error).startswith(f"{error.param} {sentence}")


@pytest.mark.parametrize("messages", [[], "hello", USER, 3])
def test_messages_that_are_not_a_list(messages):
    error = refusal(serve_requests.chat, dict(messages=messages))
    assert error.param == "messages"
    assert str(error).endswith(", but must be a list of at least one message")


TEXT = dict(type="text", text="one, ")


@pytest.mark.parametrize(
    ("part", "param", "sentence"),
    [
        *[
            (dict(type=kind, **rest), ".type", f"is {kind!r}, but must be 'text'")
            for kind, rest in (
                ("image_url", dict(image_url=dict(url="data:image/png;base64," + "A" * 10**6))),
                ("input_audio", dict(input_audio=dict(data="A", format="wav"))),
                ("file", dict(file=dict(file_id="a"))),
                ("refusal", dict(refusal="no")),
                ("input_text", dict(text="a")),
                ("", dict(text="a")),
            )
        ],
        (dict(type=["text"], text="a"), ".type", "is ['text'], but must be 'text'"),
        (dict(text="a"), ".type", "is missing, but must be 'text'"),
        (dict(type="text"), ".text", "is missing, but must be a string"),
        (dict(type="text", text=5), ".text", "is 5, but must be a string"),
        ("hello", "", "is 'hello', but must be an object"),
        (None, "", "is None, but must be an object"),
        (
            dict(type="text", text="a", cache_control=dict(type="ephemeral")),
            ".cache_control",
            "is {'type': 'ephemeral'}, but must be left out: the supported fields are type, text",
        ),
    ],
)  # fmt: skip
def test_content_parts_that_are_not_text(part, param, sentence):
    error = refused_message(dict(role="user", content=[TEXT, part]))
    assert error.param == "messages[1].content[1]" + param
    assert str(error) == f"{error.param} {sentence}"


def test_text_parts_are_joined():
    parts = [TEXT, dict(type="text", text="two", cache_control=None)]
    parsed = serve_requests.chat(dict(messages=[USER, dict(role="user", content=parts)]))
    assert parsed.prompts[0] == [USER, dict(role="user", content="one, two")]
    assert serve_requests.message(dict(role="user", content=[]), "m")["content"] == ""


def test_given_value_is_abbreviated():
    image = dict(type="image_url", image_url=dict(url="A" * 10**6))
    for error in (
        refused_message(dict(role="user", content="a", picture=image)),
        refusal(serve_requests.completion, dict(prompt="a", tools=[image] * 1000)),
        refusal(serve_requests.completion, dict(prompt=["A" * 10**6, 1] * 500)),
    ):
        assert len(str(error)) < 800


# --- dependencies --------------------------------------------------------------------------------


def test_named_extra_has_what_the_server_imports():
    extra = re.fullmatch(r"pip install 'tilewise\[(\w+)\]'", models._INSTALL_OTHERS)[1]
    metadata = importlib.metadata.metadata("tilewise")
    assert extra in metadata.get_all("Provides-Extra")
    required = [r for r in metadata.get_all("Requires-Dist") if f'extra == "{extra}"' in r]
    names = {re.match(r"\w+(\[\w+\])?", r)[0] for r in required}
    assert names >= {"tilewise[transformers]", "fastapi", "uvicorn", "jinja2"}
    for page in (EXAMPLES / "README.md", EXAMPLES.parent / "docs" / "serving.md"):
        assert set(re.findall(r"pip install '(?:tilewise|\.)\[(\w+)\]'", page.read_text())) == {
            extra
        }
