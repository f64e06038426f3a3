"""Mask functions of Transformers as ranges: what they show, what they store, and models with them.

Spans in which tokens see each other (images of Gemma 3 and 4, prefixes of PaliGemma), chunks,
packed sequences with padding or spans: none of them needs a matrix of rows times keys on a device
that prefers masks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import hf_models

hf_models.require("transformers>=5.20")

import transformers  # noqa: E402
from transformers import masking_utils as mu  # noqa: E402

import tilewise.hf  # noqa: E402
from tilewise.integrations import _bool_masks  # noqa: E402
from tilewise.integrations import _masks as integration_masks  # noqa: E402
from tilewise.integrations.transformers._compact import CompactMask  # noqa: E402

pytestmark = hf_models.MARKS
LENGTH = 40
Function = Callable[..., Any]


def dtype_here() -> torch.dtype:
    """The dtype of the tests' tensors: ranges on a GPU are for 16 bits."""
    return torch.bfloat16 if torch.get_default_device().type == "cuda" else torch.float32


def prefers(dtype: torch.dtype) -> bool:
    return integration_masks.prefers_masks(torch.get_default_device(), dtype)


@pytest.fixture(autouse=True)
def where_masks_are_preferred(device: Any) -> None:
    if not prefers(dtype_here()):
        pytest.skip("ranges are for devices that prefer masks")


def here() -> SimpleNamespace:
    """Padding, spans and packed sequences of two sequences, on the default device."""
    return _on(torch.get_default_device())


@functools.cache
def _on(device: torch.device) -> SimpleNamespace:
    with torch.device(device):
        left, right = torch.ones(2, LENGTH).bool(), torch.ones(2, LENGTH).bool()
        left[0, :7], right[1, 30:] = False, False
        images = torch.full((2, LENGTH), -1)
        images[0, 8:14], images[0, 20:35], images[1, 3:9] = 0, 1, 0
        return SimpleNamespace(
            left=left, right=right, images=images,
            prefix=torch.where(torch.arange(LENGTH) < torch.tensor([[12], [25]]), 0, -1),
            split=images.clamp(max=0),  # two spans of one group see each other
            positions=torch.stack(
                [torch.cat([torch.arange(n) for n in x]) for x in ((15, 25), (9, 30, 1))]
            ),
            packed=torch.tensor([[0] * 15 + [1] * 25, [0] * 9 + [1] * 30 + [2]]),
            groups=torch.tensor([[4] * 10 + [-1] * 5 + [4] * 15 + [2] * 10, [7] * 40]),
        )  # fmt: skip


def images(ids: Tensor | None = None, inner: Function = mu.causal_mask_function) -> Function:
    return mu.or_masks(inner, mu.blockwise_overlay(here().images if ids is None else ids))


def packed(inner: Function, spans: Tensor | None = None) -> Function:
    """Packed sequences as Transformers makes them: positions first, then spans, then packing."""
    remap = getattr(mu, "remap_positions_for_packed_sequence", None)
    inner = inner if remap is None else remap(inner, here().positions)  # does not exist in 5.20
    inner = inner if spans is None else images(spans, inner)
    return mu.and_masks(inner, mu.packed_sequence_mask_function(here().packed))


def within(size: int, inner: Function) -> Function:
    return mu.and_masks(inner, mu.sliding_window_overlay(size))


WINDOW = mu.sliding_window_causal_mask_function(6)
STEP = dict(q_length=1, q_offset=LENGTH - 1)


def calls() -> dict[str, tuple[dict[str, Any], int]]:
    """By name: the arguments of the mask function, and how many ranges the result has."""
    x, none = here(), torch.zeros(2, dtype=torch.long)
    made: dict[str, tuple[dict[str, Any], int]] = {
        "images": (dict(mask_function=images()), 5),
        "images_padded": (dict(mask_function=images(), attention_mask=x.left), 5),
        "images_in_window": (dict(mask_function=within(6, images()), use_vmap=True), 12),
        "images_and_window": (dict(mask_function=images(x.images, WINDOW)), 7),
        "images_of_one_group": (dict(mask_function=images(x.split)), 7),
        "prefix": (dict(mask_function=images(x.prefix)), 4),
        "prefix_padded": (dict(mask_function=images(x.prefix), attention_mask=x.right), 5),
        "chunks": (dict(mask_function=mu.chunked_causal_mask_function(16, none)), 6),
        "chunks_padded": (
            dict(
                mask_function=mu.chunked_causal_mask_function(16, torch.tensor([7, 0])),
                attention_mask=x.left,
            ),
            6,
        ),
        "packed_padded": (
            dict(mask_function=packed(mu.causal_mask_function), attention_mask=x.right), 7
        ),
        "packed_after_a_cache": (
            dict(mask_function=packed(mu.causal_mask_function), q_length=12, q_offset=28), 3
        ),
        "packed_images": (dict(mask_function=packed(mu.causal_mask_function, x.images)), 12),
        "documents": (
            dict(
                mask_function=mu.and_masks(
                    mu.bidirectional_mask_function, mu.packed_sequence_mask_function(x.groups)
                ),
                use_vmap=True,
            ),
            7,
        ),
        "step": (STEP | dict(mask_function=images()), 2),
        "step_in_window": (STEP | dict(mask_function=within(6, images()), use_vmap=True), 2),
        "rows_after_a_cache": (dict(mask_function=images(), q_length=12, q_offset=28), 4),
        "sliding_cache": (
            dict(mask_function=within(6, images()), use_vmap=True, q_length=8, q_offset=32,
                 kv_length=13, kv_offset=27), 6
        ),
        "static_cache": (
            dict(mask_function=images(), q_length=12, q_offset=torch.tensor(28), kv_length=40,
                 attention_mask=x.left), 4
        ),
    }  # fmt: skip
    if hasattr(mu, "remap_positions_for_packed_sequence"):
        made |= {
            "packed_chunks": (
                dict(mask_function=packed(mu.chunked_causal_mask_function(16, none))), 8
            ),
            "packed_images_in_window": (
                dict(mask_function=packed(within(6, images(x.prefix))), use_vmap=True), 18
            ),
        }  # fmt: skip
    return made


NAMES = list(calls())


def both(**call: Any) -> tuple[Any, Tensor]:
    """The results (Tilewise's, eager's) of one call of the mask function."""
    sizes = dict(batch_size=2, q_length=LENGTH, kv_length=LENGTH)
    call = sizes | dict(device=torch.get_default_device(), dtype=dtype_here()) | call
    return tilewise.hf.create_mask(**call), mu.eager_mask(**call)


def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = True
    return module


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_function_becomes_a_few_ranges(name: str) -> None:
    call, count = calls()[name]
    ours, eager = both(**call)
    if is_dense_by_design(eager):
        assert type(ours) is Tensor and torch.equal(ours, eager)
        return
    assert type(ours) is CompactMask and ours.entries is not None
    assert not ours._dense and (ours.shape, ours.dtype) == (eager.shape, eager.dtype)
    held = [getattr(ours, part) for part in ours.__tensor_flatten__()[0]]
    assert sum(part.nbytes for part in held) <= 20 * count + 4 * 3 < eager.nbytes
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_with_ranges_equals_eager_attention(name: str, biased: bool) -> None:
    ours, eager = both(**calls()[name][0])
    torch.manual_seed(5)
    dtype = dtype_here()
    k, v = torch.randn(2, 2, 2, eager.shape[3], 8, dtype=dtype)
    q = torch.randn(2, 4, eager.shape[2], 8, dtype=dtype, requires_grad=True)
    bias = torch.randn(1, 4, *eager.shape[2:], dtype=dtype)
    given = {"position_bias": bias} if biased else {}
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, **given)
    assert is_dense_by_design(ours) or not ours._dense, "a rows x keys mask was built"
    exact = q.detach().double().requires_grad_()
    scores = exact @ k.double().repeat_interleave(2, 1).mT / 8**0.5 + eager
    scores = scores + given.get("position_bias", 0.0)
    expected = (scores.softmax(-1) @ v.double().repeat_interleave(2, 1)).transpose(1, 2)
    seen = (eager[:, 0] == 0).any(-1)
    fp32 = dtype == torch.float32
    assert (out.double() - expected)[seen].abs().max() < (3e-6 if fp32 else 3e-2)
    assert out[~seen].abs().sum() == 0
    out[seen].square().sum().backward()
    expected[seen].square().sum().backward()
    assert q.grad is not None and exact.grad is not None
    largest = float(exact.grad.abs().max())
    assert (q.grad.double() - exact.grad).abs().max() < (1e-5 if fp32 else 3e-2 * largest)


def parts() -> tuple[Function, ...]:
    x = here()
    return (
        mu.causal_mask_function, mu.bidirectional_mask_function, WINDOW,
        mu.sliding_window_bidirectional_overlay(4), mu.blockwise_overlay(x.images),
        mu.blockwise_overlay(x.split), mu.chunked_overlay(9, torch.tensor([3, 0])),
        mu.packed_sequence_mask_function(x.packed), packed(mu.causal_mask_function),
    )  # fmt: skip


@seed(3)
@settings(max_examples=60, deadline=None, database=None)
@given(
    function=st.recursive(
        st.integers(0, len(parts()) - 1).map(lambda i: parts()[i]),
        lambda inner: st.builds(
            lambda join, parts: join(*parts),
            st.sampled_from([mu.and_masks, mu.or_masks]), st.lists(inner, min_size=1, max_size=3),
        ),
        max_leaves=5,
    ),
    rows=st.integers(1, LENGTH), hidden=st.none() | st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_any_composition_shows_the_same_pairs(
    function: Function, rows: int, hidden: int | None
) -> None:
    """As the last rows of 40 tokens, with random padding."""
    visible = None
    if hidden is not None:
        generator = torch.Generator().manual_seed(hidden)
        visible = torch.rand(2, LENGTH, generator=generator, device="cpu") < 0.8
        visible = visible.to(torch.get_default_device())
    ours, eager = both(
        mask_function=function, q_length=rows, q_offset=LENGTH - rows, attention_mask=visible
    )
    assert torch.equal(ours, eager)


def test_what_has_no_ranges_takes_the_dense_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = mu.or_masks(mu.causal_mask_function, lambda b, h, q, kv: kv < 3)
    alternating = torch.arange(LENGTH)[None].expand(2, -1) % 2  # each group is half of the tokens
    without_packing = mu.and_masks(
        mu.causal_mask_function, mu.packed_sequence_mask_function(here().packed[:1])
    )
    for function in (unknown, images(alternating)):
        ours, eager = both(mask_function=function, use_vmap=True)
        assert not isinstance(ours, CompactMask) and torch.equal(ours, eager)
    if torch.get_default_device().type == "cpu":  # on a GPU eager attention ends the context
        with pytest.raises(IndexError):  # as in eager attention: the ids are of one sequence only
            both(mask_function=without_packing, attention_mask=here().left)
    monkeypatch.setattr("tilewise.integrations.transformers._masks.prefers_masks", lambda *_: False)
    ours, eager = both(mask_function=images())
    assert not isinstance(ours, CompactMask) and torch.equal(ours, eager)


@pytest.mark.tensors("cpu")
def test_ranges_are_for_devices_that_prefer_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((7, 5), (8, 0), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            preferred = integration_masks.prefers_masks(torch.device("cuda", 0), dtype)
            assert preferred == (capability >= (8, 0) and dtype != torch.float32)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cuda", "meta"):
        assert not integration_masks.prefers_masks(torch.device(name), torch.float16)
    ours, _ = both(mask_function=images())
    assert not isinstance(ours.to("meta"), CompactMask)


@pytest.mark.tensors("cpu")
def test_fake_tensors_take_the_dense_mask() -> None:
    with torch._subclasses.FakeTensorMode():
        ours, _ = both(mask_function=images(torch.zeros(2, LENGTH, dtype=torch.long)))
    assert not isinstance(ours, CompactMask) and ours.shape == (2, 1, LENGTH, LENGTH)


def test_a_long_packed_batch_stays_small() -> None:
    """32k tokens in 64 documents with an image each: eager's mask would be 4 GiB."""
    length, documents = 2**15, 64
    position = torch.arange(length) % (length // documents)
    spans = torch.where((position >= 100) & (position < 356), torch.arange(length) // 512, -1)
    of_document = (torch.arange(length) // 512)[None]
    function = mu.and_masks(images(spans[None]), mu.packed_sequence_mask_function(of_document))
    device = torch.get_default_device()
    mask = tilewise.hf.create_mask(
        1, length, length, mask_function=function, device=device, dtype=dtype_here()
    )
    assert mask.entries.nbytes + mask.first.nbytes <= 2 * documents * 20 + 8
    assert not mask._dense and mask.ranges().density() < 0.011


def test_a_long_sparse_mask_of_the_caller_becomes_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    converted = []
    real = _bool_masks.masks.from_bool
    monkeypatch.setattr(_bool_masks.masks, "from_bool", lambda m: converted.append(m) or real(m))
    monkeypatch.setattr(_bool_masks, "_on_gpus", True)
    monkeypatch.setattr(_bool_masks, "_costs", lambda *_: _bool_masks._ON_CPU)
    document = torch.arange(1024) // 300
    mask = (document[:, None] == document)[None, None]
    dtype = dtype_here()
    q, k, v = torch.randn(3, 1, 2, 1024, 8, dtype=dtype)
    bias = torch.randn(1, 2, 1024, 1024, dtype=dtype)
    for options in ({}, {"position_bias": bias}):
        outs = [
            tilewise.hf.attention(layer(), q, k, v, m, **options)[0]
            for m in (mask, torch.where(mask, 0.0, -torch.inf).to(dtype))
        ]
        # bf16: each way rounds its weights and its output.
        unit = 2e-6 if dtype == torch.float32 else 4 * 2**-9
        torch.testing.assert_close(*outs, atol=unit * float(outs[1].abs().max()), rtol=0)
    assert len(converted) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_ranges_in_a_compiled_layer(backend: str) -> None:
    torch.compiler.reset()
    ours, _ = both(mask_function=images())
    q, k, v = torch.randn(3, 2, 4, LENGTH, 8, dtype=dtype_here())
    module = layer()
    compiled = torch.compile(
        lambda q, mask: tilewise.hf.attention(module, q, k, v, mask)[0],
        backend=backend, fullgraph=True,
    )  # fmt: skip
    torch.testing.assert_close(compiled(q, ours), tilewise.hf.attention(module, q, k, v, ours)[0])
    assert not ours._dense


# --- models ---------------------------------------------------------------------------------------

TINY = hf_models.SIZES | dict(num_hidden_layers=2, head_dim=12)
VISION = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    image_size=8, patch_size=4,
)  # fmt: skip


def gemma3() -> Any:
    text = transformers.Gemma3TextConfig(
        **TINY, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    )
    vision = transformers.SiglipVisionConfig(**VISION)
    config = transformers.Gemma3Config(
        text_config=text.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4
    )
    return transformers.Gemma3ForConditionalGeneration, config


def paligemma() -> Any:
    vision = transformers.SiglipVisionConfig(**VISION, projection_dim=48)
    config = transformers.PaliGemmaConfig(
        vision_config=vision.to_dict(),
        text_config=transformers.GemmaConfig(**TINY).to_dict(), image_token_index=96,
        projection_dim=48, hidden_size=48,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration, config


def gemma4() -> Any:
    text = transformers.Gemma4TextConfig(
        **TINY, global_head_dim=16, sliding_window=6, vocab_size_per_layer_input=97,
        hidden_size_per_layer_input=8, use_bidirectional_attention="vision",
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Gemma4ForConditionalGeneration, transformers.Gemma4Config(
        text_config=text.to_dict()
    )


MODELS = {"gemma3": gemma3, "paligemma": paligemma, "gemma4": gemma4}


def built(name: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """The random model, two sequences of tokens, and their types as an argument of the model."""
    kind, config = MODELS[name]()
    torch.manual_seed(1)
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    types = (here().prefix < 0).long() if name == "paligemma" else (here().images >= 0).long()
    argument = "mm_token_type_ids" if name == "gemma4" else "token_type_ids"
    return model, hf_models.tokens(2, LENGTH).clamp(max=90), {argument: types}


def is_dense_by_design(mask: Any) -> bool:
    """Whether it is the mask of a decoding step on a GPU."""
    return bool(mask.shape[-2] == 1 and mask.is_cuda)


def are_compact(seen: list[Any]) -> bool:
    """Whether no layer was given a matrix of pairs."""
    if not prefers(torch.float32):  # the models compute in fp32
        return bool(seen)
    return bool(seen) and all(
        (type(mask) is CompactMask and not mask._dense) or is_dense_by_design(mask) for mask in seen
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_with_spans(name: str, padded: bool) -> None:
    """Token types mark images (or PaliGemma's prefix); no layer needs a matrix of pairs."""
    model, ids, types = built(name)
    padding = here().left if padded else None
    if name == "paligemma":
        types["labels"] = ids

    def run(m: Any) -> tuple[Tensor, Tensor]:
        m.zero_grad()
        result = m(ids, attention_mask=None if padding is None else padding.long(), **types)
        kept = torch.ones_like(ids).bool() if padding is None else padding
        result.logits[kept].pow(2).mean().backward()
        return result.logits[kept].detach(), hf_models.gradients(m)

    with hf_models.recorded_masks() as seen:
        (logits, grads), (our_logits, our_grads) = hf_models.under_both(model, run)
    assert hf_models.relative(our_logits, logits) < 1e-5
    assert hf_models.relative(our_grads, grads) < 1e-5
    assert are_compact(seen)
    assert not prefers(torch.float32) or any(mask.entries is not None for mask in seen)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", list(MODELS))
def test_models_with_spans_generate_the_tokens_of_eager(name: str, cache: str) -> None:
    model, ids, types = built(name)
    options = dict(max_new_tokens=12, do_sample=False) | hf_models.cache_options(cache)
    with hf_models.recorded_masks() as seen:
        eager, ours = hf_models.under_both(
            model, lambda m: m.generate(ids, attention_mask=here().left.long(), **types, **options)
        )
    assert torch.equal(ours, eager)
    assert are_compact(seen)
