"""A hash of the compiled kernels, which tells whether a measurement is of the present machine code.

It covers what docs/results/cuda-ledger.txt says of every kernel (GPU, registers, stack, shared
memory, code bytes) and no name, so a rename makes no measurement stale.
"""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from pathlib import Path

import cuda_ledger


def kernels_hash(ledger: Path = cuda_ledger.LEDGER) -> str:
    """Sixteen hexadecimal digits; the order of the lines does not matter."""
    kernels, _ = cuda_ledger.parse_text(ledger.read_text())
    rows = sorted(repr((key.sm, *astuple(cost))) for key, cost in kernels.items())
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
