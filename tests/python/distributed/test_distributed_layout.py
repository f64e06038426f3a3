"""Cutting and joining sequences over ranks, and the errors of ranks that do not agree."""

from __future__ import annotations

import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import distributed_ranks  # noqa: E402
import tilewise.distributed as td  # noqa: E402
from distributed_ranks import Pool  # noqa: E402
from tilewise.distributed.layout import lengths, runs_of  # noqa: E402
from tilewise.distributed.packed_call import Order  # noqa: E402
from tilewise.distributed.ranks import sum_dtype  # noqa: E402

LAYOUTS = ("zigzag", "contiguous")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_every_row_has_one_rank(layout, count):
    for size in (0, 1, 2, 3, 7, 24, 100, 128):
        runs = runs_of(size, layout, count)
        rows = [row for shard in runs for begin, end in shard for row in range(begin, end)]
        assert sorted(rows) == list(range(size))
        assert max(lengths(runs)) - min(lengths(runs)) <= 2
        assert all(shard == tuple(sorted(shard)) for shard in runs)


def test_zigzag_is_megatrons():
    assert runs_of(24, "zigzag", 3) == [((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 16),)]
    assert runs_of(24, "contiguous", 3) == [((0, 8),), ((8, 16),), ((16, 24),)]


def test_zigzag_balances_causal_work():
    for count in (2, 4, 8):
        work = [sum(r + 1 for b, e in shard for r in range(b, e)) for shard in
                runs_of(32 * count, "zigzag", count)]  # fmt: skip
        assert len(set(work)) == 1


def test_one_process_needs_no_group():
    x = torch.arange(7)
    for layout in LAYOUTS:
        assert torch.equal(td.positions(7, layout=layout), x)
        assert torch.equal(td.shard(x, 0, layout=layout), x)
        assert torch.equal(td.unshard(x, 0, layout=layout, size=7), x)


def round_trip(group, layout, size, dim, dtype):
    generator = torch.Generator().manual_seed(3)
    shape = [3, 5, 4]
    shape[dim] = size
    whole = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(shape, generator=generator).to(dtype)
    rank = torch.distributed.get_rank(group)
    local = td.shard(whole, dim, layout=layout, group=group)
    where = td.positions(size, layout=layout, group=group)
    assert torch.equal(local, whole.index_select(dim, where))
    leaf = local.detach().requires_grad_()
    back = td.unshard(leaf, dim, layout=layout, size=size, group=group)
    assert back.dtype == dtype and torch.equal(back, whole)
    (back * weight * (rank + 1)).sum().backward()
    count = torch.distributed.get_world_size(group)
    part = td.shard(weight, dim, layout=layout, group=group)
    wide = sum((part * (r + 1)).to(sum_dtype(dtype)) for r in range(count))
    assert torch.equal(leaf.grad, wide.to(dtype))
    (local * part).sum().backward()
    return torch.is_tensor(whole.grad), whole.grad, weight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_and_gradients(pool, layout):
    for count in (1, 2, 3, 4):
        for size, dim, dtype in (
            (16, 0, torch.float32), (13, 1, torch.bfloat16), (3, -1, torch.float32),
            (0, 1, torch.float32), (29, 2, torch.float64),
        ):  # fmt: skip
            replies = pool.run(count, round_trip, layout, size, dim, dtype)
            total = sum(grad for _, grad, _ in replies)
            assert torch.equal(total, replies[0][2])  # one rank's part per row, the rest zeros


def cut_labels(group):
    labels = torch.arange(10, 21)
    local = td.shard(labels, 0, layout="zigzag", group=group)
    return td.unshard(local, 0, layout="zigzag", size=11, group=group).tolist()


def test_integers_are_moved(pool):
    assert pool.run(3, cut_labels) == [list(range(10, 21))] * 3


def disagree(group, kind):
    rank = torch.distributed.get_rank(group)
    layout, size, x = "contiguous", 12, torch.zeros(4, 2)
    if rank == 1:
        if kind == "layout":
            layout = "zigzag"
        elif kind == "dtype":
            x = x.half()
        elif kind == "rows":
            x = x[:3]
        elif kind == "shape":
            x = torch.zeros(4, 5)
        elif kind == "grad":
            x.requires_grad_()
        elif kind == "type":
            x = None
        elif kind == "dim":
            x = torch.tensor(0.0)
    try:
        td.unshard(x, 0, layout=layout, size=size, group=group)
    except (ValueError, TypeError, IndexError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("layout", "layout is 'zigzag' on rank 1, but 'contiguous' on rank 0"),
        ("dtype", "dtype of x is torch.float16 on rank 1, but torch.float32 on rank 0"),
        ("rows", "x has 3 rows in dimension 0 on rank 1, but layout 'contiguous' of size 12"),
        ("shape", "shape of x is ['rows', 5] on rank 1, but ['rows', 2] on rank 0"),
        ("dim", "dim is 0, but x has 0 dimensions"),
        ("type", "x is a NoneType, but must be a torch.Tensor"),
        ("grad", "requires_grad of x is True on rank 1, but False on rank 0"),
    ],
)
def test_a_rank_that_differs_is_named_on_all(pool, kind, words):
    for text in pool.run(3, disagree, kind):
        assert words in text


def test_bad_arguments():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="layout is 'ring', but must be 'zigzag' or 'contiguous'"):
        td.shard(x, 0, layout="ring")
    with pytest.raises(ValueError, match="size is -1, but must be >= 0"):
        td.positions(-1, layout="zigzag")
    with pytest.raises(ValueError, match="x has 4 rows in dimension 0 on rank 0, but layout"):
        td.unshard(x, 0, layout="zigzag", size=5)


def wait_for_the_dead(group):
    x = torch.zeros(2 + torch.distributed.get_rank(group), 3)
    try:
        td.unshard(x, 0, layout="contiguous", size=5, group=group)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_died_is_a_sentence():
    pool = Pool(2)
    try:
        pool.kill(1)
        pool.start([0], 2, wait_for_the_dead)
        good, text = pool.reply(0, wait=100)
        assert good and "rank 0 of 2 could not exchange its arguments: another rank" in text
        assert "gloo:" in text
    finally:
        pool.close()


@pytest.mark.parametrize("index", [[2, 0, 4, 1, 3], [4, 1], [], [0]])
def test_rows_are_picked_and_put_back(index):
    """Shapes, dtypes and strides that can be moved 16 bytes at a time, and others."""
    order = Order(torch.tensor(index, dtype=torch.int64), 5, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for columns in (1, 3, 16, 32):
            rows = torch.randint(0, 99, (5, 2, 3 * columns)).to(dtype)
            for x in (rows, rows[..., 1 : columns + 1], rows[..., :columns], rows.transpose(1, 2)):
                picked = order.pick(x[None])
                assert picked.dtype == dtype and torch.equal(picked, x[index])
                want = torch.zeros_like(x)
                want[index] = x[index]
                assert torch.equal(order.put(x[index])[0], want)
    one = Order(torch.tensor([0]), 1, torch.device("cpu"))
    x = torch.arange(32.0).view(32, 1).T  # whose one row has a stride of 1
    assert torch.equal(one.put(one.pick(x[None])), x[None])


@pytest.mark.parametrize("first", range(4))
def test_rows_anywhere_in_a_storage_at_any_address(first):
    """PyTorch counts the offset of a view of 16 bytes from the start of the storage."""
    memory = np.arange(400, dtype=np.float32)
    address = memory.ctypes.data // 4 % 4
    storage = torch.from_numpy(memory[(first - address) % 4 :][:200])
    order = Order(torch.tensor([2, 0]), 5, torch.device("cpu"))
    for offset in range(5):
        x = storage[offset : offset + 160].view(5, 4, 8)
        assert torch.equal(order.pick(x[None]), x[[2, 0]])
        want = torch.zeros_like(x)
        want[[2, 0]] = x[:2]
        assert torch.equal(order.put(x[:2])[0], want)


def slept(_group: object, seconds: float, answer: str) -> str:
    time.sleep(seconds)
    return answer


def test_a_job_that_hangs_does_not_answer_the_next(pool, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(distributed_ranks, "WAIT", 0.1)
        with pytest.raises(AssertionError, match="slept: rank=0 hangs"):
            pool.run(2, slept, 0.5, "old")
    assert pool.run(2, slept, 0.0, "new") == ["new", "new"]
