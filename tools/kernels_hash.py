"""A hash of the compiled kernels, which tells whether a measurement used the present machine code.

It covers what docs/results/cuda-ledger.txt says of every kernel (GPU, registers, stack, shared
memory, code bytes) and no name, so a rename makes no measurement stale.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

LEDGER = Path(__file__).resolve().parents[1] / "docs" / "results" / "cuda-ledger.txt"
FIRST_NUMBER = 7  # columns before it name the kernel


def kernels_hash(ledger: Path = LEDGER) -> str:
    """Sixteen hexadecimal digits; the order of the lines does not matter."""
    rows = sorted(
        " ".join((cells[0], *cells[FIRST_NUMBER:]))
        for cells in (line.split() for line in ledger.read_text().splitlines())
        if cells and cells[0].isdigit()
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()[:16]
