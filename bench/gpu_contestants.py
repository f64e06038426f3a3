"""Tilewise and its peers as callables on the same tensors, without autograd where possible.

PyTorch's backends are called through their own operators, so that neither backend selection nor
autograd is timed. FA-3 and FA-4 offer their backward only through autograd.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpu_cases import Case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAMES = ("tilewise", "tilewise-tf32", "fa2", "cudnn", "efficient", "fa3", "fa4")
TITLES = {"fa2": "FA-2", "cudnn": "cuDNN", "efficient": "EFFICIENT", "fa3": "FA-3", "fa4": "FA-4"}

aten = torch.ops.aten


@dataclass
class Inputs:
    """[batch, row, head, column], contiguous; dout is for the backward."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def heads_first(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Views of [batch, head, row, column]."""
        q, k, v, dout = (x.transpose(1, 2) for x in (self.q, self.k, self.v, self.dout))
        return q, k, v, dout


# A call that returns its results as [batch, row, head, column]: {"out"} or {"dq", "dk", "dv"}.
Call = Callable[[], dict[str, Tensor]]


def draw(case: Case, device: str) -> Inputs:
    """Draws tensors with standard normal entries."""
    generator = torch.Generator(device).manual_seed(case.seqlen + case.head_dim)

    def rows(heads: int) -> Tensor:
        shape = (case.batch, case.seqlen, heads, case.head_dim)
        values = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return values.to(DTYPES[case.dtype])

    return Inputs(rows(case.heads), rows(case.kv_heads), rows(case.kv_heads), rows(case.heads))


def names_for(case: Case, device: str) -> list[str]:
    """The contestants that may support this case."""
    if device == "cpu":
        return ["tilewise", "sdpa"]
    if case.dtype == "fp32":
        return ["tilewise", "tilewise-tf32", "efficient"]
    return [n for n in NAMES if n != "tilewise-tf32"]


def prepare(name: str, case: Case, x: Inputs) -> Call | str:
    """A callable that runs the case once, or the reason why there is none."""
    try:
        call = _MAKE[name](case, x)
        call()
        if x.q.is_cuda:
            torch.cuda.synchronize()
    except ImportError as error:
        return f"not installed ({error})"
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        text = str(error).strip().splitlines()
        return text[0] if text else type(error).__name__
    return call


def _named(values: tuple[Tensor, ...], heads_first: bool) -> dict[str, Tensor]:
    names = ("out",) if len(values) == 1 else ("dq", "dk", "dv")
    rows = (x.transpose(1, 2) for x in values) if heads_first else values
    return dict(zip(names, rows, strict=True))


def _tilewise(case: Case, x: Inputs, tf32: bool = False) -> Call:
    from tilewise import _plain
    from tilewise._options import WANT_K, WANT_Q, WANT_V

    options = (None, -1, 0 if case.causal else -1, False, tf32, False)
    if case.direction == "fwd":
        return lambda: _named(_plain._forward(x.q, x.k, x.v, *options)[:1], False)
    out, lse = _plain._forward(x.q, x.k, x.v, *options)
    wanted = WANT_Q | WANT_K | WANT_V
    return lambda: _named(
        _plain._backward(x.dout, None, x.q, x.k, x.v, out, lse, *options, wanted), False
    )


def _fa2(case: Case, x: Inputs) -> Call:
    q, k, v, dout = x.heads_first()
    scale = case.head_dim**-0.5
    columns = case.head_dim
    if columns % 8:
        raise ValueError("head dimension is not a multiple of 8")

    def forward() -> Any:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, case.causal, False, scale=scale
        )

    if case.direction == "fwd":
        return lambda: _named(forward()[:1], True)
    r = forward()
    return lambda: _named(
        aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, *r[:6], 0.0, case.causal, r[6], r[7], scale=scale
        ),
        True,
    )


def _cudnn(case: Case, x: Inputs) -> Call:
    q, k, v, dout = x.heads_first()

    def forward() -> Any:
        return aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, case.direction == "bwd", 0.0, case.causal, False
        )

    if case.direction == "fwd":
        return lambda: _named(forward()[:1], True)
    out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward()
    return lambda: _named(
        aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, case.causal
        ),
        True,
    )


def _efficient(case: Case, x: Inputs) -> Call:
    if case.heads != case.kv_heads:
        raise ValueError("does not support grouped heads")
    q, k, v, dout = x.heads_first()
    backward = case.direction == "bwd"

    def forward() -> Any:
        return aten._scaled_dot_product_efficient_attention(
            q, k, v, None, backward, 0.0, case.causal
        )

    if not backward:
        return lambda: _named(forward()[:1], True)
    out, lse, seed, offset = forward()
    wanted = [True, True, True, False]
    return lambda: _named(
        aten._scaled_dot_product_efficient_attention_backward(
            dout, q, k, v, None, out, lse, seed, offset, 0.0, wanted, case.causal
        )[:3],
        True,
    )


def _by_autograd(case: Case, x: Inputs, attend: Callable[..., Any]) -> Call:
    """`attend` takes and returns [batch, row, head, column]; it may return more than the output."""

    def first(result: Any) -> Tensor:
        return result[0] if isinstance(result, tuple) else result

    if case.direction == "fwd":

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return {"out": first(attend(x.q, x.k, x.v))}

        return forward
    leaves = tuple(t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = first(attend(*leaves))
    return lambda: _named(torch.autograd.grad(out, leaves, x.dout, retain_graph=True), False)


def fa3_installed() -> bool:
    """Whether FA-3 is installed."""
    return importlib.util.find_spec("flash_attn_interface") is not None


def _fa3(case: Case, x: Inputs) -> Call:
    attend = importlib.import_module("flash_attn_interface").flash_attn_func
    return _by_autograd(case, x, lambda q, k, v: attend(q, k, v, causal=case.causal))


def _fa4(case: Case, x: Inputs) -> Call:
    attend = importlib.import_module("flash_attn.cute").flash_attn_func
    return _by_autograd(case, x, lambda q, k, v: attend(q, k, v, causal=case.causal))


def _sdpa(case: Case, x: Inputs) -> Call:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        grouped = case.heads != case.kv_heads
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q, k, v, is_causal=case.causal, enable_gqa=grouped).transpose(1, 2)

    return _by_autograd(case, x, attend)


_MAKE: dict[str, Callable[[Case, Inputs], Call]] = {
    "tilewise": _tilewise,
    "tilewise-tf32": lambda case, x: _tilewise(case, x, tf32=True),
    "fa2": _fa2,
    "cudnn": _cudnn,
    "efficient": _efficient,
    "fa3": _fa3,
    "fa4": _fa4,
    "sdpa": _sdpa,
}
