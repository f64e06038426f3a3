"""The serving engine on a tiny random model: a request gets the answer it would get by itself."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paths import ROOT

torch = pytest.importorskip("torch")

import hf_models  # noqa: E402

hf_models.require("transformers>=5.20")
import tiny_llama  # noqa: E402
from serving_engine import (  # noqa: E402
    COUNT,
    GREEDY,
    PROMPTS,
    Answer,
    Letters,
    all_free,
    engine,
)
from tilewise.serving import (  # noqa: E402
    Engine,
    Output,
    OverloadedError,
    PagePool,
    SamplingParams,
    Service,
    ServiceClosedError,
)
from tilewise.serving.sampling import sample  # noqa: E402
from tilewise.serving.text import TextStream  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors, pytest.mark.usefixtures("one_thread")]

# Other processes may use the machine, so the duration of an example means nothing.
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    model = tiny_llama.make()
    found = [tiny_llama.greedy(model, p, COUNT) for p in PROMPTS]
    assert len({tuple(a) for a in found}) == len(found), "equal answers prove nothing"
    return found


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "heads_kv"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("page_size", [1, 3, 16, 160])
def test_answers_for_any_page_size_and_grouping(page_size: int, heads: int, heads_kv: int):
    sizes = dict(num_attention_heads=heads, num_key_value_heads=heads_kv)
    model = tiny_llama.make(**sizes)
    expected = [tiny_llama.greedy(model, p, COUNT) for p in PROMPTS]
    e = engine(model, page_size=page_size)
    got = e.generate(PROMPTS, GREEDY)
    assert [c.tokens for c in got] == expected
    assert {c.finish for c in got} == {"length"} and all_free(e)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mistral", dict(sliding_window=8)),
        ("Gemma2", dict(sliding_window=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=16)),
        ("Qwen3", {}),
        ("GptOss", dict(sliding_window=8, num_local_experts=4)),  # sinks
    ],
)
def test_answers_of_other_model_families(kind: str, options: dict[str, Any]):
    model = tiny_llama.make(kind, **options)
    expected = [tiny_llama.greedy(model, p, COUNT) for p in PROMPTS]
    assert [c.tokens for c in engine(model).generate(PROMPTS, GREEDY)] == expected


def test_long_prompts_in_several_steps(answers):
    e = engine(step_tokens=7)
    assert [c.tokens for c in e.generate(PROMPTS, GREEDY)] == answers
    assert e.stats()["steps"] > 156 / 7


def test_only_own_pages_are_read(answers):
    e = engine()
    with torch.inference_mode():
        for k, v in e.cache.layers.values():
            k.fill_(float("nan"))
            v.fill_(float("nan"))
    assert [c.tokens for c in e.generate(PROMPTS, GREEDY)] == answers


def test_preempted_requests_give_the_same_answers(answers):
    e = engine(cache_tokens=108)  # room for the longest prompt, its answer, and two tokens
    assert [c.tokens for c in e.generate(PROMPTS, GREEDY)] == answers
    few = engine(cache_tokens=40)  # three requests fit at first and then grow
    short = tiny_llama.prompts(9, 9, 9)
    expected = [c.tokens for c in engine().generate(short, GREEDY)]
    assert [c.tokens for c in few.generate(short, GREEDY)] == expected
    assert few.stats()["preemptions"] > 0 and all_free(e) and all_free(few)


def test_generate_answers_all_prompts_or_none():
    e = engine()
    for wrong in ([], [10**9], [1.5]):
        with pytest.raises((TypeError, ValueError), match="prompt"):
            e.generate([*PROMPTS, wrong], GREEDY)
        e.step()
        assert not e.busy and all_free(e)
    many = [PROMPTS[0]] * (e.places + 3)
    assert len(e.generate(many, GREEDY)) == len(many)
    assert e.stats()["refused"] == 0, "waiting for a slot is not a refusal"


def test_seeded_draws_do_not_depend_on_the_batch():
    params = [SamplingParams(COUNT, temperature=0.9, top_p=0.95, seed=i) for i in range(6)]
    alone = [engine().generate([p], s)[0].tokens for p, s in zip(PROMPTS, params, strict=True)]
    e = engine(cache_tokens=120)  # with preemption: each token is drawn only once
    got: dict[int, list[int]] = {}
    for p, s in zip(PROMPTS, params, strict=True):
        e.add(p, s, lambda o: got.setdefault(o.id, []).append(o.token))
    while e.busy:
        e.step()
    assert list(dict(sorted(got.items())).values()) == alone
    again = engine().generate([PROMPTS[2]], SamplingParams(COUNT, temperature=0.9, seed=77))
    assert again[0].tokens != alone[2]


def test_stop_tokens_and_stop_strings(answers):
    text = Letters().decode(answers[3])
    e = engine(tokenizer=Letters())
    (whole,) = e.generate([PROMPTS[3]], GREEDY)
    assert whole.text == text
    (cut,) = e.generate([PROMPTS[3]], SamplingParams(COUNT, 0.0, stop=("no", text[4:6])))
    at = text.index(text[4:6])
    assert cut.text == text[:at] and cut.finish == "stop" and len(cut.tokens) == at + 2
    ended = SamplingParams(COUNT, 0.0, stop_token_ids=(answers[3][5],))
    (cut,) = e.generate([PROMPTS[3]], ended)
    assert cut.finish == "stop" and cut.tokens[-1] == answers[3][5] and all_free(e)


def test_stop_tokens_of_the_model_are_used(answers):
    model = tiny_llama.make()
    model.generation_config.eos_token_id = [answers[3][4], 255]
    (cut,) = engine(model).generate([PROMPTS[3]], GREEDY)
    assert cut.finish == "stop" and len(cut.tokens) <= 5


def test_without_max_tokens_the_context_is_filled():
    e = engine(cache_tokens=40)
    (answer,) = e.generate([PROMPTS[1]], SamplingParams(None, 0.0))
    assert len(answer.tokens) == 40 - 5 and answer.finish == "length"


# --- slots and pages -----------------------------------------------------------------------------


def test_cancelled_requests_free_their_pages(answers):
    e = engine(max_running=2)
    outputs: list[Output] = []
    ids = [e.add(p, GREEDY, outputs.append) for p in PROMPTS[2:5]]  # two running, one waiting
    e.step()
    used = e.stats()["pages"] - e.stats()["pages_free"]
    assert used > 0 and e.cancel(ids[0]) and e.cancel(ids[2]) and not e.cancel(99)
    e.step()
    stats = e.stats()
    assert stats["pages"] - stats["pages_free"] == e.pool.pages_of(40 + 2)
    assert stats["running"] == 1 and stats["waiting"] == 0 and stats["cancelled"] == 2
    while e.busy:
        e.step()
    assert [o.token for o in outputs if o.id == ids[1]] == answers[3] and all_free(e)
    assert [o.finish for o in outputs if o.id == ids[0]][-1] == "cancelled"


def test_long_prompt_can_be_cancelled_half_way():
    e = engine(step_tokens=8)
    request = e.add(PROMPTS[4], GREEDY)
    e.step()
    assert e.cancel(request)
    (output,) = e.step()
    assert output == Output(request, None, "", "cancelled") and all_free(e)


def test_overload_is_refused_and_loses_no_request(answers):
    e = engine(max_running=2, max_waiting=1)
    outputs: list[Output] = []
    for p in PROMPTS[:3]:
        e.add(p, GREEDY, outputs.append)
    with pytest.raises(OverloadedError, match="3 requests are in flight") as caught:
        e.add(PROMPTS[3], GREEDY)
    assert 1 <= caught.value.retry_after <= 60
    while e.busy:
        e.step()
    got = [[o.token for o in outputs if o.id == i] for i in (1, 2, 3)]
    assert got == answers[:3] and e.stats()["refused"] == 1
    assert e.generate([PROMPTS[3]], GREEDY)[0].tokens == answers[3]


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ([], {}, "prompt has 0 tokens and 12 would follow"),
        ([1] * 470, {}, "both together at most 480"),
        ([1], dict(max_tokens=480), "1 tokens and 480 would follow"),
        ([1], dict(stop=("x",)), "no tokenizer"),
        ([1, 256, 3], {}, "prompt has token 256, but tokens must be from 0 to 255"),
        ([-1], {}, "prompt has token -1"),
    ],
)
def test_requests_that_do_not_fit(prompt, params, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine().add(prompt, SamplingParams(**{"max_tokens": COUNT, **params}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (dict(page_size=0), "page_size is 0"),
        (dict(cache_tokens=3), "cache_tokens is 3, but must be at least page_size, "),
        (dict(max_running=0), "max_running is 0"),
        (dict(max_waiting=-1), "max_waiting is -1"),
        (dict(step_tokens=3), "step_tokens is 3, but must be at least max_running, 4"),
    ],
)
def test_engine_refuses(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine(**options)


@pytest.mark.parametrize("name", ["page_size", "cache_tokens", "max_running", "step_tokens"])
@pytest.mark.parametrize("value", [2.5, "64", True, None])
def test_engine_sizes_must_be_integers(name, value):
    with pytest.raises(TypeError, match=re.escape(f"{name} is {value!r}, but must be an integer")):
        engine(**{name: value})


def test_non_models_are_refused():
    with pytest.raises(
        TypeError, match=r"^model is 'gpt2', but must be .*from_pretrained\('gpt2'\)"
    ):
        Engine("gpt2")
    with pytest.raises(TypeError, match=r"^model is a Linear, but must be a causal language"):
        Engine(torch.nn.Linear(2, 2))


def test_models_with_unsupported_attention_are_refused():
    model = tiny_llama.make()
    model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="layers of type chunked_attention"):
        engine(model)


def test_model_reports_that_it_belongs_to_an_engine():
    model = tiny_llama.make()
    engine(model)
    with pytest.raises(RuntimeError, match=r"belongs to a tilewise\.serving\.Engine"):
        model(torch.tensor([[1, 2]]))


@UNTIMED
@given(st.data())
def test_pages_are_handed_out_once(data):
    size = data.draw(st.integers(1, 5))
    pool = PagePool(12, size, 3)
    lengths: dict[int, int] = {}
    for _ in range(30):
        if lengths and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(sorted(lengths)))
            if data.draw(st.booleans()):
                pool.release(row)
                del lengths[row]
            else:
                free, wanted = pool.free_pages, lengths[row] + data.draw(st.integers(0, 9))
                if pool.grow(row, wanted):
                    lengths[row] = wanted
                else:
                    assert pool.free_pages == free
        elif pool.free_rows:
            lengths[pool.take_row()] = 0
        held = [
            page
            for row, length in lengths.items()
            for page in pool.block_table([row], length)[0].tolist()
        ]
        assert len(set(held)) == len(held) == 12 - pool.free_pages


# --- sampling and text ----------------------------------------------------------------------------


def test_draws_follow_the_probabilities():
    p = torch.tensor([0.5, 0.125, 0.25, 0.125])
    params = [SamplingParams(temperature=1.0)] * 800
    uniform = [(i + 0.5) / 800 for i in range(800)]
    drawn = sample(p.log().expand(800, 4), params, uniform)
    assert torch.tensor(drawn).bincount(minlength=4).tolist() == [400, 100, 200, 100]
    drawn = sample(p.log().expand(800, 4), [SamplingParams(top_p=0.7)] * 800, uniform)
    assert set(drawn) == {0, 2} and abs(drawn.count(0) - 533) <= 1
    hot = sample(p.log().expand(800, 4), [SamplingParams(temperature=50.0)] * 800, uniform)
    assert min(torch.tensor(hot).bincount(minlength=4).tolist()) > 180


def test_rows_are_drawn_independently():
    logits = torch.randn(5, 50)
    params = [SamplingParams(temperature=t, top_p=q) for t, q in
              ((0.0, 1.0), (1.0, 1.0), (0.0, 0.5), (2.0, 0.9), (0.5, 1e-6))]  # fmt: skip
    uniform = [0.999999, 0.2, 0.7, 0.9999999, 0.5]
    together = sample(logits, params, uniform)
    rows = zip(logits.split(1), params, uniform, strict=True)
    assert together == [sample(x, [p], [u])[0] for x, p, u in rows]
    best = logits.argmax(-1).tolist()
    assert [together[i] for i in (0, 2, 4)] == [best[i] for i in (0, 2, 4)]


def test_prompts_as_tensors_and_invalid_prompts(answers):
    prompts = [torch.tensor(PROMPTS[1]), np.array(PROMPTS[1])]
    assert [a.tokens for a in engine().generate(prompts, GREEDY)] == [answers[1]] * 2
    for prompt, kind in (("abc", "str"), ([1.5, 2], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=f"prompt is a {kind}, but must be tokens"):
            engine().add(prompt, GREEDY)
    with pytest.raises(TypeError, match=r"max_tokens is 2\.5"):
        SamplingParams(2.5)


@pytest.mark.parametrize(
    ("wrong", "allowed"),
    [
        (dict(temperature="0.5"), "a number from 0 to 100"),
        (dict(temperature=None), "a number from 0 to 100"),
        (dict(top_p="1"), "a number above 0 and at most 1"),
        (dict(seed=1.5), "an integer or None"),
        (dict(stop=5), "a sequence of non-empty strings"),
        (dict(stop=["x", 5]), "a sequence of non-empty strings"),
        (dict(stop_token_ids=("a",)), "a tuple of integers or None"),
        (dict(stop_token_ids=5), "a tuple of integers or None"),
    ],
)
def test_parameters_of_the_wrong_type(wrong, allowed):
    ((name, value),) = wrong.items()
    said = value[0] if isinstance(value, tuple) else value
    with pytest.raises(TypeError, match=re.escape(f"{name} is {said!r}, but must be {allowed}")):
        SamplingParams(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [dict(max_tokens=0), dict(temperature=-1.0), dict(top_p=0.0), dict(stop="x"), dict(stop=("",))],
)
def test_parameters_out_of_range(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)


def bytes_to_text(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@UNTIMED
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=4), max_size=2))
def test_text_ends_before_the_first_stop(text, stop):
    stream = TextStream(bytes_to_text, stop)
    pieces = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.finish())
    # The first stop string that is complete ends the text; of several at once, the longest does.
    ends = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    assert "".join(pieces) == (text[: min(ends)[1]] if ends else text)


def test_half_a_character_is_held_back():
    stream = TextStream(bytes_to_text)
    assert [stream.push(b) for b in "aé€".encode()] == ["a", "", "é", "", "", "€"]
    broken = TextStream(bytes_to_text)
    assert "".join(broken.push(0xFF) for _ in range(20)) + broken.finish() == "\ufffd" * 20


# --- the service ----------------------------------------------------------------------------------


def test_service_answers_and_closes(answers):
    service = Service(engine())
    got = [Answer() for _ in PROMPTS]
    for prompt, answer in zip(PROMPTS, got, strict=True):
        service.submit(prompt, GREEDY, answer)
    service.close()  # close() lets requests finish
    assert [a.tokens for a in got] == answers and all_free(service.engine)
    with pytest.raises(ServiceClosedError):
        service.submit([1], GREEDY, got[0])


def test_failing_listener_does_not_end_other_requests(answers, caplog):
    service, outputs = Service(engine()), []

    def failing_listener(output: Output) -> None:
        outputs.append(output)
        raise RuntimeError("nobody listens")

    service.submit(PROMPTS[0], GREEDY, failing_listener)
    answer = Answer()
    service.submit(PROMPTS[1], GREEDY, answer)
    service.close()
    assert answer.tokens == answers[1] and answer.finish == "length"
    assert [o.finish for o in outputs] == [None, "cancelled"] and all_free(service.engine)
    assert "nobody listens" in caplog.text


def test_closing_cancels_requests_that_take_too_long():
    service = Service(engine())
    answer = Answer()
    service.submit([1], SamplingParams(470, 0.0), answer)
    service.close(seconds=0.01)
    assert answer.finish == "cancelled" and all_free(service.engine)


def test_failing_step_ends_requests_but_not_the_service(answers, monkeypatch, caplog):
    service = Service(engine())
    forward = service.engine._forward

    def fails(work: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(service.engine, "_forward", fails)
    answer = Answer()
    service.submit(PROMPTS[0], GREEDY, answer)
    assert answer.done.wait(30) and answer.finish == "error"
    assert isinstance(service.error, MemoryError) and all_free(service.engine)
    monkeypatch.setattr(service.engine, "_forward", forward)
    answer = Answer()
    service.submit(PROMPTS[0], GREEDY, answer)
    assert answer.done.wait(30) and answer.tokens == answers[0] and service.error is None
    service.close()


# --- the documentation page ----------------------------------------------------------------------


def test_code_of_the_page_runs(capsys):
    page = ROOT / "docs" / "serving.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    exec("\n".join(blocks), {})
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 5 and all(line.endswith("length") for line in (*lines[:2], lines[-1]))
    assert [len(json.loads(line.rsplit(" ", 1)[0])) for line in lines[:2]] == [8, 8]
