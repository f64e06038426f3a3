"""Masks over caches: random ranges and blocks, lengths, pages, padding and appends, against the
oracle; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import compat_reference as reference
import devices
import mask_cases
import oracle
import tilewise
from compat_reference import assert_as_good
from test_kvcache import HEAD_DIM, HEAD_DIM_V, Cache
from tilewise import masks

HEADS_KV, GROUP = 2, 2
HEADS = HEADS_KV * GROUP
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Problem:
    """A call with new keys; dense [B or 1, Hq or 1, rows, keys] is what the mask shows."""

    dtype: torch.dtype
    rows: int
    new: int
    lengths: list[int]  # keys in the cache before the call
    leftpad: list[int]
    page_size: int
    mask: Any
    dense: np.ndarray
    options: dict[str, Any]
    capacity: int = 48
    random: int = 0

    def arguments(self) -> tuple[dict[str, Any], Cache]:
        batch = len(self.lengths)
        cache = Cache(
            batch, HEADS_KV, self.dtype, self.page_size, seed=self.random, capacity=self.capacity
        )
        g = torch.Generator().manual_seed(self.random + 1)
        shapes = dict(
            q=(batch, self.rows, HEADS, HEAD_DIM), k=(batch, self.new, HEADS_KV, HEAD_DIM),
            v=(batch, self.new, HEADS_KV, HEAD_DIM_V),
        )  # fmt: skip
        tensors = {n: torch.randn(*s, generator=g).to(self.dtype) for n, s in shapes.items()}
        if self.new == 0:
            del tensors["k"], tensors["v"]
        integers: dict[str, Any] = dict(cache_seqlens=torch.tensor(self.lengths))
        if any(self.leftpad):
            integers["cache_leftpad"] = torch.tensor(self.leftpad)
        if self.page_size:
            integers["block_table"] = cache.table
        return dict(k_cache=cache.k, v_cache=cache.v, **tensors, **integers), cache

    def expected(self, given: dict[str, Any], cache: Cache) -> tuple[tuple, tuple]:
        """(out, lse) of the oracle, and of plain PyTorch in the dtype of the call; the cache holds
        the new keys."""
        left, right = self.options.get("window", (None, None))
        right = 0 if self.options.get("causal") else right
        band = tuple(-1 if side is None else side for side in (left, right))
        options = oracle.Options(
            scale=float(np.float32(HEAD_DIM**-0.5)), window=band, mask=self.dense
        )
        keys, values = (cache.as_contiguous(x) for x in (cache.k, cache.v))
        batch, capacity = keys.shape[:2]
        ends = [length + self.new for length in self.lengths]
        sequences = oracle.sequences_of(
            batch, self.rows, capacity, seqused_k=ends, leftpad_k=self.leftpad
        )
        flat = [x.flatten(0, 1).double().numpy() for x in (given["q"], keys, values)]
        exact = oracle.attention(*flat, sequences, options)
        outs = torch.from_numpy(exact.out).unflatten(0, (batch, self.rows))
        lses = torch.from_numpy(exact.lse).unflatten(0, (batch, self.rows)).transpose(1, 2)
        plain = []
        for b, sequence in enumerate(sequences):
            bias = np.where(
                oracle.sequence_mask(options, b, self.rows, len(sequence.keys)), 0, -np.inf
            )
            pad, end = self.leftpad[b], ends[b]
            plain.append(
                reference.attend_one(
                    given["q"][b], keys[b, pad:end], values[b, pad:end],
                    bias=torch.from_numpy(bias), window=band,
                )
            )  # fmt: skip
        return (outs, lses), tuple(torch.stack(parts) for parts in zip(*plain, strict=True))


def as_arrays(given: dict[str, Any]) -> dict[str, Any]:
    """Copies of the tensors as NumPy arrays."""

    def array(x: torch.Tensor) -> np.ndarray:
        if x.dtype == torch.bfloat16:
            return x.clone().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.clone().numpy()

    return {name: array(x) if torch.is_tensor(x) else x for name, x in given.items()}


def placed(given: dict[str, Any]) -> dict[str, Any]:
    """The tensors on the device of the test, and the mask, which may hold arrays on a CPU."""
    memory = devices.current().memory
    if memory.type == "cpu":
        return given
    return {n: x.to(memory) if hasattr(x, "to") else x for n, x in given.items()}


def check(problem: Problem) -> None:
    """Tensors against the oracle, and on a CPU bitwise against arrays."""
    given, cache = problem.arguments()
    options = dict(problem.options, mask=problem.mask, return_lse=True)
    arrays = tilewise.attention_with_kvcache(**as_arrays(given), **options)
    there = placed(given | options)
    got = [x.cpu() for x in tilewise.attention_with_kvcache(**there)]
    cache.k.copy_(there["k_cache"]), cache.v.copy_(there["v_cache"])
    exact, plain = problem.expected(given, cache)
    for name, x, y, z in zip(("out", "lse"), got, plain, exact, strict=True):
        assert_as_good(x, y, z, 2, f"{name} of {problem}")
    if there["q"].device.type != "cpu":
        return
    for x, array in zip(got, arrays, strict=True):
        assert np.array_equal(x.double().numpy(), np.asarray(array, np.float64))


@st.composite
def calls(draw: st.DrawFn, longest: int = 40) -> dict[str, Any]:
    """Everything of a ``Problem`` except the mask."""
    batch = draw(st.integers(1, 3))
    rows, new = draw(st.sampled_from([1, 2, 3, 7, longest])), draw(st.sampled_from([0, 1, 4, 7]))
    capacity = draw(st.sampled_from([48, 48, 336]))
    lengths = [draw(st.integers(0, capacity - new)) for _ in range(batch)]
    options: dict[str, Any] = draw(
        st.sampled_from([{}, {}, dict(causal=True), dict(window=(9, 3)), dict(window=(None, 2))])
    )
    if draw(st.booleans()):
        options = dict(options, num_splits=draw(st.integers(1, 4)))
    return dict(
        dtype=draw(st.sampled_from(DTYPES)), rows=rows, new=new, lengths=lengths,
        leftpad=[draw(st.sampled_from([0, 0, draw(st.integers(0, n))])) for n in lengths],
        page_size=draw(st.sampled_from([0, 0, 1, 16, 24])), options=options, capacity=capacity,
        random=draw(st.integers(0, 2**31)),
    )  # fmt: skip


@st.composite
def over_ranges(draw: st.DrawFn) -> Problem:
    call = draw(calls())
    batch, rows, capacity = len(call["lengths"]), call["rows"], call["capacity"]

    def part(length: int) -> tuple[int, int]:
        begin, end = sorted((draw(st.integers(0, length)), draw(st.integers(0, length + 9))))
        return draw(st.sampled_from([(begin, end), (0, length), (0, 2**31 - 1)]))

    lists = [
        [
            (*part(rows), *part(capacity), draw(st.integers(0, 3)))
            for _ in range(draw(st.integers(0, 4)))
        ]
        for _ in range(draw(st.sampled_from([1, batch])))
    ]
    entries = np.array([e for ranges in lists for e in ranges], np.int32).reshape(-1, 5)
    starts = np.cumsum([0, *map(len, lists)])
    mask = masks.Ranges(entries[:, :2], entries[:, 2:4], entries[:, 4], starts=starts)
    dense = [mask_cases.dense_of_ranges(ranges, rows, capacity) for ranges in lists]
    return Problem(**call, mask=mask, dense=np.stack(dense)[:, None])


@st.composite
def over_blocks(draw: st.DrawFn) -> Problem:
    call = draw(calls())
    batch = draw(st.sampled_from([1, len(call["lengths"])]))
    heads = draw(st.sampled_from([1, HEADS]))
    rng = np.random.default_rng(call["random"])
    dense = rng.random((batch, heads, call["rows"], call["capacity"])) < rng.choice(
        [0, 0.1, 0.9, 1]
    )
    return Problem(**call, mask=masks.from_bool(dense), dense=dense)


@pytest.mark.abi("cpu", "cuda")
@seed(11)
@settings(max_examples=60, deadline=None, database=None)
@given(problem=over_ranges())
def test_ranges_over_a_cache(problem: Problem) -> None:
    check(problem)


@pytest.mark.abi("cpu", "cuda")
@seed(12)
@settings(max_examples=60, deadline=None, database=None)
@given(problem=over_blocks())
def test_blocks_over_a_cache(problem: Problem) -> None:
    check(problem)


def test_packed_queries_and_new_keys() -> None:
    """Rows and keys are counted within each sequence, after the left padding."""
    rows, new, lengths, leftpad = [3, 0, 5], [2, 4, 0], [11, 0, 40], [4, 0, 31]
    cache = Cache(3, HEADS_KV, torch.float32, 16)
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(8, HEADS, HEAD_DIM, generator=g), torch.randn(6, HEADS_KV, HEAD_DIM)
    v = torch.randn(6, HEADS_KV, HEAD_DIM_V, generator=g)
    mask = masks.Ranges([[0, 9], [1, 9]], [[0, 2], [3, 99]], ["full", "both"])
    arguments = dict(
        cache_seqlens=torch.tensor(lengths), cache_leftpad=torch.tensor(leftpad),
        block_table=cache.table, cu_seqlens_q=torch.tensor([0, 3, 3, 8]),
        cu_seqlens_k_new=torch.tensor([0, 2, 6, 6]),
    )  # fmt: skip
    given = dict(q=q, k_cache=cache.k, v_cache=cache.v, k=k, v=v, **arguments)
    arrays = tilewise.attention_with_kvcache(**as_arrays(given), mask=mask)
    out = tilewise.attention_with_kvcache(**given, mask=mask)
    assert np.array_equal(out.numpy(), arrays)
    ends = [length + more for length, more in zip(lengths, new, strict=True)]
    sequences = oracle.sequences_of(
        3, 0, 48, cu_seqlens_q=[0, 3, 3, 8], seqused_k=ends, leftpad_k=leftpad
    )
    dense = mask_cases.dense_of_ranges([(0, 9, 0, 2, 0), (1, 9, 3, 99, 3)], max(rows), 48)
    flat = [cache.as_contiguous(x).flatten(0, 1).double().numpy() for x in (cache.k, cache.v)]
    options = oracle.Options(scale=HEAD_DIM**-0.5, mask=dense[None, None])
    exact = oracle.attention(q.double().numpy(), *flat, sequences, options)
    assert_as_good(out, None, torch.from_numpy(exact.out), 2, "out")


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_latent_and_float8_caches_take_masks(heads_kv: int) -> None:
    """As with a bias of -inf."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(2, 5, 4, 40, generator=g).bfloat16()
    cache = torch.randn(2, 64, heads_kv, 40, generator=g).to(torch.float8_e4m3fn)
    mask = masks.from_bool(torch.rand(2, 4, 5, 64, generator=g) < 0.3)
    bias = torch.where(torch.from_numpy(mask.to_bool()), 0.0, -torch.inf)
    lengths = torch.tensor([9, 64])
    for rest in (dict(v_cache=None, head_dim_v=32), dict(v_cache=cache[..., :24].contiguous())):
        call = dict(q=q, k_cache=cache, cache_seqlens=lengths, return_lse=True, **rest)
        got = tilewise.attention_with_kvcache(**call, mask=mask)
        want = tilewise.attention_with_kvcache(**call, bias=bias)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_a_compiled_call_takes_a_mask() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, 2, 16, generator=g) for _ in range(3))
    cache, lengths = torch.randn(2, 32, 2, 16, generator=g), torch.tensor([5, 20])

    def attend(cache: torch.Tensor, lengths: torch.Tensor, mask: Any) -> torch.Tensor:
        return tilewise.attention_with_kvcache(
            q, cache, cache.clone(), k, v, cache_seqlens=lengths, mask=mask
        )

    mask = masks.Ranges(torch.tensor([[0, 3]]).int(), torch.tensor([[2, 22]]).int())
    want = attend(cache.clone(), lengths, mask)
    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(cache.clone(), lengths, mask), want)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (dict(mask=3), TypeError, "mask is a int, but must be one of tilewise.masks"),
        (
            dict(mask=masks.Ranges([[0, 1]] * 3, [[0, 1]] * 3, starts=[0, 1, 2, 3])),
            ValueError, "mask has batch 3, but must have 1 or 2 like q",
        ),
        (
            dict(mask=masks.from_bool(np.ones((3, 20), bool))),
            ValueError, "mask is for 3 rows and 20 keys, but must be for 3 rows and 32 keys",
        ),
        (
            dict(mask=masks.Ranges([[3, 1]], [[0, 1]])),
            ValueError, r"mask.entries\[0, 1\] is 1: row_end must be 3 to 2147483647",
        ),
        (
            dict(indices=np.zeros((2, 3, 4), np.int32)),
            ValueError, "mask and indices are both given, but keys that are selected",
        ),
    ],
)  # fmt: skip
def test_refused_masks_write_nothing(change: dict, error: type[Exception], sentence: str) -> None:
    for array in (lambda x: x, torch.from_numpy):
        q, k, cache = (np.ones((2, n, 2, 8), np.float32) for n in (3, 3, 32))
        call = dict(cache_seqlens=array(np.array([4, 9])), mask=masks.Ranges.causal(3))
        call |= change
        if "indices" in call:
            call["indices"] = array(call["indices"])
        new = array(2 * k)
        with pytest.raises(error, match=sentence):
            tilewise.attention_with_kvcache(array(q), array(cache), array(cache), new, new, **call)
        assert (cache == 1).all()


def test_explain_names_the_mask() -> None:
    q, cache = np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 200, 2, 8), np.float32)
    mask = masks.from_bool(np.arange(200) < np.full((3, 1), 128))
    text = str(tilewise.explain(q, cache, cache, cache_seqlens=np.array([4, 9]), mask=mask))
    assert "2 tiles of 128 x 128 of the mask, without the band: 1 skipped, 1 full" in text
