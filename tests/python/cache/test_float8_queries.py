"""Queries of float8_e4m3 beside keys and values of float8; the oracle gets the values that the
bytes represent.

Tested through the C ABI on every device, and through PyTorch and NumPy.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import capi  # noqa: E402
import devices  # noqa: E402
import test_float8_cache as caches  # noqa: E402
import tilewise  # noqa: E402
from bounds import LSE_LOW  # noqa: E402
from cases import Built, Case, run  # noqa: E402
from float8_cases import (  # noqa: E402
    FLOAT8,
    check,
    one_head,
    softmax64,
    with_float8,
    with_needle,
)

DTYPES = ["fp16", "bf16"]  # of out


def wide_out(case: Case, seed: int) -> Case:
    """The case, sometimes with out in float32, for which q is widened to bfloat16."""
    if seed % 3 != 0:
        return case
    return dataclasses.replace(case, dtype="bf16", float32_out=True, bias_own_dtype=False)


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_problems(dtype, seed):
    case = wide_out(caches.random_case(seed, dtype), seed)
    check(case, seed % 4 != 0, ["", "b", "h", "bh"][seed % 4], queries=True)


@pytest.mark.abi
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_option(dtype, seed):
    case = wide_out(caches.option_case(100 + seed, dtype), seed)
    check(case, factors=seed % 5 != 0, signed=seed % 3 == 0, queries=True)


@pytest.mark.abi
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_prefill(head_dim):
    """More rows than a tile has, in sequences of different lengths, some rows of none."""
    check(
        Case(dtype="bf16", rows=(100, 0, 41), keys=(130, 7, 90), varlen_q=True, varlen_k=True,
             tail_q=3, heads_kv=2, group=2, head_dim=head_dim, head_dim_v=64, window=(-1, 0)),
        queries=True,
    )  # fmt: skip


@pytest.mark.abi
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_is_exact(dtype, rows):
    """With one key whose only number is a 1, the score is the query's number."""
    b = Built(Case(dtype=dtype, rows=(rows,), keys=(1,), head_dim=64, head_dim_v=64, scale=1.0))
    with_float8(b, factors=False, queries=True)
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    meaning = codes.view(FLOAT8).double().numpy()
    b.bytes["k"][:] = 0
    b.bytes["k"][..., 0] = int(torch.ones(1).to(FLOAT8).view(torch.uint8))
    for target in capi.targets():
        for first in range(0, 256, rows):
            chosen = (first + np.arange(rows)) % 256
            b.bytes["q"][:] = 0
            b.bytes["q"][0, :, 0, 0] = codes[torch.from_numpy(chosen)]
            with capi.on(target):
                lse = run(b, backward=False).lse[:, 0]
            want = meaning[chosen]
            near = np.abs(lse - want) <= LSE_LOW * np.maximum(1, np.abs(want))
            assert (near | (np.isnan(lse) & np.isnan(want))).all(), target


# --- through PyTorch ------------------------------------------------------------------------------


def problem(rows: int, keys: int, head_dim: int = 64):
    """q, k and v of float8, two sequences of 8 heads over 2, and their factors by argument name."""
    g = devices.generator(rows + keys)
    draw = lambda *shape: torch.randn(*shape, generator=g).to(FLOAT8)  # noqa: E731
    q, k, v = draw(2, rows, 8, head_dim), draw(2, keys, 2, head_dim), draw(2, keys, 2, head_dim)
    factors = {f"{x}_descale": torch.rand(2, 2, generator=g) + 0.5 for x in "qkv"}
    return q, k, v, factors


def with_wide_queries(factors: dict) -> dict:
    """The options of a call with q widened to 16 bits that computes the same."""
    product = factors["q_descale"] * factors["k_descale"]
    return dict(k_descale=product, v_descale=factors["v_descale"])


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 50])
def test_it_is_the_call_with_widened_queries(rows, dtype):
    q, k, v, factors = problem(rows, 200)
    options = dict(causal=True, return_lse=True, sinks=torch.linspace(-1, 1, 8))
    out, lse = tilewise.attention(q, k, v, **factors, **options, out_dtype=dtype)
    wide = tilewise.attention(q.to(dtype), k, v, **with_wide_queries(factors), **options)
    assert out.dtype == dtype and devices.equal(out, wide[0]) and devices.equal(lse, wide[1])
    if dtype == torch.bfloat16:
        assert devices.equal(tilewise.attention(q, k, v, **factors, **options)[0], out)


@pytest.mark.tensors
def test_layouts_and_strides_of_queries():
    q, k, v, factors = problem(33, 70)
    want = tilewise.attention(q, k, v, **factors)
    swapped = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    out = tilewise.attention(*swapped, **factors, layout="bhsd")
    assert devices.equal(out.transpose(1, 2), want)
    padded = torch.zeros(2, 33, 8, 77).to(FLOAT8)
    padded[..., 5:69] = q
    assert devices.equal(tilewise.attention(padded[..., 5:69], k, v, **factors), want)


@pytest.mark.tensors
def test_varlen_over_pages():
    q, k, v, factors = problem(10, 64)
    q = q[0, :5]
    pages = [x.reshape(8, 16, 2, 64) for x in (k, v)]
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    table = torch.tensor([[3, 1], [7, 2]], dtype=torch.int32)
    used = torch.tensor([20, 31], dtype=torch.int32)
    options = dict(block_table=table, seqused_k=used, causal=True)
    out = tilewise.attention_varlen(q, *pages, starts, None, **options, **factors)
    wide = with_wide_queries(factors)
    assert devices.equal(
        out, tilewise.attention_varlen(q.bfloat16(), *pages, starts, None, **options, **wide)
    )
    text = str(tilewise.explain(q, *pages, cu_seqlens_q=starts, **options, **factors))
    assert ".forward.bf16.f8" in text and "q of f8 is widened to bf16; " in text
    assert "backward with dtype float8_e4m3: only the forward supports" in text


@pytest.mark.tensors
@pytest.mark.parametrize("selects", [False, True])
def test_cache_with_new_keys(selects):
    """New keys of 16 bits are divided by the factors of the cache."""
    q, k, v, factors = problem(3, 40)
    g = devices.generator(0)
    new = [torch.randn(2, 3, 2, 64, generator=g).bfloat16() for _ in "kv"]
    options: dict = dict(cache_seqlens=30)
    if selects:
        options["indices"] = torch.randint(0, 33, (2, 3, 12), generator=g)
    else:
        options["causal"] = True
    results, stored = [], []
    for query, given in ((q, factors), (q.bfloat16(), None)):
        copies = [x.clone() for x in (k, v)]
        if given is None:  # the append must divide by the factor of k alone
            tilewise.attention_with_kvcache(
                query, *copies, *new, cache_seqlens=30, k_descale=factors["k_descale"],
                v_descale=factors["v_descale"],
            )  # fmt: skip
            options["cache_seqlens"] = 33
            given, appended = with_wide_queries(factors), []
        else:
            appended = new
        results.append(
            tilewise.attention_with_kvcache(query, *copies, *appended, **options, **given)
        )
        stored.append([x.view(torch.uint8) for x in copies])
    assert devices.equal(*results)
    assert all(torch.equal(x, y) for x, y in zip(*stored, strict=True))


@pytest.mark.tensors
def test_compiled_call():
    q, k, v, factors = problem(5, 40)
    call = lambda *x: tilewise.attention(*x, out_dtype=torch.float16, **factors)  # noqa: E731
    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert devices.equal(compiled(q, k, v), call(q, k, v))
    out, lse = torch.ops.tilewise.forward(
        *(x.to("meta") for x in (q, k, v)), *tilewise._options.Options(out_dtype=2)
    )
    assert out.dtype == torch.float16 and lse.dtype == torch.float32


@pytest.mark.tensors
def test_autocast_leaves_float8():
    q, k, v, factors = problem(5, 40)
    with torch.autocast(q.device.type):
        out = tilewise.attention(q, k, v, **factors)
    assert devices.equal(out, tilewise.attention(q, k, v, **factors))


@pytest.mark.parametrize("rows", [1, 20])
def test_arrays(rows):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v, factors = problem(rows, 50)
    arrays = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    numbers = {name: x.numpy() for name, x in factors.items()}
    bias = torch.linspace(-1, 1, 50).bfloat16()
    for out_dtype, name in ((None, "bfloat16"), (np.float32, "float32"), ("float16", "float16")):
        out = tilewise.attention(*arrays, **numbers, causal=True, out_dtype=out_dtype)
        dtype = getattr(torch, name)
        want = tilewise.attention(q, k, v, **factors, causal=True, out_dtype=dtype)
        assert out.dtype == name and (out.astype(np.float32) == want.float().numpy()).all()
    out = tilewise.attention(*arrays, **numbers, bias=bias.float().numpy().astype("bfloat16"))
    want = tilewise.attention(q, k, v, **factors, bias=bias)
    assert (out.astype(np.float32) == want.float().numpy()).all()
    cached = tilewise.attention_with_kvcache(*arrays, **numbers, cache_seqlens=40)
    want = tilewise.attention_with_kvcache(q, k, v, **factors, cache_seqlens=40)
    assert (cached.astype(np.float32) == want.float().numpy()).all()


# --- accuracy over long sequences -----------------------------------------------------------------


def error_of(q, k, v) -> tuple[np.ndarray, np.ndarray]:
    """out of one head minus the exact one, and the exact one."""
    out = tilewise.attention(*(devices.put(x)[None, :, None] for x in (q, k, v)))
    want = softmax64(*(x.double().cpu().numpy() for x in (q, k, v)))
    return out[0, :, 0].double().cpu().numpy() - want, want


@pytest.mark.tensors
@pytest.mark.parametrize("rows", [1, 40])
def test_the_error_does_not_grow_with_the_keys(rows):
    def relative(keys: int) -> float:
        error, want = error_of(*one_head(rows, keys))
        return float(np.linalg.norm(error) / np.linalg.norm(want))

    # Results of few keys are rounded to bfloat16, as those of many are: 2^-9 or less in the mean.
    assert relative(65536) <= 1.25 * relative(4096) <= 1.25 * 2**-8


@pytest.mark.tensors
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.77, 1.0])
def test_a_needle_in_128k_keys(depth, rows):
    """The needle is found wherever it is."""
    error, want = error_of(*with_needle(rows, depth))
    assert want.min() > 2.0 and np.abs(error).max() <= 2**-7 * np.abs(want).max()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(k=torch.bfloat16, v=torch.bfloat16), "k has dtype torch.bfloat16, but must have"),
        (dict(v=torch.bfloat16), "v has dtype torch.bfloat16, but must have torch.float8_e4m3fn"),
        (dict(q=torch.float8_e5m2), "q has dtype torch.float8_e5m2, but must be torch.float32"),
        (dict(out_dtype=FLOAT8), "out_dtype is torch.float8_e4m3fn, but must be None, torch.flo"),
        (dict(q_descale=torch.ones(3, 2)), r"q_descale has shape \[3, 2\]"),
        (dict(q=torch.bfloat16, q_descale=torch.ones(2, 2)), "q_descale is given, but belongs to"),
        (dict(bias=torch.zeros(20, dtype=torch.float16)),
         "bias has dtype torch.float16, but must be torch.float32 or torch.bfloat16"),
        (dict(bias=torch.zeros(20, dtype=torch.bfloat16), out_dtype=torch.float16),
         "bias has dtype torch.bfloat16, but must be torch.float32 or torch.float16"),
        (dict(precise_backward=True), "q has dtype torch.float8_e4m3fn, of which there is only"),
    ],
)  # fmt: skip
def test_refused_by_name(change, words):
    given = dict(zip("qkv", problem(4, 20)[:3], strict=True))
    for name in given:
        if name in change:
            given[name] = given[name].float().to(change[name])
    options = {name: x for name, x in change.items() if name not in given}
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=words):
        tilewise.attention(*given.values(), **options)


def test_a_bias_of_the_other_type_is_refused_for_arrays():
    import ml_dtypes

    q, k, v = (x.float().numpy().astype(ml_dtypes.float8_e4m3fn) for x in problem(4, 20)[:3])
    for given, allowed in ((np.float16, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, np.float16)):
        words = f"bias has dtype {np.dtype(given)}, but must be float32 or {np.dtype(allowed)}"
        out_dtype = np.float16 if allowed == np.float16 else None
        with pytest.raises(TypeError, match=words):
            tilewise.attention(q, k, v, bias=np.zeros(20, given), out_dtype=out_dtype)


def test_derivatives_are_refused():
    q, k, v, factors = problem(4, 20)
    only = r"q has dtype torch\.float8_e4m3fn, of which there is only the forward"
    for options in ({}, factors):
        with pytest.raises(NotImplementedError, match=only):
            tilewise.attention(q.clone().requires_grad_(), k, v, **options)
    with torch.no_grad():
        tilewise.attention(q.clone().requires_grad_(), k, v)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = [x.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn) for x in (q, k, v)]
    out, lse = tilewise.attention(*arrays, return_lse=True)
    with pytest.raises(NotImplementedError, match="q has dtype float8_e4m3fn, of which"):
        tilewise.attention_backward(out, *arrays, out, lse)


def test_rotation_of_float8_queries_is_refused():
    q, k, v, _ = problem(1, 20)
    new, table = torch.zeros(2, 1, 2, 64).bfloat16(), torch.zeros(32, 8).bfloat16()
    with pytest.raises(TypeError, match="rotary_cos is given, but q has dtype"):
        tilewise.attention_with_kvcache(
            q, k, v, new, new, cache_seqlens=3, rotary_cos=table, rotary_sin=table
        )
    with pytest.raises(TypeError, match="float32, but must be float16 or bfloat16, because"):
        tilewise.attention_with_kvcache(q, k, v, new.float(), new.float(), cache_seqlens=3)
