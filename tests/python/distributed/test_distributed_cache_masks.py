"""Masks over a cache whose keys are spread over ranks, against the oracle and against the call with
the whole cache; and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402
import yardstick  # noqa: E402
from bounds import check_lse, check_out  # noqa: E402
from cases import Built, Case, flat, float64  # noqa: E402
from distributed_ranks import device  # noqa: E402
from tilewise import masks  # noqa: E402

ROWS, KEYS = 6, 300
PADDING, ENDS = (0, 7, 2), (300, 173, 5)  # the last sequence has fewer keys than rows of q
# Row 0 sees nothing, and one range goes beyond the keys.
ONE = ((1, 6, 0, 9, 0), (2, 4, 60, 2**31 - 1, 2), (3, 6, 40, 250, 1), (4, 6, 100, 110, 3))
EACH = (ONE, (), ((0, 6, 3, 4, 0), (0, 5, 120, 140, 3)))
TREE = masks.Tree.from_parents([-1, 0, 0, 1, 1, 2])
BITS = masks.Tree(np.random.default_rng(5).integers(0, 2**64, (3, ROWS), np.uint64))

MASKS: dict[str, dict[str, Any]] = {
    "shared ranges": {"mask_ranges": (ONE,)},
    "ranges": {"mask_ranges": EACH, "max_logits": True},
    "ranges bf16": {"mask_ranges": EACH, "dtype": "bf16", "sinks": True, "float32_out": True},
    "blocks": {"mask_blocks": ""},
    "blocks per sequence and head": {"mask_blocks": "bh", "dtype": "fp16"},
    "tree": {},
    "trees": {"max_logits": True, "softcap": 1.5},
    "causal": {"window": (-1, 0)},
    "window": {"window": (40, 2), "sinks": True, "max_logits": True},
    "left of the rows": {"window": (-1, 3), "dtype": "bf16"},
    "causal ranges": {"window": (-1, 0), "mask_ranges": EACH},
    "window of blocks": {"window": (150, 0), "mask_blocks": "bh"},
    "window of trees": {"window": (4, 4)},
}
SPREADS = ("interleaved", "contiguous", "any")


def problem(name: str) -> tuple[Built, Any]:
    """The problem over the whole cache, and its mask; without one it has a window."""
    b = Built(Case(
        rows=(ROWS,) * 3, keys=(KEYS,) * 3, used_k=ENDS, leftpad=PADDING, heads_kv=2, group=2,
        head_dim=16, head_dim_v=8, seed=4, **MASKS[name],
    ))  # fmt: skip
    if b.case.mask_blocks is not None:
        assert b.mask is not None
        return b, masks.from_bool(b.mask)
    if b.case.mask_ranges is not None:
        lists = b.case.mask_ranges
        e = np.array([r for own in lists for r in own], np.int32)
        starts = np.cumsum([0, *map(len, lists)])
        return b, masks.Ranges(e[:, :2], e[:, 2:4], e[:, 4], starts=starts)
    if "tree" not in name:
        return b, None
    tree = TREE if name == "tree" else BITS
    b.mask = np.zeros((3, 1, ROWS, KEYS), bool)
    for s, i, j in np.ndindex(3, ROWS, KEYS):
        older = ENDS[s] - PADDING[s] - ROWS
        bits = int(tree.bits.view(np.uint64)[s % tree.batch, i])
        b.mask[s, 0, i, j] = j < older or (j < older + ROWS and bits >> (j - older) & 1)
    return b, tree


def window_of(b: Built) -> tuple[int | None, ...]:
    return tuple(None if bound < 0 else bound for bound in b.case.window)


def spread(how: str, rank: int, world: int) -> tuple[list[np.ndarray], torch.Tensor]:
    """The places of a rank's keys in each sequence, and key_positions with more than these.

    "any": any assignment, except that the last rank has the last two keys of each sequence.
    """
    room = KEYS + 4
    lengths = [end - pad for end, pad in zip(ENDS, PADDING, strict=True)]
    if how == "any":
        rng = np.random.default_rng(1)
        positions = np.zeros((3, room), np.int64)
        own = []
        for at, length in zip(positions, lengths, strict=True):
            owner = rng.integers(0, world, length)
            owner[-2:] = world - 1
            own.append(np.flatnonzero(owner == rank))
            at[:] = length + np.arange(room)
            at[: len(own[-1])] = own[-1]
        return own, torch.from_numpy(positions)
    part = -(-KEYS // world)
    places = np.arange(rank, room * world, world)[:room]
    if how == "contiguous":
        places = rank * part + np.arange(room)
    kept = [places[places < n] for n in lengths]
    return [x[:part] if how == "contiguous" else x for x in kept], torch.from_numpy(places)


def decode(group, name: str, how: str):
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    b, mask = problem(name)
    own, positions = spread(how, rank, world)
    appends = 2 if how == "any" and rank == world - 1 else 0
    padding = [(rank + s) % 3 for s in range(3)]
    used = [pad + len(places) - appends for pad, places in zip(padding, own, strict=True)]
    capacity = KEYS + 4
    caches, new = [], []
    for x in (b.k, b.v):
        keys = x.reshape(-1, *x.shape[2:])
        cache = torch.full((3, capacity, *x.shape[2:]), math.nan, dtype=x.dtype)
        last = []
        for s, sequence in enumerate(b.sequences):
            mine = keys[torch.from_numpy(sequence.keys[own[s]])]
            cache[s, padding[s] : used[s]] = mine[: len(mine) - appends]
            last.append(mine[len(mine) - appends :])
        caches.append(cache.to(device()))
        new.append(torch.stack(last).to(device()) if appends else None)
    table = None
    if how == "any":  # pages of 4 keys, in reverse order
        count = 3 * capacity // 4
        table = torch.arange(count - 1, -1, -1, dtype=torch.int32).view(3, -1)
        caches = [x.reshape(count, 4, *x.shape[2:]).flip(0).contiguous() for x in caches]
    results = td.attention_with_kvcache(
        b.q.to(device()), *caches, *new, group=group, mask=mask, key_positions=positions,
        window=window_of(b), scale=b.scale, cache_seqlens=torch.tensor(used),
        cache_leftpad=torch.tensor(padding), block_table=table, softcap=b.case.softcap,
        sinks=None if b.sinks is None else b.sinks.to(device()), return_lse=True,
        return_max_logits=b.case.max_logits, num_splits=3 if how == "any" else 0,
        out_dtype=b.out.view.dtype,
    )  # fmt: skip
    return [x.cpu() for x in results]


@pytest.mark.parametrize("name", list(MASKS))
def test_a_rank_sees_its_keys_of_the_mask(pool, name):
    b, mask = problem(name)
    want = b.expected()
    yard = None if b.case.dtype == "fp32" else yardstick.errors(b, want)
    whole = tilewise.attention_with_kvcache(
        b.q, b.k, b.v, cache_seqlens=torch.tensor(ENDS), cache_leftpad=torch.tensor(PADDING),
        mask=mask, window=window_of(b), scale=b.scale, softcap=b.case.softcap, sinks=b.sinks,
        return_lse=True, return_max_logits=b.case.max_logits, out_dtype=b.out.view.dtype,
    )  # fmt: skip
    if name == "ranges":
        assert np.isneginf(want.lse).any()
    for world, how in [(1, "any"), (2, "interleaved"), *((4, how) for how in SPREADS)]:
        results = pool.run(world, decode, name, how)
        where = f"{name}, {how} over {world} ranks"
        for got in results:
            assert all(torch.equal(x, y) for x, y in zip(got, results[0], strict=True)), where
        out, lse, *max_logits = results[0]
        check_out(flat(out), want, b.case.dtype, yard, where)
        check_lse(b.by_row(lse), want.lse, b.case.dtype, yard, where)
        for x in max_logits:
            check_lse(float64(x), want.max_logits, b.case.dtype, yard, where, "max_logits")
        near = 1e-5 if b.case.dtype == "fp32" else 2e-2
        for x, y in zip(results[0], whole, strict=True):
            torch.testing.assert_close(x, y, rtol=near, atol=near)


@pytest.mark.parametrize("mask", [masks.Ranges.causal(3, 9), masks.Tree([1, 3, 5])])
def test_one_rank_needs_no_positions(mask):
    q, k, v = (torch.randn(2, n, 2, 8) for n in (3, 9, 9))
    given = {"mask": mask, "cache_seqlens": torch.tensor([9, 4])}
    want = tilewise.attention_with_kvcache(q, k, v, **given)
    for positions in (None, torch.arange(9)):
        out = td.attention_with_kvcache(q, k, v, key_positions=positions, **given)
        torch.testing.assert_close(out, want)


def causal_steps(group):
    """One row per sequence: causal changes nothing, and needs no positions. Also no sequences."""
    rank = torch.distributed.get_rank(group)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, n, 2, 8, generator=generator).to(device()) for n in (1, 9, 9))
    given = {"group": group, "cache_seqlens": 9 - rank}
    causal = td.attention_with_kvcache(q, k, v, causal=True, **given)
    places = torch.arange(rank, 20, 2)
    none = td.attention_with_kvcache(
        q[:0], k[:0], v[:0], window=(3, 0), key_positions=places, **given
    )
    return torch.equal(causal, td.attention_with_kvcache(q, k, v, **given)), tuple(none.shape)


def test_one_causal_row_sees_all_keys(pool):
    assert pool.run(2, causal_steps) == [(True, (0, 1, 2, 8))] * 2


def refused(group, kind):
    rank = torch.distributed.get_rank(group)
    mask: Any = masks.Ranges([[0, 3]], [[0, 5]])
    positions: Any = torch.arange(rank, 16, 2)
    if kind == "differ" and rank == 1:
        mask = masks.Ranges([[0, 3]], [[0, 6]])
    elif kind == "trees":
        mask = masks.Tree([1, 3, 7 - 4 * rank])
    elif kind == "type":
        mask = np.ones((3, 16), bool)
    elif kind == "rows":
        mask = masks.from_bool(np.ones((2, 16), bool))
    elif kind == "tree":
        mask = masks.Tree([1, 3])
    elif kind == "batch":
        mask = masks.Ranges([[0, 3]] * 3, [[0, 5]] * 3, starts=[0, 1, 2, 3])
    elif kind == "heads":
        mask = masks.from_bool(np.ones((1, 3, 3, 16), bool))
    elif kind == "none":
        positions = None
    elif kind == "short" and rank == 0:
        positions = positions[:7]
    elif kind == "batch of positions":
        positions = positions.expand(3, 8)
    elif kind == "order":
        positions = torch.tensor([0, 1, 2, 5, 5, 6, 7, 8])
    elif kind == "negative":
        positions = torch.arange(-1, 7).expand(2, 8)
    elif kind == "dtype":
        positions = torch.arange(8.0)
    q, cache, new = (torch.zeros(2, n, 2, 8, device=device()) for n in (3, 8, 1))
    try:
        td.attention_with_kvcache(
            q, cache, cache.clone(), new + 1, new, cache_seqlens=3, mask=mask,
            key_positions=positions, group=group,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        assert not cache.any(), "a refused call has appended"
        return str(error)
    return "no error"


REFUSALS = {
    "differ": "mask is Ranges with hash",
    "trees": "mask is Tree with hash",
    "type": "mask is a ndarray, but must be one of tilewise.masks",
    "rows": "mask is for 2 rows, but q has 3",
    "tree": "mask is a tree of 2 rows, but q has 3",
    "batch": "mask has batch 3, but must have 1 or 2 like q",
    "heads": "mask has heads 3, but must have 1 or 2 like q",
    "none": "key_positions is None with a mask, causal or a window, but must be the places of this",
    "short": "key_positions has shape [7], but must be [n] or [2, n], with n of at least 8",
    "batch of positions": "key_positions has shape [3, 8], but must be [n] or [2, n]",
    "order": "key_positions[4] is 5, but must be at least 0 and above the entry before it",
    "negative": "key_positions[0, 0] is -1, but must be at least 0 and above the entry before it",
    "dtype": "key_positions",
}


def test_what_does_not_fit_is_refused_on_all_ranks(pool):
    for kind, words in REFUSALS.items():
        for text in pool.run(2, refused, kind):
            assert words in text, (kind, text)


def empty(group):
    """A rank whose cache has no room for a key, and a call without rows."""
    rank = torch.distributed.get_rank(group)
    q, k, v = (torch.ones(1, n, 1, 8, device=device()) for n in (3, 5 * rank, 5 * rank))
    mask = masks.Ranges([[1, 3]], [[2, 4]])
    positions = torch.arange(5 * rank)
    out, lse = td.attention_with_kvcache(
        q, k, v, mask=mask, key_positions=positions, group=group, return_lse=True
    )
    none = td.attention_with_kvcache(
        q[:, :0], k, v, mask=mask, key_positions=positions, group=group
    )
    return out.cpu(), lse.cpu(), none.shape


def test_no_keys_and_no_rows(pool):
    for out, lse, shape in pool.run(2, empty):
        assert out[0, 0].eq(0).all() and out[0, 1:].eq(1).all()
        assert lse[0, 0, 0] == -math.inf and lse[0, 0, 1:].isfinite().all()
        assert tuple(shape) == (1, 0, 1, 8)
