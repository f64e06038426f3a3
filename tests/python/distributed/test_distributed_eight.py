"""Attention over eight ranks, as many as the GPUs of a host: fewer heads and rows than ranks, empty
shards, and every method and layout in turn."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

from test_distributed import (  # noqa: E402
    CASES,
    LAYOUTS,
    METHODS,
    PACKED,
    PACKED_BASE,
    case_of,
    check_ranks,
    with_logits_by_turns,
)  # fmt: skip

RANKS = 8  # for the fixture `pool`
CALLS = list(itertools.product(METHODS, LAYOUTS))


def turn(number: int, count: int) -> list[tuple[int, str, str]]:
    """The next `count` methods and layouts."""
    return [(RANKS, *CALLS[(number * count + i) % len(CALLS)]) for i in range(count)]


def test_results_and_gradients(pool):
    for number, name in enumerate(CASES):
        check_ranks(pool, with_logits_by_turns(case_of(name), number), turn(number, 2))


def test_packed_sequences(pool):
    for number, options in enumerate(PACKED.values()):
        case = with_logits_by_turns(replace(PACKED_BASE, **options), number)
        check_ranks(pool, case, turn(number, 1))
