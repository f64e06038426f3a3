"""A small decoder-only language model: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Everything except the attention is plain PyTorch. The attention is chosen by name:

  tilewise  tilewise.attention, in memory linear in the sequence length
  naive     softmax(q k^T) v, with the whole score matrix in memory
  sdpa      torch.nn.functional.scaled_dot_product_attention

All three compute the same function, so the training of a model can continue with another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewise


@dataclass(frozen=True)
class Config:
    """The sizes of the model; `heads` is a multiple of `kv_heads` (grouped-query attention)."""

    vocabulary: int = 256
    layers: int = 4
    width: int = 256
    heads: int = 4
    kv_heads: int = 2
    context: int = 512
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        """Refuses sizes that do not go together."""
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"width is {self.width} for {self.heads} heads, but width / heads must be even"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads is {self.heads}, but must be a multiple of kv_heads, {self.kv_heads}"
            )

    @property
    def head_dim(self) -> int:
        """Columns of a head."""
        return self.width // self.heads

    @property
    def hidden(self) -> int:
        """Width of the feed-forward layer: 8/3 of the model's, rounded up to a multiple of 64."""
        return 64 * math.ceil(self.width * 8 / 3 / 64)


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, row, head, column]; k and v may have fewer heads than q."""
    return tilewise.attention(q, k, v, causal=True)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function with the score matrix [batch, head, row, key] in memory."""
    group = q.shape[2] // k.shape[2]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same function by PyTorch."""
    out = functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2)


ATTENTION: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "tilewise": tilewise_attention,
    "naive": naive_attention,
    "sdpa": sdpa_attention,
}


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer): rotates columns i and i + D/2 of row r by r * frequency_i.

    x is [batch, row, head, column]; cos and sin are [row, column / 2].
    """
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1], None, :], sin[: x.shape[1], None, :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


@dataclass
class Cache:
    """Keys and values of the rows seen so far, one pair of tensors per layer."""

    keys: list[Tensor]  # each [batch, capacity, kv_heads, head_dim]
    values: list[Tensor]
    lengths: Tensor  # [batch] int32: rows in use


class Attention(nn.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, config: Config, backend: str) -> None:
        super().__init__()
        self.config = config
        self.attend = ATTENTION[backend]
        columns = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = nn.Linear(config.width, columns, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Projects rows to q, k, v: [batch, row, head, column] each."""
        c = self.config
        heads = self.qkv(x).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        q, k, v = heads.split([c.heads, c.kv_heads, c.kv_heads], dim=2)
        return q, k, v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention of x [batch, row, width], whose rows have the positions 0, 1, 2, ..."""
        q, k, v = self.split(x)
        out = self.attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.out(out.flatten(2))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, layer: int) -> Tensor:
        """Attention of rows that follow those in the cache.

        One call rotates q and the new keys, writes keys and values to the cache, and attends.
        """
        q, k, v = self.split(x)
        out = tilewise.attention_with_kvcache(
            q,
            cache.keys[layer],
            cache.values[layer],
            k=k,
            v=v,
            cache_seqlens=cache.lengths,
            rotary_cos=cos.to(q.dtype),
            rotary_sin=sin.to(q.dtype),
            rotary_interleaved=False,
            causal=True,
        )
        return self.out(out.flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output [..., width] for x [..., width]."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


class Block(nn.Module):
    """Attention and feed-forward, each applied to the normalised residual and added to it."""

    def __init__(self, config: Config, backend: str) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = Attention(config, backend)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.feed_forward = FeedForward(config)


class GPT(nn.Module):
    """A model that predicts the next token of each row."""

    def __init__(self, config: Config, backend: str = "tilewise") -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, backend) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draws normal weights, deviation 0.02; over sqrt(2 * layers) for residual projections."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                deviation = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits [batch, row, vocabulary] of tokens [batch, row]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.attention(block.attention_norm(x), self.cos, self.sin)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy of the targets [batch, row], in nats."""
        return functional.cross_entropy(self(tokens).float().flatten(0, 1), targets.flatten())

    def empty_cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """A cache for `batch` sequences of up to `context` tokens."""
        c = self.config
        shape = (batch, c.context, c.kv_heads, c.head_dim)
        device = self.embedding.weight.device
        return Cache(
            keys=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.layers)],
            values=[torch.zeros(shape, dtype=dtype, device=device) for _ in range(c.layers)],
            lengths=torch.zeros(batch, dtype=torch.int32, device=device),
        )

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """The logits of tokens [batch, row] that follow those in the cache, and are added to it."""
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = x + block.attention.step(block.attention_norm(x), self.cos, self.sin, cache, layer)
            x = x + block.feed_forward(block.feed_forward_norm(x))
        cache.lengths += tokens.shape[1]
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        temperature: float = 0.7,
        top_k: int = 20,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt [row] with up to `count` further tokens, as many as fit into the context."""
        weight = self.embedding.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        cache = self.empty_cache(1, dtype)
        tokens = prompt
        logits = self.step(prompt[None], cache)[0, -1]
        for _ in range(min(count, self.config.context - prompt.shape[0])):
            best, index = (logits.float() / temperature).topk(top_k)
            chosen = torch.multinomial(best.softmax(-1), 1, generator=generator)
            token = index[chosen]
            tokens = torch.cat([tokens, token])
            if tokens.shape[0] < self.config.context:
                logits = self.step(token[None], cache)[0, -1]
        return tokens


def rotary_tables(config: Config) -> tuple[Tensor, Tensor]:
    """The cosines and sines [context, head_dim / 2] of position times frequency."""
    half = config.head_dim // 2
    frequency = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(config.context, dtype=torch.float64)[:, None] * frequency
    return angle.cos().float(), angle.sin().float()
