"""Latent caches and selected keys of ``tilewise.jax``, against the bits of NumPy arrays, the oracle
and JAX's transformations. The oracle's cases of latent caches are in ``test_jax``."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-jax` installs it")
import jax.numpy as jnp

import test_jax
import tilewise
import tilewise.jax as tj
from bounds import check_lse, check_out
from cases import Case
from jax_arrays import ON_GPU, random, same, same_but_for_weights
from tilewise import masks

pytestmark = pytest.mark.jax

HEAD_DIM, HEAD_DIM_V = 40, 32
LENGTHS = np.array([50, 3, 64], np.int32)
STARTS = np.array([0, 1, 1, 4], np.int32)  # of 6 rows, the last two of which belong to no sequence
RESULTS = dict(return_lse=True, return_max_logits=True)
# A GPU rounds weights to the 16 bits of its inputs.
ROUNDED_WEIGHTS = 2**-7
DTYPES = ["float32", "bfloat16", "float8 cache", "float8"]


def host(tree):
    return jax.tree.map(np.asarray, tree)


def arrays(dtype, two_tensors=False):
    """(q [3, 2, ...], k_cache and v_cache [12, 16, ...], factors); there may be no v_cache."""
    heads_kv = 2 if two_tensors else 1
    q, k, v = random((3, 2, 8, HEAD_DIM), *2 * ((12, 16, heads_kv, HEAD_DIM),))
    v = v[..., :HEAD_DIM_V] if two_tensors else None
    factors = {}
    if dtype.startswith("float8"):
        k, v = jax.tree.map(lambda x: x.astype(jnp.float8_e4m3fn), (k, v))
        factors["k_descale"] = jnp.array([[0.5], [2.0], [0.25]])
        if two_tensors:
            factors["v_descale"] = jnp.array([[1.5, 0.5]])
        if dtype == "float8":
            factors["q_descale"] = jnp.array([[1.0], [0.5], [3.0]])
    else:
        k, v = jax.tree.map(lambda x: x.astype(dtype), (k, v))
    q = q.astype("bfloat16" if dtype == "float8 cache" else k.dtype)
    return q, k, v, factors


def equal(attend, traced, fixed):
    """The results, after a comparison with NumPy arrays of the eager and of the compiled call."""
    want = tilewise.attention_with_kvcache(**host(traced), **fixed)
    got = attend(**traced, **fixed)
    shapes = [(x.shape, x.dtype) for x in got]
    assert shapes == [(x.shape, x.dtype) for x in want]
    bound = None if traced["q"].dtype == np.float32 else ROUNDED_WEIGHTS
    assert same(got, want, bound)
    assert same(jax.jit(partial(attend, **fixed))(**traced), want, bound)
    return got


# --- latent caches --------------------------------------------------------------------------------


def latent(layout, dtype):
    """The traced and the other arguments of a call on a latent cache with room for 64 keys."""
    q, cache, _, factors = arrays(dtype)
    traced = dict(cache_seqlens=LENGTHS, **factors)
    fixed = dict(head_dim_v=HEAD_DIM_V, causal=True, scale=0.2, **RESULTS)
    if "pages" in layout:
        traced["block_table"] = np.arange(12, dtype=np.int32)[::-1].reshape(3, 4)
    else:
        cache = cache.reshape(3, 64, 1, HEAD_DIM)
    if layout == "rows of a cache":
        traced["cache_batch_idx"] = np.array([2, 2, 0], np.int32)
        traced["cache_leftpad"] = np.array([7, 0, 1], np.int32)
        fixed["mask"] = masks.Tree.from_parents([-1, 0])
    if layout == "packed pages":
        q, traced["cu_seqlens_q"] = q.reshape(6, 8, HEAD_DIM), STARTS
    return traced | dict(q=q, k_cache=cache), fixed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["dense", "rows of a cache", "pages", "packed pages"])
def test_latent_caches_have_the_bits_of_numpy_arrays(layout, dtype):
    traced, fixed = latent(layout, dtype)
    got = equal(tj.attention_with_kvcache, traced, fixed)
    # Two tensors with the same contents are another problem with the same results.
    factors = {"v_descale": traced["k_descale"]} if "k_descale" in traced else {}
    values = dict(fixed, head_dim_v=None, v_cache=traced["k_cache"][..., :HEAD_DIM_V])
    assert same(got, tj.attention_with_kvcache(**traced, **values, **factors), ROUNDED_WEIGHTS)
    wide = tj.attention_with_kvcache(**traced, **fixed | dict(out_dtype="float32"))[0]
    assert wide.dtype == jnp.float32
    assert same_but_for_weights(wide.astype(got[0].dtype), got[0], ROUNDED_WEIGHTS)


def test_latent_caches_in_loops_and_of_mapped_arrays():
    traced, fixed = latent("pages", "bfloat16")

    def attend(lengths, q=traced["q"]):
        return tj.attention_with_kvcache(**traced | dict(q=q, cache_seqlens=lengths), **fixed)

    lengths = jnp.asarray(LENGTHS) - jnp.arange(3)[:, None]
    want = jax.tree.map(lambda *x: jnp.stack(x), *[attend(x) for x in lengths])
    assert same(jax.jit(jax.vmap(attend))(lengths), want)
    step = lambda lengths, _: (lengths - 1, attend(lengths))  # noqa: E731
    assert same(jax.lax.scan(step, lengths[0], None, 3)[1], want)
    dense, fixed = latent("dense", "float8")

    def folded(q, cache):
        return tj.attention_with_kvcache(**dense | dict(q=q, k_cache=cache), **fixed)

    each = [jnp.stack([x, -x]) for x in (dense["q"], dense["k_cache"])]
    assert str(jax.make_jaxpr(jax.vmap(folded))(*each)).count("scan") == 0
    want = jax.tree.map(lambda *x: jnp.stack(x), *[folded(*x) for x in zip(*each, strict=True)])
    assert same(jax.vmap(folded)(*each), want)


@pytest.mark.parametrize("name", ["block_table", "indices"])
def test_no_column_of_a_cache_is_copied(name):
    """The cache is the largest array by far, so a copy would be most of the temporary memory."""
    cache, q = jnp.ones((512, 16, 1, 288), jnp.bfloat16), jnp.ones((1, 1, 4, 288), jnp.bfloat16)
    given = jnp.zeros((1, 32) if name == "block_table" else (1, 1, 32), jnp.int32)

    def attend(q, cache, given):
        return tj.attention_with_kvcache(q, cache, head_dim_v=256, **{name: given})

    memory = jax.jit(attend).lower(q, cache, given).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.nbytes / 4


# --- selected keys --------------------------------------------------------------------------------


def selected(dtype, two_tensors=False, packed=False, keys=90):
    """The traced and the other arguments; indices repeat, are negative, or lead past the cache."""
    q, k, v, factors = arrays(dtype, two_tensors)
    generator = np.random.default_rng(7)
    indices = generator.integers(-40, 12 * 16 + 40, (3, 2, keys), np.int32)
    indices[0, 0], indices[1, :, ::7] = -1, np.iinfo(np.int32).max
    traced = dict(q=q, k_cache=k, indices=indices, **factors)
    if two_tensors:
        traced["v_cache"] = v
    if packed:
        shaped = dict(q=q.reshape(6, 8, HEAD_DIM), indices=indices.reshape(6, keys))
        traced |= dict(shaped, cu_seqlens_q=STARTS)
    return traced, dict(RESULTS) if two_tensors else dict(RESULTS, head_dim_v=HEAD_DIM_V)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("two_tensors", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_selected_keys_have_the_bits_of_numpy_arrays(packed, two_tensors, dtype):
    traced, fixed = selected(dtype, two_tensors, packed)
    out, lse, max_logits = equal(tj.attention_with_kvcache, traced, fixed)
    first = (0,) if packed else (0, 0)
    assert not out[first].any() and np.isneginf(lse[0, 0] if packed else lse[0, :, 0]).all()
    if packed:  # rows that belong to no sequence, and a sequence without rows
        assert not out[4:].any() and np.isneginf(lse[:, 4:]).all()
        assert np.isneginf(max_logits[1]).all()


OPTIONS = {
    "softcap, sinks, scale": (dict(softcap=3.0), dict(sinks=np.arange(8, dtype=np.float32))),
    "an array as scale": (dict(num_splits=3), dict(scale=np.float32([0.1]))),
    "lengths and pages, which say nothing": (
        dict(batch_invariant=True),
        dict(cache_seqlens=LENGTHS, block_table=np.zeros((3, 1), np.int32)),
    ),
    "no key": (dict(out_dtype="float32"), dict(indices=np.zeros((3, 2, 0), np.int32))),
    "no row": (
        {}, dict(q=np.zeros((3, 0, 8, HEAD_DIM), np.float32), indices=np.ones((3, 0, 5), np.int32))
    ),
    "no sequence": (
        {}, dict(q=np.zeros((0, 2, 8, HEAD_DIM), np.float32), indices=np.ones((0, 2, 5), np.int32))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_beside_selected_keys(name):
    traced, fixed = selected("float32")
    more, given = OPTIONS[name]
    equal(tj.attention_with_kvcache, traced | given, fixed | more)


def test_rows_of_no_sequence_need_no_factor():
    traced, fixed = selected("float8 cache", packed=True)
    traced |= dict(cu_seqlens_q=np.zeros(1, np.int32), k_descale=np.ones((1, 1), np.float32))
    out, lse, max_logits = tj.attention_with_kvcache(**traced, **fixed)
    assert not out.any() and np.isneginf(lse).all() and max_logits.shape == (0, 8)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_selected_keys_equal_the_oracle(dtype):
    """A cache with pages of one row, whose block table says which rows are seen."""
    case = Case(
        dtype, rows=(1,) * 4, keys=(60, 7, 64, 9), group=16, head_dim=96, head_dim_v=64,
        latent=True, page_size=1, used_k=(33, 7, 64, 0), sinks=True, softcap=4.0, max_logits=True,
    )  # fmt: skip
    built, leaves, options = test_jax.arguments(case)
    used, table = built.meta["seqused_k"], np.asarray(built.meta["block_table"].cpu())
    seen = np.arange(table.shape[1]) < np.asarray(used.cpu())[:, None]
    indices = jnp.asarray(np.where(seen, table, -1)[:, None, ::-1].astype(np.int32))
    q, k, _ = (leaves.pop(x) for x in "qkv")
    run = partial(tj.attention_with_kvcache, head_dim_v=64, **options, **RESULTS)
    out, lse, logits = jax.jit(run)(q, k, indices=indices, **leaves)
    want = built.expected()
    yard = test_jax.yard_of(built, want)
    check_out(test_jax.to_float64(out, 3), want, case.dtype, yard, "selected")
    check_lse(test_jax.heads_last(lse), want.lse, case.dtype, yard, "selected")
    found = np.asarray(logits, float)
    check_lse(found, want.max_logits, case.dtype, yard, "selected", "max_logits")


@pytest.mark.parametrize("packed", [False, True])
def test_selected_keys_of_mapped_arrays(packed):
    traced, fixed = selected("bfloat16", packed=packed)
    queries = jnp.stack([traced["q"], -traced["q"]])
    indices = jnp.stack([traced["indices"], traced["indices"][..., ::-1] // 2])

    def attend(q, indices):
        return tj.attention_with_kvcache(**traced | dict(q=q, indices=indices), **fixed)

    alone = [attend(*x) for x in zip(queries, indices, strict=True)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    assert same(jax.jit(jax.vmap(attend))(queries, indices), want)
    _, scanned = jax.lax.scan(lambda _, x: (None, attend(*x)), None, (queries, indices))
    assert same(scanned, want)


def test_selected_keys_with_64_bits():
    """JAX then computes indices in 64 bits, which the kernels do not read."""
    traced, fixed = selected("bfloat16", packed=True)
    want = tj.attention_with_kvcache(**traced, **fixed)
    with jax.enable_x64(True):
        assert same(tj.attention_with_kvcache(**traced, **fixed), want)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(cu_seqlens_q=np.array([0, 1, 4, 9], np.int32)), r"cu_seqlens_q\[3\] is 9"),
        (dict(cu_seqlens_q=np.array([0, 3, 2, 6], np.int32)), r"cu_seqlens_q\[2\] is 2"),
        (dict(max_seqlen_q=2), "max_seqlen_q is 2"),
    ],
)
def test_packed_rows_out_of_range(changed, message):
    """They fail the computation on a CPU, as without indices, and are NaN on a GPU."""
    traced, fixed = selected("float32", packed=True)
    attend = partial(tj.attention_with_kvcache, **traced | fixed | changed)
    if ON_GPU:
        assert np.isnan(attend()[0]).any()
        return
    with pytest.raises(Exception, match=f"tilewise: {message}"):
        jax.block_until_ready(attend())


# --- refusals -------------------------------------------------------------------------------------

LATENT = dict(head_dim_v=HEAD_DIM_V)
SELECTED = dict(LATENT, indices=np.zeros((3, 2, 5), np.int32))
PAIR = "are both given, but"
REFUSED = {
    "no values": ({}, "v_cache is None, but must be given, or head_dim_v for a latent cache"),
    "two caches": (
        dict(LATENT, v_cache=np.ones((12, 16, 1, 32))),
        f"v_cache and head_dim_v {PAIR}",
    ),
    "v_descale": (dict(LATENT, v_descale=np.ones((1, 1))), f"v_descale and head_dim_v {PAIR}"),
    "all columns": (dict(head_dim_v=40), "head_dim_v is 40, but must be at least 1 and less than"),
    "no column": (dict(head_dim_v=0), "head_dim_v is 0, but must be at least 1 and less than"),
    "a fraction": (dict(head_dim_v=1.5), "head_dim_v is .*, but must be an integer"),
    "no row for each sequence": (LATENT, "k_cache has batch size 12, but must have 3 like q"),
    "causal": (dict(SELECTED, causal=True), f"causal or window and indices {PAIR}"),
    "window": (dict(SELECTED, window=(3, None)), f"causal or window and indices {PAIR}"),
    "bias": (dict(SELECTED, bias=np.zeros((2, 96))), f"bias and indices {PAIR}"),
    "mask": (dict(SELECTED, mask=masks.Tree([1, 2])), f"mask and indices {PAIR}"),
    "slopes": (dict(SELECTED, alibi_slopes=np.zeros(8)), f"alibi_slopes and indices {PAIR}"),
    "padding": (dict(SELECTED, cache_leftpad=np.zeros(3)), f"cache_leftpad and indices {PAIR}"),
    "rows": (dict(SELECTED, indices=np.zeros((3, 1, 5), np.int32)), r"indices has shape \[3, 1, 5"),
    "splits": (
        dict(SELECTED, num_splits=2, batch_invariant=True),
        "num_splits is 2 and batch_invariant is True",
    ),
    "dtype": (dict(SELECTED, indices=np.zeros((3, 2, 5), np.float32)), "indices has dtype float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_have_the_sentences_of_numpy_arrays(name):
    q, cache, _, _ = arrays("float32")
    options, message = REFUSED[name]
    for function, x in ((tj, (q, cache)), (tilewise, host((q, cache)))):
        with pytest.raises((TypeError, ValueError), match=message):
            function.attention_with_kvcache(*x, **options)


def test_derivatives_are_refused():
    traced, fixed = selected("float32", packed=True)
    alone = partial(tj.attention_with_kvcache, **fixed | dict(return_lse=False))
    sum_of = lambda q: alone(**traced | dict(q=q))[0].sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="attention_with_kvcache is for inference"):
        jax.grad(sum_of)(traced["q"])
