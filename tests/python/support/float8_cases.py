"""Problems whose keys and values, or also queries, are float8_e4m3, compared with the oracle."""

from __future__ import annotations

import numpy as np
import torch

import capi
import devices
import yardstick
from bounds import check_lse, check_out
from cases import Built, Case, run

FLOAT8 = torch.float8_e4m3fn


OUT_DTYPES = {torch.float32: 1, torch.float16: 2, torch.bfloat16: 3}  # tilewise_out_dtype


def with_float8(
    b: Built, factors: bool, broadcast: str = "", signed: bool = False, queries: bool = False
) -> None:
    """Rounds k and v to descale * float8, and puts the bytes into the struct.

    Args:
        signed: some descales are negative or 0.
        queries: q is rounded as well; out keeps its dtype.
    """
    c, a = b.case, b.attention
    rng = np.random.default_rng(c.seed)
    a.kv_float8 = 1
    if queries:
        a.dtype, a.out_dtype = capi.FLOAT8_E4M3, OUT_DTYPES[b.out.view.dtype]
    b.bytes: dict[str, torch.Tensor] = {}
    b.descales: dict[str, torch.Tensor] = {}
    for name in ("q", "k", "v") if queries else ("k", "v"):
        x = getattr(b, name).contiguous()
        setattr(b, name, x)
        shape = (1 if "b" in broadcast else b.batch, 1 if "h" in broadcast else c.heads_kv)
        scale = torch.from_numpy(rng.uniform(0.25, 2.0, shape)) if factors else torch.ones(shape)
        # The factors are powers of two, so q's dtype represents the products, and the yardstick
        # computes with exactly these values.
        scale = torch.exp2(torch.round(torch.log2(scale))).float().to(x.device)
        if factors and signed:
            scale *= torch.from_numpy(rng.choice([1, -1, 0], shape)).float().to(x.device)
        full = scale.expand(b.batch, c.heads_kv)
        if name == "q":
            full = full.repeat_interleave(c.group, dim=1)
        room = (*x.shape[:-1], x.shape[-1] + c.pad)
        bytes_ = torch.full(room, -1, dtype=torch.int8, device=x.device).view(FLOAT8)
        bytes_ = bytes_[..., : x.shape[-1]]
        rows, out = x.view(-1, *x.shape[-2:]), bytes_.view(-1, *x.shape[-2:])
        for i, sequence in enumerate(b.sequences):
            used = torch.from_numpy(np.asarray(sequence.rows if name == "q" else sequence.keys))
            used = used.to(x.device)
            divided = rows[used].float() / torch.where(full[i] == 0, 1.0, full[i])[:, None]
            stored = divided.clamp(-448, 448).to(FLOAT8)
            out[used] = stored
            rows[used] = (stored.float() * full[i][:, None]).to(b.dtype)
        batched = not c.varlen_q if name == "q" else b.batched_k
        setattr(a, name, capi.tensor(bytes_, batched=batched))
        b.keep += [bytes_, scale]
        b.bytes[name] = bytes_.view(torch.uint8)
        b.descales[f"{name}_descale"] = scale
        if factors:
            setattr(a, f"{name}_descale", scale.data_ptr())
            setattr(a, f"{name}_descale_stride_batch", 0 if "b" in broadcast else scale.stride(0))
            setattr(a, f"{name}_descale_stride_head", 0 if "h" in broadcast else 1)


def check(
    case: Case, factors: bool = True, broadcast: str = "", signed: bool = False,
    queries: bool = False,
) -> None:  # fmt: skip
    b = Built(case)
    with_float8(b, factors, broadcast, signed, queries)
    check_built(b)


def check_built(b: Built) -> None:
    case = b.case
    want = b.expected()
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False)
        where = f"{target} {got.kernels} {case}"
        assert all(is_expected(kernel) for kernel in got.kernels), where
        float8 = any(multiplies_in_float8(kernel) for kernel in got.kernels)
        yard = yardstick.errors(b, want, float8)
        check_out(got.out, want, "fp8" if float8 else case.dtype, yard, where)
        check_lse(got.lse, want.lse, case.dtype, yard, where)


def is_expected(kernel: str) -> bool:
    """Tensor cores run the kernel wherever there are any."""
    name = devices.current().name
    tensor_cores = name == "emulator" or (
        name == "cuda" and torch.cuda.get_device_capability() >= (7, 5)
    )
    return (
        not tensor_cores
        or kernel.startswith("cuda.mma_sync.forward.")
        or multiplies_in_float8(kernel)
    )


def multiplies_in_float8(kernel: str) -> bool:
    return kernel == "cuda.wgmma.forward.f8"


# --- long sequences of one head ------------------------------------------------------------------


def softmax64(q, k, v) -> np.ndarray:
    """Attention of one head in fp64: q [rows, D], k [keys, D], v [keys, D]."""
    scores = q @ k.T * q.shape[1] ** -0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v / weights.sum(axis=1, keepdims=True)


def one_head(rows: int, keys: int):
    g = devices.generator(keys)
    return [torch.randn(n, 64, generator=g).to(FLOAT8) for n in (rows, keys, keys)]


def with_needle(rows: int, depth: float):
    """q, k and v of one head with 128k keys, of which one has as much weight as all others
    together."""
    keys = 131072
    q, k, v = one_head(rows, keys)
    at = int(depth * (keys - 1))
    direction = torch.sign(q[0].float())
    q = (0.75 * direction).expand(rows, -1).to(FLOAT8)
    k[at] = (2.375 * direction).to(FLOAT8)  # a score of 14.25; the others have a deviation of 0.75
    v[at] = torch.full((64,), 8.0).to(FLOAT8)
    return q, k, v
