"""Every row of docs/migration.md: both calls give the same results and leave the same caches.

FlashAttention calls run through `tilewise.compat`, PyTorch's through PyTorch, and xFormers' through
the functions below, which do what its documentation says.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

import tilewise  # noqa: E402
from tilewise.compat import flash_attn, flash_attn_interface  # noqa: E402

PAGE = ROOT / "docs" / "migration.md"
SECTION = re.compile(r"^## (.*?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SECTIONS = dict(SECTION.findall(PAGE.read_text()))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\| `(.*)` \| `(.*)` \|$", re.MULTILINE)
ROWS = [(title, *row) for title, text in SECTIONS.items() for row in ROW.findall(text)]


# --- xFormers, according to its documentation -----------------------------------------------------


class Mask:
    """A mask, added to the scores [rows, keys]."""

    def __call__(self, rows: int, keys: int) -> torch.Tensor:
        seen = self.sees(torch.arange(rows)[:, None], torch.arange(keys))
        return torch.where(seen, 0, -torch.inf)


class LowerTriangularMask(Mask):
    def sees(self, i, j):
        return j <= i


class LowerTriangularFromBottomRightMask(Mask):
    def sees(self, i, j):
        return j - j.max() <= i - i.max()


class LocalAttentionFromBottomRightMask(Mask):
    def __init__(self, window_left: int, window_right: int) -> None:
        self.left, self.right = window_left, window_right

    def sees(self, i, j):
        distance = (j - j.max()) - (i - i.max())
        return (distance >= -self.left) & (distance <= self.right)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    def __init__(self, bias: torch.Tensor) -> None:
        self.bias = bias

    def __call__(self, rows: int, keys: int) -> torch.Tensor:
        return super().__call__(rows, keys) + self.bias


class BlockDiagonalMask(Mask):
    def __init__(self, lengths: list[int]) -> None:
        self.block = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonalMask:
        return cls(lengths)

    def sees(self, i, j):
        return self.block[i] == self.block[j]


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def sees(self, i, j):
        return super().sees(i, j) & (j <= i)


def memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias=None, scale=None):
    shape = q.shape
    q, k, v = (x.flatten(2, -2).transpose(1, 2) for x in (q, k, v))
    s = q.double() @ k.double().mT * (scale or q.shape[-1] ** -0.5)
    if attn_bias is not None:
        s = s + (attn_bias(*s.shape[-2:]) if isinstance(attn_bias, Mask) else attn_bias)
    out = (s.softmax(-1) @ v.double()).transpose(1, 2).reshape(shape)
    return out.float(), s.logsumexp(-1).float()


def memory_efficient_attention(q, k, v, attn_bias=None, scale=None):
    return memory_efficient_attention_forward_requires_grad(q, k, v, attn_bias, scale)[0]


XFORMERS = {n: x for n, x in globals().items() if n.startswith(("memory_", "Low", "Loc", "Block"))}
# Rows whose two calls differ only in the bits of dropout.
OTHER_DROPOUT = {("scaled_dot_product_attention", "dropout_p")}


def names(title: str) -> dict[str, Any]:
    """Fresh values for the names that the calls of a section use."""
    source = "FlashAttention 2" if title == "FlashAttention 3" else title
    (block,) = BLOCK.findall(SECTIONS[source])
    found: dict[str, Any] = {"torch": torch, "tilewise": tilewise}
    torch.manual_seed(3)
    exec(block, found)
    if title == "FlashAttention 2":
        found.update(vars(flash_attn))
    elif title == "FlashAttention 3":
        found.update(vars(flash_attn_interface))
    elif title == "xFormers":
        found.update(XFORMERS)
    else:
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention as sdpa

        found.update(causal_lower_right=causal_lower_right, scaled_dot_product_attention=sdpa)
    return found


def result(title: str, call: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors that a call returns, and the tensors it was given, after the call."""
    given = names(title)
    torch.manual_seed(5)  # for dropout
    value = eval(call, given)
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    return list(value) if isinstance(value, tuple) else [value], tensors


def test_every_section_has_rows():
    counts = {title: sum(row[0] == title for row in ROWS) for title in SECTIONS}
    assert len(counts) == 4 and min(counts.values()) >= 8, counts
    lines = [x for x in PAGE.read_text().splitlines() if x.startswith("|")]
    assert len(lines) == len(ROWS) + 2 * len(SECTIONS), "the page has a row that no test reads"


@pytest.mark.parametrize(("title", "theirs", "ours"), ROWS)
def test_row(title: str, theirs: str, ours: str):
    assert ours.startswith("tilewise.") and not theirs.startswith("tilewise.")
    (expected, after), (got, ours_after) = result(title, theirs), result(title, ours)
    if any(name in theirs and option in theirs for name, option in OTHER_DROPOUT):
        plain, _ = result(title, ours.replace("dropout_p=0.1", "dropout_p=0.0"))
        assert not torch.allclose(got[0], plain[0])
        noise = [(x - plain[0]).std().item() for x in (got[0], expected[0])]
        assert noise[0] == pytest.approx(noise[1], rel=0.2)
        return
    assert len(got) == len(expected)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=3e-6)
    for name, tensor in after.items():  # such as caches
        assert torch.equal(tensor, ours_after[name]), name
