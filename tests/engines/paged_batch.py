"""A batch as serving engines give it to attention: prompts, chunks of prompts and decoding requests
over pages, whose unused rows hold NaN. Its results are those of the oracle.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import oracle

FP32_BOUND = 1e-6  # of the largest output, as in docs/numerics.md
FP32_FLOOR = 12 * 2.0**-24  # of the largest norm of the terms of an output
PADDING = 3  # rows past the last token, as a CUDA graph has them


@dataclass
class Batch:
    """Requests with tokens in the cache and new ones, which follow them."""

    context: tuple[int, ...] = (0, 21, 37, 16, 0)  # tokens in the cache before this step
    new: tuple[int, ...] = (7, 9, 1, 1, 1)
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    pages: int = field(init=False)
    table: Tensor = field(init=False)  # [B, width]
    q: Tensor = field(init=False)  # [T, Hq, D], the new tokens
    k: Tensor = field(init=False)  # [sum of lengths, Hkv, D], all tokens of all requests
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        width = -(-max(self.lengths) // self.page_size)
        self.pages = 2 * len(self.new) * width + 1
        taken = torch.randperm(self.pages - 1)[: len(self.new) * width] + 1
        self.table = taken.view(-1, width).int()
        count, total = sum(self.new), sum(self.lengths)
        self.q = torch.randn(count, self.heads, self.dim).to(self.dtype)
        self.k = torch.randn(total, self.kv_heads, self.dim).to(self.dtype)
        self.v = torch.randn(total, self.kv_heads, self.dim).to(self.dtype)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(c + n for c, n in zip(self.context, self.new, strict=True))

    def starts(self, counts: tuple[int, ...]) -> list[int]:
        return [0, *np.cumsum(counts).tolist()]

    def of(self, new: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Slots, keys and values of the new tokens, or of those in the cache before."""
        slots, index = [], []
        for b, first in enumerate(self.starts(self.lengths)[:-1]):
            begin, end = (self.context[b], self.lengths[b]) if new else (0, self.context[b])
            at = torch.arange(begin, end)
            slots.append(self.table[b, at // self.page_size] * self.page_size + at % self.page_size)
            index.append(first + at)
        rows = torch.cat(index)
        return torch.cat(slots).long(), self.k[rows], self.v[rows]

    def padded(self, rows: Tensor) -> Tensor:
        """Rows followed by padding, which must not be read."""
        return torch.cat([rows, rows.new_full((PADDING, *rows.shape[1:]), torch.nan)])

    def expected(self, causal: bool = True, **options: Any) -> oracle.Result:
        """The oracle's result for the new tokens; options are those of ``oracle.Options``."""
        options.setdefault("scale", self.dim**-0.5)
        window = options.pop("window", (-1, -1))
        if causal:
            window = (window[0], 0)
        sequences = oracle.sequences_of(
            len(self.new),
            0,
            0,
            cu_seqlens_q=self.starts(self.new),
            cu_seqlens_k=self.starts(self.lengths),
        )
        return oracle.attention(
            *(x.double().numpy() for x in (self.q, self.k, self.v)),
            sequences,
            oracle.Options(window=window, **options),
        )

    def plain(self, causal: bool = True) -> Tensor:
        """Plain PyTorch in the dtype of the batch, whose error bounds that of 16-bit results."""
        outs, starts = [], self.starts(self.lengths)
        group = self.heads // self.kv_heads
        for b, first in enumerate(self.starts(self.new)[:-1]):
            n, m = self.new[b], self.lengths[b]
            q = self.q[first : first + n].transpose(0, 1)
            k, v = (
                x[starts[b] : starts[b] + m].repeat_interleave(group, 1).transpose(0, 1)
                for x in (self.k, self.v)
            )
            s = q @ k.transpose(1, 2) * self.dim**-0.5
            if causal:
                s = s.masked_fill(torch.ones(n, m).triu(m - n + 1).bool(), -torch.inf)
            outs.append((s.softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outs)

    def check(self, out: Tensor, want: oracle.Result, plain: Tensor | None = None) -> None:
        """Compares with the oracle, at the bounds of the library's own tests."""
        got = out[: sum(self.new)].reshape(want.out.shape).double().numpy()
        bound = max(FP32_BOUND * np.abs(want.out).max(), FP32_FLOOR * want.out_size)
        if plain is not None:
            unit = torch.finfo(self.dtype).eps / 2
            error = np.abs(plain.double().numpy() - want.out).max()
            bound = 2 * error + unit * np.abs(want.out).max()
        assert np.abs(got - want.out).max() <= bound
