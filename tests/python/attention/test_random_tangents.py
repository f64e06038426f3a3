"""Forward mode of random problems that combine every option with every other, on every device and
instruction set, compared with the oracle. Buffers have gaps, and what no sequence uses holds NaN.

TILEWISE_TEST_EXAMPLES=<n> draws n new problems per dtype, as in test_properties.py."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import capi
import oracle
from bounds import FP32_OUT_UNITS, FP32_RELATIVE, UNIT, largest
from cases import Built, Case, flat, float64
from index_faults import last_error
from strategies import cases

pytestmark = pytest.mark.abi

THOROUGH = int(os.environ.get("TILEWISE_TEST_EXAMPLES", "0"))
SHARDS = 4
EXAMPLES = {"cpu": 200, "cuda": 200, "emulator": 60}
INPUTS = ("q", "k", "v", "bias", "sinks", "scale")


class Moved:
    """Tangents of some inputs of a built case, and buffers for those of its results."""

    def __init__(self, b: Built, moving: frozenset[str]) -> None:
        c = self.case = b.case
        self.b = b
        self.t = capi.Tangents(struct_size=ctypes.sizeof(capi.Tangents))
        self.exact = oracle.Tangents()
        self.keep: list[object] = []
        for name in sorted(moving & {"q", "k", "v"}):
            x = getattr(b, name)
            tangent = b._buffer(tuple(x.shape)).view
            tangent.copy_(b.normal(tuple(x.shape)))
            tangent[x.isnan()[..., :1].expand_as(tangent)] = torch.nan  # what no sequence uses
            batched = not c.varlen_q if name == "q" else b.batched_k
            setattr(self.t, name, capi.tensor(tangent, batched=batched))
            setattr(self.exact, name, flat(tangent))
            self.keep.append(tangent)
        if "bias" in moving and b.bias is not None:
            self.set_bias(b.bias)
        if "sinks" in moving and b.sinks is not None:
            sinks = b._small((c.heads,), b.normal((c.heads,)))
            self.t.sinks, self.exact.sinks = sinks.data_ptr(), float64(sinks)
            self.keep.append(sinks)
        if "scale" in moving:
            self.exact.scale = float(np.float32(b.rng.standard_normal() * b.scale))
            self.t.scale = b._pointer(torch.tensor([self.exact.scale], dtype=torch.float32))
        self.out = b._buffer(b._shape_q(c.head_dim_v))
        self.lse = capi.guarded(b.lse_shape, torch.float32, pad=b._pad(b.lse_shape))
        self.t.out = capi.tensor(self.out.view, batched=not c.varlen_q)
        self.t.lse = self.lse.pointer
        self.t.lse_stride_batch = 0 if c.varlen_q else self.lse.view.stride(0)
        self.t.lse_stride_head = self.lse.view.stride(-2)

    def set_bias(self, bias: torch.Tensor) -> None:
        buffer = capi.guarded(tuple(bias.shape), bias.dtype, pad=[0, 0, 0, self.case.pad])
        buffer.view.copy_(self.b.normal(tuple(bias.shape)).to(self.b.dtype))
        self.t.bias, self.exact.bias = buffer.pointer, float64(buffer.view)
        for dim, letter, name in zip(range(3), "bhr", ("batch", "head", "row"), strict=True):
            stride = buffer.view.stride(dim) if letter in (self.case.bias or "") else 0
            setattr(self.t, f"bias_stride_{name}", stride)
        self.keep.append(buffer)

    def expected(self) -> oracle.TangentResult:
        b = self.b
        return oracle.tangents(
            flat(b.q), flat(b.k), flat(b.v), b.sequences, b.options(), self.exact
        )

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        self.out.poison()
        self.lse.poison()
        capi.jvp(self.b.attention, self.t)
        assert self.out.stray_writes() == 0, "jvp wrote outside the tangent of out"
        assert self.lse.stray_writes() == 0, "jvp wrote outside the tangent of lse"
        return flat(self.out.view), self.b.by_row(self.lse.view)


def check(case: Case, moving: frozenset[str]) -> None:
    b = Built(case)
    moved = Moved(b, moving)
    want = moved.expected()
    b.attention.stream = b.device.stream
    # Besides the sums over the keys, the tangents of the scores are rounded before r is subtracted.
    unit = FP32_OUT_UNITS * UNIT["fp32"]
    of_scores = unit * want.lse_size
    out_bound = unit * want.out_size + of_scores * largest(flat(b.v))
    out_bound = max(FP32_RELATIVE * largest(want.out), out_bound)
    lse_bound = FP32_RELATIVE * max(1.0, largest(want.lse)) + 4 * of_scores  # as that of lse
    for target in capi.targets():
        with capi.on(target):
            capi.forward(b.attention)
            out, lse = moved.run()
        for name, got, exact, bound in (
            ("out", out, want.out, out_bound), ("lse", lse, want.lse, lse_bound),
        ):  # fmt: skip
            error = largest(got - exact)
            assert np.isfinite(got).all(), f"{name} is not finite: {target} {case}"
            off = f"off by {error:.3e}, allowed {bound:.3e}"
            assert error <= bound, f"{name} is {off}: {target} {case} {moving}"


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_tangents(shard, device):
    @settings(
        max_examples=(THOROUGH or EXAMPLES[device.name]) // SHARDS, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
    )  # fmt: skip
    @given(
        case=cases("fp32", small=device.name == "emulator").filter(lambda c: c.page_size == 0),
        moving=st.frozensets(st.sampled_from(INPUTS), min_size=1),
    )
    def body(case: Case, moving: frozenset[str]) -> None:
        check(case, moving)

    (body if THOROUGH else seed(shard)(body))()


@pytest.mark.abi("cuda", "emulator")
def test_tangents_of_a_sequence_with_an_invalid_length_are_nan():
    """The CPU refuses such a call. Rows of other sequences, and unused ones, are as always."""
    case = Case(
        rows=(9, 17), keys=(20, 30), varlen_q=True, varlen_k=True, tail_q=3, used_k=(20, 25),
        head_dim=24, head_dim_v=16,
    )  # fmt: skip
    b = Built(case)
    moved = Moved(b, frozenset("qkv"))
    want = moved.expected()
    b.attention.stream = b.device.stream
    capi.forward(b.attention)
    last_error()  # forgets what earlier tests have left
    b.meta["seqused_k"][0] = 21
    out, lse = moved.run()
    found = last_error()
    assert found is not None and found.array == b"seqused_k"
    assert np.isnan(out[:9]).all() and np.isnan(lse[:9]).all()
    assert np.allclose(out[9:], want.out[9:], rtol=0, atol=1e-5)
    assert np.allclose(lse[9:], want.lse[9:], rtol=0, atol=1e-5)
    assert not out[26:].any() and not lse[26:].any()
