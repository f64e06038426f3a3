"""Every wrong argument of the Python functions is refused with its name, value and what is allowed.

Tensors and arrays are refused in the same words where the rules are the same.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

import tilewise


def tensor(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def array(*shape, dtype=np.float32):
    return np.zeros(shape, dtype=dtype)


def dense(make, **changes):
    """A call of attention that is valid except for the changes: B 2, Sq 5, Sk 7, Hq 4, Hkv 2, D
    8."""
    given = dict(q=make(2, 5, 4, 8), k=make(2, 7, 2, 8), v=make(2, 7, 2, 6)) | changes
    return tilewise.attention(given.pop("q"), given.pop("k"), given.pop("v"), **given)


def test_call_without_changes_is_valid():
    assert dense(tensor).shape == (2, 5, 4, 6)
    assert dense(array).shape == (2, 5, 4, 6)


# (changes, as a function of the array constructor; expected error; its text)
BOTH = [
    (lambda m: dict(q=m(5, 4, 8)), ValueError, r"q has shape \[5, 4, 8\], but must have 4"),
    (lambda m: dict(k=m(7, 2, 8)), ValueError, r"k has shape \[7, 2, 8\], but must have 4"),
    (lambda m: dict(v=m(2, 7, 12)), ValueError, r"v has shape \[2, 7, 12\], but must have 4"),
    (lambda m: dict(k=m(3, 7, 2, 8)), ValueError, "k has batch size 3, but q has 2"),
    (lambda m: dict(k=m(2, 7, 2, 9)), ValueError, "k has head dimension 9, but q has 8"),
    (lambda m: dict(v=m(2, 6, 2, 8)), ValueError, r"v has shape .* must agree with k"),
    (lambda m: dict(v=m(2, 7, 1, 8)), ValueError, r"v has shape .* must agree with k"),
    (lambda m: dict(q=m(2, 5, 3, 8)), ValueError, "q has 3 heads, but must have a multiple"),
    (lambda m: dict(q=m(2, 5, 0, 8)), ValueError, "q has 0 heads"),
    (lambda m: dict(k=m(2, 7, 0, 8), v=m(2, 7, 0, 8)), ValueError, "k has 0, but both"),
    (lambda m: dict(q=m(2, 5, 4, 0), k=m(2, 7, 2, 0)), ValueError, "q has head dimension 0"),
    (
        lambda m: dict(q=m(2, 5, 4, 577), k=m(2, 7, 2, 577)),
        ValueError,
        "577, but must be 1",
    ),
    (lambda m: dict(v=m(2, 7, 2, 600)), ValueError, "v has head dimension 600"),
    (lambda m: dict(v=m(2, 7, 2, 0)), ValueError, "v has head dimension 0"),
    (lambda _: dict(k=None), TypeError, "k is a NoneType"),
    (lambda _: dict(v=[1.0]), TypeError, "v is a list"),
    (lambda _: dict(layout="sbhd"), ValueError, "layout is 'sbhd', but must be 'bshd' or 'bhsd'"),
    (lambda _: dict(window=4), ValueError, "window is 4, but must be a pair"),
    (lambda _: dict(window=(1, 2, 3)), ValueError, r"window is \(1, 2, 3\)"),
    (lambda _: dict(window=(2**70, 0)), ValueError, "window left is 1180591620717411303424"),
    (lambda _: dict(layout=["bshd"]), ValueError, r"layout is \['bshd'\]"),
    (lambda _: dict(window=(1.5, 0)), TypeError, "window left is 1.5"),
    (lambda _: dict(window=(0, True)), TypeError, "window right is True"),
    (lambda _: dict(scale="a"), TypeError, "scale is 'a'"),
    (lambda _: dict(scale=math.inf), ValueError, "scale is inf"),
    (lambda _: dict(scale=math.nan), ValueError, "scale is nan"),
    (lambda m: dict(scale=m(2)), ValueError, r"scale has shape \[2\]"),
    (lambda _: dict(scale=1e300), ValueError, r"scale is 1e\+300, but must be finite in float32"),
    (lambda _: dict(softcap=-1.0), ValueError, r"softcap is -1.0, but must be 0 \(off\) or from"),
    (
        lambda _: dict(softcap=1e-50),
        ValueError,
        "softcap is 1e-50",
    ),  # 0 in float32, which would mean off
    (lambda _: dict(softcap=1e300), ValueError, r"softcap is 1e\+300"),
    (lambda _: dict(softcap=math.nan), ValueError, "softcap is nan"),
    (lambda _: dict(softcap=None), TypeError, "softcap is None"),
    (lambda _: dict(dropout_p=1.0), ValueError, r"dropout_p is 1.0, but must be in \[0, 1\)"),
    (lambda _: dict(dropout_p=1 - 1e-12), ValueError, "dropout_p is .*, and below 1 in float32"),
    (lambda _: dict(dropout_p=-0.1), ValueError, "dropout_p is -0.1"),
    (lambda _: dict(dropout_p="x"), TypeError, "dropout_p is 'x'"),
    (lambda m: dict(bias=m(5, 8)), ValueError, r"bias has shape \[5, 8\], .* here \[5, 7\]"),
    (lambda m: dict(bias=m(3, 4, 5, 7)), ValueError, r"bias has shape \[3, 4, 5, 7\]"),
    (lambda m: dict(bias=m(1, 1, 4, 5, 7)), ValueError, "must have 1 to 4 dimensions"),
    (lambda m: dict(bias=m()), ValueError, "must have 1 to 4 dimensions"),
    (lambda _: dict(bias=3.0), TypeError, "bias is a float"),
    (lambda m: dict(alibi_slopes=m(5)), ValueError, r"alibi_slopes has shape \[5\]"),
    (lambda m: dict(alibi_slopes=m(3, 4)), ValueError, r"alibi_slopes has shape \[3, 4\]"),
    (lambda _: dict(alibi_slopes=1.0), TypeError, "alibi_slopes is a float"),
    (lambda m: dict(sinks=m(2)), ValueError, r"sinks has shape \[2\], but must be \[4\]"),
    (lambda _: dict(sinks=1.0), TypeError, "sinks is a float"),
    (lambda _: dict(causal="False"), TypeError, "causal is 'False', but must be True or False"),
    (lambda _: dict(causal=None), TypeError, "causal is None"),
    (lambda _: dict(causal=2, window=(3, 3)), TypeError, "causal is 2"),
    (lambda m: dict(causal=m(2)), TypeError, "causal is"),
    (lambda _: dict(deterministic="no"), TypeError, "deterministic is 'no'"),
    (lambda _: dict(tf32=0.5), TypeError, "tf32 is 0.5"),
    (lambda _: dict(batch_invariant="yes"), TypeError, "batch_invariant is 'yes'"),
]


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
def test_numpy_scalars_are_accepted(make):
    dense(make, window=(np.int64(3), np.int32(0)), scale=np.float32(0.3), softcap=np.float32(9))
    varlen(make, max_seqlen_q=np.int64(3))
    with pytest.raises(TypeError, match="softcap is"):
        dense(make, softcap=np.bool_(True))


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize("value", [1, np.True_, np.int32(1), True])
def test_truthy_flags_are_accepted(make, value):
    """NumPy's and other booleans work on every path; the fast path only accepts Python's own."""
    options = dict(causal=value, deterministic=value, tf32=value, return_lse=True)
    lse = dense(make, **options)[1]
    assert float(lse[0, 0, 3]) == pytest.approx(math.log(6))  # the last row but one, of 7 keys
    lse = varlen(make, **options)[1]
    assert float(lse[0, 0]) == pytest.approx(math.log(3))


FLAGS = ["return_lse", "tf32", "check", "batch_invariant", "return_max_logits"]


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize("flag", [*FLAGS, "deterministic", "precise_backward"])
def test_flags_refuse_other_values(make, flag):
    """Also with all other options at their defaults, which takes the fast path."""
    calls = [varlen] if flag == "check" else [dense, varlen]
    for call, value in itertools.product(calls, ("no", make(2))):
        with pytest.raises(TypeError, match=rf"(?s)^{flag} is .*, but must be True or False"):
            call(make, **{flag: value})


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize("flag", FLAGS)
def test_flags_of_kvcache_refuse_other_values(make, flag):
    q, cache = make(2, 1, 4, 8), make(2, 7, 2, 8)
    for value in ("no", make(2)):
        with pytest.raises(TypeError, match=rf"(?s)^{flag} is .*, but must be True or False"):
            tilewise.attention_with_kvcache(q, cache, cache, **{flag: value})


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize(("changes", "error", "words"), BOTH)
def test_attention_refuses(make, changes, error, words):
    with pytest.raises(error, match=words):
        dense(make, **changes(make))


TENSORS = [
    (dict(q=tensor(2, 5, 4, 8, dtype=torch.float64)), TypeError, "q has dtype torch.float64"),
    (dict(q=tensor(2, 5, 4, 8, dtype=torch.int32)), TypeError, "q has dtype torch.int32"),
    (
        dict(k=tensor(2, 7, 2, 8).half()),
        TypeError,
        "k has dtype torch.float16, but must have torch.float32 like q",
    ),
    (
        dict(v=tensor(2, 7, 2, 6).bfloat16()),
        TypeError,
        "v has dtype torch.bfloat16, but must have torch.float32",
    ),
    (dict(k=array(2, 7, 2, 8)), TypeError, "k is a ndarray, but must be a torch.Tensor"),
    (dict(q=tensor(2, 5, 4, 8).to_sparse()), TypeError, "q has layout torch.sparse_coo"),
    (dict(q=torch.nested.nested_tensor([tensor(5, 4, 8)])), TypeError, "q is a nested tensor"),
    (dict(k=tensor(2, 7, 2, 8).to("meta")), ValueError, "k is on meta, but must be on cpu like q"),
    (dict(v=tensor(2, 7, 2, 6).to("meta")), ValueError, "v is on meta"),
    (dict(bias=tensor(5, 7).to("meta")), ValueError, "bias is on meta"),
    (dict(bias=tensor(5, 7).double()), TypeError, "bias has dtype torch.float64"),
    (dict(bias=tensor(5, 7).bool()), TypeError, "bias has dtype torch.bool"),
    (dict(bias=array(5, 7)), TypeError, "bias is a ndarray"),
    (dict(alibi_slopes=tensor(4).int()), TypeError, "alibi_slopes has dtype torch.int32"),
    (dict(alibi_slopes=tensor(4).to("meta")), ValueError, "alibi_slopes is on meta"),
    (dict(alibi_slopes=tensor(4).requires_grad_()), ValueError, "alibi_slopes requires a gradient"),
    (dict(sinks=tensor(4).long()), TypeError, "sinks has dtype torch.int64"),
    (dict(sinks=tensor(4).to("meta")), ValueError, "sinks is on meta"),
    (dict(scale=tensor(1).to("meta")), ValueError, "scale is on meta"),
    (dict(scale=tensor(1).int()), ValueError, "scale has shape .* floating-point"),
]


@pytest.mark.parametrize(("changes", "error", "words"), TENSORS)
def test_attention_refuses_tensors(changes, error, words):
    with pytest.raises(error, match=words):
        dense(tensor, **changes)


def test_last_index_error_refuses_what_is_no_index():
    with pytest.raises(TypeError, match=r"device is device\(type='cpu'\), but must be an integer"):
        tilewise.last_index_error(torch.device("cpu"))


def test_autocast_refuses_an_array_as_bias():
    with torch.autocast("cpu"), pytest.raises(TypeError, match="bias is a ndarray"):
        dense(tensor, bias=array(5, 7))


ARRAYS = [
    (dict(q=array(2, 5, 4, 8, dtype=np.float64)), TypeError, "q has dtype float64"),
    (
        dict(k=array(2, 7, 2, 8, dtype=np.float16)),
        TypeError,
        "k has dtype float16, but must have float32 like q",
    ),
    (dict(v=tensor(2, 7, 2, 6)), TypeError, r"v is a torch\.Tensor, but must be an array"),
    (dict(scale=tensor(1)), TypeError, r"scale is a torch\.Tensor, but must be an array"),
    (dict(bias=array(5, 7, dtype=np.float64)), TypeError, "bias has dtype float64"),
    (dict(bias=array(5, 7, dtype=np.float16)), TypeError, "bias has dtype float16, .* float32"),
    (dict(alibi_slopes=array(4, dtype=np.int64)), TypeError, "alibi_slopes has dtype int64"),
    (dict(sinks=array(4, dtype=np.bool_)), TypeError, "sinks has dtype bool"),
]


@pytest.mark.parametrize(("changes", "error", "words"), ARRAYS)
def test_attention_refuses_arrays(changes, error, words):
    with pytest.raises(error, match=words):
        dense(array, **changes)


def int32(make, values):
    return torch.tensor(values, dtype=torch.int32) if make is tensor else np.array(values, np.int32)


def varlen(make, **changes):
    """A call of attention_varlen with two sequences that is valid except for the changes."""
    given = dict(
        q=make(5, 4, 8), k=make(9, 2, 8), v=make(9, 2, 6), cu_seqlens_q=int32(make, [0, 2, 5]),
        cu_seqlens_k=int32(make, [0, 4, 9]),
    ) | changes  # fmt: skip
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")
    return tilewise.attention_varlen(*[given.pop(name) for name in names], **given)


def paged(m, **changes):
    return dict(
        k=m(3, 4, 2, 8), v=m(3, 4, 2, 6), cu_seqlens_k=None,
        block_table=int32(m, [[0, 1], [2, 0]]),
    ) | changes  # fmt: skip


VARLEN = [
    (lambda m: dict(q=m(1, 5, 4, 8)), ValueError, r"q has shape .* must have 3 dimensions"),
    (lambda m: dict(k=m(1, 9, 2, 8)), ValueError, r"k has shape .* must have 3 dimensions"),
    (lambda m: dict(v=m(8, 2, 6)), ValueError, r"v has shape .* must agree with k"),
    (lambda m: dict(k=m(9, 2, 7)), ValueError, "k has head dimension 7"),
    (lambda m: dict(q=m(5, 3, 8)), ValueError, "q has 3 heads"),
    (lambda _: dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k is None"),
    (lambda _: dict(cu_seqlens_q=[0, 2, 5]), TypeError, "cu_seqlens_q is a list"),
    (lambda m: dict(cu_seqlens_q=int32(m, [])), ValueError, "cu_seqlens_q"),
    (lambda m: dict(cu_seqlens_q=int32(m, [[0, 2, 5]])), ValueError, "cu_seqlens_q has shape"),
    (lambda m: dict(cu_seqlens_k=int32(m, [0, 9])), ValueError, r"cu_seqlens_k has shape \[2\]"),
    (lambda m: dict(cu_seqlens_q=m(3)), TypeError, "cu_seqlens_q has dtype"),
    (lambda m: dict(cu_seqlens_k=m(3)), TypeError, "cu_seqlens_k has dtype"),
    (lambda m: dict(seqused_q=int32(m, [1])), ValueError, r"seqused_q has shape \[1\]"),
    (lambda m: dict(seqused_k=int32(m, [1, 1, 1])), ValueError, r"seqused_k has shape \[3\]"),
    (lambda m: dict(seqused_k=m(2)), TypeError, "seqused_k has dtype"),
    (lambda _: dict(seqused_q=3), TypeError, "seqused_q is a int"),
    (lambda _: dict(max_seqlen_q=2.5), TypeError, "max_seqlen_q is 2.5"),
    (lambda _: dict(max_seqlen_k=-1), ValueError, "max_seqlen_k is -1"),
    (lambda _: dict(max_seqlen_k=2**64), ValueError, "max_seqlen_k is 18446744073709551616"),
    (lambda m: dict(q=m()), ValueError, r"q has shape \[\], but must have 3 dimensions"),
    (lambda m: dict(q=m(5, 4, 0), k=m(9, 2, 0)), ValueError, "q has head dimension 0"),
    (lambda _: dict(softcap=1e-50), ValueError, "softcap is 1e-50"),
    (lambda _: dict(causal="no"), TypeError, "causal is 'no'"),
    (lambda _: dict(check="no"), TypeError, "check is 'no'"),
    (lambda m: dict(bias=m(3, 4, 3, 5)), ValueError, r"bias has shape \[3, 4, 3, 5\]"),
    (
        lambda m: paged(m, cu_seqlens_k=int32(m, [0, 4, 9])),
        ValueError,
        "block_table are both given",
    ),
    (lambda m: paged(m, block_table=int32(m, [[0, 1]])), ValueError, "block_table has shape"),
    (lambda m: paged(m, block_table=m(2, 2)), TypeError, "block_table has dtype"),
    (lambda m: paged(m, block_table=3), TypeError, "block_table is a int"),
    (lambda m: paged(m, k=m(9, 2, 8)), ValueError, r"k has shape .* must have 4 dimensions"),
    # Errors that only the entries reveal; the library reports them before it writes anything.
    (lambda m: dict(cu_seqlens_q=int32(m, [1, 2, 5])), ValueError, "cu_seqlens_q"),
    (lambda m: dict(cu_seqlens_q=int32(m, [0, 6, 5])), ValueError, "cu_seqlens_q"),
    (lambda m: dict(cu_seqlens_q=int32(m, [0, 2, 6])), ValueError, "cu_seqlens_q"),
    (lambda m: dict(cu_seqlens_k=int32(m, [0, 4, 10])), ValueError, "cu_seqlens_k"),
    (lambda m: dict(seqused_q=int32(m, [3, 0])), ValueError, "seqused_q"),
    (lambda m: dict(seqused_k=int32(m, [4, 6])), ValueError, "seqused_k"),
    (lambda m: paged(m, block_table=int32(m, [[0, 3], [1, 2]])), ValueError, "block_table"),
    (lambda m: paged(m, block_table=int32(m, [[0, -1], [1, 2]])), ValueError, "block_table"),
    (lambda m: paged(m, seqused_k=int32(m, [9, 1])), ValueError, "seqused_k"),
]


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize(("changes", "error", "words"), VARLEN)
def test_attention_varlen_refuses(make, changes, error, words):
    assert varlen(make).shape == (5, 4, 6) and varlen(make, **paged(make)).shape == (5, 4, 6)
    with pytest.raises(error, match=words):
        varlen(make, **changes(make))


def test_index_tensors_must_be_contiguous_and_on_the_same_device():
    strided = torch.tensor([[0, 9], [2, 9], [5, 9]], dtype=torch.int32)[:, 0]
    with pytest.raises(ValueError, match="cu_seqlens_q has stride 2"):
        varlen(tensor, cu_seqlens_q=strided)
    with pytest.raises(ValueError, match="seqused_k is on meta"):
        varlen(tensor, seqused_k=torch.zeros(2, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda m: (m(5, 4), m(4, 5), m(5, 4), m(4, 5)), r"out_a has shape \[5, 4\]"),
        (lambda m: (m(5, 4, 6), m(4, 5), m(5, 4, 7), m(4, 5)), r"out_b has shape \[5, 4, 7\]"),
        (lambda m: (m(5, 4, 6), m(5, 4), m(5, 4, 6), m(4, 5)), r"lse_a has shape \[5, 4\]"),
        (lambda m: (m(5, 4, 6), m(4, 5), m(5, 4, 6), m(4, 6)), r"lse_b has shape \[4, 6\]"),
        (lambda m: (m(2, 5, 4, 6), m(2, 5, 4), m(2, 5, 4, 6), m(2, 4, 5)), "lse_a has shape"),
    ],
)
def test_merge_states_refuses(make, arguments, words):
    with pytest.raises(ValueError, match=words):
        tilewise.merge_states(*arguments(make))


@pytest.mark.parametrize("make", [tensor, array], ids=["tensor", "array"])
@pytest.mark.parametrize("which", range(4))
def test_merge_states_requires_floating_point(make, which):
    given = [make(2, 5, 4, 6), make(2, 4, 5)] * 2
    given[which] = make(*given[which].shape, dtype=torch.int32 if make is tensor else np.int32)
    name = ("out_a", "lse_a", "out_b", "lse_b")[which]
    with pytest.raises(TypeError, match=rf"{name} has dtype (torch\.)?int32, but must be"):
        tilewise.merge_states(*given)


def test_merge_states_refuses_mixed_kinds():
    out, lse = tensor(5, 4, 6), tensor(4, 5)
    with pytest.raises(TypeError, match=r"out_b is a ndarray, but must be a torch\.Tensor"):
        tilewise.merge_states(out, lse, out.numpy(), lse.numpy())
    with pytest.raises(TypeError, match=r"lse_a is a torch\.Tensor, but must be an array"):
        tilewise.merge_states(out.numpy(), lse, out.numpy(), lse.numpy())
    with pytest.raises(TypeError, match="out_a is a NoneType"):
        tilewise.merge_states(None, lse, out, lse)
    with pytest.raises(ValueError, match="lse_b is on meta, but must be on cpu like out_a"):
        tilewise.merge_states(out, lse, out, lse.to("meta"))


def test_attention_backward_refuses():
    q, out, lse = array(2, 5, 4, 8), array(2, 5, 4, 8), array(2, 4, 5)
    k = array(2, 7, 2, 8)
    for changes, error, words in (
        (dict(dout=array(2, 5, 4, 7)), ValueError, r"dout has shape \[2, 5, 4, 7\]"),
        (dict(dout=array(2, 5, 4, 8, dtype=np.float16)), TypeError, "dout has dtype float16"),
        (dict(out=array(2, 4, 5, 8)), ValueError, "out has shape"),
        (dict(lse=array(2, 5, 4)), ValueError, "lse has shape"),
        (dict(lse=array(2, 4, 5, dtype=np.float64)), TypeError, "lse has dtype float64"),
        (dict(dlse=array(2, 5, 4)), ValueError, "dlse has shape"),
        (dict(q=tensor(2, 5, 4, 8)), TypeError, r"q is a torch\.Tensor, but must be an array"),
        (dict(seqused_k=int32(array, [3, 7])), ValueError, "seqused_k is given, but belongs to"),
    ):
        given = dict(dout=out, q=q, k=k, v=k, out=out, lse=lse) | changes
        names = ("dout", "q", "k", "v", "out", "lse")
        with pytest.raises(error, match=words):
            tilewise.attention_backward(*[given.pop(name) for name in names], **given)


def test_explain_refuses_what_attention_refuses():
    for make in (tensor, array):
        with pytest.raises(ValueError, match="softcap is -1"):
            tilewise.explain(make(1, 2, 1, 8), make(1, 2, 1, 8), make(1, 2, 1, 8), softcap=-1)
        given = dict(seqused_k=int32(make, [1]), block_table=int32(make, [[0]]))
        for name, value in given.items():
            with pytest.raises(ValueError, match=f"{name} is given, but belongs to cu_seqlens_q"):
                tilewise.explain(*[make(1, 2, 1, 8)] * 3, **{name: value})


def test_missing_library_is_named_in_the_error(monkeypatch, tmp_path):
    from tilewise import _library

    monkeypatch.setenv(_library.DIRECTORY_VARIABLE, str(tmp_path))
    with pytest.raises(ImportError, match=r"libtilewise\.so is not in .*TILEWISE_LIBRARY_DIR"):
        _library._path_of("libtilewise")
    (tmp_path / "libtilewise.so").write_text("no library")
    _library.c_library.cache_clear()
    try:
        with pytest.raises(ImportError, match="cannot be loaded"):
            _library.c_library()
    finally:
        _library.c_library.cache_clear()


def test_unknown_names():
    with pytest.raises(AttributeError, match="no attribute 'flash'"):
        tilewise.flash  # noqa: B018
    assert set(tilewise.__all__) <= set(dir(tilewise))
    assert len(set(dir(tilewise))) == len(dir(tilewise))
