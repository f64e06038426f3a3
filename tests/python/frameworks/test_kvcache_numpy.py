"""The cache function on NumPy arrays: bitwise equal to tensors, and it works without PyTorch."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
import textwrap

import numpy as np
import pytest

import test_numpy_abi
import tilewise
from tilewise._kvcache_numpy import KvAppend

HEAD_DIM, HEAD_DIM_V, CAPACITY = 24, 16, 40


def test_append_structure_matches_the_header():
    wanted = test_numpy_abi.fields_of("tilewise_kv_append")
    assert [name for name, _ in KvAppend._fields_] == [name for name, _ in wanted]
    for (name, kind), (_, expected) in zip(KvAppend._fields_, wanted, strict=True):
        if expected is None:
            assert kind is ctypes.c_void_p, name
        else:
            assert kind is expected, name


def problem(dtype, page_size, index, rotary, leftpad, new=2):
    r = np.random.default_rng(0)

    def normal(*shape):
        return r.standard_normal(shape).astype(dtype)

    width = -(-CAPACITY // page_size) if page_size else 0
    rows = (3 * width + 1, page_size) if page_size else (5 if index else 3, CAPACITY)
    arrays = dict(
        q=normal(3, 3, 4, HEAD_DIM),
        k_cache=normal(*rows, 2, HEAD_DIM),
        v_cache=normal(*rows, 2, HEAD_DIM_V),
        cache_seqlens=np.array([9, 0, 38], np.int32),
    )
    if new:
        arrays |= dict(k=normal(3, new, 2, HEAD_DIM), v=normal(3, new, 2, HEAD_DIM_V))
    if page_size:
        table = r.permutation(3 * width + 1)[: 3 * width]
        arrays["block_table"] = table.reshape(3, width).astype(np.int32)
    elif index:
        arrays["cache_batch_idx"] = np.array([4, 0, 2], np.int32)
    if rotary:
        arrays |= dict(rotary_cos=normal(CAPACITY + 2, 4), rotary_sin=normal(CAPACITY + 2, 4))
    if leftpad:
        arrays["cache_leftpad"] = np.array([3, 0, 20], np.int32)
    return arrays


@pytest.mark.parametrize(("batch", "rows"), [(0, 8), (2, 0)])
def test_empty_caches(batch, rows):
    q, cache = np.zeros((batch, 1, 4, 8), np.float32), np.zeros((batch, rows, 1, 8), np.float32)
    out, lse = tilewise.attention_with_kvcache(q, cache, cache, return_lse=True)
    np.testing.assert_array_equal(out, np.zeros_like(q))
    np.testing.assert_array_equal(lse, np.full((batch, 4, 1), -np.inf))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("page_size", "index"), [(0, False), (0, True), (1, False), (16, False)])
@pytest.mark.parametrize(
    ("rotary", "leftpad"), list(itertools.product((False, True), (False, True)))
)
@pytest.mark.parametrize("causal", [False, True])
def test_arrays_and_tensors_agree_bitwise(dtype, page_size, index, rotary, leftpad, causal):
    torch = pytest.importorskip("torch")
    arrays = problem(dtype, page_size, index, rotary, leftpad)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
    options = dict(causal=causal, softcap=3.0, scale=0.4, rotary_interleaved=False, return_lse=True)
    before = arrays["q"].copy()
    got = tilewise.attention_with_kvcache(**arrays, **options)
    want = tilewise.attention_with_kvcache(**tensors, **options)
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy(), name)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(arrays[name], tensors[name].numpy(), name)
    np.testing.assert_array_equal(arrays["q"], before)


def test_options_reach_the_library():
    torch = pytest.importorskip("torch")
    arrays = problem(np.float32, 0, False, False, False, new=0)
    options = dict(
        window=(5, 1),
        alibi_slopes=np.linspace(0.1, 0.4, 4, dtype=np.float32),
        sinks=np.linspace(-1, 1, 4, dtype=np.float32),
        num_splits=2,
    )
    got = tilewise.attention_with_kvcache(**arrays, **options)
    for name in ("alibi_slopes", "sinks"):
        options[name] = torch.from_numpy(options[name])
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    np.testing.assert_array_equal(got, tilewise.attention_with_kvcache(**tensors, **options))
    arrays["cache_seqlens"] = 17
    plain = tilewise.attention_with_kvcache(**arrays)
    first = (arrays[name][:, :17] for name in ("k_cache", "v_cache"))
    np.testing.assert_allclose(plain, tilewise.attention(arrays["q"], *first), atol=1e-6)


def test_caches_may_be_views():
    both = np.zeros((2, 10, 2, 1, 8), np.float32)
    k, v = (np.random.default_rng(i).standard_normal((2, 3, 1, 8), np.float32) for i in range(2))
    q = np.ones((2, 1, 1, 8), np.float32)
    tilewise.attention_with_kvcache(q, both[:, :, 0], both[:, :, 1], k, v, cache_seqlens=4)
    np.testing.assert_array_equal(both[:, 4:7, 0], k)
    np.testing.assert_array_equal(both[:, 4:7, 1], v)
    assert not both[:, :4].any() and not both[:, 7:].any()


def wrong(**changes):
    return problem(np.float32, 0, False, True, False) | changes


def frozen(array):
    array.flags.writeable = False
    return array


def field_of_records(array):
    """The array as a field of packed records: strides are no multiples of an element's bytes."""
    records = np.zeros(array.shape[:-1], [("rows", array.dtype, array.shape[-1:]), ("flag", "i1")])
    records["rows"] = array
    return records["rows"]


GOOD = wrong()
BAD = {
    "q": dict(q=GOOD["q"][..., :-1]),
    "q heads": dict(q=GOOD["q"][:, :, :3]),
    "k_cache": dict(k_cache=GOOD["k_cache"][:2]),
    "k_cache dimensions": dict(k_cache=np.zeros((), np.float32)),
    "k_cache read-only": dict(k_cache=frozen(GOOD["k_cache"].copy())),
    "k_cache strides": dict(k_cache=np.asfortranarray(GOOD["k_cache"])),
    "k_cache field": dict(k_cache=field_of_records(GOOD["k_cache"])),
    "v_cache": dict(v_cache=GOOD["v_cache"][:, :-1]),
    "v": dict(v=None),
    "k": dict(k=GOOD["k"].astype(np.float16)),
    "v rows": dict(v=GOOD["v"][:, :1]),
    "cache_seqlens": dict(cache_seqlens=np.array([9, 0, CAPACITY], np.int32)),
    "cache_seqlens type": dict(cache_seqlens=np.array([9.0, 0.0, 3.0])),
    "cache_seqlens missing": dict(cache_seqlens=None),
    "rotary_sin": dict(rotary_sin=None),
    "rotary_cos": dict(rotary_cos=GOOD["rotary_cos"].astype(np.float16)),
    "cache_leftpad": dict(cache_leftpad=np.zeros(2, np.int32)),
    "block_table": dict(block_table=np.zeros((2, 1), np.int32)),
    "block_table type": dict(block_table=[[0, 1]]),
    "rotary_interleaved": dict(rotary_interleaved="yes"),
    "cache_batch_idx": dict(cache_batch_idx=np.array([0, 1, 7], np.int32)),
    "cache_batch_idx twice": dict(cache_batch_idx=np.array([0, 2, 0], np.int32)),
    "cache_leftpad entry": dict(cache_leftpad=np.array([10, 0, 0], np.int32)),
    "rotary_cos rows": dict(rotary_cos=GOOD["rotary_cos"][:9], rotary_sin=GOOD["rotary_sin"][:9]),
    "q dimensions": dict(q=np.zeros((), np.float32)),
    "alibi_slopes": dict(alibi_slopes=np.zeros(3, np.float32)),
    "sinks": dict(sinks=np.zeros(3, np.float32)),
    "num_splits": dict(num_splits=-2),
    "num_splits of batch_invariant": dict(num_splits=3, batch_invariant=True),
    "max_seqlen_q": dict(
        q=GOOD["q"].reshape(-1, 4, HEAD_DIM), cu_seqlens_q=np.array([0, 3, 6, 9]), max_seqlen_q=1
    ),
    "num_splits wraps": dict(num_splits=2**32),
    "check": dict(check="no"),
    "softcap": dict(softcap=-2.0),
    "window": dict(window=(1,)),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_name_the_argument_and_write_nothing(name):
    arrays = wrong(**BAD[name])
    before = arrays["k_cache"].copy(), arrays["v_cache"].copy()
    with pytest.raises((ValueError, TypeError), match=rf"\b{name.split()[0]}\b"):
        tilewise.attention_with_kvcache(**arrays)
    np.testing.assert_array_equal(arrays["k_cache"], before[0])
    np.testing.assert_array_equal(arrays["v_cache"], before[1])


def test_no_framework_is_imported():
    code = """
        import sys
        import numpy as np
        import tilewise
        x = np.ones((1, 4, 1, 8), np.float32)
        out = tilewise.attention_with_kvcache(
            x, np.zeros((1, 9, 1, 8), np.float32), np.zeros((1, 9, 1, 8), np.float32), x, x,
            cache_seqlens=0,
        )
        assert np.array_equal(out, x), out
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)
