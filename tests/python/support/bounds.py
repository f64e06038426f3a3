"""How far a result may be from the oracle, defined in one place.

fp32: 1e-6 of the largest value of the tensor. fp16 and bf16: 2x (forward) or 3x (gradients) the
error of plain eager PyTorch in the same dtype on the same inputs; where a kernel multiplies in
float8, plain PyTorch rounds its weights to float8 as well (yardstick.py). All bounds except that of
the fp32 forward add a small absolute term that matters only where the comparison itself is
undefined: where the exact result cancels (with one key, dq is exactly 0) or where PyTorch's result
happens to be exact. The term is a few units of rounding of the summed terms, whose size the oracle
reports.

The bound of the fp32 forward has a floor instead, and no absolute term. An element of out is the
sum of p_ij v_j over the keys, and the relative error of p_ij is the absolute error of its score.
Scores of the tests stay below 8, where fp32 rounds by up to 4 units of 2^-24, and they are rounded
three times: as the product, by scale or softcap, and as the exponent. Such errors add up like the
norm of the terms, so any fp32 computation may be off by 12 units of the largest norm of any
element. A large tensor has an element above that norm, so 1e-6 of the largest element is its bound.
The floor is the larger of the two only if the tensor has few elements and the terms of each cancel
to less than 0.7 of the norm, as with one column of v with both signs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import oracle

if TYPE_CHECKING:
    from cases import Built

# fp8: of products in float8. Their yardstick rounds the weights; tensor cores also round the sums.
UNIT = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8, "fp8": 2.0**-7}
FP32_RELATIVE = 1e-6
FP32_OUT_UNITS = 12.0
FORWARD_FACTOR, GRADIENT_FACTOR = 2.0, 3.0
LSE_LOW = 1e-4  # lse is fp32 for every input dtype and must not depend on it

Yard = dict[str, float] | None  # the error of plain PyTorch per tensor; None: bounds of fp32

# Largest error / bound seen per (dtype, tensor), which calibrating runs read to see the headroom.
worst: dict[tuple[str, str], float] = {}


def largest(x: np.ndarray) -> float:
    """Largest magnitude, ignoring NaN: unused rows and keys of inputs hold NaN."""
    return float(np.nanmax(np.abs(x), initial=0.0))


def _compare(
    name: str, got: np.ndarray, want: np.ndarray, dtype: str, bound: float, where: str
) -> None:
    assert got.shape == want.shape, f"{name} {got.shape} {want.shape} {where}"
    error = np.abs(got - want)
    bad = ~(error <= bound)  # catches NaN
    if bound > 0 and error.size:
        key = (dtype, name)
        worst[key] = max(worst.get(key, 0.0), float(np.nan_to_num(error.max() / bound, nan=1e9)))
    if bad.any():
        at = tuple(int(x) for x in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} off by up to {float(error.max()):.3e}, "
            f"allowed {bound:.3e}; first at {at}: got {got[at]!r}, oracle {want[at]!r}\n{where}"
        )


def check_out(got: np.ndarray, want: oracle.Result, dtype: str, yard: Yard, where: str) -> None:
    if yard is None:
        floor = FP32_OUT_UNITS * UNIT[dtype] * want.out_size
        bound = max(FP32_RELATIVE * largest(want.out), floor)
    else:
        bound = FORWARD_FACTOR * yard["out"] + UNIT[dtype] * largest(want.out)
    _compare("out", got, want.out, dtype, bound, where)


def check_lse(
    got: np.ndarray, want: np.ndarray, dtype: str, yard: Yard, where: str, name: str = "lse"
) -> None:
    """Also of max_logits, which are fp32 for every input dtype as well."""
    no_keys = np.isneginf(want)
    assert np.array_equal(np.isneginf(got), no_keys), f"{name}: -inf at the wrong places\n{where}"
    got, want = np.where(no_keys, 0, got), np.where(no_keys, 0, want)
    relative = FP32_RELATIVE if yard is None else LSE_LOW
    _compare(name, got, want, dtype, relative * max(1.0, largest(want)), where)


def _norm(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.sqrt((x**2).sum(axis=axes))


def sizes_of(b: Built, want: oracle.Result) -> dict[str, float]:
    """Norms of the terms that each gradient sums: where the terms cancel, their rounding
    remains."""
    from cases import flat

    c = b.case
    dq = dk = 0.0
    dbias = np.zeros(0)
    for e in want.ds_sizes:
        dq = max(dq, largest(_norm(e, (2,))))
        grouped = e.reshape(c.heads_kv, c.group, *e.shape[1:])
        dk = max(dk, largest(_norm(grouped, (1, 2))))
        if want.dbias is not None:
            shape = want.dbias.shape
            axes = tuple(a for a in (0, 1) if shape[a + 1] == 1)
            reduced = float(largest(_norm(e, axes)))
            # Where the bias has one batch row, the sequences are summed as well.
            dbias = np.append(dbias, reduced)
    scale = abs(b.scale)
    return {
        "q": scale * dq * largest(flat(b.k)),
        "k": scale * dk * largest(flat(b.q)),
        "v": want.dv_size * largest(flat(b.dout)),
        "bias": float(_norm(dbias, (0,))) if "b" not in (c.bias or "") else largest(dbias),
        "sinks": largest(want.dsinks_size),
        "scale": want.dscale_size,
    }


def fp32_rounding(b: Built) -> float:
    """Rounding error of a term of ds: dp sums Dv products and rounds as it grows; p carries the
    error of s."""
    return 2 * UNIT["fp32"] * (b.case.head_dim_v**0.5 + 4)


def check_gradients(
    got: dict[str, np.ndarray], want: oracle.Result, b: Built, yard: Yard, where: str
) -> None:
    """Checks every gradient in ``got``."""
    dtype, unit = b.case.dtype, UNIT[b.case.dtype]
    sizes = sizes_of(b, want)
    exact = {
        "q": want.dq, "k": want.dk, "v": want.dv, "bias": want.dbias, "sinks": want.dsinks,
        "scale": np.array([want.dscale]),
    }  # fmt: skip
    for name, values in got.items():
        target = exact[name]
        assert target is not None
        if yard is None:
            rounding = 8 * unit if name == "v" else fp32_rounding(b)
            bound = FP32_RELATIVE * largest(target) + rounding * sizes[name]
        else:
            bound = GRADIENT_FACTOR * yard[name] + unit * (largest(target) + 2 * sizes[name])
        _compare(f"d{name}", values, target, dtype, bound, where)


def tangent_sizes(
    want: oracle.TangentResult,
    t: oracle.Tangents,
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    bias_shape: tuple[int, ...] | None,
) -> dict[str, float]:
    """Norms of the terms that each gradient of a loss of tangents sums. Shapes as in the oracle."""
    group, scale = q.shape[1] // k.shape[1], abs(scale)

    def norm(axes: tuple[int, ...]) -> float:
        return max((largest(_norm(e, axes)) for e in want.ds_sizes), default=0.0)

    def meets(x: np.ndarray, moved: np.ndarray | None) -> float:
        """The factor of the gradients of the scores and of their tangents."""
        of_tangent = 0.0 if moved is None else scale * largest(moved)
        return (scale + abs(t.scale or 0.0)) * largest(x) + of_tangent

    sizes = {
        "q": norm((2,)) * meets(k, t.k),
        "k": group**0.5 * norm((1,)) * meets(q, t.q),
        "v": want.dv_size, "sinks": want.dsinks_size, "scale": want.dscale_size,
    }  # fmt: skip
    if bias_shape is not None:
        reduced = tuple(i for i in (0, 1) if bias_shape[i + 1] == 1)
        batch = len(want.ds_sizes) if bias_shape[0] == 1 else 1
        sizes["bias"] = batch**0.5 * norm(reduced)
    return sizes


def second_bound(
    name: str, want: oracle.TangentResult, sizes: dict[str, float], dtype: str, yard: Yard
) -> float:
    """The bound of the gradient of `name` of a loss of tangents, as that of a gradient of the
    backward, with half of its term for sums that cancel where plain PyTorch is nearly exact."""
    exact, unit = largest(np.asarray(getattr(want, f"d{name}"))), UNIT[dtype]
    if yard is not None:
        return GRADIENT_FACTOR * yard[name] + unit * (exact + sizes[name])
    rounding = 8 * unit if name == "v" else 2 * unit * (want.out.shape[2] ** 0.5 + 4)
    return FP32_RELATIVE * exact + rounding * sizes[name]
