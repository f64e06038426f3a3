"""The sentences in which attention_with_kvcache refuses a call use its own arguments' names.

The C library checks strides, sizes and the entries of index arrays, and knows the arguments by
other names. The cases reach each of its checks that the checks in Python leave to it.
"""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

import tilewise
from paths import ROOT

pytestmark = pytest.mark.tensors

ARGUMENTS = set(inspect.signature(tilewise.attention_with_kvcache).parameters)
# Sizes that error messages and documentation of Python name as well.
SIZES = {"batch", "dtype", "heads_q", "heads_kv", "head_dim", "head_dim_v", "pages", "page_size"}


def fields() -> set[str]:
    """The fields of the structs of the C ABI that are no arguments."""
    text = "".join(
        (ROOT / "include/tilewise" / f"{x}.h").read_text() for x in ("attention", "append")
    )
    code = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    names = re.findall(r"(\w+)(?:;|, \w+;|,(?=[^()]*;))", code)
    return set(names) - ARGUMENTS - SIZES


def int32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def strided(shape, strides) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(np.zeros(4096, np.float32), shape, strides)


def base() -> dict:
    return dict(
        q=np.ones((2, 2, 4, 8), np.float32), k_cache=np.zeros((3, 16, 2, 8), np.float32),
        v_cache=np.zeros((3, 16, 2, 8), np.float32), k=np.ones((2, 2, 2, 8), np.float32),
        v=np.ones((2, 2, 2, 8), np.float32), cache_seqlens=int32(3, 4), cache_batch_idx=int32(0, 2),
    )  # fmt: skip


ONLY_READ = dict(k=None, v=None)
PACKED_NEW = dict(k=np.ones((4, 2, 8), np.float32), v=np.ones((4, 2, 8), np.float32))
TABLES = [np.ones((40, 9), np.float32)] * 2
CASES = {
    "overlapping rows": (
        dict(k_cache=strided((3, 16, 2, 8), (1024, 0, 32, 4))),
        "the row stride of k_cache is 0: the entries of an output must not overlap",
    ),
    "overlapping values": (
        dict(v_cache=strided((3, 16, 2, 8), (0, 64, 32, 4))), "the batch stride of v_cache is 0: ",
    ),
    "overlapping heads": (
        dict(v_cache=strided((3, 16, 2, 8), (1024, 64, 0, 4))), "the head stride of v_cache is 0: ",
    ),
    "row beyond the cache": (dict(cache_batch_idx=int32(0, 7)), "cache_batch_idx[1] is 7"),
    "row of two sequences": (dict(cache_batch_idx=int32(1, 1)), "cache_batch_idx[1] is 1 like"),
    "row that is only read": (
        dict(cache_batch_idx=int32(0, 7), **ONLY_READ), "cache_batch_idx[1] is 7",
    ),
    "padding": (dict(cache_leftpad=int32(0, 9)), "cache_leftpad[1] is 9"),
    "padding that is only read": (
        dict(cache_leftpad=int32(0, 99), **ONLY_READ), "cache_leftpad[1] is 99",
    ),
    "length": (dict(cache_seqlens=int32(3, 16)), "cache_seqlens[1] is 16"),
    "length that is only read": (
        dict(cache_seqlens=int32(3, 19), **ONLY_READ), "cache_seqlens[1] is 19",
    ),
    "page": (
        dict(block_table=int32([0], [5]), cache_batch_idx=None, **ONLY_READ),
        "block_table[1, 0] is 5",
    ),
    "page of two keys": (
        dict(block_table=int32([0], [0]), cache_batch_idx=None), "block_table[1, 0] is 0 like",
    ),
    "queries": (
        dict(q=np.ones((4, 4, 8), np.float32), cu_seqlens_q=int32(0, 3, 2)), "cu_seqlens_q[2] is 2",
    ),
    "new keys": (dict(cu_seqlens_k_new=int32(0, 3, 2), **PACKED_NEW), "cu_seqlens_k_new[2] is 2"),
    "columns of the tables": (
        dict(rotary_cos=TABLES[0], rotary_sin=TABLES[1]),
        "rotary_cos has 9 columns, but must have at most 4",
    ),
    "position": (
        dict(rotary_cos=np.ones((4, 2), np.float32), rotary_sin=np.ones((4, 2), np.float32)),
        "rotary_cos has 4 rows, but must have 5",
    ),
    "first position": (
        dict(rotary_cos=np.ones((40, 2), np.float32), rotary_sin=np.ones((40, 2), np.float32),
             rotary_seqlens=int32(-1, 3)),
        "rotary_seqlens[0] is -1",
    ),
    "mask": (
        dict(mask=tilewise.masks.Ranges([[5, 2]], [[0, 9]])), "mask.entries[0, 1] is 2: row_end",
    ),
    "factor": (dict(k_descale=np.ones((2, 2), np.float32)), "k_descale is given"),
    "splits": (dict(num_splits=999), "num_splits is 999"),
    "softcap": (dict(softcap=1e-45), "softcap is 1e-45"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
@pytest.mark.parametrize("name", CASES)
def test_refusals_name_the_arguments_of_python(kind, name):
    changed, sentence = CASES[name]
    given = base() | changed
    if kind == "tensors":
        given = {
            n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in given.items()
        }
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        tilewise.attention_with_kvcache(**given)
    assert not fields() & set(re.findall(r"\w+", str(refused.value))), str(refused.value)
    assert "stride_" not in str(refused.value)
    for cache in ("k_cache", "v_cache"):
        assert not np.asarray(given[cache]).any()


def test_fields_of_the_structs_are_read():
    assert {"kv_batch_idx", "leftpad_k", "cu_seqlens_new", "k_new", "rotary_dim"} <= fields()
