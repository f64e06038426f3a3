"""Compact masks: how they appear to a model, what they store, and how attention uses them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

import hf_models
import torch_versions

hf_models.require("transformers>=5.20")

from transformers import masking_utils  # noqa: E402

import tilewise.hf  # noqa: E402
from tilewise.integrations.transformers import _compact, _packing  # noqa: E402
from tilewise.integrations.transformers._compact import CompactMask  # noqa: E402

pytestmark = hf_models.MARKS
ROWS = 6
LOWEST = torch.finfo(torch.float32).min
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [1, 1, 1, 0, 0, 0]]).bool()
HOLE = torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6, [1] * 6]).bool()


def both(**call: Any) -> tuple[Tensor, Tensor]:
    """The results (Tilewise's, eager's) of one call of the mask function."""
    call = dict(batch_size=3, q_length=ROWS, kv_length=ROWS) | call
    call = {k: v.to(device()) if isinstance(v, Tensor) else v for k, v in call.items()}
    call["device"] = device()
    return tilewise.hf.create_mask(**call), masking_utils.eager_mask(**call)


def device() -> torch.device:
    return torch.get_default_device()


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def packed(window: int | None = None) -> Callable[..., Any]:
    """The mask function of three batch rows of packed sequences."""
    ids = torch.cat([positions(4, 2), positions(6), positions(1, 2, 3)])
    inner = masking_utils.causal_mask_function
    if window is not None:
        inner = masking_utils.sliding_window_causal_mask_function(window)
    segments = masking_utils.find_packed_sequence_indices(ids)
    assert segments is not None
    remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
    inner = inner if remap is None else remap(inner, ids)  # does not exist in 5.20
    packing = masking_utils.packed_sequence_mask_function(segments)
    return masking_utils.and_masks(inner, packing)


def calls() -> dict[str, tuple[dict[str, Any], int]]:
    """Calls of the mask function by name, each with the most bytes that its result may store."""
    window = masking_utils.sliding_window_causal_mask_function(3)
    around = masking_utils.sliding_window_bidirectional_mask_function(2)
    full = masking_utils.bidirectional_mask_function
    static = dict(q_length=1, kv_length=50, q_offset=torch.tensor(5))
    spans, flags = 3 * 3 * 4, 3
    return {
        "causal": ({}, 0),
        "causal_16_bits": (dict(dtype=torch.bfloat16), 0),
        "causal_behind_a_cache": (dict(q_length=2, q_offset=4), 0),
        "causal_padded": (dict(attention_mask=PADDING), spans + flags * ROWS),
        "causal_all_tokens": (dict(attention_mask=torch.ones_like(PADDING)), 0),
        "causal_hole": (dict(attention_mask=HOLE), flags * ROWS),
        "bidirectional": (dict(mask_function=full), 0),
        "bidirectional_padded": (
            dict(mask_function=full, attention_mask=PADDING),
            spans + flags * ROWS,
        ),
        "window": (dict(mask_function=window), 0),
        "window_padded": (dict(mask_function=window, attention_mask=PADDING), spans + flags * ROWS),
        "window_of_both_sides": (dict(mask_function=around), 0),
        "window_of_both_sides_padded": (
            dict(mask_function=around, attention_mask=PADDING),
            spans + flags * ROWS,
        ),
        "static_prefill": (dict(kv_length=50), spans + 8),
        "static_step": (static, spans + 8),
        "static_step_padded": (static | dict(attention_mask=PADDING), spans + 8 + flags * 50),
        "static_step_hole": (static | dict(attention_mask=HOLE), spans + 8 + flags * 50),
        "packed": (dict(mask_function=packed()), 7 * 4),
        "packed_window": (dict(mask_function=packed(2)), 7 * 4),
    }


CALLS = list(calls())


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compact_mask_equals_the_eager_mask_in_a_few_bytes(name: str, skip: bool) -> None:
    """Both with and without permission to skip the mask, as models call it (packed batches, static
    caches)."""
    call, size = calls()[name]
    ours, eager = both(allow_is_causal_skip=skip, **call)
    assert type(ours) is CompactMask
    held = [getattr(ours, part) for part in ours.__tensor_flatten__()[0]]
    assert sum(part.nbytes for part in held) <= size < eager.nbytes
    assert not ours._dense
    assert (ours.shape, ours.dtype, ours.device) == (eager.shape, eager.dtype, eager.device)
    assert ours.stride() == eager.stride() and ours.dim() == 4 and not ours._dense
    assert torch.equal(ours, eager)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "slice": lambda m: m[:, :, 1:4],
    "slice_of_all": lambda m: m[:, :, :, :ROWS],
    "index": lambda m: m[torch.tensor([2, 0, 1])],
    "element": lambda m: m[0, 0, 0, 0].item(),
    "repeat": lambda m: m.repeat(1, 4, 1, 1),
    "repeat_interleave": lambda m: m.repeat_interleave(2, 0),
    "expand": lambda m: m.expand(-1, 4, -1, -1),
    "expand_as_it_is": lambda m: m.expand(3, 1, ROWS, ROWS),
    "concatenate": lambda m: torch.cat([m, m], -1),
    "widen": lambda m: torch.nn.functional.pad(m, (0, 3), value=1.0),
    "reshape": lambda m: m.reshape(3, -1),
    "squeeze": lambda m: m.squeeze(1),
    "transpose": lambda m: m.transpose(-1, -2).contiguous(),
    "add": lambda m: m + 1.0,
    "added_to": lambda m: torch.ones(ROWS) + m,
    "multiply": lambda m: m * torch.arange(ROWS),
    "compare": lambda m: m < -1,
    "equal": lambda m: m == 0,
    "not_equal": lambda m: m != 0,
    "where": lambda m: torch.where(m == 0, m, 2.0),
    "masked_fill": lambda m: m.masked_fill(torch.eye(ROWS).bool(), 3.0),
    "reduce": lambda m: m.amax(-1),
    "softmax": lambda m: m.softmax(-1),
    "bool": lambda m: m.bool(),
    "half": lambda m: m.to(torch.bfloat16),
    "double": lambda m: m.double(),
    "int": lambda m: m.clamp(-1).long(),
    "clone": lambda m: m.clone(),
    "detach": lambda m: m.detach(),
    "like": lambda m: torch.zeros_like(m),
    "new": lambda m: m.new_ones(2),
    "unbind": lambda m: m.unbind(0)[2],
    "split": lambda m: m.split(2, -1)[1],
    "numpy": lambda m: torch.from_numpy(m.cpu().numpy()),
    "asarray": lambda m: torch.from_numpy(numpy.asarray(m.cpu())),
    "dlpack": lambda m: torch.from_dlpack(m),
    "tolist": lambda m: m.tolist(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "deepcopy": copy.deepcopy,
    "sdpa": lambda m: torch.nn.functional.scaled_dot_product_attention(
        torch.ones(3, 2, ROWS, 8), torch.ones(3, 2, ROWS, 8),
        torch.arange(3 * 2 * ROWS * 8.0).view(3, 2, ROWS, 8), attn_mask=m,
    ),
    "script": lambda m: torch.jit.script(torch.nn.Threshold(0.5, 2.0))(m),
}  # fmt: skip

COMPACT = ("slice_of_all", "expand_as_it_is", "clone", "detach", "half", "double")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_operations_agree_with_those_on_the_eager_mask(operation: str, inference: bool) -> None:
    for call in (dict(attention_mask=PADDING), dict(mask_function=packed()), {}):
        with torch.inference_mode(inference):
            ours, eager = both(**call)
            given, expected = OPERATIONS[operation](ours), OPERATIONS[operation](eager)
            if operation in COMPACT:
                assert type(given) is CompactMask and not ours._dense and not given._dense
            else:
                assert not isinstance(given, CompactMask)
            if isinstance(expected, Tensor):
                assert (given.shape, given.dtype) == (expected.shape, expected.dtype)
                assert torch.equal(given, expected)
            else:
                assert given == expected


def test_saved_as_a_tensor() -> None:
    ours, eager = both(attention_mask=PADDING)
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), eager)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda m: m.__setitem__((slice(None), slice(None), slice(2, 4)), 5.0),
    "add": lambda m: m.add_(1.0),
    "fill": lambda m: m.masked_fill_(torch.eye(ROWS).bool(), 7.0),
    "part": lambda m: m[:, 0, 1].mul_(2.0),
    "alias": lambda m: m[:, :, :, :ROWS].add_(1.0),
    "alias_of_an_alias": lambda m: m.detach()[:, :][:, :, :, :ROWS].zero_(),
    "out": lambda m: torch.add(torch.ones(3, 1, ROWS, ROWS), 1.0, out=m),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("write", list(WRITES))
def test_writes_to_a_mask_take_effect(write: str, inference: bool) -> None:
    with torch.inference_mode(inference):
        ours, eager = both(attention_mask=PADDING)
        alias, copied = ours[:], ours.clone()
        WRITES[write](ours)
        WRITES[write](eager)
        assert torch.equal(ours, eager) and torch.equal(alias, eager)
        assert torch.equal(copied, both(attention_mask=PADDING)[1])
        q, k, v = heads(3, ROWS)
        given, _ = tilewise.hf.attention(layer(), q, k, v, ours)
        expected, _ = tilewise.hf.attention(layer(), q, k, v, eager)
        assert torch.equal(given, expected)


# --- a layer --------------------------------------------------------------------------------------


def layer() -> torch.nn.Module:
    module = torch.nn.Module()
    module.is_causal = True
    return module


def heads(batch: int, rows: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(5)
    k, v = torch.randn(2, batch, 2, rows if keys is None else keys, 8)
    return torch.randn(batch, 4, rows, 8), k, v


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention in fp64, [batch, rows, heads, head_dim]; the mask is added to the scores."""
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = q.double() @ k.mT / q.shape[-1] ** 0.5 + mask.double()
    return (scores.softmax(-1) @ v).transpose(1, 2)


def differs(given: Tensor, expected: Tensor, mask: Tensor, first: int | None = None) -> float:
    """The difference in the rows that are tokens, which are those that see themselves.

    first: Position of row 0 among the keys; None aligns the last row with the last key.
    """
    rows, keys = mask.shape[2:]
    kept = mask[:, 0].diagonal(keys - rows if first is None else first, -2, -1)[:, :rows] == 0
    return float((given - expected)[kept.expand(given.shape[:2])].abs().max())


@pytest.mark.parametrize("bias_heads", [0, 1, 4])
@pytest.mark.parametrize("name", [name for name in CALLS if "16_bits" not in name])
def test_layer_equals_eager_attention(name: str, bias_heads: int) -> None:
    """With and without a position bias, whose columns are counted from key 0 despite padding."""
    ours, eager = both(**calls()[name][0])
    _, _, rows, keys = eager.shape
    q, k, v = heads(3, rows, keys)
    given: dict[str, Tensor] = {}
    if bias_heads:
        if "packed" in name:
            with pytest.raises(
                ValueError, match=r"position_bias is given, but .* packed sequences"
            ):
                tilewise.hf.attention(layer(), q, k, v, ours, position_bias=torch.zeros(1, 4, 6, 6))
            return
        given = dict(position_bias=torch.randn(1, bias_heads, rows, keys) * 3)
    q.requires_grad_(bool(bias_heads))  # covers the fast path of a layer and the general one
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, **given)
    expected = plain(q, k, v, eager + given.get("position_bias", 0.0))
    first = None if ours.offset is None else int(ours.offset)
    assert differs(out, expected, eager, first) < 3e-6
    assert not ours._dense, "a rows x keys mask was built"


@pytest.mark.parametrize(
    "name", ["causal", "causal_padded", "causal_hole", "packed", "static_step"]
)
def test_mask_of_the_wrong_size_is_refused_where_eager_raises(name: str) -> None:
    ours, _ = both(**calls()[name][0])
    q, k, v = heads(3, ours.shape[2], 13)
    with pytest.raises(ValueError, match=r"attention_mask has shape \[3, 1, . *.*needs .*13\]"):
        tilewise.hf.attention(layer(), q, k, v, ours)


def test_mask_of_one_row_or_sequence_is_broadcast_as_in_eager() -> None:
    ours, eager = both(q_length=1, q_offset=5, attention_mask=PADDING)
    q, k, v = heads(3, ROWS)
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours)
    expected = plain(q, k, v, eager)
    assert differs(out[1:2], expected[1:2], eager[1:2].expand(-1, -1, ROWS, -1)) < 3e-6
    ours, eager = both(batch_size=1, attention_mask=PADDING[:1])
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours)
    assert differs(out, plain(q, k, v, eager), eager.expand(3, -1, -1, -1)) < 3e-6


def test_window_belongs_to_the_mask_not_the_layer() -> None:
    ours, eager = both(mask_function=masking_utils.sliding_window_bidirectional_mask_function(2))
    q, k, v = heads(3, ROWS)
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, sliding_window=2)
    assert differs(out, plain(q, k, v, eager), eager) < 3e-6


def test_mask_of_the_caller_is_not_modified() -> None:
    _, mask = both(attention_mask=PADDING)
    before = dict(mask.__dict__)
    tilewise.hf.attention(layer(), *heads(3, ROWS), mask)
    assert mask.__dict__ == before
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), mask)


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["causal", "causal_padded", "bidirectional_padded", "static_step"])
def test_operations_and_layers_in_a_compiled_graph(name: str, backend: str) -> None:
    call, _ = calls()[name]
    q, k, v = heads(3, *both(**call)[0].shape[2:])
    module, where = layer(), device()

    def inside(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
        mask = tilewise.hf.create_mask(
            **(dict(batch_size=3, q_length=ROWS, kv_length=ROWS, device=where) | call)
            | dict(attention_mask=visible, allow_is_causal_skip="bidirectional" not in name,
                   allow_is_bidirectional_skip="bidirectional" in name)
        )  # fmt: skip
        return outside(q, k, v, mask)

    def outside(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return tilewise.hf.attention(module, q, k, v, mask)[0], mask[:, :, :, 1:].repeat(1, 4, 1, 1)

    torch.compiler.reset()
    ours, eager = both(**call)
    visible = call.get("attention_mask")
    visible = visible if visible is None else visible.to(where)
    first = None if ours.offset is None else int(ours.offset)
    for function, last in ((outside, ours), (inside, visible)):
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        out, whole = compiled(q, k, v, last)
        assert differs(out, plain(q, k, v, eager), eager, first) < 3e-6
        assert torch.equal(whole, eager[:, :, :, 1:].repeat(1, 4, 1, 1))


def test_error_of_writing_to_a_mask_in_a_compiled_graph_says_what_to_do() -> None:
    torch.compiler.reset()
    write = torch.compile(lambda m: m.add_(1.0), backend="aot_eager", fullgraph=True)
    # PyTorch 2.11 writes to the mask before it traces what comes next, which refuses the mask then.
    remedy = "write to a copy, " if torch_versions.at_least(2, 13) else "is allowed: pass "
    with pytest.raises(Exception, match=remedy + r"mask\.clone\(\)"):
        write(both(attention_mask=PADDING)[0])


# --- packed by positions only ---------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("kinds", [1, 2])
def test_positions_are_examined_once_per_forward(
    kinds: int, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, real = [], _packing._find_boundaries
    monkeypatch.setattr(_packing, "_find_boundaries", lambda *a: looks.append(a) or real(*a))
    q, k, v = heads(1, ROWS)
    with torch.inference_mode(inference):
        ids = positions(4, 2)
        for _ in range(2):
            looks.clear()
            masks = [both(batch_size=1)[0] for _ in range(kinds)]
            outs = [
                tilewise.hf.attention(layer(), q, k, v, mask, position_ids=ids)[0]
                for mask in masks for _layer in range(3)
            ]  # fmt: skip
            assert len(looks) == 1
            ids.copy_(positions(1, 5))  # the next forward notices
    expected, _ = tilewise.hf.attention(
        layer(), q, k, v, None, cu_seq_lens_q=torch.tensor([0, 1, 6]),
        cu_seq_lens_k=torch.tensor([0, 1, 6]),
    )  # fmt: skip
    assert torch.equal(outs[0], expected)


@pytest.mark.parametrize(
    "ids",
    [
        positions(6), positions(6) + 7, torch.tensor([[0, 1, 2, 2, 2, 3]]), positions(4, 2)[0],
        positions(4, 2).expand(3, 1, 6), torch.tensor([[0]]), None,
    ],
    ids=["plain", "offset", "image", "flat", "three_axes", "one", "none"],
)  # fmt: skip
def test_positions_of_one_sequence(ids: Tensor | None) -> None:
    q, k, v = heads(1, ROWS)
    for mask in (None, both(batch_size=1)[0]):
        given, _ = tilewise.hf.attention(layer(), q, k, v, mask, position_ids=ids)
        assert torch.equal(given, tilewise.hf.attention(layer(), q, k, v, mask)[0])


def test_left_padding_is_not_taken_for_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "_find_boundaries", None)
    q, k, v = heads(1, ROWS)
    ours, eager = both(batch_size=1, attention_mask=PADDING[:1])
    ids = torch.tensor([[1, 1, 0, 1, 2, 3]])
    out, _ = tilewise.hf.attention(layer(), q, k, v, ours, position_ids=ids)
    assert differs(out, plain(q, k, v, eager), eager) < 3e-6


def test_positions_are_not_examined_during_graph_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_packing, "_find_boundaries", None)
    monkeypatch.setattr(_packing, "values_are_unavailable", lambda *_: True)
    q, k, v = heads(1, ROWS)
    given, _ = tilewise.hf.attention(layer(), q, k, v, None, position_ids=positions(4, 2))
    assert torch.equal(given, tilewise.hf.attention(layer(), q, k, v, None)[0])


def test_aliases_name_operators_of_this_torch() -> None:
    assert len(_compact._ALIASES) == 6


def test_without_a_mask_a_window_is_not_applied() -> None:
    """As with eager attention, a window is part of the masks that Transformers builds."""
    q, k, v = (torch.randn(2, 4, 6, 8) for _ in range(3))
    bidirectional = layer()
    bidirectional.is_causal = False
    given, _ = tilewise.hf.attention(bidirectional, q, k, v, None, sliding_window=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    torch.testing.assert_close(given, expected)
