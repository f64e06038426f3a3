"""The transport that copies between memories of the ranks, with shared memory of CPUs in place of
memory of GPUs: the same cases as over messages, bitwise equal."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

from cases import Built, Case  # noqa: E402
from test_distributed import CASES, LAYOUTS, METHODS, case_of, compute  # noqa: E402


def shared_memory(size, ranks, _device):
    """One file per rank and allocation, which all ranks map."""
    import torch.distributed as dist

    from tilewise.distributed.copies import Memory

    folder = [tempfile.mkdtemp() if ranks.rank == 0 else None]
    dist.broadcast_object_list(folder, group=ranks.group, group_src=0)
    paths = [os.path.join(folder[0], str(rank)) for rank in range(ranks.world)]
    of_ranks = [torch.from_file(path, shared=True, size=size, dtype=torch.uint8) for path in paths]
    dist.barrier(ranks.group)
    return Memory(of_ranks, lambda: dist.barrier(ranks.group), None)


def both(group, case: Case, method: str, layout: str) -> bool:
    """Whether results over both transports are equal, twice in a row."""
    from tilewise.distributed import copies

    b = Built(case)
    expected = compute(group, case, method, layout, b)
    copies.open_memory = shared_memory
    os.environ["TILEWISE_DISTRIBUTED_TRANSPORT"] = "copies"
    try:
        got = [compute(group, case, method, layout, b) for _ in range(2)]
    finally:
        del os.environ["TILEWISE_DISTRIBUTED_TRANSPORT"]
    return all(np.array_equal(expected[n], again[n]) for again in got for n in expected)


@pytest.mark.parametrize("world", [2, 4])
def test_copies_equal_messages(pool, world):
    wide = replace(case_of("bf16_causal"), heads_kv=3, float32_out=True)
    for number, case in enumerate((*map(case_of, CASES), wide)):
        for turn, method in enumerate(METHODS[:2]):  # the ring always sends messages
            layout = LAYOUTS[(number + turn + world // 2) % 2]  # the other one with other ranks
            assert all(pool.run(world, both, case, method, layout)), (case, method, layout)
