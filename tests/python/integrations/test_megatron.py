"""Megatron-Core's layers with Tilewise's core_attention, beside its own DotProductAttention."""

from __future__ import annotations

import contextlib
import math
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from packages import quiet, real_package  # noqa: E402

real_package("megatron.core.transformer.dot_product_attention")

with quiet():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tilewise.integrations.megatron import TilewiseAttention

pytestmark = pytest.mark.tensors("cpu")

GROUPS = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))


@pytest.fixture(autouse=True)
def _megatron_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DotProductAttention takes a scratch tensor and random numbers from the GPU."""
    buffer = types.SimpleNamespace(
        get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype)
    )
    monkeypatch.setattr(parallel_state, "get_global_memory_buffer", lambda: buffer)
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext, is_initialized=lambda: False)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)


def config(**options: Any) -> Any:
    with quiet():
        return TransformerConfig(
            num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2,
            use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, **options,
        )  # fmt: skip


def module(kind: type, mask_type: AttnMaskType, **options: Any) -> Any:
    return kind(config(**options), 1, mask_type, "self", pg_collection=GROUPS)


def inputs(rows: int = 9, keys: int = 9) -> list[Tensor]:
    shapes = ((rows, 2, 4, 16), (keys, 2, 2, 16), (keys, 2, 2, 16))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def results(core: Any, tensors: list[Tensor], *given: Any, **options: Any) -> list[Tensor]:
    out = core(*tensors, *given, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


def assert_as_good(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    """At most twice Megatron's error (gradients: three times), plus a few roundings."""
    for i, (given, other, right) in enumerate(zip(ours, theirs, truth, strict=True)):
        floor = 4 * torch.finfo(torch.float32).eps * float(right.abs().max())
        bound = (3.0 if i else 2.0) * float((other.double() - right).abs().max()) + floor
        assert given.shape == other.shape
        assert float((given.double() - right).abs().max()) <= bound


def causal_mask(rows: int) -> Tensor:
    return torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)


def padding_mask() -> Tensor:
    return torch.arange(9) >= torch.tensor([9, 6]).view(2, 1, 1, 1)


@pytest.mark.parametrize(
    ("mask_type", "mask"),
    [("causal", causal_mask(9)), ("padding", padding_mask()), ("no_mask", None),
     ("arbitrary", torch.arange(81).view(1, 1, 9, 9) % 5 == 1)],
)  # fmt: skip
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_dot_product_attention(mask_type: str, mask: Tensor | None, softmax_type: str) -> None:
    kind = AttnMaskType[mask_type]
    ours = module(TilewiseAttention, kind, softmax_type=softmax_type)
    # Megatron's own module makes its offsets on a GPU only.
    theirs = module(DotProductAttention, kind)
    if softmax_type != "vanilla":
        theirs.softmax_offset = torch.nn.Parameter(ours.softmax_offset.detach().clone())
    tensors = inputs()
    wide = [x.detach().double().requires_grad_() for x in tensors]
    given = results(ours, tensors, mask, attn_mask_type=kind)
    assert_as_good(given, results(theirs, tensors, mask), results(theirs.double(), wide, mask))


def test_window_dropout_and_bias() -> None:
    core = module(TilewiseAttention, AttnMaskType.causal, window_size=(3, 0))
    q, k, v = tensors = inputs()
    bias = torch.randn(1, 4, 9, 9)
    hidden = ~(
        torch.ones(9, 9, dtype=torch.bool).tril() & torch.ones(9, 9, dtype=torch.bool).triu(-3)
    )
    heads = [x.repeat_interleave(2, dim=2) for x in (k, v)]
    s = torch.einsum("qbhd,kbhd->bhqk", q, heads[0]) / 4 + bias
    p = torch.softmax(s.masked_fill(hidden, -math.inf), -1)
    expected = torch.einsum("bhqk,kbhd->qbhd", p, heads[1]).flatten(2)
    out = core(*tensors, None, attention_bias=bias)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=0)
    core.attention_dropout = 0.5
    assert not torch.allclose(core(*tensors, None), core(*tensors, None))
    core.eval()
    assert torch.equal(core(*tensors, None), core(*tensors, None))


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences(padded: bool) -> None:
    """The format thd gives what the format sbhd gives for each sequence."""
    lengths = [5, 9]
    places = [8, 12] if padded else lengths
    starts, ends = (torch.tensor([0, *x]).cumsum(0).int() for x in (lengths, places))
    tensors = [torch.randn(sum(places), heads, 16) for heads in (4, 2, 2)]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=9,
        max_seqlen_kv=9, cu_seqlens_q_padded=ends if padded else None,
        cu_seqlens_kv_padded=ends if padded else None,
    )  # fmt: skip
    core = module(TilewiseAttention, AttnMaskType.causal)
    out = core(*tensors, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed)
    assert out.shape == (sum(places), 64)
    parts = zip(*(x.split(places) for x in (*tensors, out)), strict=True)
    for length, rows in zip(lengths, parts, strict=True):
        *qkv, given = (x[:length].unsqueeze(1) for x in rows)
        torch.testing.assert_close(given, core(*qkv, None), atol=1e-6, rtol=0)
    mask = torch.zeros(1, 1, 14, 14, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="with the type arbitrary, but packed sequences"):
        core(*tensors, mask, AttnMaskType.arbitrary, packed_seq_params=packed)


def test_refusals() -> None:
    settings = config()
    settings.context_parallel_size = 2
    with pytest.raises(NotImplementedError, match="context_parallel_size"):
        TilewiseAttention(settings, 1, AttnMaskType.causal, "self", pg_collection=GROUPS)


@pytest.mark.parametrize("option", ["qk_clip", "log_max_attention_logit"])
def test_the_largest_logits_are_kept(option: str) -> None:
    plain = module(TilewiseAttention, AttnMaskType.causal)
    core = module(TilewiseAttention, AttnMaskType.causal, **{option: True})
    assert plain.current_max_attn_logits is core.current_max_attn_logits is None
    largest = []
    for times in (1.0, 3.0, 2.0):
        q, k, v = inputs()
        q = q * times
        assert torch.equal(core(q, k, v, None), plain(q, k, v, None))
        scores = torch.einsum("ibhd,jbhd->bhij", q, k.repeat_interleave(2, dim=2))
        scores = scores / math.sqrt(q.shape[-1])
        hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
        largest.append(scores.masked_fill(hidden, -torch.inf).amax(dim=(0, 2, 3)))
        want = torch.stack(largest).amax(dim=0)
        torch.testing.assert_close(core.current_max_attn_logits, want)
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = PackedSeqParams("thd", starts, starts, None, None, 9, 9)
    tensors = [x[:, 0] for x in inputs()]
    core.current_max_attn_logits = None
    out = core(*tensors, None, packed_seq_params=packed)
    assert torch.equal(out, plain(*tensors, None, packed_seq_params=packed))
    assert core.current_max_attn_logits.shape == (4,)
    assert plain.current_max_attn_logits is None


def gpt(core_attention: type) -> Any:
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core_attention
    torch.manual_seed(3)
    with quiet():
        return GPTModel(config(), spec, vocab_size=64, max_sequence_length=16)


def test_gpt(tmp_path: Path) -> None:
    """A small GPT, trained for one step with each module."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    try:
        parallel_state.initialize_model_parallel()
        tokens = torch.randint(0, 64, (2, 16))
        made = []
        for core_attention in (TilewiseAttention, DotProductAttention):
            model = gpt(core_attention)
            loss = model(tokens, torch.arange(16).expand(2, -1), causal_mask(16), labels=tokens)
            loss.mean().backward()
            made.append([loss.detach(), *(x.grad for x in model.parameters())])
        for ours, theirs in zip(*made, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
