"""A call that one rank refuses raises on all ranks, whatever that rank refuses: wrong values of
every parameter of every function, on one rank and on all. A rank that waits for another one gets
the RuntimeError of the group's timeout, which is not a refusal."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise.distributed as td  # noqa: E402
from distributed_ranks import CUDA, device  # noqa: E402
from tilewise import masks  # noqa: E402
from tilewise.distributed import agreement  # noqa: E402
from tilewise.distributed import cache as cache_module  # noqa: E402
from tilewise.distributed.ranks import ranks_of  # noqa: E402

RANKS, TIMEOUT = 3, 10.0  # for the fixture `pool`
OWN_ROWS = 8  # of each rank
MESH = SimpleNamespace(ndim=2, mesh=torch.tensor([[7, 8]]))  # of other ranks
Call = tuple[dict[str, Any], dict[str, list[Any]]]  # good arguments, and wrong values by name


def zeros(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(shape, dtype=dtype, device=device())


def not_rows(x: Any) -> list[Any]:
    """Values that cannot be rows beside those of the other ranks."""
    return ["text", None, x.double(), x.int(), x[..., :3], x[None], x.to_sparse(), x.to("meta"),
            x[..., :0, :]]  # fmt: skip


def not_integers(x: Any) -> list[Any]:
    return ["text", x.float(), x[None, None], x.tolist()]


def wrong_options(heads: int) -> dict[str, list[Any]]:
    slopes = zeros(heads)
    flags = ("return_lse", "tf32", "batch_invariant", "return_max_logits")
    return {
        "scale": [math.nan, "text", zeros(2), zeros(1).int(), 1e300],
        "softcap": [-1.0, math.nan, "text", 1e-300, 0.5],
        "sinks": ["text", zeros(heads + 1), slopes.int(), slopes.to("meta")],
        "q_descale": ["text", zeros(1, 1)],
        "k_descale": ["text", zeros(1, 1)],
        "v_descale": ["text", zeros(1, 1)],
        "out_dtype": [torch.float16, torch.int8, "text"],
        **{name: ["text", 2] for name in flags},
    }


def wrong_training_options(q: Any, bias: Any) -> dict[str, list[Any]]:
    heads = q.shape[-2]
    slopes = zeros(heads)
    flags = ("deterministic", "precise_backward", "reduce_replicated")
    return {
        "causal": ["yes", True],
        "window": [5, (1,), ("a", 0), (2**63, 0), (4, 0)],
        "bias": ["text", bias.bool(), bias.double(), bias[..., :3], zeros(1, 1, 1, 1, 1), bias],
        "alibi_slopes": ["text", zeros(heads + 1), slopes.int(), slopes.requires_grad_()],
        "dropout_p": [1.0, -0.1, "text", math.nan, 0.1],
        "mask": [np.ones((3, 3)), "text", ranges(5), ranges(1)],
        "method": ["rings", None, "ring"],
        "layout": ["bshd", 3, "zigzag"],
        "mesh": [MESH],
        **{name: ["text", 2] for name in flags},
        **wrong_options(heads),
    }


def ranges(batch: int) -> masks.Mask:
    mask = masks.Ranges([[0, 3]] * batch, [[0, 5]] * batch, starts=range(batch + 1))
    return mask.to(device())


def dense(world: int, heads: int) -> Call:
    q, k = zeros(2, OWN_ROWS, heads, 8), zeros(2, OWN_ROWS, 1, 8)
    wrong = wrong_training_options(q, zeros(OWN_ROWS, OWN_ROWS * world))
    wrong |= {"q": not_rows(q), "k": not_rows(k), "v": [*not_rows(k), k[:, :3], k[:1]]}
    wrong["tensor_layout"] = ["zigzag", None]
    return {"q": q, "k": k, "v": k, "layout": "contiguous"}, wrong


def packed(world: int, heads: int) -> Call:
    q, k = zeros(2 * OWN_ROWS, heads, 8), zeros(2 * OWN_ROWS, 1, 8)
    whole = 2 * OWN_ROWS * world
    starts = ["text", None, 5, [1, whole], [0, whole, 3], [0, whole - 1], [0, whole, whole],
              torch.tensor([0.0, whole]), torch.tensor([0, whole], device="meta")]  # fmt: skip
    wrong = wrong_training_options(q, zeros(whole, whole))
    wrong |= {"q": not_rows(q), "k": not_rows(k), "v": [*not_rows(k), k[:3]]}
    wrong |= {"cu_seqlens_q": starts, "cu_seqlens_k": [x for x in starts if x is not None]}
    good = {"q": q, "k": k, "v": k, "layout": "contiguous", "cu_seqlens_q": [0, whole]}
    return good, wrong


def explained(world: int, heads: int) -> Call:
    good, wrong = dense(world, heads)
    wrong["cu_seqlens_q"] = [[0, OWN_ROWS * world], "text"]
    wrong["cu_seqlens_k"] = []  # without cu_seqlens_q it has no meaning
    wrong["options"] = [{"softcp": 1.0}, {"check": True}, {"shard": None}]
    return good, wrong


def decoded(world: int, heads: int) -> Call:
    q, new, cached = zeros(2, 3, heads, 8), zeros(2, 1, 1, 8), zeros(2, 6, 1, 8)
    good = {"q": q, "k_cache": cached, "v_cache": cached.clone(), "k": new, "v": new,
            "cache_seqlens": 3}  # fmt: skip
    two = torch.tensor([1, 2], dtype=torch.int32, device=device())
    wrong = wrong_options(heads)
    wrong |= {
        "q": not_rows(q),
        "k_cache": [*not_rows(cached), cached[:1].expand(2, -1, -1, -1)],
        "v_cache": [*not_rows(cached), cached[:, :5]],
        "k": not_rows(new),
        "v": not_rows(new),
        "cache_seqlens": [*not_integers(two), -1, 2.5, zeros(3).int(), None],
        "cache_batch_idx": [*not_integers(two), zeros(3).int()],
        "cache_leftpad": [*not_integers(two), zeros(3).int()],
        "block_table": [*not_integers(two[None]), zeros(3, 1).int(), two],
        "num_splits": [-1, 1.5, "text", 10**6],
        "check": ["text", 2],
        "mask": [np.ones((3, 3)), "text", ranges(5), ranges(1)],  # the last without key_positions
        "key_positions": [],  # see below
        "causal": ["yes", True],
        "window": [5, (1,), ("a", 0), (2**63, 0), (4, 0)],  # the last without key_positions
        "mesh": [MESH],
    }
    if not CUDA:  # the entries of index tensors, which a GPU reads when it computes
        wrong["cache_seqlens"] += [two + 9, two - 2]
        wrong["cache_batch_idx"] += [two + 9, two * 0]
        wrong["cache_leftpad"] += [two + 9]
        wrong["block_table"] += [two[:, None] + 9, two[:, None] * 0]
    return good, wrong


def decoded_with_mask(world: int, heads: int) -> Call:
    good, _ = decoded(world, heads)
    place = torch.arange(6)
    positions = [None, "text", place.float(), place[:5], place - 1, place * 0, place[None, None]]
    return {**good, "mask": ranges(1), "key_positions": place}, {"key_positions": positions}


def gathered(world: int, heads: int) -> Call:
    x = zeros(heads, OWN_ROWS, 4)
    size = OWN_ROWS * world
    good = {"x": x, "dim": 1, "layout": "contiguous", "size": size}
    return good, {
        "x": ["text", None, x.double(), x[:, :3], x[..., :3], x[0], x.to_sparse(), x.to("meta"),
              x.clone().requires_grad_()],
        "dim": [5, -9, "text", 2],
        "layout": ["bshd", 3, "zigzag"],
        "size": [size + 1, -1, 2.5, "text"],
        "cu_seqlens": ["text", 5, [0, 3], [1, size], [0, 5, 3, size], [0, size]],
    }  # fmt: skip


CALLS = {
    "attention": (td.attention, dense),
    "attention_varlen": (td.attention_varlen, packed),
    "explain": (td.explain, explained),
    "attention_with_kvcache": (td.attention_with_kvcache, decoded),
    "attention_with_kvcache and a mask": (td.attention_with_kvcache, decoded_with_mask),
    "unshard": (td.unshard, gathered),
}


def error_of(name: str, arguments: dict[str, Any]) -> str | None:
    """The type and the text of what the call raises."""
    try:
        CALLS[name][0](**{**arguments, **arguments.pop("options", {})})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def try_all(group, name: str, heads: int, method: str | None, on_all: bool) -> list[Any]:
    """For each wrong value: the parameter, the value, the rank that gives it, and the error here.

    Every call is followed by one that all ranks make alike, and which must succeed.
    """
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    good, wrong = CALLS[name][1](world, heads)
    good |= {"group": group} | ({} if method is None else {"method": method})
    results = []
    for number, (parameter, value) in enumerate(
        (parameter, value) for parameter, values in wrong.items() for value in values
    ):
        bad = number % world
        given = {**good, parameter: value} if on_all or rank == bad else dict(good)
        results.append((parameter, repr(value)[:60], bad, error_of(name, given)))
        after = error_of(name, dict(good))
        assert after is None, (parameter, value, after)
    return results


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", list(CALLS))
def test_what_one_rank_refuses_all_ranks_refuse(pool, name, world):
    for parts in zip(*pool.run(world, try_all, name, 2, None, False), strict=True):
        parameter, value, bad, own = parts[0][0], parts[0][1], parts[0][2], parts[parts[0][2]][3]
        where = f"{parameter} = {value} on rank {bad} of {world}"
        assert own is not None, where
        assert "could not exchange" not in own, f"{where}: {own}"
        sentence = own.partition(": ")[2].partition("\n")[0]
        for rank, (*_, text) in enumerate(parts):
            if rank == bad:
                continue
            assert text is not None and text.startswith("ValueError: "), f"{where}: {text}"
            # Either that rank's refusal, or the sentence about a difference, which all ranks get.
            assert text == own or f"rank {bad} was refused: {sentence}" in text, f"{where}: {text}"
            if text == own:
                assert "on rank " in text or "calls " in text, f"{where}: {text}"


@pytest.mark.parametrize("method", ["ulysses", "allgather", "ring"])
@pytest.mark.parametrize("name", ["attention", "attention_varlen"])
def test_what_all_ranks_give_none_waits_for(pool, name, method):
    """With one head, the others of the ranks of "ulysses" compute nothing."""
    for parts in zip(*pool.run(3, try_all, name, 1, method, True), strict=True):
        texts = [text for *_, text in parts]
        where = f"{parts[0][:2]}: {texts}"
        assert len({text is None for text in texts}) == 1, where
        assert not any("could not exchange" in text for text in texts if text), where


def test_every_parameter_has_wrong_values():
    for name, (function, build) in CALLS.items():
        if name.endswith("mask"):
            continue
        _, wrong = build(2, 2)
        known = inspect.signature(td.attention).parameters.keys() if name == "explain" else set()
        assert known | inspect.signature(function).parameters.keys() == {*wrong, "group"}, name


# --- more than one rank, and what is found after the arguments ------------------------------------


def several_refuse(group):
    rank = torch.distributed.get_rank(group)
    good, _ = dense(3, 2)
    if rank > 0:
        good["softcap"] = -float(rank)
    return error_of("attention", {**good, "group": group})


def test_two_of_three_ranks_refuse(pool):
    first, second, third = pool.run(3, several_refuse)
    assert "rank 1 was refused: softcap is -1.0, but must be 0 (off)" in first
    assert second.startswith("ValueError: softcap is -1.0, but must be 0 (off)")
    assert third.startswith("ValueError: softcap is -2.0, but must be 0 (off)")


def different_functions(group):
    name = "explain" if torch.distributed.get_rank(group) == 1 else "attention"
    good, _ = dense(2, 2)
    return error_of(name, {**good, "group": group})


def test_explaining_is_another_call_than_computing(pool):
    for text in pool.run(2, different_functions):
        assert "rank 1 calls explain, but rank 0 calls attention" in text


def transformed(group, name: str) -> list[str | None]:
    """Rank 1 calls a function of the ranks in transforms of torch.func."""
    good, _ = CALLS[name][1](2, 2)
    first, texts = next(iter(good)), []

    def call(x):
        texts.append(error_of(name, {**good, first: x, "group": group}))
        return x.sum()

    x = good[first]
    for transform in (torch.func.vmap, torch.func.grad):
        if torch.distributed.get_rank(group) == 0:
            call(x)
        else:
            transform(call)(x[None] if transform is torch.func.vmap else x)
    return texts


@pytest.mark.parametrize(
    "name", ["attention", "attention_varlen", "explain", "attention_with_kvcache", "unshard"]
)
def test_transforms_of_torch_func_are_refused(pool, name):
    others, own = pool.run(2, transformed, name)
    sentence = f"tilewise.distributed.{name} is called in a transform of torch.func, but exchanges"
    assert all(text.startswith(f"NotImplementedError: {sentence}") for text in own)
    assert all(f"rank 1 was refused: {sentence}" in text for text in others)


def without_room(group, appends: bool):
    """The last rank has a length beyond its cache. Returns the error, and what was written."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    good, _ = decoded(world, 2)
    lengths = [3, 9 if rank == world - 1 else 2]
    good |= {"group": group, "check": True, "k": good["k"] + 1}
    good["cache_seqlens"] = torch.tensor(lengths, device=device())
    if not appends:
        good |= {"k": None, "v": None}
    return error_of("attention_with_kvcache", good), float(good["k_cache"].abs().max())


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("appends", [False, True])
def test_no_rank_appends_if_one_has_no_room(pool, world, appends):
    *others, (own, _) = results = pool.run(world, without_room, appends)
    assert own.startswith("ValueError: cache_seqlens[1] is 9, but must be from 0 to ")
    for text, _ in others:
        assert f"rank {world - 1} was refused: cache_seqlens[1] is 9, but must be" in text
    assert all(written == 0 for _, written in results)


def fail_while_computing(group, wanted: bool):
    """Rank 1 fails after all checks, as for lack of memory."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    good, _ = decoded(world, 2)
    good |= {"group": group, "return_lse": wanted, "return_max_logits": wanted}

    def run(call):
        raise MemoryError("no memory for\nall of this")

    results = None
    with mock.patch.object(cache_module, "run", run if rank == 1 else cache_module.run):
        try:
            results = td.attention_with_kvcache(**good)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            after = error_of("attention_with_kvcache", good)
    assert after is None
    return [bool(x.isnan().all()) for x in (results if wanted else (results,))]


@pytest.mark.parametrize("wanted", [False, True])
def test_a_rank_that_fails_while_it_computes(pool, wanted):
    for rank, result in enumerate(pool.run(3, fail_while_computing, wanted)):
        if rank == 1:
            assert result == "MemoryError: no memory for\nall of this"
        elif CUDA:  # reading the news would make the host wait
            assert result == [True] * (3 if wanted else 1)
        else:
            assert result == (
                "ValueError: tilewise.distributed.attention_with_kvcache: rank 1 was refused: no "
                "memory for"
            )


def exchange_beside(group):
    """As over NCCL, which moves no tensors of CPUs."""
    ranks = ranks_of(group)
    with (
        mock.patch.object(agreement, "_moves_cpu_tensors", lambda _group: False),
        mock.patch.object(agreement, "_beside", {}),
    ):
        return [agreement.exchange([ranks.rank, i], ranks) for i in range(2)]


def test_ranks_of_different_numbers_of_groups_meet(pool):
    """Rank 0 is in a group more than rank 1, and in two more than rank 2."""
    for count in range(2, len(pool.pipes) + 1):
        want = [[[rank, i] for rank in range(count)] for i in range(2)]
        assert pool.run(count, exchange_beside) == [want] * count
