"""What is documented as different in docs/migration.md: cases that are not run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Arguments = dict[str, Any]


def _always(_: _Arguments) -> bool:
    return True


def _fp8(arguments: _Arguments) -> bool:
    return "float8" in str(arguments.get("dtype"))


# (function, or "" for each; whether it is about a case; the difference)
DIFFERENCES: list[tuple[str, Callable[[_Arguments], bool], str]] = [
    ("", _fp8, "q of float8 has no kernel"),
    ("test_flash3_bw_compatibility", _always, "the schemas of private operators"),
    ("test_flash_attn_generator_arg_must_be_none", _always, "calls of the private extension"),
    (
        "test_flash_attn_varlen_paged_kv_num_splits",
        _always,
        "key splits over pages are computed here, and refused there",
    ),
    (
        "test_flash_attn_kvcache_paged_block_table_bounds",
        _always,
        "lengths on a GPU are read there by the host, which waits for it",
    ),
]

# What the files are given in place of parts of the original that are private to it.
ADAPTED = {
    "normalize_flash_attn_S": "S_dmask has the probabilities, which need no scaling",
    "_get_block_size_n": "a private function of which nothing depends here",
    "USE_TRITON_ROCM": "False",
}


def difference(function: str, arguments: _Arguments) -> str:
    """Why a case is not run, or ""."""
    for name, concerns, why in DIFFERENCES:
        if name in ("", function) and concerns(arguments):
            return why
    return ""
