"""Random problems, every option with every other, on every instruction set, against the oracle.

The default run draws the same problems every time. TILEWISE_TEST_EXAMPLES=<n> draws n new ones per
dtype instead: `TILEWISE_TEST_EXAMPLES=20000 pytest tests/python/test_properties.py` for an evening.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from cases import Case, check
from strategies import cases

THOROUGH = int(os.environ.get("TILEWISE_TEST_EXAMPLES", "0"))
SHARDS = 3  # per dtype, so that test processes share the work
EXAMPLES = (THOROUGH or 900) // SHARDS


def problems(dtype: str, shard: int):
    """A test body over fresh random problems of one dtype."""

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink] if THOROUGH else [Phase.generate],
    )
    @given(case=cases(dtype))
    def body(case: Case) -> None:
        check(case)

    return body if THOROUGH else seed(shard)(body)


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_random_problems(dtype, shard):
    problems(dtype, shard)()
