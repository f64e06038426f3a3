"""A call over PyTorch tensors, and the same call in parts: shards of its sequences, rows, keys and
heads, whose states are merged. Windows, ALiBi, bias and dropout bits are those of the whole."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import _torch, merge_states
from tilewise._request import Request, Shard


def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """[0, size) in up to three ranges, none of them empty."""
    inner = draw(st.sets(st.integers(1, max(1, size - 1)), max_size=2))
    at = [0, *sorted(x for x in inner if x < size), size]
    return list(itertools.pairwise(at))


@st.composite
def calls(draw: st.DrawFn) -> dict:
    batch, rows, keys = draw(st.integers(1, 2)), draw(st.integers(1, 60)), draw(st.integers(1, 90))
    heads_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    limit = st.one_of(st.none(), st.integers(0, 40))
    return dict(
        sizes=(batch, rows, keys, heads_kv, group), window=draw(st.tuples(limit, limit)),
        alibi=draw(st.booleans()), bias=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.5])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16])),
        parts=[cuts(draw, n) for n in (batch, rows, keys, heads_kv)],
        seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


def attention_of_parts(call: dict, q, k, v, bias, slopes, request: Request):
    """out and lse, one call per range of sequences, rows, keys and heads."""
    _, rows, keys, heads_kv, group = call["sizes"]
    of_batch, of_rows, of_keys, of_heads = call["parts"]

    def part(b, h, i, j):
        heads = slice(h[0] * group, h[1] * group)
        size = i[1] - i[0], j[1] - j[0]
        moved = i[0] - j[0] + (keys - rows) - (size[1] - size[0])
        shard = Shard(
            torch.full((b[1] - b[0],), moved, dtype=torch.int32), i[0], j[0], b[0], h[0] * group,
            heads_kv * group, request.shard.dropout_state,
        )  # fmt: skip
        b, i, j, h = slice(*b), slice(*i), slice(*j), slice(*h)
        return _torch.general_attention(
            q[b, i, heads], k[b, j, h], v[b, j, h], "bshd",
            request._replace(
                bias=None if bias is None else bias[b, heads, i, j],
                alibi_slopes=None if slopes is None else slopes[heads], shard=shard,
            ),
        )  # fmt: skip

    def merged(b, h, i):
        out, lse = part(b, h, i, of_keys[0])
        for j in of_keys[1:]:
            out, lse = merge_states(out, lse, *part(b, h, i, j))
        return out, lse

    outs, lses = [], []
    for b in of_batch:
        of_head = [[merged(b, h, i) for i in of_rows] for h in of_heads]
        outs.append(torch.cat([torch.cat([r[0] for r in each], 1) for each in of_head], 2))
        lses.append(torch.cat([torch.cat([r[1] for r in each], 2) for each in of_head], 1))
    return torch.cat(outs), torch.cat(lses)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_parts_of_a_call_equal_the_whole(call):
    batch, rows, keys, heads_kv, group = call["sizes"]
    heads = heads_kv * group
    generator = torch.Generator().manual_seed(call["seed"])

    def normal(*shape, dtype=call["dtype"]):
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q, dout = normal(batch, rows, heads, 16), normal(batch, rows, heads, 16).detach()
    k, v = normal(batch, keys, heads_kv, 16), normal(batch, keys, heads_kv, 16)
    bias = normal(batch, heads, rows, keys, dtype=torch.float32) if call["bias"] else None
    slopes = torch.rand(heads, generator=generator) / 20 if call["alibi"] else None
    state = torch.randint(0, 2**62, (2,), generator=generator)
    request = Request(
        window=call["window"], dropout_p=call["dropout_p"], bias=bias, alibi_slopes=slopes,
        return_lse=True, shard=Shard(dropout_state=state),
    )  # fmt: skip
    leaves = [x for x in (q, k, v, bias) if x is not None]
    want, want_lse = _torch.general_attention(q, k, v, "bshd", request)
    want_grads = torch.autograd.grad((want * dout).sum(), leaves)
    out, lse = attention_of_parts(call, q, k, v, bias, slopes, request)
    grads = torch.autograd.grad((out * dout).sum(), leaves)
    # Parts may run on other kernels than the whole, which round differently.
    exact = call["dtype"] == torch.float32
    bound, lse_bound = (2e-5, 1e-5) if exact else (0.1, 1e-3)
    torch.testing.assert_close(lse, want_lse, rtol=lse_bound, atol=lse_bound)
    for name, got, expected in zip(
        ("out", "dq", "dk", "dv", "dbias"), (out, *grads), (want, *want_grads), strict=False
    ):
        scale = max(1.0, float(expected.detach().abs().max()))
        worst = float((got - expected).detach().abs().max())
        assert worst <= bound * scale, f"{name} differs by {worst}, largest {scale}"
