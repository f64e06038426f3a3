"""The operators themselves: torch.library.opcheck, tags, and refusals when called directly."""

from __future__ import annotations

import pytest
import torch

import devices
import tilewise
from tilewise import _ops, _options, _torch
from tilewise._request import Request, Sequences

pytestmark = pytest.mark.tensors

ALL = sum(_options.WANT_BITS)


def dense(layout="bshd", dtype=torch.float32, **options):
    q, k, v = torch.randn(2, 19, 4, 16), torch.randn(2, 23, 2, 16), torch.randn(2, 23, 2, 8)
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    if layout == "bhsd":
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return _torch.prepare_dense(q, k, v, layout, Request(**options))


def varlen(paged=False, **options):
    starts = torch.tensor([0, 5, 5, 17], dtype=torch.int32)
    q = torch.randn(20, 4, 16, requires_grad=True)
    if paged:
        k = torch.randn(7, 4, 2, 16, requires_grad=True)
        sequences = Sequences(
            starts, None, block_table=torch.randperm(6).reshape(3, 2).int(),
            seqused_k=torch.tensor([8, 3, 0], dtype=torch.int32),
        )  # fmt: skip
    else:
        k = torch.randn(20, 2, 16, requires_grad=True)
        sequences = Sequences(starts, starts)
    v = torch.randn_like(k, requires_grad=True)
    return _torch.prepare_varlen(q, k, v, sequences, Request(**options))


def every_option():
    return dict(
        causal=True, softcap=4.0, bias=torch.randn(1, 4, 19, 23, requires_grad=True),
        sinks=torch.randn(4, requires_grad=True), alibi_slopes=torch.rand(2, 4),
        scale=torch.tensor(0.3, requires_grad=True), dropout_p=0.25,
    )  # fmt: skip


PROBLEMS = {
    "plain": lambda: dense(),
    "causal bhsd": lambda: dense("bhsd", causal=True),
    "bfloat16 window": lambda: dense(dtype=torch.bfloat16, window=(7, 2)),
    "every option": lambda: dense(**every_option()),
    "varlen": lambda: varlen(causal=True),
    "paged": lambda: varlen(paged=True),
}


@pytest.mark.parametrize("with_lse_low", [False, True])
@pytest.mark.parametrize("name", PROBLEMS)
def test_opcheck_forward(name, with_lse_low):
    q, k, v, options = PROBLEMS[name]()
    arguments = (q, k, v, *options, with_lse_low)
    torch.library.opcheck(torch.ops.tilewise.forward.default, arguments)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("name", PROBLEMS)
def test_lse_low_follows_lse_in_memory(name):
    q, k, v, options = PROBLEMS[name]()
    with torch.no_grad():
        out, lse = torch.ops.tilewise.forward(q, k, v, *options)
        same, pair = torch.ops.tilewise.forward(q, k, v, *options, True)
    assert torch.equal(out, same) and torch.equal(pair[0], lse)
    low = pair[1][lse.isfinite()]
    assert low.abs().max() <= 2**-24 * lse[lse.isfinite()].abs().max() and low.any()
    assert not pair[1][~lse.isfinite()].any()


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("with_lse_low", [False, True])
@pytest.mark.parametrize("wanted", [ALL, _options.WANT_K])
def test_opcheck_backward(name, wanted, with_lse_low):
    q, k, v, options = PROBLEMS[name]()
    with torch.no_grad():
        out, lse = torch.ops.tilewise.forward(q, k, v, *options, with_lse_low)
    saved = [None if x is None else x.detach() for x in options[: _options.TENSOR_COUNT]]
    options = _ops.Options(*saved, *options[_options.TENSOR_COUNT :])
    dlse = torch.randn_like(lse[0] if with_lse_low else lse)
    arguments = (torch.randn_like(out), dlse, q.detach(), k.detach(), v.detach())
    torch.library.opcheck(
        torch.ops.tilewise.backward.default, (*arguments, out, lse, *options, wanted)
    )


@pytest.mark.tensors("cpu")
def test_opcheck_tangents():
    q, k, v, options = dense("bhsd", **every_option())
    saved = [None if x is None else x.detach() for x in options[: _options.TENSOR_COUNT]]
    options = _ops.Options(*saved, *options[_options.TENSOR_COUNT :])
    q, k, v = q.detach(), k.detach(), v.detach()
    state = (q, k, v, *torch.ops.tilewise.forward(q, k, v, *options, True))
    tangents = [
        None if x is None else torch.randn_like(x)
        for x in (q, k, v, options.bias, options.sinks, options.scale_tensor)
    ]
    arguments = (*state, *tangents, *options)
    torch.library.opcheck(torch.ops.tilewise.jvp.default, arguments)
    made = torch.ops.tilewise.jvp(*arguments)
    incoming = (None, None, torch.randn_like(made[0]), torch.randn_like(made[1]))
    torch.library.opcheck(
        torch.ops.tilewise.second.default, (*state, *made, *tangents, *incoming, *options, ALL)
    )


def test_opcheck_append_kv():
    k_cache, v_cache = torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 8)
    cos, sin = torch.randn(32, 8), torch.randn(32, 8)
    q, k, v = torch.randn(2, 3, 4, 16), torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 8)
    lengths = torch.tensor([5, 20], dtype=torch.int32)
    none = None
    arguments = (k_cache, v_cache, q, k, v, lengths, none, none, none, none, none, none, cos, sin)
    torch.library.opcheck(torch.ops.tilewise.append_kv.default, (*arguments, True, False))


@pytest.mark.parametrize("name", ["forward", "backward", "jvp", "second", "append_kv"])
def test_marked_compliant(name):
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.tilewise, name).default.tags


def test_outputs_have_the_requested_layout():
    q, k, v, options = dense("bhsd")
    out, lse = torch.ops.tilewise.forward(q, k, v, *options)
    assert out.transpose(1, 2).is_contiguous() and lse.is_contiguous()
    out, _ = torch.ops.tilewise.forward(q, k, v, *options._replace(heads_first=False))
    assert out.is_contiguous()


def bad(**changes):
    q, k, v, options = dense()
    changes = devices.moved(changes)
    tensors = {name: changes.pop(name) for name in ("q", "k", "v") if name in changes}
    q, k, v = (tensors.get(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    torch.ops.tilewise.forward(q.detach(), k.detach(), v.detach(), *options._replace(**changes))


# The operators are public as well: no argument may reach memory that it should not.
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(q=torch.zeros(2, 19, 64)), r"q has shape \[2, 19, 64\]"),
        (dict(k=torch.zeros(2, 23, 2, 15)), r"k has shape .* must be \[any, any, any, 16\]"),
        (dict(k=torch.zeros(3, 23, 2, 16), v=torch.zeros(3, 23, 2, 8)), "k has batch size 3"),
        (dict(v=torch.zeros(2, 22, 2, 8)), r"v has shape .* must be \[2, 23, 2, any\]"),
        (dict(v=torch.zeros(2, 23, 2, 8).half()), "v has dtype float16, but"),
        (dict(q=torch.zeros(2, 19, 4, 16).double()), "q has dtype float64, but"),
        (dict(q=torch.zeros(2, 19, 4, 32)[..., ::2]), "q has a last dimension of stride 2"),
        (dict(bias=torch.zeros(2, 4, 19, 22)), r"bias has shape .* must be"),
        (dict(bias=torch.zeros(3, 4, 19, 23)), "bias has 3 elements in dimension 0"),
        (dict(bias=torch.zeros(2, 4, 19, 23).half()), "bias has dtype float16, but"),
        (dict(alibi_slopes=torch.zeros(5)), r"alibi_slopes has shape \[5\]"),
        (dict(alibi_slopes=torch.zeros(4).double()), "alibi_slopes has dtype float64, but"),
        (dict(sinks=torch.zeros(2)), r"sinks has shape \[2\]"),
        (dict(sinks=torch.zeros(8)[::2]), "sinks has stride 2"),
        (dict(seqused_k=torch.zeros(2)), "seqused_k has dtype float32, but"),
        (dict(seqused_k=torch.zeros(3).int()), r"seqused_k has shape \[3\]"),
        (dict(kv_batch_idx=torch.zeros(3).int()), r"kv_batch_idx has shape \[3\]"),
        (dict(leftpad_k=torch.zeros(3).int()), r"leftpad_k has shape \[3\]"),
        (dict(block_table=torch.zeros(3, 1).int()), r"block_table has shape \[3, 1\]"),
        (dict(scale_tensor=torch.zeros(2)), r"scale_tensor has shape \[2\]"),
        (dict(dropout_p=0.5), "dropout_state is not given"),
        (
            dict(dropout_p=0.5, dropout_state=torch.zeros(3).long()),
            r"dropout_state has shape \[3\]",
        ),
        (dict(dropout_p=-0.5), "dropout_p"),
        (dict(dropout_p=1.0, dropout_state=torch.zeros(2).long()), "dropout_p"),
        (dict(softcap=-1.0), "softcap"),
        (dict(softcap=1e-50), "softcap is .* which rounds to 0 in float32"),
        (dict(num_splits=2**32), "num_splits is 4294967296, but must fit into 32 bits"),
        (dict(scale=float("nan")), "scale"),
        (dict(cu_seqlens_q=torch.zeros(0).int()), "cu_seqlens_q is empty"),
    ],
)
def test_refuses(changes, words):
    with pytest.raises(ValueError, match=words):
        bad(**changes)


@pytest.mark.tensors("cpu")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_gpu_without_a_kernel_is_refused():
    if "cuda" not in devices.missing():
        pytest.skip("this build has kernels for this GPU")
    with pytest.raises(RuntimeError, match="tilewise"):
        torch.ops.tilewise.forward(*(x.cuda() for x in dense()[:3]), *_ops.Options())


@pytest.mark.tensors
@pytest.mark.parametrize("how", ["leaf", "retain_grad", "grad of a function"])
def test_every_element_of_an_expanded_bias_gets_a_gradient(how):
    q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
    base = torch.randn(1, 4, 9, 9)

    def loss(bias):
        return tilewise.attention(q, k, v, bias=bias).square().sum()

    repeated = base.repeat(2, 1, 1, 1).requires_grad_()
    loss(repeated).backward()
    if how == "leaf":
        view = base.expand(2, 4, 9, 9).detach().requires_grad_()
        loss(view).backward()
        given = view.grad
    elif how == "retain_grad":
        view = base.requires_grad_().expand(2, 4, 9, 9)
        view.retain_grad()
        loss(view).backward()
        given = view.grad
    else:
        given = torch.func.grad(loss)(base.expand(2, 4, 9, 9))
    assert torch.allclose(given, repeated.grad, atol=1e-5)
