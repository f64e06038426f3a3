"""Attention with a key/value cache: append, rotary, paging, padding, windows, splits.

Each case computes the contents that the cache must have after the append. They are compared bitwise
where nothing is rotated, and nothing else may have changed.
"""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import compat_reference as reference  # noqa: E402
import devices  # noqa: E402
import tilewise  # noqa: E402
from compat_reference import assert_as_good  # noqa: E402

pytestmark = pytest.mark.tensors

HEAD_DIM, HEAD_DIM_V, CAPACITY = 24, 16, 48


class Cache:
    """A cache of random keys, contiguous or paged, and its contiguous form [B, capacity, Hkv,
    D]."""

    def __init__(
        self, batch, heads_kv, dtype, page_size=0, batch_idx=False, seed=0, capacity=CAPACITY
    ):
        g = devices.generator(seed)
        self.capacity = capacity
        self.page_size, self.table, self.index = page_size, None, None
        rows = batch + 2 if batch_idx else batch
        if page_size:
            width = -(-capacity // page_size)
            pages = width * batch + 3
            self.table = torch.randperm(pages, generator=g)[: width * batch]
            self.table = self.table.reshape(batch, width).int()
            shape = (pages, page_size)
        else:
            shape = (rows, capacity)
        if batch_idx:
            self.index = torch.randperm(rows, generator=g)[:batch].int()
        self.k = torch.randn(*shape, heads_kv, HEAD_DIM, generator=g).to(dtype)
        self.v = torch.randn(*shape, heads_kv, HEAD_DIM_V, generator=g).to(dtype)

    def as_contiguous(self, cache):
        """The rows of every sequence, in order."""
        if self.table is not None:
            return cache[self.table.long()].flatten(1, 2)[:, : self.capacity]
        return cache if self.index is None else cache[self.index.long()]

    def arguments(self):
        return dict(block_table=self.table, cache_batch_idx=self.index)


def rotary_tables(dtype, rotary_dim=16, positions=CAPACITY + 8):
    angle = torch.rand(positions, rotary_dim // 2, generator=devices.generator(5)) * 6.3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def expected(q, cache, k, v, lengths, leftpad, rotary, interleaved, options, dtype):
    """(out, lse, contiguous k, contiguous v) computed in `dtype`."""
    batch, rows = q.shape[:2]
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k_rows, v_rows = (cache.as_contiguous(x).to(dtype).clone() for x in (cache.k, cache.v))
    starts = torch.tensor(lengths)[:, None]
    if rotary is not None:
        cos, sin = (x.to(dtype) for x in rotary)
        windowed = options.get("causal") or any(
            x is not None for x in options.get("window", (None, None))
        )
        steps = torch.arange(rows) if windowed else torch.zeros(rows, dtype=torch.long)
        # The reference rotates complex numbers, which do not exist in 16 bits.
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        turned = [
            reference.rotate(x.to(wide), cos.to(wide), sin.to(wide), p, interleaved).to(dtype)
            for x, p in ((q, starts + steps), (k, starts + torch.arange(k.shape[1])))
        ]
        q, k = turned
    outs, lses = [], []
    for b in range(batch):
        end = lengths[b] + k.shape[1]
        k_rows[b, lengths[b] : end] = k[b]
        v_rows[b, lengths[b] : end] = v[b]
        known = dict(options)
        slopes = known.pop("alibi_slopes", None)
        out, lse = reference.attend_one(
            q[b],
            k_rows[b, leftpad[b] : end],
            v_rows[b, leftpad[b] : end],
            slopes=slopes[b] if slopes is not None and slopes.ndim == 2 else slopes,
            **known,
        )
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses), k_rows, v_rows


def check(
    dtype,
    heads=4,
    heads_kv=2,
    rows=3,
    new=3,
    lengths=(11, 0, 44),
    leftpad=None,
    rotary=False,
    interleaved=True,
    num_splits=0,
    page_size=0,
    batch_idx=False,
    verify=False,
    **options,
):
    batch, options = len(lengths), devices.moved(options)
    cache = Cache(batch, heads_kv, dtype, page_size, batch_idx)
    g = devices.generator(1)
    q = torch.randn(batch, rows, heads, HEAD_DIM, generator=g).to(dtype)
    k = torch.randn(batch, new, heads_kv, HEAD_DIM, generator=g).to(dtype)
    v = torch.randn(batch, new, heads_kv, HEAD_DIM_V, generator=g).to(dtype)
    tables = rotary_tables(dtype) if rotary else None
    pad = leftpad or [0] * batch
    common = (q, cache, k, v, lengths, pad, tables, interleaved, options)
    plain, exact = expected(*common, dtype), expected(*common, torch.float64)
    untouched = cache.k.clone(), cache.v.clone()
    q_before = q.clone()
    out, lse = tilewise.attention_with_kvcache(
        q,
        cache.k,
        cache.v,
        k if new else None,
        v if new else None,
        cache_seqlens=torch.tensor(lengths),
        cache_leftpad=None if leftpad is None else torch.tensor(leftpad),
        rotary_cos=tables and tables[0],
        rotary_sin=tables and tables[1],
        rotary_interleaved=interleaved,
        num_splits=num_splits,
        return_lse=True,
        check=verify,
        **cache.arguments(),
        **options,
    )
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(q, q_before)
    assert_as_good(out, plain[0], exact[0], 2, "out")
    assert_as_good(lse, plain[1], exact[1], 2, "lse")
    assert torch.equal(cache.as_contiguous(cache.v), plain[3]), "v_cache"
    k_contiguous = cache.as_contiguous(cache.k)
    if rotary:
        assert_as_good(k_contiguous, plain[2], exact[2], 2, "k_cache")
    else:
        assert torch.equal(k_contiguous, plain[2]), "k_cache"
    # Outside of the new rows the caches are unchanged, including pages that no sequence uses.
    for now, before, name in zip((cache.k, cache.v), untouched, "kv", strict=True):
        changed = (now != before).flatten(2).any(-1)
        assert int(changed.sum()) <= batch * new, f"{name}_cache"


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def append_cases():
    """All combinations in fp32; the 16-bit dtypes have one band, in rotation, per combination of
    the other parameters."""
    bands = ("full", "causal", "local")
    others = itertools.product(
        (0, 1, 16, 256), ("none", "interleaved", "halves"), (None, [4, 0, 31])
    )
    for i, other in enumerate(others):
        for band in bands:
            yield (torch.float32, *other, band)
        yield (torch.float16, *other, bands[i % 3])
        yield (torch.bfloat16, *other, bands[(i + 1) % 3])


@pytest.mark.parametrize(("dtype", "page_size", "rotary", "leftpad", "band"), append_cases())
def test_append(dtype, page_size, rotary, leftpad, band):
    window = dict(full={}, causal=dict(causal=True), local=dict(window=(8, 1)))[band]
    check(
        dtype,
        page_size=page_size,
        rotary=rotary != "none",
        interleaved=rotary == "interleaved",
        leftpad=leftpad,
        **window,
    )


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("leftpad", [None, [4, 0, 31]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_index(dtype, rotary, leftpad):
    check(dtype, batch_idx=True, rotary=rotary, leftpad=leftpad, causal=True)


@pytest.mark.parametrize(
    "where", [dict(batch_idx=True), dict(page_size=16), dict(page_size=5, leftpad=[4, 0, 31])]
)
@pytest.mark.parametrize(("new", "lengths"), [(3, (11, 0, 45)), (0, (0, 11, 48))])
def test_valid_entries_pass_their_check(new, lengths, where):
    if where.get("leftpad"):
        lengths = (11, 0, 45)
    check(torch.float32, new=new, lengths=lengths, rotary=new > 0, verify=True, **where)


@pytest.mark.parametrize(("rows", "new"), [(1, 1), (1, 4), (5, 2), (4, 0), (7, 7)])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_and_heads(rows, new, heads_kv, page_size, causal):
    lengths = (11, 3, 40) if new else (11, 0, 48)
    check(
        torch.float32,
        rows=rows,
        new=new,
        heads_kv=heads_kv,
        page_size=page_size,
        causal=causal,
        lengths=lengths,
    )


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    "options",
    [
        dict(softcap=3.0),
        dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        dict(alibi_slopes=torch.tensor([0.5, 0.1, 0.02, 0.0]), causal=True),
        dict(alibi_slopes=torch.rand(3, 4)),
        dict(scale=0.4, window=(None, 0)),
        dict(window=(3, 0)),
    ],
    ids=["softcap", "sinks", "alibi", "alibi_batch", "scale", "window"],
)
def test_options_and_splits(page_size, num_splits, options):
    check(torch.float32, page_size=page_size, num_splits=num_splits, leftpad=[3, 0, 7], **options)


@pytest.mark.parametrize("rotary_dim", [2, 8, HEAD_DIM])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_dimensions(rotary_dim, interleaved):
    cache = Cache(1, 1, torch.float32)
    k, v = torch.randn(1, 2, 1, HEAD_DIM), torch.randn(1, 2, 1, HEAD_DIM_V)
    cos, sin = rotary_tables(torch.float32, rotary_dim)
    tilewise.attention_with_kvcache(
        torch.randn(1, 2, 1, HEAD_DIM),
        cache.k,
        cache.v,
        k,
        v,
        cache_seqlens=9,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
    )
    want = reference.rotate(
        k.double(), cos.double(), sin.double(), torch.arange(9, 11), interleaved
    )
    assert_as_good(cache.k[:, 9:11], None, want, 2, "k_cache")
    assert torch.equal(cache.k[:, 9:11, :, rotary_dim:], k[..., rotary_dim:])


def test_decoder_steps_agree_with_one_pass():
    """Prefill of 5, then single tokens: the same as causal attention over the whole sequence."""
    torch.manual_seed(0)
    total, heads, heads_kv = 14, 4, 2
    q = torch.randn(2, total, heads, HEAD_DIM)
    k, v = torch.randn(2, total, heads_kv, HEAD_DIM), torch.randn(2, total, heads_kv, HEAD_DIM_V)
    cos, sin = rotary_tables(torch.float32)
    k_cache = torch.full((2, CAPACITY, heads_kv, HEAD_DIM), float("nan"))
    v_cache = torch.full((2, CAPACITY, heads_kv, HEAD_DIM_V), float("nan"))
    steps, done = [], 0
    for size in (5, *[1] * 9):
        rows = slice(done, done + size)
        steps.append(
            tilewise.attention_with_kvcache(
                q[:, rows],
                k_cache,
                v_cache,
                k[:, rows],
                v[:, rows],
                cache_seqlens=done,
                rotary_cos=cos,
                rotary_sin=sin,
                causal=True,
            )
        )
        done += size
    positions = torch.arange(total).expand(2, total)
    turned = [
        reference.rotate(x.double(), cos.double(), sin.double(), positions, True) for x in (q, k)
    ]
    want, _ = reference.attend(*turned, v.double(), causal=True)
    got = torch.cat(steps, dim=1)
    assert_as_good(got, None, want, 2, "out")


@pytest.mark.tensors("cpu")
def test_threads_do_not_change_what_is_written():
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            cache = Cache(3, 2, torch.float16, page_size=3)
            g = devices.generator(2)
            q, k = (torch.randn(3, 40, h, HEAD_DIM, generator=g).half() for h in (4, 2))
            v = torch.randn(3, 40, 2, HEAD_DIM_V, generator=g).half()
            cos, sin = rotary_tables(torch.float16)
            out = tilewise.attention_with_kvcache(
                q,
                cache.k,
                cache.v,
                k,
                v,
                cache_seqlens=torch.tensor([0, 8, 3]),
                rotary_cos=cos,
                rotary_sin=sin,
                causal=True,
                **cache.arguments(),
            )
            results.append((out, cache.k, cache.v))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_strided_caches_and_inputs():
    """The caches are views of one tensor [B, S, 2, H, D], and q has heads before rows."""
    torch.manual_seed(0)
    both = torch.randn(2, CAPACITY, 2, 2, HEAD_DIM)
    before = both.clone()
    q = torch.randn(2, 4, 3, HEAD_DIM).transpose(1, 2)
    kv = torch.randn(2, 3, 2, 2, HEAD_DIM)
    lengths = torch.tensor([5, 17], dtype=torch.int32)
    out = tilewise.attention_with_kvcache(
        q,
        both[:, :, 0],
        both[:, :, 1],
        kv[:, :, 0],
        kv[:, :, 1],
        cache_seqlens=lengths,
        causal=True,
    )
    for b, n in enumerate(lengths.tolist()):
        before[b, n : n + 3] = kv[b]
        rows = before[b, : n + 3]
        want, _ = reference.attend_one(q[b].double(), *rows.double().unbind(1), causal=True)
        assert_as_good(out[b], None, want, 2, "out")
    assert torch.equal(both, before)


def test_without_lengths_the_cache_is_full():
    cache = Cache(2, 2, torch.float32)
    q = torch.randn(2, 3, 4, HEAD_DIM)
    got = tilewise.attention_with_kvcache(q, cache.k, cache.v)
    want, _ = reference.attend(q, cache.k, cache.v, dtype=torch.float64)
    assert_as_good(got, None, want, 2, "out")


def test_empty_cache_gives_zeros():
    cache = Cache(1, 2, torch.float32)
    q = torch.randn(1, 2, 4, HEAD_DIM)
    out, lse = tilewise.attention_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=0, return_lse=True
    )
    assert torch.equal(out, torch.zeros_like(out)) and (lse == float("-inf")).all()


def valid():
    torch.manual_seed(0)
    cache = Cache(2, 2, torch.float32, page_size=4)
    return dict(
        q=torch.randn(2, 2, 4, HEAD_DIM),
        k_cache=cache.k,
        v_cache=cache.v,
        k=torch.randn(2, 2, 2, HEAD_DIM),
        v=torch.randn(2, 2, 2, HEAD_DIM_V),
        cache_seqlens=torch.tensor([4, 9]),
        block_table=cache.table,
        rotary_cos=torch.randn(CAPACITY, 4),
        rotary_sin=torch.randn(CAPACITY, 4),
    )


@pytest.mark.parametrize("leftpad", [None, [4, 8]])
def test_block_table_entries_of_unused_pages_are_ignored(leftpad):
    """6 and 11 keys in pages of 4 use the first two and three pages; left padding frees the
    first."""
    arguments = valid()
    want = tilewise.attention_with_kvcache(
        **arguments, cache_leftpad=None if leftpad is None else torch.tensor(leftpad)
    )
    arguments = valid()
    table = arguments["block_table"]
    table[0, 2:], table[1, 3:] = -1, 10**6
    if leftpad:
        table[0, 0], table[1, 0], table[1, 1] = -7, -7, 99
    got = tilewise.attention_with_kvcache(
        **arguments, cache_leftpad=None if leftpad is None else torch.tensor(leftpad)
    )
    assert devices.equal(got, want)


def test_valid_arguments_are_accepted():
    arguments = valid()
    assert tilewise.attention_with_kvcache(**arguments).shape == (2, 2, 4, HEAD_DIM_V)


def test_flash_attn_with_kvcache_is_the_same_function():
    from tilewise.compat.flash_attn import flash_attn_with_kvcache

    for causal, page_size in itertools.product((False, True), (0, 4)):
        caches = [Cache(2, 2, torch.float32, page_size) for _ in range(2)]
        given = valid() | dict(block_table=caches[0].table)
        rest = {n: given[n] for n in given if n not in ("k_cache", "v_cache", "q")}
        common = dict(causal=causal, softcap=2.0, **rest)
        native = tilewise.attention_with_kvcache(
            given["q"],
            caches[0].k,
            caches[0].v,
            window=(7, None),
            scale=0.3,
            return_lse=True,
            **common,
        )
        compat = flash_attn_with_kvcache(
            given["q"],
            caches[1].k,
            caches[1].v,
            window_size=(7, -1),
            softmax_scale=0.3,
            return_softmax_lse=True,
            **common,
        )
        assert all(devices.equal(a, b) for a, b in zip(native, compat, strict=True))
        assert torch.equal(caches[0].k, caches[1].k) and torch.equal(caches[0].v, caches[1].v)


def test_flash_attn_uses_the_first_rows_of_a_larger_cache():
    from tilewise.compat.flash_attn import flash_attn_with_kvcache

    cache = Cache(5, 2, torch.float32)
    q = torch.randn(2, 1, 4, HEAD_DIM)
    got = flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=9)
    want, _ = reference.attend(q, cache.k[:2, :9], cache.v[:2, :9], dtype=torch.float64)
    assert_as_good(got, None, want, 2, "out")
