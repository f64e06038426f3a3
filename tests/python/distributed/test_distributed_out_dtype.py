"""out_dtype over ranks: out in float32 of queries of 16 bits is the sum before rounding, bit by bit
and against the oracle; its gradients, the bytes that move, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402
from cases import DTYPES, Built, Case, flat, float64  # noqa: E402
from distributed_ranks import CUDA, device  # noqa: E402
from rounded_weights import same_out  # noqa: E402
from test_distributed import (  # noqa: E402
    BASE,
    LAYOUTS,
    MESH_METHODS,
    METHODS,
    PACKED_BASE,
    RANGES,
    check_ranks,
    compute,
    joined,
)
from test_distributed_calls import counted, error_of, shards_of, tensors  # noqa: E402

WIDE = torch.float32
CASES = {
    "causal": replace(BASE, dtype="bf16", window=(-1, 0), max_logits=True),
    "heads": replace(BASE, dtype="fp16", heads_kv=1, group=3, keys=(37, 37), head_dim_v=8),
    "options": replace(BASE, dtype="fp16", window=(9, 2), sinks=True, softcap=1.5, bias="hr",
                       alibi="h", dropout_p=0.2),
    "ranges": replace(BASE, dtype="bf16", mask_ranges=RANGES),
    "packed": replace(PACKED_BASE, dtype="bf16", window=(-1, 0), sinks=True, dlse=False),
    "packed_dropout": replace(PACKED_BASE, dtype="fp16", keys=(4, 30, 0, 9, 2, 25), dropout_p=0.3),
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rounded_it_is_out_in_the_dtype_of_q(pool, world):
    """Its gradients are at the bounds of those of an out in the dtype of q."""
    methods = (*METHODS, *MESH_METHODS) if world == 4 and not CUDA else METHODS
    for number, (name, narrow) in enumerate(CASES.items()):
        wide = replace(narrow, float32_out=True)
        kernel = tilewise.explain(
            *[torch.empty(1, 9, 1, 8, dtype=DTYPES[narrow.dtype])] * 3
        ).forward.kernel
        for i, method in enumerate(methods):
            layout = LAYOUTS[(number + i + world) % 2]
            check_ranks(pool, wide, [(world, method, layout)])
            outs = [
                joined(case, layout, pool.run(world, compute, case, method, layout))["out"]
                for case in (narrow, wide)
            ]
            assert not np.array_equal(*outs), (name, method, layout)
            if not CUDA:  # there, another form of a kernel may run
                rounded = float64(torch.from_numpy(outs[1]).to(DTYPES[narrow.dtype]))
                assert same_out(rounded, outs[0], kernel), (name, method, layout)


def around_four(case: Case) -> Built:
    """Values around 4, so that the rounding of weights, which bf16 kernels do, averages out: a
    16-bit out cannot be closer to the exact one than the exact one rounded.
    """
    b = Built(case)
    b.v.copy_(b.v.float() * 0.25 + 4.0)
    return b


def of_values_around_four(group, case: Case, method: str) -> dict[str, np.ndarray]:
    b = around_four(case)
    where = {"group": group, "layout": "zigzag"}
    q, k, v = (td.shard(x, 1, **where).to(device()) for x in (b.q, b.k, b.v))
    return {"out": float64(td.attention(q, k, v, method=method, out_dtype=WIDE, **where))}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_its_error_is_less_than_the_rounding_to_16_bits(pool, dtype):
    case = Case(rows=(70,), keys=(2000,), dtype=dtype, heads_kv=3, head_dim=64, head_dim_v=64)
    want = around_four(case).expected().out
    possible = np.abs(float64(torch.from_numpy(want).to(DTYPES[dtype])) - want)
    for method in METHODS:
        parts = pool.run(3, of_values_around_four, case, method)
        error = np.abs(flat(torch.from_numpy(joined(case, "zigzag", parts)["out"])) - want)
        assert error.max() < 0.25 * possible.max(), method
        assert np.sqrt((error**2).mean()) < 0.2 * np.sqrt((possible**2).mean()), method


def like_one_rank(group, method):
    """The largest difference to the unsharded call: of out, which is not that of 16 bits, and of
    dq, whose gradient of out is rounded first.
    """
    whole = [x.requires_grad_() for x in tensors(dtype=torch.float16)]
    expected = tilewise.attention(*whole, causal=True, out_dtype=WIDE)
    expected.square().sum().backward()
    where = {"layout": "zigzag", "group": group}
    q, k, v = shards_of(group, [x.detach() for x in whole])
    out = td.attention(q, k, v, causal=True, method=method, out_dtype=WIDE, **where)
    out.square().sum().backward()
    assert out.dtype == WIDE and q.grad.dtype == k.grad.dtype == torch.float16
    same = td.attention(q, k, v, causal=True, method=method, out_dtype=q.dtype, **where)
    assert torch.equal(same, td.attention(q, k, v, causal=True, method=method, **where))
    pairs = (out.detach(), expected.detach()), (q.grad, whole[0].grad)
    return [float((x - td.shard(y, 1, **where)).abs().max()) for x, y in pairs]


def test_it_is_that_of_one_rank(pool):
    # Tensor cores round the weights to 16 bits, and "ring" has other weights than one call.
    bound = 1e-3 if CUDA else 2e-5
    for method in METHODS:
        for of_out, of_dq in pool.run(3, like_one_rank, method):
            assert of_out < bound and of_dq < 4e-3, (method, of_out, of_dq)


def test_predicted_bytes_are_those_that_move(pool):
    moved = {}
    for method in METHODS:
        for wide in (False, True):
            options = {"return_lse": True, "out_dtype": WIDE if wide else None}
            results = pool.run(3, counted, method, options, torch.bfloat16)
            moved[method, wide] = max(bytes_ for _, bytes_ in results)
            assert {estimate for estimate, _ in results} == {moved[method, wide]}
    assert moved["ulysses", True] > moved["ulysses", False]
    assert all(moved[method, True] == moved[method, False] for method in METHODS[1:])


def refused(group, given):
    q, k, v = (x.detach() for x in shards_of(group, tensors(dtype=torch.bfloat16)))
    given = given[torch.distributed.get_rank(group)]
    cache = q.new_zeros(2, 8, 2, 8)
    calls = (
        lambda: td.attention(q, k, v, group=group, out_dtype=given),
        lambda: td.attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), [0, 24, 48], group=group,
            out_dtype=given,
        ),
        lambda: td.explain(q, k, v, group=group, out_dtype=given),
        lambda: td.attention_with_kvcache(q, cache, cache, group=group, out_dtype=given),
    )  # fmt: skip
    return [error_of(call) for call in calls]


def test_refusals(pool):
    for texts in pool.run(2, refused, (torch.float16, torch.float16)):
        assert all("out_dtype is torch.float16, but must be None, torch.bf" in x for x in texts)
    for texts in pool.run(2, refused, (None, WIDE)):
        words = "out_dtype is torch.float32 on rank 1, but None on rank 0, and must be the same"
        assert all(words in x for x in texts)
