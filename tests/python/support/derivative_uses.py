"""The calls by which users get tangents and second derivatives of attention, and attention in plain
PyTorch, which the tests compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[..., Any]  # of q, k, v, bias, sinks and scale to (out, lse)
NAMES = ("q", "k", "v", "bias", "sinks", "scale")


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Any = None, sinks: Any = None, scale: Any = None, *,
    causal: bool = False, window: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) of "bshd" tensors with the options of ``tilewise.attention``, as its documentation
    defines them. Every row must see a key."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if bias is not None:
        s = s + bias
    rows, keys = s.shape[-2:]
    ahead = torch.arange(keys) - torch.arange(rows)[:, None] - (keys - rows)
    left, right = window
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    seen = seen if left is None else seen & (ahead >= -left)
    seen = seen if right is None else seen & (ahead <= right)
    s = s.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        s = torch.cat((sinks[:, None, None].expand(*s.shape[:-1], 1), s), -1)
    top = s.detach().amax(-1, keepdim=True)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    out = (e / total)[..., -keys:] @ v
    return out.transpose(1, 2), (top + total.log()).squeeze(-1)


class CountOperators(TorchDispatchMode):
    """Counts the calls of the operators forward, jvp, backward and second."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tilewise":
            self.calls[func._schema.name.removeprefix("tilewise::")] += 1
        return func(*args, **(kwargs or {}))


def _loss(f: Function) -> Function:
    def loss(*x: Tensor) -> Tensor:
        out, lse = f(*x)
        return out.square().sum() + lse.sin().sum()

    return loss


def _inside(f: Function, x: Any, t: Any) -> Any:
    """The tangents of f along t, by dual tensors; a tangent of None leaves the input as it is."""
    with forward_ad.dual_level():
        duals = (a if b is None else forward_ad.make_dual(a, b) for a, b in zip(x, t, strict=True))
        return [part for y in f(*duals) for part in forward_ad.unpack_dual(y)]


def mean_flow(f: Function, x: Any, t: Any, *, detached: bool) -> Tensor:
    """The gradient for a weight of the loss of MeanFlow, whose target has the tangent."""
    weight = _weight(x[0])

    def model(q: Tensor) -> Tensor:
        return f(q @ weight, *x[1:])[0]

    out, tangent = torch.func.jvp(model, (x[0],), (t[0],))
    tangent = tangent.detach() if detached else tangent
    return torch.autograd.grad((out - 0.5 * tangent).square().mean(), weight)[0]


def _weight(q: Tensor) -> Tensor:
    columns = q.shape[-1]
    weight = torch.eye(columns) + 0.01 * torch.arange(columns**2).view(columns, columns).sin()
    return weight.to(q.dtype).requires_grad_()


def _dual_loss(f: Function, x: Any, t: Any, *, inside: bool, detached: bool) -> Tensor:
    """The same with dual tensors; the backward runs inside or after their level."""
    weight = _weight(x[0])
    with forward_ad.dual_level():
        dual = f(forward_ad.make_dual(x[0], t[0]) @ weight, *x[1:])[0]
        out, tangent = forward_ad.unpack_dual(dual)
        loss = (out - 0.5 * (tangent.detach() if detached else tangent)).square().mean()
        if inside:
            return forward_ad.unpack_dual(torch.autograd.grad(loss, weight)[0]).primal
    return torch.autograd.grad(loss, weight)[0]


def _penalty(f: Function, x: Any, _t: Any) -> Any:
    leaves = [a.clone().requires_grad_() for a in x]
    grads = torch.autograd.grad(_loss(f)(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)


def _grad_of_grad(f: Function, x: Any, t: Any) -> Any:
    every = tuple(range(len(x)))

    def along(*y: Tensor) -> Any:
        grads = torch.func.grad(_loss(f), every)(*y)
        return sum((g * d).sum() for g, d in zip(grads, t, strict=True))

    return torch.func.grad(along, every)(*x)


def _no_grad(f: Function, x: Any, t: Any) -> Any:
    with torch.no_grad():
        return torch.func.jvp(f, x, t)


def _every(x: Any) -> tuple[int, ...]:
    return tuple(range(len(x)))


QKV = (0, 1, 2)
ONE = {"forward": 1, "jvp": 1}
GRAD = {"forward": 1, "backward": 1}
THROUGH = ONE | {"backward": 2, "second": 1}  # backward: of out, and of the tangents' own gradients
# What is written, and how often each operator runs. The inputs are x, their tangents t.
USES: dict[str, tuple[Function, dict[str, int]]] = {
    "func.jvp": (lambda f, x, t: torch.func.jvp(f, x, t), ONE),
    "dual tensors": (_inside, ONE),
    "dual tensors, of q alone": (
        lambda f, x, t: _inside(f, x, (t[0],) + (None,) * len(x[1:])), ONE
    ),
    "MeanFlow": (lambda f, x, t: mean_flow(f, x, t, detached=True), ONE | GRAD),
    "MeanFlow, through the tangent": (
        lambda f, x, t: mean_flow(f, x, t, detached=False), THROUGH
    ),
    "func.jvp under no_grad": (_no_grad, ONE),
    "dual tensors, detached, backward after": (
        lambda f, x, t: _dual_loss(f, x, t, inside=False, detached=True), ONE | GRAD
    ),
    "dual tensors, detached, backward inside": (
        lambda f, x, t: _dual_loss(f, x, t, inside=True, detached=True), ONE | GRAD | {"second": 1}
    ),
    "dual tensors, backward after": (
        lambda f, x, t: _dual_loss(f, x, t, inside=False, detached=False), THROUGH
    ),
    "gradient penalty": (_penalty, {"forward": 1, "backward": 2, "jvp": 1, "second": 1}),
    "func.grad of func.grad": (
        _grad_of_grad, {"forward": 1, "backward": 2, "jvp": 1, "second": 1}
    ),
    "jvp of grad": (
        lambda f, x, t: torch.func.jvp(torch.func.grad(_loss(f), _every(x)), x, t)[1],
        ONE | GRAD | {"second": 1},
    ),
    "grad of jvp": (
        lambda f, x, t: torch.func.grad(
            lambda *y: torch.func.jvp(_loss(f), y, t)[1], _every(x)
        )(*x),
        ONE | GRAD | {"second": 1},
    ),
    "jacfwd": (lambda f, x, t: torch.func.jacfwd(f, QKV)(*x), ONE),
    "hessian": (
        lambda f, x, t: torch.func.hessian(_loss(f), QKV)(*x), ONE | GRAD | {"second": 1}
    ),
    "jacrev of jacrev": (
        lambda f, x, t: torch.func.jacrev(torch.func.jacrev(_loss(f), QKV))(*x),
        {"forward": 1, "backward": 2, "jvp": 1, "second": 1},
    ),
    "vmap of jvp": (
        lambda f, x, t: torch.func.vmap(
            lambda d: torch.func.jvp(lambda q: f(q, *x[1:]), x[:1], (d,))
        )(torch.stack((t[0], -t[0]))),
        ONE,
    ),
}  # fmt: skip
