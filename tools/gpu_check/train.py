"""Trains the demo's GPT from one seed on the CPU and on the GPU and compares the losses.

  python -m gpu_check.train RESULT.json [STEPS]

In fp32 three runs have to agree: Tilewise on the CPU, Tilewise on the GPU, and torch's own
attention on the GPU. In bf16, Tilewise may be twice as far from the fp32 losses as torch's
attention.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Largest relative difference of a loss. Adam divides by the root of tiny second moments, so
# last-bit differences grow from step to step, and the devices add in different orders.
SAME = 2e-4


def options(device: str, dtype: str, steps: int) -> argparse.Namespace:
    """The options that examples/train_gpt.py reads from its command line."""
    return argparse.Namespace(
        seed=1, layers=4, width=256, heads=4, kv_heads=2, rows=256, batch=8, device=device,
        dtype=dtype, steps=steps, learning_rate=1e-3,
    )  # fmt: skip


def losses(attention: str, device: str, dtype: str, steps: int, text: Any) -> list[float]:
    """The loss of each step."""
    from train_gpt import Training  # type: ignore[import-not-found]

    begin = time.monotonic()
    training = Training(options(device, dtype, steps), text, attention)
    found = [training.step() for _ in range(steps)]
    seconds = time.monotonic() - begin
    print(f"{attention} {device} {dtype}: {found[0]:.4f} -> {found[-1]:.4f} in {seconds:.1f} s")
    return found


def difference(a: list[float], b: list[float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def main() -> int:
    """Writes the report and prints whether all runs agree."""
    sys.path.insert(0, str(ROOT / "examples"))
    import corpus  # type: ignore[import-not-found]

    result, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 40
    text = corpus.load(None, 256)
    gpu = losses("tilewise", "cuda", "fp32", steps, text)
    report: dict[str, Any] = {"steps": steps, "first": gpu[0], "last": gpu[-1]}
    fp32 = {
        "fp32, torch on this GPU": losses("sdpa", "cuda", "fp32", steps, text),
        "fp32, Tilewise on the CPU": losses("tilewise", "cpu", "fp32", steps, text),
    }
    allowed = {name: (difference(gpu, theirs), SAME) for name, theirs in fp32.items()}
    ours = difference(losses("tilewise", "cuda", "bf16", steps, text), gpu)
    theirs = difference(losses("sdpa", "cuda", "bf16", steps, text), gpu)
    allowed["bf16, against fp32"] = (ours, 2 * theirs + SAME)
    passed = gpu[-1] < gpu[0]  # the loss decreases
    report["differences"] = {}
    for name, (largest, limit) in allowed.items():
        report["differences"][name] = {"largest": largest, "allowed": limit}
        passed &= largest <= limit
        print(f"{name}: largest relative difference {largest:.1e}, allowed {limit:.1e}")
    report["passed"] = passed
    result.write_text(json.dumps(report))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
