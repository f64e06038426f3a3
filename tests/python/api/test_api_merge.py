"""merge_states computes attention over a union of disjoint sets of keys from the results of
each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import tilewise

pytestmark = pytest.mark.tensors


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_merging_two_halves_equals_the_whole(layout):
    dims = (2, 9, 3, 16) if layout == "bshd" else (2, 3, 9, 16)
    axis = 1 if layout == "bshd" else 2
    leaves = [torch.randn(dims, requires_grad=True) for _ in range(3)]

    def half(part, q, k, v):
        keys = slice(0, 4) if part == 0 else slice(4, 9)
        index = (slice(None),) * axis + (keys,)
        return tilewise.attention(q, k[index], v[index], return_lse=True, layout=layout)

    out, lse = tilewise.merge_states(*half(0, *leaves), *half(1, *leaves), layout=layout)
    wanted, wanted_lse = tilewise.attention(*leaves, return_lse=True, layout=layout)
    assert torch.allclose(out, wanted, atol=1e-6) and torch.allclose(lse, wanted_lse, atol=1e-6)
    grads = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves)
    wanted_grads = torch.autograd.grad(wanted.sin().sum() + wanted_lse.sin().sum(), leaves)
    for grad, other in zip(grads, wanted_grads, strict=True):
        assert torch.allclose(grad, other, atol=2e-6)


def test_varlen_shapes():
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    q, k = torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    state = tilewise.attention_varlen(q, k, k, starts, starts, return_lse=True)
    out, lse = tilewise.merge_states(*state, *state)
    assert torch.allclose(out, state[0], atol=1e-6)
    assert torch.allclose(lse, state[1] + math.log(2), atol=1e-6)


def states(make):
    """Rows that see a key on one side, on the other, on both, or on neither."""
    lse_a = make([[[0.5, -math.inf, -math.inf, 80.0]]])
    lse_b = make([[[-math.inf, 1.5, -math.inf, 81.0]]])
    a, b = (
        make([[[[1.0]], [[0.0]], [[0.0]], [[2.0]]]]),
        make([[[[0.0]], [[3.0]], [[0.0]], [[4.0]]]]),
    )
    return a, lse_a, b, lse_b


def test_empty_sides_of_arrays():
    out, lse = tilewise.merge_states(*states(lambda x: np.array(x, np.float32)))
    share = 1 / (1 + math.exp(-1.0))
    assert np.allclose(out[0, :, 0, 0], [1.0, 3.0, 0.0, 2 * (1 - share) + 4 * share], atol=1e-5)
    assert np.allclose(lse[0, 0, :2], [0.5, 1.5]) and lse[0, 0, 2] == -math.inf
    assert abs(lse[0, 0, 3] - (81 + math.log1p(math.exp(-1)))) < 1e-5


def test_empty_sides_of_tensors_and_no_nan_in_their_gradients():
    arrays = states(lambda x: np.array(x, np.float32))
    leaves = [torch.tensor(x).requires_grad_() for x in arrays]
    out, lse = tilewise.merge_states(*leaves)
    wanted, wanted_lse = tilewise.merge_states(*arrays)
    assert np.allclose(out.detach().cpu(), wanted) and np.allclose(lse.detach().cpu(), wanted_lse)
    seen = torch.where(lse.isfinite(), lse, 0.0)
    for grad in torch.autograd.grad(out.sum() + seen.sum(), leaves):
        assert grad.isfinite().all()


def test_infinite_sink_takes_all_the_weight():
    """merge_states agrees with `attention` over all keys, where such a sink leaves out = 0."""
    q, k, v = torch.randn(1, 3, 2, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)
    sinks = torch.tensor([0.5, math.inf])
    wanted = tilewise.attention(q, k, v, sinks=sinks, return_lse=True)
    first = tilewise.attention(q, k[:, :4], v[:, :4], sinks=sinks, return_lse=True)
    rest = tilewise.attention(q, k[:, 4:], v[:, 4:], return_lse=True)
    assert (wanted[0][:, :, 1] == 0).all() and (wanted[1][:, 1] == math.inf).all()
    for state in ((*first, *rest), (*rest, *first)):
        out, lse = tilewise.merge_states(*state)
        assert torch.allclose(out, wanted[0], atol=1e-6) and torch.allclose(lse, wanted[1])
        arrays = tilewise.merge_states(*(np.asarray(x.cpu()) for x in state))
        for array, tensor in zip(arrays, (out, lse), strict=True):
            assert np.allclose(array, tensor.cpu(), atol=1e-6)
    leaves = [x.clone().requires_grad_() for x in (*first, *rest)]
    out, lse = tilewise.merge_states(*leaves)
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[1][:, 1] == 1).all() and (grads[3][:, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_keeps_its_dtype(dtype):
    q = torch.randn(1, 5, 2, 8, dtype=dtype)
    state = tilewise.attention(q, q, q, return_lse=True)
    out, lse = tilewise.merge_states(*state, *state)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.allclose(out, state[0], atol=2e-2)


def test_merge_compiles_to_one_graph():
    q = torch.randn(1, 5, 2, 8)
    state = tilewise.attention(q, q, q, return_lse=True)
    compiled = torch.compile(tilewise.merge_states, fullgraph=True, backend="aot_eager")
    out, lse = compiled(*state, *state)
    wanted, wanted_lse = tilewise.merge_states(*state, *state)
    assert torch.allclose(out, wanted) and torch.allclose(lse, wanted_lse)
