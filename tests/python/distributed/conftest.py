"""Fixtures of the tests over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The processes of a test module: a ``distributed_ranks.Pool`` of RANKS processes, or of 4,
    whose exchanges end after TIMEOUT seconds.
    """
    from distributed_ranks import WAIT, Pool

    pool = Pool(getattr(request.module, "RANKS", 4), getattr(request.module, "TIMEOUT", WAIT))
    yield pool
    pool.close()
