"""The host's work in a call like an earlier one: no plan is computed again, and neither operators
nor Python calls grow with the number of documents."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise.distributed as td  # noqa: E402

RANKS = 2
METHODS = ("ulysses", "allgather", "ring")
ROWS, HEADS, GROUPS = 640, 8, 4  # on CPUs, the 4 heads of a rank are 4 groups
OPERATORS = {"ulysses": 1390, "allgather": 2550, "ring": 1515}  # a tenth more than there are


def step_of(group, method, documents):
    """A function that runs a forward and a backward."""
    ends = [i * ROWS // documents for i in range(documents + 1)]
    q, k, v = (
        td.shard(torch.randn(ROWS, HEADS, 16), 0, layout="zigzag", group=group, cu_seqlens=ends)
        for _ in range(3)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        out = td.attention_varlen(*leaves, ends, causal=True, method=method, group=group)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return step


def cache_misses():
    """How many results the caches of the package had to compute so far."""
    names = [m.name for m in pkgutil.iter_modules(td.__path__)]
    modules = [importlib.import_module(f"{td.__name__}.{name}") for name in names]
    cached = {id(x): x for m in modules for x in vars(m).values() if hasattr(x, "cache_info")}
    assert len(cached) > 5
    return sum(x.cache_info().misses for x in cached.values())


def python_calls(step):
    """How many functions a step calls in Python."""
    count = 0

    def trace(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def work_of(group, method, documents):
    """The operators, Python calls and new plans of a step after two like it."""
    step = step_of(group, method, documents)
    step()
    step()
    before = cache_misses()
    calls = python_calls(step)
    planned = cache_misses() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    operators = Counter(x.name for x in profile.events())
    return {
        "calls": calls, "planned": planned,
        "operators": sum(n for name, n in operators.items() if name.startswith("aten::")),
        "messages": (operators["c10d::send"], operators["c10d::recv_"]),
        "gathers": sum(n for name, n in operators.items() if name.startswith("c10d::_allgather")),
    }  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_repeated_call_does_no_work_per_document(pool, method):
    few = pool.run(2, work_of, method, 4)
    many = pool.run(2, work_of, method, 40)
    for rank, (a, b) in enumerate(zip(few, many, strict=True)):
        where = f"{method}, rank {rank}: {a} with 4 documents, {b} with 40"
        assert a["planned"] == b["planned"] == 0, where
        assert a["operators"] == b["operators"] < OPERATORS[method], where
        assert abs(a["calls"] - b["calls"]) < 36, where  # one for each additional document
        assert a["gathers"] == b["gathers"] == 1, where  # the comparison of the calls
        assert a["messages"] == b["messages"], where
        if method == "ulysses":  # q, k, v, out and their gradients, each in one message per group
            assert b["messages"] == (8 * GROUPS, 8 * GROUPS), where
