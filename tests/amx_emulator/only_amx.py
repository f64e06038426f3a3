"""A pytest plugin with which tests of every instruction set run only on AMX. It is for builds with
TILEWISE_AMX_EMULATOR, whose other instruction sets are the same as in every build:

    PYTHONPATH=tests/amx_emulator TILEWISE_LIBRARY_DIR=build/amx-emulator \\
        pytest -p only_amx tests/python/attention/test_properties.py -k "bf16 or fp16"
"""

from __future__ import annotations

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    """By now the tests have imported the module that lists the instruction sets."""
    import capi

    ran, missing = capi.instruction_sets()
    if "amx" not in ran:
        pytest.exit(f"this build on this machine runs {', '.join(ran)}, not amx", returncode=1)
    capi.instruction_sets = lambda: (["amx"], missing)
