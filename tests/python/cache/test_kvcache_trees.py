"""Trees of draft tokens over caches: random trees, lengths, pages and padding against the oracle;
how trees are made and combined; and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import devices
import oracle
import tilewise
from compat_reference import assert_as_good
from test_kvcache import HEAD_DIM, HEAD_DIM_V, Cache
from test_kvcache_masks import HEADS, HEADS_KV, Problem, as_arrays, calls, check, placed
from tilewise import masks

PARENTS = [-1, 0, 0, 1, 1, 2]
ANCESTORS = np.array(
    [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ],
    bool,
)


def dense_of_tree(bits: Any, rows: int, keys: int, capacity: int) -> np.ndarray:
    """[rows, capacity] of one sequence, from the definition of a tree."""
    seen = np.zeros((rows, capacity), bool)
    older = keys - rows
    for i, j in np.ndindex(rows, keys):
        seen[i, j] = j < older or int(bits[i]) >> (j - older) & 1
    return seen


@st.composite
def over_trees(draw: st.DrawFn) -> Problem:
    call = draw(calls(64))
    rows, capacity = call["rows"], call["capacity"]
    batch = draw(st.sampled_from([1, len(call["lengths"])]))
    word = st.one_of(st.integers(0, 2**64 - 1), st.just(0), st.just(2**64 - 1))
    parents = [draw(st.integers(-1, i - 1)) for i in range(rows)]
    if draw(st.booleans()):
        mask = masks.Tree([[draw(word) for _ in range(rows)] for _ in range(batch)])
    else:
        mask = masks.Tree.from_parents([parents] * batch)
    bits = mask.bits.view(np.uint64)
    dense = [
        dense_of_tree(bits[b % batch], rows, length + call["new"] - pad, capacity)
        for b, (length, pad) in enumerate(zip(call["lengths"], call["leftpad"], strict=True))
    ]
    return Problem(**call, mask=mask, dense=np.stack(dense)[:, None])


@pytest.mark.abi("cpu", "cuda")
@seed(13)
@settings(max_examples=80, deadline=None, database=None)
@given(problem=over_trees())
def test_trees_over_a_cache(problem: Problem) -> None:
    check(problem)


@pytest.mark.abi("cpu", "cuda")
@pytest.mark.parametrize("older", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 272])
def test_64_rows_at_every_edge_of_a_block(older: int) -> None:
    """Row i of a chain sees the keys up to its own, as a causal row does."""
    g = torch.Generator().manual_seed(0)
    shapes = dict(q=(1, 64, 2, 16), k=(1, 64, 2, 16), v=(1, 64, 2, 16))
    new = placed({name: torch.randn(*shape, generator=g) for name, shape in shapes.items()})
    caches = devices.put(torch.randn(2, 1, 336, 2, 16, generator=g))
    chain = masks.Tree.from_parents(range(-1, 63)).to(caches.device)
    call = dict(new, cache_seqlens=older, return_lse=True)
    got = tilewise.attention_with_kvcache(
        k_cache=caches[0].clone(), v_cache=caches[1].clone(), mask=chain, **call
    )
    want = tilewise.attention_with_kvcache(
        k_cache=caches[0], v_cache=caches[1], causal=True, **call
    )
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.abi("cpu", "cuda")
def test_packed_sequences_have_as_many_draft_keys_as_rows() -> None:
    rows, lengths = [6, 0, 3, 1], [130, 7, 0, 40]
    cache = Cache(4, HEADS_KV, torch.float32, 16, capacity=160)
    g = torch.Generator().manual_seed(0)
    starts = np.cumsum([0, *rows])
    q = torch.randn(10, HEADS, HEAD_DIM, generator=g)
    k, v = (torch.randn(10, HEADS_KV, d, generator=g) for d in (HEAD_DIM, HEAD_DIM_V))
    mask = masks.Tree.from_parents(PARENTS)
    given = dict(
        q=q, k_cache=cache.k, v_cache=cache.v, k=k, v=v, cache_seqlens=torch.tensor(lengths),
        block_table=cache.table, cu_seqlens_q=torch.from_numpy(starts),
        cu_seqlens_k_new=torch.from_numpy(starts),
    )  # fmt: skip
    arrays = tilewise.attention_with_kvcache(**as_arrays(given), mask=mask)
    there = placed(given | dict(mask=mask))
    out = tilewise.attention_with_kvcache(**there).cpu()
    assert q.device != there["q"].device or np.array_equal(out.numpy(), arrays)
    cache.k.copy_(there["k_cache"]), cache.v.copy_(there["v_cache"])
    ends = [length + n for length, n in zip(lengths, rows, strict=True)]
    sequences = oracle.sequences_of(4, 0, 160, cu_seqlens_q=starts.tolist(), seqused_k=ends)
    dense = np.zeros((4, 1, 6, 160), bool)
    for b, (n, end) in enumerate(zip(rows, ends, strict=True)):
        dense[b, 0, :n] = dense_of_tree(mask.bits[0], n, end, 160)
    flat = [cache.as_contiguous(x).flatten(0, 1).double().numpy() for x in (cache.k, cache.v)]
    options = oracle.Options(scale=HEAD_DIM**-0.5, mask=dense)
    exact = oracle.attention(q.double().numpy(), *flat, sequences, options)
    assert_as_good(out, None, torch.from_numpy(exact.out), 2, "out")


@pytest.mark.parametrize("appends", [False, True])
def test_a_compiled_call_takes_a_tree(appends: bool) -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 6, 2, 16, generator=g) for _ in range(3))
    cache = torch.randn(2, 320, 2, 16, generator=g)
    new = (k, v) if appends else (None, None)

    def attend(cache: torch.Tensor, lengths: torch.Tensor, mask: Any) -> torch.Tensor:
        return tilewise.attention_with_kvcache(
            q, cache, cache.clone(), *new, cache_seqlens=lengths, mask=mask
        )

    mask = masks.Tree.from_parents(torch.tensor(PARENTS, dtype=torch.int32))
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for lengths in (torch.tensor([6, 300]), torch.tensor([127, 290])):
        want = attend(cache.clone(), lengths, mask)
        assert torch.equal(compiled(cache.clone(), lengths, mask), want)


def test_a_tree_is_an_immutable_value() -> None:
    tree = masks.Tree.from_parents(PARENTS)
    assert np.array_equal(tree.to_bool()[0, 0], ANCESTORS)
    assert repr(tree) == "Tree(6 rows that see 1 to 3 of the last 6 keys; for every sequence)"
    assert "1 row that sees 1 to 1 of the last key;" in repr(masks.Tree([1]))
    assert tree.density() == ANCESTORS.mean()
    assert tree.density(seqlen_k=9) == (ANCESTORS.sum() + 18) / 54
    assert tree.tiles(seqlen_k=300).tolist() == [[[[2, 2, 1]]]]
    assert masks.Tree([0]).tiles().tolist() == [[[[0]]]]
    with pytest.raises(AttributeError, match="immutable"):
        tree.bits = None
    leaves, spec = torch.utils._pytree.tree_flatten(tree.to("cpu"))
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    for copy in (
        pickle.loads(pickle.dumps(tree)), torch.utils._pytree.tree_unflatten(leaves, spec),
        masks.Tree(tree.bits.view(np.uint64)), masks.Tree(tree.to("cpu").bits[0]),
        masks.Tree([int(x) for x in tree.bits[0]]),
    ):  # fmt: skip
        assert repr(copy) == repr(tree)
        assert np.array_equal(copy.to_bool(), tree.to_bool())


def test_trees_are_combined() -> None:
    tree, diagonal = masks.Tree.from_parents(PARENTS), masks.Tree([[1 << i for i in range(6)]] * 2)
    both, either = tree & diagonal.to("cpu"), diagonal | tree
    assert both.batch == either.batch == 2 and torch.is_tensor(both.bits)
    assert np.array_equal(both.to_bool()[1, 0], np.eye(6, dtype=bool))
    assert np.array_equal(either.to_bool()[1, 0], ANCESTORS)
    assert masks.Tree([2**64 - 1] * 64).to_bool().all()


def test_a_tree_is_drawn() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = masks.Tree.from_parents(PARENTS).plot(seqlen_k=8)
    drawn = np.array(ax.images[0].get_array())
    assert np.array_equal(drawn == 2, np.concatenate([np.ones((6, 2), bool), ANCESTORS], axis=1))


TREE = masks.Tree.from_parents(PARENTS)
SIZES = "with 1 to 64 rows"


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: masks.Tree([]), ValueError, rf"bits has shape \[0\], but .*{SIZES}"),
        (lambda: masks.Tree([1] * 65), ValueError, rf"bits has shape \[65\], but .*{SIZES}"),
        (lambda: masks.Tree(3), ValueError, rf"bits has shape \[\], but .*{SIZES}"),
        (lambda: masks.Tree([-1]), ValueError, "bits has something other than integers from 0"),
        (lambda: masks.Tree([np.int64(-1)]), ValueError, "bits has something other than integers"),
        (lambda: masks.Tree([1.5]), ValueError, "bits has something other than integers from 0"),
        (lambda: masks.Tree(["1"]), ValueError, "bits has something other than integers from 0"),
        (lambda: masks.Tree([[1], [1, 2]]), ValueError, "in rows of one length"),
        (lambda: masks.Tree(np.ones(3, np.int32)), TypeError, "bits has dtype int32, but must"),
        (lambda: masks.Tree(torch.ones(3)), TypeError, "bits has dtype torch.float32, but must"),
        (lambda: masks.Tree.from_parents([0]), ValueError, "the parent of row 0 of sequence 0 is"),
        (lambda: masks.Tree.from_parents([[-1, -2]]), ValueError, "is -2, but must be -1 or a row"),
        (lambda: masks.Tree.from_parents([[-1], [-1, 0]]), ValueError, "parents has rows of"),
        (lambda: masks.Tree.from_parents(5), ValueError, rf"parents has shape \[\],.*{SIZES}"),
        (lambda: masks.Tree.from_parents(torch.zeros(2)), TypeError, "parents has dtype"),
        (lambda: TREE & masks.Ranges.causal(6), TypeError, "right side of & is a Ranges, but a"),
        (lambda: masks.Ranges.causal(6) | TREE, TypeError, r"right side of \| is a Tree, but a"),
        (lambda: TREE | masks.Tree([1]), ValueError, "the trees have 6 and 1 rows, but must"),
        (lambda: TREE.density(3), ValueError, "seqlen_q is 3, but the mask is for 6"),
        (lambda: TREE.density(None, 5), ValueError, "seqlen_k is 5, but must be at least 6"),
    ],
)
def test_wrong_trees_are_refused(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


def test_calls_that_a_tree_does_not_fit_write_nothing() -> None:
    for array in (lambda x: x, torch.from_numpy):
        q, k, cache = (np.ones((2, n, 2, 8), np.float32) for n in (6, 6, 32))
        tables = array(np.zeros((40, 4), np.float32))
        packed = dict(q=array(q.reshape(12, 2, 8)), cu_seqlens_q=array(np.array([0, 5, 12])))
        for change, sentence in (
            (dict(mask=masks.Tree([1])), "mask is a tree of 1 rows, but q has 6"),
            (packed, "mask is a tree of 6 rows, but must have at least 7 like the longest"),
            (dict(mask=masks.Tree([[1] * 6] * 3)), "mask has batch 3, but must have 1 or 2 like q"),
            (dict(rotary_cos=tables, rotary_sin=tables), "rotary_cos is given with a Tree, but"),
            (dict(num_splits=999), "num_splits is 999"),
        ):
            lengths = array(np.array([4, 9]))
            call: dict[str, Any] = dict(q=array(q), cache_seqlens=lengths, mask=TREE) | change
            new, caches = array(2 * k), (array(cache), array(cache))
            with pytest.raises(ValueError, match=sentence):
                tilewise.attention_with_kvcache(
                    k_cache=caches[0], v_cache=caches[1], k=new, v=new, **call
                )
            assert (cache == 1).all()
        with pytest.raises(TypeError, match="mask is a Tree, but only attention_with_kvcache"):
            tilewise.attention(array(q), array(q), array(q), mask=TREE)
