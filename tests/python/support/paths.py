"""The repository, and what another process adds to its sys.path to import the tests' modules."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[2]
IMPORTS = [str(SUPPORT), str(ROOT / "tests")]  # the modules beside this one, and the oracle
