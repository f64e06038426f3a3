"""Every instruction set with every dtype, class of head dimension and number of rows, compared with
the oracle.

The code that runs depends on how a row ends inside a vector and on the number of query rows per
key; each combination has its own stack arrays and tails. `.ci/run sanitize` runs this file with a
library built with AddressSanitizer and UndefinedBehaviorSanitizer, which watch those arrays.
"""

from __future__ import annotations

import pytest

import float8_cases
from cases import Case, check

pytestmark = pytest.mark.abi("cpu")

DTYPES = ["fp32", "bf16", "fp16"]
# Less than one vector of any instruction set, whole vectors, ends inside a vector or an AMX tile,
# several tiles; with the same and with another dimension of v.
HEAD_DIMS = [(1, 1), (3, 5), (8, 8), (20, 20), (40, 72), (64, 64), (72, 40), (96, 96), (100, 104),
             (128, 128), (192, 128), (256, 256), (257, 111), (512, 512)]  # fmt: skip
QUERY_HEADS_PER_KEY = range(1, 17)


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dtype, head_dim):
    for group in QUERY_HEADS_PER_KEY:
        check(
            Case(dtype, (1, 1), (37, 37), used_k=(37, 18), group=group, head_dim=head_dim[0],
                 head_dim_v=head_dim[1], spread=0.5, seed=group),
            backward=False,
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_decode_from_float8(dtype, head_dim):
    for group in QUERY_HEADS_PER_KEY:
        float8_cases.check(
            Case(dtype, (1,), (37,), group=group, head_dim=head_dim[0], head_dim_v=head_dim[1],
                 seed=group)
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_and_backward(dtype, head_dim):
    for rows, keys in [(2, 3), (7, 33), (17, 17), (40, 70)]:
        check(
            Case(dtype, (rows,), (keys,), group=2, head_dim=head_dim[0], head_dim_v=head_dim[1],
                 window=(-1, 0), bias="bhr" if rows == 7 else None, dlse=True, spread=0.5),
        )  # fmt: skip


@pytest.mark.parametrize("head_dim", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_rows_over_float8(dtype, head_dim):
    for rows, keys in [(7, 33), (40, 70)]:
        float8_cases.check(
            Case(dtype, (rows,), (keys,), group=2, head_dim=head_dim[0], head_dim_v=head_dim[1],
                 window=(-1, 0))
        )  # fmt: skip
