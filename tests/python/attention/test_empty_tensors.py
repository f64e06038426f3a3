"""Optional tensors without elements count as given, in every operator that takes them.

torch gives such tensors a null pointer, which in the C ABI means that the argument is not given.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import devices
import tilewise

pytestmark = pytest.mark.tensors

NONE = torch.zeros(0, dtype=torch.int32)
START = torch.zeros(1, dtype=torch.int32)


@pytest.fixture(params=["tensors", "arrays"])
def kind(request, device):
    """The arguments of a call as tensors on the tested device, or as arrays, which CPUs read."""
    if request.param == "arrays":
        if device.name != "cpu":
            pytest.skip("arrays are on the CPU")
        return lambda x: x.numpy()
    return devices.moved


def of_kind(kind, given):
    return {name: kind(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def as_array(x):
    return x.cpu().numpy() if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize(
    "given",
    [
        dict(block_table=torch.zeros(0, 3, dtype=torch.int32)),
        dict(cache_batch_idx=NONE),
        dict(cache_batch_idx=NONE, cache_leftpad=NONE),
        dict(block_table=torch.zeros(0, 3, dtype=torch.int32), cache_leftpad=NONE),
        dict(indices=torch.zeros(0, 2, 4, dtype=torch.int32)),
    ],
    ids=lambda given: " and ".join(given),
)
@pytest.mark.parametrize("new", [0, 3])
def test_cache_of_which_no_sequence_has_a_row(kind, given, new):
    """Pages, or rows by index: the caches have rows, but there are no sequences."""
    cache = torch.randn(5, 8, 2, 16)
    before = cache.clone()
    arguments = dict(q=torch.zeros(0, 2, 4, 16), k_cache=cache, v_cache=cache, cache_seqlens=NONE)
    if new:
        arguments |= dict(k=torch.zeros(0, new, 2, 16), v=torch.zeros(0, new, 2, 16))
        if "indices" in given:
            given = given | dict(cache_batch_idx=NONE)
    out, lse = tilewise.attention_with_kvcache(**of_kind(kind, arguments | given), return_lse=True)
    assert out.shape == (0, 2, 4, 16) and lse.shape == (0, 4, 2)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("packed", [False, True])
def test_pages_of_no_keys(kind, packed):
    """A table without columns leaves every row without a key: out is 0 and lse is -inf."""
    q, pages = torch.randn(6, 4, 16), torch.randn(5, 8, 2, 16)
    table, lengths = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    starts = torch.tensor([0, 3, 6], dtype=torch.int32)
    if packed:
        given = dict(q=q, k=pages, v=pages, cu_seqlens_q=starts, cu_seqlens_k=None)
        given |= dict(block_table=table, seqused_k=lengths)
        out, lse = tilewise.attention_varlen(**of_kind(kind, given), return_lse=True)
    else:
        given = dict(q=q.reshape(2, 3, 4, 16), k_cache=pages, v_cache=pages, block_table=table)
        given |= dict(cache_seqlens=lengths)
        out, lse = tilewise.attention_with_kvcache(**of_kind(kind, given), return_lse=True)
    assert not as_array(out).any() and np.isneginf(as_array(lse)).all()


def test_packed_pages_of_no_sequences(kind):
    """Rows beyond the last entry of cu_seqlens_q belong to no sequence: they are 0."""
    q, pages = torch.randn(3, 4, 16), torch.randn(5, 8, 2, 16)
    given = dict(q=q, k=pages, v=pages, cu_seqlens_q=START, cu_seqlens_k=None, seqused_k=NONE)
    given |= dict(block_table=torch.zeros(0, 3, dtype=torch.int32))
    out, lse = tilewise.attention_varlen(**of_kind(kind, given), return_lse=True)
    assert not as_array(out).any() and np.isneginf(as_array(lse)).all()


@pytest.mark.parametrize("columns", [4, 0])
def test_rotary_tables_without_elements(kind, columns):
    """Tables without positions are too short for any row; tables without columns rotate nothing."""
    torch.manual_seed(0)
    cache = torch.zeros(2, 8, 2, 16)
    rows = 0 if columns else 8
    table = torch.zeros(rows, columns)
    given = dict(q=torch.randn(2, 1, 4, 16), k_cache=cache, v_cache=cache.clone())
    given |= dict(k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16))
    given |= dict(cache_seqlens=torch.tensor([3, 4], dtype=torch.int32))
    rotary = dict(rotary_cos=table, rotary_sin=table)
    if rows == 0:
        with pytest.raises(ValueError, match="rotary_cos has 0 rows, but must have 4"):
            tilewise.attention_with_kvcache(**of_kind(kind, given | rotary), check=True)
        assert not cache.any()
        return
    got = tilewise.attention_with_kvcache(**of_kind(kind, given | rotary))
    want = tilewise.attention_with_kvcache(**of_kind(kind, given))
    np.testing.assert_array_equal(as_array(got), as_array(want))


def test_options_of_no_sequences_keep_their_checks():
    """The library checks what it is given, and every gradient has the shape of its tensor."""
    q = torch.zeros(0, 3, 4, 16, requires_grad=True)
    slopes, bias = torch.zeros(0, 4), torch.zeros(0, 4, 3, 3, requires_grad=True)
    out = tilewise.attention(q, q, q, bias=bias, alibi_slopes=slopes)
    out.sum().backward()
    assert q.grad.shape == q.shape and bias.grad.shape == bias.shape
    with pytest.raises(ValueError, match="cache_batch_idx and block_table are both given"):
        tilewise.attention_with_kvcache(
            q, torch.zeros(5, 8, 4, 16), torch.zeros(5, 8, 4, 16), cache_batch_idx=NONE,
            block_table=torch.zeros(0, 3, dtype=torch.int32),
        )  # fmt: skip


@pytest.mark.parametrize("rows, keys", [(3, 0), (0, 3)])
@pytest.mark.parametrize("lead", [(2, 4), (1, 4), (2, 1), (1, 1)])
@pytest.mark.parametrize("broadcast", [False, True])
def test_gradient_of_a_bias_without_rows_or_keys(kind, rows, keys, lead, broadcast):
    """A bias for one key, or a broadcast one, is given to a call without keys, or without rows."""
    q, k = torch.randn(2, rows, 4, 16), torch.randn(2, keys, 4, 16)
    bias = torch.randn(*lead, rows, keys or 1)
    if broadcast:
        bias = bias[:, :, :, :1].expand(2, 4, rows, keys)
    q, k, bias = kind(q), kind(k), kind(bias)
    explained = tilewise.explain(q, k, k, bias=bias)
    if isinstance(q, np.ndarray):
        out, lse = tilewise.attention(q, k, k, bias=bias, return_lse=True)
        grads = tilewise.attention_backward(out, q, k, k, out, lse, bias=bias)
        assert not as_array(grads.dq).any() and not grads.dbias.any()
        assert grads.dbias.shape == bias.shape
    else:
        given = bias.requires_grad_()
        tilewise.attention(q, k, k, bias=given).sum().backward()
        assert given.grad.shape == bias.shape and not given.grad.any()
    assert explained.backward.kernel and explained.second.kernel
