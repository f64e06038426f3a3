"""The rows of the migration table of docs/distributed.md: the cut of the other library, our call,
and the result of the whole call cut in the same way."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402

WORLD = 4


def contiguous(x, rank, dim=1):
    return x.chunk(WORLD, dim)[rank]


def zigzag(x, rank, dim=1):
    chunks = x.chunk(2 * WORLD, dim)
    return torch.cat([chunks[rank], chunks[2 * WORLD - 1 - rank]], dim)


def inputs():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(2, 32, heads, 8, generator=generator) for heads in (4, 4, 4)]


def rows_of_the_table(group):
    """Whether the call in each row of the table gives this rank's part of the whole result."""
    rank = torch.distributed.get_rank(group)
    q, k, v = inputs()
    whole = {c: tilewise.attention(q, k, v, causal=c, return_lse=True) for c in (False, True)}
    c, z = ([cut(x, rank) for x in (q, k, v)] for cut in (contiguous, zigzag))
    packed, pair = torch.stack(z, 2), torch.stack(z[1:], 2)
    causal = zigzag(whole[True][0], rank)
    options = tilewise.attention(q, k, v, scale=0.3, window=(5, 2))
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2))
    out, lse = td.attention(*z, causal=True, group=group, return_lse=True)
    pairs = {
        "ring": (td.attention(*c, causal=False, layout="contiguous", group=group),
                 contiguous(whole[False][0], rank)),
        "ring causal": (td.attention(*c, causal=True, layout="contiguous", group=group),
                        contiguous(whole[True][0], rank)),
        "zigzag": (td.attention(*z, causal=True, group=group), causal),
        "qkvpacked": (td.attention(*packed.unbind(2), causal=True, group=group), causal),
        "kvpacked": (td.attention(z[0], *pair.unbind(2), causal=True, group=group), causal),
        "varlen": packed_sequences(group, rank),
        "probabilities": (out, causal),
        "lse": (lse, zigzag(whole[True][1], rank, 2)),
        "scale and window": (
            td.attention(*c, scale=0.3, window=(5, 2), layout="contiguous", group=group),
            contiguous(options, rank),
        ),
        "DistributedAttention": (
            td.attention(*c, method="ulysses", layout="contiguous", group=group),
            contiguous(whole[False][0], rank),
        ),
        "LongContextAttention": (td.attention(*z, causal=True, mesh=mesh), causal),
        "EXTRACT_FUNC_DICT": (td.shard(q, 1, layout="zigzag", group=group), z[0]),
    }  # fmt: skip
    return {name: torch.allclose(got, want, atol=1e-5) for name, (got, want) in pairs.items()}


def packed_sequences(group, rank):
    lengths = (8, 24)  # multiples of 2 * WORLD, as there
    ends = torch.tensor([0, 8, 32], dtype=torch.int32)
    q, k, v = (x[0] for x in inputs())
    whole = tilewise.attention_varlen(q, k, v, ends, ends, causal=True)
    shards = [torch.cat([zigzag(s, rank, 0) for s in x.split(lengths)]) for x in (q, k, v, whole)]
    here = torch.tensor([0, 2, 8], dtype=torch.int32)  # cu_seqlens of this rank
    whole_ends = [n * WORLD for n in here.tolist()]
    return td.attention_varlen(*shards[:3], whole_ends, causal=True, group=group), shards[3]


def test_the_migration_table(pool):
    for rank, rows in enumerate(pool.run(WORLD, rows_of_the_table)):
        assert all(rows.values()), (rank, rows)
