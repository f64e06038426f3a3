"""tilewise.masks: what masks show, how they are made, and attention with them."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import re
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import devices
import mask_cases
import mask_damage
import tilewise
from cases import Built, Case, check, run
from paths import ROOT
from tilewise import _mask, masks
from tilewise._mask_fields import host

DOCUMENTS = torch.tensor([0] * 70 + [1] * 200 + [2] * 30)
STARTS = [0, 70, 270, 300]
SPANS = [[20, 60], [150, 290]]


def tensors(batch=1, rows=300, keys=300, heads=2, heads_kv=2, dim=16, grad=True):
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, rows, heads, dim), (batch, keys, heads_kv, dim), (batch, keys, heads_kv, dim)]
    made = (devices.put(torch.randn(s, generator=generator)) for s in shapes)
    return [x.requires_grad_(grad) for x in made]


def hidden_by_bias(mask, rows, keys):
    return devices.put(torch.where(torch.from_numpy(mask.to_bool(rows, keys)), 0.0, -math.inf))


def placed(mask):
    """The mask on the device of the test."""
    return mask.to(devices.current().memory)


# --- what masks show ------------------------------------------------------------------------------

INTERVALS = st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted)
RECTANGLES = st.lists(st.tuples(INTERVALS, INTERVALS, st.integers(0, 3)), max_size=5)


@seed(1)
@settings(max_examples=40, deadline=None, database=None)
@given(rectangles=RECTANGLES)
def test_ranges_show_the_pairs_of_their_rectangles(rectangles):
    rows, keys, kinds = ([r[i] for r in rectangles] for i in range(3))
    mask = masks.Ranges(rows, keys, kinds)
    want = mask_cases.dense_of_ranges([(*q, *k, kind) for q, k, kind in rectangles], 290, 260)
    dense = mask.to_bool(290, 260)[0, 0]
    assert np.array_equal(dense, want)
    assert mask.density(290, 260) == pytest.approx(want.mean())
    blocks = mask.blocks(290, 260)
    assert np.array_equal(blocks.to_bool()[0, 0], want)
    assert blocks.density() == pytest.approx(want.mean())
    for m in (mask, blocks):
        for (i, j), state in np.ndenumerate(m.tiles(290, 260)[0, 0]):
            tile = want[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            assert tile.any() if state == 1 or state == 2 else not tile.any()
            assert tile.all() if state == 2 else m is mask or not tile.all()


@seed(2)
@settings(max_examples=60, deadline=None, database=None)
@given(left=RECTANGLES, right=RECTANGLES)
def test_ranges_are_closed_under_and_and_or(left, right):
    sides = [[(*q, *k, kind) for q, k, kind in side] for side in (left, right)]
    a, b = (masks.Ranges(*([r[i] for r in side] for i in range(3))) for side in (left, right))
    want_a, want_b = (mask_cases.dense_of_ranges(side, 290, 260) for side in sides)
    both, either = a & b, a | b
    assert isinstance(both, masks.Ranges) and isinstance(either, masks.Ranges)
    assert np.array_equal(both.to_bool(290, 260)[0, 0], want_a & want_b)
    assert np.array_equal(either.to_bool(290, 260)[0, 0], want_a | want_b)
    assert len(both.entries) <= 3 * len(left) * len(right)
    tilewise.attention(*(np.zeros((1, 300, 1, 8), np.float32) for _ in range(3)), mask=both)


def test_an_intersection_is_a_few_ranges_per_sequence():
    length, document = 2**17, 512
    starts = torch.arange(0, length + 1, document, dtype=torch.int32)
    window = masks.Ranges([[0, 256], [256, length]], [[0, 256], [0, length]], ["causal", "both"])
    packed = masks.Ranges.documents(starts) & window
    assert torch.is_tensor(packed.entries) and len(packed.entries) <= 3 * 256
    pairs = 256 * sum(min(row + 1, 257) for row in range(document))
    assert packed.density() == pytest.approx(pairs / length**2)
    prefixes = masks.Ranges.prefixes([3, 100], 300) & masks.Ranges.documents(STARTS)
    assert prefixes.batch == 2 and len(prefixes.entries) <= 12
    want = masks.Ranges.prefixes([3, 100], 300).to_bool() & masks.Ranges.documents(STARTS).to_bool()
    assert np.array_equal(prefixes.to_bool(300, 300), want)


def test_arrays_in_any_order_of_memory_make_the_same_mask():
    begins, ends = np.array([0, 10, 30], np.int32), np.array([10, 30, 45], np.int32)
    spans = np.stack([begins, ends], axis=1)
    transposed = np.array([begins, ends]).T
    assert not transposed.flags.c_contiguous
    want = masks.Ranges(spans, spans, "causal")
    got = masks.Ranges(transposed, transposed, "causal")
    raw = _mask.rebuilt(masks.Ranges, [np.asfortranarray(want.entries), want.first], ())
    arrays = [x.detach().numpy() for x in tensors(rows=45, keys=45)]
    expected = tilewise.attention(*arrays, mask=want)
    for mask in (got, raw):
        np.testing.assert_array_equal(mask.to_bool(45, 45), want.to_bool(45, 45))
        np.testing.assert_array_equal(tilewise.attention(*arrays, mask=mask), expected)
        out = tilewise.attention(*map(torch.from_numpy, arrays), mask=mask)
        np.testing.assert_array_equal(out.numpy(), expected)


def test_masks_are_combined():
    causal, spans = masks.Ranges.causal(300), masks.Ranges(SPANS, SPANS)
    images = causal | spans
    want = np.tril(np.ones((300, 300), bool)) | spans.to_bool(300, 300)[0, 0]
    assert np.array_equal(images.to_bool()[0, 0], want)
    per_head = masks.from_bool(np.random.default_rng(0).random((1, 2, 300, 300)) < 0.1)
    both, either = images & per_head, per_head | images
    assert np.array_equal(both.to_bool(), per_head.to_bool() & want)
    assert np.array_equal(either.to_bool(), per_head.to_bool() | want)
    per_sequence = masks.Ranges.prefixes([3, 100], 300) | causal
    assert per_sequence.batch == 2
    assert np.array_equal(per_sequence.to_bool()[1, 0, :, :100], np.ones((300, 100), bool))


@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_an_exported_program_takes_masks(kind):
    mask = masks.Ranges.documents(torch.tensor(STARTS, dtype=torch.int32))
    mask = mask if kind == "ranges" else mask.blocks(300, 300)
    q, k, v = tensors(grad=False)

    class Attend(torch.nn.Module):
        def forward(self, q, mask):
            return tilewise.attention(q, k, v, mask=mask)

    exported = torch.export.export(Attend(), (q, mask)).module()
    for own in (mask, copy.deepcopy(mask)):
        assert torch.equal(exported(q, own), tilewise.attention(q, k, v, mask=mask))
    leaves, spec = torch.utils._pytree.tree_flatten(mask)
    written = torch.utils._pytree.treespec_loads(torch.utils._pytree.treespec_dumps(spec))
    again = torch.utils._pytree.tree_unflatten(leaves, written)
    assert written == spec and repr(again) == repr(mask)


@pytest.mark.abi("cpu", "cuda")
def test_masks_with_entries_of_no_list_are_combined():
    """starts may leave entries out; joined masks of tensors are made without a read of them."""
    rows = np.array([[0, 2], [2, 4], [4, 6], [6, 8]], np.int32)
    keys = np.full((4, 2), [0, 8], np.int32)
    few, last = masks.Ranges(rows, keys, starts=[0, 2]), masks.Ranges([[7, 8]], [[0, 8]])
    want = np.zeros((8, 8), bool)
    want[[0, 1, 2, 3, 7]] = True
    for a, b in ((few, last), (last, few), (placed(few), placed(last)), (placed(few), last)):
        assert np.array_equal((a | b).to_bool(8, 8)[0, 0], want)
    assert not (placed(few) & placed(last)).to_bool(8, 8).any()


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_mask_keeps_what_it_was_given(make):
    """Arrays that a caller fills again for the next step do not change a mask."""
    starts = make([0, 1, 2]).astype(np.int32) if make is np.array else make([0, 1, 2]).int()
    ranges = masks.Ranges([[0, 8], [0, 8]], [[0, 4], [4, 8]], starts=starts)
    blocks = masks.from_bool(torch.rand(9, 9) < 0.5)
    arrays = [make(x.tolist()) for x in blocks._arrays()]
    arrays = [x.astype(np.int32) if make is np.array else x.int() for x in arrays]
    again = masks.Blocks(*arrays, rows=9, keys=9)
    bits = make([1, 3])
    tree = masks.Tree(bits)
    for array in (starts, *arrays, bits):
        array[:] = 0
    assert host(ranges.first).tolist() == [0, 1, 2]
    assert np.array_equal(again.to_bool(), blocks.to_bool())
    assert tree.to_bool().tolist() == [[[[True, False], [True, True]]]]


@pytest.mark.filterwarnings("error")
def test_a_mask_of_read_only_arrays():
    """np.load(mmap_mode="r") and joblib make such arrays; PyTorch warns of them."""
    mask = masks.from_bool(np.tri(20, dtype=bool))
    for array in mask._arrays():
        array.flags.writeable = False
    q, k, v = tensors(rows=20, keys=20)
    want = tilewise.attention(q, k, v, causal=True)
    torch.testing.assert_close(tilewise.attention(q, k, v, mask=placed(mask)), want)
    torch.testing.assert_close(tilewise.attention(q, k, v, mask=mask.to(q.device)), want)


@pytest.mark.parametrize("kind", ["ranges", "blocks"])
def test_masks_are_immutable_values(kind):
    mask = masks.Ranges.documents(torch.tensor(STARTS, dtype=torch.int32))
    mask = mask if kind == "ranges" else mask.blocks(300, 300)
    with pytest.raises(AttributeError, match="immutable"):
        mask.entries = None
    leaves, tree = torch.utils._pytree.tree_flatten(mask)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    for again in (
        pickle.loads(pickle.dumps(mask)), torch.utils._pytree.tree_unflatten(leaves, tree),
        mask.on_host(), mask.on_host().to("cpu"),
    ):  # fmt: skip
        assert repr(again) == repr(mask)
        assert np.array_equal(again.to_bool(300, 300), mask.to_bool(300, 300))
    assert repr(mask).startswith(
        ("Ranges(3 ranges: 3 causal", "Blocks(300 x 300, batch 1, heads 1")
    )


def test_a_mask_is_drawn():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = masks.Ranges.documents(STARTS).plot()
    assert ax.images[0].get_array().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_drawing_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib, .* pip install matplotlib"):
        masks.Ranges.causal(128).plot()


# --- attention with masks -------------------------------------------------------------------------

MASKS = {
    "documents": lambda: masks.Ranges.documents(STARTS),
    "images": lambda: masks.Ranges.causal(300) | masks.Ranges(SPANS, SPANS),
    "inverse": lambda: masks.Ranges([[5, 280]], [[0, 290]], "inverse_causal"),
    "nothing": lambda: masks.Ranges([], []),
    "one pair": lambda: masks.Ranges([[130, 131]], [[7, 8]]),
    "heads": lambda: masks.from_bool(
        mask_cases.random_dense(np.random.default_rng(3), (1, 4, 300, 300))
    ),
    "sequences": lambda: masks.Ranges.prefixes([0, 200], 300),
}  # fmt: skip


@pytest.mark.abi("cpu", "cuda")
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_a_bias_of_minus_infinity(name):
    mask = placed(MASKS[name]())
    options = {"window": (200, 60), "softcap": 20.0, "return_lse": True}
    results = []
    for hides in ({"mask": mask}, {"bias": hidden_by_bias(mask, 300, 300)}):
        q, k, v = tensors(batch=2, heads=4)
        out, lse = tilewise.attention(q, k, v, **hides, **options)
        (out.square().sum() + lse.clamp_min(-50).sum()).backward()
        results.append([x.detach().cpu() for x in (out, lse, q.grad, k.grad, v.grad)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    arrays = [x.detach().cpu().numpy() for x in (q, k, v)]
    mask, on_cpu = mask.on_host(), q.device.type == "cpu"
    out, lse = tilewise.attention(*arrays, mask=mask, **options)
    for got, want in ((out, results[0][0]), (lse, results[0][1])):
        np.testing.assert_allclose(got, want, *((0, 0) if on_cpu else (2e-5, 2e-5)))
    dout, dlse = 2 * out, (lse > -50).astype(np.float32)
    grads = tilewise.attention_backward(
        dout, *arrays, out, lse, dlse=dlse, mask=mask, window=(200, 60), softcap=20.0
    )
    bound = 1e-6 if on_cpu else 2e-5
    for got, want in zip(grads[:3], results[0][2:], strict=True):
        np.testing.assert_allclose(got, want, rtol=bound, atol=bound)


@pytest.mark.abi("cpu", "cuda")
def test_packed_sequences_take_a_list_of_ranges_each():
    q, k, v = (x.flatten(0, 1) for x in tensors(batch=2, rows=150, keys=150))
    starts = devices.put(torch.tensor([0, 100, 300], dtype=torch.int32))
    ranges = [[0, 100], [50, 200]], [[0, 100], [0, 120]], [0, 1]
    mask = placed(masks.Ranges(*ranges, starts=[0, 1, 2]))
    out = tilewise.attention_varlen(q, k, v, starts, starts, mask=mask)
    for b, (begin, end) in enumerate([(0, 100), (100, 300)]):
        own = [x[None, begin:end] for x in (q, k, v)]
        bias = hidden_by_bias(mask, 200, 200)[b : b + 1, :, : end - begin, : end - begin]
        want = tilewise.attention(*own, bias=bias)[0]
        torch.testing.assert_close(out[begin:end], want, rtol=1e-5, atol=1e-5)


@pytest.mark.abi("cpu", "cuda")
@pytest.mark.parametrize("kind", ["ranges", "blocks", "blocks per head"])
def test_masks_under_compile_and_vmap(kind):
    mask = masks.Ranges.documents(devices.put(torch.tensor(STARTS, dtype=torch.int32)))
    if kind == "blocks":
        mask = mask.blocks(300, 300)
    elif kind == "blocks per head":
        mask = masks.from_bool(devices.put(torch.rand(1, 2, 300, 300) < 0.3))
    q, k, v = tensors(batch=2, grad=False)
    want = tilewise.attention(q, k, v, mask=mask)
    torch.compiler.reset()
    as_argument = torch.compile(
        lambda q, m: tilewise.attention(q, k, v, mask=m), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(as_argument(q, mask), want)
    captured = torch.compile(
        lambda q: tilewise.attention(q, k, v, mask=mask), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(captured(q), want)
    mapped = torch.func.vmap(lambda *x: tilewise.attention(*(y[None] for y in x), mask=mask)[0])
    assert torch.equal(mapped(q, k, v), want)


@pytest.mark.abi("cpu", "cuda")
def test_a_graph_may_make_its_mask():
    q, k, v = tensors(batch=2, grad=False)

    def attend(q, starts):
        spans = torch.stack([starts[:-1], starts[:-1] + 20], dim=1)
        mask = masks.Ranges.documents(starts) | masks.Ranges(spans, spans)
        return tilewise.attention(q, k, v, mask=mask)

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for starts in (STARTS, [0, 100, 220, 300]):
        given = devices.put(torch.tensor(starts, dtype=torch.int32))
        assert torch.equal(compiled(q, given), attend(q, given))


@pytest.mark.abi
@pytest.mark.parametrize("kind", ["mask_ranges", "mask_blocks"])
def test_hidden_keys_may_hold_anything(kind, device):
    """NaN and infinities in a key reach only the rows that see it."""
    ranges = (((0, 90, 0, 70, 0), (90, 200, 70, 300, 1), (150, 160, 0, 300, 0)),)
    value = ranges if kind == "mask_ranges" else "h"
    case = Case(rows=(200,), keys=(300,), heads_kv=2, head_dim=32, head_dim_v=32, **{kind: value})
    clean, dirty = Built(case), Built(case)
    seen = np.broadcast_to(clean.mask[0], (2, 200, 300))
    dirty.k[0, 100], dirty.v[0, 100] = math.nan, math.inf
    want, got = run(clean), run(dirty)
    # Kernels of tensor cores leave a tile with a NaN to others, which add in another order.
    slack = 0.0 if device.name == "cpu" else 1e-5
    for head in range(2):
        rows = ~seen[head, :, 100]
        assert rows.any() and not rows.all()
        for a, b in ((got.out, want.out), (got.lse, want.lse), (got.grads["q"], want.grads["q"])):
            np.testing.assert_allclose(a[rows, head], b[rows, head], slack, slack)
        assert np.isnan(got.out[~rows, head]).all()


@pytest.mark.abi("cuda", "emulator")
@pytest.mark.parametrize("kind", ["mask_ranges", "mask_blocks"])
@pytest.mark.parametrize("damage", ["first", "entries"])
def test_invalid_entries_only_hide_pairs(kind, damage):
    """On a GPU entries are not checked; they never make a kernel read outside the arrays."""
    ranges = (((0, 90, 0, 70, 0), (90, 200, 70, 300, 1), (150, 160, 0, 300, 0)),)
    value = ranges if kind == "mask_ranges" else "h"
    case = Case(rows=(200,), keys=(300,), heads_kv=2, head_dim=32, head_dim_v=32, **{kind: value})
    mask_damage.check(case, damage)


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_more_ranges_than_a_tile_lists(dtype):
    """A row with 150 ranges, packed heads, and a key tile that 150 ranges touch."""
    many = [(i % 7, 20, 2 * i, 2 * i + 1, 0) for i in range(150)]
    case = Case(
        dtype=dtype, rows=(20,), keys=(310,), heads_kv=1, group=3, head_dim=16, head_dim_v=16,
        mask_ranges=((*many, *((0, 3, 40, 60, 1),) * 150),), bias="hr", sinks=True,
    )  # fmt: skip
    check(case)


@pytest.mark.abi
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_documents_and_tokens_for_all_over_many_chunks(dtype):
    """Query tiles that see the first and the last chunk of keys, but few of those in between."""
    starts = [0, 130, 400, 401, 700, 1100]
    documents = [(begin, end, begin, end, 1) for begin, end in itertools.pairwise(starts)]
    for_all = [(0, 1100, 3, 9, 0), (650, 655, 0, 1100, 0)]
    case = Case(
        dtype=dtype, rows=(1100,), keys=(1100,), heads_kv=1, group=2, head_dim=16, head_dim_v=16,
        mask_ranges=((*documents, *for_all),), spread=0.5,
    )  # fmt: skip
    check(case)


def test_explain_counts_tiles():
    q, k, v = tensors(grad=False)
    mask = masks.Ranges.documents(STARTS)
    text = tilewise.explain(q, k, v, causal=True, mask=mask).mask
    assert text == "9 tiles of 128 x 128 of mask and band: 3 skipped, 0 full, 6 partial"
    everything = masks.Ranges([[0, 300]], [[0, 300]])
    text = str(tilewise.explain(q, k, v, causal=True, mask=everything))
    assert "9 tiles of 128 x 128 of mask and band: 3 skipped, 3 full, 3 partial" in text


@seed(4)
@settings(max_examples=30, deadline=None, database=None)
@given(
    rectangles=RECTANGLES, as_blocks=st.booleans(), rows=st.integers(1, 300),
    window=st.tuples(*[st.none() | st.integers(0, 300)] * 2),
)  # fmt: skip
def test_explain_counts_what_tiles_show(rectangles, as_blocks, rows, window):
    """Against all pairs. A tile that several ranges fill together may count as partial."""
    rows_of, keys_of, kinds = ([r[i] for r in rectangles] for i in range(3))
    mask = masks.Ranges(rows_of, keys_of, kinds)
    mask = mask.blocks(rows, 260) if as_blocks else mask
    q, k, v = tensors(rows=rows, keys=260, grad=False)
    text = tilewise.explain(q, k, v, window=window, mask=mask).mask
    total, *counts = map(int, re.findall(r"(\d+) (?:tiles|skipped|full|partial)", text))
    left, right = (math.inf if side is None else side for side in window)
    distance = np.arange(260) - np.arange(rows)[:, None] - (260 - rows)
    band = (distance >= -left) & (distance <= right)
    shown = mask.to_bool(rows, 260)[0, 0]
    states = []
    for i, j in np.ndindex(-(-rows // 128), 3):
        at = np.s_[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
        # A tile is skipped if the mask or the band hides all of it, full if both show all of it.
        some = shown[at].any() and band[at].any()
        states.append(2 if (shown[at] & band[at]).all() else int(some))
    want = [states.count(state) for state in (0, 2, 1)]
    assert total == len(states) == sum(counts)
    assert counts[0] == want[0]
    assert counts[1] == want[1] if as_blocks else counts[1] <= want[1]


# --- FlexAttention --------------------------------------------------------------------------------


def causal(b, h, q, kv):
    return q >= kv


def window_with_sinks(b, h, q, kv):
    return (q >= kv) & ((q - kv <= 60) | (kv < 4))


def prefix_lm(b, h, q, kv):
    return (kv < torch.tensor([3, 150])[b]) | (q >= kv)


def documents(b, h, q, kv):
    return (DOCUMENTS[q] == DOCUMENTS[kv]) & (q >= kv)


def neighbourhood(b, h, q, kv):  # NATTEN: 15 x 20 pixels, windows of 5 x 5
    near = (q // 20 - kv // 20).abs() <= 2
    return near & ((q % 20 - kv % 20).abs() <= 2)


def dilated_per_head(b, h, q, kv):
    return (q >= kv) & ((q - kv) % (h + 1) == 0)


@pytest.mark.parametrize(
    ("mask_mod", "batch", "heads", "block"),
    [
        (causal, None, None, 128),
        (window_with_sinks, None, None, (64, 32)),
        (prefix_lm, 2, None, 128),
        (documents, None, None, 96),
        (neighbourhood, None, None, 128),
        (dilated_per_head, 2, 4, 256),
    ],
)
def test_from_flex_equals_flex_attention(mask_mod, batch, heads, block):
    block_mask = create_block_mask(mask_mod, batch, heads, 300, 300, "cpu", BLOCK_SIZE=block)
    mask = masks.from_flex(block_mask)
    dense = create_mask(mask_mod, batch or 1, heads or 1, 300, 300, "cpu")
    assert np.array_equal(mask.to_bool(), dense.numpy())
    q, k, v = (x.transpose(1, 2) for x in tensors(batch=2, heads=4, grad=False))
    k, v = (x.repeat_interleave(2, dim=1) for x in (k, v))
    want = flex_attention(q, k, v, block_mask=block_mask)
    got = tilewise.attention(q, k, v, mask=mask, layout="bhsd")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if mask_mod is causal:  # the same ragged edge three times: one block of bits and the last one
        assert mask.bits.shape[0] == 2


PAGE = (ROOT / "docs" / "masks.md").read_text()
BLOCKS = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL).findall(PAGE)
ROWS = re.compile(r"^\| `(.*)` \| `(masks.*)` \|$", re.MULTILINE).findall(PAGE)


def test_every_row_of_the_page_shows_the_same_pairs(capsys):
    names: dict = {}
    for block in BLOCKS:
        exec(block, names)
    assert "shows 19% of the pairs" in capsys.readouterr().out
    assert len(ROWS) == 10
    for mod, mask in ROWS:
        mask_mod = eval(f"lambda b, h, q, kv: {mod}".replace("\\|", "|"), names)
        made = eval(mask.replace("\\|", "|"), names)
        dense = create_mask(mask_mod, made.batch, made.heads, 512, 512, "cpu")
        assert np.array_equal(made.to_bool(512, 512), dense.numpy()), mod
