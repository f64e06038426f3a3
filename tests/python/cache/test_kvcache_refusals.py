"""attention_with_kvcache refuses invalid arguments by name, before it writes anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import devices
import tilewise
from test_kvcache import CAPACITY, HEAD_DIM, HEAD_DIM_V, valid

pytestmark = pytest.mark.tensors


BAD = {
    "q dimensions": (dict(q=torch.randn(2, 4, HEAD_DIM)), "q"),
    "q head_dim": (dict(q=torch.randn(2, 2, 4, HEAD_DIM + 1)), "q"),
    "q heads": (dict(q=torch.randn(2, 2, 3, HEAD_DIM)), "q"),
    "q dtype": (dict(q=torch.randn(2, 2, 4, HEAD_DIM).half()), "k_cache"),
    "k alone": (dict(v=None), "v"),
    "rotary_interleaved": (
        dict(rotary_interleaved="yes"),
        "rotary_interleaved is 'yes', but must be True or False",
    ),
    "k shape": (dict(k=torch.randn(2, 2, 2, HEAD_DIM - 1)), "k has shape"),
    "k heads": (dict(k=torch.randn(2, 2, 1, HEAD_DIM)), "k has shape"),
    "k batch": (dict(k=torch.randn(1, 2, 2, HEAD_DIM)), "k has shape"),
    "k dtype": (dict(k=torch.randn(2, 2, 2, HEAD_DIM).double()), "k has dtype torch.float64"),
    "k kind": (dict(k=np.zeros((2, 2, 2, HEAD_DIM), np.float32)), "k is a ndarray"),
    "k_cache kind": (dict(k_cache=None), "k_cache is a NoneType"),
    "k_cache dtype": (dict(k_cache=torch.randn(27, 4, 2, HEAD_DIM).half()), "k_cache has dtype"),
    "splits and batch_invariant": (
        dict(num_splits=3, batch_invariant=True),
        "num_splits is 3 and batch_invariant",
    ),
    "cos kind": (dict(rotary_cos=[1.0]), "rotary_cos is a list"),
    "lengths: a fraction": (dict(cache_seqlens=3.7), "cache_seqlens is 3.7"),
    "lengths: a word": (dict(cache_seqlens="3"), "cache_seqlens is '3'"),
    "lengths: a list": (dict(cache_seqlens=[3, 5]), r"cache_seqlens is \[3, 5\]"),
    "lengths: beyond int32": (dict(cache_seqlens=2**32 + 3), "cache_seqlens is 4294967299"),
    "lengths: negative": (dict(cache_seqlens=-1), "cache_seqlens is -1"),
    "entry: length beyond int32": (
        dict(cache_seqlens=torch.tensor([2**32 + 3, 5])),
        r"cache_seqlens\[0\] is 2147483647",
    ),
    "entry: page beyond int32": (
        dict(block_table=torch.full((2, 12), 2**32)),
        r"block_table\[0, 0\] is 2147483647",
    ),
    "lengths: fractions": (
        dict(cache_seqlens=torch.tensor([3.7, 5.0])),
        "cache_seqlens has dtype torch.float32, but must be an integer type",
    ),
    "table kind": (dict(block_table=[[0], [1]]), "block_table is a list"),
    "table dtype": (dict(block_table=torch.zeros(2, 12)), "block_table has dtype torch.float32"),
    "leftpad kind": (dict(cache_leftpad=[0, 0]), "cache_leftpad is a list"),
    "v rows": (dict(v=torch.randn(2, 3, 2, HEAD_DIM_V)), "v has shape"),
    "v columns": (dict(v=torch.randn(2, 2, 2, HEAD_DIM_V + 1)), "v has shape"),
    "v_cache shape": (dict(v_cache=torch.randn(3, 4, 2, HEAD_DIM_V)), "v_cache"),
    "v_cache dtype": (dict(v_cache=torch.randn(27, 4, 2, HEAD_DIM_V).half()), "v_cache"),
    "no lengths": (dict(cache_seqlens=None), "cache_seqlens"),
    "lengths shape": (dict(cache_seqlens=torch.tensor([4])), "cache_seqlens"),
    "entry: too long": (dict(cache_seqlens=torch.tensor([4, CAPACITY - 1])), "cache_seqlens"),
    "entry: negative length": (dict(cache_seqlens=torch.tensor([-1, 3])), "cache_seqlens"),
    "table shape": (dict(block_table=torch.zeros(3, 12, dtype=torch.int32)), "block_table"),
    "entry: page index": (
        dict(block_table=torch.full((2, 12), 99, dtype=torch.int32)),
        "block_table",
    ),
    "entry: negative page": (
        dict(block_table=torch.full((2, 12), -1, dtype=torch.int32)),
        "block_table",
    ),
    "entry: page of old keys": (
        dict(block_table=torch.arange(24, dtype=torch.int32).reshape(2, 12).flip(1) + 4),
        r"block_table\[1, 0\] is 27",
    ),
    "entry: page of two sequences": (
        dict(
            block_table=torch.arange(24, dtype=torch.int32).reshape(2, 12) % 12,
            cache_seqlens=torch.tensor([5, 4]),
        ),
        r"block_table\[1, 1\] is 1 like block_table\[0, 1\], but both .* row 1 of that page",
    ),
    "index and table": (dict(cache_batch_idx=torch.tensor([0, 1])), "cache_batch_idx"),
    "entry: leftpad": (dict(cache_leftpad=torch.tensor([0, 10])), "cache_leftpad"),
    "sin missing": (dict(rotary_sin=None), "rotary_sin"),
    "sin shape": (dict(rotary_sin=torch.randn(CAPACITY, 3)), "rotary_sin"),
    "cos dtype": (dict(rotary_cos=torch.randn(CAPACITY, 4).half()), "rotary_cos"),
    "cos too wide": (
        dict(rotary_cos=torch.randn(CAPACITY, 16), rotary_sin=torch.randn(CAPACITY, 16)),
        "rotary_cos has 16 columns, but must have at most",
    ),
    "entry: cos too short": (
        dict(rotary_cos=torch.randn(9, 4), rotary_sin=torch.randn(9, 4)),
        "rotary_cos",
    ),
    "rotary without k": (dict(k=None, v=None), "rotary_cos"),
    "slopes": (dict(alibi_slopes=torch.randn(3)), "alibi_slopes"),
    "sinks": (dict(sinks=torch.randn(3)), "sinks"),
    "window": (dict(window=(1.5, 0)), "window"),
    "softcap": (dict(softcap=-1.0), "softcap"),
    "splits": (dict(num_splits=-1), "num_splits"),
    "splits: beyond int32": (dict(num_splits=2**32), "num_splits is 4294967296, but must be from"),
    "check: a word": (dict(check="no"), "check is 'no'"),
    "q: no dimensions": (dict(q=torch.zeros(())), r"q has shape \[\]"),
    "q: no columns": (
        dict(
            q=torch.randn(2, 2, 4, 0), k=torch.randn(2, 2, 2, 0), k_cache=torch.randn(27, 4, 2, 0)
        ),
        "q has head dimension 0",
    ),
}


@pytest.mark.parametrize("check", [False, True])
def test_sequence_of_only_padding_has_no_keys(check):
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
    out, lse = tilewise.attention_with_kvcache(
        q, cache, cache, cache_seqlens=torch.tensor([3, 5]), cache_leftpad=torch.tensor([1, 7]),
        check=check, return_lse=True,
    )  # fmt: skip
    assert out[0].any() and not out[1].any()
    assert lse[0].isfinite().all() and (lse[1] == -torch.inf).all()


# Errors in calls without new keys, which the library finds during attention.
OLD_KEYS = {
    "row": (dict(cache_batch_idx=torch.tensor([0, 2])), r"cache_batch_idx\[1\] is 2"),
    "padding": (dict(cache_leftpad=torch.tensor([40, 0])), r"cache_leftpad\[0\] is 40"),
    "length": (dict(cache_seqlens=torch.tensor([33, 3])), r"cache_seqlens\[0\] is 33"),
}


@pytest.mark.parametrize("name", OLD_KEYS)
def test_cache_entries_are_refused_by_name(name, device):
    if device.name == "cuda":
        pytest.skip("entries in GPU memory are read only with check=True")
    changes, sentence = OLD_KEYS[name]
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16)
    options = dict(cache_seqlens=torch.tensor([3, 3])) | changes
    with pytest.raises(ValueError, match=f"^{sentence}"):
        tilewise.attention_with_kvcache(q, cache, cache, **options)


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_negative_view_is_read_but_not_written(name):
    """PyTorch would resolve it into a copy, in which new keys would be lost."""
    arguments = valid() | {name: torch._neg_view(-valid()[name])}
    with pytest.raises(ValueError, match=rf"{name} is a negative view .* must be written to it"):
        tilewise.attention_with_kvcache(**arguments)
    reading = dict(k=None, v=None, rotary_cos=None, rotary_sin=None)
    got = tilewise.attention_with_kvcache(**(arguments | reading))
    assert torch.equal(got, tilewise.attention_with_kvcache(**(valid() | reading)))


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [False, True])
def test_refusals_name_the_argument_and_write_nothing(name, check, device):
    if device.name == "cuda" and name.startswith("entry") and not check:
        pytest.skip("entries in GPU memory are read only with check=True")
    changes, argument = BAD[name]
    arguments = valid() | dict(check=check) | devices.moved(changes)
    caches = [arguments[name] for name in ("k_cache", "v_cache") if arguments[name] is not None]
    before = [cache.clone() for cache in caches]
    with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"\b{argument}"):
        tilewise.attention_with_kvcache(**arguments)
    assert all(torch.equal(cache, copy) for cache, copy in zip(caches, before, strict=True))
