"""``tilewise.jax`` against the oracle and under JAX's transformations. ``make test-jax`` runs it in
an environment that has JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

from paths import ROOT

jax = pytest.importorskip("jax", reason="JAX is not installed: `make test-jax` installs it")
import jax.numpy as jnp
import torch

import tilewise
import tilewise.jax as tj
from bounds import check_gradients, check_lse, check_out
from cases import Built, Case
from jax_arrays import ON_GPU, close, random, same

pytestmark = pytest.mark.jax

FLOATS = {torch.float32: jnp.float32, torch.float16: jnp.float16, torch.bfloat16: jnp.bfloat16}

CASES = {
    "causal, grouped heads": Case(
        rows=(19,) * 2, keys=(23,) * 2, heads_kv=2, group=2, head_dim=16, window=(-1, 0)
    ),
    "fp16, window, softcap, alibi, sinks": Case(
        "fp16", rows=(33,) * 2, keys=(40,) * 2, heads_kv=1, group=4, head_dim=32, head_dim_v=16,
        window=(9, 3), softcap=4.0, alibi="bh", sinks=True, dlse=True,
    ),
    "bf16, bias per row in bf16": Case(
        "bf16", rows=(17,) * 2, keys=(30,) * 2, heads_kv=2, head_dim=16, bias="hr",
        bias_own_dtype=True, scale=0.2,
    ),
    "fp16, float32 out, bias": Case(
        "fp16", rows=(21,) * 2, keys=(26,) * 2, heads_kv=2, group=2, head_dim=32, bias="h",
        sinks=True, softcap=4.0, float32_out=True, dlse=True,
    ),
    "bf16, float32 out, packed": Case(
        "bf16", rows=(7, 20), keys=(9, 33), varlen_q=True, varlen_k=True, heads_kv=2, head_dim=16,
        head_dim_v=24, window=(-1, 0), float32_out=True,
    ),
    "dropout, bias per batch, scale": Case(
        rows=(21,) * 3, keys=(40,) * 3, heads_kv=2, head_dim=8, bias="b", dropout_p=0.3,
        dropout_state=True, scale=0.3, scale_ptr=True, dlse=True,
    ),
    "packed, alibi, bias": Case(
        rows=(5, 0, 40), keys=(9, 4, 40), varlen_q=True, varlen_k=True, tail_q=3, heads_kv=2,
        group=2, head_dim=16, alibi="h", bias="bhr", window=(-1, 0), used_k=(9, 2, 33), sinks=True,
    ),
    "packed bf16, dropout": Case(
        "bf16", rows=(70, 3), keys=(70, 3), varlen_q=True, varlen_k=True, heads_kv=1, group=2,
        head_dim=64, head_dim_v=64, dropout_p=0.1, dropout_state=True,
    ),
    "rows without keys": Case(rows=(9,) * 2, keys=(4,) * 2, head_dim=8, window=(-1, 0)),
    "no keys": Case(rows=(3,) * 2, keys=(0,) * 2, sinks=True),
    "empty batch": Case(rows=(), keys=(), heads_kv=2),
}  # fmt: skip
CACHES = {
    "pages": Case(
        "bf16", rows=(1, 1, 1), keys=(40, 7, 64), heads_kv=2, group=4, head_dim=64, head_dim_v=64,
        page_size=16, used_k=(33, 7, 64), splits=3, sinks=True,
    ),
    "packed queries of pages": Case(
        rows=(4, 1), keys=(40, 9), varlen_q=True, heads_kv=1, group=2, head_dim=16, page_size=8,
        used_k=(33, 9), leftpad=(3, 0), window=(12, 0),
    ),
    "pages, mask, largest logits, float32 out": Case(
        "fp16", rows=(3, 3), keys=(150, 300), heads_kv=2, group=2, head_dim=32, page_size=16,
        used_k=(141, 300), mask_blocks="bh", max_logits=True, float32_out=True, softcap=3.0,
    ),
    "rows of a cache": Case(
        "fp16", rows=(2, 2), keys=(20, 20), heads_kv=2, head_dim=32, kv_idx=(3, 1),
        used_k=(11, 20), window=(-1, 0), alibi="h", bias="r",
    ),
    "latent pages": Case(
        "bf16", rows=(2, 2, 2), keys=(70, 9, 64), group=16, head_dim=288, head_dim_v=256,
        latent=True, page_size=16, used_k=(65, 0, 64), window=(-1, 0), sinks=True, max_logits=True,
    ),
    "latent cache, packed queries, mask": Case(
        rows=(4, 0, 3), keys=(150,) * 3, varlen_q=True, tail_q=2, group=4, head_dim=40,
        head_dim_v=32, latent=True, kv_idx=(3, 0, 1), used_k=(141, 150, 9), mask_blocks="b",
    ),
}  # fmt: skip


def to_jax(tensor):
    tensor = tensor.detach().cpu()
    if tensor.dtype in FLOATS:
        return jnp.asarray(tensor.float().numpy(), FLOATS[tensor.dtype])
    return jnp.asarray(tensor.numpy())


def to_float64(array, rank):
    """[..., H, D] to [N, H, D], as the oracle has it."""
    array = np.asarray(array).astype(np.float64)
    return array.reshape(-1, *array.shape[1 - rank :])


def heads_last(per_head):
    return to_float64(jnp.swapaxes(per_head, -1, -2), 2)


def yard_of(built, want):
    if built.dtype == torch.float32:
        return None
    import yardstick

    return yardstick.errors(built, want)


def arguments(case):
    """The case with a seed of dropout, its differentiable arrays, and the other arguments."""
    built = Built(case)
    built.seed_offset = built.seed_offset[0], 0
    arrays = {"q": built.q, "k": built.k, "v": built.v, "bias": built.bias, "sinks": built.sinks}
    leaves = {name: to_jax(x) for name, x in arrays.items() if x is not None}
    leaves["scale"] = jnp.float32(built.scale)
    options = dict(window=case.window, softcap=case.softcap)
    if case.float32_out:
        options["out_dtype"] = jnp.float32
    if built.slopes is not None:
        options["alibi_slopes"] = to_jax(built.slopes)
    if case.dropout_p:
        options |= dict(dropout_p=case.dropout_p, dropout_seed=built.seed_offset[0])
    return built, leaves, options


@pytest.mark.parametrize("name", CASES)
def test_oracle(name):
    case = CASES[name]
    built, leaves, options = arguments(case)
    attend = tj.attention
    if case.varlen_q:
        meta = {n: to_jax(x) for n, x in built.meta.items()}
        attend = partial(tj.attention_varlen, **meta)
    run = jax.jit(lambda leaves: attend(**leaves, **options, return_lse=True))
    (out, lse), pullback = jax.vjp(run, leaves)
    dlse = jnp.zeros_like(lse) if built.dlse is None else to_jax(built.dlse)
    (grads,) = jax.jit(pullback)((to_jax(built.dout).astype(out.dtype), dlse))
    want = built.expected()
    yard = yard_of(built, want)
    assert out.dtype == (jnp.float32 if case.float32_out else leaves["q"].dtype)
    assert lse.dtype == jnp.float32
    check_out(to_float64(out, 3), want, case.dtype, yard, name)
    check_lse(heads_last(lse), want.lse, case.dtype, yard, name)
    got = {n: to_float64(g, 3) if n in "qkv" else np.asarray(g, float) for n, g in grads.items()}
    got["scale"] = got["scale"].reshape(1)
    check_gradients(got, want, built, yard, name)


@pytest.mark.parametrize("name", CACHES)
def test_cache(name):
    case = CACHES[name]
    built, leaves, options = arguments(case)
    meta = {n: to_jax(x) for n, x in built.meta.items()}
    renamed = {
        "seqused_k": "cache_seqlens", "kv_batch_idx": "cache_batch_idx",
        "leftpad_k": "cache_leftpad",
    }  # fmt: skip
    given = {renamed.get(n, n): x for n, x in meta.items()}
    q, k, v = (leaves.pop(n) for n in "qkv")
    options |= dict(num_splits=case.splits, return_max_logits=case.max_logits)
    if case.latent:
        v, options["head_dim_v"] = None, case.head_dim_v
    if built.mask is not None:
        options["mask"] = tilewise.masks.from_bool(built.mask)
    run = partial(tj.attention_with_kvcache, **options, return_lse=True)
    out, lse, *max_logits = jax.jit(run)(q, k, v, **given, **leaves)
    want = built.expected()
    yard = yard_of(built, want)
    check_out(to_float64(out, 3), want, case.dtype, yard, name)
    check_lse(heads_last(lse), want.lse, case.dtype, yard, name)
    for found in max_logits:
        check_lse(np.asarray(found, float), want.max_logits, case.dtype, yard, name, "max_logits")


def test_float8_cache_has_the_bits_of_numpy_arrays():
    q, k, v = random((2, 1, 4, 32), (2, 20, 2, 32), (2, 20, 2, 32), dtype=jnp.bfloat16)
    k, v = k.astype(jnp.float8_e4m3fn), v.astype(jnp.float8_e4m3fn)
    factors = jnp.array([[0.5, 2.0]])
    given = dict(k_descale=factors, cache_seqlens=jnp.array([20, 7], jnp.int32))
    out = tj.attention_with_kvcache(q, k, v, **given)
    host = {n: np.asarray(x) for n, x in given.items()}
    want = tilewise.attention_with_kvcache(*map(np.asarray, (q, k, v)), **host)
    assert same(out, want)


@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_masks_have_the_bits_of_numpy_arrays(kind):
    q, k, dout = random((2, 150, 4, 16), (2, 150, 2, 16), (2, 150, 4, 16))
    mask = tilewise.masks.Ranges.prefixes([40, 0], 150)
    mask = mask if kind == "ranges" else mask.blocks(150, 150)
    (out, lse), pullback = jax.vjp(
        lambda q, k: tj.attention(q, k, k, mask=mask, softcap=5.0, return_lse=True), q, k
    )
    host = [np.asarray(x) for x in (q, k, k)]
    options = dict(mask=mask, softcap=5.0)
    want = tilewise.attention(*host, return_lse=True, **options)
    assert same((out, lse), want)
    grads = tilewise.attention_backward(np.asarray(dout), *host, *want, **options)
    close(pullback((dout, jnp.zeros_like(lse))), (grads.dq, grads.dk + grads.dv), 1e-6)


def largest_logits(q, k, **options):
    return tj.attention(q, k, k, return_max_logits=True, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_max_logits_have_the_bits_of_numpy_arrays(packed):
    q, k, starts = *random((2, 9, 4, 16), (2, 9, 2, 16)), jnp.array([0, 4, 11, 18], jnp.int32)
    options = dict(window=(5, 0), softcap=5.0, return_lse=True, return_max_logits=True)
    ours, theirs = tj.attention, tilewise.attention
    if packed:
        q, k = (x.reshape(18, -1, 16) for x in (q, k))
        options |= dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
        ours, theirs = tj.attention_varlen, tilewise.attention_varlen
    host = {n: np.asarray(x) if n.startswith("cu") else x for n, x in options.items()}
    got = jax.jit(lambda q, k: ours(q, k, k, **options))(q, k)
    assert got[2].shape == (3 if packed else 2, 4)
    assert same(got, theirs(*map(np.asarray, (q, k, k)), **host))


def test_max_logits_under_transformations():
    """They are mapped like the other results, and have neither a tangent nor a gradient."""
    q, k = random((3, 2, 9, 4, 16), (2, 11, 2, 16))
    mapped = jax.vmap(partial(largest_logits, causal=True), (0, None))
    text = str(jax.make_jaxpr(mapped)(q, k))
    assert text.count("tilewise_forward") == 1
    assert same(mapped(q, k), pieces(lambda q: largest_logits(q, k, causal=True), 3)(q))
    (out, logits), (moved, none) = jax.jvp(lambda q: largest_logits(q, k), (q[0],), (q[1],))
    assert same((out, logits), largest_logits(q[0], k))
    assert moved.any() and not none.any()
    assert not jax.grad(lambda q: largest_logits(q, k)[1].sum())(q[0]).any()


def test_pages_have_gradients():
    q, pages = random((7, 4, 16), (5, 4, 2, 16))
    table = jnp.array([[4, 1], [4, 3]], jnp.int32)  # both sequences use page 4
    starts, used = jnp.array([0, 3, 7], jnp.int32), jnp.array([5, 8], jnp.int32)

    def paged(q, k, v):
        given = dict(block_table=table, seqused_k=used, causal=True)
        return (tj.attention_varlen(q, k, v, starts, None, **given) ** 2).sum()

    def packed(q, k, v):
        keys = jnp.array([0, 8, 16], jnp.int32)
        k, v = (x[table].reshape(16, 2, 16) for x in (k, v))
        given = dict(seqused_k=used, causal=True)
        return (tj.attention_varlen(q, k, v, starts, keys, **given) ** 2).sum()

    grads, want = (jax.grad(f, (0, 1, 2))(q, pages, pages + 1) for f in (paged, packed))
    close(grads, want)


def test_layouts_have_the_same_bits():
    q, k, v, bias = random((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 8), (1, 4, 9, 1))

    def loss(layout, q, k, v, bias):
        if layout == "bhsd":
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        out, lse = tj.attention(q, k, v, bias=bias, causal=True, layout=layout, return_lse=True)
        out = out.swapaxes(1, 2) if layout == "bhsd" else out
        return (out**2).sum() + (lse**2).sum(), (out, lse)

    results = [
        jax.value_and_grad(partial(loss, layout), (0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        for layout in ("bshd", "bhsd")
    ]
    assert same(results[0][0][1], results[1][0][1]) and same(results[0][1], results[1][1])


def pieces(function, count):
    """What vmap should give: each element by itself."""

    def run(*mapped):
        outputs = [function(*(x[i] for x in mapped)) for i in range(count)]
        return jax.tree.map(lambda *x: jnp.stack(x), *outputs)

    return run


@pytest.mark.parametrize("option", ["plain", "bias", "sinks", "dropout", "lengths"])
def test_vmap(option):
    q, k, v = random((3, 2, 9, 4, 16), (3, 2, 11, 2, 16), (3, 2, 11, 2, 16))
    extra = {
        "plain": jnp.arange(3.0),
        "bias": random((3, 1, 4, 9, 11))[0],
        "sinks": random((3, 4))[0],
        "dropout": jax.random.split(jax.random.key(5), 3),
        "lengths": jnp.array([[11, 4], [0, 3], [7, 7]], jnp.int32),
    }[option]

    def loss(q, k, v, extra):
        given = {"dropout": dict(dropout_p=0.4, dropout_seed=extra)}.get(option, {option: extra})
        if option == "lengths":
            return (tj.dot_product_attention(q, k, v, key_value_seq_lengths=extra) ** 2).sum()
        given = {} if option == "plain" else given
        return (tj.attention(q, k, v, causal=True, **given) ** 2).sum()

    arguments = (0, 1, 2, 3) if option in ("bias", "sinks") else (0, 1, 2)
    gradient = jax.value_and_grad(loss, arguments)
    assert same(jax.vmap(gradient)(q, k, v, extra), pieces(gradient, 3)(q, k, v, extra))


def test_vmap_folds_into_one_call():
    """Also with two mapped dimensions, and inputs that are not mapped."""
    q, k, bias, slopes = random((3, 5, 2, 9, 4, 16), (2, 11, 2, 16), (1, 4, 9, 11), (5, 4))

    def attend(q, slopes):
        return tj.attention(q, k, k, bias=bias, alibi_slopes=jnp.abs(slopes))

    mapped = jax.vmap(jax.vmap(attend), (0, None))
    text = str(jax.make_jaxpr(mapped)(q, slopes))
    assert text.count("tilewise_forward") == 1 and "scan" not in text
    assert same(mapped(q, slopes), pieces(lambda q: pieces(attend, 5)(q, slopes), 3)(q))


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True, scale=0.3),
        dict(local_window_size=(3, 1)),
        dict(is_causal=True, query_seq_lengths=[5, 9], key_value_seq_lengths=[8, 3]),
        dict(mask=np.tri(9, 12, 2, dtype=bool)[None, None], bias=True, local_window_size=4),
        dict(return_residual=True, key_value_seq_lengths=[12, 1]),
    ],
    ids=lambda options: "-".join(options),
)
def test_dot_product_attention(options):
    q, k, v, bias = random((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16), (2, 1, 9, 12))
    options = {
        n: jnp.array(x, jnp.int32) if isinstance(x, list) else bias if n == "bias" else x
        for n, x in options.items()
    }

    def loss(function, q, k, v):
        out = function(q, k, v, **options)
        return sum((x.astype(jnp.float32) ** 2).sum() for x in jax.tree.leaves(out)), out

    ours, theirs = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2), has_aux=True))(q, k, v)
        for f in (tj.dot_product_attention, jax.nn.dot_product_attention)
    )
    close(ours[0][1], theirs[0][1])
    if not options.get("return_residual"):  # theirs has no derivative
        close(ours[1], theirs[1], 1e-5)


def test_three_dimensions_and_hidden_rows():
    q, k, v = random((5, 4, 16), (7, 2, 16), (7, 2, 16))
    mask = jnp.ones((1, 5, 7), bool).at[:, 2].set(False)
    out, lse = tj.dot_product_attention(q, k, v, mask=mask, return_residual=True)
    assert out.shape == (5, 4, 16) and lse.shape == (5, 4)
    assert not out[2].any() and jnp.isneginf(lse[2]).all() and jnp.isfinite(lse[3]).all()


def test_only_wanted_gradients_are_computed():
    """Not that of the bias, which would need the memory of all scores."""
    q, k, bias = random((1, 9, 4, 16), (1, 9, 4, 16), (1, 4, 9, 9))
    gradient = jax.grad(lambda q: tj.attention(q, k, k, bias=bias).sum())
    assert "wanted=('q',)" in str(jax.make_jaxpr(gradient)(q))


def refused(**changed):
    q, k, v = random((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16))
    return tj.attention(**(dict(q=q, k=k, v=v) | changed))


REFUSED = {
    "shape": (dict(k=np.zeros((2, 11, 2, 8), np.float32)), ValueError, "k has head dimension 8"),
    "float64": (dict(q=np.zeros((2, 9, 4, 16))), TypeError, "q has dtype float64, which JAX would"),
    "integers": (dict(q=jnp.zeros((2, 9, 4, 16), int)), TypeError, "q has dtype int32, but must"),
    "other dtype": (dict(v=jnp.zeros((2, 11, 2, 16), jnp.bfloat16)), TypeError, "v has dtype bfl"),
    "tensor": (dict(q=torch.zeros(2, 9, 4, 16)), TypeError, "q is a torch.Tensor, but must be a j"),
    "list": (dict(k=[1.0]), TypeError, "k is a list, but must be a jax.Array or a NumPy array"),
    "bias": (dict(bias=jnp.zeros((3, 11))), ValueError, r"bias has shape \[3, 11\]"),
    "seed": (dict(dropout_p=0.5), ValueError, "dropout_seed is None, but dropout_p is positive"),
    "negative seed": (dict(dropout_p=0.5, dropout_seed=-1), ValueError, "dropout_seed is -1"),
    "window": (dict(window=3), ValueError, "window is 3, but must be a pair"),
    "sinks": (dict(sinks=jnp.zeros(3)), ValueError, r"sinks has shape \[3\], but must be \[4\]"),
    "layout": (dict(layout="sbhd"), ValueError, "layout is 'sbhd', but must be"),
    "out_dtype": (dict(out_dtype="float16"), TypeError, "out_dtype is 'float16', but must be None"),
    "precise": (dict(precise_backward="yes"), TypeError, "precise_backward is .yes., but must"),
    "descale": (dict(k_descale=jnp.ones((1, 1))), ValueError, "belongs to float8_e4m3 keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changed, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        refused(**changed)


def test_refusals_of_other_functions():
    x = jnp.ones((4, 11, 4, 16))
    with pytest.raises(TypeError, match="cu_seqlens_q is a"):
        tj.attention_with_kvcache(x[0], x, x, cu_seqlens_q=4)
    with pytest.raises(ValueError, match="must not be negative"):  # jax.nn takes it literally
        tj.dot_product_attention(x, x, x, local_window_size=(-1, 2))


def test_seeds_of_64_bits():
    with jax.enable_x64(True):
        words = [tj._arguments.dropout_state(x) for x in (2**40 + 7, jnp.array(2**40 + 7))]
    assert same(*words)


def test_derivatives_that_are_refused():
    q, slopes = random((1, 9, 4, 16), (4,))
    square = lambda q, slopes: tj.attention(q, q, q, alibi_slopes=slopes).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="alibi_slopes is differentiated"):
        jax.grad(square, 1)(q, slopes)
    with pytest.raises(NotImplementedError, match="attention_with_kvcache is for inference"):
        jax.grad(lambda q: tj.attention_with_kvcache(q, q, q).sum())(q)


@pytest.mark.skipif(ON_GPU, reason="a GPU gives rows of NaN instead")
def test_entries_out_of_range_fail_the_computation():
    q = random((7, 4, 16))[0]
    starts = jnp.array([0, 3, 9], jnp.int32)
    with pytest.raises(Exception, match=r"tilewise: cu_seqlens_q\[2\] is 9"):
        jax.block_until_ready(tj.attention_varlen(q, q, q, starts, starts))


def test_cuda_target(monkeypatch):
    """The call for a GPU, as far as it can be made without one: its targets and its workspace."""
    from tilewise import _describe

    planned = []

    def plan(_library, a, g):
        planned.append((a.device, a.q.data % 16, g is not None))
        return type("Info", (), {"workspace_bytes": 100 + a.q.data % 16})

    monkeypatch.setattr(_describe, "plan", plan)
    q = random((1, 9, 4, 16))[0]
    gradient = jax.grad(lambda q: tj.attention(q, q, q).sum())
    text = jax.jit(gradient).trace(q).lower(lowering_platforms=("cuda",)).as_text()
    assert "@tilewise_forward" in text and "@tilewise_backward" in text
    assert "tensor<172xui8>" in text  # the larger plan, and room to align the address
    assert planned == [(1, 0, False), (1, 8, False), (1, 0, True), (1, 8, True)]


def test_other_frameworks_arrays_name_this_module():
    q = random((1, 9, 4, 16))[0]
    with pytest.raises(TypeError, match=r"q is a jax\.Array, .* use tilewise\.jax"):
        tilewise.attention(q, q, q)
    with pytest.raises(TypeError, match=r"q is a jax\.Array, .* use tilewise\.jax"):
        jax.jit(tilewise.attention)(q, q, q)


def test_example(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import train_jax

    assert train_jax.main(["--steps", "3", "--check-steps", "0", "--out", str(tmp_path)]) == 0
    assert f"3 steps of 1536 tokens on {jax.default_backend()}" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "losses.json").read_text())["losses"]) == 3


def test_needs_no_torch():
    program = (
        "import sys, jax, tilewise.jax; q = jax.numpy.ones((1, 3, 1, 8)); "
        "assert (tilewise.jax.attention(q, q, q) == 1).all(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
