"""Options of ``tilewise.jax`` against the bits of NumPy arrays and under JAX's transformations: the
dtypes of out and of what the backward reads; masks and largest logits of caches."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-jax` installs it")
import jax.numpy as jnp

import tilewise
import tilewise.jax as tj
from jax_arrays import random, same
from tilewise import masks

pytestmark = pytest.mark.jax

DTYPES = ["float16", "bfloat16"]
# A GPU rounds weights to 16 bits, so float32 results of 16-bit inputs differ from those of a CPU.
ROUNDED_WEIGHTS = 2**-7
wide = partial(tj.attention, out_dtype=jnp.float32)


def arrays(dtype, rows=9, keys=11):
    return random((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 8), dtype=dtype)


def host(tree):
    return jax.tree.map(np.asarray, tree)


# --- out_dtype ------------------------------------------------------------------------------------

STARTS = dict(
    cu_seqlens_q=np.array([0, 4, 11, 17], np.int32), cu_seqlens_k=np.array([0, 9, 9, 22], np.int32)
)
CALLS = {
    "attention": ("attention", dict(causal=True, softcap=5.0)),
    "packed": ("attention_varlen", dict(window=(5, 0), **STARTS)),
    "cache": ("attention_with_kvcache", dict(cache_seqlens=np.array([11, 7], np.int32))),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_float32_out_has_the_bits_of_numpy_arrays(name, dtype):
    function, options = CALLS[name]
    inputs = arrays(dtype)
    if name == "packed":
        inputs = [x.reshape(-1, *x.shape[2:]) for x in inputs]
    run = jax.jit(partial(getattr(tj, function), return_lse=True, **options, out_dtype="float32"))
    out, lse = run(*inputs)
    shape = jax.eval_shape(run, *inputs)[0]
    assert (shape.shape, shape.dtype) == (out.shape, out.dtype) and out.dtype == jnp.float32
    options = dict(options, return_lse=True, out_dtype=np.float32)
    assert same((out, lse), getattr(tilewise, function)(*host(inputs), **options), ROUNDED_WEIGHTS)
    narrow = getattr(tj, function)(*inputs, **CALLS[name][1], out_dtype=dtype)
    assert narrow.dtype == dtype and same(out.astype(dtype), narrow)
    assert (out != narrow).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_derivatives_of_float32_out_have_the_bits_of_numpy_arrays(dtype):
    """The gradient of out is rounded to the dtype of q, the tangent of out is float32."""
    inputs = arrays(dtype)
    moves, dout = random(*(x.shape for x in inputs), dtype=dtype, seed=5), random((2, 9, 4, 8))[0]
    attend = partial(wide, causal=True, return_lse=True)
    (out, lse), pullback = jax.vjp(attend, *inputs)
    grads = pullback((dout, jnp.zeros_like(lse)))
    given = (*host(inputs), *host((out, lse)))
    want = tilewise.attention_backward(np.asarray(dout.astype(dtype)), *given, causal=True)
    assert all(x.dtype == dtype for x in grads)
    assert same(grads, (want.dq, want.dk, want.dv), 2**-6)
    tangents = jax.jvp(attend, inputs, moves)[1]
    want = tilewise.attention_jvp(tilewise.Tangents(*host(moves)), *given, causal=True)
    assert tangents[0].dtype == jnp.float32
    assert same(tangents, want, 2**-6)


def test_float32_out_of_mapped_arrays():
    q, k = random((3, 2, 9, 4, 16), (2, 11, 2, 16), dtype=jnp.bfloat16)
    value = jax.value_and_grad(lambda q, k: (wide(q, k, k, causal=True) ** 2).sum(), (0, 1))
    mapped = jax.jit(jax.vmap(value, (0, None)))
    assert str(jax.make_jaxpr(mapped)(q, k)).count("tilewise_forward") == 1
    alone = [jax.jit(value)(x, k) for x in q]
    assert same(mapped(q, k), jax.tree.map(lambda *x: jnp.stack(x), *alone), 2**-6)


# --- precise_backward -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_precise_backward_has_the_out_and_the_gradients_of_both_dtypes(dtype):
    """out is the one without the option, and gradients are those of an out of float32."""
    inputs = arrays(dtype)
    dout = random((2, 9, 4, 8), dtype=dtype)[0]

    def value_and_grads(attend, dout):
        out, pullback = jax.vjp(attend, *inputs)
        return out, pullback(dout)

    precise = partial(tj.attention, precise_backward=True)
    out, grads = value_and_grads(precise, dout)
    assert same(out, tj.attention(*inputs))
    assert same(grads, value_and_grads(wide, dout.astype(jnp.float32))[1])
    both = value_and_grads(partial(precise, out_dtype="float32"), dout.astype(jnp.float32))
    assert both[0].dtype == jnp.float32 and same(both[1], grads)
    starts = jnp.array([0, 4, 18], jnp.int32)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (inputs[0], inputs[0])]
    results = [
        tj.attention_varlen(packed[0], *2 * packed[1:], starts, starts, precise_backward=given)
        for given in (False, True)
    ]
    assert results[1].dtype == dtype and same(*results)


def exact_attention(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k), -1)
    return jnp.einsum("bhij,bjhd->bihd", p, v)


def test_precise_backward_of_saturated_rows():
    """One weight of two is close to 1: delta and dp cancel to a small part of themselves."""

    def error(seed, **options):
        q, k, v, dout = random(*4 * ((1, 2, 1, 96),), dtype=jnp.float16, seed=seed)

        def derive(attend, x, dout):
            return jax.grad(lambda q, k: (attend(q, k, x[2]) * dout).sum(), (0, 1))(*x[:2])

        got = derive(partial(tj.attention, scale=1.0, **options), (q, k, v), dout)
        with jax.enable_x64(True):
            to64 = lambda a: jnp.asarray(np.asarray(a), jnp.float64)  # noqa: E731
            want = host(derive(exact_attention, [*map(to64, (q, k, v))], to64(dout)))
        off = max(np.abs(np.asarray(a, float) - b).max() for a, b in zip(got, want, strict=True))
        return off / max(np.abs(b).max() for b in want)

    for seed in (3, 11, 13):
        assert error(seed) > 0.2
        assert error(seed, precise_backward=True) < 5e-3


# --- caches: masks and largest logits -------------------------------------------------------------

TREE = masks.Tree.from_parents([-1, 0, 0, 1, -1])
DEEP = masks.Tree.from_parents([-1, 0, 1, 2, 3])
# Lengths with draft keys in one block, across two blocks, and fewer keys than rows.
LENGTHS = np.array([150, 3, 129, 300], np.int32)
PAGES = np.arange(40, dtype=np.int32)[::-1].reshape(4, 10)
STARTS_OF_ROWS = np.array([0, 5, 5, 8, 9], np.int32)


def cache(layout):
    """q, the caches and the options of a call; 4 sequences with room for 320 keys."""
    q, k, v = random((4, 5, 4, 16), (4, 320, 2, 16), (4, 320, 2, 8))
    if layout == "left padding":
        return (q, k, v), dict(cache_leftpad=np.array([2, 0, 100, 0], np.int32))
    if layout == "rows of a cache":
        return (q, k, v), dict(cache_batch_idx=np.array([2, 3, 1, 0], np.int32))
    k, v = (x.reshape(40, 32, 2, -1) for x in (k, v))
    if layout == "pages":
        return (q, k, v), dict(block_table=PAGES, window=(200, -1))
    return (q.reshape(20, 4, 16), k, v), dict(block_table=PAGES, cu_seqlens_q=STARTS_OF_ROWS)


MASKS = {
    "tree": TREE,
    "tree of each sequence": masks.Tree([[31, 3, 5, 9, 16], [31] * 5, [1, 2, 4, 8, 16], [17] * 5]),
    "ranges": masks.Ranges([[0, 3], [3, 5]], [[0, 90], [60, 400]]),
    "blocks": masks.from_bool(np.arange(5 * 320).reshape(5, 320) % 7 < 4),
}


@pytest.mark.parametrize("layout", ["left padding", "rows of a cache", "pages", "packed pages"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_caches_have_the_bits_of_numpy_arrays(name, layout):
    inputs, options = cache(layout)
    options |= dict(cache_seqlens=LENGTHS)
    more = dict(mask=MASKS[name], return_lse=True, return_max_logits=True)
    want = tilewise.attention_with_kvcache(*host(inputs), **options, **more)
    fixed = {n: x for n, x in options.items() if n == "window"}
    traced = {n: x for n, x in options.items() if n not in fixed}
    attend = partial(tj.attention_with_kvcache, **more, **fixed)
    assert same(attend(*inputs, **traced), want)
    assert same(jax.jit(attend)(*inputs, **traced), want)
    out, logits = attend(*inputs, **traced, return_lse=False)
    assert logits.shape == (4, 4) and same((out, logits), (want[0], want[2]))
    hidden = want[0] != attend(*inputs, **traced, mask=None)[0]
    assert hidden.any()


def test_trees_in_loops_and_of_mapped_lengths():
    """The lists of a tree depend on lengths that change inside the computation."""
    inputs, options = cache("pages")

    def attend(lengths):
        given = dict(options, cache_seqlens=lengths, mask=TREE)
        return tj.attention_with_kvcache(*inputs, **given, return_max_logits=True)

    every = jnp.asarray(LENGTHS) + 10 * jnp.arange(3)[:, None]
    alone = [attend(lengths) for lengths in every]
    want = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    assert same(jax.jit(jax.vmap(attend))(every), want)
    step = lambda lengths, _: (lengths + 10, attend(lengths))  # noqa: E731
    assert same(jax.lax.scan(step, every[0], None, 3)[1], want)


def test_rows_past_those_of_a_tree_see_nothing():
    """The lengths of packed sequences are known only when the computation runs."""
    inputs, options = cache("packed pages")
    out = tj.attention_with_kvcache(*inputs, **options, cache_seqlens=LENGTHS, mask=DEEP)
    short = masks.Tree(DEEP.bits[:, :3])
    less = tj.attention_with_kvcache(*inputs, **options, cache_seqlens=LENGTHS, mask=short)
    assert same(less, out.at[3:5].set(0.0))


@pytest.mark.parametrize(
    "layout, mask, message",
    [
        ("pages", masks.Tree([1, 2, 4]), "mask is a tree of 3 rows, but q has 5"),
        ("packed pages", masks.Tree([[1]] * 3), "mask has batch 3, but must have 1 or 4 like q"),
        ("pages", masks.from_bool(np.ones((5, 32), bool)), "must be for 5 rows and 320 keys"),
    ],
)
def test_masks_that_do_not_fit_a_cache(layout, mask, message):
    inputs, options = cache(layout)
    with pytest.raises(ValueError, match=message):
        tj.attention_with_kvcache(*inputs, **options, mask=mask)
