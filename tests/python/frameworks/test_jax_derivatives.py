"""Forward mode and second derivatives of ``tilewise.jax``, against attention in plain JAX in
float64 and by identities that need no reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-jax` installs it")
import jax.numpy as jnp

import tilewise
import tilewise.jax as tj
from jax_arrays import close, random, same
from tilewise import _abi, _describe

pytestmark = pytest.mark.jax

EVERY = tuple(range(6))


def dense(q, k, v, bias, sinks, scale, *, window, softcap):
    """(out, lse) with the options of ``tilewise.jax.attention``, as its documentation defines them;
    products have the dtype of q, weights are computed in float32 or float64."""
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    s = jnp.einsum("bihd,bjhd->bhij", q, k).astype(scale.dtype) * scale
    s = softcap * jnp.tanh(s / softcap)
    rows, keys = s.shape[-2:]
    ahead = jnp.arange(keys) - jnp.arange(rows)[:, None] - (keys - rows)
    left, right = window
    seen = (ahead >= -left) & (ahead <= right)
    s = jnp.where(seen, s + bias, -jnp.inf)
    s = jnp.concatenate([jnp.broadcast_to(sinks[:, None, None], (*s.shape[:-1], 1)), s], -1)
    lse = jax.nn.logsumexp(s, -1)
    p = jnp.exp(s - lse[..., None])[..., 1:].astype(q.dtype)
    return jnp.einsum("bhij,bjhd->bihd", p, v), lse


def ours(q, k, v, bias, sinks, scale, **options):
    return tj.attention(q, k, v, bias=bias, sinks=sinks, scale=scale, return_lse=True, **options)


OPTIONS = dict(window=(4, 1), softcap=3.0)


def problem(dtype=jnp.float32, rows=5, keys=7, dims=(6, 3)):
    """Inputs with grouped heads and a head dimension of v's own, and tangents of all."""
    shapes = (2, rows, 4, dims[0]), (2, keys, 2, dims[0]), (2, keys, 2, dims[1])
    x, t = (
        (*random(*shapes, dtype=dtype, seed=seed), *random((4, 1, keys), (4,), seed=seed + 1))
        for seed in (3, 7)
    )
    return (*x, jnp.float32(0.4)), (*t, jnp.float32(-0.7))


def loss(f):
    def run(*x):
        out, lse = f(*x)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.sin(lse).sum()

    return run


def inner(one, other):
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum((a.astype(jnp.float32) * b.astype(jnp.float32)).sum() for a, b in pairs)


def grad_of_grad(f, x, t):
    gradient = jax.grad(loss(f), EVERY)
    return jax.grad(lambda *x: inner(gradient(*x), t), EVERY)(*x)


def mean_flow(f, x, t, *, detached):
    """The gradient of a loss that has the tangent along q."""

    def run(weight):
        out, tangent = jax.jvp(lambda q: f(q * weight, *x[1:])[0], x[:1], t[:1])
        tangent = jax.lax.stop_gradient(tangent) if detached else tangent
        return ((out - 0.5 * tangent) ** 2).mean()

    return jax.grad(run)(jnp.linspace(0.5, 1.5, x[0].shape[-1], dtype=x[0].dtype))


FORWARD, JVP, BACKWARD, SECOND = (
    f"tilewise_{name}" for name in ("forward", "jvp", "backward", "second")
)
# Each use, and how often each kernel runs in it under jax.jit.
USES = {
    "jvp": (lambda f, x, t: jax.jvp(f, x, t), {FORWARD: 1, JVP: 1}),
    "jvp of q": (
        lambda f, x, t: jax.jvp(lambda q: f(q, *x[1:]), x[:1], t[:1]), {FORWARD: 1, JVP: 1}
    ),
    "linearize": (lambda f, x, t: jax.linearize(f, *x)[1](*t), {FORWARD: 1, JVP: 1}),
    "jacfwd": (lambda f, x, t: jax.jacfwd(f, (0, 1, 2))(*x), {FORWARD: 1, JVP: 1}),
    "grad": (
        lambda f, x, t: jax.grad(loss(f), EVERY)(*x), {FORWARD: 1, BACKWARD: 1}
    ),
    "MeanFlow": (partial(mean_flow, detached=True), {FORWARD: 1, JVP: 1, BACKWARD: 1}),
    "MeanFlow, through the tangent": (
        partial(mean_flow, detached=False), {FORWARD: 1, JVP: 1, BACKWARD: 2, SECOND: 1}
    ),
    "jvp of grad": (
        lambda f, x, t: jax.jvp(jax.grad(loss(f), EVERY), x, t)[1],
        {FORWARD: 1, JVP: 1, SECOND: 1},
    ),
    "grad of jvp": (
        lambda f, x, t: jax.grad(lambda *x: jax.jvp(loss(f), x, t)[1], EVERY)(*x),
        {FORWARD: 1, JVP: 1, BACKWARD: 1, SECOND: 1},
    ),
    "grad of grad": (grad_of_grad, {FORWARD: 1, JVP: 1, BACKWARD: 1, SECOND: 1}),
    "grad of a function of t": (
        lambda f, x, t: jax.grad(lambda *t: inner(*2 * (jax.jvp(f, x, t)[1],)), EVERY)(*t),
        {FORWARD: 1, JVP: 1, BACKWARD: 1},
    ),
    "transposed product with the Hessian": (
        lambda f, x, t: jax.linear_transpose(
            lambda *t: jax.jvp(jax.grad(loss(f), EVERY), x, t)[1], *t
        )(t),
        {FORWARD: 1, JVP: 1, BACKWARD: 1, SECOND: 1},
    ),
}  # fmt: skip


def check(got, plain, exact, factor=3.0, unit=2e-6):
    """Compares with float64: as many times the error of plain JAX as ``factor`` are allowed."""
    for one, other, want in zip(*map(jax.tree.leaves, (got, plain, exact)), strict=True):
        one, other, want = (np.asarray(a).astype(np.float64) for a in (one, other, want))
        bound = factor * abs(other - want).max() + unit * abs(want).max()
        assert one.shape == want.shape
        assert abs(one - want).max() <= bound


def plain_and_exact(use, x, t):
    """The use of attention in plain JAX, in the dtypes of x and in float64."""
    run = jax.jit(partial(use, partial(dense, **OPTIONS)))
    with jax.enable_x64(True):
        return run(x, t), run(*jax.tree.map(lambda a: a.astype(jnp.float64), (x, t)))


@pytest.mark.parametrize("use", USES)
def test_uses_equal_plain_jax(use):
    run, calls = USES[use]
    x, t = problem()
    compiled = jax.jit(partial(run, partial(ours, **OPTIONS))).lower(x, t).compile()
    text = compiled.as_text()
    found = {n: text.count(f'custom_call_target="{n}"') for n in (FORWARD, JVP, BACKWARD, SECOND)}
    assert {n: count for n, count in found.items() if count} == calls
    check(compiled(x, t), *plain_and_exact(run, x, t))


NESTED = {
    "hessian": lambda f, x, t: jax.hessian(loss(f), (0, 1))(*x),
    "jacrev of jacfwd": lambda f, x, t: jax.jacrev(jax.jacfwd(loss(f), (0, 2)), (0, 3))(*x),
    "jacrev of jacrev": lambda f, x, t: jax.jacrev(jax.jacrev(loss(f), (1, 4)), (1, 5))(*x),
}


@pytest.mark.parametrize("use", NESTED)
def test_hessians_equal_plain_jax(use):
    x, t = problem(rows=3, keys=4, dims=(4, 3))
    got = jax.jit(partial(NESTED[use], partial(ours, **OPTIONS)))(x, t)
    check(got, *plain_and_exact(NESTED[use], x, t))


@pytest.mark.parametrize("out_dtype", [None, "float32"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits(dtype, out_dtype):
    """Tangents have at most the error of plain JAX, second derivatives three times as much."""
    x, t = problem(dtype, 33, 40, (32, 16))
    unit = float(jnp.finfo(dtype).eps) / 2
    for use, factor in (("jvp", 1.0), ("jvp of grad", 3.0), ("grad of grad", 3.0)):
        run, _ = USES[use]
        got = jax.jit(partial(run, partial(ours, **OPTIONS, out_dtype=out_dtype)))(x, t)
        check(got, *plain_and_exact(run, x, t), factor, unit)


# --- every option, by identities that need no reference -------------------------------------------


def packed(q, k, v, *rest, **options):
    """Sequences of 3 and 7 rows with 9 and 5 keys, packed end to end."""
    q, k, v = (a.reshape(-1, *a.shape[2:]) for a in (q, k, v))
    starts = jnp.array([0, 3, 10], jnp.int32), jnp.array([0, 9, 14], jnp.int32)
    names = dict(zip(("bias", "sinks", "scale"), rest, strict=True))
    return tj.attention_varlen(q, k, v, *starts, **names, return_lse=True, **options)


def heads_first(*x, **options):
    return ours(*(a.swapaxes(1, 2) for a in x[:3]), *x[3:], layout="bhsd", **options)


SLOPES = jnp.array([0.5, 0.25, 0.1, 0.0])
DIAGONALS = dict(key_value_seq_lengths=jnp.array([5, 7], jnp.int32), is_causal=True)


def lengths(q, k, v, bias, _sinks, scale):
    return tj.dot_product_attention(q, k, v, bias, scale=scale, **DIAGONALS, return_residual=True)


EVERY_OPTION = {
    "dropout": partial(ours, dropout_p=0.4, dropout_seed=11, softcap=2.0),
    "packed": partial(packed, window=(3, 2), dropout_p=0.2, dropout_seed=5),
    "alibi": partial(heads_first, alibi_slopes=SLOPES, causal=True),
    "mask": partial(ours, mask=tilewise.masks.Ranges([[0, 5], [2, 5]], [[0, 3], [4, 7]])),
    "lengths": lengths,
    "out_dtype": partial(ours, out_dtype=jnp.float32, softcap=2.0),
    "precise_backward": partial(packed, precise_backward=True, window=(3, 2)),
}
TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_adjoint_and_symmetric(name, dtype):
    """<J t, b> = <t, B b> for the tangents J and the gradients B; <H y, z> = <H z, y>, with H y
    forward over reverse and H z reverse over reverse."""
    f = EVERY_OPTION[name]
    x, y = problem(dtype)
    if getattr(f, "func", None) is packed:
        x, y = ((*a[:3], *random((4, 7, 9), seed=5 + i), *a[4:]) for i, a in enumerate((x, y)))
    z = jax.tree.map(lambda a: jnp.flip(a) + 0.25, y)

    @jax.jit
    def run(x, y, z):
        results, pullback = jax.vjp(f, *x)
        b = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size)).reshape(a.shape).astype(a.dtype),
                         results)  # fmt: skip
        gradient = jax.grad(lambda *x: inner(f(*x), b), EVERY)
        tangents, hy = (jax.jvp(g, x, y)[1] for g in (f, gradient))
        hz = jax.grad(lambda *x: inner(gradient(*x), z), EVERY)(*x)
        return tangents, b, pullback(b), hy, hz

    tangents, b, grads, hy, hz = run(x, y, z)

    def size(one, other):
        pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
        norm = lambda a: jnp.linalg.norm(a.astype(jnp.float32).ravel())  # noqa: E731
        return sum(norm(a) * norm(c) for a, c in pairs)

    assert abs(inner(tangents, b) - inner(grads, y)) <= TOLERANCE[dtype] * size(grads, y)
    assert abs(inner(hy, z) - inner(hz, y)) <= TOLERANCE[dtype] * size(hy, z)


def test_hidden_keys_and_rows_without_keys():
    """A NaN in the tangent of a key that no row sees changes nothing; empty rows get zeros."""
    q, k, v, dq, dk, dv = random(*2 * ((2, 5, 4, 6), (2, 7, 2, 6), (2, 7, 2, 3)))
    causal = partial(tj.attention, causal=True, return_lse=True)
    few = (q, k[:, :3], v[:, :3])  # of 5 rows, the first 2 see no key
    out, lse = jax.jvp(causal, few, (dq, dk[:, :3], dv[:, :3]))[1]
    assert not out[:, :2].any()
    assert not lse[:, :, :2].any()
    assert jnp.isfinite(out).all()
    banded = partial(tj.attention, window=(2, 0), return_lse=True)
    q, dq = q[:, :3], dq[:, :3]  # of 7 keys, no row sees the first 2
    want = jax.jvp(banded, (q, k[:, 2:], v[:, 2:]), (dq, dk[:, 2:], dv[:, 2:]))[1]
    dk, dv = dk.at[:, :2].set(jnp.nan), dv.at[:, :2].set(jnp.inf)
    close(jax.jvp(banded, (q, k, v), (dq, dk, dv))[1], want)


# --- vmap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", ["q, k and v", "bias"])
def test_vmap(shared):
    """Each element has the bits that it has alone. Calls are folded into one, unless the bias has
    a tangent and a gradient."""
    x, t = problem()
    moved = 3 if shared == "q, k and v" else 4
    f = partial(ours, **OPTIONS)

    def product(x, t):
        gradient = jax.grad(lambda *y: loss(f)(*y, *x[moved:]), tuple(range(moved)))
        return jax.jvp(gradient, x[:moved], t[:moved])

    dims = jax.tree.map(lambda _: 0, (x[:3], t[:moved]))
    every = lambda q: product((*q[0], *x[3:]), q[1])  # noqa: E731
    mapped = jax.tree.map(lambda a: jnp.stack([a, -a, 2 * a]), (x[:3], t[:moved]))
    run = jax.jit(jax.vmap(every, (dims,)))
    text = run.lower(mapped).as_text()
    assert (text.count("@tilewise_second") == 1) and ("while" in text) == (moved == 4)
    alone = [jax.jit(every)(jax.tree.map(lambda a, i=i: a[i], mapped)) for i in range(3)]
    assert same(run(mapped), jax.tree.map(lambda *a: jnp.stack(a), *alone))


# --- what is refused ------------------------------------------------------------------------------


def jvp(f, q):
    return jax.jvp(f, (q,), (q,))[1]


def grad(f):
    return jax.grad(lambda q: (f(q) ** 2).sum())


def paged(q, k, v):
    starts, used = jnp.array([0, 5, 10], jnp.int32), jnp.array([7, 5], jnp.int32)
    table = jnp.zeros((2, 1), jnp.int32)
    return tj.attention_varlen(
        q.reshape(10, 4, 6), k, v, starts, None, block_table=table, seqused_k=used
    )


def float8(q, k, v):
    k, v = (x.astype(jnp.float8_e4m3fn) for x in (k, v))
    return tj.attention(q.astype(jnp.bfloat16), k, v).astype(jnp.float32)


def descaled(q, k, v):
    k, v = (x.astype(jnp.float8_e4m3fn) for x in (k, v))
    return tj.attention(q.astype(jnp.bfloat16), k, v, k_descale=q[:, 0, :2, 0])


def slopes(q, k, v):
    return tj.attention(k, k, v, alibi_slopes=q[0, 0, :2, 0])


REFUSED = {
    "third derivative": (lambda f, q: grad(grad(grad(f)))(q), tj.attention, "third derivatives"),
    "jvp of jvp": (lambda f, q: jvp(partial(jvp, f), q), tj.attention, "forward mode over forward"),
    "jacfwd of jacfwd": (lambda f, q: jax.jacfwd(jax.jacfwd(f))(q), tj.attention,
                         "forward mode over forward"),
    "third by jvp": (lambda f, q: jvp(grad(grad(f)), q), tj.attention, "third derivatives"),
    "pages": (jvp, paged, "jvp with block_table: keys and values in pages"),
    "pages, twice": (lambda f, q: grad(grad(f))(q), paged, "with block_table: keys and values in"),
    "cache": (jvp, tj.attention_with_kvcache, "attention_with_kvcache is for inference"),
    "slopes": (jvp, slopes, "alibi_slopes is differentiated"),
    "descale": (jvp, descaled, "k_descale is differentiated"),
    "batch_invariant": (jvp, partial(tj.attention, batch_invariant=True), "batch_invariant 1"),
    "float8": (jvp, float8, "float8"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    derive, function, sentence = REFUSED[name]
    x, _ = problem()
    with pytest.raises(NotImplementedError, match=sentence):
        derive(lambda q: function(q, *x[1:3]), x[0])


def test_cuda_targets(monkeypatch):
    """The calls for a GPU, as far as they can be made without one."""
    planned = []

    def plan(_library, a, *_others):
        planned.append(a.device)
        return type("Info", (), {"workspace_bytes": 64})

    monkeypatch.setattr(_describe, "plan", plan)
    x, _ = problem()
    gradient = jax.grad(lambda q: (tj.attention(q, *x[1:3]) ** 2).sum())
    product = jax.jit(lambda q: jax.jvp(gradient, (q,), (q,))[1])
    text = product.trace(x[0]).lower(lowering_platforms=("cuda",)).as_text()
    assert "@tilewise_jvp" in text and "@tilewise_second" in text
    assert set(planned) == {_abi.CUDA}
