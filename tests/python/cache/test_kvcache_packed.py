"""Caches with packed queries and new keys, separate rotary positions, and a bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import compat_reference as reference
import devices
import tilewise
from compat_reference import assert_as_good
from test_kvcache import CAPACITY, HEAD_DIM, HEAD_DIM_V, Cache, rotary_tables

pytestmark = pytest.mark.tensors

ROWS, NEW = (3, 0, 5, 1), (2, 4, 0, 7)  # per sequence
LENGTHS, LEFTPAD, POSITIONS = (11, 0, 40, 24), (4, 0, 31, 24), (2, 30, 17, 0)
BANDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "local": dict(window=(6, 1)),
}


def starts(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def one_by_one(given: dict[str, Any], cache: Cache, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """(out, lse, keys, values) of attention_with_kvcache's arguments, computed sequence by
    sequence."""
    keys, values = (cache.as_contiguous(x).to(dtype).clone() for x in (cache.k, cache.v))
    band = {name: given[name] for name in ("causal", "window") if name in given}
    outs, lses = [], []
    q_end = new_end = 0
    for b, (rows, new, length) in enumerate(zip(ROWS, NEW, LENGTHS, strict=True)):
        q, k, v = given["q"][q_end : q_end + rows], given["k"], given["v"]
        k, v = (x[new_end : new_end + new].to(dtype) for x in (k, v))
        q_end, new_end = q_end + rows, new_end + new
        q = q.to(dtype)
        if "rotary_cos" in given:
            first = POSITIONS[b] if "rotary_seqlens" in given else length
            tables = [given[name].double() for name in ("rotary_cos", "rotary_sin")]
            steps = torch.arange(rows) if band else torch.zeros(rows, dtype=torch.long)
            for name, x, position in (("q", q, steps), ("k", k, torch.arange(new))):
                turned = reference.rotate(x[None].double(), *tables, first + position[None], True)
                q, k = (turned[0].to(dtype), k) if name == "q" else (q, turned[0].to(dtype))
        end = length + new
        keys[b, length:end], values[b, length:end] = k, v
        pad = LEFTPAD[b] if "cache_leftpad" in given else 0
        bias = given.get("bias")
        if bias is not None:
            bias = bias[b if bias.shape[0] > 1 else 0, :, :rows, : end - pad]
        out, lse = reference.attend_one(q, keys[b, pad:end], values[b, pad:end], bias=bias, **band)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, dim=1), keys, values


def arguments(dtype: torch.dtype = torch.float32, page_size: int = 0) -> tuple[dict, Cache]:
    g = devices.generator(3)
    cache = Cache(len(ROWS), 2, dtype, page_size, batch_idx=not page_size)
    shapes = dict(
        q=(sum(ROWS), 4, HEAD_DIM), k=(sum(NEW), 2, HEAD_DIM), v=(sum(NEW), 2, HEAD_DIM_V)
    )
    given = {name: torch.randn(*shape, generator=g).to(dtype) for name, shape in shapes.items()}
    given |= dict(k_cache=cache.k, v_cache=cache.v, cache_seqlens=torch.tensor(LENGTHS))
    given |= dict(cu_seqlens_q=starts(ROWS), cu_seqlens_k_new=starts(NEW))
    return given | cache.arguments(), cache


def check(given: dict[str, Any], cache: Cache) -> None:
    dtype = given["q"].dtype
    plain, exact = (one_by_one(given, cache, kind) for kind in (dtype, torch.float64))
    out, lse = tilewise.attention_with_kvcache(**given, return_lse=True)
    keys, values = cache.as_contiguous(cache.k), cache.as_contiguous(cache.v)
    assert out.shape == (sum(ROWS), 4, HEAD_DIM_V) and lse.shape == (4, sum(ROWS))
    assert torch.equal(values, plain[3])
    for name, got, index in (("out", out, 0), ("lse", lse, 1), ("k_cache", keys, 2)):
        assert_as_good(got, plain[index], exact[index], 2, name)


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("rotary", ["none", "lengths", "positions"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("page_size", [0, 4])
def test_packed_queries_and_new_keys(band: str, rotary: str, padded: bool, page_size: int) -> None:
    given, cache = arguments(page_size=page_size)
    given |= BANDS[band]
    if padded:
        given["cache_leftpad"] = torch.tensor(LEFTPAD)
    if rotary != "none":
        given["rotary_cos"], given["rotary_sin"] = rotary_tables(torch.float32)
    if rotary == "positions":
        given["rotary_seqlens"] = torch.tensor(POSITIONS)
    check(given, cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batches", [1, len(ROWS)])
@pytest.mark.parametrize("page_size", [0, 16])
def test_bias_with_packed_queries(dtype: torch.dtype, batches: int, page_size: int) -> None:
    given, cache = arguments(dtype, page_size)
    bias = torch.randn(batches, 4, max(ROWS), CAPACITY, generator=devices.generator(4))
    check(given | dict(bias=bias, causal=True, cache_leftpad=torch.tensor(LEFTPAD)), cache)


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize(
    "shape", [(2, 4, 3, CAPACITY), (4, 1, CAPACITY), (CAPACITY,), (2, 1, 3, 1)]
)
def test_bias_with_uniform_rows(shape: tuple[int, ...], page_size: int) -> None:
    cache, lengths = Cache(2, 2, torch.float32, page_size), [7, 44]
    q, bias = torch.randn(2, 3, 4, HEAD_DIM), torch.randn(shape)
    out = tilewise.attention_with_kvcache(
        q, cache.k, cache.v, cache_seqlens=torch.tensor(lengths), bias=bias, causal=True,
        **cache.arguments(),
    )  # fmt: skip
    bias = bias.expand(2, 4, 3, CAPACITY).double()
    for b, length in enumerate(lengths):
        k, v = (cache.as_contiguous(x)[b, :length].double() for x in (cache.k, cache.v))
        bias_of_sequence = bias[b, :, :, :length]
        want, _ = reference.attend_one(q[b].double(), k, v, bias=bias_of_sequence, causal=True)
        assert_as_good(out[b], None, want, 2, "out")


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("page_size", [0, 4])
def test_arrays_agree_with_tensors(page_size: int) -> None:
    given, _ = arguments(page_size=page_size)
    cos, sin = rotary_tables(torch.float32)
    given |= dict(rotary_cos=cos, rotary_sin=sin, rotary_seqlens=torch.tensor(POSITIONS))
    given |= dict(bias=torch.randn(4, max(ROWS), CAPACITY), causal=True, max_seqlen_q=max(ROWS))
    arrays = {n: x.numpy().copy() if isinstance(x, Tensor) else x for n, x in given.items()}
    got = tilewise.attention_with_kvcache(**arrays, return_lse=True)
    want = tilewise.attention_with_kvcache(**given, return_lse=True)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(torch.from_numpy(a), b)
    for name in ("k_cache", "v_cache"):
        assert torch.equal(torch.from_numpy(arrays[name]), given[name])


def test_compiles_to_one_graph() -> None:
    results = []
    call = torch.compile(tilewise.attention_with_kvcache, fullgraph=True, backend="aot_eager")
    for function in (tilewise.attention_with_kvcache, call):
        given, cache = arguments(page_size=4)
        cos, sin = rotary_tables(torch.float32)
        given |= dict(rotary_cos=cos, rotary_sin=sin, rotary_seqlens=torch.tensor(POSITIONS))
        bias = torch.linspace(-1.0, 1.0, CAPACITY)
        out = function(**given, bias=bias, causal=True, max_seqlen_q=max(ROWS))
        results.append((out, cache.k, cache.v))
    assert all(devices.equal(a, b) for a, b in zip(*results, strict=True))


def test_uniform_queries_and_packed_new_keys() -> None:
    """New keys may be packed without the queries."""
    given, cache = arguments()
    dense = {n: x for n, x in given.items() if n not in ("q", "cu_seqlens_q")}
    q = torch.randn(4, 2, 4, HEAD_DIM)
    out = tilewise.attention_with_kvcache(q, **dense, causal=True)
    for b, end in enumerate(n + m for n, m in zip(LENGTHS, NEW, strict=True)):
        k, v = (cache.as_contiguous(x)[b, :end].double() for x in (cache.k, cache.v))
        want, _ = reference.attend_one(q[b].double(), k, v, causal=True)
        assert_as_good(out[b], None, want, 2, "out")


def test_explain() -> None:
    given, _ = arguments()
    kept = {n: x for n, x in given.items() if n not in ("k", "v", "cu_seqlens_k_new", "q")}
    k, v = kept.pop("k_cache"), kept.pop("v_cache")
    sentence = tilewise.explain(given["q"], k, v, **kept, bias=torch.zeros(CAPACITY)).problem
    assert "batch 4, 9 rows" in sentence and "variable length" in sentence and "bias" in sentence


WIDE, TABLE = torch.zeros(4, max(ROWS), CAPACITY), torch.zeros(CAPACITY, 4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "q of four dimensions": (dict(q=torch.randn(4, 2, 4, HEAD_DIM)), "q has shape"),
    "starts of another batch": (
        dict(cu_seqlens_q=torch.tensor([0, 9])),
        "cache_batch_idx|cache_seqlens",
    ),
    "starts of fractions": (
        dict(cu_seqlens_q=torch.zeros(5)),
        "cu_seqlens_q has dtype torch.float32",
    ),
    "starts: a list": (dict(cu_seqlens_q=[0, 3, 3, 8, 9]), "cu_seqlens_q is a list"),
    "new starts shape": (
        dict(cu_seqlens_k_new=torch.tensor([0, 13])),
        r"cu_seqlens_k_new has shape",
    ),
    "new starts without k": (dict(k=None, v=None), "cu_seqlens_k_new is given, but belongs to k"),
    "k of four dimensions": (dict(k=torch.randn(4, 2, 2, HEAD_DIM)), "k has shape"),
    "positions without tables": (
        dict(rotary_seqlens=torch.tensor(POSITIONS)),
        "rotary_seqlens is given, but belongs to rotary_cos",
    ),
    "bound without starts": (
        dict(q=torch.randn(4, 2, 4, HEAD_DIM), cu_seqlens_q=None, max_seqlen_q=2),
        "max_seqlen_q is given, but belongs to cu_seqlens_q",
    ),
    "bound: a fraction": (dict(max_seqlen_q=2.5), "max_seqlen_q is 2.5"),
    "bias rows": (
        dict(bias=WIDE[:, :4]),
        "bias has shape .* with 4 rows, but the longest .* has 5",
    ),
    "bias keys": (dict(bias=WIDE[..., 1:]), "bias has shape"),
    "bias dtype": (dict(bias=WIDE.half()), "bias has dtype torch.float16"),
    "entry: bound": (dict(max_seqlen_q=4), "max_seqlen_q is 4, but a sequence has 5 queries"),
    "entry: first start": (
        dict(cu_seqlens_q=torch.tensor([1, 3, 3, 8, 9])),
        r"cu_seqlens_q\[0\] is 1",
    ),
    "entry: starts go back": (
        dict(cu_seqlens_q=torch.tensor([0, 4, 3, 8, 9])),
        r"cu_seqlens_q\[2\] is 3",
    ),
    "entry: starts beyond q": (
        dict(cu_seqlens_q=torch.tensor([0, 3, 3, 8, 10])),
        r"cu_seqlens_q\[4\] is 10",
    ),
    "entry: new starts beyond k": (
        dict(cu_seqlens_k_new=torch.tensor([0, 2, 6, 6, 14])),
        r"cu_seqlens_k_new\[4\] is 14",
    ),
    "entry: position": (
        dict(rotary_seqlens=torch.tensor([2, -1, 17, 0]), rotary_cos=TABLE, rotary_sin=TABLE),
        r"rotary_seqlens\[1\] is -1",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [False, True])
def test_refusals_name_the_argument_and_write_nothing(name: str, check: bool, device: Any) -> None:
    entry = name.startswith("entry") and not check
    if device.name == "cuda" and (entry or name == "bias rows"):
        pytest.skip("entries in GPU memory are read only with check=True")
    changes, sentence = BAD[name]
    given, cache = arguments()
    before = cache.k.clone(), cache.v.clone()
    with pytest.raises((ValueError, TypeError), match=f"^(tilewise: )?({sentence})"):
        tilewise.attention_with_kvcache(**given | devices.moved(changes), check=check)
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
