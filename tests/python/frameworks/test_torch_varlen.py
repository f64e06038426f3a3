"""Variable lengths and paged keys on tensors must equal a loop over the sequences."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

import tilewise

pytestmark = pytest.mark.tensors

STARTS_Q = [0, 5, 5, 40, 41]
STARTS_K = [0, 9, 12, 50, 50]


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def each_sequence(q, k, v, *, bias=None, alibi_slopes=None, **options):
    """``attention`` for each sequence, and zeros for the rows past the last one."""
    outs, lses = [], []
    for b in range(len(STARTS_Q) - 1):
        rows, keys = slice(*STARTS_Q[b : b + 2]), slice(*STARTS_K[b : b + 2])
        count = rows.stop - rows.start, keys.stop - keys.start
        of_sequence = {} if bias is None else {"bias": bias[b : b + 1, :, : count[0], : count[1]]}
        if alibi_slopes is not None:
            of_sequence["alibi_slopes"] = alibi_slopes[b]
        out, lse = tilewise.attention(
            q[None, rows], k[None, keys], v[None, keys], return_lse=True, **of_sequence, **options
        )
        outs.append(out[0])
        lses.append(lse[0])
    tail = q.shape[0] - STARTS_Q[-1]
    outs.append(q.new_zeros(tail, q.shape[1], v.shape[2]))
    lses.append(q.new_full((q.shape[1], tail), -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def gradients(out, lse, leaves):
    finite = torch.where(lse.isfinite(), lse, 0.0)
    return torch.autograd.grad(out.sin().sum() + finite.cos().sum(), leaves)


OPTIONS = {
    "plain": {},
    "causal": dict(causal=True),
    "window": dict(window=(3, 1)),
    "softcap": dict(softcap=2.0, causal=True, scale=0.5),
}


@pytest.mark.parametrize("name", [*OPTIONS, "bias", "alibi", "sinks"])
@pytest.mark.parametrize("bounded", [False, True])
def test_varlen_equals_a_loop(name, bounded):
    q, k, v = leaf(43, 4, 16), leaf(50, 2, 16), leaf(50, 2, 8)
    leaves, options = [q, k, v], dict(OPTIONS.get(name, {}))
    if name == "bias":
        options["bias"] = leaf(4, 4, 35, 38)
        leaves.append(options["bias"])
    elif name == "alibi":
        options["alibi_slopes"] = torch.rand(4, 4)
    elif name == "sinks":
        options["sinks"] = leaf(4)
        leaves.append(options["sinks"])
    bounds = dict(max_seqlen_q=35, max_seqlen_k=38) if bounded else {}
    out, lse = tilewise.attention_varlen(
        q, k, v, int32(STARTS_Q), int32(STARTS_K), return_lse=True, **bounds, **options
    )
    wanted, wanted_lse = each_sequence(q, k, v, **options)
    assert torch.allclose(out, wanted, atol=1e-6)
    # Some sequences have no rows or no keys; with a sink, even a row without keys has a finite lse.
    assert torch.allclose(lse[:, :41], wanted_lse[:, :41], atol=1e-6)
    for grad, wanted_grad in zip(
        gradients(out, lse[:, :41], leaves), gradients(wanted, wanted_lse[:, :41], leaves),
        strict=True,
    ):  # fmt: skip
        assert torch.allclose(grad, wanted_grad, atol=3e-6, rtol=1e-5)


def test_seqused_truncates_each_sequence():
    q, k, v = leaf(41, 2, 16), leaf(50, 2, 16), leaf(50, 2, 16)
    used_q, used_k = [2, 0, 30, 1], [4, 0, 38, 0]
    out = tilewise.attention_varlen(
        q, k, v, int32(STARTS_Q), int32(STARTS_K), seqused_q=int32(used_q), seqused_k=int32(used_k),
        causal=True,
    )  # fmt: skip
    for b in range(4):
        first, key = STARTS_Q[b], STARTS_K[b]
        rows, keys = slice(first, first + used_q[b]), slice(key, key + used_k[b])
        wanted = tilewise.attention(q[None, rows], k[None, keys], v[None, keys], causal=True)
        assert torch.allclose(out[rows], wanted[0], atol=1e-6)
        assert not out[first + used_q[b] : STARTS_Q[b + 1]].any()


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_and_their_gradients(page_size, dtype):
    """Pages in any order, one of them shared by two sequences, garbage past the keys in use."""
    lengths = [7, 16, 0, 11]
    width = -(-max(lengths) // page_size)
    need = [-(-length // page_size) for length in lengths]
    pages = sum(need) + 2
    order = torch.randperm(pages)
    table = torch.full((4, width), -7, dtype=torch.int32)
    taken = 0
    for b, count in enumerate(need):
        table[b, :count] = order[taken : taken + count]
        taken += count
    table[3, 0] = table[1, 0]
    starts = int32([0, 3, 4, 6, 17])
    q, k, v = (
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((17, 4, 16), (pages, page_size, 2, 16), (pages, page_size, 2, 8))
    )
    out = tilewise.attention_varlen(
        q, k, v, starts, None, seqused_k=int32(lengths), block_table=table, causal=True
    )  # fmt: skip
    wanted = []
    for b, length in enumerate(lengths):
        index = table[b, : need[b]].long()
        keys, values = (x[index].flatten(0, 1)[None, :length] for x in (k, v))
        wanted.append(tilewise.attention(q[None, starts[b] : starts[b + 1]], keys, values,
                                         causal=True)[0])  # fmt: skip
    wanted = torch.cat(wanted)
    assert torch.allclose(out, wanted, atol=1e-6 if dtype == torch.float32 else 3e-2)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for grad, other in zip(grads, torch.autograd.grad(wanted, (q, k, v), dout), strict=True):
        assert grad.shape == other.shape and grad.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 4e-2
        assert torch.allclose(grad, other, atol=tolerance, rtol=tolerance)


WRONG_ENTRIES = {
    "cu_seqlens_q": dict(cu_seqlens_q=[0, 5, 4, 20]),
    "cu_seqlens_k": dict(cu_seqlens_k=[0, 5, 9, 21]),
    "seqused_k": dict(seqused_k=[5, 99, 1]),
    "max_seqlen_q": dict(max_seqlen_q=4),
    "block_table": dict(cu_seqlens_k=None, block_table=[[0, 1], [2, 6], [4, 5]]),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_entries_are_checked_on_request(name):
    """The CPU always checks index entries; a GPU does with `check`, which waits for the GPU."""
    changes = {n: int32(x) if isinstance(x, list) else x for n, x in WRONG_ENTRIES[name].items()}
    starts = int32([0, 5, 9, 20])
    q, k = torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    arguments = dict(cu_seqlens_q=starts, cu_seqlens_k=starts) | changes
    if name == "block_table":
        k = torch.randn(6, 8, 2, 8)
    with pytest.raises(ValueError, match=name):
        tilewise.attention_varlen(q, k, k, **arguments, check=True)


def test_checking_entries_changes_no_result():
    starts = int32([0, 5, 9, 20])
    q, k, v = leaf(20, 2, 8), leaf(20, 2, 8), leaf(20, 2, 8)
    results = []
    for check in (False, True):
        out = tilewise.attention_varlen(q, k, v, starts, starts, deterministic=True, check=check)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


BIASED = [0, 4, 10]


def biased(shape):
    """A bias of this shape inside a larger tensor, whose other numbers must not be read."""
    count = math.prod(shape)
    memory = torch.full((3 * count + 400,), 1e4)
    memory[count : 2 * count] = torch.randn(count)
    return memory[count : 2 * count].view(shape)


@pytest.mark.parametrize(
    "shape", [(1,), (6, 1), (2, 4, 6, 1), (2, 1, 1, 1), (4, 1, 1), (6, 6), (1, 6), (2, 1, 7, 9)]
)
def test_bias_is_broadcast_within_a_sequence(shape):
    q, k, v = (torch.randn(10, 4, 16) for _ in range(3))
    bias = biased(shape)
    starts = int32(BIASED)
    most = None if starts.device.type == "cpu" else 6  # only a CPU reads the lengths themselves
    given = tilewise.attention_varlen(q, k, v, starts, starts, bias=bias, max_seqlen_k=most)
    full = bias.expand(2, 4, *(max(6, x) for x in ((1, 1, *shape)[-2:])))
    for b, (first, last) in enumerate(pairwise(BIASED)):
        rows = slice(first, last)
        one = tilewise.attention(
            *(x[None, rows] for x in (q, k, v)),
            bias=full[b : b + 1, :, : last - first, : last - first].contiguous(),
        )
        assert torch.allclose(given[rows], one[0], atol=1e-5)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (2, 4, 6, 5), (2, 1, 1, 3), (4, 2, 6)])
def test_bias_too_small_for_the_longest_sequence_is_refused(shape):
    q = torch.randn(10, 4, 16)
    name = "rows" if shape[-2] not in (1, 6) else "keys"
    with pytest.raises(ValueError, match=f"bias has shape .*{name}, but the longest .* has 6"):
        tilewise.attention_varlen(q, q, q, int32(BIASED), int32(BIASED), bias=biased(shape))
