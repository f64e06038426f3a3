"""Models whose sequences are sharded across ranks: torch's own context_parallel over our operators,
and tilewise.distributed in a model that FSDP2 shards and whose blocks are checkpointed.

PyTorch's context_parallel handles the flash operator of CUDA alone. Here that operator gets the
functions of the switch on CPUs too, and scaled_dot_product_attention calls it; the ring, its merge
and its backward are PyTorch's. Accelerate's Accelerator and Transformers' Trainer refuse context
parallelism on CPUs, so the Llama takes the steps that they take: the hooks on its attention, FSDP2
and context_parallel around a training step.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from unittest import mock

import pytest

import torch_versions

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)
torch_versions.require_switch()

from torch.nn import functional as F  # noqa: E402, N812

import tilewise.distributed as td  # noqa: E402
from bounds import FP32_RELATIVE  # noqa: E402

ROWS, BATCH = 32, 2


def mesh_of(group):
    return torch.distributed.device_mesh.DeviceMesh.from_group(group, "cpu")


@contextlib.contextmanager
def switched(method: str = "allgather") -> Iterator[None]:
    """CUDA's flash operator runs the functions of the switch on CPUs, where
    scaled_dot_product_attention calls it.
    """
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    from tilewise.integrations import sdpa

    library = torch.library.Library("aten", "IMPL")
    for name, operator in (item for group in sdpa.GROUPS for item in group.items()):
        if operator.keys == ("CUDA",):
            library.impl(name, operator.function, "CPU", allow_override=True)
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default

    def scaled_dot_product_attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        assert attn_mask is None
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]

    set_rotate_method(method)
    try:
        with mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention):
            yield
    finally:
        library._destroy()


def ring(group, causal, method):
    """The errors of out and of the gradients of q, k and v, relative to the largest value."""
    from torch.distributed.tensor.experimental import _attention, context_parallel

    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(BATCH, h, ROWS, 8, generator=generator) for h in (4, 2, 2)]
    leaves = [x.double().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    expected.sin().sum().backward()
    _attention._cp_options.enable_load_balance = causal
    with switched(method), context_parallel(
        mesh_of(group), buffers=whole, buffer_seq_dims=[2] * 3, no_restore_buffers=set(whole)
    ):  # fmt: skip
        shards = [x.requires_grad_() for x in whole]
        out = F.scaled_dot_product_attention(*shards, is_causal=causal, enable_gqa=True)
        out.sin().sum().backward()
        parts = [out.detach(), *(x.grad for x in shards)]
        got = _attention.context_parallel_unshard(mesh_of(group), parts, [2] * 4)
    want = [expected.detach(), *(x.grad for x in leaves)]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("method", ["allgather", "alltoall"])
@pytest.mark.parametrize("causal", [True, False])
def test_torchs_context_parallel(pool, causal, method):
    for errors in pool.run(2, ring, causal, method):
        assert max(errors) < FP32_RELATIVE, errors


def on_cpus(group):
    from torch.distributed.tensor.experimental import context_parallel

    x = torch.randn(1, 2, ROWS, 8)
    try:
        with context_parallel(mesh_of(group), buffers=[x], buffer_seq_dims=[2]):
            F.scaled_dot_product_attention(x, x, x, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "no error"


def test_what_stops_torchs_context_parallel_on_cpus(pool):
    """docs/distributed.md says so: change it when this fails."""
    for text in pool.run(2, on_cpus):
        assert "_scaled_dot_product_flash_attention_for_cpu.default does not have a shard" in text


def batches() -> Iterator[tuple]:
    """Tokens, labels and positions of training steps."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        tokens = torch.randint(0, 64, (BATCH, ROWS), generator=generator)
        labels = F.pad(tokens, (0, 1), value=-100)[:, 1:].contiguous()
        yield tokens, labels, torch.arange(ROWS).expand(BATCH, -1).contiguous()


def loss_of(logits, labels):
    """This rank's part of the mean over the whole batch."""
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss / (BATCH * (ROWS - 1))


def train(model, group, loss_of_batch) -> list[float]:
    """The losses of training steps, of all ranks together; FSDP2 averages gradients over ranks."""
    world = torch.distributed.get_world_size(group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for batch in batches():
        with loss_of_batch(batch) as loss:
            (loss * world).backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        losses.append(float(total))
    return losses


def llama(group, sharded):
    """The losses of a Llama, on one rank or cut as Accelerate cuts it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa",
    ))  # fmt: skip
    if sharded:
        importlib.import_module("accelerate.big_modeling")._attach_context_parallel_hooks(model)
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh_of(group))
        _attention._cp_options.enable_load_balance = True

    @contextlib.contextmanager
    def loss_of_batch(batch):
        tokens, labels, positions = batch
        cut = contextlib.nullcontext()
        if sharded:
            cut = context_parallel(
                mesh_of(group), buffers=[*batch], buffer_seq_dims=[1] * 3,
                no_restore_buffers=set(batch),
            )  # fmt: skip
        with switched() if sharded else contextlib.nullcontext(), cut:
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            yield loss_of(logits, labels)

    return train(model, group, loss_of_batch)


def test_llama_over_torchs_context_parallel(pool):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    (expected,) = pool.run(1, llama, False)
    for losses in pool.run(2, llama, True):
        assert losses == pytest.approx(expected, rel=1e-6)


class Block(torch.nn.Module):
    """Attention over the ranks of a group, maybe computed again in the backward, and a sum."""

    def __init__(self, group, again: bool) -> None:
        super().__init__()
        self.group, self.again = group, again
        self.qkv, self.out = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        return x + (checkpoint(self.attend, x, use_reentrant=False) if self.again else
                    self.attend(x))  # fmt: skip

    def attend(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, 4, 8)).unbind(2)
        attended = td.attention(q, k, v, causal=True, dropout_p=0.2, group=self.group)
        return self.out(attended.flatten(2))


def blocks(group, sharded):
    """The losses of a model of two blocks, on one rank or cut, sharded and checkpointed."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(64, 32),
        *(Block(group, sharded) for _ in range(2)),
        torch.nn.Linear(32, 64),
    )
    if sharded:
        for module in (model[1], model[2], model):
            fully_shard(module, mesh=mesh_of(group))
        assert isinstance(model[1].qkv.weight, torch.distributed.tensor.DTensor)

    @contextlib.contextmanager
    def loss_of_batch(batch):
        tokens, labels, _ = (td.shard(x, 1, layout="zigzag", group=group) for x in batch)
        yield loss_of(model(tokens), labels)

    return train(model, group, loss_of_batch)


def test_fsdp_and_checkpointing(pool):
    (expected,) = pool.run(1, blocks, False)
    for losses in pool.run(2, blocks, True):
        assert losses == pytest.approx(expected, rel=1e-6)


def compiled(group):
    """Whether a compiled model computes the same, and how often its graph breaks."""
    torch.manual_seed(0)
    block, results = Block(group, again=False), []
    x = td.shard(torch.randn(BATCH, ROWS, 32), 1, layout="zigzag", group=group)
    breaks = torch._dynamo.explain(block.attend)(x).graph_break_count
    for model in (block, torch.compile(block, backend="eager")):
        torch.manual_seed(3)
        block.zero_grad()
        out = model(x)
        out.sin().sum().backward()
        results.append([out, *(p.grad.clone() for p in block.parameters())])
    return breaks, all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_graphs_break_at_the_call_alone(pool):
    assert pool.run(2, compiled) == [(1, True)] * 2


class Heads(torch.nn.Module):
    """Attention whose heads tensor parallelism may cut, over the ranks of a mesh."""

    def __init__(self, mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.q, self.k, self.v, self.out = (torch.nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).unflatten(2, (-1, 8)) for f in (self.q, self.k, self.v))
        out = td.attention(q, k, v, causal=True, mesh=self.mesh, tensor_layout="bshd")
        return self.out(out.flatten(2))


def tensor_parallel(group, cut):
    """out of all rows, and the gradient of q's weight, on one rank or on 2 x 2."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))
    group = mesh["cp"].get_group() if cut else group
    model = Heads(mesh["cp"] if cut else None)
    x = torch.randn(BATCH, ROWS, 32)
    if not cut:
        q, k, v = (f(x).unflatten(2, (-1, 8)).transpose(1, 2) for f in (model.q, model.k, model.v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = model.out(out.transpose(1, 2).flatten(2))
        out.sin().sum().backward()
        return out.detach(), model.q.weight.grad
    plan = {name: ColwiseParallel() for name in "qkv"} | {"out": RowwiseParallel()}
    model = parallelize_module(model, mesh["tp"], plan)
    out = model(td.shard(x, 1, layout="zigzag", group=group))
    out.sin().sum().backward()
    grad = model.q.weight.grad.full_tensor()
    torch.distributed.all_reduce(grad, group=group)
    return td.unshard(out.detach(), 1, layout="zigzag", size=ROWS, group=group), grad


def test_tensor_parallel_meshes(pool):
    (out, grad), *_ = pool.run(4, tensor_parallel, False)
    for got, its_grad in pool.run(4, tensor_parallel, True):
        assert torch.allclose(got, out, atol=1e-6)
        assert torch.allclose(its_grad, grad, atol=1e-5)
