"""Dense bool masks that become blocks in PyTorch's switch of ``scaled_dot_product_attention``."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import torch_versions

torch = pytest.importorskip("torch")
torch_versions.require_switch()

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.attention import (  # noqa: E402
    SDPBackend,
    sdpa_kernel,
)

import devices  # noqa: E402
from tilewise._block_lists import visible_share  # noqa: E402
from tilewise.integrations import _bool_masks, sdpa  # noqa: E402

pytestmark = [pytest.mark.usefixtures("as_on_a_cpu", "active"), pytest.mark.tensors]

LENGTH = 1024


@pytest.fixture
def as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks become blocks on every device, by the costs of a CPU: on a GPU these are too small."""
    monkeypatch.setattr(_bool_masks, "_on_gpus", True)
    monkeypatch.setattr(_bool_masks, "_costs", lambda *_: _bool_masks._ON_CPU)


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the masks that were converted."""
    seen: list[tuple[int, ...]] = []
    real = _bool_masks.masks.from_bool
    monkeypatch.setattr(
        _bool_masks.masks, "from_bool", lambda m: seen.append(tuple(m.shape)) or real(m)
    )
    return seen


@pytest.fixture
def biased(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the CPU's flash backend, which takes masks as numbers."""
    seen: list[Any] = []
    real = sdpa.forward
    monkeypatch.setattr(sdpa, "forward", lambda *given: seen.append(given[-1]) or real(*given))
    return seen


def documents(length: int = LENGTH) -> Tensor:
    """bool [length, length]: causal documents of 300 tokens, of which some see no token."""
    number = torch.arange(length) // 300
    seen = (number[:, None] == number) & torch.ones(length, length, dtype=torch.bool).tril()
    seen[40:50] = False
    return seen


def without_empty_rows() -> Tensor:
    """The same, but every row sees a token: others get numbers from CUDA kernels of PyTorch."""
    return documents() | torch.eye(LENGTH, dtype=torch.bool)


def inputs(length: int = LENGTH, by_rows: bool = False) -> list[Tensor]:
    """q, k and v [2 sequences, 2 heads, length, 8], in a dtype of the device's flash backend."""
    torch.manual_seed(2)
    dtype = torch.bfloat16 if torch.get_default_device().type == "cuda" else torch.float32
    sizes = (3, 2, length, 2, 8) if by_rows else (3, 2, 2, length, 8)
    made = torch.randn(*sizes, dtype=dtype)
    return [(x.transpose(1, 2) if by_rows else x).requires_grad_() for x in made]


def exact(tensors: list[Tensor], mask: Tensor, scale: float = 8**-0.5) -> list[Tensor]:
    """out and the gradients of its squares, in fp64; rows that see nothing are 0."""
    q, k, v = wide = [x.detach().double().requires_grad_() for x in tensors]
    weights = (q @ k.mT * scale).masked_fill(~mask, -torch.inf).softmax(-1).nan_to_num(0.0)
    out = torch.where(mask.any(-1, keepdim=True), weights, 0.0) @ v
    kept = mask.any(-1).expand(out.shape[:3])
    grads = torch.autograd.grad(out[kept].square().sum(), wide)
    return [out.detach(), *(x.nan_to_num(0.0) for x in grads)]


def assert_close(given: Tensor, right: Tensor, fp32: float = 2e-6) -> None:
    scale = max(1.0, float(right.abs().max()))
    bound = fp32 if given.dtype == torch.float32 else 2e-2 * scale
    torch.testing.assert_close(given.double(), right, atol=bound, rtol=bound)


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("shape", ["", "1 1", "2 2", "expanded"])
def test_a_sparse_mask_is_computed_as_blocks(
    shape: str, by_rows: bool, conversions: list[Any], biased: list[Any]
) -> None:
    mask = documents()
    if shape == "expanded":
        mask, expected = mask.expand(2, 2, -1, -1), (1, 1, LENGTH, LENGTH)
    else:
        sizes = [int(size) for size in shape.split()]
        mask = mask.repeat(*sizes, 1, 1)
        expected = (*([1] * (2 - len(sizes))), *sizes, LENGTH, LENGTH)
    tensors = inputs(by_rows=by_rows)
    out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    assert conversions == [expected] and not biased
    for given, right in zip([out.detach(), *grads], exact(tensors, mask), strict=True):
        assert_close(given, right)
    assert out.stride() == tensors[0].stride()


def test_a_mask_is_converted_once_and_again_when_it_changes(conversions: list[Any]) -> None:
    mask, tensors = documents(), inputs()
    outs = [F.scaled_dot_product_attention(*tensors, attn_mask=mask) for _ in range(3)]
    assert len(conversions) == 1 and torch.equal(outs[0], outs[2])
    mask[0:8, 0:8] = True
    changed = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert len(conversions) == 2
    assert_close(changed, exact(tensors, mask)[0])
    mask[:, 4:].logical_and_(documents()[:, 4:])  # a write through a view
    F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert len(conversions) == 3
    F.scaled_dot_product_attention(*(x[:1, :1] for x in tensors), attn_mask=mask)
    assert len(conversions) == 4  # the decision depends on the heads that share a matrix


def test_blocks_are_forgotten_with_their_mask() -> None:
    mask = documents()
    before = len(_bool_masks._known)
    F.scaled_dot_product_attention(*inputs(), attn_mask=mask)
    assert len(_bool_masks._known) == before + 1
    del mask
    gc.collect()
    assert len(_bool_masks._known) == before


def test_masks_without_a_version_are_converted_each_time(conversions: list[Any]) -> None:
    with torch.inference_mode():
        mask, tensors = documents(), [x.detach() for x in inputs()]
        first = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
        mask[:] = mask.flip(0).flip(1)
        second = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    # On a GPU such masks stay a bias.
    assert len(conversions) == (0 if mask.is_cuda else 2) and not torch.equal(first, second)


def test_other_masks_stay_a_bias(conversions: list[Any], biased: list[Any]) -> None:
    short, dense = documents(512), torch.ones(2, 2, LENGTH, LENGTH, dtype=torch.bool)
    padding = torch.ones(2, 1, 1, LENGTH, dtype=torch.bool)
    numbers = torch.where(documents(), 0.0, -10.0).to(inputs()[0].dtype)
    for tensors, mask in (
        (inputs(512), short), (inputs(), dense), (inputs(), padding), (inputs(), numbers),
    ):  # fmt: skip
        biased.clear()
        F.scaled_dot_product_attention(*tensors, attn_mask=mask)
        assert len(biased) == (not tensors[0].is_cuda) and not conversions
    biased.clear()
    on_cuda = [SDPBackend.EFFICIENT_ATTENTION] if inputs()[0].is_cuda else []
    for backend in (SDPBackend.MATH, *on_cuda):  # the caller excludes the flash backend
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(*inputs(), attn_mask=documents())
    assert not biased and not conversions


def test_no_sequences() -> None:
    q, seen = torch.zeros(0, 2, LENGTH, 8), torch.ones(0, 1, LENGTH, LENGTH, dtype=torch.bool)
    assert F.scaled_dot_product_attention(q, q, q, attn_mask=seen).shape == q.shape


def test_a_transform_takes_the_mask_as_numbers(conversions: list[Any]) -> None:
    mask, tensors = without_empty_rows(), [x.detach() for x in inputs()]

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)
    assert not conversions
    for given, right in zip(got, exact(tensors, mask)[1:], strict=True):
        assert_close(given, right, fp32=1e-4)  # PyTorch's own attention


def test_a_compiled_graph_takes_the_mask_as_numbers(conversions: list[Any]) -> None:
    mask, tensors = without_empty_rows(), inputs()
    compiled = torch.compile(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    out = compiled(*tensors, mask)
    assert not conversions
    assert_close(out, exact(tensors, mask)[0])


@pytest.mark.tensors("cuda")
def test_a_captured_graph_reads_its_mask_when_it_is_replayed(
    conversions: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask, tensors = without_empty_rows(), [x.detach() for x in inputs()]
    with monkeypatch.context() as as_a_bias:
        as_a_bias.setattr(_bool_masks, "_on_gpus", False)  # cuDNN cannot start inside a capture
        F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    assert len(conversions) == 1
    with devices.captured() as graph:
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    mask[:512] = True
    graph.replay()
    assert len(conversions) == 1
    assert_close(out, exact(tensors, mask)[0])


def test_the_share_of_visible_blocks() -> None:
    mask = documents()
    blocks = _bool_masks.masks.from_bool(mask)
    share = visible_share(mask[None, None].cpu().numpy())
    assert share == pytest.approx((blocks.tiles() > 0).mean())
    ragged = torch.zeros(1, 2, 200, 300, dtype=torch.bool)
    ragged[0, 1, 199, 299] = True
    assert visible_share(ragged.cpu().numpy()) == pytest.approx(1 / 12)


@pytest.mark.tensors("cpu")
def test_when_converting_pays_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the times of an H200: sparse masks of many heads; with mma_sync, sparser ones."""
    causal = torch.ones(8192, 8192, dtype=torch.bool).tril()[None, None]
    sparse = causal & (torch.arange(8192)[:, None] // 1000 == torch.arange(8192) // 1000)
    everything = torch.ones_like(causal)
    paying = {}
    for costs in ("_ON_HOPPER", "_ON_MMA_SYNC"):
        monkeypatch.setattr(_bool_masks, "_costs", lambda *_, c=costs: getattr(_bool_masks, c))
        paying[costs] = [
            [_bool_masks._pays(m, heads, 128) for heads in (32, 128, 512)]
            for m in (sparse, causal, everything)
        ]
    assert paying["_ON_HOPPER"] == [[False, True, True], [False, True, True], [False] * 3]
    assert paying["_ON_MMA_SYNC"] == [[False, True, True], [False] * 3, [False] * 3]


@pytest.mark.tensors("cpu")
def test_blocks_made_for_an_evaluation_serve_a_training(conversions: list[Any]) -> None:
    mask, tensors = documents(), inputs()
    with torch.inference_mode():
        F.scaled_dot_product_attention(*(x.detach() for x in tensors), attn_mask=mask)
    out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    assert len(conversions) == 1
    for given, right in zip([out.detach(), *grads], exact(tensors, mask), strict=True):
        assert_close(given, right)


def test_a_recorded_graph_takes_the_mask_as_numbers(conversions: list[Any]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    tensors, mask = [x.detach() for x in inputs()], without_empty_rows()
    graph = make_fx(lambda q, m: F.scaled_dot_product_attention(q, *tensors[1:], attn_mask=m))(
        tensors[0], mask
    )
    assert not conversions
    other = mask.flip(0) | torch.eye(LENGTH, dtype=torch.bool)
    assert_close(graph(tensors[0], other), exact(tensors, other)[0], fp32=1e-4)


def test_a_selective_checkpoint_computes_what_it_has_computed() -> None:
    from torch.utils import checkpoint

    def policy(_context: Any, op: Any, *_args: Any, **_options: Any) -> Any:
        saved = op in (torch.ops.aten.cat.default, torch.ops.aten.sum.dim_IntList)
        choice = checkpoint.CheckpointPolicy
        return choice.MUST_SAVE if saved else choice.PREFER_RECOMPUTE

    def block(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=m)
        return torch.cat([out, out], -1).sum(-1, keepdim=True)

    mask, tensors = without_empty_rows(), inputs()
    out = checkpoint.checkpoint(
        block, *tensors, mask, use_reentrant=False,
        context_fn=lambda: checkpoint.create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    grads = torch.autograd.grad(out.square().sum(), tensors)
    want = torch.autograd.grad(block(*tensors, mask).square().sum(), tensors)
    for given, right in zip(grads, want, strict=True):
        assert_close(given, right.double(), fp32=1e-3)


def test_masks_with_any_strides(conversions: list[Any]) -> None:
    tensors = inputs()
    for mask in (
        documents().unsqueeze(-1).movedim(-1, 0)[None],
        documents()[:, :, None, None].permute(2, 3, 0, 1),
        torch.cat([documents(), documents()], 1)[:, 1::2][:, :LENGTH],
    ):
        conversions.clear()
        out = F.scaled_dot_product_attention(*tensors, attn_mask=mask)
        assert len(conversions) == 1
        seen = mask.reshape(LENGTH, LENGTH).any(-1)
        assert_close(out[..., seen, :], exact(tensors, mask)[0][..., seen, :])


@pytest.mark.tensors("cpu")
def test_what_pytorch_decides_is_left_to_it() -> None:
    """Its own results and errors, where ours would be others."""
    seen = documents()
    empty = torch.zeros(1, 2, LENGTH, 0)
    assert F.scaled_dot_product_attention(empty, empty, empty, attn_mask=seen).shape == empty.shape
    keys = torch.zeros(1, 2, LENGTH, 8)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(torch.zeros(()), keys, keys)


@pytest.mark.tensors("cpu")
def test_masks_on_gpus_takes_a_bool(as_on_a_cpu: None) -> None:
    for taken in (False, True):
        sdpa.masks_on_gpus(taken)
        assert _bool_masks.taken_on_gpus() is taken
    with pytest.raises(TypeError, match="taken is 'no', but must be True or False"):
        sdpa.masks_on_gpus("no")  # type: ignore[arg-type]
    assert _bool_masks.taken_on_gpus()
