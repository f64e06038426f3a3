"""Problems whose keys and values are float8_e4m3, compared with the oracle."""

from __future__ import annotations

import numpy as np
import torch

import capi
import devices
import yardstick
from bounds import check_lse, check_out
from cases import Built, Case, run

FLOAT8 = torch.float8_e4m3fn


def with_float8(b: Built, factors: bool, broadcast: str = "", signed: bool = False) -> None:
    """Rounds k and v to descale * float8, and puts the bytes into the struct.

    Args:
        signed: some descales are negative or 0.
    """
    c, a = b.case, b.attention
    rng = np.random.default_rng(c.seed)
    a.kv_float8 = 1
    b.bytes: dict[str, torch.Tensor] = {}
    for name in ("k", "v"):
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
        room = (*x.shape[:-1], x.shape[-1] + c.pad)
        bytes_ = torch.full(room, -1, dtype=torch.int8, device=x.device).view(FLOAT8)
        bytes_ = bytes_[..., : x.shape[-1]]
        rows, out = x.view(-1, *x.shape[-2:]), bytes_.view(-1, *x.shape[-2:])
        for i, sequence in enumerate(b.sequences):
            keys = torch.from_numpy(np.asarray(sequence.keys)).to(x.device)
            divided = rows[keys].float() / torch.where(full[i] == 0, 1.0, full[i])[:, None]
            stored = divided.clamp(-448, 448).to(FLOAT8)
            out[keys] = stored
            rows[keys] = (stored.float() * full[i][:, None]).to(b.dtype)
        setattr(a, name, capi.tensor(bytes_, batched=b.batched_k))
        b.keep += [bytes_, scale]
        b.bytes[name] = bytes_.view(torch.uint8)
        if factors:
            setattr(a, f"{name}_descale", scale.data_ptr())
            setattr(a, f"{name}_descale_stride_batch", 0 if "b" in broadcast else scale.stride(0))
            setattr(a, f"{name}_descale_stride_head", 0 if "h" in broadcast else 1)


def check(case: Case, factors: bool = True, broadcast: str = "", signed: bool = False) -> None:
    b = Built(case)
    with_float8(b, factors, broadcast, signed)
    check_built(b)


def check_built(b: Built) -> None:
    case = b.case
    want = b.expected()
    yard = yardstick.errors(b, want)
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=False)
        where = f"{target} {got.kernels} {case}"
        assert all(is_expected(kernel) for kernel in got.kernels), where
        check_out(got.out, want, case.dtype, yard, where)
        check_lse(got.lse, want.lse, case.dtype, yard, where)


def is_expected(kernel: str) -> bool:
    """Tensor cores run the kernel wherever there are any."""
    name = devices.current().name
    tensor_cores = name == "emulator" or (
        name == "cuda" and torch.cuda.get_device_capability() >= (7, 5)
    )
    return not tensor_cores or kernel.startswith("cuda.mma_sync.forward.")
