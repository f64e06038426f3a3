"""NumPy arrays give the same numbers as tensors, and everything works in a Python without
PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import tilewise
from paths import ROOT


def arrays(*shapes, dtype=np.float32):
    generator = np.random.default_rng(7)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def tensor(array):
    """The same numbers as a leaf tensor; PyTorch does not know the bfloat16 of ml_dtypes."""
    if array.dtype == ml_dtypes.bfloat16:
        made = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    else:
        made = torch.from_numpy(array.copy())
    return made.requires_grad_()


def same(array, other):
    other = other.detach()
    if other.dtype == torch.bfloat16:
        return np.array_equal(array.view(np.int16), other.view(torch.int16).numpy())
    return np.array_equal(array, other.numpy())


OPTIONS = {
    "plain": dict,
    "causal window": lambda: dict(window=(6, None), causal=True),
    "softcap and scale": lambda: dict(softcap=3.0, scale=0.3),
    "bias": lambda: dict(bias=arrays((1, 4, 19, 23))[0]),
    "broadcast bias": lambda: dict(bias=arrays((2, 1, 1, 23))[0]),
    "bias of two dimensions": lambda: dict(bias=arrays((19, 23))[0]),
    "alibi": lambda: dict(alibi_slopes=arrays((2, 4))[0], causal=True),
    "sinks": lambda: dict(sinks=arrays((4,))[0]),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_same_bits_as_tensors(name, layout, dtype):
    q, k, v = arrays((2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 8), dtype=dtype)
    options = OPTIONS[name]()
    if layout == "bhsd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out, lse = tilewise.attention(q, k, v, return_lse=True, layout=layout, **options)

    leaves = [tensor(x) for x in (q, k, v)]
    given = {n: tensor(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    if "alibi_slopes" in given:
        given["alibi_slopes"] = given["alibi_slopes"].detach()
    scale = torch.tensor(given.pop("scale", 0.25), requires_grad=True)
    wanted, wanted_lse = tilewise.attention(
        *leaves, return_lse=True, layout=layout, scale=scale, **given
    )
    assert out.dtype == dtype and lse.dtype == np.float32
    assert same(out, wanted) and same(lse, wanted_lse)

    dout, dlse = arrays(out.shape, lse.shape)
    dout = dout.astype(dtype)
    wanted_grads = torch.autograd.grad(
        (wanted, wanted_lse), [*leaves, scale, *(x for n, x in given.items() if n in NAMED)],
        (tensor(dout).detach(), tensor(dlse).detach()),
    )  # fmt: skip
    grads = tilewise.attention_backward(
        dout, q, k, v, out, lse, dlse=dlse, layout=layout, **options
    )
    for grad, other in zip((grads.dq, grads.dk, grads.dv), wanted_grads, strict=False):
        assert same(grad, other)
    assert grads.dscale == wanted_grads[3].item()
    assert (grads.dbias is None) == ("bias" not in options)
    if grads.dbias is not None:
        assert same(grads.dbias, wanted_grads[4])
    if grads.dsinks is not None:
        assert same(grads.dsinks, wanted_grads[4])


NAMED = ("bias", "sinks")


def test_varlen_and_its_gradients():
    q, k, v = arrays((20, 4, 16), (23, 2, 16), (23, 2, 8))
    starts_q, starts_k = np.array([0, 5, 5, 18], np.int32), np.array([0, 9, 10, 23], np.int32)
    used = np.array([9, 0, 11], np.int32)
    out, lse = tilewise.attention_varlen(
        q, k, v, starts_q, starts_k, seqused_k=used, causal=True, return_lse=True
    )
    leaves = [tensor(x) for x in (q, k, v)]
    wanted, wanted_lse = tilewise.attention_varlen(
        *leaves, torch.from_numpy(starts_q), torch.from_numpy(starts_k),
        seqused_k=torch.from_numpy(used), causal=True, return_lse=True,
    )  # fmt: skip
    assert same(out, wanted) and same(lse, wanted_lse)
    (dout,) = arrays(out.shape)
    grads = tilewise.attention_backward(
        dout, q, k, v, out, lse, cu_seqlens_q=starts_q, cu_seqlens_k=starts_k, seqused_k=used,
        causal=True,
    )  # fmt: skip
    wanted_grads = torch.autograd.grad(wanted, leaves, torch.from_numpy(dout))
    for grad, other in zip((grads.dq, grads.dk, grads.dv), wanted_grads, strict=True):
        assert same(grad, other)


def test_pages():
    q, k = arrays((5, 4, 16), (6, 3, 2, 16))
    starts, used = np.array([0, 2, 5], np.int32), np.array([4, 6], np.int32)
    table = np.array([[5, 0], [2, 3]], np.int32)
    out = tilewise.attention_varlen(
        q, k, k, starts, None, block_table=table, seqused_k=used, causal=True
    )
    for b in range(2):
        rows, keys = slice(*starts[b : b + 2]), k[table[b]].reshape(1, 6, 2, 16)[:, : used[b]]
        wanted = tilewise.attention(q[None, rows], keys, keys, causal=True)[0]
        assert np.allclose(out[rows], wanted, atol=1e-6)


def test_views_give_the_results_of_their_copies():
    wide, base = arrays((2, 20, 3, 32), (2, 40, 3, 16))
    views = {
        "column stride": wide[..., ::2],
        "row stride": base[:, ::2],
        "reversed": base[:, 39:19:-1],
        "broadcast": np.broadcast_to(base[:1, :20], (2, 20, 3, 16)),
        "read only": np.frombuffer(base[:, :20].tobytes(), np.float32).reshape(2, 20, 3, 16),
        "big-endian bytes are refused": base[:, :20].astype(">f4"),
    }
    for name, q in views.items():
        if "refused" in name:
            with pytest.raises(TypeError, match="q has dtype >f4"):
                tilewise.attention(q, q, q)
            continue
        copy = np.array(q, order="C")
        assert np.array_equal(tilewise.attention(q, q, q), tilewise.attention(copy, copy, copy))


def test_unaligned_array_is_copied():
    (q,) = arrays((1, 9, 2, 8))
    raw = np.empty(q.nbytes + 1, np.uint8)
    odd = raw[1:].view(np.float32).reshape(q.shape)
    odd[...] = q
    assert np.array_equal(tilewise.attention(odd, odd, odd), tilewise.attention(q, q, q))


class OnlyDlpack:
    """An array of another library that offers nothing except the DLPack protocol."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_arrays_of_other_libraries():
    (q,) = arrays((1, 9, 2, 8))
    wanted = tilewise.attention(q, q, q)
    foreign = OnlyDlpack(q)
    assert np.array_equal(tilewise.attention(foreign, foreign, foreign), wanted)
    assert np.array_equal(tilewise.attention(memoryview(q).obj, q, q), wanted)


def test_dropout_follows_numpy_seed():
    (q,) = arrays((1, 40, 2, 8))
    ones = np.ones_like(q)

    def run(seed):
        np.random.seed(seed)
        out, lse = tilewise.attention(q, q, ones, dropout_p=0.5, return_lse=True)
        np.random.seed(seed)
        grads = tilewise.attention_backward(out, q, q, ones, out, lse, dropout_p=0.5)
        return out, grads

    (out, grads), (again, _), (other, _) = run(1), run(1), run(2)
    assert np.array_equal(out, again) and not np.array_equal(out, other)
    # With v = 1, dv sums the kept weights times dout = out, which reveals whether both passes used
    # the same bits.
    assert np.isclose(grads.dv.sum(), (out * out).sum(), rtol=1e-5)


def test_scale_may_be_an_array_of_one_element():
    (q,) = arrays((1, 9, 2, 8))
    wanted = tilewise.attention(q, q, q, scale=0.5)
    for scale in (np.float32(0.5), np.array([0.5], np.float32)):
        assert np.array_equal(tilewise.attention(q, q, q, scale=scale), wanted)


WITHOUT_TORCH = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("there is no torch here")

sys.meta_path.insert(0, Blocked())
import tilewise
assert "numpy" not in sys.modules
import numpy as np

q = np.random.default_rng(0).standard_normal((2, 7, 3, 8)).astype(np.float32)
out, lse = tilewise.attention(q, q, q, causal=True, return_lse=True)
scores = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), q.astype(np.float64)) / 8**0.5
scores[..., np.triu(np.ones((7, 7), bool), 1)] = -np.inf
weights = np.exp(scores - scores.max(-1, keepdims=True))
total = weights.sum(-1, keepdims=True)
wanted = np.einsum("bhij,bjhd->bihd", weights / total, q)
assert np.abs(out - wanted).max() < 2e-6
assert np.abs(lse - (np.log(total) + scores.max(-1, keepdims=True))[..., 0]).max() < 2e-6
grads = tilewise.attention_backward(out, q, q, q, out, lse, causal=True)
merged, _ = tilewise.merge_states(out, lse, out, lse)
assert np.abs(merged - out).max() < 2e-6
print(tilewise.__version__, tilewise.explain(q, q, q), len(tilewise.capabilities()))
assert "torch" not in sys.modules
try:
    tilewise.nn
except ImportError as error:
    assert "torch" in str(error)
else:
    raise AssertionError("tilewise.nn needs torch")
"""

IMPORTS_NOTHING = """
import sys
import tilewise
loaded = {"torch", "numpy"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("program", [WITHOUT_TORCH, IMPORTS_NOTHING])
def test_in_a_fresh_python_process(program):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True,
        env=os.environ, cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
