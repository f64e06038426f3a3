"""Attention over the ranks of a group: out, lse and all gradients of every method against the
oracle at the bounds of the unsharded call, and what methods refuse."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise.distributed as td  # noqa: E402
import yardstick  # noqa: E402
from bounds import check_gradients, check_lse, check_out  # noqa: E402
from cases import Built, Case, flat, float64  # noqa: E402
from distributed_ranks import CUDA, Pool, device  # noqa: E402
from strategies import cases, masked  # noqa: E402
from tilewise import _torch, masks  # noqa: E402
from tilewise.distributed.layout import packed_runs, runs_of  # noqa: E402

METHODS, LAYOUTS = ("ulysses", "allgather", "ring"), ("zigzag", "contiguous")
MESH_METHODS = ("mesh auto", "mesh ulysses+ring")
CAUSAL = (-1, 0)
BASE = Case(rows=(29, 29), keys=(29, 29), heads_kv=2, group=2, head_dim=16, head_dim_v=16,
            dlse=True, seed=1)  # fmt: skip
# Causal documents, a band, an inverse causal corner, and a rectangle that ends beyond the rows.
RANGES = (((0, 7, 0, 7, 1), (7, 29, 7, 29, 1), (2, 19, 1, 24, 3), (11, 25, 0, 9, 2),
           (20, 60, 3, 5, 0)),)  # fmt: skip
CASES = {
    "full": {},
    "causal": {"window": CAUSAL},
    "bf16_causal": {"dtype": "bf16", "window": CAUSAL, "rows": (64, 64), "keys": (64, 64)},
    "fp16": {"dtype": "fp16"},
    "window": {"window": (5, 3)},
    "left_window": {"window": (4, -1)},
    "right_window": {"window": (-1, 2)},
    "sliding": {"window": (3, 0), "heads_kv": 1, "group": 4},
    "more_keys": {"keys": (41, 41), "window": CAUSAL},
    "fewer_keys": {"keys": (13, 13), "window": CAUSAL, "sinks": True},
    "short": {"rows": (3, 3), "keys": (5, 5), "window": (2, 1)},
    "one_row": {"rows": (1, 1), "keys": (17, 17), "window": CAUSAL},
    "one_head": {"heads_kv": 1, "group": 1, "window": CAUSAL},
    "five_heads": {"heads_kv": 5, "group": 1},
    "groups_of_three": {"heads_kv": 2, "group": 3, "window": CAUSAL},
    "value_width": {"head_dim": 24, "head_dim_v": 8, "window": CAUSAL},
    "softcap": {"softcap": 0.8, "window": CAUSAL},
    "alibi": {"alibi": "bh", "window": CAUSAL},
    "alibi_window": {"alibi": "h", "window": (6, 0)},
    "alibi_full": {"alibi": "bh", "keys": (37, 37)},
    "alibi_both_sides": {"alibi": "h", "window": (6, 3), "rows": (41, 41)},
    "dropout": {"dropout_p": 0.3},
    "bf16_dropout_causal": {"dropout_p": 0.5, "dtype": "bf16", "window": CAUSAL},
    "dropout_window": {"dropout_p": 0.2, "window": (5, 3), "heads_kv": 5, "group": 1,
                       "keys": (37, 37)},
    "sinks": {"sinks": True, "window": CAUSAL},
    "scale": {"scale_ptr": True, "scale": 0.4, "window": CAUSAL},
    "bias_all": {"bias": "bhr", "window": CAUSAL},
    "bias_rows": {"bias": "r", "bias_hides": True},
    "bias_heads": {"bias": "bh"},
    "bias_keys": {"bias": "", "window": (7, 2)},
    "ranges": {"mask_ranges": RANGES},
    "ranges_of_sequences": {"mask_ranges": (RANGES[0], ((0, 9, 3, 20, 3), (9, 29, 0, 29, 2)))},
    "ranges_window": {"mask_ranges": RANGES, "window": (12, 3), "sinks": True, "alibi": "h"},
    "ranges_bf16_dropout": {"mask_ranges": RANGES, "dropout_p": 0.3, "dtype": "bf16"},
    "no_ranges": {"mask_ranges": ((), RANGES[0]), "bias": "hr"},
    "blocks": {"mask_blocks": "", "keys": (150, 150), "rows": (140, 140)},
    "blocks_of_heads": {"mask_blocks": "h", "window": (40, 0), "heads_kv": 1, "group": 5},
    "blocks_of_all": {"mask_blocks": "bh", "rows": (139, 139), "keys": (137, 137)},
    "blocks_of_sequences": {"mask_blocks": "b", "heads_kv": 3, "group": 2, "keys": (37, 37)},
    "idle_ranks": {
        "heads_kv": 1, "group": 2, "bias": "hr", "sinks": True, "scale_ptr": True, "scale": 0.3,
        "rows": (2, 2), "window": CAUSAL,
    },
    "everything": {
        "softcap": 1.2, "alibi": "h", "bias": "hr", "sinks": True, "scale_ptr": True, "scale": 0.3,
        "window": (9, 0), "heads_kv": 2, "group": 3, "keys": (37, 37), "dropout_p": 0.1,
    },
}  # fmt: skip


def case_of(name: str) -> Case:
    return replace(BASE, **CASES[name])


def cuts(c: Case) -> tuple[list[int] | None, list[int] | None]:
    """cu_seqlens of rows and of keys of a packed case."""
    return (ends(c.rows), ends(c.keys)) if c.varlen_q else (None, None)


def mask_of(b: Built) -> masks.Mask | None:
    """The mask of the case, as tensors."""
    if b.case.mask_ranges is not None:
        ends = np.cumsum([0, *map(len, b.case.mask_ranges)])
        e = np.array([r for own in b.case.mask_ranges for r in own], np.int32).reshape(-1, 5)
        mask: masks.Mask = masks.Ranges(e[:, :2], e[:, 2:4], e[:, 4], starts=ends)
    elif b.mask is not None:
        mask = masks.from_bool(b.mask)
    else:
        return None
    return mask.to(device())


def arguments(b: Built, layout: str, group) -> tuple[list, dict]:
    """This rank's leaves q, k, v, and its options, with leaves for what is differentiable."""
    c = b.case
    cu_q, cu_k = cuts(c)
    where = {"layout": layout, "group": group}
    dim = 0 if c.varlen_q else 1
    qkv = [
        td.shard(x, dim, cu_seqlens=cu, **where).detach().clone().to(device())
        for x, cu in ((b.q, cu_q), (b.k, cu_k), (b.v, cu_k))
    ]
    options: dict = {"softcap": c.softcap, "window": tuple(None if w < 0 else w for w in c.window)}
    options["dropout_p"] = c.dropout_p
    options["scale"] = torch.tensor(b.scale) if c.scale_ptr else b.scale
    options["sinks"], options["deterministic"] = b.sinks, c.deterministic
    options["alibi_slopes"] = None if b.slopes is None else b.slopes.to(device())
    if b.bias is not None:
        whole = c.varlen_q or "r" not in c.bias
        options["bias"] = b.bias if whole else td.shard(b.bias, 2, **where)
    options["mask"] = mask_of(b)
    for name in ("scale", "sinks", "bias"):
        if torch.is_tensor(options.get(name)):
            options[name] = options[name].detach().clone().to(device()).requires_grad_()
    return [x.requires_grad_() for x in qkv], options


def ends(lengths: tuple[int, ...]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


_meshes: dict[str, object] = {}


def mesh_of(method: str) -> dict[str, Any]:
    """The method as an argument; "mesh m" is the method m of a mesh of 2 x 2 ranks."""
    if not method.startswith("mesh "):
        return {"method": method}
    if "mesh" not in _meshes:
        _meshes["mesh"] = torch.distributed.init_device_mesh(device().type, (2, 2))
    return {"mesh": _meshes["mesh"], "method": method.removeprefix("mesh ")}


def draw_as(b: Built, group) -> Any:
    """Replaces what rank 0 draws for dropout by the state of the case, for the unsharded result."""
    rank = torch.distributed.get_rank(group)
    state = np.array(b.seed_offset if rank == 0 else (1, rank), np.uint64).view(np.int64)
    return mock.patch.object(_torch, "draw_dropout_state", lambda on: torch.tensor(state).to(on))


def compute(
    group, case: Case, method: str, layout: str, b: Built | None = None
) -> dict[str, np.ndarray]:
    """This rank's results in float64, by the oracle's names."""
    b = b or Built(case)
    place = device()
    qkv, options = arguments(b, layout, group)
    common = {"group": group, "layout": layout, "return_lse": True, **mesh_of(method)}
    common["return_max_logits"] = case.max_logits
    common["out_dtype"] = torch.float32 if case.float32_out else None
    where: dict = {"layout": layout, "group": group, "cu_seqlens": cuts(case)[0]}
    with draw_as(b, group):
        if case.varlen_q:
            out, lse, *max_logits = td.attention_varlen(*qkv, *cuts(case), **options, **common)
        else:
            out, lse, *max_logits = td.attention(*qkv, **options, **common)
    assert out.dtype == b.out.view.dtype and lse.dtype == torch.float32
    dout = td.shard(b.dout, 0 if case.varlen_q else 1, **where).to(place, out.dtype)
    if b.dlse is None:
        out.backward(dout)
    else:
        dlse = td.shard(b.dlse, 1 if case.varlen_q else 2, **where).to(place)
        torch.autograd.backward([out, lse], [dout, dlse])
    result = {"out": out, "lse": lse, **{f"d{n}": x.grad for n, x in zip("qkv", qkv, strict=True)}}
    if max_logits:
        (result["max_logits"],) = max_logits
    for option in ("scale", "sinks", "bias"):
        if torch.is_tensor(options.get(option)) and options[option].requires_grad:
            result[f"d{option}"] = options[option].grad
    for n, x in result.items():
        assert x is not None, n
    return {n: float64(x) for n, x in result.items()}


def compute_all(group, case: Case, calls: list[tuple[str, str]]) -> list[dict[str, np.ndarray]]:
    b = Built(case)
    return [compute(group, case, *call, b) for call in calls]


def joined(c: Case, layout: str, parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The results for whole sequences, joined from those of the ranks."""
    dims = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
    if c.varlen_q:
        dims = {"out": 0, "lse": 1, "dq": 0, "dk": 0, "dv": 0}
    elif c.bias is not None and "r" in c.bias:
        dims["dbias"] = 2
    result = {}
    for n in parts[0]:
        if n == "max_logits":  # those of the whole sequences, on every rank
            assert all(np.array_equal(part[n], parts[0][n]) for part in parts), n
            result[n] = parts[0][n]
            continue
        if n not in dims:
            result[n] = sum(part[n] for part in parts)
            continue
        size = sum(part[n].shape[dims[n]] for part in parts)
        shape = list(parts[0][n].shape)
        shape[dims[n]] = size
        whole = np.full(shape, np.nan)
        cut = runs_of(size, layout, len(parts))
        if c.varlen_q:
            cu = cuts(c)[1 if n in ("dk", "dv") else 0]
            cut = packed_runs(tuple(cu), layout, len(parts))
        for part, runs in zip(parts, cut, strict=True):
            where = np.concatenate([np.arange(*run) for run in ((0, 0), *runs)])
            np.moveaxis(whole, dims[n], 0)[where] = np.moveaxis(part[n], dims[n], 0)
        result[n] = whole
    return result


def check_ranks(pool: Pool, case: Case, calls: list[tuple[int, str, str]]) -> None:
    """Computes the case once per (ranks, method, layout), and compares it with the oracle."""
    b = Built(case)
    want = b.expected()
    yard = None if b.dtype == torch.float32 else yardstick.errors(b, want)
    results = {
        world: pool.run(world, compute_all, case, [call[1:] for call in calls if call[0] == world])
        for world in sorted({call[0] for call in calls})
    }
    for world, method, layout in calls:
        got = joined(case, layout, [of_rank.pop(0) for of_rank in results[world]])
        where = f"{method} {layout} {world} ranks {case}"
        check_out(flat(torch.from_numpy(got["out"])), want, case.dtype, yard, where)
        check_lse(b.by_row(torch.from_numpy(got["lse"])), want.lse, case.dtype, yard, where)
        if case.max_logits:
            check_lse(got["max_logits"], want.max_logits, case.dtype, yard, where, "max_logits")
        grads = {n: flat(torch.from_numpy(got[f"d{n}"])) for n in "qkv"}
        grads |= {n: got[f"d{n}"] for n in ("bias", "sinks") if f"d{n}" in got}
        if "dscale" in got:
            grads["scale"] = got["dscale"].reshape(1)
        check_gradients(grads, want, b, yard, where)


def every_third_left_out(number: int, world: int) -> list[tuple[int, str, str]]:
    """The methods and layouts of a case with this many ranks: over 2, 3 and 4 ranks, each of them
    has its turn twice.
    """
    both = enumerate(itertools.product(METHODS, LAYOUTS))
    return [(world, *call) for i, call in both if (number + i + world) % 3]


def with_logits_by_turns(case: Case, number: int) -> Case:
    """On CPUs, every other case also has its largest logits."""
    return replace(case, max_logits=number % 2 == 1)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_results_and_gradients(pool, world):
    for number, name in enumerate(CASES):
        case = with_logits_by_turns(case_of(name), number)
        check_ranks(pool, case, every_third_left_out(number, world))


PACKED = {
    "full": {},
    "causal": {"window": CAUSAL},
    "bf16_causal": {"dtype": "bf16", "window": CAUSAL},
    "window": {"window": (5, 3)},
    "right_window": {"window": (-1, 2)},
    "sliding": {"window": (3, 0), "heads_kv": 1, "group": 4},
    "other_keys": {"keys": (4, 30, 0, 9, 2, 25), "window": CAUSAL, "sinks": True},
    "other_keys_full": {"keys": (4, 30, 0, 9, 2, 25)},
    "short": {"rows": (1, 0, 2, 1), "keys": (1, 3, 2, 0), "window": (2, 1)},
    "ranges": {"mask_ranges": RANGES},
    "ranges_of_sequences": {
        "mask_ranges": tuple(RANGES[0][i:] for i in range(6)), "window": (9, 2), "sinks": True,
        "keys": (4, 30, 0, 9, 2, 25),
    },
    "blocks": {"mask_blocks": "h", "heads_kv": 3, "group": 1},
    "blocks_of_all": {"mask_blocks": "bh", "window": CAUSAL, "keys": (4, 30, 0, 9, 2, 25)},
    "nothing": {"rows": (0, 0), "keys": (0, 0), "window": CAUSAL, "dlse": False},
    "alibi": {"alibi": "bh", "window": CAUSAL},
    "alibi_full": {"alibi": "bh", "keys": (4, 30, 0, 9, 2, 25)},
    "alibi_both_sides": {"alibi": "h", "window": (6, 3)},
    "dropout": {"dropout_p": 0.3},
    "dropout_other_keys": {"dropout_p": 0.4, "keys": (4, 30, 0, 9, 2, 25), "window": (7, 1)},
    "bias_all": {"bias": "bhr", "window": CAUSAL},
    "bias_rows": {"bias": "r", "bias_hides": True, "keys": (4, 30, 0, 9, 2, 25)},
    "bias_heads": {"bias": "bh", "heads_kv": 5, "group": 1},
    "bias_keys": {"bias": "", "window": (7, 2)},
    "everything": {
        "softcap": 1.2, "alibi": "h", "sinks": True, "scale_ptr": True, "scale": 0.3,
        "window": (9, 0), "heads_kv": 2, "group": 3, "head_dim_v": 8, "bias": "hr",
        "dropout_p": 0.1, "mask_ranges": RANGES,
    },
}  # fmt: skip
PACKED_BASE = replace(
    BASE, rows=(13, 29, 1, 0, 5, 17), keys=(13, 29, 1, 0, 5, 17), varlen_q=True, varlen_k=True
)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_packed_sequences(pool, world):
    for number, options in enumerate(PACKED.values()):
        case = with_logits_by_turns(replace(PACKED_BASE, **options), number)
        check_ranks(pool, case, every_third_left_out(number, world))


def test_a_mesh_of_two_dimensions(pool):
    """The two methods take the two layouts by turns."""
    packed = [replace(PACKED_BASE, **options) for options in PACKED.values()]
    for number, case in enumerate((*map(case_of, CASES), *packed)):
        calls = [(4, m, LAYOUTS[(number + i) % 2]) for i, m in enumerate(MESH_METHODS)]
        check_ranks(pool, with_logits_by_turns(case, number), calls)


RANDOM = dict(
    case=st.sampled_from(["fp32", "fp32", "bf16", "fp16"]).flatmap(
        lambda dtype: st.one_of(cases(dtype, small=True), masked(dtype, small=True))
    ),
    world=st.sampled_from([1, 2, 3, 4]).map(
        lambda n: min(n, torch.cuda.device_count()) if CUDA else n
    ),
    method=st.sampled_from(METHODS if CUDA else (*METHODS, *MESH_METHODS)),
    layout=st.sampled_from(LAYOUTS),
)
REPEATABLE = settings(derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


def possible_random(case: Case) -> Case:
    """Without a mask of no sequences, or of blocks without rows or keys; half of the cases with
    their largest logits, a third with out in float32.
    """
    case = replace(with_logits_by_turns(case, case.seed), float32_out=case.seed % 3 == 0)
    if case.mask_blocks is not None and 0 in (sum(case.rows), sum(case.keys)):
        case = replace(case, mask_blocks=None)
    return replace(case, mask_ranges=case.mask_ranges or None)


@given(**RANDOM)
@settings(REPEATABLE, max_examples=150)
def test_random_problems(pool, case, world, method, layout):
    """The random problems of one process, changed to sequences of equal length."""
    batch = max(len(case.rows), 1)
    case = replace(
        case, rows=(max(case.rows, default=4),) * batch, keys=(max(case.keys, default=4),) * batch,
        varlen_q=False, varlen_k=False, tail_q=0, tail_k=0, page_size=0, share_pages=False,
        used_q=None, used_k=None, leftpad=None, kv_idx=None, expand="", splits=0,
    )  # fmt: skip
    case = possible_random(case)
    check_ranks(pool, case, [(4 if method in MESH_METHODS else world, method, layout)])


@given(**RANDOM)
@settings(REPEATABLE, max_examples=100)
def test_random_packed_problems(pool, case, world, method, layout):
    """The random problems of one process, changed to packed sequences."""
    case = replace(
        case, varlen_q=True, varlen_k=True, tail_q=0, tail_k=0, page_size=0, share_pages=False,
        used_q=None, used_k=None, leftpad=None, kv_idx=None, expand="", splits=0,
    )  # fmt: skip
    case = possible_random(case)
    check_ranks(pool, case, [(4 if method in MESH_METHODS else world, method, layout)])


def repeated(group, case, method, layout):
    case = replace(case, deterministic=True)
    first, second = (compute(group, case, method, layout) for _ in range(2))
    return all(np.array_equal(first[n], second[n]) for n in first)


def test_results_repeat_bitwise(pool):
    repeating = {
        case_of("bf16_causal"): len(pool.pipes), case_of("everything"): min(3, len(pool.pipes)),
        replace(PACKED_BASE, **PACKED["everything"]): min(3, len(pool.pipes)),
    }  # fmt: skip
    for case, ranks in repeating.items():
        for method in METHODS:
            for layout in LAYOUTS:
                assert all(pool.run(ranks, repeated, case, method, layout))
