"""A fault in one request ends only that request; after a fault in a step no request keeps
waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import hf_models  # noqa: E402

hf_models.require("transformers>=5.20")
import tiny_llama  # noqa: E402
from serving_engine import COUNT, GREEDY, PROMPTS, Answer, Letters, all_free, engine  # noqa: E402
from tilewise.serving import (  # noqa: E402
    Engine,
    Output,
    SamplingParams,
    Service,
    ServiceClosedError,
)
from tilewise.serving.sampling import sample  # noqa: E402
from tilewise.serving.schedule import split_budget  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors, pytest.mark.usefixtures("one_thread")]

PATIENCE = 30.0  # seconds
DRAWN = SamplingParams(COUNT, temperature=0.9, top_p=0.95, seed=3)


@pytest.fixture
def service_of() -> Iterator[Callable[..., Service]]:
    """A factory of services, which are closed at the end."""
    services = []

    def make(**options: Any) -> Service:
        services.append(Service(engine(**options)))
        return services[-1]

    yield make
    for service in services:
        service.close(1.0)


def failing(
    monkeypatch: pytest.MonkeyPatch, e: Engine, fault: BaseException
) -> list[BaseException]:
    """Makes forward passes raise the fault while it is in the returned list."""
    faults, forward = [fault], e._forward

    def fails(work: Any) -> Any:
        if faults:
            raise faults[0]
        return forward(work)

    monkeypatch.setattr(e, "_forward", fails)
    return faults


def collect(e: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[list[Output]]:
    got: dict[int, list[Output]] = {}
    for prompt, params in requests:
        got[e.add(prompt, params, lambda o: got[o.id].append(o))] = []
    while e.busy:
        e.step()
    assert all_free(e)
    return [*got.values()]


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- sampling -------------------------------------------------------------------------------------

EXTREMES = [
    dict(temperature=t, top_p=p)
    for t in (1e-40, 1e-45, 5e-324, 1e-30, 1e-6, 100.0)
    for p in (5e-324, 1e-45, 1e-30, 0.5, 1.0 - 2**-53, 1.0)
]


@pytest.mark.parametrize("params", EXTREMES)
def test_parameters_at_their_limits_are_sampled(params):
    logits = torch.randn(3, 50) * 5
    logits[1, 7:] = -torch.inf  # a masked vocabulary
    tokens = sample(logits, [SamplingParams(**params)] * 3, [0.0, 0.5, 1 - 2**-53])
    assert all(0 <= t < 50 for t in tokens) and tokens[1] < 7
    if params["temperature"] < 1e-5 or params["top_p"] < 1e-5:
        assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-40, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_that_cannot_be_sampled_is_reported_and_affects_no_other(dtype, temperature):
    logits = torch.randn(6, 300).to(dtype)
    logits[1, 5] = torch.nan
    logits[2] = torch.nan
    logits[3, 9] = torch.inf
    logits[4] = -torch.inf
    params = [SamplingParams(temperature=temperature, top_p=0.9)] * 6
    tokens = sample(logits, params, [0.9] * 6)
    assert tokens[1:5] == [None] * 4
    assert [tokens[0], tokens[5]] == sample(logits[::5], params[:2], [0.9] * 2)


def test_greedy_row_is_the_same_beside_a_drawn_one():
    """Greedy rows use their logits: probabilities may be equal where logits are not."""
    logits = torch.tensor([[-5.0, 0.0, 1e-9, -1.0]])
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    assert sample(logits, [greedy], [0.5]) == [2]
    assert sample(logits.expand(2, 4), [greedy, drawn], [0.5, 0.5])[0] == 2


@settings(deadline=None)
@given(st.data())
def test_any_float_is_sampled_or_reported(data):
    row = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=4, max_size=4)
    logits = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=4)))
    temperature = st.floats(0.0, 100.0)
    params = [
        SamplingParams(temperature=data.draw(temperature), top_p=data.draw(st.floats(5e-324, 1.0)))
        for _ in logits
    ]
    uniform = [data.draw(st.floats(0.0, 1.0, exclude_max=True)) for _ in logits]
    for token, x in zip(sample(logits, params, uniform), logits, strict=True):
        if bool(x.isnan().any()) or not bool(x.max().isfinite()):
            assert token is None
        else:
            assert x[token].isfinite()


def test_failed_sampling_ends_only_its_request(monkeypatch):
    """The third token of the longest request has NaN logits; other requests are not affected."""
    requests = [(p, DRAWN if i % 2 else GREEDY) for i, p in enumerate(PROMPTS[:4])]
    expected = collect(engine(), requests)
    e = engine()
    forward, victim = e.model.forward, len(PROMPTS[3]) + 1

    def poisoned(position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **more: Any) -> Any:
        result = forward(position_ids=position_ids, logits_to_keep=logits_to_keep, **more)
        row = position_ids[0, logits_to_keep] == victim
        result.logits[0, row] = torch.nan
        return result

    monkeypatch.setattr(e.model, "forward", poisoned)
    got = collect(e, requests)
    assert got[:3] == expected[:3]
    *tokens, last = got[3]
    assert tokens == expected[3][:2]
    assert last.finish == "error" and last.token is None and "logits are not finite" in last.error
    assert e.stats()["error"] == 1


def test_extreme_parameters_do_not_affect_other_requests():
    requests = [(PROMPTS[0], DRAWN), (PROMPTS[1], GREEDY)]
    expected = [collect(engine(), [r])[0] for r in requests]
    cold = [(PROMPTS[2], SamplingParams(COUNT, **extreme)) for extreme in EXTREMES[:2]]
    got = collect(engine(), [*requests, *cold])
    assert [[o.token for o in g] for g in got[:2]] == [[o.token for o in g] for g in expected]
    greedy = [o.token for o in collect(engine(), [(PROMPTS[2], GREEDY)])[0]]
    assert [[o.token for o in g] for g in got[2:]] == [greedy] * 2


# --- what the tokenizer and the listeners raise ---------------------------------------------------


class Fragile(Letters):
    """A tokenizer that raises for a text that contains one particular token."""

    def __init__(self, poison: int) -> None:
        self.poison = poison

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        if self.poison in tokens:
            raise KeyError(f"no token {self.poison}")
        return super().decode(tokens)


def test_raising_tokenizer_ends_one_request(service_of):
    params = SamplingParams(COUNT, 0.0)
    expected = [c.tokens for c in engine().generate(PROMPTS, params)]
    only = {t for t in expected[2] if not any(t in e for e in expected[:2] + expected[3:])}
    service = service_of(tokenizer=Fragile(min(only)))
    got = [Answer() for _ in PROMPTS]
    for prompt, answer in zip(PROMPTS, got, strict=True):
        service.submit(prompt, params, answer)
    assert all(a.done.wait(PATIENCE) for a in got)
    assert [a.finish for a in got] == ["length", "length", "error", *["length"] * 3]
    assert [a.tokens for a in got[3:]] == expected[3:]
    assert "cannot be decoded: KeyError" in got[2].error
    assert service.alive and service.ready
    eventually(lambda: all_free(service.engine))


def test_request_with_undecodable_text_can_be_cancelled():
    e = engine(tokenizer=Fragile(-1))
    outputs: list[Output] = []
    request = e.add(PROMPTS[0], GREEDY, outputs.append)
    e.step()
    e.tokenizer.poison = outputs[0].token
    assert e.cancel(request)
    (last,) = e.step()
    assert last == Output(request, None, "", "cancelled") and all_free(e)


@pytest.mark.parametrize("fault", [SystemExit(3), RuntimeError("nobody listens")])
def test_failing_listener_cancels_only_its_request(service_of, fault, caplog):
    expected = engine().generate([PROMPTS[1]], GREEDY)[0].tokens
    service, finishes = service_of(), []

    def failing_listener(output: Output) -> None:
        finishes.append(output.finish)
        raise fault

    answer = Answer()
    service.submit(PROMPTS[0], GREEDY, failing_listener)
    service.submit(PROMPTS[1], GREEDY, answer)
    assert answer.done.wait(PATIENCE) and answer.tokens == expected
    eventually(lambda: finishes == [None, "cancelled"])
    assert service.ready and "cannot be delivered" in caplog.text


@pytest.mark.parametrize("fault", [SystemExit(1), KeyboardInterrupt()])
def test_interrupt_in_a_listener_loses_no_output_of_others(fault):
    e, outputs = engine(), []

    def interrupts(_: Output) -> None:
        raise fault

    e.add(PROMPTS[0], GREEDY, interrupts)
    e.add(PROMPTS[1], GREEDY, outputs.append)
    with pytest.raises(type(fault)):
        e.step()
    assert len(outputs) == 1
    with pytest.raises(type(fault)):  # the listener is told that its request is cancelled
        e.step()
    while e.busy:
        e.step()
    assert len(outputs) == COUNT and all_free(e)


# --- steps and threads that fail ------------------------------------------------------------------


def test_cancelled_request_is_notified_even_if_the_step_fails(monkeypatch):
    e, outputs = engine(), []
    first, second = (e.add(p, GREEDY, outputs.append) for p in PROMPTS[:2])
    e.cancel(first)
    failing(monkeypatch, e, MemoryError("no memory"))
    with pytest.raises(MemoryError):
        e.step()
    assert outputs == [Output(first, None, "", "cancelled")]
    assert e.fail("gone") == [Output(second, None, "", "error", "gone")] and all_free(e)


def test_service_recovers_from_a_failed_step_without_traffic(service_of, monkeypatch, caplog):
    service = service_of()
    faults = failing(monkeypatch, service.engine, MemoryError("no memory"))
    got = [Answer() for _ in PROMPTS[:3]]
    for prompt, answer in zip(PROMPTS, got, strict=False):
        service.submit(prompt, GREEDY, answer)
    assert all(a.done.wait(PATIENCE) for a in got)
    assert {a.finish for a in got} == {"error"} and "MemoryError" in got[0].error
    assert service.alive and not service.ready and isinstance(service.error, MemoryError)
    assert all_free(service.engine)
    faults.clear()
    eventually(lambda: service.ready)  # without any further request
    answer = Answer()
    service.submit(PROMPTS[0], GREEDY, answer)
    assert answer.done.wait(PATIENCE) and answer.finish == "length"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("fault", [SystemExit(2), KeyboardInterrupt(), GeneratorExit()])
def test_ended_thread_leaves_no_request_waiting(service_of, monkeypatch, fault, caplog):
    service = service_of(max_running=1)
    entered, go_on = threading.Event(), threading.Event()

    def ends(work: Any) -> Any:
        entered.set()
        go_on.wait(PATIENCE)
        raise fault

    monkeypatch.setattr(service.engine, "_forward", ends)
    got = [Answer() for _ in range(3)]
    for answer in got:  # one runs, two wait
        service.submit(PROMPTS[0], GREEDY, answer)
    assert entered.wait(PATIENCE)
    go_on.set()
    assert all(a.done.wait(PATIENCE) for a in got)
    sentence = f"the engine's thread has ended: {fault!r}"
    assert [(a.finish, a.error) for a in got] == [("error", sentence)] * 3
    eventually(lambda: not service.alive)
    assert not service.ready and service.error is fault
    with pytest.raises(ServiceClosedError, match="thread has ended"):
        service.submit(PROMPTS[0], GREEDY, Answer())


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_stuck_service_is_not_alive(monkeypatch, how, caplog):
    service = Service(engine(), stall_seconds=0.3)
    time.sleep(0.5)
    assert service.alive, "an idle service is alive"
    hung = threading.Event()
    forward = service.engine._forward

    def stuck(work: Any) -> Any:
        if how == "fails":
            raise RuntimeError("no device")
        hung.wait(PATIENCE)
        return forward(work)

    monkeypatch.setattr(service.engine, "_forward", stuck)
    answer = Answer()
    service.submit(PROMPTS[0], GREEDY, answer)
    eventually(lambda: not service.alive)
    assert not service.ready
    monkeypatch.setattr(service.engine, "_forward", forward)
    hung.set()
    eventually(lambda: service.alive and service.ready)
    service.close()
    assert answer.finish == ("error" if how == "fails" else "length")


# --- deadlines ------------------------------------------------------------------------------------


def test_deadline_ends_requests_in_any_state(service_of):
    """One request decodes, one is in the middle of its prompt, and one waits."""
    e = engine(max_running=2, step_tokens=8)
    free, outputs = e.stats()["pages_free"], {}
    long = SamplingParams(200, 0.0)
    ids = [e.add(p, long, timeout=t, deliver=lambda o: outputs.setdefault(o.id, []).append(o))
           for p, t in ((PROMPTS[0], 0.2), (PROMPTS[4], 0.2), (PROMPTS[1], 0.2))]  # fmt: skip
    e.step()
    assert e.stats()["pages_free"] < free and e.stats()["waiting"] == 1
    time.sleep(0.25)
    e.step()
    sentence = "the request was not done by its deadline"
    assert [outputs[i][-1] for i in ids] == [Output(i, None, "", "timeout", sentence) for i in ids]
    assert all_free(e) and e.stats()["timeout"] == 3
    assert outputs[ids[0]][0].token is not None


def test_deadline_must_be_positive():
    for wrong, kind in ((0, ValueError), (-1, ValueError), (float("nan"), ValueError),
                        ("5", TypeError), (True, TypeError)):  # fmt: skip
        with pytest.raises(kind, match="timeout is"):
            engine().add([1], GREEDY, timeout=wrong)


# --- prompts share a step -------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(2, 5000), max_size=12), st.integers(1, 700))
def test_shares_of_a_step(pending, budget):
    given_ = split_budget(pending, budget)
    assert all(0 <= n <= p for n, p in zip(given_, pending, strict=True))
    assert sum(given_) == min(budget, sum(pending))
    if pending:
        assert given_[0] >= min(pending[0], (budget + 1) // 2), "the first request must not starve"
        shortest = min(range(len(pending)), key=pending.__getitem__)
        assert given_[shortest] >= min(pending[shortest], budget // 2)


def test_short_prompt_is_not_delayed_by_a_long_one():
    e = engine(cache_tokens=1024, step_tokens=16)
    alone = [engine().generate([p], GREEDY)[0].tokens for p in PROMPTS[:2]]
    long = tiny_llama.prompts(400)[0]
    first: dict[int, int] = {}
    tokens: dict[int, list[int]] = {}

    def note(output: Output) -> None:
        first.setdefault(output.id, e.stats()["steps"])
        tokens.setdefault(output.id, []).append(output.token)

    slow = e.add(long, SamplingParams(2, 0.0), note)
    e.step()
    quick = [e.add(p, GREEDY, note) for p in PROMPTS[:2]]
    while e.busy:
        e.step()
    assert [first[i] for i in quick] == [2, 2], "the first step after they arrived"
    assert 400 / 16 <= first[slow] <= 400 / (16 / 2 - 1), "the long one gets half of each step"
    assert [tokens[i] for i in quick] == alone


def test_admitted_prompts_have_pages_for_all_their_tokens():
    """Two prompts that only fit one after the other are not both started, to be preempted half
    way."""
    e = engine(cache_tokens=120, step_tokens=16)
    prompts = tiny_llama.prompts(80, 80)
    answers = e.generate(prompts, SamplingParams(4, 0.0))
    expected = [engine().generate([p], SamplingParams(4, 0.0))[0].tokens for p in prompts]
    assert [a.tokens for a in answers] == expected and e.stats()["preemptions"] == 0
