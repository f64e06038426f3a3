"""Problems with a NaN in one place, and which results of them may change."""

from __future__ import annotations

import dataclasses

import numpy as np

from cases import Case

# Two heads on one key/value head; rows 5..144 are aligned with keys 0..139.
WINDOW = Case(
    rows=(145,), keys=(140,), group=2, head_dim=24, head_dim_v=20, window=(10, 3), sinks=True
)
CAUSAL = dataclasses.replace(WINDOW, rows=(140,), window=(-1, 0), sinks=False)
GENERAL = dataclasses.replace(WINDOW, softcap=3.0, alibi="h", bias="r", dropout_p=0.2)
SPLIT = dataclasses.replace(CAUSAL, splits=2)  # partial results are contaminated and combined
CASES = {"window": WINDOW, "causal": CAUSAL, "general": GENERAL, "split": SPLIT}
# Rows start at multiples of 16 bytes, which the Hopper kernels require.
CASES |= {f"aligned {n}": dataclasses.replace(c, head_dim_v=24) for n, c in CASES.items()}
CASES["aligned wide"] = dataclasses.replace(CAUSAL, head_dim=128, head_dim_v=128)


def same(got: np.ndarray, clean: np.ndarray, dtype: str) -> bool:
    """Equal up to the order of additions: a tile with a NaN may take another code path."""
    unit = {"fp32": 2**-20, "bf16": 2**-8, "fp16": 2**-11}[dtype]
    finite = np.isfinite(clean)
    if not np.array_equal(got[~finite], clean[~finite]):
        return False
    size = np.abs(clean[finite]).max(initial=0)
    return bool((np.abs(got[finite] - clean[finite]) <= 4 * unit * size).all())


def expect(got: np.ndarray, clean: np.ndarray, affected: np.ndarray, dtype: str, what: str) -> None:
    """Entries in `affected` are not finite, and all others equal those of the clean run."""
    affected = np.broadcast_to(affected, got.shape)
    lost = int(np.isfinite(got[affected]).sum())
    assert lost == 0, f"{what}: {lost} of {int(affected.sum())} entries lost the NaN"
    leaked = int((~np.isfinite(got[~affected])).sum() - (~np.isfinite(clean[~affected])).sum())
    assert leaked <= 0, f"{what}: {leaked} entries are NaN that do not depend on it"
    assert same(got[~affected], clean[~affected], dtype), f"{what}: other entries changed"
