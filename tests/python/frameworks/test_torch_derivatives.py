"""Forward mode and second derivatives of attention in PyTorch."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import devices
import tilewise
import torch_versions
from derivative_uses import USES, CountOperators, dense
from tilewise import masks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself


def qkv() -> tuple[Tensor, ...]:
    """q, k and v with grouped heads and a head dimension of their own for v."""
    return torch.randn(2, 5, 4, 6), torch.randn(2, 7, 2, 6), torch.randn(2, 7, 2, 3)


def every_input() -> tuple[Tensor, ...]:
    return *qkv(), torch.randn(4, 1, 7), torch.randn(4), torch.tensor(0.4)


PROBLEMS = {
    "plain": (qkv, {"causal": True}),
    "options": (every_input, {"window": (4, 1), "softcap": 3.0}),
}


def attend(*x: Tensor, **options) -> tuple[Tensor, Tensor]:
    named = dict(zip(("bias", "sinks", "scale"), x[3:], strict=False))
    return tilewise.attention(*x[:3], **named, **options, return_lse=True)


def problem(name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], dict]:
    make, options = PROBLEMS[name]
    x = make()
    return x, tuple(torch.randn_like(a) for a in x), options


def check(got: object, plain: object, exact: object) -> None:
    """Compares with float64: three times the error of plain float32 PyTorch is allowed."""
    for one, other, want in zip(*map(tree_leaves, (got, plain, exact)), strict=True):
        bound = 3 * (other - want).abs().max() + 2e-6 * want.abs().max()
        assert one.shape == want.shape
        assert (one - want).abs().max() <= bound


@pytest.mark.tensors
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("use", USES)
def test_uses_equal_plain_pytorch(use, name, device):
    run, calls = USES[use]
    x, t, options = problem(name)
    with CountOperators() as counted:
        got = run(partial(attend, **options), x, t)
    assert counted.calls == calls
    plain = partial(dense, **options)
    exact = run(plain, *(tuple(a.double() for a in y) for y in (x, t)))
    check(got, run(plain, x, t), exact)


class CountingBackend:
    """A backend of torch.compile that runs graphs as they are and counts operators in them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.backend = aot_autograd(fw_compiler=self._compile)

    def _compile(self, graph, _inputs):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "tilewise" in str(node.target):
                self.calls[str(node.target).split(".")[1]] += 1
        return make_boxed_func(graph.forward)

    def __call__(self, graph, inputs):
        return self.backend(graph, inputs)


def compiled(function, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        ("func.jvp", "options"),
        ("dual tensors, of q alone", "options"),
        ("func.jvp under no_grad", "plain"),
        ("vmap of jvp", "plain"),
    ],
)
def test_compiled_uses_equal_eager_ones(use, name):
    x, t, options = problem(name)
    run, calls = USES[use]
    attention, backend = partial(attend, **options), CountingBackend()
    got = compiled(lambda x, t: run(attention, x, t), backend)(x, t)
    assert backend.calls == calls
    for one, other in zip(tree_leaves(got), tree_leaves(run(attention, x, t)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("detached", [True, False])
def test_compiled_mean_flow_equals_eager_one(detached):
    x, t, options = problem("options")
    weight = torch.eye(x[0].shape[-1]).requires_grad_()

    def loss(weight):
        def model(q):
            return attend(q @ weight, *x[1:], **options)[0]

        out, tangent = torch.func.jvp(model, x[:1], t[:1])
        return (out - (tangent.detach() if detached else tangent)).square().mean()

    backend = CountingBackend()
    got, want = (torch.autograd.grad(f(weight), weight)[0] for f in (compiled(loss, backend), loss))
    assert backend.calls["backward"] == (1 if detached else 2)
    assert backend.calls["second"] == (0 if detached else 1)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


# --- every option, by identities that need no reference -------------------------------------------


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def packed(*x: Tensor, **options) -> tuple[Tensor, Tensor]:
    """``attend`` on sequences of 3 and 7 rows with 9 and 5 keys, packed end to end."""
    q, k, v = (a.flatten(0, 1) for a in x[:3])
    named = dict(zip(("bias", "sinks", "scale"), x[3:], strict=False))
    return tilewise.attention_varlen(
        q, k, v, starts(3, 7), starts(9, 5), **named, **options, return_lse=True
    )


def bhsd(*x: Tensor, **options) -> tuple[Tensor, Tensor]:
    heads_first = (a.transpose(1, 2) for a in x[:3])
    return attend(*heads_first, *x[3:], layout="bhsd", **options)


SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0])
EVERY_OPTION = {
    "dropout": (attend, {"dropout_p": 0.4, "softcap": 2.0}),
    "varlen": (packed, {"window": (3, 2), "dropout_p": 0.2}),
    "alibi": (bhsd, {"alibi_slopes": SLOPES, "causal": True}),
    "mask": (attend, {"mask": masks.from_bool(torch.arange(140).view(1, 4, 5, 7) % 3 != 0)}),
}


def directions(x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn_like(a) for a in x)


def inner(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> Tensor:
    return sum(((a.double() * b.double()).sum() for a, b in zip(one, other, strict=True)))


def seeded(function):
    """The function with the same dropout bits in every call."""

    def run(*x):
        torch.manual_seed(3)
        return function(*x)

    return run


def options_problem(name: str, dtype: torch.dtype):
    function, options = EVERY_OPTION[name]
    options = devices.moved(options)
    if "mask" in options:
        options["mask"] = options["mask"].to(devices.current().memory)
    q, k, v = torch.randn(2, 5, 4, 6), torch.randn(2, 7, 2, 6), torch.randn(2, 7, 2, 3)
    bias = torch.randn(4, 7 if name == "varlen" else 5, 9 if name == "varlen" else 7)
    x = (*(a.to(dtype) for a in (q, k, v, bias)), torch.randn(4), torch.tensor(0.4))
    return seeded(partial(function, **options)), x


TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_tangents_are_adjoint_to_gradients(name, dtype, device):
    """<J t, b> = <t, B b>, and finite differences of the forward in float32."""
    f, x = options_problem(name, dtype)
    t = directions(x)
    results, tangents = torch.func.jvp(f, x, t)
    b = directions(results)
    leaves = tuple(a.clone().requires_grad_() for a in x)
    grads = torch.autograd.grad(f(*leaves), leaves, b)
    sizes = sum(a.double().norm() * c.double().norm() for a, c in zip(t, grads, strict=True))
    assert abs(inner(tangents, b) - inner(t, grads)) <= TOLERANCE[dtype] * sizes
    if dtype is torch.float32:
        h = 2.0**-8
        ends = [f(*(a + s * d for a, d in zip(x, t, strict=True))) for s in (h, -h)]
        for up, down, tangent in zip(*ends, tangents, strict=True):
            torch.testing.assert_close((up - down) / (2 * h), tangent, rtol=2e-3, atol=2e-3)


@pytest.mark.tensors
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", EVERY_OPTION)
def test_second_derivative_is_symmetric(name, dtype, device):
    """<H y, z> = <H z, y>, with H y forward over reverse and H z reverse over reverse."""
    f, x = options_problem(name, dtype)
    b, y, z = directions(f(*x)), directions(x), directions(x)
    every = tuple(range(len(x)))

    def loss(*x):
        return sum((a.float() * c.float()).sum() for a, c in zip(f(*x), b, strict=True))

    one = torch.func.jvp(torch.func.grad(loss, every), x, y)[1]
    leaves = tuple(a.clone().requires_grad_() for a in x)
    grads = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    other = torch.autograd.grad(grads, leaves, z)
    sizes = sum(a.double().norm() * c.double().norm() for a, c in zip(one, z, strict=True))
    assert abs(inner(one, z) - inner(other, y)) <= TOLERANCE[dtype] * sizes


@pytest.mark.tensors
def test_tangent_of_the_incoming_gradient_alone(device):
    """The forward ran without dual tensors: its backward is linear in dout."""
    x, _, options = problem("plain")
    q = x[0].requires_grad_()
    out = tilewise.attention(q, *x[1:], **options)
    dout, tangent = torch.randn_like(out), torch.randn_like(out)
    (want,) = torch.autograd.grad(out, q, tangent, retain_graph=True)
    with forward_ad.dual_level():
        (grad,) = torch.autograd.grad(out, q, forward_ad.make_dual(dout, tangent))
        torch.testing.assert_close(forward_ad.unpack_dual(grad).tangent, want)


@pytest.mark.tensors
def test_hidden_keys_and_rows_without_keys(device):
    """A NaN in the tangent of a key that no row sees changes nothing; empty rows get zeros."""
    (q, k, v), (dq, dk, dv), _ = problem("plain")
    causal = partial(tilewise.attention, causal=True, return_lse=True)
    few = (q, k[:, :3], v[:, :3])  # of 5 rows, the first 2 see no key
    tangents = torch.func.jvp(causal, few, (dq, dk[:, :3], dv[:, :3]))[1]
    assert not tangents[0][:, :2].any()
    assert not tangents[1][:, :, :2].any()
    assert tangents[0].isfinite().all()
    banded = partial(tilewise.attention, window=(2, 0), return_lse=True)
    q, dq = q[:, :3], dq[:, :3]  # of 7 keys, no row sees the first 2
    want = torch.func.jvp(banded, (q, k[:, 2:], v[:, 2:]), (dq, dk[:, 2:], dv[:, 2:]))[1]
    dk[:, :2], dv[:, :2] = torch.nan, torch.inf
    for one, other in zip(torch.func.jvp(banded, (q, k, v), (dq, dk, dv))[1], want, strict=True):
        torch.testing.assert_close(one, other)


# --- what is refused ------------------------------------------------------------------------------


def third_derivative(f, q):
    def grad(function):
        return torch.func.grad(lambda x: function(x).square().sum())

    return grad(grad(grad(f)))(q)


def loss_through_the_tangent_inside(f, q):
    weight = torch.ones(6, requires_grad=True)
    with forward_ad.dual_level():
        out = f(forward_ad.make_dual(q, q) * weight)
        forward_ad.unpack_dual(out).tangent.sum().backward()


def double_backward(f, q):
    q = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(q).square().sum(), q, create_graph=True)
    grad.sum().backward()


def jvp(f, q):
    return torch.func.jvp(f, (q,), (q,))


def paged(q, k, v):
    table = torch.zeros(2, 1, dtype=torch.int32)
    used = torch.tensor([7, 5], dtype=torch.int32)
    return tilewise.attention_varlen(
        q.flatten(0, 1), k, v, starts(5, 5), None, seqused_k=used, block_table=table
    )


def slopes(q, k, v):
    return tilewise.attention(q.detach(), k, v, alibi_slopes=q[0, 0, :, 0])


REFUSED = {
    "third derivative": (third_derivative, tilewise.attention, "third ones are not defined"),
    "loss in the level": (loss_through_the_tangent_inside, tilewise.attention, "after that block"),
    "jvp of jvp": (lambda f, q: jvp(lambda q: jvp(f, q)[1], q), tilewise.attention,
                   "forward mode over forward mode"),
    "jacfwd of jacfwd": (lambda f, q: torch.func.jacfwd(torch.func.jacfwd(f))(q),
                         tilewise.attention, "forward mode over forward mode"),
    "pages": (jvp, paged, "block_table is given, but forward mode"),
    "pages, twice": (double_backward, paged, "block_table is given, but forward mode"),
    "cache": (jvp, tilewise.attention_with_kvcache, "attention_with_kvcache has no forward-mode"),
    "slopes": (jvp, slopes, "alibi_slopes has a tangent"),
    "batch_invariant": (jvp, partial(tilewise.attention, batch_invariant=True),
                        "batch_invariant is True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    derive, function, sentence = REFUSED[name]
    q, k, v = qkv()
    with pytest.raises(RuntimeError, match=sentence):
        derive(lambda q: function(q, k, v), q)


def test_float8_keys_are_refused():
    q, k, v = qkv()
    q, k, v = q.bfloat16(), k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match=r"k has dtype torch\.float8_e4m3fn, but forward mode"):
        jvp(lambda q: tilewise.attention(q, k, v), q)


NOT_COMPILED = {
    "jvp of jvp": lambda f, q: jvp(lambda q: jvp(f, q)[1], q),
    "jvp of grad": lambda f, q: jvp(torch.func.grad(lambda q: f(q).square().sum()), q),
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_cannot_be_compiled_raises_or_is_right(name):
    q, k, v = qkv()
    torch._dynamo.reset()

    def run(q):
        return NOT_COMPILED[name](lambda q: tilewise.attention(q, k, v), q)

    if name == "jvp of jvp":  # eager attention refuses it as well
        with pytest.raises(RuntimeError, match="tilewise: "):
            torch.compile(run, backend="aot_eager")(q)
        return
    compiled = torch.compile(run, backend="aot_eager")
    torch_versions.assert_refused_or_right(lambda: compiled(q), run(q), "tilewise: ")


def test_jvp_of_vmap_is_no_whole_graph():
    q, k, v = qkv()

    def run(q):
        return jvp(torch.func.vmap(lambda q: tilewise.attention(q, k, v)), torch.stack((q, q)))

    with pytest.raises(RuntimeError, match="cannot trace forward mode over"):
        compiled(run)(q)
