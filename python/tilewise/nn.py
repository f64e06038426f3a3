"""Attention as PyTorch modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from ._requirements import require

require("tilewise.nn", "torch")

import torch
from torch import Tensor

from . import _check
from ._check import UNBOUNDED, Window
from .api import attention
from .kvcache import attention_with_kvcache

Device: TypeAlias = torch.device | str | int | None


class FlashAttention(torch.nn.Module):
    """Attention of given queries, keys and values, with a softmax scale that can be learned.

    The only parameter is the scalar ``scale``, which multiplies q.k and starts at
    1 / sqrt(head_dim); ``learnable_scale=False`` makes it a constant. causal, window, softcap,
    deterministic and tf32 are those of ``tilewise.attention``.

    Args:
        head_dim: Columns of q and k, 1..576; on a GPU 1..512 in fp32 and for gradients.
        dropout_p: Probability of dropping a weight, used only in training mode.
        layout: "bhsd" [batch, heads, seqlen, head_dim], or "bshd" with heads and seqlen exchanged.
        scale: Initial value of the scale; None is 1 / sqrt(head_dim).
        learnable_scale: Whether the scale is a parameter.
        device: Device of the scale if it is a parameter; None is PyTorch's default.
        dtype: Dtype of the scale if it is a parameter; None is PyTorch's default. Attention
            computes with the scale in float32.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    scale: Tensor | float

    def __init__(
        self, head_dim: int, *, causal: bool = False, window: Window = UNBOUNDED,
        softcap: float = 0.0, dropout_p: float = 0.0, layout: str = "bhsd",
        scale: float | None = None, learnable_scale: bool = True, deterministic: bool = False,
        tf32: bool = False, device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check.head_dim("head_dim", head_dim)
        _check.heads_first(layout)
        _check.window_bounds(causal, window)
        self.head_dim, self.layout = head_dim, layout
        self.causal, self.window = causal, window
        self.softcap, self.dropout_p = _check.softcap(softcap), _check.dropout(dropout_p)
        self.deterministic, self.tf32 = deterministic, tf32
        self._start = head_dim**-0.5 if scale is None else _check.scale_number(scale)
        self.scale = self._start
        if learnable_scale:
            start = torch.tensor(self._start, device=device, dtype=dtype)
            self.scale = torch.nn.Parameter(start)

    def reset_parameters(self) -> None:
        """Resets the scale to its initial value; call it after ``to_empty`` for a "meta" module."""
        if isinstance(self.scale, Tensor):
            with torch.no_grad():
                self.scale.fill_(self._start)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
        return_max_logits: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
        """Attention in the module's layout; see ``tilewise.attention`` for shapes and errors."""
        if _check_tensor("q", q).shape[-1] != self.head_dim:
            raise ValueError(f"q has head dimension {q.shape[-1]}, but must have {self.head_dim}")
        return attention(
            q, k, v, causal=self.causal, window=self.window, scale=self.scale,
            softcap=self.softcap, bias=bias, alibi_slopes=alibi_slopes, sinks=sinks,
            dropout_p=self.dropout_p if self.training else 0.0, return_lse=return_lse,
            deterministic=self.deterministic, tf32=self.tf32, layout=self.layout,
            return_max_logits=return_max_logits,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return (
            f"head_dim={self.head_dim}, causal={self.causal}, window={self.window}, "
            f"softcap={self.softcap}, dropout_p={self.dropout_p}, layout={self.layout!r}, "
            f"learnable_scale={isinstance(self.scale, Tensor)}"
        )


def _check_tensor(name: str, tensor: Tensor) -> Tensor:
    """Returns the tensor; refuses other types, and a tensor without dimensions."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, but must be a torch.Tensor")
    if tensor.dim() == 0:
        raise ValueError(f"{name} has shape [], but must have columns")
    return tensor


@dataclass
class KeyValueCache:
    """Keys and values of earlier tokens, for generation; see ``MultiheadAttention.new_cache``.

    k and v are [batch, capacity, heads_kv, head_dim], of which the first ``length`` tokens are in
    use.
    """

    k: Tensor
    v: Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into the cache."""
        return self.k.shape[1]


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) of the pairs (i, i + head_dim / 2).

    Args:
        head_dim: Columns of a head, an even number.
        max_positions: Rows of the tables of cosines and sines.
        base: Wavelengths run from 2 pi to 2 pi * base.
        device: Device of the tables; None is PyTorch's default. They are float32 whatever the
            dtype of the module.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, head_dim: int, max_positions: int, base: float = 10000.0, *, device: Device = None
    ) -> None:
        super().__init__()
        if _check.count("head_dim", head_dim) % 2 != 0:
            raise ValueError(f"head_dim is {head_dim}, but must be even for rotary embedding")
        _check.count("max_positions", max_positions, 0)
        _check.positive("base", base)
        self.head_dim, self.base = head_dim, base
        for name in ("cos", "sin"):
            table = torch.empty(max_positions, head_dim // 2, device=device, dtype=torch.float32)
            # The tables follow from the arguments, so they are not part of a checkpoint.
            self.register_buffer(name, table, persistent=False)
        self.reset_parameters()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Keeps the tables in float32 where ``to(dtype)`` or ``half`` converts all buffers: bf16
        has too few digits for the angles of late positions.
        """
        super()._apply(fn, recurse)
        if self.cos.dtype != torch.float32:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Computes the tables; call it after ``to_empty`` for a module created on "meta"."""
        device, positions = self.cos.device, self.cos.shape[0]
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float64, device=device)
        frequency = self.base ** -(exponent / self.head_dim)
        rows = torch.arange(positions, dtype=torch.float64, device=device)
        angle = torch.outer(rows, frequency)
        self.cos.copy_(angle.cos())
        self.sin.copy_(angle.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Rotates x [batch, seqlen, heads, head_dim], whose rows have the positions 0, 1, ...

        Returns:
            The rotated tensor in the shape and dtype of x; it is computed in float32.

        Raises:
            ValueError: x has more rows than the tables have positions.
        """
        rows = x.shape[1]
        if rows > self.cos.shape[0]:
            raise ValueError(
                f"x has {rows} rows, but this embedding has {self.cos.shape[0]} positions"
            )
        cos, sin = self.cos[:rows, None].float(), self.sin[:rows, None].float()
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class MultiheadAttention(torch.nn.Module):
    """Self-attention over [batch, seqlen, embed_dim]: projections, rotary embedding, attention.

    Args:
        embed_dim: Columns of input and output.
        num_heads: Query heads.
        num_kv_heads: Key and value heads, a divisor of num_heads; None is num_heads.
        head_dim: Columns of a head, 1..576; on a GPU 1..512 in fp32 and for gradients. None is
            embed_dim / num_heads.
        bias: Whether the projections have a bias.
        causal: Whether row i sees only rows 0..i.
        window: As in ``tilewise.attention``.
        softcap: As in ``tilewise.attention``.
        dropout_p: Probability of dropping a weight, used only in training mode.
        sinks: Whether each head learns a logit that takes part in its softmax.
        rotary_base: Base of the rotary embedding, or None for no rotary embedding.
        max_positions: Length of the longest sequence that the rotary embedding can rotate.
        device: Device of parameters and buffers; None is PyTorch's default.
        dtype: Dtype of the parameters; None is PyTorch's default.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, num_kv_heads: int | None = None,
        head_dim: int | None = None, bias: bool = False, causal: bool = True,
        window: Window = UNBOUNDED, softcap: float = 0.0, dropout_p: float = 0.0,
        sinks: bool = False, rotary_base: float | None = None, max_positions: int = 4096,
        device: Device = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        factory: dict[str, Any] = dict(device=device, dtype=dtype)
        _check.count("embed_dim", embed_dim)
        _check.count("num_heads", num_heads)
        kv_heads = num_heads
        if num_kv_heads is not None:
            kv_heads = _check.count("num_kv_heads", num_kv_heads)
        if num_heads % kv_heads != 0:
            raise ValueError(
                f"num_heads is {num_heads} and num_kv_heads {kv_heads}, but num_heads must be a "
                "positive multiple of num_kv_heads"
            )
        if head_dim is None and embed_dim % num_heads != 0:
            raise ValueError(
                f"embed_dim is {embed_dim}, but must be a multiple of num_heads, {num_heads}, "
                "unless head_dim is given"
            )
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        if head_dim is None:
            self.head_dim = _check.head_dim("embed_dim / num_heads", embed_dim // num_heads)
        else:
            self.head_dim = _check.head_dim("head_dim", head_dim, "an integer or None")
        _check.window_bounds(causal, window)
        self.causal, self.window = causal, window
        self.softcap, self.dropout_p = _check.softcap(softcap), _check.dropout(dropout_p)
        self.q_proj = torch.nn.Linear(embed_dim, num_heads * self.head_dim, bias=bias, **factory)
        self.k_proj = torch.nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **factory)
        self.v_proj = torch.nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **factory)
        self.out_proj = torch.nn.Linear(num_heads * self.head_dim, embed_dim, bias=bias, **factory)
        self.sinks = torch.nn.Parameter(torch.zeros(num_heads, **factory)) if sinks else None
        self.rotary = None
        if rotary_base is not None:
            _check.positive("rotary_base", rotary_base)
            self.rotary = RotaryEmbedding(self.head_dim, max_positions, rotary_base, device=device)

    def reset_parameters(self) -> None:
        """Initialises the projections, sets sinks to 0 and computes the rotary tables.

        Call it after ``to_empty`` for a module created on "meta". A checkpoint holds everything
        except the tables.
        """
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            projection.reset_parameters()
        if self.sinks is not None:
            torch.nn.init.zeros_(self.sinks)
        if self.rotary is not None:
            self.rotary.reset_parameters()

    def new_cache(self, batch: int, capacity: int) -> KeyValueCache:
        """An empty cache for ``forward``, in the dtype and on the device of the projections.

        Its keys and values are [batch, capacity, num_kv_heads, head_dim].
        """
        weight = self.k_proj.weight
        shape = (batch, capacity, self.num_kv_heads, self.head_dim)
        return KeyValueCache(weight.new_zeros(shape), weight.new_zeros(shape))

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attends from x [batch, seqlen, embed_dim] to itself, or to the cache followed by x.

        The keys and values of x are appended to the cache. A cache is for generation with a causal
        module, and has no gradient.

        Raises:
            ValueError: x has another shape, does not fit into the cache, or is longer than the
                rotary embedding; or a cache is given to a module that is not causal or that trains
                with dropout.
        """
        columns = self.q_proj.in_features
        _check.shape(
            "x", _check_tensor("x", x), (None, None, columns), "[batch, seqlen, embed_dim]"
        )
        batch, rows = x.shape[:2]
        q = self.q_proj(x).view(batch, rows, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, rows, self.num_kv_heads, self.head_dim)
        out = self._attend(q, k, v) if cache is None else self._attend_cached(q, k, v, cache)
        return self.out_proj(out.reshape(batch, rows, self.num_heads * self.head_dim))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        return attention(
            q, k, v, causal=self.causal, window=self.window, softcap=self.softcap,
            sinks=self.sinks, dropout_p=self.dropout_p if self.training else 0.0,
        )  # fmt: skip

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache) -> Tensor:
        if not self.causal:
            raise ValueError("a cache is given, but generation needs a module with causal=True")
        if self.training and self.dropout_p > 0.0:
            raise ValueError(
                f"a cache is given to a module that trains with dropout_p {self.dropout_p}, but "
                "attention to a cache has no dropout: call eval() first"
            )
        length = cache.length + q.shape[1]
        if length > cache.capacity:
            raise ValueError(
                f"x has {q.shape[1]} rows and the cache {cache.length} tokens, but its capacity "
                f"is {cache.capacity}"
            )
        cos = sin = None
        if self.rotary is not None:
            if length > self.rotary.cos.shape[0]:
                raise ValueError(
                    f"the sequence grows to {length} rows, but the rotary embedding has "
                    f"{self.rotary.cos.shape[0]} positions"
                )
            cos, sin = self.rotary.cos.to(cache.k.dtype), self.rotary.sin.to(cache.k.dtype)
        # Under autocast the projections are in another dtype than the cache.
        q, k, v = q.to(cache.k.dtype), k.to(cache.k.dtype), v.to(cache.k.dtype)
        with torch.no_grad():
            out = attention_with_kvcache(
                q, cache.k, cache.v, k, v, cache_seqlens=cache.length, rotary_cos=cos,
                rotary_sin=sin, rotary_interleaved=False, causal=self.causal, window=self.window,
                softcap=self.softcap, sinks=self.sinks,
            )  # fmt: skip
        cache.length = length
        return out
