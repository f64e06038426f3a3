"""Attention in double precision in NumPy, the reference of the self-test.

It computes the forward and the gradients of dense tensors with the options of the self-test:
window, softcap, ALiBi, bias and sinks. It follows the definition in tilewise.h line by line and
shares no code with the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Options:
    """Options of a problem; the defaults switch everything off."""

    left: int = -1
    right: int = -1
    softcap: float = 0.0
    slopes: Array | None = None  # [Hq]
    bias: Array | None = None  # [Sq, Sk], the same for every batch and head
    sinks: Array | None = None  # [Hq]


@dataclass
class Result:
    """Everything that the library computes, in float64."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array


def attention(q: Array, k: Array, v: Array, dout: Array, scale: float, options: Options) -> Result:
    """Forward and gradients of q [B, Sq, Hq, D], k [B, Sk, Hkv, D], v [B, Sk, Hkv, Dv]."""
    group = q.shape[2] // k.shape[2]
    q, k, v, dout = (t.astype(np.float64).transpose(0, 2, 1, 3) for t in (q, k, v, dout))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    s, slope_of_cap = _scores(q, k, scale, options)
    p, lse = _softmax(s, options)
    out = p @ v
    dv = p.swapaxes(-1, -2) @ dout
    dp = dout @ v.swapaxes(-1, -2)
    ds = p * (dp - (dout * out).sum(-1, keepdims=True)) * slope_of_cap * scale
    dq, dk = ds @ k, ds.swapaxes(-1, -2) @ q

    def fold(t: Array) -> Array:
        batch, heads, rows, columns = t.shape
        return t.reshape(batch, heads // group, group, rows, columns).sum(2).transpose(0, 2, 1, 3)

    return Result(out.transpose(0, 2, 1, 3), lse, dq.transpose(0, 2, 1, 3), fold(dk), fold(dv))


def forward(q: Array, k: Array, v: Array, scale: float, options: Options) -> tuple[Array, Array]:
    """The forward alone: out [B, Sq, Hq, Dv] and lse [B, Hq, Sq]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.astype(np.float64).transpose(0, 2, 1, 3) for t in (q, k, v))
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    p, lse = _softmax(_scores(q, k, scale, options)[0], options)
    return (p @ v).transpose(0, 2, 1, 3), lse


def _scores(q: Array, k: Array, scale: float, options: Options) -> tuple[Array, Array | float]:
    """Scores [B, Hq, Sq, Sk], -inf where masked, and the derivative of the softcap."""
    s = scale * (q @ k.swapaxes(-1, -2))
    derivative: Array | float = 1.0
    if options.softcap > 0:
        t = np.tanh(s / options.softcap)
        s, derivative = options.softcap * t, 1.0 - t * t
    rows, keys = s.shape[-2:]
    diagonal = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)[None, :]
    if options.slopes is not None:
        s = s - options.slopes[:, None, None].astype(np.float64) * np.abs(diagonal - key)
    if options.bias is not None:
        s = s + options.bias.astype(np.float64)
    visible = np.ones((rows, keys), dtype=bool)
    if options.left >= 0:
        visible &= key >= diagonal - options.left
    if options.right >= 0:
        visible &= key <= diagonal + options.right
    return np.where(visible, s, -np.inf), derivative


def _softmax(s: Array, options: Options) -> tuple[Array, Array]:
    """The weights and the log-sum-exp; a row that sees no key has weights of 0 and lse -inf."""
    top = s.max(-1, initial=-np.inf)
    if options.sinks is not None:
        top = np.maximum(top, options.sinks[:, None].astype(np.float64))
    shift = np.where(np.isfinite(top), top, 0.0)
    e = np.exp(s - shift[..., None])
    total = e.sum(-1)
    if options.sinks is not None:
        total = total + np.exp(options.sinks[:, None].astype(np.float64) - shift)
    with np.errstate(divide="ignore"):
        lse = np.log(total) + shift
    return e / np.where(total > 0, total, 1.0)[..., None], lse
