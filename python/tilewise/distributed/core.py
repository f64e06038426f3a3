"""What a method computes: out and lse of this rank's rows, and the gradients, without autograd.

Methods nest: a method that exchanges tensors calls another method, or the operator itself, on the
tensors that it has received.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _ops
from .._options import (
    WANT_BIAS,
    WANT_BITS,
    WANT_SCALE,
    WANT_SINKS,
    Options,
    contiguous_columns,
)

if TYPE_CHECKING:  # masks need NumPy
    from .mask_parts import MaskPart

Gradients = list[Tensor | None]  # of q, k, v, bias, sinks and scale


class Result(NamedTuple):
    """out [B, rows, Hq, Dv], lse [B, Hq, rows] and the tensors that the backward needs."""

    out: Tensor
    lse: Tensor
    state: list[Tensor]


class Method(Protocol):
    """Attention of q [B, rows, Hq, D] to k [B, keys, Hkv, D] and v, with its exchanges."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None, /
    ) -> Result:
        """Computes out and lse, and raises the entries of max_logits [sequences, heads of the whole
        call] to the largest logits of what it computes here.
        """

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """Computes the gradients whose bits are in `wanted`, with the options of the forward."""


class Local:
    """The operator, with the options of one call of a larger problem and its part of the mask."""

    def __init__(self, mask: MaskPart | None = None) -> None:
        self._mask = mask

    def options_of_heads(self, options: Options, q: Tensor) -> Options:
        """The options of this call for the heads of q, with their part of the mask."""
        options = self.options(options)
        if self._mask is None:
            return options
        starts = options.cu_seqlens_q
        batch = q.shape[0] if starts is None else len(starts) - 1
        return self._mask.add_to(options, q, batch)

    def options(self, options: Options) -> Options:
        """The options of this call; those per head have been sliced already."""
        return options

    def state_of(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """The state, from the arguments of the forward, its out and the lse of its state."""
        return [q, k, v, out, lse]

    def add_bias(self, sums: Tensor, grad: Tensor) -> None:
        """Adds the gradient of the part of the bias that this call has used."""
        sums += grad

    def lse_pair(self, lse: Tensor) -> Tensor:
        """The lse of the state as [2, B, Hq, rows]."""
        return lse

    def lse_given(self, lse: Tensor) -> Tensor:
        """The lse of a state, from lse [B, Hq, rows]."""
        return lse

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """See ``Method``."""
        return self.call(q, k, v, self.options_of_heads(options, q), max_logits)

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """See ``Method``."""
        options = self.options_of_heads(options, state[0])
        return self.call_backward(state, dout, dlse, options, wanted)

    def call(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """The forward of the operator; tensors of float8 travel as bytes."""
        q, k, v = (contiguous_columns(_as_float8(x)) for x in (q, k, v))
        arguments = (q, k, v, *options, _ops.WITH_LSE_LOW)
        if max_logits is None:
            out, lse = torch.ops.tilewise.forward(*arguments)
        else:
            out, lse, largest = torch.ops.tilewise.forward_max_logits(*arguments)
            begin = options.head_offset
            own = max_logits[:, begin : begin + q.shape[-2]]
            torch.maximum(own, largest, out=own)
        return Result(out, lse[0], [q, k, v, out, lse])

    def call_backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """The backward of the operator."""
        if dlse is not None:
            dlse = contiguous_columns(dlse)
        dout = contiguous_columns(dout)
        grads = _ops.call_backward(dout, dlse, *state, *options, wanted)
        return [x if wanted & bit else None for x, bit in zip(grads, WANT_BITS, strict=True)]


def _as_float8(x: Tensor) -> Tensor:
    return x.view(torch.float8_e4m3fn) if x.dtype == torch.uint8 else x


def of_heads(options: Options, begin: int, end: int, key_heads: Sequence[int]) -> Options:
    """The options of the query heads from `begin` to before `end`, which have these key heads."""
    bias, slopes, sinks = options.bias, options.alibi_slopes, options.sinks
    if bias is not None and bias.shape[1] > 1:
        bias = bias[:, begin:end]
    return options._replace(
        bias=bias,
        alibi_slopes=None if slopes is None else slopes[..., begin:end],
        sinks=None if sinks is None else sinks[begin:end],
        head_offset=options.head_offset + begin,
        q_descale=_of_key_heads(options.q_descale, key_heads),
        k_descale=_of_key_heads(options.k_descale, key_heads),
        v_descale=_of_key_heads(options.v_descale, key_heads),
    )


def _of_key_heads(factors: Tensor | None, key_heads: Sequence[int]) -> Tensor | None:
    return None if factors is None else factors[:, list(key_heads)]


@lru_cache(maxsize=64)
def diagonals(values: tuple[int, ...], device: torch.device) -> Tensor | None:
    """The diagonal of each sequence as the operators take it, or None if all are 0."""
    return torch.tensor(values, dtype=torch.int32).to(device) if any(values) else None


def with_diagonal(options: Options, diagonal: Tensor | None) -> Options:
    """The options with the diagonal, if they depend on it: without one, kernels are faster."""
    windowed = options.window_left >= 0 or options.window_right >= 0
    used = windowed or options.alibi_slopes is not None
    return options._replace(diagonal=diagonal if used else None)


def no_sums(options: Options, wanted: int) -> Gradients:
    """Gradients of zero for bias, sinks and scale, to which those of parts are added."""
    like = ((options.bias, WANT_BIAS), (options.sinks, WANT_SINKS),
            (options.scale_tensor, WANT_SCALE))  # fmt: skip
    sums = [
        x.new_zeros(x.shape, dtype=torch.float32) if x is not None and wanted & bit else None
        for x, bit in like
    ]
    return [None, None, None, *sums]


def add_bias(local: Local, sums: Tensor | None, grad: Tensor | None, begin: int, end: int) -> None:
    """Adds the gradient of a call's bias, which has the heads from `begin` to before `end`."""
    if sums is not None and grad is not None:
        local.add_bias(sums[:, begin:end] if sums.shape[1] > 1 else sums, grad)


def add_of_heads(sums: Gradients, grads: Gradients, begin: int, end: int) -> None:
    """Adds the gradients of sinks and scale from the heads from `begin` to before `end`."""
    sinks, scale = sums[4], sums[5]
    if sinks is not None and grads[4] is not None:
        sinks[begin:end] += grads[4]
    if scale is not None and grads[5] is not None:
        scale += grads[5]


class Attend(torch.autograd.Function):
    """A method with autograd: out and, if wanted, lse."""

    @staticmethod
    def forward(
        ctx: Any, method: Method, options: Options, return_lse: bool, q: Tensor, k: Tensor,
        v: Tensor, bias: Tensor | None, sinks: Tensor | None, scale: Tensor | None,
        max_logits: Tensor | None,
    ) -> Any:  # fmt: skip
        """Computes out and lse, and raises the entries of max_logits; see ``Method``."""
        complete = options._replace(bias=bias, sinks=sinks, scale_tensor=scale)
        out, lse, state = method.forward(q, k, v, complete, max_logits)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*state, bias, sinks, scale)
        ctx.method, ctx.options, ctx.return_lse = method, options, return_lse
        ctx.shape = out.shape, q.dtype, out.device
        ctx.float8 = [name for name, x in zip("qkv", (q, k, v), strict=True)
                      if x.dtype == torch.uint8]  # fmt: skip
        return (out, lse) if return_lse else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> Any:
        """Computes all gradients. Another rank may have gradients of its rows of out and of lse, so
        this rank takes part even if it has none.
        """
        if ctx.float8:  # before messages are in flight, which an error would leave there
            raise RuntimeError(
                f"tilewise.distributed: {', '.join(ctx.float8)} have dtype float8_e4m3fn, which "
                "only the forward supports; for the backward q, k and v must all have dtype "
                "float32, float16 or bfloat16"
            )
        *state, bias, sinks, scale = ctx.saved_tensors
        options = ctx.options._replace(bias=bias, sinks=sinks, scale_tensor=scale)
        shape, dtype, device = ctx.shape
        if dout is None:
            dout = torch.zeros(shape, dtype=dtype, device=device)
        dout = dout.to(dtype)  # that of out, which may be float32, is rounded to the dtype of q
        if dlse is None and ctx.return_lse:
            batch, rows, heads, _ = shape
            dlse = torch.zeros((batch, heads, rows), device=device)
        needs = ctx.needs_input_grad[3:9]
        wanted = sum(bit for bit, needed in zip(WANT_BITS, needs, strict=True) if needed)
        if wanted & WANT_BIAS and any(bias.stride(i) == 0 and bias.shape[i] > 1 for i in range(3)):
            options = options._replace(bias=bias.contiguous())
        grads = ctx.method.backward(state, dout, dlse, options, wanted)
        if grads[3] is not None:
            grads[3] = grads[3].to(bias.dtype)
        return None, None, None, *grads, None
