"""The serving engine accepts exactly the models that it serves correctly."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hf_models  # noqa: E402

hf_models.require("transformers>=5.20")
import tiny_llama  # noqa: E402
from serving_engine import COUNT, GREEDY, PROMPTS, all_free, engine  # noqa: E402

pytestmark = [*hf_models.MARKS, pytest.mark.usefixtures("one_thread")]


# The decoder layers of the first three models drop arguments that they do not know.
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("StableLm", {}),
        ("Nemotron", {}),
        ("Persimmon", {}),
        ("Cohere2", dict(sliding_window=8)),
        ("Olmo3", dict(sliding_window=8)),
        ("Qwen3Moe", dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)),
    ],
)
def test_models_that_are_served(kind: str, sizes: dict[str, Any]):
    model = tiny_llama.make(kind, **sizes)
    expected = [tiny_llama.greedy(model, p, COUNT) for p in PROMPTS]
    e = engine(model, step_tokens=24)
    assert [c.tokens for c in e.generate(PROMPTS, GREEDY)] == expected and all_free(e)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("Electra", "logits are .* off"),  # bidirectional: only a mask limits what is seen
        ("DiffLlama", "logits are .* off"),  # attends twice, with different values
        ("Doge", "the layers make an attention_mask"),  # computed from the values
    ],
)
def test_models_that_would_be_served_incorrectly_are_refused(kind: str, sentence: str):
    model = tiny_llama.make(kind)
    prompt = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        before = model(prompt).logits
        with pytest.raises(ValueError, match=rf"model is a {kind}ForCausalLM, .*{sentence}"):
            engine(model)
        assert torch.equal(model(prompt).logits, before), "the model is unchanged"


def test_context_is_that_of_the_text_model(monkeypatch):
    """A model that also reads images or audio has the sizes of its text model in a config of its
    own."""
    model = tiny_llama.make()
    text = copy.deepcopy(model.config)
    text.max_position_embeddings = 64
    monkeypatch.setattr(type(model.config), "get_text_config", lambda *_args, **_options: text)
    del model.config.max_position_embeddings
    assert engine(model).context == 64


def test_models_that_ignore_position_ids_are_refused(monkeypatch):
    model = tiny_llama.make()
    forward = model.model.forward

    def without_positions(*args: Any, position_ids: Any = None, **more: Any) -> Any:
        return forward(*args, **more)

    monkeypatch.setattr(model.model, "forward", without_positions)
    with pytest.raises(ValueError, match="follow from position_ids"):
        engine(model)


@pytest.mark.parametrize("name", ["position_ids", "logits_to_keep"])
def test_arguments_unknown_to_a_model_are_named(monkeypatch, name):
    model = tiny_llama.make()
    forward = model.forward

    def without_argument(**given: Any) -> Any:
        if name in given:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        return forward(**given)

    monkeypatch.setattr(model, "forward", without_argument)
    with pytest.raises(ValueError, match=f"positions are enough: .*argument '{name}'"):
        engine(model)


def test_model_that_ignores_logits_to_keep_is_refused(monkeypatch):
    model = tiny_llama.make()
    forward = model.forward
    monkeypatch.setattr(
        model,
        "forward",
        lambda logits_to_keep=0, **more: forward(**more),
    )
    with pytest.raises(ValueError, match="logits_to_keep is not honoured"):
        engine(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_differences_are_accepted(dtype):
    model = tiny_llama.make(num_hidden_layers=12).to(dtype)
    assert engine(model).generate([PROMPTS[2]], GREEDY)[0].finish == "length"


def test_model_can_move_to_the_next_engine():
    model = tiny_llama.make()
    first = engine(model).generate([PROMPTS[3]], GREEDY)[0].tokens
    assert engine(model).generate([PROMPTS[3]], GREEDY)[0].tokens == first
