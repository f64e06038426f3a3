"""Scores of any finite size: masks made of large numbers, large activations, slopes and sinks.

Every case is compared with attention in float64 over scores that are rounded to fp32, as in every
fp32 computation; here products of q and k are integers, exact in fp32 in any order. Where keys
share a score of -1e10 their weights are equal, although fp32 cannot represent log(count) added to
it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import capi
import oracle
import tilewise
from bounds import FORWARD_FACTOR, FP32_RELATIVE, GRADIENT_FACTOR, LSE_LOW, UNIT
from cases import Built, Case, Outcome, flat, float64, run

# Devices whose kernels handle scores of any size.
pytestmark = pytest.mark.abi("cpu")
DTYPES = ["fp32", "fp16", "bf16"]
FP32_MIN = float(np.finfo(np.float32).min)


def rounded(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(np.float64)


@dataclass
class Reference:
    out: np.ndarray  # [N, H, Dv]
    lse: np.ndarray  # [N, H]
    log_l: np.ndarray  # lse minus the largest score: the log of the softmax's sum
    highest: np.ndarray
    grads: dict[str, np.ndarray]


def scores_of(b: Built) -> tuple[np.ndarray, np.ndarray]:
    """(scores, their derivative with respect to scale * q.k), both [H, N, M]. Each step is rounded
    to fp32, and scores are -inf where the band hides a key."""
    o, c = b.options(), b.case
    q, k = (np.moveaxis(flat(x), 1, 0) for x in (b.q, b.k))
    k = np.repeat(k, c.group, axis=0)
    s = rounded(rounded(q @ np.swapaxes(k, 1, 2)) * o.scale)
    derivative = np.ones_like(s)
    if o.softcap:
        t = np.tanh(s / o.softcap)
        s, derivative = rounded(o.softcap * t), 1.0 - t**2
    rows, keys = s.shape[1:]
    distance = np.abs(np.arange(rows)[:, None] + keys - rows - np.arange(keys))
    if o.slopes is not None:
        s = rounded(s - rounded(o.slopes[0][:, None, None] * distance))
    if o.bias is not None:
        s = rounded(s + o.bias[0])
    return np.where(oracle.visible(o, 0, rows, keys), s, -np.inf), derivative


def softmax(b: Built, s: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """p [H, N, M], the weight of the sink [H, N], the largest score and log l [H, N]."""
    sink = np.full(s.shape[0], -np.inf) if b.sinks is None else float64(b.sinks)
    sink = np.broadcast_to(sink[:, None], s.shape[:2])
    highest = np.maximum(s.max(axis=2), sink)
    base = np.where(np.isneginf(highest), 0.0, highest)
    e, e_sink = np.exp(s - base[:, :, None]), np.exp(sink - base)
    total = e.sum(axis=2) + e_sink
    divisor = np.where(total == 0, 1.0, total)
    with np.errstate(divide="ignore"):
        return e / divisor[:, :, None], e_sink / divisor, highest, np.log(total)


def attention(b: Built, round_to: torch.dtype | None = None) -> Reference:
    """Attention in float64. With `round_to`, p, ds and out are rounded as plain PyTorch in that
    dtype rounds them, and delta is computed from the rounded out."""

    def low(x: np.ndarray) -> np.ndarray:
        return x if round_to is None else torch.from_numpy(x).to(round_to).double().numpy()

    c = b.case
    s, derivative = scores_of(b)
    p, p_sink, highest, log_l = softmax(b, s)
    q, k, v, dout = (np.moveaxis(flat(x), 1, 0) for x in (b.q, b.k, b.v, b.dout))
    kg, vg = np.repeat(k, c.group, axis=0), np.repeat(v, c.group, axis=0)
    out = low(low(p) @ vg)
    dlse = np.zeros(p.shape[:2]) if b.dlse is None else b.by_row(b.dlse).T
    delta = (out * dout).sum(axis=2) - dlse
    ds = p * (dout @ np.swapaxes(vg, 1, 2) - delta[:, :, None])

    def of_group(x: np.ndarray) -> np.ndarray:
        return x.reshape(c.heads_kv, c.group, *x.shape[1:]).sum(axis=1)

    d_raw = low(ds * derivative)
    grads = {
        "q": low(b.scale * (d_raw @ kg)),
        "k": low(b.scale * of_group(np.swapaxes(d_raw, 1, 2) @ q)),
        "v": low(of_group(np.swapaxes(low(p), 1, 2) @ dout)),
    }
    grads = {name: np.moveaxis(x, 0, 1) for name, x in grads.items()}
    if b.sinks is not None:
        grads["sinks"] = -(p_sink * delta).sum(axis=1)
    if b.bias is not None:
        axes = tuple(a for a, d in enumerate("hr") if d not in (c.bias or ""))
        grads["bias"] = ds.sum(axis=axes, keepdims=True)[None]
    lse = np.where(np.isneginf(log_l), -np.inf, highest + log_l)
    return Reference(np.moveaxis(out, 0, 1), lse.T, log_l.T, highest.T, grads)


def compare(name: str, got: np.ndarray, want: np.ndarray, plain: np.ndarray, dtype: str,
            factor: float, size: float, where: str) -> None:  # fmt: skip
    """Checks one tensor; `size` is that of the summed terms, whose rounding remains where they
    cancel."""
    largest = np.abs(want).max(initial=0)
    if dtype == "fp32":
        bound = FP32_RELATIVE * max(largest, size)
    else:
        bound = factor * np.abs(plain - want).max(initial=0) + UNIT[dtype] * (largest + 2 * size)
    error = np.abs(got - want)
    assert (error <= bound).all(), f"{name}: off by {error.max():.3e}, allowed {bound:.3e}\n{where}"


def compare_all(b: Built, got: Outcome, want: Reference, plain: Reference, where: str) -> None:
    dtype = b.case.dtype
    compare("out", got.out, want.out, plain.out, dtype, FORWARD_FACTOR, 0.0, where)
    no_keys = np.isneginf(want.lse)
    assert np.array_equal(np.isneginf(got.lse), no_keys), where
    assert (got.lse_low[no_keys] == 0).all(), where
    # lse is exact to about the last bit; with lse_low, so is its distance to the largest score.
    seen = ~no_keys
    relative = FP32_RELATIVE if dtype == "fp32" else LSE_LOW
    error = np.abs(got.lse[seen] - want.lse[seen])
    allowed = relative * np.maximum(1.0, np.abs(want.lse[seen]))
    assert (error <= allowed).all(), f"lse off by {error.max():.3e}\n{where}"
    left = (got.lse[seen] - want.highest[seen]) + got.lse_low[seen]
    error = np.abs(left - want.log_l[seen])
    # Kernels may multiply by the scale without rounding until scores are huge.
    moderate = np.where(np.abs(want.lse[seen]) < 2.0**24, np.abs(want.lse[seen]), 0.0)
    allowed = 8 * relative + 2 * UNIT["fp32"] * moderate
    assert (error <= allowed).all(), f"log l off by {error.max():.3e}\n{where}"
    v_size = np.abs(flat(b.dout)).max() * np.abs(flat(b.v)).max() * b.case.head_dim_v**0.5
    sizes = {
        "q": abs(b.scale) * v_size * np.abs(flat(b.k)).max(),
        "k": abs(b.scale) * v_size * np.abs(flat(b.q)).max(),
        "v": np.abs(flat(b.dout)).max(),
        "sinks": v_size,
        "bias": v_size,
    }
    for name, grad in got.grads.items():
        target, rough = want.grads[name], plain.grads[name]
        compare(f"d{name}", grad, target, rough, dtype, GRADIENT_FACTOR, sizes[name], where)


WANTED = frozenset({"q", "k", "v", "bias", "sinks"})
SHAPES = {
    "prefill": Case(rows=(70,), keys=(300,), group=2, heads_kv=2, head_dim=32, head_dim_v=32),
    "decoding": Case(rows=(1,), keys=(300,), group=4, heads_kv=2, head_dim=64, head_dim_v=64),
    "splits": Case(rows=(2,), keys=(700,), group=2, head_dim=64, head_dim_v=64, splits=3),
    "odd": Case(rows=(9,), keys=(37,), group=1, head_dim=96, head_dim_v=24, window=(-1, 0)),
}
SHAPES = {n: dataclasses.replace(c, wanted=WANTED, dlse=True) for n, c in SHAPES.items()}
shapes = pytest.mark.parametrize("shape", SHAPES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def integers(b: Built) -> None:
    """Fill q and k with small integers: their products are exact in any order of summation."""
    for x in (b.q, b.k):
        x.copy_(torch.from_numpy(b.rng.integers(-2, 3, x.shape)).to(x.dtype))


def check(b: Built, *, backward: bool = True) -> None:
    want, plain = attention(b), attention(b, b.dtype)
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=backward)
        compare_all(b, got, want, plain, f"{target} {got.kernels} {b.case}")


def masked(dtype: str, shape: str, hidden: np.ndarray, value: float, **changes: object) -> Built:
    """A problem with a bias of `value` for the hidden keys, the same for every row."""
    case = dataclasses.replace(SHAPES[shape], dtype=dtype, bias="", **changes)
    b = Built(case)
    integers(b)
    assert b.bias is not None
    b.bias.copy_(torch.where(torch.from_numpy(hidden), value, 0.0).to(b.bias.device))
    return b


def padding(shape: str, where: str) -> np.ndarray:
    keys = SHAPES[shape].keys[0]
    key = np.arange(keys)
    third = keys // 3
    return {
        "left": key < 2 * third,
        "right": key >= third,
        "middle": (key >= third) & (key < 2 * third),
        "all": key >= 0,
        "all but one": key != keys - 1,
    }[where]


VALUES = {
    "fp32 min": FP32_MIN,
    "fp16 min": -65504.0,
    "bf16 min": float(torch.finfo(torch.bfloat16).min),
    "-1e9": -1e9,
    "-1e10": -1e10,
    "-1e12": -1e12,
    "+1e10": 1e10,
    "-1e30": -1e30,
}


@pytest.mark.parametrize("where", ["left", "right", "middle", "all", "all but one"])
@pytest.mark.parametrize("value", VALUES)
@shapes
@dtypes
def test_masks_of_large_numbers(dtype, shape, value, where):
    check(masked(dtype, shape, padding(shape, where), VALUES[value]))


@pytest.mark.parametrize("sink", [0.5, -1e10, FP32_MIN, 1e10, 3e38])
@pytest.mark.parametrize("where", ["left", "all"])
@shapes
@dtypes
def test_sinks_beside_masks(dtype, shape, where, sink):
    b = masked(dtype, shape, padding(shape, where), -1e10, sinks=True)
    b.sinks.fill_(sink)
    check(b)


@pytest.mark.parametrize("sink", [-1e10, FP32_MIN, 1e5, 1e9, 3e38])
@shapes
@dtypes
def test_sinks_without_bias(dtype, shape, sink):
    b = Built(dataclasses.replace(SHAPES[shape], dtype=dtype, sinks=True))
    integers(b)
    b.sinks.fill_(sink)
    check(b)


@shapes
@dtypes
def test_minus_infinity_beside_the_lowest_number(dtype, shape):
    b = masked(dtype, shape, padding(shape, "all"), FP32_MIN)
    b.bias[..., : b.bias.shape[-1] // 2] = -torch.inf
    check(b)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [None, 0.1, -0.3])
@pytest.mark.parametrize("size", [320.0, 20480.0, 28672.0, 98304.0, 2.0**40, 3 * 2.0**55])
@shapes
@dtypes
def test_large_activations(dtype, shape, size, scale, sign):
    """All keys are equal except a few whose scores are far away, with no mask and no option. The
    sizes have few significant bits, so sums of products are exact."""
    if dtype == "fp16" and size > 65504:
        pytest.skip("not representable in fp16")
    b = Built(dataclasses.replace(SHAPES[shape], dtype=dtype, scale=scale))
    b.q.fill_(size)
    b.k.fill_(sign * size)
    b.k[:, ::7] = sign * size / 2
    check(b)


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8, 1e12])
@shapes
@dtypes
def test_softcap_of_large_scores(dtype, shape, size):
    b = Built(dataclasses.replace(SHAPES[shape], dtype=dtype, scale=size, softcap=30.0))
    integers(b)
    check(b, backward=dtype != "fp16" or size <= 1e4)  # gradients have the size of the scale


@pytest.mark.parametrize("slope", [1e4, 1e9, 1e30])
@shapes
@dtypes
def test_steep_slopes(dtype, shape, slope):
    b = Built(dataclasses.replace(SHAPES[shape], dtype=dtype, alibi="h"))
    integers(b)
    b.slopes.fill_(slope)
    check(b)


@pytest.mark.parametrize("how", ["one key", "window", "bias", "sink of -inf"])
@dtypes
def test_rows_of_one_visible_key(dtype, how):
    """dq and dk come from dlse only: p is 1, and its derivative is exactly 0."""
    case = Case(rows=(40,), keys=(40,), group=2, head_dim=96, head_dim_v=96, dtype=dtype, scale=1.0)
    changes: dict[str, object] = {
        "one key": dict(keys=(1,)),
        "window": dict(window=(0, 0)),
        "bias": dict(bias="r"),
        "sink of -inf": dict(window=(0, 0), sinks=True),
    }[how]  # fmt: skip
    for dlse in (False, True):
        b = Built(dataclasses.replace(case, dlse=dlse, wanted=WANTED, **changes))
        if how == "bias":
            b.bias.fill_(-torch.inf)
            b.bias[..., range(40), range(40)] = 0.0
        if b.sinks is not None:
            b.sinks.fill_(-torch.inf)
        want = attention(b)
        rows = np.zeros((2, 40)) if b.dlse is None else b.by_row(b.dlse).T
        exact = np.moveaxis(rows[:, :, None] * np.repeat(flat(b.k), 2, axis=1).swapaxes(0, 1), 0, 1)
        assert np.allclose(want.grads["q"], exact)
        for target in capi.targets():
            with capi.on(target):
                got = run(b)
            where = f"{target} {got.kernels} {b.case}"
            for name in ("q", "k"):
                error = np.abs(got.grads[name] - want.grads[name]).max()
                largest = np.abs(want.grads[name]).max()
                assert error <= 4 * UNIT[dtype] * largest + 1e-12, (
                    f"d{name} off by {error}\n{where}"
                )


@pytest.mark.parametrize("keys", [300, 64])
@dtypes
def test_backward_without_lse_low_stays_within_its_limit(dtype, keys):
    """Without lse_low, the relative error of the backward's weights is |lse| * 6e-8."""
    b = Built(dataclasses.replace(SHAPES["prefill"], keys=(keys,), dtype=dtype, bias=""))
    integers(b)
    b.bias.fill_(100.0)
    want = attention(b)
    b.attention.lse_low = None
    for target in capi.targets():
        with capi.on(target):
            capi.forward(b.attention)
            g = b.gradients()
            capi.backward(b.attention, g)
        dv = flat(b.grads["v"].view)
        error = np.abs(dv - want.grads["v"]).max()
        assert error <= (100 * 6e-8 + 4 * UNIT[dtype]) * np.abs(want.grads["v"]).max(), target


def attend(q, k, v, bias):
    return tilewise.attention(q, k, v, bias=bias)


def packed(q, k, v, bias):
    starts = torch.tensor([0, 8], dtype=torch.int32)
    return tilewise.attention_varlen(q[0], k[0], v[0], starts, starts, bias=bias)[None]


def vjp_of(call, q, k, v, bias, dout):
    return torch.func.vjp(lambda v: call(q, k, v, bias), v)[1](dout)[0]


def grad_of(call, q, k, v, bias, dout):
    call(q, k, v, bias).backward(dout)
    return v.grad


def mapped(call, q, k, v, bias, dout):
    """vmap over two elements, which have different gradients."""
    both = torch.func.vmap(lambda v, dout: vjp_of(call, q, k, v, bias, dout))
    return both(torch.stack((v, v)), torch.stack((dout, 2 * dout)))[0]


def numpy_backward(_call, q, k, v, bias, dout):
    arrays = [x.detach().numpy() for x in (q, k, v)]
    out, lse = tilewise.attention(*arrays, bias=bias.numpy(), return_lse=True)
    grads = tilewise.attention_backward(dout.numpy(), *arrays, out, lse, bias=bias.numpy())
    return torch.from_numpy(grads.dv)


HOWS = {
    "eager": (attend, grad_of),
    "packed": (packed, grad_of),
    "traced": (torch.compile(attend, backend="aot_eager"), grad_of),
    "vjp": (attend, vjp_of),
    "vmap": (attend, mapped),
    "NumPy": (attend, numpy_backward),
}


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("value", [-1e9, FP32_MIN])
@pytest.mark.parametrize("how", HOWS)
def test_every_path_to_a_gradient_uses_lse_low(how, value):
    """Keys that the same mask hides share the weight, so dv of each is the mean of dout."""
    q, k, v, dout = (torch.randn(1, 8, 2, 16) for _ in range(4))
    v.requires_grad_()
    call, gradient = HOWS[how]
    dv = gradient(call, q, k, v, torch.full((1, 1, 8, 8), value), dout)
    assert torch.allclose(dv, dout.mean(dim=1, keepdim=True).expand_as(dv), rtol=0, atol=1e-6)


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_fast_path_uses_lse_low(layout, return_lse):
    """The fast path of calls without options."""
    shape = (1, 2, 12, 16) if layout == "bhsd" else (1, 12, 2, 16)
    v, dout = torch.randn(shape, requires_grad=True), torch.randn(shape)
    q = torch.full(shape, 3e4)
    result = tilewise.attention(q, q, v, layout=layout, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)
    loss = (out * dout).sum()
    if lse is not None:
        assert lse.shape == (1, 2, 12)
        loss = loss + lse.sum() * 0
    loss.backward()
    mean = dout.mean(dim=2 if layout == "bhsd" else 1, keepdim=True)
    assert torch.allclose(v.grad, mean.expand(shape), rtol=0, atol=1e-6)
