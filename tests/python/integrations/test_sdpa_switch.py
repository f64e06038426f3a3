"""PyTorch's switch for scaled_dot_product_attention: activation, deactivation, equal results."""

from __future__ import annotations

import math
from typing import Any

import pytest

import torch_versions

torch = pytest.importorskip("torch")
torch_versions.require_switch()

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812
from torch.nn.attention import (  # noqa: E402
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from tilewise.integrations import sdpa  # noqa: E402

pytestmark = pytest.mark.tensors


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions of tilewise.integrations.sdpa that PyTorch has called."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        real = getattr(sdpa, name)
        monkeypatch.setattr(
            sdpa, name, lambda *given, name=name, real=real: seen.append(name) or real(*given)
        )
    return seen


def inputs(
    rows: int = 33, keys: int = 33, heads_kv: int = 4, by_rows: bool = False
) -> list[Tensor]:
    """q, k and v [2, heads, length, 16], a shape that the device's flash backend accepts."""
    dtype = torch.bfloat16 if torch.get_default_device().type == "cuda" else torch.float32
    made = []
    for heads, length in ((4, rows), (heads_kv, keys), (heads_kv, keys)):
        x = torch.randn(2, length, heads, 16, dtype=dtype)
        x = x.transpose(1, 2) if by_rows else x.transpose(1, 2).contiguous()
        made.append(x.requires_grad_())
    return made


def results(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    """out and the gradients."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*tensors, **options)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


def exact(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    wide = [x.detach().cpu().double().requires_grad_() for x in tensors]
    mask = options.pop("attn_mask", None)
    with sdpa_kernel(SDPBackend.MATH), torch.device("cpu"):
        out = F.scaled_dot_product_attention(
            *wide, attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.double(),
            **options,
        )  # fmt: skip
        weights = torch.linspace(-1, 1, out.numel(), dtype=tensors[0].dtype).view(out.shape)
        return [out.detach(), *torch.autograd.grad(out, wide, weights.double())]


def assert_as_good(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    """At most twice PyTorch's own error (gradients: three times), plus a few roundings."""
    for i, (given, other, right) in enumerate(zip(ours, theirs, truth, strict=True)):
        floor = 4 * torch.finfo(given.dtype).eps * float(right.abs().max())
        bound = (3.0 if i else 2.0) * float((other.cpu().double() - right).abs().max()) + floor
        assert float((given.cpu().double() - right).abs().max()) <= bound
        assert given.stride() == other.stride()


@pytest.mark.parametrize("options", [{}, dict(is_causal=True), dict(scale=0.3)], ids=str)
@pytest.mark.parametrize("by_rows", [False, True])
def test_results_equal_those_of_pytorch(
    options: dict[str, Any], by_rows: bool, calls: list[str], request: pytest.FixtureRequest
) -> None:
    tensors = inputs(by_rows=by_rows)
    theirs = results(tensors, **options)
    assert not calls
    request.getfixturevalue("active")
    ours = results(tensors, **options)
    assert calls == ["forward", "backward"]
    assert_as_good(ours, theirs, exact(tensors, **options))


def test_grouped_heads(calls: list[str], request: pytest.FixtureRequest) -> None:
    tensors = inputs(heads_kv=2)
    theirs = results(tensors, enable_gqa=True)
    request.getfixturevalue("active")
    assert_as_good(results(tensors, enable_gqa=True), theirs, exact(tensors, enable_gqa=True))
    assert calls == ["forward", "backward"]


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize(("rows", "keys"), [(9, 33), (33, 9)])
def test_causality_is_aligned_top_left(
    rows: int, keys: int, calls: list[str], request: pytest.FixtureRequest
) -> None:
    tensors = inputs(rows, keys)
    theirs = results(tensors, is_causal=True)
    request.getfixturevalue("active")
    assert_as_good(results(tensors, is_causal=True), theirs, exact(tensors, is_causal=True))
    assert calls == ["forward", "backward"]


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize("kind", ["bool", "float", "bool per head"])
def test_masks(kind: str, calls: list[str], request: pytest.FixtureRequest) -> None:
    shape = (2, 4, 33, 33) if kind == "bool per head" else (33, 33)
    mask = torch.rand(shape) < 0.7
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(shape)
    tensors = inputs()
    theirs = results(tensors, attn_mask=mask)
    request.getfixturevalue("active")
    assert_as_good(results(tensors, attn_mask=mask), theirs, exact(tensors, attn_mask=mask))
    assert calls == ["forward", "backward"]


@pytest.mark.tensors("cpu")
def test_float64_falls_back_to_pytorch(active: None, calls: list[str]) -> None:
    q = torch.randn(1, 2, 9, 8, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        given = F.scaled_dot_product_attention(q, q, q)
    assert not calls
    torch.testing.assert_close(given, torch.softmax(q @ q.mT * 8**-0.5, -1) @ q)


@pytest.mark.tensors("cpu")
def test_wide_heads_fall_back_to_pytorch(active: None, calls: list[str]) -> None:
    q = torch.randn(1, 2, 9, 640)
    given = F.scaled_dot_product_attention(q, q, q)
    assert not calls
    torch.testing.assert_close(given, torch.softmax(q @ q.mT * 640**-0.5, -1) @ q)


@pytest.mark.tensors("cpu")
def test_mask_that_hides_keys_from_all_rows(active: None, calls: list[str]) -> None:
    q, k, v = torch.randn(1, 2, 7, 16), torch.randn(1, 2, 13, 16), torch.randn(1, 2, 13, 16)
    mask = torch.randn(7, 13)
    request = sdpa.Call(0.0, True, None, mask)
    given = sdpa.forward(q, k, v, request)[0]
    hidden = torch.ones(7, 13, dtype=torch.bool).triu(1)
    s = (q @ k.mT * 0.25 + mask).masked_fill(hidden, -math.inf)
    torch.testing.assert_close(given, torch.softmax(s, -1) @ v)


def test_activation_and_restoration(calls: list[str]) -> None:
    from torch.nn import attention

    assert "tilewise" in attention.list_flash_attention_impls()
    tensors = inputs()
    before = results(tensors)
    activate_flash_attention_impl("tilewise")
    assert attention.current_flash_attention_impl() == "tilewise"
    results(tensors)
    activate_flash_attention_impl("tilewise")  # activating again undoes the earlier activation
    results(tensors)
    assert calls == ["forward", "backward"] * 2
    restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None
    after = results(tensors)
    assert len(calls) == 4
    assert torch.equal(after[0], before[0])


def test_compiled(active: None, calls: list[str]) -> None:
    tensors = inputs()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    made = []
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for function in (attend, torch.compile(attend, backend="aot_eager")):
            out = function(*tensors)
            made.append([out.detach(), *torch.autograd.grad(out.float().pow(2).sum(), tensors)])
    assert calls == ["forward", "backward"] * 2
    for eager, compiled in zip(*made, strict=True):
        torch.testing.assert_close(compiled, eager)


# --- the functions of the CUDA operators, on any device -------------------------------------------


def test_functions_of_the_cuda_operators() -> None:
    q, k, v = inputs()
    out, lse, *_, rows, keys, state, _, _ = sdpa._cuda_forward(q, k, v, 0.0, True)
    assert (rows, keys) == (33, 33)
    assert lse.shape == (2, 4, 33)
    dout = torch.randn_like(out)
    grads = sdpa._cuda_backward(
        dout, q, k, v, out, lse, None, None, rows, keys, 0.0, True, state, state
    )
    truth = [x.detach().double().requires_grad_() for x in (q, k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*truth, is_causal=True)
    tolerance = 1e-5 if q.dtype == torch.float32 else 0.05
    torch.testing.assert_close(out.double(), expected.detach(), atol=tolerance, rtol=tolerance)
    for given, right in zip(
        grads, torch.autograd.grad(expected, truth, dout.double()), strict=True
    ):
        torch.testing.assert_close(given.double(), right, atol=tolerance, rtol=tolerance)


def test_backward_uses_the_dropout_of_the_forward() -> None:
    """The gradient of v is the transpose of the kept weights."""
    q, k, v = (x.detach() for x in inputs())
    units = torch.eye(33, dtype=v.dtype)[None, None].expand(2, 4, -1, -1)
    one_hot = sdpa.forward(q, k, units, sdpa.Call(0.4))
    out, lse, state = one_hot
    dropped = float((out == 0).float().mean())
    assert 0.3 < dropped < 0.5
    dout = torch.eye(33, dtype=v.dtype)[None, None].expand(2, 4, -1, -1).contiguous()
    _, _, dv = sdpa.backward(dout, q, k, units, out, lse, state.view(torch.uint64), sdpa.Call(0.4))
    assert torch.equal(dv == 0, out.mT == 0)


def test_dropout_of_a_forward_that_falls_back_is_refused():
    """Its backward would draw other bits; see the kernel of _with_fallback."""
    kernel = sdpa._with_fallback("an_operator", sdpa._cuda_forward, None)
    q, k, v = inputs()
    with pytest.raises(NotImplementedError, match=r"dropout_p 0\.5 and return_debug_mask"):
        kernel(None, q, k, v, 0.5, False, True)
    with pytest.raises(NotImplementedError, match=r"dropout_p 0\.5 and new_keyword"):
        kernel(None, q, k, v, 0.5, False, False, new_keyword=1)
    with pytest.raises(NotImplementedError, match="without return_debug_mask"):
        kernel(None, q, k, v, 0.0, False, True)
