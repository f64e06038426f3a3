"""A random language model small enough for tests: no weights to download, answers in
milliseconds."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 256


def config(**changes: Any) -> dict[str, Any]:
    """Arguments of a configuration; the weights are large enough for attention to matter."""
    base = dict(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
        initializer_range=0.2, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return {**base, **changes}


def make(kind: str = "Llama", seed: int = 0, **changes: Any) -> Any:
    """The causal language model of a family, always with the same weights, on torch's default
    device."""
    import transformers

    torch.manual_seed(seed)
    settings = getattr(transformers, f"{kind}Config")(**config(**changes))
    settings._attn_implementation = "eager"
    with torch.device("cpu"):  # another device's generator draws other numbers
        model = getattr(transformers, f"{kind}ForCausalLM")(settings)
    return model.to(torch.get_default_device()).eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that Transformers itself generates one by one without a cache: the reference."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def prompts(*lengths: int) -> list[list[int]]:
    """Random prompts, the same in every test."""
    generator = torch.Generator("cpu").manual_seed(7)
    return [
        torch.randint(VOCABULARY, (n,), generator=generator, device="cpu").tolist() for n in lengths
    ]
