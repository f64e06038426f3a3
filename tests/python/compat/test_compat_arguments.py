"""Numbers in containers other than Python's, which the originals accept, in every compat function.

FlashAttention hands windows, bounds and splits to a C++ extension, which accepts anything that
converts to a number: its own tests pass ``torch.randint(0, seqlen, (2,))`` as a window.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import devices  # noqa: E402
from tilewise.compat import flash_attn as fa2  # noqa: E402
from tilewise.compat import flash_attn_interface as fa3  # noqa: E402
from tilewise.compat.flash_attn import flash_attn_interface as private  # noqa: E402
from tilewise.compat.flash_attn.layers.rotary import RotaryEmbedding  # noqa: E402
from tilewise.compat.flash_attn.modules.mha import MHA, FlashSelfAttention  # noqa: E402

pytestmark = pytest.mark.tensors

# Containers in which a number or a pair of numbers may come.
NUMBERS = {
    "numpy": np.asarray,
    "numpy scalar": lambda x: np.asarray(x)[()],
    "one element": lambda x: np.asarray([x]),
    "torch": lambda x: torch.tensor(x, device="cpu"),
    "default device": torch.tensor,
}
PAIRS = {
    "list": list,
    "numpy": np.asarray,
    "torch": lambda pair: torch.tensor(pair, device="cpu"),
    "default device": torch.tensor,
    "numpy scalars": lambda pair: tuple(np.int64(x) for x in pair),
    "torch scalars": lambda pair: [torch.tensor(x) for x in pair],
}


def tensors(rows=9, keys=14, dtype=torch.float32):
    g = devices.generator(0)
    shapes = ((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    return [torch.randn(*s, generator=g).to(dtype) for s in shapes]


def starts(*entries):
    return torch.tensor(entries, dtype=torch.int32)


def fa2_dense(**options):
    return fa2.flash_attn_func(*tensors(), **options)


def fa2_qkvpacked(**options):
    q, k, v = tensors(14)
    return fa2.flash_attn_qkvpacked_func(torch.stack((q[:, :, :2], k, v), 2), **options)


def fa2_kvpacked(**options):
    q, k, v = tensors()
    return fa2.flash_attn_kvpacked_func(q, torch.stack((k, v), 2), **options)


def fa2_varlen(most=9, **options):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    ends = starts(0, 9, 18), starts(0, 14, 28)
    return fa2.flash_attn_varlen_func(q, k, v, *ends, most, 14, **options)


def fa2_varlen_kvpacked(most=9, **options):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    ends = starts(0, 9, 18), starts(0, 14, 28)
    return fa2.flash_attn_varlen_kvpacked_func(
        q, torch.stack((k, v), 1), *ends, most, 14, **options
    )


def fa2_varlen_qkvpacked(most=14, **options):
    q, k, v = (x.flatten(0, 1) for x in tensors(14))
    qkv = torch.stack((q[:, :2], k, v), 1)
    return fa2.flash_attn_varlen_qkvpacked_func(qkv, starts(0, 14, 28), most, **options)


def fa2_cache(cache_seqlens=11, **options):
    q, k, v = tensors(rows=3)
    return fa2.flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens, **options)


def fa3_dense(**options):
    return fa3.flash_attn_func(*tensors(), **options)


def fa3_qkvpacked(**options):
    q, k, v = tensors(14)
    return fa3.flash_attn_qkvpacked_func(torch.stack((q[:, :, :2], k, v), 2), **options)


def fa3_varlen(most=9, **options):
    q, k, v = (x.flatten(0, 1) for x in tensors())
    ends = starts(0, 9, 18), starts(0, 14, 28)
    return fa3.flash_attn_varlen_func(q, k, v, *ends, most, 14, **options)


def fa3_cache(cache_seqlens=11, **options):
    q, k, v = tensors(rows=3)
    return fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=cache_seqlens, **options)


def self_attention(window_size):
    q, k, v = tensors(14)
    return FlashSelfAttention(window_size=window_size)(torch.stack((q[:, :, :2], k, v), 2))


def mha(window_size):
    torch.manual_seed(0)
    return MHA(32, 2, window_size=window_size, use_flash_attn=True)(torch.randn(2, 9, 32))


def halves(function):
    """Adapts a private function, which takes the two sides of a window separately."""

    def call(window_size, **options):
        left, right = window_size
        return function(*tensors(), left, right, **options)

    return call


def fa2_private(q, k, v, left, right, dropout_p=0.0, scale=0.25, softcap=0.0):
    return private._flash_attn_forward(
        q, k, v, dropout_p, scale, False, left, right, softcap, None, False
    )[0]


def fa3_private(q, k, v, left, right, **options):
    options = dict(window_size_left=left, window_size_right=right, softmax_scale=0.25) | options
    return fa3._flash_attn_forward(q, k, v, **options)[0]


WINDOWED = [
    fa2_dense, fa2_qkvpacked, fa2_kvpacked, fa2_varlen, fa2_varlen_kvpacked, fa2_varlen_qkvpacked,
    fa2_cache, fa3_dense, fa3_qkvpacked, fa3_varlen, fa3_cache, self_attention, mha,
    halves(fa2_private), halves(fa3_private),
]  # fmt: skip
FUNCTIONS = WINDOWED[:11]


@pytest.mark.parametrize("pair", [(3, 1), (-1, 1), (4, -1), (-1, -1)], ids=str)
@pytest.mark.parametrize("container", PAIRS)
@pytest.mark.parametrize("call", WINDOWED)
def test_window_in_any_container(call, container, pair):
    wanted = call(window_size=pair)
    assert devices.equal(call(window_size=PAIRS[container](pair)), wanted)
    if pair != (-1, -1):
        assert not devices.equal(call(window_size=(-1, -1)), wanted)


@pytest.mark.parametrize("wrong", [3, (1, 2, 3), None, np.zeros(3, np.int64), torch.zeros(2, 2)])
@pytest.mark.parametrize("call", FUNCTIONS)
def test_invalid_window_is_refused_by_name(call, wrong):
    with pytest.raises((ValueError, TypeError), match="window"):
        call(window_size=wrong)


@pytest.mark.parametrize("wrong", [(1.5, 2), torch.tensor([1.5, 2.0]), np.array([0.5, 1.0])])
def test_fractional_window_is_refused(wrong):
    with pytest.raises(TypeError, match=r"window left is .*, but must be an integer"):
        fa2_dense(window_size=wrong)


@pytest.mark.parametrize("container", NUMBERS)
@pytest.mark.parametrize("call", FUNCTIONS)
def test_numpy_and_torch_numbers(call, container):
    wrap = NUMBERS[container]
    for name, value in (("softcap", 3.0), ("softmax_scale", 0.3), ("causal", True)):
        wanted = call(**{name: value})
        assert devices.equal(call(**{name: wrap(value)}), wanted), name
        assert not devices.equal(call(), wanted), name


@pytest.mark.parametrize("container", NUMBERS)
@pytest.mark.parametrize("call", [fa2_dense, fa2_varlen, fa2_kvpacked])
def test_numpy_or_torch_dropout_probability(call, container):
    def dropped(p):
        torch.manual_seed(7)
        return call(dropout_p=p)

    assert devices.equal(dropped(NUMBERS[container](0.4)), dropped(0.4))
    assert not devices.equal(dropped(0.4), call())


@pytest.mark.parametrize("container", NUMBERS)
@pytest.mark.parametrize(
    "call", [fa2_varlen, fa2_varlen_kvpacked, fa2_varlen_qkvpacked, fa3_varlen]
)
def test_numpy_and_torch_bounds(call, container):
    assert devices.equal(call(most=NUMBERS[container](14)), call(most=14))
    with pytest.raises(TypeError, match=r"max_seqlen_q is 14\.5"):
        call(most=14.5)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("container", NUMBERS)
def test_numpy_or_torch_bound_is_enforced(container):
    with pytest.raises((ValueError, RuntimeError), match="max_seqlen_q"):
        fa2_varlen(most=NUMBERS[container](2))


@pytest.mark.parametrize("container", NUMBERS)
@pytest.mark.parametrize("call", [fa2_cache, fa3_cache])
def test_numpy_and_torch_lengths_and_splits(call, container):
    wrap = NUMBERS[container]
    wanted = call(cache_seqlens=5)
    if container != "one element":  # one element would be too few: there are two sequences
        assert devices.equal(call(cache_seqlens=wrap(5)), wanted)
    assert not devices.equal(call(cache_seqlens=11), wanted)
    assert devices.equal(call(num_splits=wrap(2)), call(num_splits=2))
    with pytest.raises(ValueError, match="num_splits is 1000"):
        call(num_splits=wrap(1000))


@pytest.mark.parametrize("call", [fa2_cache, fa3_cache, fa3_dense, fa3_varlen])
def test_negative_num_splits_means_automatic(call):
    """In the originals, the heuristic replaces every number below 1."""
    assert devices.equal(call(num_splits=-1), call(num_splits=0))


@pytest.mark.parametrize("container", NUMBERS)
@pytest.mark.parametrize("call", [fa3_dense, fa3_varlen, fa3_cache])
def test_numpy_or_torch_chunk(call, container):
    wanted = call(attention_chunk=3)
    assert devices.equal(call(attention_chunk=NUMBERS[container](3)), wanted)
    assert not devices.equal(call(), wanted)


@pytest.mark.parametrize("container", NUMBERS)
def test_numpy_or_torch_rotary_offset(container):
    qkv = torch.randn(2, 5, 3, 2, 8)
    wanted = RotaryEmbedding(8)(qkv.clone(), seqlen_offset=4)
    options = dict(max_seqlen=9) if "numpy" not in container else {}
    if container != "one element":
        got = RotaryEmbedding(8)(qkv.clone(), seqlen_offset=NUMBERS[container](4), **options)
        assert devices.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_indices_beyond_int32_do_not_wrap(dtype):
    """2**32 + 5 must not become 5."""
    q, k, v = (x.flatten(0, 1) for x in tensors())
    wide = torch.tensor([0, 9, 2**32 + 18 if dtype == torch.int64 else 2**31 + 18], dtype=dtype)
    if q.device.type == "cpu":
        with pytest.raises((ValueError, RuntimeError), match="cu_seqlens_q"):
            fa2.flash_attn_varlen_func(q, k, v, wide, starts(0, 14, 28), 9, 14)


def paged(page_size=4, rows=6, width=5):
    """Paged caches, and a page table with more rows than there are sequences."""
    g = devices.generator(1)
    pages = torch.randperm(rows * width, generator=g).to(torch.int32)
    caches = [torch.randn(rows * width, page_size, 2, 16, generator=g) for _ in range(2)]
    return *caches, pages.view(rows, width)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("new", [False, True])
def test_page_table_rows_by_batch_index(new, chunk):
    k_pages, v_pages, table = paged()
    index, lengths = starts(4, 1), starts(7, 13)
    q = torch.randn(2, 3, 4, 16)
    keys = [torch.randn(2, 2, 2, 16) for _ in range(2)] if new else [None, None]
    copies = [x.clone() for x in (k_pages, v_pages)]
    options = dict(cache_seqlens=lengths, causal=True, attention_chunk=chunk)
    got = fa3.flash_attn_with_kvcache(
        q, k_pages, v_pages, *keys, page_table=table, cache_batch_idx=index, **options
    )
    wanted = fa3.flash_attn_with_kvcache(q, *copies, *keys, page_table=table[index], **options)
    assert devices.equal(got, wanted)
    assert torch.equal(k_pages, copies[0]) and torch.equal(v_pages, copies[1])
    private_out, *_ = fa3._flash_attn_forward(
        q, k_pages, v_pages, page_table=table, kv_batch_idx=index, seqused_k=lengths, causal=True
    )
    assert private_out.shape == q.shape


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("wrong", [6, -1])
def test_batch_index_outside_the_page_table_is_refused(wrong):
    k_pages, v_pages, table = paged()
    with pytest.raises(ValueError, match=rf"cache_batch_idx has \[{wrong}\], but page_table has 6"):
        fa3.flash_attn_with_kvcache(
            torch.randn(2, 3, 4, 16), k_pages, v_pages, page_table=table,
            cache_batch_idx=starts(0, wrong), cache_seqlens=starts(7, 13),
        )  # fmt: skip


def test_arguments_without_their_counterpart_are_ignored():
    """rotary_seqlens without rotary, cu_seqlens_k_new without new keys: the original ignores
    them."""
    wanted = fa3_cache()
    assert devices.equal(fa3_cache(rotary_seqlens=starts(3, 3)), wanted)
    assert devices.equal(fa3_cache(cu_seqlens_k_new=starts(0, 1, 2)), wanted)
    q, k, v = tensors(rows=3)
    new = [torch.randn(2, 1, 2, 16) for _ in range(2)]
    results = [
        fa3.flash_attn_with_kvcache(
            q, k.clone(), v.clone(), *new, cache_seqlens=starts(5, 9), rotary_seqlens=positions
        )
        for positions in (None, starts(3, 3))
    ]
    assert devices.equal(*results)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("new", [0, 1])
def test_too_short_block_table_raises_like_the_original(on_host, new):
    """This holds where the host knows the lengths; lengths on a GPU are not waited for."""
    k_pages, v_pages, table = paged(width=2)
    q = torch.randn(6, 1, 4, 16)
    keys = [torch.randn(6, new, 2, 16) for _ in range(2)] if new else [None, None]
    wrong, right = 9 - new, 8 - new
    if not on_host:
        if q.device.type != "cpu":
            return
        wrong, right = (torch.full((6,), n, dtype=torch.int32) for n in (wrong, right))
    with pytest.raises(RuntimeError, match=r"block_table has 2 pages .* 8 are allowed"):
        fa2.flash_attn_with_kvcache(
            q, k_pages, v_pages, *keys, cache_seqlens=wrong, block_table=table
        )
    fa2.flash_attn_with_kvcache(q, k_pages, v_pages, *keys, cache_seqlens=right, block_table=table)


@pytest.mark.parametrize("container", [name for name in NUMBERS if name != "default device"])
def test_numpy_or_torch_number_of_heads(container):
    heads = NUMBERS[container](4)
    qkv = torch.randn(2, 5, 8, 8)
    wanted = fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=4)
    assert devices.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=heads), wanted)
    wanted = RotaryEmbedding(8)(qkv.clone(), num_heads_q=4)
    assert devices.equal(RotaryEmbedding(8)(qkv.clone(), num_heads_q=heads), wanted)
