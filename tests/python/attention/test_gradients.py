"""Gradients against finite differences of the float64 forward (not the oracle's own backward),
option by option, and properties that gradients must have for any input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import capi
import oracle
from bounds import FP32_RELATIVE, fp32_rounding, sizes_of
from cases import GRADIENTS, Built, Case, check, flat, run

pytestmark = pytest.mark.abi

SMALL = Case(
    rows=(5, 5), keys=(7, 7), group=2, heads_kv=1, head_dim=3, head_dim_v=4, window=(-1, 0),
    dlse=True, seed=5,
)  # fmt: skip
OPTIONS = {
    "plain": {},
    "window": {"window": (3, 1)},
    "masked_rows": {"rows": (7, 7), "keys": (5, 5)},
    "softcap": {"softcap": 0.8},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": "bhr"},
    "bias_keys_only": {"bias": ""},
    "bias_hides": {"bias": "br", "bias_hides": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.4},
    "scale_pointer": {"scale_ptr": True, "scale": 0.9},
    "negative_scale": {"scale": -0.7},
    "scale_zero": {"scale": 0.0},
    "varlen": {"rows": (2, 5), "keys": (7, 4), "varlen_q": True, "varlen_k": True},
    "paged": {"page_size": 3, "used_k": (7, 5), "leftpad": (1, 0)},
    "everything": {
        "softcap": 1.2, "alibi": "h", "bias": "hr", "sinks": True, "dropout_p": 0.3,
        "rows": (3, 4), "keys": (6, 6), "varlen_q": True, "page_size": 2, "scale": 0.9,
    },
}  # fmt: skip


class Loss:
    """sum(out dout) + sum(lse dlse) of a case, in float64, as a function of its inputs."""

    def __init__(self, b: Built) -> None:
        self.b, self.options = b, b.options()
        self.values = {name: flat(getattr(b, name)).copy() for name in "qkv"}
        self.values |= {"bias": self.options.bias, "sinks": self.options.sinks}
        self.dout = flat(b.dout)
        self.dlse = np.zeros(self.dout.shape[:2]) if b.dlse is None else b.by_row(b.dlse)

    def __call__(self) -> float:
        v = self.values
        r = oracle.attention(v["q"], v["k"], v["v"], self.b.sequences, self.options)
        rows = np.concatenate([p.rows for p in self.b.sequences])
        seen = np.isfinite(r.lse[rows])
        return float(
            (r.out[rows] * self.dout[rows]).sum()
            + (r.lse[rows][seen] * self.dlse[rows][seen]).sum()
        )

    def slope(self, name: str, step: float = 1e-5) -> np.ndarray:
        if name == "scale":
            old, ends = self.options.scale, []
            for self.options.scale in (old + step, old - step):
                ends.append(self())
            self.options.scale = old
            return np.array([(ends[0] - ends[1]) / (2 * step)])
        x = self.values[name]
        assert x is not None
        result = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            old = x[at]
            if not np.isfinite(old):
                continue
            x[at] = old + step
            up = self()
            x[at] = old - step
            result[at] = (up - self()) / (2 * step)
            x[at] = old
        return result


@pytest.mark.parametrize("option", OPTIONS)
def test_finite_differences(option):
    case = dataclasses.replace(SMALL, **OPTIONS[option])
    b = Built(case)
    loss = Loss(b)
    rounding = {n: fp32_rounding(b) * size for n, size in sizes_of(b, b.expected()).items()}
    results = {}
    for place in capi.targets():
        with capi.on(place):
            results[place] = run(b).grads
    assert results
    for name in next(iter(results.values())):
        slope = loss.slope(name)
        if (
            b.keys_per_sequence and name in "kv"
        ):  # from pages to the keys of the only sequence that uses them
            target = np.zeros(results[next(iter(results))][name].shape)
            for part in b.sequences:
                target[part.grad_keys] = slope[part.keys]
            slope = target
        for place, grads in results.items():
            # 1e-9 is the error of central differences in float64.
            allowed = FP32_RELATIVE * np.abs(slope).max() + rounding[name] + 1e-9
            error = np.abs(grads[name] - slope).max()
            assert error <= allowed, f"d{name} {place} off by {error:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("wanted", [{n} for n in GRADIENTS] + [{"q", "v"}, {"k", "bias"}, set()])
def test_gradients_may_be_omitted(wanted, dtype):
    """Any subset of the pointers may be NULL, and the other gradients keep their bits."""
    case = Case(
        dtype, (70, 70), (90, 90), group=2, heads_kv=2, head_dim=16, window=(30, 0), bias="hr",
        sinks=True, softcap=2.0, dlse=True, deterministic=True,
    )  # fmt: skip
    whole = run(Built(case)).grads
    for name, values in run(
        Built(dataclasses.replace(case, wanted=frozenset(wanted)))
    ).grads.items():
        assert np.array_equal(values, whole[name]), name


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_gradient_of_lse_only(dtype):
    case = Case(dtype, (40,), (55,), group=2, dlse=True, sinks=True, window=(-1, 0))
    b = Built(case)
    b.dout.zero_()
    want = b.expected()
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        assert (got.grads["v"] == 0).all()
        unit = {"fp32": 1e-6, "bf16": 2**-7, "fp16": 2**-10}[dtype]
        for name in ("q", "k", "sinks"):
            target = getattr(want, f"d{name}")
            assert np.abs(got.grads[name] - target).max() <= unit * np.abs(target).max(), (
                place,
                name,
            )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    "option",
    [{"bias": "bhr"}, {"bias": "b"}, {"bias": "h"}, {"bias": "r"}, {"bias": ""},
     {"bias": "bhr", "varlen_q": True, "varlen_k": True, "keys": (31, 50)},
     {"bias": "r", "varlen_q": True, "rows": (9, 33)},
     {"bias": "br", "page_size": 16, "used_k": (31, 48)},
     {"bias": "hr", "leftpad": (3, 20), "used_k": (40, 50)}],
    ids=str,
)  # fmt: skip
def test_bias_gradient_is_summed_where_bias_is_broadcast(option, dtype):
    base = {"rows": (33, 33), "keys": (50, 50), "group": 2, "heads_kv": 2, "window": (-1, 0)}
    check(Case(dtype, **{**base, **option}))


def test_dropout_rate_and_agreement_of_forward_and_backward():
    """With k = 0 all weights are equal, and with v = dout = 1 both passes expose the mask itself:
    out is the kept fraction of a row, dv the kept fraction of a key."""
    n, p = 1024, 0.25
    b = Built(Case(rows=(n,), keys=(n,), heads_kv=2, dropout_p=p))
    b.k.zero_()
    b.v.fill_(1)
    b.dout.fill_(1)
    keep = np.stack([oracle.kept(b.options(), 0, 2, n, n)])[0] / (1 - p)
    for place in capi.targets():
        with capi.on(place):
            got = run(b)
        assert abs(got.out.mean() - 1) < 0.003  # the standard deviation is 0.0004
        np.testing.assert_allclose(got.out[:, :, 0], keep.mean(axis=2).T, rtol=2e-6)
        np.testing.assert_allclose(got.grads["v"][:, :, 0], keep.mean(axis=1).T, rtol=2e-6)
