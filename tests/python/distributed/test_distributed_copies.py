"""The transport that copies between memories of the ranks, with shared memory of CPUs in place of
memory of GPUs: the same cases as over messages, bitwise equal."""

from __future__ import annotations

import gc
import os
import tempfile
from dataclasses import replace
from unittest import mock

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


def test_state_of_a_group_belongs_to_one_type_of_device_and_ends_with_the_group():
    from tilewise.distributed.copies import Copies, _groups
    from tilewise.distributed.ranks import Ranks

    class Group:
        """Stands for a process group, of which the state only needs the identity."""

    group, before = Group(), len(_groups)
    cpu, meta, again = (
        Copies(Ranks(group, 0, 1), torch.device(name))._group for name in ("cpu", "meta", "cpu")
    )
    assert cpu is again and cpu is not meta
    assert cpu.ranks == Ranks(group, 0, 1)
    del group
    gc.collect()
    assert len(_groups) == before


@pytest.mark.parametrize("world", [2, 4])
def test_copies_equal_messages(pool, world):
    wide = replace(case_of("bf16_causal"), heads_kv=3, float32_out=True)
    for number, case in enumerate((*map(case_of, CASES), wide)):
        for turn, method in enumerate(METHODS[:2]):  # the ring always sends messages
            layout = LAYOUTS[(number + turn + world // 2) % 2]  # the other one with other ranks
            assert all(pool.run(world, both, case, method, layout)), (case, method, layout)


def transports(group, missing: int, elsewhere: int, broken: int) -> str:
    """Which transport a rank takes on a GPU if these ranks (or none: -1) lack the package, are on
    another host, or cannot share memory.
    """
    import torch.distributed as dist

    from tilewise.distributed import copies, transport
    from tilewise.distributed.ranks import ranks_of

    rank = dist.get_rank(group)

    def imported() -> None:
        if rank == missing:
            raise ImportError("cuda.bindings is missing")

    def opened(size, ranks, device):
        if rank == broken:
            raise RuntimeError("no path between GPUs")
        return shared_memory(size, ranks, device)

    host = "another" if rank == elsewhere else "this"
    with (
        mock.patch.object(transport, "_copying", {}),
        mock.patch.object(transport, "_import_runtime", imported),
        mock.patch.object(copies, "_groups", {}),
        mock.patch.object(copies, "_Streams", lambda _device: None),
        mock.patch.object(copies, "open_memory", opened if broken >= 0 else shared_memory),
        mock.patch("socket.gethostname", lambda: host),
    ):
        device = torch.device("cuda")
        found = [transport.transport_of(ranks_of(group), device) for _ in range(2)]
        return type(found[1]).__name__


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_agree_on_copies_if_all_can_copy(pool, world):
    assert pool.run(world, transports, -1, -1, -1) == ["Copies"] * world
    assert pool.run(world, transports, 1, -1, -1) == ["Messages"] * world
    assert pool.run(world, transports, -1, 0, -1) == ["Messages"] * world
    assert pool.run(1, transports, 0, -1, -1) == ["Messages"]


def test_ranks_that_cannot_share_memory_send_messages(pool):
    """All fail: a rank that fails alone would leave the others in the exchange of addresses."""
    assert pool.run(1, transports, -1, -1, 0) == ["Messages"]
