"""Selected keys (top-k sparse attention): each row of q sees the rows of a cache that it names."""

from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
import tilewise  # noqa: E402
from compat_reference import assert_as_good  # noqa: E402

pytestmark = pytest.mark.tensors

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INT32 = torch.iinfo(torch.int32)


def problem(dtype, heads, selected, rows=(3, 2), pages=(6, 16), heads_kv=1, latent=True):
    """(q, k_cache, v_cache or None, indices) with repeated, negative and too large indices."""
    g = devices.generator(0)
    head_dim, head_dim_v = (40, 32) if latent else (24, 16)
    q = torch.randn(*rows, heads, head_dim, generator=g).to(dtype)
    k = torch.randn(*pages, heads_kv, head_dim, generator=g).to(dtype)
    v = None if latent else torch.randn(*pages, heads_kv, head_dim_v, generator=g).to(dtype)
    slots = math.prod(pages)
    indices = torch.randint(0, slots, (*rows, selected), generator=g).int()
    hidden = torch.rand(indices.shape, generator=g)
    nothing = torch.tensor([-1, slots, INT32.max, INT32.min], dtype=torch.int32)
    indices = torch.where(hidden < 0.3, nothing[torch.randint(0, 4, hidden.shape)], indices)
    indices[0, 0] = -1
    return q, k, v, indices


def expected(q, k, v, indices, dtype, scale=None, **options):
    """(out, lse) of each row of q [T, H, D] over the keys that it names, in `dtype`."""
    keys, values = (x.flatten(0, 1).to(dtype) for x in (k, v))
    results = []
    for row, chosen in zip(q.to(dtype), indices.tolist(), strict=True):
        chosen = [i for i in chosen if 0 <= i < len(keys)]
        one = reference.attend_one(row[None], keys[chosen], values[chosen], scale=scale, **options)
        results.append(one)
    return torch.cat([x[0] for x in results]), torch.cat([x[1] for x in results], dim=1)


def check(q, k, v, indices, **options):
    latent = {} if v is not None else dict(head_dim_v=32)
    got = tilewise.attention_with_kvcache(
        q, k, v, indices=indices, return_lse=True, **latent, **options
    )
    flat = q.flatten(0, -3), k, k[..., :32] if v is None else v, indices.flatten(0, -2)
    known = {n: options[n] for n in ("scale", "softcap", "sinks") if n in options}
    out = got[0].flatten(0, -3)
    lse = got[1] if got[1].ndim == 2 else got[1].transpose(0, 1).flatten(1)
    plain = expected(*flat, q.dtype, **known)
    exact = expected(*flat, torch.float64, **known)
    assert got[0].shape == (*q.shape[:-1], flat[2].shape[-1])
    assert_as_good(out, plain[0], exact[0], 2, "out")
    assert_as_good(lse, plain[1], exact[1], 2, "lse")
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("selected", [0, 1, 7, 150])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("latent", [False, True])
def test_decode(dtype, selected, heads, latent):
    """A row that selects nothing gives 0 and -inf."""
    out, lse = check(*problem(dtype, heads, selected, latent=latent))
    assert not out[0, 0].any() and (lse[0, :, 0] == -math.inf).all()


@pytest.mark.parametrize("heads_kv", [1, 2])
@pytest.mark.parametrize("options", [dict(softcap=3.0), dict(num_splits=3), dict(scale=0.1)])
def test_options(heads_kv, options):
    check(*problem(torch.float32, 4, 90, heads_kv=heads_kv, latent=False), **options)


def test_sinks():
    check(*problem(torch.float32, 4, 30), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_rows_after_the_last_sequence_see_nothing(dtype):
    """Prefill: rows of sequences of different lengths, and a row that belongs to none."""
    q, k, _, indices = problem(torch.bfloat16, 16, 40, rows=(7, 1))
    q, indices = q[:, 0], indices[:, 0].to(dtype)
    starts = torch.tensor([0, 4, 4, 6], dtype=torch.int32)
    out, lse = tilewise.attention_with_kvcache(
        q, k, None, head_dim_v=32, indices=indices, cu_seqlens_q=starts, return_lse=True
    )
    assert not out[6].any() and (lse[:, 6] == -math.inf).all()
    plain, exact = (
        expected(q[:6], k, k[..., :32], indices[:6], dtype) for dtype in (q.dtype, torch.float64)
    )
    assert_as_good(out[:6], plain[0], exact[0], 2, "out")
    assert_as_good(lse[:, :6], plain[1], exact[1], 2, "lse")


@pytest.mark.parametrize("packed", [False, True])
def test_float8_factors_are_those_of_the_sequence(packed):
    q, k, _, indices = problem(torch.bfloat16, 16, 50)
    factors = torch.tensor([[0.5], [2.0], [0.25]])
    stored = k.to(torch.float8_e4m3fn)
    wanted = []
    for b in range(3):
        wide = stored.double() * factors[b]
        wanted.append(
            [
                expected(q[b], wide, wide[..., :32], indices[b], dtype)[0]
                for dtype in (torch.bfloat16, torch.float64)
            ]
        )
    if packed:
        q, indices = q.flatten(0, 1), indices.flatten(0, 1)
    starts = torch.tensor([0, 2, 4, 6], dtype=torch.int32) if packed else None
    out = tilewise.attention_with_kvcache(
        q, stored, head_dim_v=32, indices=indices, cu_seqlens_q=starts, k_descale=factors
    ).view(3, 2, 16, 32)
    for b, (plain, exact) in enumerate(wanted):
        assert_as_good(out[b], plain, exact, 2, "out")


@pytest.mark.parametrize("page_size", [0, 16])
def test_new_keys_can_be_selected(page_size):
    """The append goes by lengths and pages, before rows are selected from the whole cache."""
    g = devices.generator(0)
    q = torch.randn(2, 1, 4, 40, generator=g)
    cache = torch.randn(*((5, 16) if page_size else (2, 40)), 1, 40, generator=g)
    k, table = torch.randn(2, 1, 1, 40, generator=g), torch.tensor([[3, 0], [4, 1]]).int()
    lengths = torch.tensor([17, 2], dtype=torch.int32)
    slots = torch.tensor([1, 4 * 16 + 2] if page_size else [17, 40 + 2], dtype=torch.int32)
    indices = torch.stack((slots, slots.flip(0), torch.full_like(slots, 9)), dim=1)[:, None]
    out = tilewise.attention_with_kvcache(
        q, cache, None, k, head_dim_v=32, cache_seqlens=lengths, indices=indices,
        block_table=table if page_size else None,
    )  # fmt: skip
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[slots.long(), 0], k[:, 0, 0])
    exact, _ = expected(q[:, 0], cache, cache[..., :32], indices[:, 0], torch.float64)
    assert_as_good(out[:, 0], None, exact, 2, "out")


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("packed", [False, True])
def test_arrays_agree_bitwise_with_tensors(packed):
    q, k, _, indices = problem(torch.float32, 16, 60)
    options = dict(head_dim_v=32, return_lse=True)
    if packed:
        q, indices = q.flatten(0, 1), indices.flatten(0, 1)
        options["cu_seqlens_q"] = torch.tensor([0, 1, 5], dtype=torch.int32)
    want = tilewise.attention_with_kvcache(q, k, indices=indices, **options)
    arrays = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    got = tilewise.attention_with_kvcache(q.numpy(), k.numpy(), indices=indices.numpy(), **arrays)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("rows", [(0, 1), (2, 0)])
@pytest.mark.parametrize("arrays", [False, True])
def test_no_rows(rows, arrays):
    given = torch.zeros(*rows, 4, 40), torch.zeros(4, 8, 1, 40), torch.zeros(*rows, 5).int()
    q, k, indices = (x.numpy() if arrays else x for x in given)
    out, lse = tilewise.attention_with_kvcache(
        q, k, head_dim_v=32, indices=indices, return_lse=True
    )
    assert tuple(out.shape) == (*rows, 4, 32) and tuple(lse.shape) == (rows[0], 4, rows[1])


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(("starts", "longest"), [([0, 5], None), ([0, 2, 1], None), ([0, 3], 2)])
def test_packed_rows_out_of_range_are_refused(starts, longest, arrays):
    q, indices = torch.zeros(3, 4, 40), torch.zeros(3, 5).int()
    given = q, torch.zeros(4, 8, 1, 40), indices, torch.tensor(starts, dtype=torch.int32)
    q, k, indices, cu_seqlens = (x.numpy() if arrays else x for x in given)
    name = "max_seqlen_q is 2" if longest else rf"cu_seqlens_q\[{len(starts) - 1}\] is"
    with pytest.raises(ValueError, match=name):
        tilewise.attention_with_kvcache(
            q, k, head_dim_v=32, indices=indices, cu_seqlens_q=cu_seqlens, max_seqlen_q=longest
        )


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_call(packed):
    q, k, _, indices = problem(torch.float32, 4, 20)
    options = dict(head_dim_v=32)
    if packed:
        q, indices = q.flatten(0, 1), indices.flatten(0, 1)
        options["cu_seqlens_q"] = torch.tensor([0, 1, 5], dtype=torch.int32)
    want = tilewise.attention_with_kvcache(q, k, indices=indices, **options)
    compiled = torch.compile(tilewise.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, indices=indices, **options), want)


BAD = {
    "causal": (dict(causal=True), "causal or window and indices are both given"),
    "window": (dict(window=(3, None)), "causal or window and indices are both given"),
    "bias": (dict(bias=torch.zeros(1, 1, 2, 96)), "bias and indices are both given"),
    "slopes": (dict(alibi_slopes=torch.zeros(4)), "alibi_slopes and indices are both given"),
    "padding": (dict(cache_leftpad=torch.zeros(3).int()), "cache_leftpad and indices are both"),
    "rows": (dict(indices=torch.zeros(3, 1, 5).int()), r"indices has shape \[3, 1, 5\]"),
    "fractions": (dict(indices=torch.zeros(3, 2, 5)), "indices has dtype .*float32, but must be"),
    "far apart": (
        dict(k_cache=torch.zeros(6, 20, 1, 40)[:, :16]),
        "k_cache has 16 rows a page .* with indices all rows must be equally far apart",
    ),
    "no row for new keys": (
        dict(k_cache=torch.zeros(2, 48, 1, 40), k=torch.zeros(3, 1, 1, 40), cache_seqlens=0),
        "k_cache has batch size 2, but must have 3 like q without cache_batch_idx",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("arrays", [False, True])
def test_refusals_name_the_argument(name, arrays, device):
    if arrays and device.name == "cuda":
        pytest.skip("arrays are in the memory of the CPU")
    q, k, _, indices = problem(torch.float32, 4, 5)
    given = dict(q=q, k_cache=k, indices=indices, head_dim_v=32)
    changes, sentence = BAD[name]
    given |= devices.moved(changes)
    if arrays:
        tensors = {n for n, x in given.items() if isinstance(x, torch.Tensor)}
        given = {n: x.numpy() if n in tensors else x for n, x in given.items()}
    with pytest.raises((TypeError, ValueError), match=sentence):
        tilewise.attention_with_kvcache(**given)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("arrays", [False, True])
def test_a_refused_call_appends_nothing(arrays):
    q, indices, rows = torch.zeros(2, 1, 4, 40), torch.zeros(2, 1, 5).int(), torch.zeros(2, 20, 40)
    cache, k = rows[:, :16, None], torch.ones(2, 1, 1, 40)  # the last 4 rows of a page are skipped
    given = (x.numpy() if arrays else x for x in (q, cache, k, indices))
    q, cache, k, indices = given
    with pytest.raises(ValueError, match="k_cache has 16 rows a page that are 40 elements apart"):
        tilewise.attention_with_kvcache(
            q, cache, None, k, head_dim_v=32, cache_seqlens=0, indices=indices
        )
    assert not rows.any()
