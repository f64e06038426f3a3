"""The public functions choose a backend by the kind of q, and pass it every argument in the
right position."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import tilewise
from tilewise import _backend, _kvcache_numpy, _numpy
from tilewise._cache import CacheLayout, NewKeys
from tilewise._request import Request, Sequences

# Fields whose name differs from that of the argument of attention_with_kvcache that they contain.
RENAMED = {
    "lengths": "cache_seqlens", "rotary_lengths": "rotary_seqlens", "cu_seqlens": "cu_seqlens_k_new"
}  # fmt: skip
# For each function: its backend's module, and the types of the tuples that it passes.
CALLS = {
    "attention": (_numpy, (Request,)),
    "attention_varlen": (_numpy, (Sequences, Request)),
    "attention_with_kvcache": (_kvcache_numpy, (NewKeys, CacheLayout, Request)),
}


@pytest.mark.parametrize("name", CALLS)
def test_tuples_have_the_order_of_their_types(name, monkeypatch):
    module, types = CALLS[name]
    taken = []
    monkeypatch.setattr(module, name, lambda *given: taken.append(given) or ("out", "lse"))
    function = getattr(tilewise, name)
    names = [n for n in list(inspect.signature(function).parameters)[1:] if n != "head_dim_v"]
    function(np.zeros(1), **{each: each for each in names})  # each argument is its own name
    (given,) = taken
    seen = list(given[1 : -len(types)])  # k, v and the like
    for kind, values in zip(types, given[-len(types) :], strict=True):
        for field, value in kind(*values)._asdict().items():
            if value in names:
                assert value == RENAMED.get(field, field)
                seen.append(value)
            else:  # a field that this function passes elsewhere, or lacks
                assert field == "head_dim_v" or kind is Request
                assert value == kind._field_defaults[field]
    assert sorted(seen) == sorted(names)


def test_head_dim_v_of_a_latent_cache(monkeypatch):
    """It excludes v_cache, so it is in no call of the test above."""
    taken = []
    monkeypatch.setattr(
        _kvcache_numpy, "attention_with_kvcache", lambda *given: taken.append(given) or ("o", "l")
    )
    tilewise.attention_with_kvcache(np.zeros(1), "k_cache", k="k", head_dim_v=7)
    (given,) = taken
    assert given[1:3] == ("k_cache", None)
    assert NewKeys(*given[3]).v == "k" and CacheLayout(*given[4]).head_dim_v == 7


def test_kind_of_array_chooses_the_backend():
    assert _backend.attention_backend(np.zeros(1)) is _numpy
    assert _backend.cache_backend([1.0]) is _kvcache_numpy


@pytest.mark.tensors
def test_tensors_choose_the_backend_of_tensors():
    import torch

    from tilewise import _kvcache_torch, _torch

    for q in (torch.zeros(1), torch.nn.Parameter(torch.zeros(1))):
        assert _backend.attention_backend(q) is _torch
        assert _backend.cache_backend(q) is _kvcache_torch
