"""Arrays that are not plain arrays in CPU memory are refused by name, never copied or misread."""

from __future__ import annotations

import numpy as np
import pytest

import tilewise


class OnGpu:
    """Mimics a JAX or CuPy array on a GPU; JAX's also has __array__, which copies it to the
    host."""

    def __init__(self, array, **shown):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim
        for name, value in shown.items():
            setattr(self, name, value)

    def __array__(self, *_, **__):
        raise AssertionError("copied to the host")

    def item(self):
        raise AssertionError("copied to the host")


class Jax(OnGpu):
    def __dlpack__(self, **_):
        raise AssertionError("copied to the host")

    def __dlpack_device__(self):
        return (2, 0)  # CUDA


class Numba(OnGpu):
    """Has only the older protocol, __cuda_array_interface__."""

    @property
    def __cuda_array_interface__(self):
        return dict(version=3)


class OnCpu:
    """An array of another framework in CPU memory, which NumPy reads through a copy."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array.copy()


KINDS = {
    "masked": (lambda x: np.ma.array(x, mask=np.zeros(x.shape, bool)), "MaskedArray, whose mask"),
    "jax": (Jax, r"\.Jax on device 0 of DLPack's type 2, but must be a torch\.Tensor, or"),
    "numba": (Numba, r"\.Numba on a GPU, but must be"),
}


def floats(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*entries):
    return np.array(entries, np.int32)


def dense():
    q = floats(2, 5, 4, 8)
    return dict(
        q=q, k=q, v=q, bias=floats(1, 1, 5, 5), alibi_slopes=floats(4), sinks=floats(4),
        scale=floats(1),
    )  # fmt: skip


def packed():
    q = floats(10, 4, 8)
    return dict(
        q=q, k=q, v=q, cu_seqlens_q=ints(0, 4, 10), cu_seqlens_k=ints(0, 4, 10),
        seqused_q=ints(4, 5), seqused_k=ints(4, 5), bias=floats(2, 4, 6, 6),
    )  # fmt: skip


def paged():
    return dict(
        q=floats(2, 3, 4, 8), k_cache=floats(6, 4, 4, 8), v_cache=floats(6, 4, 4, 8),
        k=floats(2, 3, 4, 8), v=floats(2, 3, 4, 8), cache_seqlens=ints(3, 5),
        cache_leftpad=ints(0, 1), block_table=ints(0, 1, 2, 3, 4, 5).reshape(2, 3),
        rotary_cos=floats(20, 4), rotary_sin=floats(20, 4), rotary_seqlens=ints(3, 5),
    )  # fmt: skip


def indexed():
    return dict(
        q=floats(7, 4, 8), k_cache=floats(5, 9, 4, 8), v_cache=floats(5, 9, 4, 8),
        k=floats(3, 4, 8), v=floats(3, 4, 8), cache_seqlens=ints(3, 5),
        cache_batch_idx=ints(3, 1), cu_seqlens_q=ints(0, 3, 7), cu_seqlens_k_new=ints(0, 1, 3),
    )  # fmt: skip


def float8():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q = floats(2, 3, 4, 8).astype(np.float16)
    cache = floats(2, 9, 4, 8).astype(ml_dtypes.float8_e4m3fn)
    factors = np.ones((2, 4), np.float32)
    return dict(q=q, k_cache=cache, v_cache=cache, k_descale=factors, v_descale=factors)


def states():
    return dict(
        out_a=floats(2, 5, 4, 8), lse_a=floats(2, 4, 5), out_b=floats(2, 5, 4, 8),
        lse_b=floats(2, 4, 5),
    )  # fmt: skip


def gradients():
    q = floats(2, 5, 4, 8)
    out, lse = tilewise.attention(q, q, q, return_lse=True)
    return dict(dout=q, q=q, k=q, v=q, out=out, lse=lse, dlse=floats(2, 4, 5))


CALLS = [
    (tilewise.attention, dense, list(dense())),
    (tilewise.attention_varlen, packed, list(packed())),
    (tilewise.attention_with_kvcache, paged, list(paged())),
    (tilewise.attention_with_kvcache, indexed, list(indexed())),
    (tilewise.attention_with_kvcache, float8, ["k_cache", "k_descale", "v_descale"]),
    (tilewise.explain, dense, list(dense())),
    (tilewise.explain, packed, ["q", "cu_seqlens_q", "bias"]),
    (tilewise.merge_states, states, list(states())),
    (tilewise.attention_backward, gradients, ["dout", "q", "k", "v", "out", "lse", "dlse"]),
]
ARGUMENTS = [
    pytest.param(function, made, name, id=f"{function.__name__}-{made.__name__}-{name}")
    for function, made, names in CALLS
    for name in names
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("function", "made", "name"), ARGUMENTS)
def test_every_argument_is_refused_by_name(function, made, name, kind):
    wrap, sentence = KINDS[kind]
    arguments = made()
    function(**arguments)
    arguments = made()
    arguments[name] = wrap(arguments[name])
    written = [key for key in ("k_cache",) if key in arguments and key != name]
    before = {key: np.array(arguments[key]) for key in written}
    with pytest.raises(TypeError, match=rf"^{name} is a .*{sentence}"):
        function(**arguments)
    for key, value in before.items():
        assert np.array_equal(arguments[key], value)


def test_foreign_cpu_array_is_read_but_never_written_through_a_copy():
    q, cache = floats(2, 3, 4, 8), floats(2, 9, 4, 8)
    wanted = tilewise.attention_with_kvcache(q, cache, cache)
    assert np.array_equal(tilewise.attention_with_kvcache(q, OnCpu(cache), cache), wanted)
    with pytest.raises(TypeError, match="k_cache is a OnCpu, which NumPy copies"):
        tilewise.attention_with_kvcache(q, OnCpu(cache), cache, q, q, cache_seqlens=2)


def test_other_ndarray_subclasses_are_accepted(tmp_path):
    q = floats(2, 5, 4, 8)
    mapped = np.memmap(tmp_path / "q", np.float32, "w+", shape=q.shape)
    mapped[...] = q
    assert np.array_equal(tilewise.attention(mapped, mapped, mapped), tilewise.attention(q, q, q))


@pytest.mark.parametrize("kind", KINDS)
def test_foreign_array_beside_a_tensor_is_refused(kind):
    torch = pytest.importorskip("torch")
    q = torch.randn(2, 5, 4, 8)
    foreign = KINDS[kind][0](floats(2, 5, 4, 8))
    for name in ("k", "v", "bias"):
        with pytest.raises(TypeError, match=f"^{name} is a"):
            tilewise.attention(**(dict(q=q, k=q, v=q) | {name: foreign}))
