"""Requests that begin with the same tokens share pages, and get the same answers as without."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import hf_models  # noqa: E402

hf_models.require("transformers>=5.20")
import tiny_llama  # noqa: E402
from serving_engine import COUNT, GREEDY, Answer, all_free, engine  # noqa: E402
from tilewise.serving import Engine, PagePool, SamplingParams  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors]


def test_second_prompt_is_not_computed_again():
    common = tiny_llama.prompts(90)[0]
    prompts = [common + [i] * 3 for i in range(3)] + [common, common[:41]]
    e, plain = engine(), engine(prefix_caching=False)
    for prompt in prompts:
        before = e.stats()
        (answer,) = e.generate([prompt], GREEDY)
        assert answer.tokens == plain.generate([prompt], GREEDY)[0].tokens
        shared = e.stats()["shared_tokens"] - before["shared_tokens"]
        # Pages of 4 tokens: 88 of 93, 88 of 90 and 40 of 41; the last token is always computed.
        expected = 0 if prompt is prompts[0] else min(88, (len(prompt) - 1) // 4 * 4)
        assert shared == expected and all_free(e)
    assert plain.stats()["shared_tokens"] == 0


def count_prefilled(e: Engine, monkeypatch) -> list[int]:
    """The numbers of tokens of prompts that each step computes, appended as the engine runs."""
    counts: list[int] = []
    forward = e._forward

    def counting(new_tokens):
        counts.append(sum(max(0, min(n, s.prompt - s.cached)) for s, n in new_tokens.items()))
        return forward(new_tokens)

    monkeypatch.setattr(e, "_forward", counting)
    return counts


@pytest.mark.parametrize("step_tokens", [16, 64, 512])
def test_choices_of_one_prompt_compute_it_once(monkeypatch, step_tokens):
    """Four requests that arrive together, and a short one behind them, which does not wait."""
    prompt, short = tiny_llama.prompts(90, 3)
    drawn = [SamplingParams(COUNT, temperature=0.9, seed=seed) for seed in range(4)]
    alone = [engine().generate([prompt], params)[0].tokens for params in drawn]
    e = engine(step_tokens=step_tokens, max_running=5)
    counts = count_prefilled(e, monkeypatch)
    answers = [Answer() for _ in range(5)]
    for params, answer in zip(drawn, answers[:4], strict=True):
        e.add(prompt, params, answer)
    e.add(short, GREEDY, answers[4])
    e.step()
    assert len(answers[4].tokens) == 1
    while e.busy:
        e.step()
        running = [s.id for s in e._scheduler.running]
        assert running == sorted(running)
    assert [a.tokens for a in answers[:4]] == alone and all_free(e)
    # Pages of 4 tokens: 88 of the 90 tokens of the prompt are shared.
    assert sum(counts) == 90 + 3 * 2 + 3


def test_choices_do_not_wait_for_pages_that_will_not_come(monkeypatch):
    """The first prompt is cancelled before its pages are full, or nothing is shared."""
    prompt = tiny_llama.prompts(90)[0]
    e = engine(step_tokens=16)
    counts = count_prefilled(e, monkeypatch)
    first = e.add(prompt, GREEDY)
    answer = Answer()
    e.add(prompt, GREEDY, answer)
    e.step()
    assert (counts, e.stats()["waiting"]) == ([16], 1)
    e.cancel(first)
    while e.busy:
        e.step()
    assert answer.tokens == tiny_llama.greedy(tiny_llama.make(), prompt, COUNT)
    assert sum(counts) == 90 + 16 - e.stats()["shared_tokens"] and all_free(e)
    unshared = engine(prefix_caching=False, step_tokens=512)
    counts = count_prefilled(unshared, monkeypatch)
    unshared.generate([prompt, prompt], GREEDY)
    assert counts[0] == 180


def test_shared_pages_outlive_their_first_holder_and_are_given_up_when_needed():
    """The pool holds 120 pages: the answers of 12 prompts with 4 beginnings do not fit together."""
    beginnings = tiny_llama.prompts(60, 64, 61, 63)
    prompts = [b + [7 * i] for i in range(3) for b in beginnings]
    e = engine(cache_tokens=320)
    expected = [tiny_llama.greedy(tiny_llama.make(), p, COUNT) for p in prompts]
    got = e.generate(prompts, GREEDY)
    assert [a.tokens for a in got] == expected
    stats = e.stats()
    assert stats["shared_tokens"] > 0 and all_free(e)


def test_failed_request_leaves_nothing_to_share(monkeypatch):
    """Its keys and values may be NaN, which the next request with the same beginning would read."""
    prompt = tiny_llama.prompts(30)[0]
    e = engine()
    with monkeypatch.context() as patch:
        patch.setattr(e, "_forward", lambda new: [(None, None)] * len(new))
        assert e.generate([prompt], GREEDY)[0].finish == "error"
    e.generate([prompt], GREEDY)
    assert e.stats()["shared_tokens"] == 0
    e.generate([prompt], GREEDY)
    assert e.stats()["shared_tokens"] == 28
    e.fail()
    e.generate([prompt], GREEDY)
    assert e.stats()["shared_tokens"] == 28


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_pages_hold_what_the_index_says(data):
    """A model of the cache: each page remembers the tokens up to its end."""
    size, pages = data.draw(st.integers(1, 3)), 12
    pool = PagePool(pages, size, 3)
    written: dict[int, tuple[int, ...]] = {}
    rows: dict[int, tuple[list[int], int]] = {}  # tokens, and how many are written

    def table(row: int, count: int) -> list[int]:
        return pool.block_table([row], count)[0].tolist()

    for _ in range(25):
        if rows and data.draw(st.booleans()):
            row = data.draw(st.sampled_from(sorted(rows)))
            tokens, done = rows[row]
            if done == len(tokens):
                pool.release(row)
                del rows[row]
                continue
            done = data.draw(st.integers(done + 1, len(tokens)))
            for i, page in enumerate(table(row, done)):
                if (i + 1) * size > rows[row][1]:  # not a page that was full before
                    written[page] = tuple(tokens[: min(done, (i + 1) * size)])
            pool.publish(row, tokens, done)
            rows[row] = (tokens, done)
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=4 * size))
            admitted = pool.admit(tokens)
            if admitted is None:
                continue
            row, done = admitted
            assert done < len(tokens) and done % size == 0
            rows[row] = (tokens, done)
        for row, (tokens, done) in rows.items():
            for i, page in enumerate(table(row, done)):
                assert written[page][: (i + 1) * size] == tuple(tokens[: min(done, (i + 1) * size)])
        held = {p for row, (tokens, _) in rows.items() for p in table(row, len(tokens))}
        assert len(held) == pages - pool.free_pages
