"""Options of ``tilewise.jax`` against the bits of NumPy arrays and under JAX's transformations: the
dtypes of out and of what the backward reads; masks and largest logits of caches; float8
queries."""

from __future__ import annotations

from dataclasses import replace
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
from float8_cases import with_float8
from jax_arrays import random, same, same_but_for_weights
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
    assert narrow.dtype == dtype and same_but_for_weights(out.astype(dtype), narrow)
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
    assert same_but_for_weights(out, tj.attention(*inputs))
    assert same(grads, value_and_grads(wide, dout.astype(jnp.float32))[1])
    both = value_and_grads(partial(precise, out_dtype="float32"), dout.astype(jnp.float32))
    assert both[0].dtype == jnp.float32 and same(both[1], grads)
    starts = jnp.array([0, 4, 18], jnp.int32)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (inputs[0], inputs[0])]
    results = [
        tj.attention_varlen(packed[0], *2 * packed[1:], starts, starts, precise_backward=given)
        for given in (False, True)
    ]
    assert results[1].dtype == dtype and same_but_for_weights(*results[::-1])


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


# --- float8 queries -------------------------------------------------------------------------------

EIGHT_BITS = Case("bf16", heads_kv=2, group=2, head_dim=32, head_dim_v=16, softcap=4.0, sinks=True)
FLOAT8_CASES = {
    "attention": replace(EIGHT_BITS, rows=(40,) * 2, keys=(50,) * 2, window=(-1, 0), bias="h"),
    "packed, fp16 out": replace(
        EIGHT_BITS, dtype="fp16", rows=(5, 0, 40), keys=(9, 4, 40), varlen_q=True, varlen_k=True,
        tail_q=3,
    ),
    "pages, float32 out": replace(
        EIGHT_BITS, rows=(1,) * 3, keys=(40, 7, 64), used_k=(33, 7, 64), page_size=16,
        float32_out=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOAT8_CASES)
def test_float8_queries_equal_the_oracle(name):
    case = FLOAT8_CASES[name]
    built, leaves, options = test_jax.arguments(case)
    with_float8(built, factors=True, signed=True, queries=True)
    for each in "qkv":
        codes = built.bytes[each].cpu().numpy()
        leaves[each] = jnp.asarray(codes.view(jnp.float8_e4m3fn))
    for each, factors in built.descales.items():
        options[each] = test_jax.to_jax(factors)
    options.setdefault("out_dtype", str(test_jax.FLOATS[built.dtype].dtype))
    meta = {n: test_jax.to_jax(x) for n, x in built.meta.items()}
    attend = tj.attention_varlen if case.varlen_q else tj.attention
    if case.page_size:
        meta = dict(block_table=meta["block_table"], cache_seqlens=meta["seqused_k"])
        q, k, v = (leaves.pop(x) for x in "qkv")
        attend = partial(tj.attention_with_kvcache, q, k, v)
    out, lse = jax.jit(partial(attend, **options, return_lse=True))(**leaves, **meta)
    want = built.expected()
    yard = test_jax.yard_of(built, want)
    assert out.dtype == options["out_dtype"]
    check_out(test_jax.to_float64(out, 3), want, case.dtype, yard, name)
    check_lse(test_jax.heads_last(lse), want.lse, case.dtype, yard, name)


def float8():
    """q, k, v and descales that are broadcast in different ways."""
    inputs = [x.astype(jnp.float8_e4m3fn) for x in arrays("float32")]
    factors = jnp.array([[0.5], [2.0]]), jnp.array([[0.25, 1.5]]), jnp.array([[0.5, 1.0], [2, -1]])
    return inputs, dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))


@pytest.mark.parametrize("out_dtype", [None, *DTYPES, "float32"])
def test_float8_queries_have_the_bits_of_numpy_arrays(out_dtype):
    inputs, factors = float8()
    options = dict(causal=True, return_lse=True, return_max_logits=True, out_dtype=out_dtype)
    got = jax.jit(partial(tj.attention, **options))(*inputs, **factors)
    want = tilewise.attention(*host(inputs), **host(factors), **options)
    assert got[0].dtype == (out_dtype or "bfloat16") and got[0].dtype == want[0].dtype
    assert same(got, want, ROUNDED_WEIGHTS)
    plain = tj.attention(*inputs, **options)
    assert (got[1] != plain[1]).any()
    assert same(tj.dot_product_attention(*inputs), tj.attention(*inputs))
    lengths = np.array([11, 7], np.int32)
    options = dict(cache_seqlens=lengths, out_dtype=out_dtype)
    got = tj.attention_with_kvcache(*inputs, **factors, **options)
    want = tilewise.attention_with_kvcache(*host(inputs), **host(factors), **options)
    assert same(got, want, ROUNDED_WEIGHTS)


def test_float8_queries_are_mapped_by_one_call():
    (q, k, v), factors = float8()
    more = jnp.stack([q, -q, q[::-1]]), jnp.array([1.0, 0.5, 3.0])

    def attend(q, factor):
        given = factors | dict(q_descale=factor * factors["q_descale"])
        return tj.attention(q, k, v, **given, causal=True)

    mapped = jax.vmap(attend)
    assert str(jax.make_jaxpr(mapped)(*more)).count("tilewise_forward") == 1
    assert same(mapped(*more), jnp.stack([attend(*x) for x in zip(*more, strict=True)]))


ONLY_FORWARD = "q has dtype float8_e4m3fn, of which there is only the forward"
DERIVED = {
    "gradient of q": lambda q, k, v: jax.grad(lambda q: tj.attention(q, k, v).sum())(q),
    "tangent of v": lambda q, k, v: jax.jvp(lambda v: tj.attention(q, k, v), (v,), (v,)),
    "gradient of sinks": lambda q, k, v: jax.grad(
        lambda sinks: tj.attention(q, k, v, sinks=sinks).sum()
    )(jnp.ones(4)),
    "gradient of q_descale": lambda q, k, v: jax.grad(
        lambda factor: tj.attention(q, k, v, q_descale=factor).sum()
    )(jnp.ones((2, 2))),
    "rounded inside": lambda q, k, v: jax.grad(
        lambda x: tj.attention(x.astype(jnp.float8_e4m3fn), k, v).sum()
    )(q.astype(jnp.float32)),
    "precise_backward": partial(tj.attention, precise_backward=True),
}


@pytest.mark.parametrize("name", DERIVED)
def test_derivatives_of_float8_queries_are_refused(name):
    inputs, _ = float8()
    with pytest.raises(NotImplementedError, match=ONLY_FORWARD):
        DERIVED[name](*inputs)


@pytest.mark.parametrize(
    "changed, error, message",
    [
        (dict(k="bfloat16"), TypeError, "k has dtype bfloat16, but must have float8_e4m3fn like q"),
        (dict(q="float8_e5m2"), TypeError, "q has dtype float8_e5m2, but must be float32, float16"),
        (dict(q="bfloat16"), ValueError, "q_descale is given, but belongs to float8_e4m3 queries"),
    ],
)
def test_dtypes_beside_float8_that_are_refused(changed, error, message):
    inputs, factors = float8()
    given = dict(zip("qkv", inputs, strict=True))
    given |= {name: given[name].astype(dtype) for name, dtype in changed.items()}
    with pytest.raises(error, match=message):
        tj.attention(**given, **factors)


@pytest.mark.parametrize(
    "given, out_dtype, allowed",
    [("float16", None, "bfloat16"), ("bfloat16", "float16", "float16")],
)
def test_the_dtype_of_a_bias_beside_float8_follows_out(given, out_dtype, allowed):
    inputs, factors = float8()
    message = f"bias has dtype {given}, but must be float32 or {allowed}"
    with pytest.raises(TypeError, match=message):
        tj.attention(*inputs, **factors, bias=jnp.zeros(1, given), out_dtype=out_dtype)
