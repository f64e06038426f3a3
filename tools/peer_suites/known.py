"""Differences documented in docs/migration.md: cases that are not run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Arguments = dict[str, Any]


def _always(_: _Arguments) -> bool:
    return True


def _fp8(arguments: _Arguments) -> bool:
    return "float8" in str(arguments.get("dtype"))


# (test function, or "" for all; whether the difference affects a case; the difference)
DIFFERENCES: list[tuple[str, Callable[[_Arguments], bool], str]] = [
    ("", _fp8, "float8: its cases have not been run"),
    ("test_flash3_bw_compatibility", _always, "the schemas of private operators"),
    ("test_flash_attn_generator_arg_must_be_none", _always, "calls of the private extension"),
    (
        "test_flash_attn_varlen_paged_kv_num_splits",
        _always,
        "key splits over pages are supported by Tilewise and refused by the original",
    ),
    (
        "test_flash_attn_kvcache_paged_block_table_bounds",
        _always,
        "the original waits for the GPU to read the lengths on the host",
    ),
]

# Private parts of the original that are replaced when its files are imported.
ADAPTED = {
    "normalize_flash_attn_S": "S_dmask has the probabilities, which need no scaling",
    "_get_block_size_n": "a private function without effect on Tilewise",
    "USE_TRITON_ROCM": "False",
}


def difference(function: str, arguments: _Arguments) -> str:
    """Why a case is not run; "" if it is run."""
    for name, concerns, why in DIFFERENCES:
        if name in ("", function) and concerns(arguments):
            return why
    return ""
