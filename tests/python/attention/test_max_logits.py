"""return_max_logits: the largest scale * q.k of each sequence and query head.

The property tests compare it with the oracle for every combination of options. Here are NaN, the
number of threads, and the results of the Python functions.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

import capi
import devices
import tilewise
from cases import Built, Case, check, run
from tilewise import masks

CASE = Case(
    rows=(300, 300), keys=(420, 420), heads_kv=2, group=2, head_dim=40, head_dim_v=40,
    window=(-1, 0), softcap=3.0, alibi="h", bias="h", sinks=True, max_logits=True, spread=0.5,
)  # fmt: skip


def tensors(grad: bool = False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 150, 4, 32), (2, 170, 2, 32), (2, 170, 2, 24))
    return [torch.randn(shape, generator=generator, requires_grad=grad) for shape in shapes]


def largest(q, k, scale, seen):
    """[B, Hq] in float64; seen is broadcastable to [B, Hq, Sq, Sk]."""
    q, k = (x.detach().double().transpose(1, 2) for x in (q, k))
    logits = scale * q @ k.repeat_interleave(2, dim=1).transpose(2, 3)
    return logits.masked_fill(~torch.as_tensor(seen), -torch.inf).amax(dim=(2, 3))


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scale", [None, -0.2, 0.0])
def test_equals_the_oracle_and_changes_nothing(dtype, scale):
    case = replace(CASE, dtype=dtype, scale=scale)
    check(case, backward=False)
    with_logits, without = run(Built(case)), run(Built(replace(case, max_logits=False)))
    if with_logits.kernels != without.kernels:  # on a GPU, where one family may find none
        return
    assert np.array_equal(with_logits.out, without.out)
    assert np.array_equal(with_logits.lse, without.lse)


@pytest.mark.abi
def test_does_not_depend_on_threads():
    case = replace(CASE, rows=(700, 700), keys=(700, 700), splits=3)
    results = [run(Built(case), backward=False, hook=capi.parallel_hook(n)) for n in (1, 2, 64)]
    for result in results[1:]:
        assert np.array_equal(result.max_logits, results[0].max_logits)


@pytest.mark.abi
def test_nan_and_infinity_reach_the_heads_that_see_them():
    case = Case(rows=(40, 40), keys=(40, 40), heads_kv=2, window=(-1, 0), max_logits=True)
    b = Built(case)
    b.k[0, 39, 0], b.k[1, 39, 1] = torch.nan, 1e38  # only the last row sees the last key
    b.q[1, :, 1] = 1e38
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False).max_logits
        assert np.isnan(got[0, 0]) and np.isfinite(got[[0, 1], [1, 0]]).all(), target
    b.q[:, 39] = 0.0  # 0 * NaN is NaN, and 0 * 1e38 is 0
    hidden = Built(replace(case, window=(-1, -1), keys=(40, 40), used_k=(39, 0)))
    hidden.k[0, 39] = torch.nan
    got = run(hidden, backward=False).max_logits
    assert np.isfinite(got[0]).all() and np.isneginf(got[1]).all()


MASK = masks.Ranges.documents([0, 60, 150])
LOWER = np.tril(np.ones((150, 170), bool), 20)


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": True, "softcap": 2.0}, LOWER),
        ({"mask": MASK}, MASK.to_bool(150, 170)),
        ({"causal": True, "scale": -0.3, "mask": MASK}, MASK.to_bool(150, 170) & LOWER),
    ],
)
def test_results_of_attention(options, seen):
    q, k, v = tensors(grad=True)
    want = largest(q, k, options.get("scale", 32**-0.5), seen)
    plain = tilewise.attention(q, k, v, return_lse=True, **options)
    results = tilewise.attention(q, k, v, return_lse=True, return_max_logits=True, **options)
    assert all(torch.equal(x, y) for x, y in zip(results[:2], plain, strict=True))
    torch.testing.assert_close(results[2].double(), want, rtol=1e-6, atol=1e-6)
    assert results[0].requires_grad and not results[2].requires_grad
    grads = [
        torch.autograd.grad((out.square().sum() + lse.sin().sum()), (q, k, v))
        for out, lse in (plain, results[:2])
    ]
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))

    swapped = [x.detach().transpose(1, 2) for x in (q, k, v)]
    out, logits = tilewise.attention(*swapped, layout="bhsd", return_max_logits=True, **options)
    assert torch.equal(logits, results[2]) and torch.equal(out.transpose(1, 2), plain[0])
    arrays = [x.detach().numpy() for x in (q, k, v)]
    out, logits = tilewise.attention(*arrays, return_max_logits=True, **options)
    assert np.array_equal(logits, results[2]) and np.array_equal(out, plain[0].detach())


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_calls_on_each_device(dtype):
    g = devices.generator(0)
    shapes = ((2, 150, 4, 64), (2, 170, 2, 64), (2, 170, 2, 64))
    q, k, v = (torch.randn(shape, generator=g).to(dtype) for shape in shapes)
    close = {"rtol": 4e-6, "atol": 4e-6}
    want = largest(q, k, 64**-0.5, LOWER)
    results = tilewise.attention(q, k, v, causal=True, return_lse=True, return_max_logits=True)
    plain = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert all(devices.equal(x, y) for x, y in zip(results[:2], plain, strict=True))
    torch.testing.assert_close(results[2].double(), want, **close)
    starts = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (150, 170)]
    packed = tilewise.attention_varlen(
        *(x.flatten(0, 1) for x in (q, k, v)), *starts, causal=True, return_max_logits=True
    )
    torch.testing.assert_close(packed[1].double(), want, **close)
    row = q[:, :1]
    out, logits = tilewise.attention_with_kvcache(
        row, k, v, cache_seqlens=100, return_max_logits=True
    )
    want = largest(row, k[:, :100], 64**-0.5, True)
    torch.testing.assert_close(logits.double(), want, **close)
    plain = tilewise.attention_with_kvcache(row, k, v, cache_seqlens=100)
    error = 2e-5 if dtype == torch.float32 else 1e-2  # the decode kernels do not find them
    torch.testing.assert_close(out, plain, rtol=error, atol=error)


def test_results_of_packed_sequences():
    q, k, v = (x[0] for x in tensors())
    starts_q, starts_k = [0, 50, 50, 140], [0, 30, 60, 170]  # the second one has no rows
    given = [torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k)]
    out, logits = tilewise.attention_varlen(q, k, v, *given, causal=True, return_max_logits=True)
    pairs = (itertools.pairwise(x) for x in (starts_q, starts_k))
    for b, (rows, keys) in enumerate(zip(*pairs, strict=True)):
        own = q[None, slice(*rows)], k[None, slice(*keys)], v[None, slice(*keys)]
        want = tilewise.attention(*own, causal=True, return_max_logits=True)
        torch.testing.assert_close(logits[b], want[1][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out[slice(*rows)], want[0][0], rtol=1e-5, atol=1e-5)
    assert logits[1].isneginf().all()
    arrays = [x.numpy() for x in (q, k, v, *given)]
    got = tilewise.attention_varlen(*arrays, causal=True, return_max_logits=True)
    assert np.array_equal(got[1], logits)


def test_compile_vmap_and_tangents():
    q, k, v = tensors(grad=True)

    def attend(q, k, v):
        return tilewise.attention(q, k, v, causal=True, return_lse=True, return_max_logits=True)

    want = attend(q, k, v)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            got = compiled(q, k, v)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    (got[0].sum() if got[0].requires_grad else compiled(q, k, v)[0].sum()).backward()
    torch.testing.assert_close(q.grad, torch.autograd.grad(want[0].sum(), q)[0])

    inputs = [x.detach() for x in (q, k, v)]
    mapped = torch.func.vmap(lambda *x: attend(*(y[None] for y in x)))(*inputs)
    for got, whole in zip(mapped, want, strict=True):
        torch.testing.assert_close(got[:, 0], whole, rtol=1e-6, atol=1e-6)

    def results(q, k, v):
        *first, logits = attend(q, k, v)
        return tuple(first), logits

    def alone(q, k, v):
        return tilewise.attention(q, k, v, causal=True, return_lse=True)

    tangents = tuple(torch.ones_like(x) for x in inputs)
    _, got, logits = torch.func.jvp(results, tuple(inputs), tangents, has_aux=True)
    _, expected = torch.func.jvp(alone, tuple(inputs), tangents)
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    torch.testing.assert_close(logits, want[2])


def test_a_flag_that_is_none_is_refused():
    q, k, v = tensors()
    for arrays in ((q, k, v), [x.numpy() for x in (q, k, v)]):
        with pytest.raises(TypeError, match="return_max_logits is 'yes'"):
            tilewise.attention(*arrays, return_max_logits="yes")


def test_explain_names_the_kernel_that_writes_them():
    q, k, v = tensors()
    one_row = q[:, :1]
    assert "(stream)" in tilewise.explain(one_row, k, v).forward.why  # the decode kernels
    for arrays in ((one_row, k, v), [x.numpy() for x in (one_row, k, v)]):
        plan = tilewise.explain(*arrays, return_max_logits=True).forward
        assert "(stream)" not in plan.why
        plan = tilewise.explain(*arrays, cache_seqlens=170, return_max_logits=True).forward
        assert "(stream)" not in plan.why


def cached(kind, name):
    """attention_with_kvcache's arguments in one of its forms, and the visible keys of each row."""
    torch.manual_seed(1)
    batch, rows, capacity, new = 3, 2, 24, 2
    cache = torch.randn(batch, capacity, 2, 32)
    lengths = torch.tensor([5, 0, 20])
    given = dict(
        q=torch.randn(batch, rows, 4, 32), k_cache=cache.clone(), v_cache=cache.clone(),
        k=torch.randn(batch, new, 2, 32), v=torch.randn(batch, new, 2, 32), cache_seqlens=lengths,
    )  # fmt: skip
    keys = cache.clone()
    for b, length in enumerate(lengths):
        keys[b, length : length + new] = given["k"][b]
    seen = torch.arange(capacity) < (lengths + new)[:, None, None]
    seen = seen.expand(batch, rows, capacity).clone()
    if name == "pages":
        given |= dict(block_table=torch.arange(9).reshape(3, 3).flip(0).int())
        for cached in ("k_cache", "v_cache"):
            given[cached] = given[cached].reshape(3, 3, 8, 2, 32).flip(0).reshape(9, 8, 2, 32)
    elif name == "causal and softcap":
        given |= dict(causal=True, softcap=2.0)
        seen[:, 0] &= torch.arange(capacity) < (lengths + new - 1)[:, None]
    elif name == "packed queries":
        given |= dict(q=given["q"].flatten(0, 1), cu_seqlens_q=torch.tensor([0, 2, 4, 6]))
    elif name in ("indices", "packed indices"):
        indices = torch.tensor([[3, -1, 9], [25, 25, 2], [99, -1, -7]]).int()
        given |= dict(indices=indices[:, None].repeat(1, rows, 1))
        flat = torch.zeros(batch, rows, batch * capacity, dtype=torch.bool)
        for b, slots in enumerate(indices):
            flat[b, :, [i for i in slots if 0 <= i < batch * capacity]] = True
        keys, seen = keys.reshape(1, -1, 2, 32).expand(batch, -1, -1, -1), flat
        if name == "packed indices":  # the last row belongs to no sequence
            q = torch.cat((given["q"].flatten(0, 1), torch.randn(1, 4, 32)))
            given |= dict(q=q, cu_seqlens_q=torch.tensor([0, 2, 4, 6]))
            given |= dict(indices=torch.cat((given["indices"].flatten(0, 1), indices[:1])))
    rows_of = given["q"][:6].reshape(batch, rows, 4, 32)
    return {n: kind(x) if torch.is_tensor(x) else x for n, x in given.items()}, rows_of, keys, seen


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: x.numpy()], ids=["tensors", "arrays"])
@pytest.mark.parametrize(
    "name",
    ["dense", "pages", "causal and softcap", "packed queries", "indices", "packed indices"],
)
def test_results_of_a_cache(kind, name):
    given, q, keys, seen = cached(kind, name)
    want = np.stack(
        [largest(q[b : b + 1], keys[b : b + 1], 32**-0.5, seen[b].numpy())[0] for b in range(3)]
    )
    out, lse, logits = tilewise.attention_with_kvcache(
        **given, return_lse=True, return_max_logits=True
    )
    np.testing.assert_allclose(np.asarray(logits), want, rtol=1e-6, atol=1e-6)
    given, *_ = cached(kind, name)
    plain = tilewise.attention_with_kvcache(**given, return_lse=True)
    for x, y in ((out, plain[0]), (lse, plain[1])):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=2e-5, atol=2e-6)
    given, *_ = cached(kind, name)
    pair = tilewise.attention_with_kvcache(**given, return_max_logits=True)
    assert len(pair) == 2 and np.array_equal(np.asarray(pair[1]), np.asarray(logits))
    if "indices" in name:
        assert np.isneginf(np.asarray(logits)[2]).all()  # its indices select nothing
