"""xFormers' attention: every mask, of our classes and of xFormers' own, against dense attention."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from packages import real_package  # noqa: E402
from tilewise.compat.xformers import memory_efficient_attention, ops  # noqa: E402
from tilewise.compat.xformers.ops import fmha  # noqa: E402
from tilewise.compat.xformers.ops.fmha import attn_bias  # noqa: E402

pytestmark = pytest.mark.tensors

Rule = Callable[[int, int, int, int], bool]  # row, key, rows, keys: whether the row sees the key


def everything(i: int, j: int, rows: int, keys: int) -> bool:
    return True


def causal(i: int, j: int, rows: int, keys: int) -> bool:
    return j <= i


def bottom_right(i: int, j: int, rows: int, keys: int) -> bool:
    return j <= i + keys - rows


def window(left: int, right: int, top_left: bool = False) -> Rule:
    def rule(i: int, j: int, rows: int, keys: int) -> bool:
        diagonal = i if top_left else i + keys - rows
        return diagonal - left <= j <= diagonal + right

    return rule


class Case(NamedTuple):
    """A mask, and what it means: the rows and keys of each sequence, and which keys a row sees."""

    name: str
    make: Callable[[Any], Any]  # from the module attn_bias of either package
    rows: list[int]
    keys: list[list[int]]  # the indices of the keys of each sequence
    rule: Rule
    total_keys: int

    def visible(self) -> Tensor:
        """[rows, keys], bool."""
        seen = torch.zeros(sum(self.rows), self.total_keys, dtype=torch.bool)
        first = 0
        for rows, keys in zip(self.rows, self.keys, strict=True):
            for i in range(rows):
                for j, key in enumerate(keys):
                    seen[first + i, key] = self.rule(i, j, rows, len(keys))
            first += rows
        return seen


def runs(*starts_and_lengths: tuple[int, int]) -> list[list[int]]:
    return [list(range(first, first + length)) for first, length in starts_and_lengths]


ROWS = [3, 1, 6]
JOINED = runs((0, 5), (5, 4), (9, 7))
PADDED = runs((0, 5), (8, 4), (16, 8))
GAPPY = runs((1, 5), (9, 4), (15, 7))
TABLE = [[4, 1], [0, 5], [2, 3]]  # pages of 4 keys
PAGED = [
    [4 * table[j // 4] + j % 4 for j in range(n)] for table, n in zip(TABLE, (5, 4, 8), strict=True)
]
PAGED_GAPPY = [
    [4 * table[j // 4] + j % 4 for j in range(first, first + n)]
    for table, first, n in zip(TABLE, (2, 0, 1), (5, 4, 6), strict=True)
]
LENGTHS = [5, 4, 7]


def table() -> Tensor:
    return torch.tensor(TABLE, dtype=torch.int32)


def joined(a: Any) -> Any:
    return a.BlockDiagonalMask.from_seqlens(ROWS, LENGTHS)


def paged_gappy(a: Any, paged_type: Any) -> Any:
    gappy = a.BlockDiagonalGappyKeysMask.from_seqlens(ROWS, [2, 8, 17, 24], [5, 4, 6])
    return gappy.make_paged(table(), 4, 8, paged_type)


CASES = [
    Case("causal", lambda a: a.LowerTriangularMask(), [5], runs((0, 9)), causal, 9),
    Case("causal, more rows", lambda a: a.LowerTriangularMask(), [9], runs((0, 5)), causal, 5),
    Case("from bottom right", lambda a: a.LowerTriangularFromBottomRightMask(), [5], runs((0, 9)),
         bottom_right, 9),
    Case("local from bottom right",
         lambda a: a.LowerTriangularFromBottomRightMask().make_local_attention(3), [5],
         runs((0, 9)), window(2, 0), 9),
    Case("window", lambda a: a.LocalAttentionFromBottomRightMask(2, 1), [5], runs((0, 9)),
         window(2, 1), 9),
    Case("blocks", joined, ROWS, JOINED, everything, 16),
    Case("causal blocks", lambda a: joined(a).make_causal(), ROWS, JOINED, causal, 16),
    Case("equal causal blocks", lambda a: a.BlockDiagonalCausalMask.from_seqlens(LENGTHS), LENGTHS,
         JOINED, causal, 16),
    Case("blocks from bottom right", lambda a: joined(a).make_causal_from_bottomright(), ROWS,
         JOINED, bottom_right, 16),
    Case("local blocks", lambda a: joined(a).make_local_attention(2), ROWS, JOINED,
         window(1, 0, top_left=True), 16),
    Case("local blocks from bottom right",
         lambda a: joined(a).make_local_attention_from_bottomright(2), ROWS, JOINED, window(1, 0),
         16),
    Case("padded", lambda a: a.BlockDiagonalPaddedKeysMask.from_seqlens(ROWS, 8, [5, 4, 8]), ROWS,
         PADDED, everything, 24),
    Case("padded causal",
         lambda a: a.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(ROWS, 8, [5, 4, 8]),
         ROWS, PADDED, bottom_right, 24),
    Case("padded window",
         lambda a: a.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(
             ROWS, 8, [5, 4, 8], 2, 1), ROWS, PADDED, window(2, 1), 24),
    Case("padded local",
         lambda a: a.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(
             ROWS, 8, [5, 4, 8], 3), ROWS, PADDED, window(2, 0), 24),
    Case("gappy",
         lambda a: a.BlockDiagonalGappyKeysMask.from_seqlens(ROWS, [1, 9, 15, 24], LENGTHS), ROWS,
         GAPPY, everything, 24),
    Case("gappy causal",
         lambda a: a.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(
             ROWS, [1, 9, 15, 24], LENGTHS), ROWS, GAPPY, bottom_right, 24),
    Case("paged",
         lambda a: a.PagedBlockDiagonalPaddedKeysMask.from_seqlens(ROWS, [5, 4, 8], table(), 4),
         ROWS, PAGED, everything, 24),
    Case("paged causal",
         lambda a: a.BlockDiagonalPaddedKeysMask.from_seqlens(ROWS, 8, [5, 4, 8]).make_paged(
             table(), 4, a.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask),
         ROWS, PAGED, bottom_right, 24),
    Case("paged gappy", lambda a: paged_gappy(a, a.PagedBlockDiagonalGappyKeysMask), ROWS,
         PAGED_GAPPY, everything, 24),
    Case("paged gappy causal",
         lambda a: paged_gappy(a, a.PagedBlockDiagonalCausalWithOffsetGappyKeysMask), ROWS,
         PAGED_GAPPY, bottom_right, 24),
]  # fmt: skip


def inputs(rows: int, keys: int, batch: int = 1, heads: int = 2) -> list[Tensor]:
    shapes = ((batch, rows, heads, 16), (batch, keys, heads, 16), (batch, keys, heads, 24))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def plain(tensors: list[Tensor], mask: Tensor, dtype: torch.dtype, scale: float) -> list[Tensor]:
    """Out and gradients of dense attention on the CPU; mask is added to [B, H, rows, keys]."""
    q, k, v = wide = [x.detach().cpu().to(dtype).requires_grad_() for x in tensors]
    s = torch.einsum("bqhd,bkhd->bhqk", q * scale, k) + mask.cpu().to(dtype)
    out = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1).nan_to_num(), v)
    return [out.detach(), *torch.autograd.grad(out, wide, weights(out))]


def weights(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)


def with_gradients(out: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, tensors, weights(out))]


def assert_as_good(
    given: list[Tensor], tensors: list[Tensor], mask: Tensor, scale: float = 0.25
) -> None:
    """At most twice the error of dense attention (gradients: three times) plus a few roundings. A
    GPU rounds otherwise than dense attention on the CPU: there 1e-6 of the largest value is allowed
    as well (gradients: 3e-6), as in ``compat_reference``."""
    truth, dense = (plain(tensors, mask, x, scale) for x in (torch.float64, torch.float32))
    for i, (ours, other, right) in enumerate(zip(given, dense, truth, strict=True)):
        size, factor = float(right.abs().max()), 3.0 if i else 2.0
        bound = factor * float((other.double() - right).abs().max())
        bound += 4 * torch.finfo(torch.float32).eps * size
        if ours.is_cuda:
            bound = max(bound, (3e-6 if i else 1e-6) * size)
        assert float((ours.cpu().double() - right).abs().max()) <= bound


def mask_matrix(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_masks(case: Case) -> None:
    mask = case.make(attn_bias)
    expected = mask_matrix(case.visible()).cpu()
    if "Paged" not in type(mask).__name__:
        assert torch.equal(mask.materialize(expected.shape), expected)
    tensors = inputs(*expected.shape)
    device = torch.get_default_device()
    out = memory_efficient_attention(*tensors, mask.to(device))
    assert_as_good(with_gradients(out, tensors), tensors, expected)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_masks_of_xformers_itself(case: Case) -> None:
    """They mean the same, and both give bitwise equal results."""
    real = real_package("xformers.ops.fmha.attn_bias")
    mask, ours = case.make(real), case.make(attn_bias)
    assert type(mask).__name__ == type(ours).__name__
    if "Gappy" not in type(mask).__name__ or "Paged" not in type(mask).__name__:
        shape = (sum(case.rows), case.total_keys)
        assert torch.equal(mask.materialize(shape), mask_matrix(case.visible()))
    tensors = inputs(sum(case.rows), case.total_keys)
    given, expected = (memory_efficient_attention(*tensors, x) for x in (mask, ours))
    assert torch.equal(given, expected)


@pytest.mark.tensors("cpu")
def test_signatures_are_those_of_xformers() -> None:
    real = real_package("xformers.ops")
    for name in ops.__all__:
        if name.startswith("memory"):
            theirs = inspect.signature(getattr(real, name)).parameters
            given = inspect.signature(getattr(ops, name)).parameters
            assert [(x.name, x.kind, x.default) for x in given.values()] == [
                (x.name, x.kind, x.default) for x in theirs.values()
            ]


def test_tensors_as_bias() -> None:
    tensors = inputs(5, 9, batch=2)
    bias = torch.randn(2, 2, 5, 9, requires_grad=True)
    out = memory_efficient_attention(*tensors, bias, scale=0.3)
    assert_as_good(with_gradients(out, tensors), tensors, bias.detach(), 0.3)
    out = memory_efficient_attention(*tensors, bias)
    (given,) = torch.autograd.grad(out.square().sum(), bias)
    assert given.shape == bias.shape
    masked = memory_efficient_attention(
        *tensors, attn_bias.LowerTriangularMask().add_bias(bias)
    )  # rows and keys differ in number: the first row sees the first key
    causal_part = mask_matrix(torch.ones(5, 9, dtype=torch.bool).tril()).to(bias.device)
    assert_as_good(with_gradients(masked, tensors), tensors, bias.detach() + causal_part)


def test_groups_and_legacy_shapes() -> None:
    """Five dimensions are groups of heads with repeated keys; three are one head."""
    q, k, v = inputs(5, 9, batch=2, heads=6)
    groups = [
        x.unflatten(2, (3, 2))[:, :, :, :1].expand(-1, -1, -1, 2, -1) if i else
        x.unflatten(2, (3, 2)) for i, x in enumerate((q, k, v))
    ]  # fmt: skip
    mask = attn_bias.LowerTriangularFromBottomRightMask()
    out = memory_efficient_attention(*groups, mask)
    assert out.shape == (2, 5, 3, 2, 24)
    heads = [x.flatten(2, 3) for x in groups]
    expected = memory_efficient_attention(*heads, mask)
    torch.testing.assert_close(out.flatten(2, 3), expected, atol=1e-6, rtol=0)
    for given, right in zip(
        torch.autograd.grad(out.square().sum(), (q, k, v), retain_graph=True),
        torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(given, right, atol=1e-5, rtol=0)
    one = [x[:, :, 0] for x in heads]
    torch.testing.assert_close(
        memory_efficient_attention(*one, mask), expected[:, :, 0], atol=1e-6, rtol=0
    )


def test_lse_and_output_dtype() -> None:
    q, k, v = (x.detach() for x in inputs(5, 9, batch=2))
    out, lse = ops.memory_efficient_attention_forward_requires_grad(q, k, v)
    expected = torch.logsumexp(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25, -1)
    torch.testing.assert_close(lse, expected)
    half = ops.memory_efficient_attention_forward(q, k, v, output_dtype=torch.float16)
    assert torch.equal(half, out.half())


def test_lists_of_tensors() -> None:
    parts = [torch.randn(batch, length, 2, 16) for batch, length in ((2, 3), (1, 7))]
    mask, x = fmha.BlockDiagonalMask.from_tensor_list(parts)
    out = mask.split(memory_efficient_attention(x, x, x, attn_bias=mask))
    for part, given in zip(parts, out, strict=True):
        expected = memory_efficient_attention(part, part, part)
        torch.testing.assert_close(given, expected, atol=1e-6, rtol=0)


def test_dropout_of_packed_sequences() -> None:
    """About p of the weights are dropped, and the others are scaled."""
    q = torch.zeros(1, 40, 2, 16)
    values = torch.eye(40).view(1, 40, 1, 40).expand(-1, -1, 2, -1)
    mask = attn_bias.BlockDiagonalMask.from_seqlens([40])
    p = memory_efficient_attention(q, q, values, mask, p=0.5)
    torch.testing.assert_close(p[p > 0], torch.full_like(p[p > 0], 2 / 40))
    assert 0.4 < float((p == 0).float().mean()) < 0.6


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(attn_bias=object()), "attn_bias is a object, but must be None, a tensor or one of"),
        (dict(key=torch.ones(1, 5, 3, 16)), "must have the heads of query"),
        (dict(value=torch.ones(1, 5, 16)), "with as many dimensions as query"),
        (dict(attn_bias=attn_bias.BlockDiagonalMask.from_seqlens([4])), "query has 5 rows"),
        (dict(query=torch.ones(1, 5, 1, 2, 16), key=torch.ones(1, 5, 1, 2, 16),
              value=torch.ones(1, 5, 1, 2, 16), attn_bias=torch.zeros(1, 3, 2, 5, 5)),
         "must be broadcastable to [B, G, H, Mq, Mk] with G = 1 and H = 2"),
        (dict(attn_bias=attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            [5], [4], torch.zeros(1, 1, dtype=torch.int32), 4)), "key has 5 rows, but the mask"),
    ],
)  # fmt: skip
def test_refusals(change: dict[str, Any], sentence: str) -> None:
    x = torch.ones(1, 5, 2, 16)
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        memory_efficient_attention(**{**dict(query=x, key=x, value=x), **change})


@pytest.mark.parametrize(
    ("name", "window", "sentence"),
    [
        ("BlockDiagonalCausalLocalAttentionPaddedKeysMask", (0,), "window_size is 0"),
        ("BlockDiagonalLocalAttentionPaddedKeysMask", (-1, 2), "window_left is -1"),
    ],
)
def test_an_empty_window_is_not_an_unlimited_one(
    name: str, window: tuple[int, ...], sentence: str
) -> None:
    mask = getattr(attn_bias, name).from_seqlens_local([5], 5, [5], *window)
    x = torch.ones(1, 5, 2, 16)
    with pytest.raises(ValueError, match=sentence):
        memory_efficient_attention(x, x, x, mask)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda x: attn_bias.BlockDiagonalMask.from_seqlens(x), "q_seqlen is a Tensor, but"),
        (lambda x: attn_bias.BlockDiagonalMask.from_seqlens([2, 3], x), "kv_seqlen is a Tensor"),
        (lambda _: attn_bias.BlockDiagonalMask.from_seqlens([2.5]), "q_seqlen is [2.5], but must"),
        (lambda x: attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([2, 3], 4, x),
         "kv_seqlen is a Tensor, but must be a list of integers: pass kv_seqlen.tolist()"),
        (lambda x: attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([2], x, [3]), "kv_seqstarts"),
        (lambda x: attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2], [2.5], x[None], 4),
         "kv_seqlen is [2.5], but must be a list of integers"),
        (lambda x: attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens(x, [2, 3], x[None], 4),
         "q_seqlen is a Tensor"),
        (lambda x: attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens(
            [2], [0.5], [3], x[None], 4), "kv_seqstarts is [0.5], but"),
        (lambda x: attn_bias.PagedBlockDiagonalGappyKeysMask.from_seqlens(
            [2], [0, 8], [3], x[None], 4), "kv_seqstarts has 2 entries, but must have 1"),
        (lambda x: attn_bias.BlockDiagonalMask.from_tensor_list([]), "list of tensors is empty"),
        (lambda x: attn_bias.BlockDiagonalMask.from_tensor_lists_qkv([], [x]), "list of tensors"),
    ],
)  # fmt: skip
def test_lengths_that_are_refused(make: Any, sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        make(torch.tensor([2, 3]))


def test_transposed_pages_are_refused() -> None:
    pages = torch.zeros(2, 2, dtype=torch.int32).T
    mask = attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([2, 3], [4, 4], pages, 4)
    x = torch.ones(1, 5, 2, 16)
    keys = torch.ones(1, 8, 2, 16)
    with pytest.raises(ValueError, match="block_table has stride 2 in its last dimension"):
        memory_efficient_attention(x, keys, keys, mask)


def test_masks_without_sequences() -> None:
    x = torch.ones(1, 0, 2, 16)
    for mask in (
        attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([], 4, []),
        attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([], [0], []),
    ):
        assert memory_efficient_attention(x, x, x, mask.to(x.device)).shape == x.shape
    parts = [torch.ones(2, 0, 2, 16), torch.ones(0, 5, 2, 16)]
    mask, joined = attn_bias.BlockDiagonalMask.from_tensor_list(parts)
    assert [part.shape[0] for part in mask.split(joined)] == [2, 0]
