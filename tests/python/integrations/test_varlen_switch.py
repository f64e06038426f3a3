"""torch.nn.attention.varlen on Tilewise: PyTorch's switch for aten::_flash_attention_*."""

from __future__ import annotations

from typing import Any

import pytest

import torch_versions

torch = pytest.importorskip("torch")
torch_versions.require_switch()

from torch import Tensor  # noqa: E402
from torch.nn.attention import (  # noqa: E402
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    varlen,
)

from compat_reference import visible  # noqa: E402
from tilewise.integrations import sdpa  # noqa: E402

pytestmark = pytest.mark.tensors

ROWS, KEYS = [7, 0, 13], [9, 4, 20]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def inputs(heads_kv: int = 4) -> list[Tensor]:
    shapes = ((sum(ROWS), 4, 16), (sum(KEYS), heads_kv, 16), (sum(KEYS), heads_kv, 16))
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def sequences() -> tuple[Any, ...]:
    return starts(ROWS), starts(KEYS), max(ROWS), max(KEYS)


def plain(tensors: list[Tensor], window: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Out, lse [heads, rows] and the gradients of out, on the CPU."""
    wide = [x.detach().cpu().to(dtype).requires_grad_() for x in tensors]
    outs, lses = [], []
    for q, k, v in zip(wide[0].split(ROWS), wide[1].split(KEYS), wide[2].split(KEYS), strict=True):
        k, v = (x.repeat_interleave(4 // x.shape[1], dim=1) for x in (k, v))
        with torch.device("cpu"):
            hidden = ~visible(q.shape[0], k.shape[0], window)
        s = (torch.einsum("qhd,khd->hqk", q, k) * 0.25).masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", torch.softmax(s, -1), v))
        lses.append(torch.logsumexp(s, -1))
    out = torch.cat(outs)
    return [out.detach(), torch.cat(lses, 1), *torch.autograd.grad(out, wide, weights(out))]


def weights(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view(out.shape)


def assert_as_good(given: list[Tensor], tensors: list[Tensor], window: tuple[int, int]) -> None:
    """At most twice the error of dense attention (gradients: three times), plus a few roundings."""
    truth, dense = (plain(tensors, window, x) for x in (torch.float64, torch.float32))
    for i, (ours, other, right) in enumerate(zip(given, dense, truth, strict=True)):
        floor = 4 * torch.finfo(torch.float32).eps * float(right.abs().max())
        bound = (3.0 if i > 1 else 2.0) * float((other.double() - right).abs().max()) + floor
        assert float((ours.cpu().double() - right).abs().max()) <= bound


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)])
@pytest.mark.parametrize("heads_kv", [4, 2])
def test_varlen_attn(window: tuple[int, int], heads_kv: int, active: None) -> None:
    tensors = inputs(heads_kv)
    options = dict(window_size=window, return_aux=varlen.AuxRequest(lse=True))
    if heads_kv != 4:
        if "enable_gqa" not in varlen.varlen_attn.__kwdefaults__:
            pytest.skip("PyTorch 2.11 has no grouped heads here")
        options["enable_gqa"] = True
    out, lse = varlen.varlen_attn(*tensors, *sequences(), **options)
    grads = torch.autograd.grad(out, tensors, weights(out))
    assert_as_good([out.detach(), lse.detach(), *grads], tensors, window)


def test_compiled(active: None) -> None:
    tensors, where = inputs(), sequences()

    def attend(*tensors: Tensor) -> Tensor:
        return varlen.varlen_attn(*tensors, *where, window_size=(-1, 0))

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    made = []
    for function in (attend, compiled):
        out = function(*tensors)
        made.append([out.detach(), *torch.autograd.grad(out, tensors, weights(out))])
    for eager, given in zip(*made, strict=True):
        torch.testing.assert_close(given, eager)


def test_pages_and_given_output(active: None) -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("PyTorch 2.11 has no pages and no given output")
    q, k, v = (x.detach() for x in inputs())
    expected = varlen.varlen_attn(q, k, v, *sequences())
    table = torch.tensor([[4, 0, 5], [1, 0, 0], [2, 6, 3]], dtype=torch.int32)
    pages = [torch.zeros(7, 8, 4, 16) for _ in range(2)]
    for x, packed in zip(pages, (k, v), strict=True):
        for b, keys in enumerate(packed.split(KEYS)):
            for j in range(len(keys)):
                x[table[b, j // 8], j % 8] = keys[j]
    options = dict(seqused_k=torch.tensor(KEYS, dtype=torch.int32), block_table=table, num_splits=1)
    where = (starts(ROWS), None, max(ROWS), max(KEYS))
    out = varlen.varlen_attn(q, *pages, *where, **options)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)
    given = torch.full_like(q, torch.nan)
    assert varlen.varlen_attn_out(given, q, *pages, *where, **options) is given
    assert torch.equal(given, out)


def test_equal_lengths_and_slopes(active: None) -> None:
    """Without cum_seq_q, tensors are [batch, rows, heads, head_dim]; results keep q's order."""
    q = torch.randn(2, 4, 9, 16).transpose(1, 2)
    k, v = (torch.randn(2, 9, 4, 16) for _ in range(2))
    slopes = torch.rand(4)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, 9, 9, 0.0, True, False, alibi_slopes=slopes
    )
    assert out.stride() == q.stride()
    distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25 - slopes[:, None, None] * distance
    s = s.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(s, -1))
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v))


def test_backward_uses_the_dropout_of_the_forward(active: None) -> None:
    """The gradient of v is the transpose of the kept weights."""
    q, k = (torch.randn(40, 2, 40) for _ in range(2))
    units = torch.eye(40)[:, None].repeat(1, 2, 1).requires_grad_()
    cu = starts([40])
    operator = torch.ops.aten._flash_attention_forward
    p, _, state, _, _ = operator(q, k, units, cu, cu, 40, 40, 0.4, False, False)
    assert state.dtype == torch.uint64
    assert 0.3 < float((p == 0).float().mean()) < 0.5
    (dv,) = torch.autograd.grad(p, units, torch.eye(40)[:, None].repeat(1, 2, 1))
    assert torch.equal(dv.permute(1, 0, 2) == 0, p.permute(1, 2, 0) == 0)


@pytest.mark.tensors("cpu")
def test_calls_that_only_pytorch_could_run(active: None) -> None:
    x, cu = torch.randn(9, 2, 16, dtype=torch.float64), starts([9])
    with pytest.raises(NotImplementedError, match="no kernel of PyTorch for the CPU"):
        varlen.varlen_attn(x, x, x, cu, cu, 9, 9)
    restore_flash_attention_impl()
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(x.float(), x.float(), x.float(), cu, cu, 9, 9)


@pytest.mark.tensors("cpu")
def test_arguments_that_would_be_ignored(active: None) -> None:
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 7, 4, 16)
    operator, used = torch.ops.aten._flash_attention_forward, torch.tensor([3, 7]).int()
    with pytest.raises(ValueError, match="seqused_k is given, but must be None without cum_seq_q"):
        operator(q, k, k, None, None, 5, 7, 0.0, False, False, seqused_k=used)
    with pytest.raises(ValueError, match="value has head dimension 8, but must have 16"):
        operator(q, k, k[..., :8], None, None, 5, 7, 0.0, False, False)
    if hasattr(varlen, "varlen_attn_out"):
        q, k, cu = torch.randn(5, 4, 16), torch.randn(7, 4, 16), starts([5])
        with pytest.raises(ValueError, match=r"out has shape \[3, 5, 4, 16\]"):
            varlen.varlen_attn_out(q.new_empty(3, 5, 4, 16), q, k, k, cu, starts([7]), 5, 7)


# --- schemas --------------------------------------------------------------------------------------

_QKV = "Tensor query, Tensor key, Tensor value"
_SEQUENCES = (
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, "
    "float? scale=None, SymInt? window_size_left=None, SymInt? window_size_right=None, "
    "Tensor? seqused_k=None, Tensor? alibi_slopes=None"
)
_FIVE = (
    "(Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, "
    "Tensor debug_attn_mask)"
)
_PAGES = ", Tensor? block_table=None, int? num_splits=None"
_STARTS = "Tensor? cum_seq_q, Tensor? cum_seq_k"
FORWARD, INTO, BACKWARD = list(sdpa.GROUPS[2])
# From native_functions.yaml of the wheels of PyTorch.
SCHEMAS = [
    ("2.11.0", FORWARD, f"({_QKV}, {_STARTS}, {_SEQUENCES}) -> {_FIVE}"),
    ("2.12.1 to 2.14.1", FORWARD, f"({_QKV}, {_STARTS}, {_SEQUENCES}{_PAGES}) -> {_FIVE}"),
    ("2.12.1 to 2.14.1", f"{FORWARD}_no_dropout_inplace",
     f"(Tensor(a!) out, {_QKV}, {_STARTS}, {_SEQUENCES}{_PAGES}) -> Tensor softmax_logsumexp"),
    ("2.11.0 to 2.14.1", "_flash_attention_backward",
     f"(Tensor grad_out, {_QKV}, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
     "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, "
     "Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, "
     "SymInt? window_size_right=None) -> (Tensor, Tensor, Tensor)"),
]  # fmt: skip


def schema(name: str, text: str) -> Any:
    return torch._C.parse_schema(f"aten::{name}{text}")


@pytest.mark.tensors("cpu")
@pytest.mark.parametrize(("versions", "name", "text"), SCHEMAS)
def test_schemas_of_every_pytorch(versions: str, name: str, text: str) -> None:
    known = next(group[name] for group in sdpa.GROUPS if name in group)
    parsed = schema(name, text)
    assert sdpa.unknown_signature(parsed, known) is None
    _, keywords = sdpa._parameters(known.function)
    assert {x.name for x in parsed.arguments if x.kwarg_only} <= keywords


@pytest.mark.tensors("cpu")
def test_the_operators_of_this_pytorch_are_known() -> None:
    for group in sdpa.GROUPS:
        for name, operator in group.items():
            if hasattr(torch.ops.aten, name):
                given = getattr(torch.ops.aten, name).default._schema
                assert sdpa.unknown_signature(given, operator) is None
                assert {x.name for x in given.arguments if x.kwarg_only} <= sdpa._parameters(
                    operator.function
                )[1]


@pytest.mark.tensors("cpu")
def test_an_unknown_signature_stays_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is not replaced, and one sentence says so; the other groups are."""

    def newer(query: Tensor, key: Tensor, mode: int) -> None: ...

    group = {**sdpa.GROUPS[2], "_flash_attention_backward": sdpa.Operator(("CPU",), newer, 3)}
    monkeypatch.setattr(sdpa, "GROUPS", (*sdpa.GROUPS[:2], group))
    with pytest.warns(UserWarning, match="keeps its own kernel of aten::_flash_attention_backward"):
        activate_flash_attention_impl("tilewise")
    try:
        x, cu = torch.randn(9, 2, 16), starts([9])
        with pytest.raises(NotImplementedError):
            varlen.varlen_attn(x, x, x, cu, cu, 9, 9)
    finally:
        restore_flash_attention_impl()


@pytest.mark.tensors("cpu")
def test_an_unknown_keyword_falls_back_with_one_warning() -> None:
    class Original:
        def call_boxed(self, keys: Any, *arguments: Any, **options: Any) -> str:
            return f"PyTorch's with {sorted(options)}"

    def ours(query: Tensor, *, scale: float | None = None) -> str:
        return "ours"

    kernel = sdpa._with_fallback("some_operator", ours, Original())
    x = torch.ones(1)
    assert kernel(None, x, scale=2.0) == "ours"
    with pytest.warns(UserWarning, match="called with page_size, which Tilewise does not know"):
        assert kernel(None, x, page_size=3) == "PyTorch's with ['page_size']"
    assert kernel(None, x, page_size=3) == "PyTorch's with ['page_size']"  # a warning would fail
