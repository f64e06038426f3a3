"""Forward mode and second derivatives of random problems that combine every option with every
other, on every device and instruction set, compared with the oracle. Buffers have gaps, and what no
sequence uses holds NaN.

TILEWISE_TEST_EXAMPLES=<n> draws n new problems per dtype, as in test_properties.py."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import capi
import oracle
import yardstick
from bounds import (
    FORWARD_FACTOR,
    FP32_OUT_UNITS,
    FP32_RELATIVE,
    UNIT,
    Yard,
    largest,
    second_bound,
    tangent_sizes,
)
from cases import GRADIENTS, Built, Case, flat, float64
from index_faults import last_error
from strategies import differentiable

pytestmark = pytest.mark.abi

THOROUGH = int(os.environ.get("TILEWISE_TEST_EXAMPLES", "0"))
SHARDS = 4  # per dtype
EXAMPLES = {"cpu": 200, "cuda": 200, "emulator": 48}
INCOMING = ("out", "out'", "lse'")  # whose gradients are given; that of lse is an option of cases


class Moved:
    """Tangents of some inputs of a built case, buffers for those of its results, and the gradients
    of some results."""

    def __init__(
        self, b: Built, moving: frozenset[str], incoming: frozenset[str] = frozenset(INCOMING)
    ) -> None:
        c = self.case = b.case
        self.b, self.incoming = b, incoming
        self.t = capi.Tangents(struct_size=ctypes.sizeof(capi.Tangents))
        self.exact = oracle.Tangents()
        self.keep: dict[str, torch.Tensor] = {}
        for name in sorted(moving & {"q", "k", "v"}):
            x = getattr(b, name)
            tangent = self.like(x)
            batched = not c.varlen_q if name == "q" else b.batched_k
            setattr(self.t, name, capi.tensor(tangent, batched=batched))
            setattr(self.exact, name, flat(tangent))
            self.keep[name] = tangent
        if "bias" in moving and b.bias is not None:
            self.set_bias(b.bias)
        if "sinks" in moving and b.sinks is not None:
            sinks = b._small((c.heads,), b.normal((c.heads,)))
            self.t.sinks, self.exact.sinks = sinks.data_ptr(), float64(sinks)
            self.keep["sinks"] = sinks
        if "scale" in moving:
            scale = torch.tensor([b.rng.standard_normal() * b.scale], dtype=torch.float32)
            self.exact.scale, self.t.scale = float(scale), b._pointer(scale)
            self.keep["scale"] = scale
        self.out = b._buffer(b._shape_q(c.head_dim_v), torch.float32 if c.float32_out else None)
        self.lse = capi.guarded(b.lse_shape, torch.float32, pad=b._pad(b.lse_shape))
        self.t.out = capi.tensor(self.out.view, batched=not c.varlen_q)
        self.t.lse = self.lse.pointer
        self.t.lse_stride_batch = 0 if c.varlen_q else self.lse.view.stride(0)
        self.t.lse_stride_head = self.lse.view.stride(-2)
        self.set_incoming()

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """Random numbers in the shape of x, and NaN where x has it: what no sequence uses."""
        values = self.b._buffer(tuple(x.shape)).view
        values.copy_(self.b.normal(tuple(x.shape)))
        values[x.isnan()[..., :1].expand_as(values)] = torch.nan
        return values

    def set_bias(self, bias: torch.Tensor) -> None:
        buffer = capi.guarded(tuple(bias.shape), bias.dtype, pad=[0, 0, 0, self.case.pad])
        buffer.view.copy_(self.b.normal(tuple(bias.shape)).to(self.b.dtype))
        self.t.bias, self.exact.bias = buffer.pointer, float64(buffer.view)
        for dim, letter, name in zip(range(3), "bhr", ("batch", "head", "row"), strict=True):
            stride = buffer.view.stride(dim) if letter in (self.case.bias or "") else 0
            setattr(self.t, f"bias_stride_{name}", stride)
        self.keep["bias"] = buffer.view

    def set_incoming(self) -> None:
        b, batched = self.b, not self.case.varlen_q
        dout = self.like(b.dout)
        if "out'" not in self.incoming:  # the pass needs its gradient
            dout.zero_()
        dlse = capi.guarded(b.lse_shape, torch.float32, pad=b._pad(b.lse_shape)).view
        dlse.copy_(b.normal(b.lse_shape))
        self.keep |= {"dout": dout, "dlse": dlse}
        self.t.dout = capi.tensor(dout, batched=batched)
        if "lse'" in self.incoming:
            self.t.dlse = dlse.data_ptr()
            self.t.dlse_stride_batch = dlse.stride(0) if batched else 0
            self.t.dlse_stride_head = dlse.stride(-2)
        zeros = np.zeros_like(flat(dout))
        self.given = (
            flat(b.dout) if "out" in self.incoming else zeros,
            zeros[..., 0] if b.dlse is None else b.by_row(b.dlse),
            flat(dout),
            b.by_row(dlse) if "lse'" in self.incoming else zeros[..., 0],
        )

    def expected(self) -> oracle.TangentResult:
        b = self.b
        grad_keys = b.batch * b.seqlen_k if b.keys_per_sequence else None
        return oracle.tangents(
            flat(b.q), flat(b.k), flat(b.v), b.sequences, b.options(), self.exact, self.given,
            grad_keys,
        )  # fmt: skip

    def yard(self, want: oracle.TangentResult) -> Yard:
        if self.case.dtype == "fp32":
            return None
        moving = {name: x for name, x in self.keep.items() if name in GRADIENTS}
        return yardstick.tangent_errors(self.b, want, moving, self.given)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        self.out.poison()
        self.lse.poison()
        capi.jvp(self.b.attention, self.t)
        assert self.out.stray_writes() == 0, "jvp wrote outside the tangent of out"
        assert self.lse.stray_writes() == 0, "jvp wrote outside the tangent of lse"
        return flat(self.out.view), self.b.by_row(self.lse.view)

    def second(self) -> dict[str, np.ndarray]:
        b = self.b
        gradients = b.gradients()
        if "out" not in self.incoming:
            gradients.dout = capi.tensor(None)
        self.second_kernel = capi.second(b.attention, self.t, gradients).kernel.decode()
        for name, g in b.grads.items():
            assert g.stray_writes() == 0, f"second wrote outside d{name}"
        return {n: flat(g.view) if n in "qkv" else float64(g.view) for n, g in b.grads.items()}

    def bounds(self, want: oracle.TangentResult, yard: Yard) -> dict[str, float]:
        b, unit = self.b, UNIT[self.case.dtype]
        shape = None if b.bias is None else tuple(b.bias.shape)
        sizes = tangent_sizes(want, self.exact, flat(b.q), flat(b.k), b.scale, shape)
        names = sizes if b.sinks is not None else sizes.keys() - {"sinks"}
        bounds = {n: second_bound(n, want, sizes, self.case.dtype, yard) for n in names}
        # The tangents of the scores are rounded before that of lse is subtracted.
        rounding = FP32_OUT_UNITS * UNIT["fp32"]
        of_scores = rounding * want.lse_size
        of_out = rounding * want.out_size + of_scores * largest(flat(b.v))
        bounds["v"] += rounding * want.dv_scores_size
        size_out, size_lse = largest(want.out), largest(want.lse)
        if yard is None:
            bounds["out"] = max(FP32_RELATIVE * size_out, of_out)
            bounds["lse"] = FP32_RELATIVE * max(1.0, size_lse) + 4 * of_scores  # as that of lse
        else:
            of_out += unit * want.out_size / 4  # the pass reads out, which has 16 bits
            bounds["out"] = FORWARD_FACTOR * yard["out"] + unit * size_out + of_out
            bounds["lse"] = FORWARD_FACTOR * yard["lse"] + unit * size_lse + 4 * of_scores
        return bounds


def check(case: Case, moving: frozenset[str], incoming: frozenset[str]) -> None:
    b = Built(case)
    moved = Moved(b, moving, incoming)
    want = moved.expected()
    bounds = moved.bounds(want, moved.yard(want))
    exact = {name: np.asarray(getattr(want, f"d{name}")) for name in bounds.keys() & GRADIENTS}
    exact |= {"out": want.out, "lse": want.lse}
    b.attention.stream = b.device.stream
    for target in capi.targets():
        with capi.on(target):
            capi.forward(b.attention)
            out, lse = moved.run()
            got = moved.second() | {"out": out, "lse": lse}
        for name, x in got.items():
            where = f"{target} {case} {sorted(moving)} {sorted(incoming)}"
            error, bound = largest(x - exact[name]), bounds[name]
            assert np.isfinite(x).all(), f"{name} is not finite: {where}"
            off = f"off by {error:.3e}, allowed {bound:.3e}"
            assert error <= bound, f"{name} is {off}: {where}"


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_derivatives(dtype, shard, device):
    @settings(
        max_examples=(THOROUGH or EXAMPLES[device.name]) // SHARDS, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
    )  # fmt: skip
    @given(
        case=differentiable(dtype, small=device.name == "emulator"),
        moving=st.frozensets(st.sampled_from(GRADIENTS), min_size=1),
        incoming=st.frozensets(st.sampled_from(INCOMING), min_size=1),
    )
    def body(case: Case, moving: frozenset[str], incoming: frozenset[str]) -> None:
        check(case, moving, incoming)

    (body if THOROUGH else seed(shard)(body))()


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_random_tangents_without_options(dtype, device):
    """Few of the cases above have what tensor cores compute; here all do."""
    aligned = st.sampled_from([8, 56, 64, 72, 128])

    @settings(
        max_examples=THOROUGH or EXAMPLES[device.name] // 2, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip
    @given(
        case=differentiable(dtype, small=device.name == "emulator"),
        moving=st.frozensets(st.sampled_from(["q", "k", "v", "sinks", "scale"]), min_size=1),
        incoming=st.frozensets(st.sampled_from(INCOMING), min_size=1),
        dims=st.tuples(aligned, aligned),
    )
    def body(
        case: Case, moving: frozenset[str], incoming: frozenset[str], dims: tuple[int, int]
    ) -> None:
        plain = replace(
            case, softcap=0.0, alibi="", bias=None, bias_hides=False, dropout_p=0.0,
            mask_ranges=None, mask_blocks=None, float32_out=False, pad=case.pad // 8 * 8,
            head_dim=dims[0], head_dim_v=min(dims) if case.latent else dims[1],
            wanted=case.wanted - {"scale"},
        )  # fmt: skip
        check(plain, moving, incoming)

    (body if THOROUGH else seed(0)(body))()


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("table", ["", "80", "90"])
def test_tensor_cores_compute_tangents_in_16_bits(table, monkeypatch):
    """On the GPUs that have these tables; and simt what has an option that they lack, or that asks
    for a gradient that they lack."""
    if table:
        monkeypatch.setenv("TILEWISE_FORCE_ARCH", table)
    plain = Case("bf16", rows=(9,), keys=(20,), head_dim=64, head_dim_v=32, window=(5, 0),
                 wanted=frozenset(GRADIENTS) - {"scale"})  # fmt: skip
    for case, jvp, second in (
        (plain, "cuda.mma_sync.jvp.bf16", "cuda.mma_sync.second.bf16"),
        (replace(plain, head_dim=128, group=2, sinks=True, scale_ptr=True),
         "cuda.mma_sync.jvp.bf16", "cuda.mma_sync.second.bf16"),
        (replace(plain, wanted=plain.wanted | {"scale"}), "cuda.mma_sync.jvp.bf16",
         "cuda.simt.second.bf16"),
        (replace(plain, softcap=2.0), "cuda.simt.jvp.bf16", "cuda.simt.second.bf16"),
        (replace(plain, dtype="fp32"), "cuda.simt.jvp.f32", "cuda.simt.second.f32"),
    ):  # fmt: skip
        b = Built(case)
        b.attention.stream = b.device.stream
        capi.forward(b.attention)
        moved = Moved(b, frozenset("qkv"))
        assert capi.jvp(b.attention, moved.t).kernel.decode() == jvp
        moved.second()
        assert moved.second_kernel == second


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tangents_of_a_sequence_with_an_invalid_length_are_nan(dtype):
    """The CPU refuses such a call. Rows of other sequences, and unused ones, are as always."""
    case = Case(
        dtype, rows=(9, 17), keys=(20, 30), varlen_q=True, varlen_k=True, tail_q=3, used_k=(20, 25),
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
    bounds = moved.bounds(want, moved.yard(want))
    assert largest(out[9:] - want.out[9:]) <= bounds["out"]
    assert largest(lse[9:] - want.lse[9:]) <= bounds["lse"]
    assert not out[26:].any() and not lse[26:].any()
