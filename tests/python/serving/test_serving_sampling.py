"""The choice of the next token: cuts and penalties; and the probabilities that are reported."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hf_models  # noqa: E402

hf_models.require("transformers>=5.20")
import tiny_llama  # noqa: E402
from serving_engine import engine  # noqa: E402
from tilewise.serving import SamplingParams  # noqa: E402
from tilewise.serving.sampling import TokenCounts, logprobs, penalised, sample  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.tensors]

P = torch.tensor([0.4, 0.3, 0.2, 0.1])


def drawn(**options):
    """The tokens of P that can be drawn, and how often each is, of 1000."""
    uniform = [(i + 0.5) / 1000 for i in range(1000)]
    tokens = sample(P.log().expand(1000, 4), [SamplingParams(**options)] * 1000, uniform)
    return {t: tokens.count(t) for t in sorted(set(tokens))}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (dict(top_k=1), {0: 1000}),
        (dict(top_k=2), {0: 571, 1: 429}),
        (dict(min_p=0.45), {0: 444, 1: 333, 2: 222}),
        (dict(min_p=1.0), {0: 1000}),
        (dict(top_k=3, top_p=0.7), {0: 571, 1: 429}),  # 0.4 / 0.9 + 0.3 / 0.9 is above 0.7
        (dict(top_k=3, top_p=0.4), {0: 1000}),
        (dict(top_k=9), {0: 400, 1: 300, 2: 200, 3: 100}),
    ],
)
def test_cuts(options, expected):
    got = drawn(**options)
    assert got.keys() == expected.keys()
    assert all(abs(got[t] - n) <= 1 for t, n in expected.items())


def test_penalties():
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.5]] * 4)
    params = [
        SamplingParams(),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=0.5, presence_penalty=-1.0),
        SamplingParams(repetition_penalty=2.0),
    ]
    counts = [TokenCounts([2, 0]) if p.penalises else None for p in params]
    for token in (1, 1):
        for counted in counts[1:]:
            counted.add(token)
        penalised(logits, params, counts)  # a draw between the tokens changes nothing
    got = penalised(logits, params, counts)
    assert torch.equal(logits[0], got[0])
    assert got[1].tolist() == [2.0, 0.5, -1.0, 0.5]
    assert got[2].tolist() == [2.0, 1.0, -1.0, 0.5]
    assert got[3].tolist() == [1.0, 0.5, -2.0, 0.5]
    assert logits[3].tolist() == [2.0, 1.0, -1.0, 0.5]


def test_logprobs():
    params = [SamplingParams(logprobs=2), SamplingParams(), SamplingParams(logprobs=0)]
    first, none, last = logprobs(P.log().expand(3, 4), params, [3, 1, None])
    assert none is None and last is None
    assert first.token == pytest.approx(P.log()[3].item())
    assert [t for t, _ in first.top] == [0, 1]
    assert [x for _, x in first.top] == pytest.approx(P.log()[:2].tolist())


def test_engine_penalises_and_reports():
    e = engine(tiny_llama.make())
    options = dict(max_tokens=8, temperature=0.0, logprobs=3)
    plain, other = (
        e.generate([[5, 6, 7]], SamplingParams(**options, **more))[0]
        for more in (dict(), dict(presence_penalty=100.0))
    )
    assert len(plain.logprobs) == 8 and plain.tokens[0] == other.tokens[0]
    assert len(set(other.tokens)) == 8, "a token came twice"
    for token, report in zip(plain.tokens, plain.logprobs, strict=True):
        assert report.top[0] == (token, report.token) and len(report.top) == 3


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (dict(top_k=-1), ValueError),
        (dict(top_k=1.5), TypeError),
        (dict(min_p=1.5), ValueError),
        (dict(presence_penalty=101), ValueError),
        (dict(frequency_penalty="1"), TypeError),
        (dict(repetition_penalty=0), ValueError),
        (dict(logprobs=21), ValueError),
        (dict(logprobs=True), TypeError),
    ],
)
def test_refusals(wrong, kind):
    with pytest.raises(kind, match=f"{next(iter(wrong))} is"):
        SamplingParams(**wrong)
