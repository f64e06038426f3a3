"""precise_backward over ranks: gradients of saturated rows do not lose digits to the rounding of
out, and out is that without the option."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402
from cases import Built, Case, flat, float64  # noqa: E402
from distributed_ranks import CUDA, device  # noqa: E402
from rounded_weights import same_out  # noqa: E402
from saturated import IN_BF16, SATURATED, bound, error  # noqa: E402
from test_distributed import LAYOUTS, MESH_METHODS, METHODS, joined, mesh_of  # noqa: E402
from test_distributed_calls import counted, error_of, shards_of, tensors  # noqa: E402

SEEDS = 40
CASES = [SATURATED, replace(SATURATED, varlen_q=True, varlen_k=True)]
if not CUDA:
    CASES.append(IN_BF16)


def saturated(
    group, case: Case, method: str, layout: str, precise: bool
) -> list[dict[str, np.ndarray]]:
    """This rank's dq and dk for each seed."""
    results = []
    for seed in range(SEEDS):
        b = Built(replace(case, seed=seed))
        where: dict = {"group": group, "layout": layout}
        if case.varlen_q:
            where["cu_seqlens"] = [0, 2]
        shards = [td.shard(x, 0 if case.varlen_q else 1, **where) for x in (b.q, b.k, b.v, b.dout)]
        q, k, v, dout = (x.clone().to(device()) for x in shards)
        options: dict = {"group": group, "layout": layout, "scale": 1.0, **mesh_of(method)}
        options |= {"sinks": b.sinks.to(device()), "precise_backward": precise}
        q.requires_grad_(), k.requires_grad_()
        if case.varlen_q:
            out = td.attention_varlen(q, k, v, [0, 2], **options)
        else:
            out = td.attention(q, k, v, **options)
        assert out.dtype == b.dtype
        dq, dk = torch.autograd.grad(out, (q, k), dout)
        results.append({"dq": float64(dq), "dk": float64(dk)})
    return results


@pytest.mark.parametrize("case", CASES, ids=repr)
@pytest.mark.parametrize("world", [2, 4])
def test_saturated_rows(pool, world, case):
    methods = (*METHODS, *MESH_METHODS) if world == 4 and not CUDA else METHODS
    for number, method in enumerate(methods):
        layout = LAYOUTS[(number + world // 2) % 2]
        errors: dict[bool, list[float]] = {False: [], True: []}
        for precise, of_precise in errors.items():
            parts = pool.run(world, saturated, case, method, layout, precise)
            for seed, of_ranks in enumerate(zip(*parts, strict=True)):
                b = Built(replace(case, seed=seed))
                got = joined(case, layout, list(of_ranks))
                of_precise.append(error(b, [flat(torch.from_numpy(got[n])) for n in ("dq", "dk")]))
        assert (np.array(errors[False]) > 0.1).sum() > 3, (method, layout)
        assert max(errors[True]) < bound(device().type, case.dtype), (method, layout)


def same(x, y) -> bool:
    """Whether results are equal; on GPUs, where another form of a kernel may run, close."""
    if not CUDA:
        return torch.equal(x, y)
    return torch.allclose(x.float(), y.float(), rtol=1e-2, atol=1e-2)


def same_outs(precise, plain) -> bool:
    """The same for the out of precise_backward and the plain one, which CPU kernels that round
    weights divide by different sums (``rounded_weights``).
    """
    if CUDA:
        return same(precise, plain)
    kernel = tilewise.explain(*[plain.new_empty(1, 9, 1, 8)] * 3).forward.kernel
    return same_out(float64(precise), float64(plain), kernel)


def same_results(group, method):
    """Whether out, lse and the largest logits are those without the option, also in float32."""
    q, k, v = shards_of(group, tensors(dtype=torch.bfloat16))
    options = {"group": group, "method": method, "causal": True, "return_lse": True}

    def results(**more):
        return td.attention(q, k, v, return_max_logits=True, **options, **more)

    plain, precise = results(), results(precise_backward=True)
    wide = results(precise_backward=True, out_dtype=torch.float32)
    assert wide[0].dtype == torch.float32
    results_are = [same(x, y) for x, y in zip(plain[1:], precise[1:], strict=True)]
    packed = [
        td.attention_varlen(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), [0, 24, 48], group=group,
            method=method, precise_backward=given,
        )
        for given in (True, False)
    ]  # fmt: skip
    results_are += [same_outs(precise[0], plain[0]), same_outs(*packed)]
    return all(results_are) and same(wide[0].to(q.dtype), precise[0])


def test_out_is_that_without_the_option(pool):
    for method in METHODS:
        assert pool.run(3, same_results, method) == [True] * 3


def gradients_of_wide_out(group, method):
    """Whether the gradients are those of the rounded float32 out."""
    grads = []
    for options in ({"precise_backward": True}, {"out_dtype": torch.float32}):
        inputs = shards_of(group, tensors(dtype=torch.float16))
        out = td.attention(*inputs, group=group, method=method, deterministic=True, **options)
        grads.append(torch.autograd.grad(out.half().square().sum(), inputs))
    return all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


def test_gradients_are_those_of_a_rounded_float32_out(pool):
    for method in METHODS:
        assert pool.run(3, gradients_of_wide_out, method) == [True] * 3


def test_no_method_moves_more_bytes(pool):
    for method in METHODS:
        moved = []
        for precise in (False, True):
            options = {"precise_backward": precise}
            results = pool.run(3, counted, method, options, torch.bfloat16)
            moved.append(max(bytes_ for _, bytes_ in results))
            assert {estimate for estimate, _ in results} == {moved[-1]}
        assert moved[0] == moved[1]


def refused(group, given):
    q, k, v = shards_of(group, tensors(dtype=torch.bfloat16))
    precise = given[torch.distributed.get_rank(group)]
    calls = (
        lambda: td.attention(q, k, v, group=group, precise_backward=precise),
        lambda: td.attention_varlen(
            q[0], k[0], v[0], [0, 24], group=group, precise_backward=precise
        ),
        lambda: td.explain(q, k, v, group=group, precise_backward=precise),
    )
    return [error_of(call) for call in calls]


def test_refusals(pool):
    for texts in pool.run(2, refused, ("yes", "yes")):
        assert all("precise_backward is 'yes', but must be True or False" in x for x in texts)
    for texts in pool.run(2, refused, (False, True)):
        words = "precise_backward is True on rank 1, but False on rank 0, and must be the same"
        assert all(words in x for x in texts)
