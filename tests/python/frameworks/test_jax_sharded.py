"""``tilewise.jax`` on arrays sharded across two devices, with and without ``shard_map``."""

from __future__ import annotations

import re
from functools import partial

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-jax` installs it")
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import tilewise
import tilewise.jax as tj
from jax_arrays import close, random, same

pytestmark = pytest.mark.jax

two_devices = pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")


def gathers_in(compiled) -> bool:
    """Whether a compiled function gathers an array: on GPUs the operation may be asynchronous."""
    return re.search(r" all-gather(-start)?\(", compiled.as_text()) is not None


@two_devices
@pytest.mark.parametrize("split", ["batch", "heads"])
def test_shard_map(split):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v, sinks, bias = random(
        (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (4,), (1, 1, 9, 11)
    )
    rows = P("x") if split == "batch" else P(None, None, "x")
    specs = (rows, rows, rows, P() if split == "batch" else P("x"), P())

    def attend(q, k, v, sinks, bias):
        return tj.attention(q, k, v, sinks=sinks, bias=bias, causal=True)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)

    def gradients(function):
        return jax.value_and_grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3, 4))

    given = (q, k, v, sinks, bias)
    assert same(sharded(*given), attend(*given))
    assert same(jax.jit(sharded)(*given), attend(*given))
    close(jax.jit(gradients(sharded))(*given), gradients(attend)(*given), 1e-5)


SHARDED = {
    "batch": ("Auto", P("x")),
    "heads": ("Auto", P(None, None, "x")),
    "rows, which are gathered": ("Auto", P(None, "x")),
    "explicit axes, which are gathered": ("Explicit", P(None, None, None, "x")),
}


@two_devices
@pytest.mark.parametrize("name", SHARDED)
def test_jit_of_sharded_arrays(name):
    """Batch and heads stay where they are; gradients of what their parts share are summed."""
    kind, spec = SHARDED[name]
    mesh = jax.make_mesh((2,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    q, k, bias, sinks = random((2, 10, 4, 16), (2, 10, 2, 16), (1, 1, 10, 10), (4,))

    def loss(q, k, bias, sinks, scale):
        return (tj.attention(q, k, k, bias=bias, sinks=sinks, scale=scale) ** 2).sum()

    gradient = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))
    given = q, k, bias, sinks, jnp.float32(0.3)
    specs = (spec, spec, P(), P("x") if name == "heads" else P(), P())
    cut = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        for x, spec in zip(given, specs, strict=True)
    ]
    compiled = gradient.lower(*cut).compile()
    gathers = gathers_in(compiled)
    assert gathers == ("gathered" in name)
    close(compiled(*cut), gradient(*given), 1e-5)


@two_devices
@pytest.mark.parametrize("split", ["batch", "heads"])
def test_second_derivatives(split):
    """A tangent and a product with the Hessian, in a shard_map and in a jit of sharded arrays. What
    the devices share has tangents on each of them, and gradients that are summed."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = (2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (4,), (1, 1, 9, 11)
    given, tangents = random(*shapes), random(*shapes, seed=5)
    rows = P("x") if split == "batch" else P(None, None, "x")
    specs = (rows, rows, rows, P() if split == "batch" else P("x"), P())

    def attend(q, k, v, sinks, bias):
        return tj.attention(q, k, v, sinks=sinks, bias=bias, causal=True)

    def derivatives(function, x, t):
        gradient = jax.grad(lambda *x: (function(*x) ** 2).sum(), (0, 1, 2, 3, 4))
        return jax.jvp(function, x, t), jax.jvp(gradient, x, t)[1]

    want = jax.jit(partial(derivatives, attend))(tuple(given), tuple(tangents))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=rows)
    close(jax.jit(partial(derivatives, sharded))(tuple(given), tuple(tangents)), want, 1e-5)
    cut = [
        tuple(
            jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
            for x, spec in zip(each, specs, strict=True)
        )
        for each in (given, tangents)
    ]
    compiled = jax.jit(partial(derivatives, attend)).lower(*cut).compile()
    assert not gathers_in(compiled)
    close(compiled(*cut), want, 1e-5)


@two_devices
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_max_logits(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k = random((2, 10, 4, 16), (2, 10, 2, 16))
    cut = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (q, k)]
    run = jax.jit(lambda q, k: tj.attention(q, k, k, return_max_logits=True))
    compiled = run.lower(*cut).compile()
    assert not gathers_in(compiled)
    assert same(compiled(*cut), run(q, k))


@two_devices
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
@pytest.mark.parametrize("option", [dict(out_dtype="float32"), dict(precise_backward=True)])
def test_float32_out(option, spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    inputs = random((2, 10, 4, 16), (2, 10, 2, 16), dtype=jnp.bfloat16)
    cut = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in inputs]
    attend = lambda q, k: tj.attention(q, k, k, causal=True, **option)  # noqa: E731
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=(spec, spec), out_specs=spec)

    def derivatives(attend, q, k):
        loss = lambda q, k: (attend(q, k).astype(jnp.float32) ** 2).sum()  # noqa: E731
        return jax.grad(loss, (0, 1))(q, k), jax.jvp(attend, (q, k), (jnp.cos(q), jnp.sin(k)))

    want = jax.jit(partial(derivatives, attend))(*inputs)
    assert want[1][0].dtype == option.get("out_dtype", "bfloat16")
    assert same(jax.jit(partial(derivatives, sharded))(*inputs), want, 2**-6)
    compiled = jax.jit(partial(derivatives, attend)).lower(*cut).compile()
    assert not gathers_in(compiled)
    assert same(compiled(*cut), want, 2**-6)


@two_devices
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_cache_with_a_tree(spec):
    """Lists of a mask are those of all sequences, so XLA gathers the call; a shard_map need not."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k = random((2, 3, 4, 16), (2, 200, 2, 16))
    lengths = jnp.array([150, 20], jnp.int32)
    tree = tilewise.masks.Tree.from_parents([-1, 0, 0])

    def attend(q, k, lengths):
        return tj.attention_with_kvcache(
            q, k, k, cache_seqlens=lengths, mask=tree, return_max_logits=True
        )

    of_lengths, of_logits = (P("x"), P("x")) if spec == P("x") else (P(), P(None, "x"))
    specs = (spec, spec, of_lengths)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=(spec, of_logits))
    want = attend(q, k, lengths)
    assert same(jax.jit(sharded)(q, k, lengths), want)
    cut = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, s))
        for x, s in zip((q, k, lengths), specs, strict=True)
    ]
    compiled = jax.jit(attend).lower(*cut).compile()
    assert gathers_in(compiled)
    assert same(compiled(*cut), want)


@two_devices
@pytest.mark.parametrize("spec", [P("x"), P(None, None, "x")])
def test_float8_queries(spec):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k = random((2, 10, 4, 16), (2, 10, 2, 16), dtype=jnp.float8_e4m3fn)
    factors = jnp.array([[0.5, 2.0], [1.0, 0.25]])
    attend = lambda q, k, f: tj.attention(q, k, k, q_descale=f, k_descale=f)  # noqa: E731
    of_factors = P("x") if spec == P("x") else P(None, "x")
    specs = (spec, spec, of_factors)
    want = attend(q, k, factors)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=spec)
    assert want.dtype == jnp.bfloat16 and same(sharded(q, k, factors), want)
    cut = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, s))
        for x, s in zip((q, k, factors), specs, strict=True)
    ]
    compiled = jax.jit(attend).lower(*cut).compile()
    assert not gathers_in(compiled)
    assert same(compiled(*cut), want)


@two_devices
@pytest.mark.parametrize("selects", [False, True])
def test_latent_caches(selects):
    """The batch is divided; selected keys are those of a cache that all devices share."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, cache = random((2, 3, 4, 40), (2, 50, 1, 40))
    indices = jnp.arange(120, dtype=jnp.int32).reshape(2, 3, 20) * 7 % 110 - 5

    def attend(q, cache, given):
        name = "indices" if selects else "cache_seqlens"
        options = {"head_dim_v": 32, "return_max_logits": True, name: given}
        return tj.attention_with_kvcache(q, cache, **options)

    arrays = q, cache, indices if selects else jnp.array([50, 7], jnp.int32)
    specs = P("x"), P() if selects else P("x"), P("x")
    want = attend(*arrays)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=P("x"))
    assert same(jax.jit(sharded)(*arrays), want)
    cut = [
        jax.device_put(x, jax.sharding.NamedSharding(mesh, s))
        for x, s in zip(arrays, specs, strict=True)
    ]
    compiled = jax.jit(attend).lower(*cut).compile()
    assert not gathers_in(compiled)
    assert same(compiled(*cut), want)


@two_devices
@pytest.mark.parametrize("option", ["packed", "pages", "dropout"])
def test_jit_of_sharded_heads(option):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    starts = jnp.array([0, 3, 8], jnp.int32)
    q, k = random((8, 4, 16), (8, 2, 16))
    run = {
        "packed": lambda q, k: tj.attention_varlen(q, k, k, starts, starts, causal=True),
        "pages": lambda q, k: tj.attention_with_kvcache(
            q[:2, None], k.reshape(4, 2, 2, 16), k.reshape(4, 2, 2, 16),
            block_table=jnp.array([[3, 0], [1, 2]], jnp.int32), cache_seqlens=starts[1:] // 2,
        ),
        "dropout": lambda q, k: tj.attention(
            q[None], k[None], k[None], dropout_p=0.5, dropout_seed=3
        ),
    }[option]  # fmt: skip
    cut = [jax.device_put(x, jax.sharding.NamedSharding(mesh, P(None, "x"))) for x in (q, k)]
    compiled = jax.jit(run).lower(*cut).compile()
    # Dropout bits are numbered by head, so that call is not divided.
    assert gathers_in(compiled) == (option == "dropout")
    assert same(compiled(*cut), run(q, k))


@two_devices
def test_heads_of_packed_queries_of_a_latent_cache():
    """The devices share the one head of the cache, its indices and the starts of sequences."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    q, cache = random((6, 4, 40), (5, 20, 1, 40))
    indices = jnp.arange(120, dtype=jnp.int32).reshape(6, 20) * 7 % 110 - 5
    starts = jnp.array([0, 2, 5], jnp.int32)

    def attend(q, cache, indices, starts):
        return tj.attention_with_kvcache(
            q, cache, head_dim_v=32, indices=indices, cu_seqlens_q=starts, return_max_logits=True
        )

    specs, results = (P(None, "x"), P(), P(), P()), (P(None, "x"), P(None, "x"))
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=results)
    want = attend(q, cache, indices, starts)
    assert same(jax.jit(sharded)(q, cache, indices, starts), want)
