"""Forward mode and second derivatives of arrays: against the float64 oracle, by identities that
need no oracle, and where inputs are extreme or masked."""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
import torch

import array_device
import oracle
import tilewise
from bounds import (
    FP32_OUT_UNITS,
    FP32_RELATIVE,
    GRADIENT_FACTOR,
    UNIT,
    largest,
    second_bound,
    tangent_sizes,
)
from tangent_cases import (
    BATCH,
    CASES,
    DTYPES,
    HEADS,
    HEADS_KV,
    KEYS,
    ROWS,
    SEED,
    TORCH,
    Case,
)  # fmt: skip
from tilewise import Tangents, _abi, _describe, _numpy_tangents
from tilewise._library import c_library
from tilewise._request import Request, Shard

pytestmark = pytest.mark.abi


@pytest.fixture(autouse=True)
def library(device):
    """The C library on the device, if that is no CPU."""
    if device.name == "cpu":
        yield None
        return
    with array_device.tangents_on(device) as on_device:
        yield on_device


def plain(case: Case):
    """Attention by plain PyTorch in the dtype of the case, as a function of its inputs."""
    o, group = case.oracle_options, HEADS // HEADS_KV

    def forward(x: dict[str, torch.Tensor]):
        outs, lses = [], []
        for s in case.sequences:
            n, m = len(s.rows), len(s.keys)
            q = x["q"][s.rows].transpose(0, 1)
            k, v = (x[c][s.keys].repeat_interleave(group, 1).transpose(0, 1) for c in "kv")
            score = (q @ k.mT) * x["scale"]
            if o.softcap:
                score = o.softcap * torch.tanh(score / o.softcap)
            if o.slopes is not None:
                distance = np.abs(oracle.aligned(o, s.batch, n, m) - np.arange(m))
                slope = torch.from_numpy(o.slopes[s.batch][:, None, None] * distance)
                score = score - slope.to(score)
            if "bias" in x:
                score = score + x["bias"][s.batch if len(x["bias"]) > 1 else 0]
            seen = oracle.visible(o, s.batch, n, m) & oracle.sequence_mask(o, s.batch, n, m)
            hidden = torch.from_numpy(~seen)
            score = score.masked_fill(hidden, -math.inf)
            if "sinks" in x:
                sink = x["sinks"].to(score)[:, None, None].expand(-1, n, 1)
                score = torch.cat([score, sink], -1)
            some = (score > -math.inf).any(-1, keepdim=True)  # zeros where a row sees nothing
            score = torch.where(some, score, 0.0)
            p = torch.where(some, torch.softmax(score, -1), 0.0)[..., :m]
            if o.dropout_p:
                keep = oracle.kept(o, s.batch, HEADS, n, m) / (1 - float(np.float32(o.dropout_p)))
                p = p * torch.from_numpy(keep).to(p)
            outs.append((p @ v).transpose(0, 1))
            lses.append(torch.where(some[..., 0], torch.logsumexp(score.float(), -1), 0.0).T)
        return torch.cat(outs), torch.cat(lses)

    return forward


def plain_errors(case: Case, want: oracle.TangentResult) -> dict[str, float]:
    """The largest error of plain PyTorch, in the dtype of the case, per result."""
    kind = TORCH[case.dtype]
    of = {n: getattr(case, n) for n in ("q", "k", "v", "bias", "sinks")}
    of = {n: torch.from_numpy(np.asarray(x)) for n, x in of.items() if x is not None}
    of["scale"] = torch.tensor(case.scale)
    of = {n: x.to(torch.float32 if n in ("sinks", "scale") else kind) for n, x in of.items()}
    along = {n: torch.zeros_like(x) for n, x in of.items()}
    for name in of:
        moved = getattr(case.tangents, name)
        if moved is not None:
            along[name] = torch.from_numpy(np.asarray(moved)).to(of[name])
    leaves = tuple(x.requires_grad_() for x in of.values())
    forward = plain(case)
    results, moved = torch.autograd.functional.jvp(
        lambda *x: forward(dict(zip(of, x, strict=True))), leaves, tuple(along.values()),
        create_graph=True,
    )  # fmt: skip
    used = np.concatenate([s.rows for s in case.sequences])
    incoming = [case.dout, case.dlse, case.dout_t, case.dlse_t]
    loss = sum(
        (x.float() * torch.from_numpy(g[used]).float()).sum()
        for x, g in zip((*results, *moved), incoming, strict=True)
    )
    gradients = dict(zip(of, torch.autograd.grad(loss, leaves), strict=True))
    exact = {n: getattr(want, f"d{n}") for n in of}
    errors = {n: largest(g.double().numpy() - exact[n]) for n, g in gradients.items()}
    errors["out"] = largest(moved[0].detach().double().numpy() - want.out[used])
    errors["lse"] = largest(moved[1].detach().double().numpy() - want.lse[used])
    return errors


def check(name: str, got, want, bound: float) -> None:
    error = np.abs(np.asarray(got, np.float64) - want)
    assert np.all(error <= bound), f"{name}: off by {error.max():.3e}, allowed {bound:.3e}"


def fp32_bound(case: Case, want: oracle.TangentResult, name: str, size: float) -> float:
    """The bounds of bounds.py: tangents as the forward, gradients as those of the backward."""
    unit = UNIT["fp32"]
    if name in ("out", "lse"):
        terms = want.out_size if name == "out" else want.lse_size
        return max(FP32_RELATIVE * size, FP32_OUT_UNITS * unit * terms)
    shape = None if case.bias is None else case.bias.shape
    sizes = tangent_sizes(want, case.tangents, case.q, case.k, case.scale, shape)
    return second_bound(name, want, sizes, "fp32", None)


def check_against_the_oracle(case: Case, *, with_scale: bool = True) -> None:
    dtype = case.dtype
    incoming = (case.dout, case.dlse, case.dout_t, case.dlse_t)
    want = oracle.tangents(
        case.q, case.k, case.v, case.sequences, case.oracle_options, case.tangents, incoming
    )
    case.forward()
    out_t, lse_t = case.jvp(case.tangents)
    results = {"dout": case.shaped(case.dout), "dlse": case.by_row(case.dlse)}
    got = case.second(case.tangents, out_t, lse_t, case.dout_t, case.dlse_t, **results)
    pairs = {
        "out": (case.flat(out_t), want.out), "lse": (case.flat_lse(lse_t), want.lse),
        "q": (case.flat(got.dq), want.dq), "k": (case.flat(got.dk), want.dk),
        "v": (case.flat(got.dv), want.dv), "scale": (got.dscale, want.dscale),
    }  # fmt: skip
    if case.bias is not None:
        pairs["bias"] = (got.dbias, want.dbias)
    if case.sinks is not None:
        pairs["sinks"] = (got.dsinks, want.dsinks)
    if not with_scale:
        del pairs["scale"]
    unit = UNIT[dtype]
    if dtype == "fp32":
        for key, (mine, exact) in pairs.items():
            check(key, mine, exact, fp32_bound(case, want, key, largest(exact)))
        return
    plain_error = plain_errors(case, want)
    for key, (mine, exact) in pairs.items():
        factor = 1.0 if key in ("out", "lse") else GRADIENT_FACTOR
        check(key, mine, exact, factor * plain_error[key] + unit * largest(exact))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_against_the_oracle(name, dtype):
    check_against_the_oracle(Case(name, dtype))


ON_TENSOR_CORES = [
    name for name, (given, _) in CASES.items()
    if not given.keys() & {"softcap", "bias", "slopes", "dropout_p", "mask", "ranges"}
]  # fmt: skip


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("dtype", sorted(DTYPES.keys() - {"fp32"}))
@pytest.mark.parametrize("name", ON_TENSOR_CORES)
def test_second_on_tensor_cores(name, dtype, library):
    """Without the gradient of the scale, which tensor cores do not compute."""
    library.wants_dscale = False
    check_against_the_oracle(Case(name, dtype), with_scale=False)
    assert library.second_kernel.startswith("cuda.mma_sync.second.")


@pytest.mark.parametrize("dtype", DTYPES)
def test_identities(dtype):
    """<J t, b> = <t, B b> where B is the backward, and second is symmetric: its directional
    derivative along t, contracted with u, is that along u, contracted with t."""
    case = Case("softcap, bias, sinks", dtype)
    case.forward()
    t, u = case.tangents, case.direction()
    out_t, lse_t = case.jvp(t)
    backward = case.call(
        tilewise.attention_backward, case.shaped(case.dout_t), *case.arrays, case.out, case.lse,
        dlse=case.by_row(case.dlse_t),
    )  # fmt: skip

    def inner(gradients, along: oracle.Tangents) -> float:
        flat = {n: case.flat(getattr(gradients, f"d{n}")) for n in "qkv"}
        flat |= {n: getattr(gradients, f"d{n}") for n in ("bias", "sinks", "scale")}
        return float(sum((flat[n] * getattr(along, n)).sum() for n in flat if n != "scale")
                     + flat["scale"] * along.scale)  # fmt: skip

    forward = (case.flat(out_t) * case.dout_t).sum()
    forward += (case.flat_lse(lse_t).astype(np.float64) * case.dlse_t).sum()
    size = math.sqrt((case.flat(out_t) ** 2).sum() * (case.dout_t**2).sum())
    assert abs(forward - inner(backward, t)) < 4 * UNIT[dtype] * size

    along_t = case.second(t, out_t, lse_t, case.dout_t, case.dlse_t)
    along_u = case.second(u, *case.jvp(u), case.dout_t, case.dlse_t)
    one, other = inner(along_t, u), inner(along_u, t)
    norm = math.sqrt(sum((case.flat(getattr(along_t, f"d{n}")) ** 2).sum() for n in "qkv"))
    assert abs(one - other) < 16 * UNIT[dtype] * norm * math.sqrt(case.dim)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_shift_that_all_keys_share(dtype):
    """It moves all scores of a row alike, so out does not move; its rounding would be 0.4."""
    rng = np.random.default_rng(SEED)
    q, k, v = (rng.standard_normal((1, n, 1, 64)).astype(DTYPES[dtype]) for n in (64, 4096, 4096))
    shift = 100 * rng.standard_normal((1, 1, 1, 64)) / 8
    shift = np.broadcast_to(shift, k.shape).astype(DTYPES[dtype])
    out, lse = tilewise.attention(q, k, v, return_lse=True)
    moved, lse_t = tilewise.attention_jvp(Tangents(k=shift), q, k, v, out, lse)
    exact = (q.astype(np.float64) @ shift[0, 0].astype(np.float64).T / 8)[..., 0]
    assert largest(moved.astype(np.float64)) < 1e-2
    assert largest(lse_t[0, 0] - exact[0, :, 0]) < 1e-5 * largest(exact)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_large_tangents_of_scores(dtype):
    """Those of the scores exceed the largest number of fp16, that of out does not."""
    rng = np.random.default_rng(SEED)
    q, k, v = (rng.standard_normal((1, n, 1, 64)) for n in (40, 70, 70))
    q_t = 3e4 * rng.uniform(-1, 1, q.shape)
    q, k, v, q_t = (x.astype(DTYPES[dtype]) for x in (q / 8, k, v / 1024, q_t))
    out, lse = tilewise.attention(q, k, v, scale=4.0, return_lse=True)
    out_t, lse_t = tilewise.attention_jvp(Tangents(q=q_t), q, k, v, out, lse, scale=4.0)
    x = [np.asarray(a[0], np.float64) for a in (q, k, v, q_t)]
    want = oracle.tangents(
        *x[:3], oracle.sequences_of(1, 40, 70), oracle.Options(scale=4.0), oracle.Tangents(q=x[3])
    )
    assert largest(want.lse) > 65504 > 4 * largest(want.out)
    check("out", out_t[0], want.out, 4 * UNIT[dtype] * largest(want.out))
    check("lse", lse_t[0].T, want.lse, 2 * UNIT[dtype] * largest(want.lse))


def test_tangent_of_out_in_float32():
    case = Case("queries alone, sinks", "bf16")
    want = oracle.tangents(
        case.q, case.k, case.v, case.sequences, case.oracle_options, case.tangents
    )
    case.options["out_dtype"] = "float32"
    case.forward()
    del case.options["out_dtype"]  # the derivatives take it from out
    out_t, lse_t = case.jvp(case.tangents)
    assert out_t.dtype == np.float32
    check("out", case.flat(out_t), want.out, 2 * UNIT["bf16"] * largest(want.out))
    check("lse", case.flat_lse(lse_t), want.lse, UNIT["bf16"] * largest(want.lse))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rows_without_keys_and_infinite_sinks(dtype):
    rng = np.random.default_rng(SEED)
    q, k, v = (rng.standard_normal((1, n, 2, 8)).astype(DTYPES[dtype]) for n in (9, 5, 5))
    t = Tangents(q, k, v)  # rows 0 to 3 see no key
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    out_t, lse_t = tilewise.attention_jvp(t, q, k, v, out, lse, causal=True)
    assert not out_t[:, :4].any() and not lse_t[:, :, :4].any()
    assert out_t[:, 5:].all() and lse_t[:, :, 5:].all()
    g = tilewise.attention_second(t, out_t, lse_t, out, q, k, v, out, lse, causal=True)
    assert not g.dq[:, :4].any() and np.isfinite(g.dk).all()

    sinks, moved = np.array([np.inf, -np.inf], np.float32), np.array([3.0, 5.0], np.float32)
    options = {"sinks": sinks, "causal": True}
    t = t._replace(sinks=moved)
    out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    out_t, lse_t = tilewise.attention_jvp(t, q, k, v, out, lse, **options)
    assert not out_t[:, :, 0].any() and np.all(lse_t[:, 0] == 3.0)
    assert np.isfinite(out_t).all() and not lse_t[:, 1, :4].any()
    g = tilewise.attention_second(
        t, out_t, lse_t, np.ones_like(out), q, k, v, out, lse, dlse=np.ones_like(lse), **options
    )
    assert g.dsinks is not None and np.allclose(g.dsinks, [9.0, 0.0])
    assert all(np.isfinite(x).all() for x in g[:3])


@pytest.mark.parametrize("wants_dscale", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_what_no_row_sees_changes_nothing(dtype, wants_dscale, library):
    """Keys 0 to 102 lie left of the band of every row. In 16 bits another kernel may compute what a
    tensor core contaminates with 0 * NaN, so results of tensor cores may differ by its rounding."""
    if library is not None:
        library.wants_dscale = wants_dscale  # tensor cores do not compute it
    case = Case("window, keys alone", dtype)
    case.tangents.q, case.tangents.v = case.draw(*case.q.shape), case.draw(*case.v.shape)
    case.oracle_options.window = (10, 0)
    case.options["window"] = (10, 0)
    case.forward()
    out_t, lse_t = case.jvp(case.tangents)
    results = {"dout": case.shaped(case.dout)}
    clean = case.second(case.tangents, out_t, lse_t, case.dout_t, **results)
    seen = oracle.visible(case.oracle_options, 0, ROWS, KEYS).any(axis=0)
    hidden = np.tile(~seen, BATCH)
    for x in (case.tangents.k, case.tangents.v):
        x[hidden] = np.nan
    again, lse_again = case.jvp(case.tangents)
    unit = 0.0 if dtype == "fp32" else 2 * UNIT[dtype]

    def same(x, y, unit=unit) -> bool:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        return bool(np.all(np.abs(x - y) <= unit * largest(y)))

    assert same(again, out_t) and same(lse_again, lse_t)
    got = case.second(case.tangents, out_t, lse_t, case.dout_t, **results)
    on_tensor_cores = library is not None and "mma_sync" in library.second_kernel
    allowed = unit if on_tensor_cores else 0.0
    assert all(same(x, y, allowed) for x, y in zip(got[:3], clean[:3], strict=True))
    # A key that one row sees reaches that row alone.
    first = int(np.argmax(seen))
    case.tangents.k[first] = np.nan
    again, _ = case.jvp(case.tangents)
    rows = oracle.visible(case.oracle_options, 0, ROWS, KEYS)[:, first]
    assert np.isnan(again[0, rows]).any(axis=-1)[:, : HEADS // HEADS_KV].all()
    assert same(again[0, ~rows], out_t[0, ~rows]) and same(again[1], out_t[1])


def test_shard_of_a_longer_sequence():
    """Rows from 20 on, as a shard, give the tangents of the whole problem."""
    case = Case("dropout, softcap", "fp32")
    case.forward()
    whole, _ = case.jvp(case.tangents)
    np.random.seed(SEED)
    state = np.random.randint(0, 2**62, 2, dtype=np.int64)
    shard = Shard(np.zeros(BATCH, np.int32), row_offset=20, dropout_state=state)
    request = Request(**case.options, shard=shard)  # the last rows: aligned as they are
    q, k, v = case.arrays
    call = _numpy_tangents._Call(q[:, 20:], k, v, "bshd", request, (None,) * 4)
    call.set_results(case.out[:, 20:], case.lse[:, :, 20:])
    t = case.given_tangents(case.tangents)
    call.set_tangents(t._replace(q=t.q[:, 20:]))
    part, _ = call.jvp()
    assert np.allclose(part, whole[:, 20:], rtol=0, atol=2e-6 * largest(whole))


def plan_of(rows: int, which: int) -> int:
    """The workspace of a pass with every tangent, for one head of 8 columns."""
    q = np.zeros((1, rows, 1, 8), np.float32)
    call = _numpy_tangents._Call(q, q, q, "bshd", Request(), (None,) * 4)
    call.set_tangents(Tangents(q, q, q, scale=1.0))
    call.tangents.out = _describe.rows(call.keep(q), False)
    gradients = _abi.sized(_abi.Gradients)
    if which == _abi.SECOND:
        for name in ("dout", "dq", "dk", "dv"):
            setattr(gradients, name, _describe.rows(call.keep(q), False))
    return call.workspace_bytes(gradients if which == _abi.SECOND else None)


@pytest.mark.abi("cpu", "cuda")
def test_memory_is_linear():
    for which in (_abi.JVP, _abi.SECOND):
        small, large = plan_of(32768, which), plan_of(65536, which)
        assert large < 2.1 * small and large < 65536 * 1024
    rng = np.random.default_rng(SEED)
    q, k, v = (rng.standard_normal((1, 65536, 1, 8)).astype(np.float32) for _ in range(3))
    options = {"window": (64, 0)}
    out, lse = tilewise.attention(q, k, v, return_lse=True, **options)
    t = Tangents(v, q, k)
    out_t, lse_t = tilewise.attention_jvp(t, q, k, v, out, lse, **options)
    g = tilewise.attention_second(t, out_t, lse_t, out, q, k, v, out, lse, **options)
    # The last row, computed from the keys that it sees.
    last = (slice(None), slice(-65, None))
    row = (slice(None), slice(-1, None))
    part = tilewise.attention_jvp(
        Tangents(v[row], q[last], k[last]), q[row], k[last], v[last], out[row], lse[..., -1:]
    )
    assert np.allclose(part[0], out_t[row], atol=1e-5) and np.isfinite(g.dk).all()


@pytest.mark.abi("cpu")
def test_explain_and_capabilities_name_both_passes():
    q = np.zeros((1, 4, 2, 8), np.float32)
    explained = tilewise.explain(q, q, q, bias=np.zeros((4, 4), np.float32), scale=0.5)
    assert explained.jvp.kernel.endswith(".jvp.f32")
    assert explained.second.kernel.endswith(".second.f32")
    assert "batch_invariant 1: it is not" in tilewise.explain(q, q, q, batch_invariant=True).jvp
    for kernel in tilewise.capabilities():
        has_both = kernel.device == "cpu" or kernel.name == "cuda.simt"
        on_tensor_cores = kernel.name == "cuda.mma_sync" and kernel.dtype != "float32"
        assert kernel.jvp == kernel.second == (has_both or on_tensor_cores)


@pytest.mark.abi("cpu")
def test_refusals():
    q = np.zeros((1, 4, 2, 8), np.float32)
    out, lse = tilewise.attention(q, q, q, return_lse=True)
    with pytest.raises(TypeError, match=r"tangents is a dict, but must be a tilewise.Tangents"):
        tilewise.attention_jvp({"q": q}, q, q, q, out, lse)
    with pytest.raises(ValueError, match=r"tangents.bias is given, but bias is None"):
        tilewise.attention_jvp(Tangents(bias=q), q, q, q, out, lse)
    with pytest.raises(TypeError, match=r"tangents.q has dtype float64, but must be float32"):
        tilewise.attention_jvp(Tangents(q=q.astype(np.float64)), q, q, q, out, lse)
    with pytest.raises(ValueError, match=r"tangents.v has shape \[1, 3, 2, 8\]"):
        tilewise.attention_jvp(Tangents(v=q[:, :3]), q, q, q, out, lse)

    library = c_library()
    for name, value, sentence in (
        ("block_table", q.ctypes.data, "jvp with block_table: keys and values in pages are not"),
        ("batch_invariant", 1, "jvp with batch_invariant 1: it is not supported; 0 is allowed"),
    ):
        call = _numpy_tangents._Call(q, q, q, "bshd", Request(), (None,) * 4)
        setattr(call.attention, name, value)
        call.attention.page_size = 1
        info = _abi.sized(_abi.PlanInfo)
        status = library.tilewise_plan_tangents(
            ctypes.byref(call.attention), ctypes.byref(call.tangents), None, _abi.JVP,
            ctypes.byref(info),
        )  # fmt: skip
        assert status == _abi.UNSUPPORTED
        assert library.tilewise_last_error().decode().startswith(sentence)
