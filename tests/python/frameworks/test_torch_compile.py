"""torch.compile without graph breaks, and the transforms of torch.func."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.autograd import forward_ad

import tilewise
import tilewise._ops
import torch_versions
from tilewise import masks

pytestmark = [
    pytest.mark.tensors,
    pytest.mark.filterwarnings("ignore"),  # torch's compiler emits warnings about itself
]


def inputs(layout="bshd", batch=2):
    q, k, v = torch.randn(batch, 20, 4, 16), torch.randn(batch, 24, 2, 16), torch.randn(2, 24, 2, 8)
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    return tuple(x.requires_grad_() for x in (q, k, v))


def close(ones, others):
    for one, other in zip(ones, others, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_whole_graph_forward_and_backward(layout, dynamic):
    bias = torch.randn(1, 4, 20, 24, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    scale = torch.tensor(0.3, requires_grad=True)
    leaves = (*inputs(layout), bias, sinks, scale)

    def loss(q, k, v, bias, sinks, scale):
        out, lse = tilewise.attention(
            q * 1.0, k, v, causal=True, bias=bias, sinks=sinks, scale=scale, softcap=5.0,
            return_lse=True, layout=layout,
        )  # fmt: skip
        return out.sin().sum() + lse.cos().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=dynamic)
    close([compiled(*leaves)], [loss(*leaves)])
    close(
        torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(loss(*leaves), leaves)
    )


PER_HEAD = masks.from_bool(torch.arange(4 * 20 * 24).reshape(1, 4, 20, 24) % 3 > 0)


def attend_quantized(q, k):
    q, k = tilewise.quantize_fp8(q, heads_kv=2), tilewise.quantize_fp8(k)
    return tilewise.attention(q.data, k.data, k.data, q_descale=q.descale, k_descale=k.descale)


@pytest.mark.parametrize(
    "call",
    [
        lambda q, k: tilewise.attention(q, k, k, mask=PER_HEAD.to(q.device)),
        attend_quantized,
    ],
    ids=["mask", "descales"],
)
def test_sizes_of_options_are_symbols(call):
    """With dynamic=True so are the heads of a global mask, and the sizes of what a graph makes."""
    q, k, _ = (x.detach() for x in inputs())
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    close([compiled(q, k)], [call(q, k)])


def test_a_mask_of_arrays_is_captured():
    causal = masks.Ranges.causal(20, 24)
    q, k, v = (x.detach() for x in inputs())
    if q.is_cuda:
        causal = causal.to(q.device)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: tilewise.attention(q, k, v, mask=causal), fullgraph=True, backend="aot_eager"
    )
    close([compiled(q)], [tilewise.attention(q, k, v, causal=True)])


def test_whole_graph_varlen():
    starts = torch.tensor([0, 7, 20], dtype=torch.int32)
    q = torch.randn(20, 4, 16, requires_grad=True)

    def loss(q, starts):
        return tilewise.attention_varlen(q, q, q, starts, starts, causal=True).sin().sum()

    compiled = torch.compile(loss, fullgraph=True)
    close(torch.autograd.grad(compiled(q, starts), q), torch.autograd.grad(loss(q, starts), q))


def test_whole_graph_dropout_draws_new_bits():
    q, k, v = (x.detach() for x in inputs())
    compiled = torch.compile(
        lambda q, k, v: tilewise.attention(q, k, v, dropout_p=0.5), fullgraph=True
    )
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))
    torch.manual_seed(5)
    one = compiled(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(one, compiled(q, k, v))


def test_whole_graph_of_the_module_and_its_optimizer_step():
    from tilewise.nn import FlashAttention

    q, k, v = inputs("bhsd")
    modules = FlashAttention(16, causal=True), FlashAttention(16, causal=True)
    for module, run in zip(
        modules, (modules[0], torch.compile(modules[1], fullgraph=True)), strict=True
    ):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            run(q, k, v).square().sum().backward()
            optimizer.step()
    assert modules[0].scale.item() == pytest.approx(modules[1].scale.item(), abs=1e-5)
    assert abs(modules[0].scale.item() - 0.25) > 0.1


def test_whole_graph_under_autocast():
    q, k, v = inputs()
    compiled = torch.compile(lambda q: tilewise.attention(q, k, v), fullgraph=True)
    assert compiled(q).dtype == torch.float32
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert compiled(q).dtype == torch.bfloat16


def loss_of(q, k, v, **options):
    return tilewise.attention(q, k, v, causal=True, **options).sin().sum()


def test_func_grad():
    leaves = inputs()
    plain = [x.detach() for x in leaves]
    close(
        torch.func.grad(loss_of, argnums=(0, 1, 2))(*plain),
        torch.autograd.grad(loss_of(*leaves), leaves),
    )


def test_jacrev():
    q, k, v = (x.detach()[:1, :4] for x in inputs())

    def attend(q):
        return tilewise.attention(q, k, v)

    wanted = torch.autograd.functional.jacobian(attend, q)
    close([torch.func.jacrev(attend)(q)], [wanted])


def stacked(results):
    if isinstance(results[0], torch.Tensor):
        return [torch.stack(list(results))]
    return [torch.stack(list(column)) for column in zip(*results, strict=True)]


# Mapped and unmapped options: those that fold into the batch, and those that cannot.
MAPPED = {
    "none": lambda: ({}, {}),
    "bias": lambda: ({"bias": torch.randn(3, 1, 4, 20, 24)}, {}),
    "shared bias per sequence": lambda: ({}, {"bias": torch.randn(2, 4, 20, 24)}),
    "shared bias": lambda: ({}, {"bias": torch.randn(20, 24)}),
    "alibi": lambda: ({"alibi_slopes": torch.rand(3, 4)}, {}),
    "alibi per sequence": lambda: ({"alibi_slopes": torch.rand(3, 2, 4)}, {}),
    "shared alibi per sequence": lambda: ({}, {"alibi_slopes": torch.rand(2, 4)}),
    "sinks": lambda: ({"sinks": torch.randn(3, 4)}, {}),
    "scale": lambda: ({"scale": torch.rand(3)}, {}),
}


@pytest.mark.parametrize("name", MAPPED)
@pytest.mark.parametrize("v_dim", [None, 0, 2])
def test_vmap_equals_a_loop(name, v_dim):
    mapped, shared = MAPPED[name]()
    q, k = torch.randn(3, 2, 20, 4, 16), torch.randn(3, 2, 24, 2, 16)
    v = torch.randn(2, 24, 2, 8) if v_dim is None else torch.randn(3, 2, 24, 2, 8).movedim(0, v_dim)

    def call(q, k, v, mapped):
        return tilewise.attention(q, k, v, causal=True, **mapped, **shared)

    def loss(q, k, v, mapped):
        return call(q, k, v, mapped).sin().sum()

    options = mapped.items()
    each = [
        (
            q[i],
            k[i],
            v if v_dim is None else v.select(v_dim, i),
            {n: x[i] for n, x in options},
        )
        for i in range(3)
    ]
    in_dims = (0, 0, v_dim, 0)
    close(
        [torch.func.vmap(call, in_dims=in_dims)(q, k, v, mapped)], stacked([call(*e) for e in each])
    )
    grad = torch.func.grad(loss, argnums=(0, 1, 2))
    close(
        torch.func.vmap(grad, in_dims=in_dims)(q, k, v, mapped), stacked([grad(*e) for e in each])
    )


def appending(table=None, **options):
    """A function for vmap: (q, k_cache, v_cache, k, v, lengths or table)."""

    def call(q, k_cache, v_cache, k, v, entries):
        where = dict(cache_seqlens=entries) if table is None else dict(block_table=entries)
        return tilewise.attention_with_kvcache(
            q, k_cache, v_cache, k, v, causal=True, **dict(cache_seqlens=5) | where | options
        )

    return call


@pytest.mark.parametrize("dims", [(0, 0), (2, 1)])
@pytest.mark.parametrize("kind", ["lengths", "rotary", "pages"])
def test_vmap_of_an_append_equals_a_loop(kind, dims):
    """Elements write to separate slices of the caches, whichever dimension is mapped."""
    q, k, v = torch.randn(3, 2, 1, 4, 16), torch.randn(3, 2, 1, 2, 16), torch.randn(3, 2, 1, 2, 16)
    if kind == "pages":
        call, shape = appending(table=True), (3, 24, 8, 2, 16)
        entries = torch.stack([torch.randperm(24)[:8].view(2, 4).int() for _ in range(3)])
    else:
        angle = torch.randn(32, 8)
        rotary = dict(rotary_cos=angle.cos(), rotary_sin=angle.sin()) if kind == "rotary" else {}
        call, shape = appending(**rotary), (3, 2, 32, 2, 16)
        entries = torch.randint(0, 30, (3, 2)).int()
    starts = [torch.randn(shape) for _ in "kv"]
    looped = [x.clone() for x in starts]
    want = stacked(
        [(call(q[i], looped[0][i], looped[1][i], k[i], v[i], entries[i]),) for i in range(3)]
    )
    caches = [x.movedim(0, dim).contiguous() for x, dim in zip(starts, dims, strict=True)]
    got = torch.func.vmap(call, in_dims=(0, *dims, 0, 0, 0))(q, *caches, k, v, entries)
    close([got], want)
    for cache, dim, other in zip(caches, dims, looped, strict=True):
        assert torch.equal(cache.movedim(dim, 0), other)


def test_vmap_of_an_append_to_one_cache_is_refused():
    q, k = torch.randn(3, 2, 1, 4, 16), torch.randn(3, 2, 1, 2, 16)
    caches = torch.randn(3, 2, 32, 2, 16), torch.randn(2, 32, 2, 16)
    before = [x.clone() for x in caches]
    call = torch.func.vmap(appending(), in_dims=(0, 0, None, 0, 0, None))
    with pytest.raises(RuntimeError, match=r"v_cache is not mapped by torch\.func\.vmap"):
        call(q, *caches, k, k, torch.tensor([3, 4]).int())
    assert all(torch.equal(x, y) for x, y in zip(caches, before, strict=True))


def test_vmap_of_vmap_and_gradients_of_options_per_sample():
    q, sinks = torch.randn(2, 3, 1, 9, 2, 8), torch.randn(2, 3, 2)

    def loss(q, sinks):
        return loss_of(q, q, q, sinks=sinks)

    grad = torch.func.grad(loss, argnums=(0, 1))
    given = torch.func.vmap(torch.func.vmap(grad))(q, sinks)
    wanted = stacked([stacked([grad(q[i, j], sinks[i, j]) for j in range(3)]) for i in range(2)])
    close(given, wanted)


def test_vmap_randomness():
    q = torch.randn(1, 20, 2, 8).expand(3, 1, 20, 2, 8)

    def call(q):
        return tilewise.attention(q, q, q, dropout_p=0.5)

    different = torch.func.vmap(call, randomness="different")(q)
    assert not torch.equal(different[0], different[1])
    same = torch.func.vmap(call, randomness="same")(q)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(call)(q)


# Each is compiled as the first call of a new process. That call imports modules, which must not
# invalidate its guards.
FIRST_CALLS = {
    "attention": "attention(q, q, q, causal=True)",
    "varlen": "attention_varlen(q[0], q[0], q[0], cu, cu, causal=True)",
    "cache": "attention_with_kvcache(q, cache.clone(), cache.clone(), cache_seqlens=lengths)",
    "append": "attention_with_kvcache(q, cache, cache, k=q, v=q, cache_seqlens=lengths)",
}


@pytest.mark.parametrize("call", FIRST_CALLS)
def test_first_call_of_a_process_may_be_compiled(call):
    script = f"""
import torch, tilewise
q, cache = torch.randn(2, 9, 4, 16), torch.randn(2, 40, 4, 16)
cu, lengths = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([9, 20], dtype=torch.int32)
def run(q, cache):
    return tilewise.{FIRST_CALLS[call]}
compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
given = compiled(q, cache.clone())
assert torch.equal(given, run(q, cache.clone()))
torch._dynamo.config.error_on_recompile = True  # what the first call imported changes no guard
assert torch.equal(given, compiled(q, cache.clone()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def shapes():
    return torch.randn(1, 5, 4, 8), torch.randn(1, 6, 2, 8), torch.randn(1, 6, 2, 8)


def append_and_attend(q, k, v):
    """The new keys have a tangent as well; when rotated, q is an output of the append."""
    new, table = q[:, :1, :2], torch.ones(9, 4)
    return tilewise.attention_with_kvcache(
        q, k.clone(), v.clone(), new, new, cache_seqlens=torch.full((1,), 2, dtype=torch.int32),
        rotary_cos=table, rotary_sin=0 * table,
    )  # fmt: skip


# The first argument of each has a tangent.
WITH_TANGENTS = {
    "options": lambda q, k, v: tilewise.attention(q, k, v, softcap=3.0, window=(2, 1)),
    "keys": lambda k, q, v: tilewise.attention(q[:, :, :2], k[:, :, :2], v[:, :5], scale=0.3),
    "varlen": lambda q, k, v: tilewise.attention_varlen(
        q[0], k[0], v[0], *(torch.arange(2, dtype=torch.int32) * n for n in (5, 6))
    ),
}
# Operators, and paths to them, that have no forward mode.
WITHOUT_FORWARD_MODE = {
    "cache": lambda q, k, v: tilewise.attention_with_kvcache(q, k, v),
    "append": append_and_attend,
    "operator": lambda q, k, v: torch.ops.tilewise.forward(q, k, v, *tilewise._ops.Options())[0],
    "gradient": lambda q, k, v: torch.ops.tilewise.backward(
        q, None, q.detach(), k, v, q.detach(), q[..., 0].detach().transpose(1, 2),
        *tilewise._ops.Options(), 7,
    )[0],
}  # fmt: skip


def dual_inside(call, x, *others):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(call(dual, *others)).tangent


TANGENTS = {
    "jvp": lambda call, x, *others: torch.func.jvp(
        lambda x: call(x, *others), (x,), (torch.ones_like(x),)
    ),
    "vmap": lambda call, x, *others: torch.func.vmap(
        lambda t: torch.func.jvp(lambda x: call(x, *others), (x,), (t,))[1]
    )(torch.stack((x, x))),
    "dual": dual_inside,
}


@pytest.mark.parametrize(("call", "way"), [("keys", "vmap"), ("varlen", "dual")])
def test_tangents_are_the_same_compiled(call, way):
    if way == "dual" and torch.__version__ < "2.13":
        pytest.skip("dual tensors inside a compiled function need PyTorch 2.13")

    def run(*tensors):
        return TANGENTS[way](WITH_TANGENTS[call], *tensors)

    torch._dynamo.reset()
    tensors = shapes()
    close([torch.compile(run, backend="aot_eager")(*tensors)], [run(*tensors)])


NO_TANGENTS = "attention_with_kvcache has no forward-mode derivative, nor has an operator"


@pytest.mark.parametrize("call", WITHOUT_FORWARD_MODE)
@pytest.mark.parametrize("way", ["jvp", "dual"])
@pytest.mark.parametrize("compiled", [True, False])
def test_tangents_are_refused_eagerly_and_compiled(call, way, compiled):
    """torch.library drops the tangents of an operator's arguments and gives its results zeros."""

    def run(*tensors):
        return TANGENTS[way](WITHOUT_FORWARD_MODE[call], *tensors)

    if compiled:
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager")
    with pytest.raises(RuntimeError, match=NO_TANGENTS):
        run(*shapes())


def test_tangent_from_outside_the_compiled_function_is_right_or_refused():
    torch._dynamo.reset()
    q, k, v = shapes()
    call = torch.compile(WITH_TANGENTS["options"], backend="aot_eager")
    assert call(q, k, v).shape == q.shape

    def tangent(function):
        with forward_ad.dual_level():
            out = function(forward_ad.make_dual(q, q), k, v)
            return forward_ad.unpack_dual(out).tangent

    want = tangent(WITH_TANGENTS["options"])
    torch_versions.assert_refused_or_right(lambda: tangent(call), want, NO_TANGENTS)


def test_arguments_without_tangents_work_in_forward_mode():
    q, k, v = shapes()

    def run(q, x):
        return torch.func.jvp(lambda x: x * tilewise.attention(q, k, v), (x,), (x,))

    torch._dynamo.reset()
    out = tilewise.attention(q, k, v)
    for call in (run, torch.compile(run, backend="aot_eager")):
        close(call(q, q), (q * out, q * out))


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.hessian])
def test_torch_func_transforms_are_compiled_or_refused(transform):
    q, k, v = shapes()
    torch._dynamo.reset()

    def run(q):
        return transform(lambda q: tilewise.attention(q, k, v).square().sum())(q)

    compiled = torch.compile(run, backend="aot_eager")
    sentence = r"tilewise: .*torch\.func"
    torch_versions.assert_refused_or_right(lambda: compiled(q), run(q), sentence)


def test_append_refuses_a_tangent_before_it_writes():
    q, k, v = shapes()
    kept = k.clone()
    with pytest.raises(RuntimeError, match=NO_TANGENTS):
        torch.func.jvp(
            lambda q: tilewise.attention_with_kvcache(
                q, k, v, q[:, :1, :2], v[:, :1], cache_seqlens=2
            ),
            (q,),
            (q,),
        )
    assert torch.equal(k, kept)
