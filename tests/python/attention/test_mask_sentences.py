"""Wrong masks and calls with them: one sentence each."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import capi
import tilewise
from cases import Built, Case
from tilewise import masks


def inputs():
    """q, k and v of two sequences of 9 rows."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(2, 9, 2, 16, generator=generator) for _ in range(3)]


@pytest.mark.parametrize(
    ("make", "kind", "sentence"),
    [
        (lambda: masks.Ranges([[0, 1]], [[0, 1]], "banded"), ValueError, "kinds has 'banded'"),
        (lambda: masks.Ranges([[0, 1]], [[0, 1, 2]]), ValueError, "key_ranges has shape"),
        (lambda: masks.Ranges([[0, 2**31]], [[0, 1]]), TypeError, "query_ranges has numbers"),
        (lambda: masks.Ranges(np.zeros((1, 2)), [[0, 1]]), TypeError, "query_ranges has dtype"),
        (lambda: masks.from_bool(np.zeros((2, 2))), TypeError, "dense has dtype float64"),
        (lambda: masks.from_bool(np.zeros((2, 2, 2), bool)), ValueError, "dense has shape"),
        (
            lambda: masks.from_flex(None, score_mod=lambda *x: x[0]),
            ValueError,
            "softcap, alibi_slopes",
        ),
        (lambda: masks.from_flex(3), TypeError, "block_mask is a int"),
        (lambda: masks.Ranges([[0, 1], [2]], [[0, 1]]), ValueError, "query_ranges has rows of"),
        (lambda: masks.Ranges([[0, 1]], [[0, 1]], 3), TypeError, "kinds is of type int"),
        (
            lambda: masks.Ranges([[0, 1]] * 2, [[0, 1]] * 2, [3, 4]),
            ValueError,
            r"kinds\[1\] is 4, but must be one of 0 \(full\), 1 \(causal\)",
        ),
        (
            lambda: masks.Ranges(
                *torch.zeros(2, 1, 2).int(), torch.tensor([-1], dtype=torch.int32)
            ),
            ValueError,
            r"kinds\[0\] is -1, but must be one of",
        ),
        (lambda: masks.Ranges.causal(-3), ValueError, "seqlen_q is -3, but must be at least 0"),
        (lambda: masks.Ranges.prefixes([1], 2.0), TypeError, "seqlen is of type float"),
        (lambda: masks.Ranges([], []).blocks(0, 3), ValueError, "seqlen_q is 0, but must be at"),
        (lambda: masks.Ranges([], []).density(-1, 3), ValueError, "seqlen_q is -1"),
        (lambda: masks.Ranges([], []).plot(1, 1, head=1), ValueError, "head is 1, but must be"),
        (lambda: masks.Blocks([0], [], [], rows=0, keys=3), ValueError, "rows is 0, but must be"),
        (
            lambda: masks.Ranges([[0, 2]], []),
            ValueError,
            r"key_ranges has shape \[0\], but must be \[1, 2\]",
        ),
        (
            lambda: masks.Ranges.prefixes(np.array([1], np.int32), 2**70),
            ValueError,
            "seqlen is 1180591620717411303424, but must be at most 2147483647",
        ),
        (lambda: masks.Ranges.causal(2**31), ValueError, "seqlen_q is 2147483648, but must be at"),
        (lambda: masks.from_bool(np.ones((0, 2), bool)), ValueError, "with sizes of at least 1"),
        (
            lambda: masks.from_bool(np.ones((9, 9), bool)) & masks.from_bool(np.ones((9, 8), bool)),
            ValueError,
            "the masks are for 9 x 9 and 9 x 8 rows and keys",
        ),
        (
            lambda: masks.Ranges(torch.zeros(1, 2).int(), torch.zeros(1, 2, device="meta").int()),
            ValueError,
            "key_ranges is on meta, but must be on cpu",
        ),
        (lambda: masks.Ranges([], []) & 3, TypeError, "the right side of & is a int"),
        (
            lambda: masks.Ranges.prefixes([1, 2], 9) | masks.Ranges.prefixes([1, 2, 3], 9),
            ValueError,
            "the masks have batch 2 and 3",
        ),
        (lambda: masks.from_bool(np.ones((9, 9), bool)).tiles(8), ValueError, "seqlen_q is 8"),
    ],
)
def test_sentences_of_masks(make, kind, sentence):
    with pytest.raises(kind, match=sentence):
        make()


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize(
    ("mask", "kind", "sentence"),
    [
        (torch.ones(9, 9, dtype=torch.bool), TypeError, "mask is a Tensor, but must be one of"),
        (masks.Ranges.prefixes([1, 2, 3], 9), ValueError, "mask has batch 3, but must have 1 or 2"),
        (masks.from_bool(np.ones((1, 3, 9, 9), bool)), ValueError, "mask has heads 3"),
        (masks.from_bool(np.ones((9, 8), bool)), ValueError, "mask is for 9 rows and 8 keys"),
        (masks.Ranges([[5, 2]], [[0, 9]]), ValueError, r"mask.entries\[0, 1\] is 2: row_end"),
        (masks.Ranges([[0, 2]], [[0, 9]], starts=[0, 2]), ValueError, r"mask.first\[1\] is 2"),
    ],
)
def test_sentences_of_calls(mask, kind, sentence, arrays):
    with pytest.raises((kind, RuntimeError), match=sentence):
        tilewise.attention(*[x.numpy() if arrays else x for x in inputs()], mask=mask)


@pytest.mark.abi
def test_sentences_of_the_struct(device):
    case = Case(rows=(200,), keys=(300,), mask_blocks="")
    for change, sentence in {
        "kind=3": "mask.kind is 3: it must be 1 (ranges) or 2 (blocks)",
        "struct_size=8": "mask.struct_size is 8",
        "batch=2": "mask.batch is 2: it must be 1",
        "heads=2": "mask.heads is 2: it must be 1",
        "rows=-1": "mask.rows is -1",
        "first=0": "mask.first is NULL",
        # Entries of arrays on a GPU are not read.
        **(
            {"entry_count=0": "it must be at most mask.entry_count"} if device.name == "cpu" else {}
        ),
    }.items():
        b = Built(case)
        struct = ctypes.cast(b.attention.mask, ctypes.POINTER(capi.Mask)).contents
        name, value = change.split("=")
        setattr(struct, name, int(value) or None if name == "first" else int(value))
        with pytest.raises(AssertionError) as refusal:
            capi.forward(b.attention)
        assert sentence in str(refusal.value)
