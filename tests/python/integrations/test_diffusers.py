"""Diffusers' attention backend "tilewise": masks, gradients, small models, context parallelism."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from packages import real_package  # noqa: E402

real_package("diffusers")
real_package("diffusers.models.attention_dispatch")

from diffusers import (  # noqa: E402
    AttentionBackendName,
    FluxTransformer2DModel,
    WanTransformer3DModel,
    attention_backend,
)
from diffusers.models.attention_dispatch import dispatch_attention_fn  # noqa: E402

import tilewise.integrations.diffusers as backend  # noqa: E402

pytestmark = pytest.mark.tensors("cpu")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the queries that Tilewise has computed."""
    seen: list[tuple[int, ...]] = []
    real = backend._prepared
    monkeypatch.setattr(
        backend, "_prepared", lambda *given: seen.append(given[0].shape) or real(*given)
    )
    return seen


def inputs(heads_kv: int = 4, keys: int = 13) -> list[Tensor]:
    shapes = ((2, 9, 4, 16), (2, keys, heads_kv, 16), (2, keys, heads_kv, 16))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def results(tensors: list[Tensor], name: str, **options: Any) -> list[Tensor]:
    out = dispatch_attention_fn(*tensors, backend=AttentionBackendName(name), **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


def assert_as_good(tensors: list[Tensor], **options: Any) -> None:
    """At most twice the error of Diffusers' native backend (gradients: three times)."""
    ours, native = (results(tensors, name, **options) for name in ("tilewise", "native"))
    wide = {
        x: y.double() if isinstance(y, Tensor) and y.is_floating_point() else y
        for x, y in options.items()
    }
    truth = results([x.detach().double().requires_grad_() for x in tensors], "native", **wide)
    for i, (given, other, right) in enumerate(zip(ours, native, truth, strict=True)):
        floor = 4 * torch.finfo(torch.float32).eps * float(right.abs().max())
        bound = (3.0 if i else 2.0) * float((other.double() - right).abs().max()) + floor
        assert float((given.double() - right).abs().max()) <= bound


@pytest.mark.parametrize("mask", ["none", "bool", "added", "keys"])
def test_results_are_those_of_the_native_backend(mask: str, calls: list[Any]) -> None:
    shapes = dict(bool=(2, 1, 9, 13), added=(2, 4, 9, 13), keys=(2, 13))
    attn_mask = None
    if mask != "none":
        attn_mask = torch.randn(shapes[mask])
        if mask != "added":
            attn_mask = attn_mask < 0.8
            attn_mask[..., 0] = True
    assert_as_good(inputs(), attn_mask=attn_mask, scale=0.3)
    assert calls


def test_causal_and_grouped_heads(calls: list[Any]) -> None:
    assert_as_good(inputs(heads_kv=2, keys=9), is_causal=True, enable_gqa=True)
    assert calls
    with pytest.raises(NotImplementedError, match="is_causal with 9 rows and 13 keys"):
        results(inputs(), "tilewise", is_causal=True)


def wan() -> tuple[Any, dict[str, Any]]:
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    given = dict(
        hidden_states=torch.randn(1, 4, 2, 8, 8), timestep=torch.tensor([300]),
        encoder_hidden_states=torch.randn(1, 12, 16),
    )  # fmt: skip
    return model, given


def flux() -> tuple[Any, dict[str, Any]]:
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    given = dict(
        hidden_states=torch.randn(2, 16, 4), encoder_hidden_states=torch.randn(2, 12, 32),
        pooled_projections=torch.randn(2, 32), timestep=torch.tensor([0.3, 0.7]),
        img_ids=torch.randn(16, 3), txt_ids=torch.randn(12, 3),
    )  # fmt: skip
    return model, given


@pytest.mark.parametrize("make", [wan, flux])
def test_models(make: Callable[[], tuple[Any, dict[str, Any]]], calls: list[Any]) -> None:
    """A small model of random weights, by the context manager and by its own switch."""
    model, given = make()
    with torch.no_grad():
        native = model(**given).sample
        assert not calls
        with attention_backend("tilewise"):
            ours = model(**given).sample
        exact = model.double()(
            **{x: y.double() if y.is_floating_point() else y for x, y in given.items()}
        ).sample
    assert calls
    bound = 2 * (native.double() - exact).abs().max() + 1e-6 * exact.abs().max()
    assert (ours.double() - exact).abs().max() <= bound


def test_switch_of_a_model(calls: list[Any]) -> None:
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    model, given = flux()
    before = _AttentionBackendRegistry._active_backend
    try:
        model.set_attention_backend("tilewise")
        model(**given).sample.sum().backward()
    finally:
        _AttentionBackendRegistry.set_active_backend(before)
    assert len(calls) == 2
    assert all(x.grad is not None for x in model.parameters())


def test_functions_of_context_parallelism() -> None:
    """As the ring calls them: keys in two parts, and gradients from the total results."""
    q, k, v = tensors = inputs(keys=14)
    expected = results(tensors, "native")
    dout = torch.linspace(-1, 1, expected[0].numel()).view(expected[0].shape)
    ctx = types.SimpleNamespace()
    ctx.save_for_backward = lambda *saved: setattr(ctx, "saved_tensors", saved)
    q, k, v = (x.detach() for x in tensors)
    parts = list(zip(k.chunk(2, 1), v.chunk(2, 1), strict=True))
    made = [
        backend._forward_op(ctx, q, *part, return_lse=True, _save_ctx=i == 0)
        for i, part in enumerate(parts)
    ]
    (out_a, lse_a), (out_b, lse_b) = made
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    out = out_a - share * (out_a - out_b)
    lse = torch.logaddexp(lse_a, lse_b)
    torch.testing.assert_close(out, expected[0])
    grads = [
        backend._backward_op(ctx, dout, query=q, key=a, value=b, out=out, lse=lse) for a, b in parts
    ]
    torch.testing.assert_close(grads[0][0] + grads[1][0], expected[1])
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([grads[0][i], grads[1][i]], 1), expected[i + 1])


def test_a_mask_with_the_ring_is_refused() -> None:
    """The ring would apply it to the keys of every rank."""
    q, k, v = (x.detach() for x in inputs())
    ring = types.SimpleNamespace(context_parallel_config=types.SimpleNamespace(ring_degree=2))
    with pytest.raises(NotImplementedError, match="attn_mask is given, but must be None with ring"):
        backend._forward_op(None, q, k, v, torch.zeros(1, 1, 1, 13), _parallel_config=ring)


RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

torch.set_num_threads(1)
rank, rendezvous, degrees = int(sys.argv[1]), sys.argv[2], tuple(map(int, sys.argv[3].split(",")))
dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)

import tilewise.integrations.diffusers
from diffusers import AttentionBackendName, ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import dispatch_attention_fn

mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("ring", "ulysses"))
ring = ContextParallelConfig(ring_degree=degrees[0], ulysses_degree=degrees[1])
ring.setup(rank, 2, torch.device("cpu"), mesh)
config = ParallelConfig(context_parallel_config=ring)

torch.manual_seed(1)
tensors = [torch.randn(2, 12, 4, 16, requires_grad=True) for _ in range(3)]
dout = torch.randn(2, 12, 4, 16)
expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in tensors))
expected = expected.transpose(1, 2)
wanted = [expected.detach(), *torch.autograd.grad(expected, tensors, dout)]
shards = [x.detach().chunk(2, 1)[rank].clone().requires_grad_() for x in tensors]
out = dispatch_attention_fn(
    *shards, backend=AttentionBackendName("tilewise"), parallel_config=config
)
given = [out.detach(), *torch.autograd.grad(out, shards, dout.chunk(2, 1)[rank])]
for ours, right in zip(given, wanted, strict=True):
    torch.testing.assert_close(ours, right.chunk(2, 1)[rank], atol=1e-5, rtol=0)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("degrees", ["2,1", "1,2"], ids=["ring", "ulysses"])
def test_context_parallelism_of_two_processes(degrees: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "rendezvous"), degrees], env=environment,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in ranks:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error


def test_the_name_is_a_backend_of_diffusers() -> None:
    assert AttentionBackendName("tilewise").value == "tilewise"
    assert "tilewise" in {x.value for x in AttentionBackendName}
    backend.register()  # again: nothing changes
    assert [x.value for x in AttentionBackendName].count("tilewise") == 1
