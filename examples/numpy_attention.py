"""Attention on NumPy arrays, without PyTorch.

  python examples/numpy_attention.py

It checks the forward and the gradients of causal grouped-query attention against double precision,
and merges the results over two halves of the keys.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import tilewise

ROWS, HEADS, KV_HEADS, COLUMNS = 300, 8, 2, 64


def exact(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention in double precision; tensors are [batch, row, head, column]."""
    q, k, v = (t.astype(np.float64).swapaxes(1, 2) for t in (q, k, v))
    k, v = (np.repeat(t, HEADS // KV_HEADS, axis=1) for t in (k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(COLUMNS)
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


def error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference relative to the largest magnitude."""
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def main() -> int:
    """Runs the checks. Returns 0 if all results agree, 1 otherwise."""
    random = np.random.default_rng(0)
    q = random.standard_normal((2, ROWS, HEADS, COLUMNS), dtype=np.float32)
    k, v = random.standard_normal((2, 2, ROWS, KV_HEADS, COLUMNS), dtype=np.float32)
    print(tilewise.explain(q, k, v, causal=True), end="\n\n")

    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    forward = error(out, exact(q, k, v))
    print(f"forward: error {forward:.1e}")

    # Compare the gradient along one direction of q with the difference of two forwards.
    dout, direction = random.standard_normal((2, *q.shape), dtype=np.float32)
    gradients = tilewise.attention_backward(dout, q, k, v, out, lse, causal=True)
    step = 1e-5
    ahead, behind = (exact(q + s * direction.astype(np.float64), k, v) for s in (step, -step))
    wanted = float(((ahead - behind) * dout).sum() / (2 * step))
    found = float((gradients.dq.astype(np.float64) * direction).sum())
    print(f"gradient along a direction of q: {found:.4f}, by differences {wanted:.4f}")

    # Attend from the last row to each half of the keys, which could be on two machines.
    last, half = q[:, -1:], ROWS // 2
    halves = [
        tilewise.attention(last, k[:, keys], v[:, keys], return_lse=True)
        for keys in (slice(half), slice(half, None))
    ]
    merged, _ = tilewise.merge_states(*halves[0], *halves[1])
    merged_error = error(merged, out[:, -1:])
    print(f"two halves merged: error {merged_error:.1e}")

    good = forward < 1e-6 and merged_error < 2e-6 and abs(found - wanted) < 1e-3 * abs(wanted)
    return 0 if good else 1


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()  # there are no options; any argument is an error
    sys.exit(main())
