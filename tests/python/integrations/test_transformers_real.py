"""Real models through Transformers: SmolLM2-135M-Instruct chats and is fine-tuned, MiniLM
embeds."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20", "accelerate", "gguf")

import tilewise.hf  # noqa: E402, F401

pytestmark = hf_models.MARKS
NEW = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three prime numbers.",
]
EMBEDDING_BOUND = 1e-5
LOSS_BOUND = 1e-4


def chats(tokenizer: Any, prompts: list[str]) -> list[str]:
    return [
        tokenizer.apply_chat_template(
            [dict(role="user", content=prompt)], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]


def answers(model: Any, tokenizer: Any, prompts: list[str], **options: Any) -> Tensor:
    """The new tokens [prompts, NEW] of the prompts as one batch, padded on the left."""
    batch = tokenizer(chats(tokenizer, prompts), return_tensors="pt", padding=True)
    with torch.inference_mode():
        text = model.generate(
            **batch, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            pad_token_id=tokenizer.pad_token_id, **options,
        )  # fmt: skip
    return text[:, batch["input_ids"].shape[1] :]


@functools.cache
def eager_answers(_device: torch.device) -> Tensor:
    """Greedy answers of eager attention, one prompt at a time."""
    model, tokenizer = hf_models.smollm2()
    hf_models.with_attention(model, "eager")
    return torch.cat([answers(model, tokenizer, [prompt]) for prompt in PROMPTS])


@pytest.fixture
def one_by_one() -> Tensor:
    return eager_answers(torch.get_default_device())


@pytest.fixture
def smollm2(
    one_by_one: Tensor,
) -> Iterator[tuple[Any, Any]]:  # after eager, because both use the same model
    model, tokenizer = hf_models.smollm2()
    yield hf_models.with_attention(model, "tilewise"), tokenizer
    model.eval()


def test_greedy_tokens_equal_those_of_eager(smollm2: tuple[Any, Any], one_by_one: Tensor) -> None:
    model, tokenizer = smollm2
    for prompt, expected in zip(PROMPTS, one_by_one, strict=True):
        assert torch.equal(answers(model, tokenizer, [prompt])[0], expected)
    assert "Paris" in tokenizer.decode(one_by_one[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_batch_equals_single_prompts(
    cache: str, smollm2: tuple[Any, Any], one_by_one: Tensor
) -> None:
    options = hf_models.cache_options(cache)
    assert torch.equal(answers(*smollm2, PROMPTS, **options), one_by_one)


def test_prompt_lookup_changes_nothing(smollm2: tuple[Any, Any], one_by_one: Tensor) -> None:
    given = answers(*smollm2, PROMPTS[:1], prompt_lookup_num_tokens=4)
    assert torch.equal(given, one_by_one[:1])


def forced_logits(model: Any, tokenizer: Any, answer: Tensor) -> Tensor:
    """fp32 logits for the first prompt and a given answer to it, one token at a time."""
    given = tokenizer(chats(tokenizer, PROMPTS[:1]), return_tensors="pt")["input_ids"]
    logits, cache = [], None
    with torch.inference_mode():
        for tokens in (given, *answer[None].split(1, dim=1)):
            out = model(tokens, past_key_values=cache)
            cache = out.past_key_values
            logits.append(out.logits[0].float())
    return torch.cat(logits)


# Tokens themselves are not compared: the first one is "The" or a French article, whose logits (near
# 25) differ by 0.1, one rounding step of bf16. The French answer is nonsense with eager attention
# as well.
#
# One run of a model says little either: one last bit of one attention, through thirty layers in
# half precision, changes the mean error of the logits by a tenth. With last bits drawn at random,
# fp16 gives 0.0202 +- 0.0025 with an exact attention, 0.0204 +- 0.0015 with eager and 0.0207 +-
# 0.0021 with Tilewise (16 draws each). The test therefore compares means over draws, the same draws
# for both.
DRAWS = 8


def with_drawn_bits(x: Tensor, generator: torch.Generator) -> Tensor:
    """x changed by about half a rounding step of its dtype."""
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64, device="cpu")
    return (x.double() * (1 + torch.finfo(x.dtype).eps / 4 * noise.to(x.device))).to(x.dtype)


@contextlib.contextmanager
def drawn_last_bits(model: Any, seed: int) -> Iterator[None]:
    """Randomises the last bits of the output of every attention."""
    generator = torch.Generator().manual_seed(seed)

    def draw(_module: Any, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (with_drawn_bits(given[0], generator),)

    hooks = [layer.self_attn.o_proj.register_forward_pre_hook(draw) for layer in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_to_fp32_as_eager(
    dtype: torch.dtype, one_by_one: Tensor
) -> None:
    model, tokenizer = hf_models.smollm2()
    answer = one_by_one[0, :8]
    exact = forced_logits(hf_models.with_attention(model, "eager"), tokenizer, answer)
    model = copy.deepcopy(model).to(dtype)
    mean, largest = {}, {}
    for name in ("eager", "tilewise"):
        hf_models.with_attention(model, name)
        errors = []  # [draws, tokens]
        for seed in range(DRAWS):
            with drawn_last_bits(model, seed):
                given = forced_logits(model, tokenizer, answer)
            errors.append((given - exact).abs().mean(dim=-1))
        mean[name] = float(torch.stack(errors).mean())
        largest[name] = float(torch.stack(errors).amax(dim=-1).mean())
    assert mean["tilewise"] < 1.25 * mean["eager"]
    assert largest["tilewise"] < 2.0 * largest["eager"]


def hidden_keys(q: Tensor, k: Tensor) -> Tensor:
    """[rows, keys], True where a causal row does not see the key; the rows are the last ones."""
    every = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    return every.triu(1 + k.shape[2] - q.shape[2])


def exact_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention in fp64 on [batch, heads, rows, dim] with grouped heads."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    s = q.double() @ keys.transpose(2, 3) * scale
    return s.masked_fill(hidden_keys(q, k), float("-inf")).softmax(dim=-1) @ values


# What the test above checks for a model, this one checks for its attention: with the q, k and v of
# all thirty layers, Tilewise is 0.37 (fp16) and 0.40 (bf16) times as far from fp64 as eager, which
# rounds s and p as well.
#
# Single calls are also subject to chance where hardly more is lost than by rounding o: a kernel
# that rounds p and o came within 1 % of eager in one of 1620 calls, one that rounds only o within 7
# %. The test therefore uses means over draws, which are within 8 % and 10 % in the worst call. A
# kernel whose largest weight is not exact is still detected (32 of these calls).
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_layer_is_closer_to_fp64_than_eager(dtype: torch.dtype, one_by_one: Tensor) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama.modeling_llama import eager_attention_forward

    ours = ALL_ATTENTION_FUNCTIONS["tilewise"]
    errors: dict[str, list[float]] = {"eager": [], "tilewise": []}
    generator = torch.Generator().manual_seed(0)

    def compared(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        lowest = torch.finfo(dtype).min
        bias = torch.zeros_like(hidden_keys(q, k), dtype=dtype)
        bias = bias.masked_fill(hidden_keys(q, k), lowest)[None, None]
        drawn: dict[str, list[float]] = {name: [] for name in errors}
        for _ in range(DRAWS):
            qkv = [with_drawn_bits(x, generator) for x in (q, k, v)]
            exact = exact_attention(*qkv, options["scaling"]).transpose(1, 2)
            given = ours(module, *qkv, mask, **options)
            eager = eager_attention_forward(module, *qkv, bias, **options)
            for name, (o, _weights) in dict(tilewise=given, eager=eager).items():
                drawn[name].append(float((o.double() - exact).norm() / exact.norm()))
        for name, found in drawn.items():
            errors[name].append(sum(found) / DRAWS)
        return ours(module, q, k, v, mask, **options)

    AttentionInterface.register("compared", compared)
    AttentionMaskInterface.register("compared", ALL_MASK_ATTENTION_FUNCTIONS["tilewise"])
    model, tokenizer = hf_models.smollm2()
    model = copy.deepcopy(model).to(dtype)
    forced_logits(hf_models.with_attention(model, "compared"), tokenizer, one_by_one[0, :8])
    layers = model.config.num_hidden_layers
    assert len(errors["tilewise"]) == layers * (1 + 8)
    for given, eager in zip(errors["tilewise"], errors["eager"], strict=True):
        assert given < eager
    assert sum(errors["tilewise"]) < 0.5 * sum(errors["eager"])


def test_continuous_batching_equals_single_prompts(
    smollm2: tuple[Any, Any], one_by_one: Tensor
) -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, tokenizer = smollm2
    texts = chats(tokenizer, PROMPTS)
    results = model.generate_batch(
        [tokenizer(text)["input_ids"] for text in texts],
        generation_config=GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1,
            pad_token_id=tokenizer.pad_token_id,
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=64, max_batch_tokens=64, page_size=16
        ),
    )  # fmt: skip
    assert len(results) == len(PROMPTS)
    for result, expected in zip(
        (results[key] for key in sorted(results, key=lambda key: int(key.rsplit("_", 1)[1]))),
        one_by_one,
        strict=True,
    ):
        # `generate` is prevented from ending before 64 tokens; continuous batching may end at any
        # time.
        ends = (torch.tensor(result.generated_tokens) == tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) if len(ends) else NEW
        assert result.generated_tokens[:length] == expected[:length].tolist()
        assert length > 4


def losses(implementation: str) -> list[float]:
    """The losses of a few steps of fine-tuning on padded texts, from the same weights."""
    model, tokenizer = hf_models.smollm2()
    model = hf_models.with_attention(copy.deepcopy(model), implementation).train()
    texts = [f"Question: {prompt}\nAnswer: tile by tile." for prompt in PROMPTS]
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(3):
        loss = model(**batch, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss))
    return seen


def test_fine_tuning_losses_equal_those_of_eager() -> None:
    expected = losses("eager")
    assert expected[-1] < expected[0] - 0.1
    assert losses("tilewise") == pytest.approx(expected, abs=LOSS_BOUND)


def test_embeddings() -> None:
    model, tokenizer = hf_models.minilm()
    texts = [*PROMPTS, "Tiles.", "A sentence that is a good deal longer than all the others here."]

    def embed(m: Any, some: list[str]) -> Tensor:
        batch = tokenizer(some, return_tensors="pt", padding=True)
        with torch.inference_mode():
            states = m(**batch).last_hidden_state
        weights = batch["attention_mask"][..., None].float()
        mean = (states * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(mean, dim=-1)

    expected, given = hf_models.under_both(model, lambda m: embed(m, texts))
    assert float((given - expected).abs().max()) < EMBEDDING_BOUND
    single = torch.cat([embed(model, [text]) for text in texts])  # without padding
    assert float((given - single).abs().max()) < EMBEDDING_BOUND
