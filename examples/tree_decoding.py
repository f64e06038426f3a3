"""Speculative decoding with a tree of guesses: several tokens from one call of the model.

  python examples/tree_decoding.py
  python examples/tree_decoding.py --tokens 400 --rows 64 --width 3

A token was often followed by the same tokens before. The followers of the last token, their
followers, and so on, form a tree of guesses. One call gives the logits of all of them: each guess
sees the text and its ancestors, which is what `masks.Tree` says. The guesses on the path that the
model itself takes are kept, so the text is that of plain greedy decoding. The model has random
weights; with another one, only `guess` would be better (SpecInfer, arXiv 2305.09781; Medusa,
arXiv 2401.10774).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import gpt
import tilewise
from tilewise import masks


@dataclass
class Draft:
    """Guesses of the next tokens. Token 0 is the last one of the text, and the root of the tree."""

    tokens: list[int]
    parents: list[int]  # of each token; -1 for the root
    depths: list[int]


def guess(text: Sequence[int], rows: int, depth: int, width: int) -> Draft:
    """The tree of what has followed before: at most `width` children of a token, latest first."""
    followers: dict[int, list[int]] = {}
    for token, follower in itertools.pairwise(text):
        seen = followers.setdefault(token, [])
        if follower in seen:
            seen.remove(follower)
        seen.insert(0, follower)
    draft = Draft([text[-1]], [-1], [0])
    for node, token in enumerate(draft.tokens):  # grows while it is read, level by level
        if draft.depths[node] == depth:
            break
        children = followers.get(token, [])[: min(width, rows - len(draft.tokens))]
        draft.tokens += children
        draft.parents += [node] * len(children)
        draft.depths += [draft.depths[node] + 1] * len(children)
    return draft


def verify(model: gpt.GPT, draft: Draft, cache: gpt.Cache) -> Tensor:
    """The logits [row, vocabulary] after each token of the draft; its keys go to the cache."""
    positions = cache.lengths + torch.tensor(draft.depths)
    cos, sin = model.cos[positions], model.sin[positions]
    tree = masks.Tree.from_parents(draft.parents)
    x = model.embedding(torch.tensor([draft.tokens]))
    for layer, block in enumerate(model.blocks):
        q, k, v = block.attention.split(block.attention_norm(x))
        out = tilewise.attention_with_kvcache(
            gpt.rotate(q, cos, sin),
            cache.keys[layer],
            cache.values[layer],
            gpt.rotate(k, cos, sin),
            v,
            cache_seqlens=cache.lengths,
            mask=tree,
        )
        x = x + block.attention.out(out.flatten(2))
        x = x + block.feed_forward(block.feed_forward_norm(x))
    logits: Tensor = model.head(model.norm(x))[0]
    return logits


def accepted(draft: Draft, logits: Tensor) -> tuple[list[int], list[int]]:
    """The path of guesses that the model takes, and the tokens that it appends to the text."""
    best = logits.argmax(-1).tolist()
    path = [0]
    for node in range(1, len(draft.tokens)):  # parents come before their children
        if draft.parents[node] == path[-1] and draft.tokens[node] == best[path[-1]]:
            path.append(node)
    return path, [best[node] for node in path]


def keep(cache: gpt.Cache, path: Sequence[int]) -> None:
    """Moves the keys and values of the path to the end of the text; the others are overwritten."""
    begin = int(cache.lengths[0])
    for rows in (*cache.keys, *cache.values):
        rows[0, begin : begin + len(path)] = rows[0, begin + torch.tensor(path)]
    cache.lengths += len(path)


@torch.no_grad()
def tree_decoding(
    model: gpt.GPT, prompt: Sequence[int], count: int, rows: int, depth: int, width: int
) -> tuple[list[int], int]:
    """`count` tokens after the prompt (of at least two), and how many calls they took."""
    cache = model.empty_cache(1, torch.float32)
    model.step(torch.tensor([prompt[:-1]]), cache)
    text, calls = list(prompt), 0
    while len(text) < len(prompt) + count:
        draft = guess(text, rows, depth, width)
        path, tokens = accepted(draft, verify(model, draft, cache))
        keep(cache, path)
        text += tokens
        calls += 1
    return text[len(prompt) : len(prompt) + count], calls


@torch.no_grad()
def plain_decoding(model: gpt.GPT, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the prompt, one by one."""
    cache = model.empty_cache(1, torch.float32)
    text = list(prompt)
    logits = model.step(torch.tensor([text]), cache)
    for _ in range(count):
        text.append(int(logits[0, -1].argmax()))
        logits = model.step(torch.tensor([text[-1:]]), cache)
    return text[len(prompt) :]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate")
    parser.add_argument("--rows", type=int, default=16, help="rows of a tree, at most 64")
    parser.add_argument("--depth", type=int, default=6, help="guesses in a row")
    parser.add_argument("--width", type=int, default=2, help="guesses for one place")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights and the prompt")
    options = parser.parse_args(arguments)
    for name, least, most in (("tokens", 1, None), ("rows", 1, 64), ("depth", 0, None),
                              ("width", 0, None)):  # fmt: skip
        value = getattr(options, name)
        if value < least or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            parser.error(f"--{name} is {value}, but must be {allowed}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Generates with both methods and compares; the exit status is 0 if the tokens are the same."""
    options = parse(arguments)
    torch.manual_seed(options.seed)
    prompt = torch.randint(64, (32,)).tolist()
    context = len(prompt) + options.tokens + options.depth + options.rows
    model = gpt.GPT(gpt.Config(vocabulary=64, layers=2, width=64, context=context))
    shape = options.rows, options.depth, options.width
    tokens, calls = tree_decoding(model, prompt, options.tokens, *shape)
    same = tokens == plain_decoding(model, prompt, options.tokens)
    print(f"{len(tokens)} tokens in {calls} calls of the model instead of {len(tokens)};")
    print("they are those of plain decoding." if same else "THEY DIFFER from plain decoding.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
