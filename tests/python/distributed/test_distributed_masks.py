"""Parts of masks for the calls of a rank, and what distributed attention with a mask exchanges and
refuses. test_distributed.py compares results with masks with the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402
from cases import Case  # noqa: E402
from distributed_ranks import device  # noqa: E402
from mask_cases import random_dense  # noqa: E402
from strategies import mask_ranges  # noqa: E402
from tilewise import masks  # noqa: E402
from tilewise._mask import rebuilt  # noqa: E402
from tilewise._options import Options  # noqa: E402
from tilewise.distributed.mask_parts import Scattered, tree_as_ranges, whole_mask  # noqa: E402

RANKS = 3

METHODS = ("ulysses", "allgather", "ring")
CPU = torch.device("cpu")


# --- parts ----------------------------------------------------------------------------------------


def shown(options: Options, rows: int, keys: int) -> np.ndarray:
    """The pairs that the mask in the options shows: [batch, heads, rows, keys]."""
    arrays = [x.numpy() for x in (options.mask_first, options.mask_entries)]
    if options.mask_bits is None:
        return rebuilt(masks.Ranges, arrays[::-1], ()).to_bool(rows, keys)
    arrays.append(options.mask_bits.numpy())
    assert (options.mask_rows, options.mask_keys) == (rows, keys)
    return rebuilt(masks.Blocks, arrays, (rows, keys, options.mask_heads)).to_bool()


@st.composite
def runs(draw: st.DrawFn, size: int) -> tuple[int, int]:
    begin, end = sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))
    return (begin, end) if begin < end else (0, size)


def scattered(size: int) -> st.SearchStrategy[Scattered]:
    """Some keys, also beyond the last one of the mask."""
    places = st.sets(st.integers(0, size + 3), min_size=1)
    return places.map(lambda own: Scattered(np.array(sorted(own), np.int32)))


@given(data=st.data())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_parts_show_what_the_whole_shows_there(data):
    rows, keys = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    mask = None
    if data.draw(st.booleans()):
        case = Case(rows=(rows, rows), keys=(keys, keys))
        lists = data.draw(mask_ranges(case))
        e = np.array([r for own in lists for r in own], np.int32).reshape(-1, 5)
        starts = np.cumsum([0, *map(len, lists)])
        mask = masks.Ranges(e[:, :2], e[:, 2:4], e[:, 4], starts=starts)
    else:
        rows, keys = rows * 9, keys * 9
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        batch, heads = data.draw(st.sampled_from([(1, 1), (2, 4), (1, 4), (2, 1)]))
        mask = masks.from_bool(random_dense(rng, (batch, heads, rows, keys)))
    dense, whole = mask.to_bool(rows, keys), whole_mask(mask)
    own_keys = st.one_of(runs(keys), scattered(keys))
    places = [(data.draw(runs(rows)), data.draw(own_keys))]
    if data.draw(st.booleans()):  # another place for each sequence
        places.append((data.draw(runs(rows)), data.draw(own_keys)))
    columns = [own.places if isinstance(own, Scattered) else np.arange(*own) for _, own in places]
    size = max(end - begin for (begin, end), _ in places), max(map(len, columns))
    first = data.draw(st.integers(0, 3))
    last = data.draw(st.integers(first + 1, 4))
    part = whole.part_at(tuple(places), CPU)
    q = torch.zeros(2, 1, last - first, 8)
    got = shown(part.add_to(Options(head_offset=first), q, 2), *size)
    got = np.broadcast_to(got, (2, last - first, *size))
    dense = np.broadcast_to(dense, (2, 4, rows, keys))[:, first:last]
    if isinstance(mask, masks.Ranges):  # may go beyond the keys
        wide = np.broadcast_to(mask.to_bool(rows, keys + 4), (2, 4, rows, keys + 4))[:, first:last]
    else:
        wide = np.pad(dense, ((0, 0), (0, 0), (0, 0), (0, 4)))
    for sequence, (run, _) in enumerate((places * 2)[:2]):
        at = (columns * 2)[sequence]
        want = wide[sequence, :, slice(*run)][..., at]
        own = got[sequence, :, : run[1] - run[0], : len(at)]
        assert np.array_equal(own, want), places
        for which in (sequence, None):
            low, high = whole.seen(run, keys, which)
            seen = dense[sequence if which is not None else slice(None), ..., slice(*run), :]
            outside = np.ones(keys, bool)
            outside[low:high] = False
            assert not seen[..., outside].any()


def test_trees_are_ranges():
    """A sequence with fewer keys than rows has only the last of the draft keys."""
    tree = masks.Tree(np.random.default_rng(2).integers(0, 2**64, (4, 7), np.uint64))
    older = np.array([0, 5, 140, -3])
    ranges = tree_as_ranges(tree, older)
    shown = ranges.to_bool(7, 150)
    for sequence, count in enumerate(older.tolist()):
        want = np.zeros((7, 150), bool)
        keys = max(count, 0) + 7
        want[:, : count + 7] = tree.to_bool(7, keys)[sequence, 0, :, keys - count - 7 :]
        assert np.array_equal(shown[sequence, 0], want), count
    assert (ranges.entries >= 0).all()


def test_equal_masks_are_equal_wherever_they_are():
    one, two = (masks.Ranges.documents([0, 3, 9]) for _ in range(2))
    assert whole_mask(one) == whole_mask(two.to("cpu"))
    assert whole_mask(one) != whole_mask(masks.Ranges.documents([0, 4, 9]))
    assert whole_mask(one) != whole_mask(one.blocks(9, 9))
    tensors = one.to("cpu")
    before = whole_mask(tensors)
    assert whole_mask(tensors) is before
    tensors.entries[0, 1] = 2  # a mask in tensors that change is read again
    assert whole_mask(tensors) != before


# --- calls ----------------------------------------------------------------------------------------


def moved(group, mask, layout):
    """The predicted bytes of "allgather", which a test of calls compares with those that move."""
    q, k, v = (torch.randn(1, 8, 2, 8, device=device()) for _ in range(3))
    choice = td.explain(q, k, v, mask=mask.to(device()), layout=layout, group=group)
    return choice.estimates["allgather"].bytes


def test_keys_that_the_mask_hides_do_not_travel(pool):
    apart = masks.Ranges.documents([0, 8, 16, 24])
    assert pool.run(3, moved, apart, "contiguous") == [0.0] * 3
    assert pool.run(3, moved, apart.blocks(24, 24), "contiguous")[0] > 0.0  # one block of 128
    neighbours = masks.Ranges.documents([0, 12, 24])
    everything = masks.Ranges([[0, 24]], [[0, 24]])
    some, most = (pool.run(3, moved, m, "contiguous")[0] for m in (neighbours, everything))
    assert 0.0 < some < most


def refused(group, method, kind):
    rank = torch.distributed.get_rank(group)
    mask = masks.Ranges.documents([0, 5, 24])
    if kind == "differ" and rank == 1:
        mask = masks.Ranges.documents([0, 6, 24])
    elif kind == "size":
        mask = mask.blocks(24, 23)
    elif kind == "heads":
        mask = masks.from_bool(np.ones((1, 3, 24, 24), bool))
    elif kind == "type":
        mask = np.ones((24, 24), bool)
    elif kind == "entries":
        mask = rebuilt(masks.Ranges, [np.array([[0, 3, -1, 2, 0]], np.int32), np.array([0, 1])], ())
    elif kind == "bits":
        blocks = mask.blocks(24, 24)
        mask = rebuilt(masks.Blocks, [blocks.first, blocks.entries, blocks.bits[:0]], (24, 24, 1))
    elif kind == "first":
        mask = rebuilt(masks.Ranges, [mask.entries, np.array([0, 7], np.int32)], ())
    q, k, v = (torch.randn(1, 8, 2, 8, device=device()) for _ in range(3))
    if kind != "type":
        mask = mask.to(device())
    try:
        td.attention(q, k, v, mask=mask, method=method, group=group)
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


REFUSALS = {
    "differ": "mask is Ranges with hash",
    "size": "mask is for 24 rows and 23 keys, but must be for 24 rows and 24 keys",
    "heads": "mask has heads 3, but must have 1 or 2 like q",
    "type": "mask is a ndarray, but must be one of tilewise.masks",
    "entries": "mask.entries[0] is [0, 3, -1, 2, 0], but must have 0 <= row begin <= row end",
    "bits": "mask.entries[0] is [0, 1, 0], but must have 0 <= block begin < block end <= 1 and",
    "first": "mask.first is [0, 7], but must begin with 0, not decrease and end with at most",
}


def test_masks_that_do_not_fit_are_refused(pool):
    for kind, words in REFUSALS.items():
        for method in METHODS:
            assert all(words in text for text in pool.run(3, refused, method, kind)), kind


def equals_one_process(group, method, layout):
    """out of NumPy masks and of masks from FlexAttention, over all ranks and packed."""
    from torch.nn.attention.flex_attention import create_block_mask

    where = {"layout": layout, "group": group}
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 300, 6, 16, generator=generator).to(device()) for _ in range(3))
    flex = create_block_mask(
        lambda b, h, q, kv: (q + kv) % (h + 2) > 0, None, 6, 300, 300, device().type
    )
    good = True
    documents = masks.Ranges.documents([0, 20, 170, 300]).to(device())
    for mask in (masks.from_flex(flex), documents):
        want = td.shard(tilewise.attention(q, k, v, mask=mask), 1, **where)
        own = [td.shard(x, 1, **where) for x in (q, k, v)]
        first, second = (td.attention(*own, mask=mask, method=method, **where) for _ in range(2))
        good &= torch.allclose(first, want, atol=1e-5) and torch.equal(first, second)
    return good


def test_results_are_those_of_one_process(pool):
    for method in METHODS:
        for layout in ("zigzag", "contiguous"):
            assert pool.run(3, equals_one_process, method, layout) == [True] * 3
