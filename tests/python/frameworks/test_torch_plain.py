"""The fast path of plain calls gives the results of the operators, and leaves other calls to
them."""

from __future__ import annotations

import pytest
import torch

import tilewise
from tilewise import _plain, _torch
from tilewise._request import Request

pytestmark = pytest.mark.tensors

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "scale": {"scale": 0.3},
}


def tensors(layout="bshd", dtype=torch.float32, gradients=False):
    torch.manual_seed(3)
    sizes = ((2, 19, 4, 16), (2, 23, 2, 16), (2, 23, 2, 8))
    if layout == "bhsd":
        sizes = tuple((b, h, s, d) for b, s, h, d in sizes)
    return tuple(torch.randn(size).to(dtype).requires_grad_(gradients) for size in sizes)


# Deterministic, so that gradients on a GPU are bitwise equal as well.
def plain(q, k, v, *, layout="bshd", deterministic=True, **options):
    request = Request(deterministic=deterministic, **options)
    return _plain.attention(
        q, k, v, request.causal, request.window, request.scale, True, request.deterministic,
        False, layout,
    )  # fmt: skip


def general(q, k, v, *, layout="bshd", **options):
    request = Request(return_lse=True, deterministic=True, **options)
    return _torch.general_attention(q, k, v, layout, request)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_fast_and_general_path_agree_bitwise(name, dtype, layout):
    q, k, v = tensors(layout, dtype, gradients=True)
    douts, results = None, []
    for way in (plain, general):
        out, lse = way(q, k, v, layout=layout, **OPTIONS[name])
        douts = douts or (torch.randn_like(out), torch.randn_like(lse))
        results.append((out, lse, *torch.autograd.grad((out, lse), (q, k, v), douts)))
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long)
        assert short.dtype == long.dtype
        assert short.stride() == long.stride()


def test_fast_path_results_need_no_gradient_without_grad_mode():
    q, k, v = tensors(gradients=True)
    with torch.no_grad():
        out, lse = plain(q, k, v)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_only_requested_gradients_are_computed():
    q, k, v = tensors()
    k.requires_grad_()
    out, _ = plain(q, k, v)
    out.sum().backward()
    assert q.grad is None
    assert v.grad is None
    expected = torch.autograd.grad(general(q, k, v)[0].sum(), k)[0]
    assert torch.equal(k.grad, expected)


def test_gradient_of_lse_only():
    q, k, v = tensors(gradients=True)
    short, long = (torch.autograd.grad(way(q, k, v)[1].sum(), (q, k)) for way in (plain, general))
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_calls_that_the_fast_path_declines():
    q, k, v = tensors()
    assert plain(q, k, v) is not None
    assert plain(q[..., ::2], k[..., ::2], v) is None  # columns are not contiguous
    assert plain(q.double(), k.double(), v.double()) is None
    assert plain(q, k[:, :, :, :8], v) is None
    assert plain(q, k, v, scale=torch.tensor(0.5)) is None
    assert plain(q, k, v, layout="sbhd") is None
    assert plain(q.tolist(), k, v) is None
    assert plain(*(x.to("meta") for x in (q, k, v))) is None
    with torch.autocast("cpu"):
        assert plain(q, k, v) is None
    assert torch.func.vmap(lambda x: torch.tensor(plain(x, k, v) is None))(q[None]).all()


def negative(x: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view whose memory holds their negatives, like `z.conj().imag`."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("gradients", [False, True])
def test_negative_views_are_read_correctly(which, gradients):
    given = tensors(gradients=gradients)
    want = plain(*given)
    lazy = list(given)
    lazy[which] = negative(given[which])
    assert lazy[which].is_neg() and plain(*lazy) is None
    got = tilewise.attention(*lazy, return_lse=True, deterministic=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    if gradients:
        douts = [torch.randn_like(x) for x in want]
        grads = (torch.autograd.grad(x, given, douts) for x in (got, want))
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


class Doubled(torch.Tensor):
    """A subclass whose values are twice the numbers in its memory."""

    @staticmethod
    def __new__(cls, half: torch.Tensor) -> Doubled:
        made = torch.Tensor._make_wrapper_subclass(
            cls, half.shape, dtype=half.dtype, device=half.device, strides=half.stride()
        )
        made.half_of_it = half
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        whole = [2 * x.half_of_it if isinstance(x, Doubled) else x for x in args]
        return func(*whole, **(kwargs or {}))


# Functions that build a tensor which shows the given numbers (or zeros) without storing them.
LAZY = {
    "negative": negative,
    "subclass": lambda x: Doubled(x / 2),
    "zeros": lambda x: torch._efficientzerotensor(x.shape, device=x.device),
}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("way", [plain, general])
def test_lazy_incoming_gradients_are_read_correctly(way, kind):
    given, lazy = tensors(gradients=True), LAZY[kind]
    results = way(*given)
    douts = [torch.zeros_like(x) if kind == "zeros" else torch.randn_like(x) for x in results]
    want = torch.autograd.grad(results, given, douts, retain_graph=True)
    got = torch.autograd.grad(results, given, [lazy(x) for x in douts])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_errors_come_from_the_general_path():
    q, k, v = tensors()
    tilewise.attention(q, k, v)  # from now on the fast path is tried first
    with pytest.raises(ValueError, match="k has head dimension 8, but q has 16"):
        tilewise.attention(q, k[..., :8], v)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float64"):
        tilewise.attention(q, k.double(), v)
    with pytest.raises(TypeError, match="softcap is False"):
        tilewise.attention(q, k, v, softcap=False)
    with pytest.raises(ValueError, match="layout is 'sbhd'"):
        tilewise.attention(q, k, v, layout="sbhd")


def lengths(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def sequences(paged: bool) -> dict[str, object]:
    """Arguments of attention_varlen that follow q, k and v."""
    given = dict(cu_seqlens_q=lengths(0, 6, 19), causal=True, window=(7, None), softcap=4.0,
                 deterministic=True)  # fmt: skip
    if paged:
        return given | dict(
            cu_seqlens_k=None, seqused_k=lengths(8, 30), block_table=lengths(3, 0, 1, 2).view(2, 2)
        )
    return given | dict(cu_seqlens_k=lengths(0, 9, 23), max_seqlen_q=13, max_seqlen_k=14)


@pytest.mark.parametrize("paged", [False, True])
def test_fast_and_general_path_of_varlen_agree_bitwise(paged, monkeypatch):
    q = torch.randn(19, 4, 16)
    k, v = (torch.randn(4, 16, 2, 16) if paged else torch.randn(23, 2, 16) for _ in range(2))
    short = tilewise.attention_varlen(q, k, v, **sequences(paged), return_lse=True)
    real, results = _plain.indexed, []
    monkeypatch.setattr(_plain, "indexed", lambda *a: results.append(real(*a)) or results[-1])
    tilewise.attention_varlen(q, k, v, **sequences(paged))
    assert len(results) == 1 and results[0] is not None
    monkeypatch.setattr(_plain, "indexed", lambda *_: None)
    long = tilewise.attention_varlen(q, k, v, **sequences(paged), return_lse=True)
    for a, b in zip(short, long, strict=True):
        assert torch.equal(a, b) and a.stride() == b.stride()


def test_varlen_calls_that_the_fast_path_declines(monkeypatch):
    q, k = torch.randn(19, 4, 16), torch.randn(23, 2, 16)
    results = []
    real = _plain.indexed
    monkeypatch.setattr(_plain, "indexed", lambda *a: results.append(real(*a)) or results[-1])
    given = sequences(paged=False)
    for changes in (
        dict(max_seqlen_q=-1), dict(cu_seqlens_k=None), dict(cu_seqlens_q=None),
        dict(block_table=lengths(0, 1).view(2, 1)), dict(seqused_k=lengths(1, 1).long()),
        dict(seqused_k=lengths(1, 1).to("meta")), dict(scale="1"), dict(softcap=-1.0),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            tilewise.attention_varlen(q, k, k, **{**given, **changes})
    assert all(result is None for result in results)
    q.requires_grad_()
    assert tilewise.attention_varlen(q, k, k, **given).requires_grad
    assert all(result is None for result in results)


def test_torch_deterministic_algorithms_are_honoured(monkeypatch):
    q, k, v = tensors()
    seen = []
    forward = _plain._forward
    monkeypatch.setattr(_plain, "_forward", lambda *a: (seen.append(a[6]), forward(*a))[1])
    plain(q, k, v, deterministic=False)
    torch.use_deterministic_algorithms(True)
    try:
        plain(q, k, v, deterministic=False)
        options = _torch.prepare_dense(q, k, v, "bshd", Request())[3]
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]
    assert options.deterministic


def test_gradients_of_broadcast_heads_are_summed():
    q, k, v = tensors(gradients=True)
    one = [x[:, :, :1].detach().requires_grad_() for x in (k, v)]
    out = tilewise.attention(q, *(x.expand(-1, -1, 4, -1) for x in one), causal=True)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, (q, *one), dout)
    shared = tilewise.attention(q, *one, causal=True)
    want = torch.autograd.grad(shared, (q, *one), dout)
    torch.testing.assert_close(out, shared)
    torch.testing.assert_close(got, want)
