"""explain() and capabilities() describe what the library really does."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest
import torch

import tilewise
from paths import ROOT
from tilewise import _abi, _capabilities, _check, masks

HEADER = ROOT / "include/tilewise/version.h"
BOTH = pytest.mark.parametrize("kind", [lambda x: x, torch.Tensor.numpy], ids=["torch", "numpy"])


def test_version_matches_the_header():
    assert f'"{tilewise.__version__}"' in HEADER.read_text()


def test_explain_names_a_kernel_of_the_support_matrix():
    q = torch.zeros(2, 100, 4, 64, dtype=torch.bfloat16)
    explanation = tilewise.explain(q, q, q, causal=True)
    families = {
        row.name for row in tilewise.capabilities() if row.available and row.dtype == "bfloat16"
    }
    for plan, which in ((explanation.forward, "forward"), (explanation.backward, "backward")):
        assert any(plan.kernel.startswith(f"{name}.{which}") for name in families), plan
        assert plan.why and plan.workspace_bytes >= 0 and plan.tile_q > 0 and plan.tile_k > 0
    lines = str(explanation).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(
        "bfloat16 on cpu, batch 2, 100 rows x 100 keys, 4 heads, head dim 64"
    )
    assert lines[0].endswith("causal")


def test_max_head_dim_matches_the_library():
    rows = tilewise.capabilities()
    assert max(row.max_head_dim for row in rows) == _check.MAX_HEAD_DIM
    for device, dtype in {(row.device, row.dtype) for row in rows}:
        largest = max(r.max_head_dim for r in rows if (r.device, r.dtype) == (device, dtype))
        if dtype == "float8_e4m3fn":  # that of products in float8: other kernels read 16 bits
            assert largest == 192
            continue
        half = dtype != "float32"  # whose forward has the head dimensions of latent caches
        assert largest == (_check.MAX_HEAD_DIM if half else _check.max_head_dim(device))
    half = torch.zeros(1, dtype=torch.float16)
    assert _check.max_forward_head_dim(half) == _check.MAX_HEAD_DIM


def test_max_splits_matches_the_library(monkeypatch):
    q = torch.zeros(1, 1, 1, 8)
    assert tilewise.explain(q, q, q, cache_seqlens=1, num_splits=_check.MAX_SPLITS).forward.splits
    monkeypatch.setattr(_check, "MAX_SPLITS", _check.MAX_SPLITS + 1)
    with pytest.raises(ValueError, match=r"^tilewise: num_splits is 257: it must be 0 to 256"):
        tilewise.explain(q, q, q, cache_seqlens=1, num_splits=_check.MAX_SPLITS)


def test_explain_counts_torch_threads():
    q, threads = torch.zeros(4, 300, 8, 16), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert tilewise.explain(q, q, q).forward.threads == 1
    finally:
        torch.set_num_threads(threads)


def test_a_plan_for_a_gpu_says_nothing_of_threads_of_the_host():
    plan = tilewise.Plan("cuda.simt.forward.fp32", "no tensor cores", 64, 32, 1, 0, 1024)
    assert str(plan) == (
        "cuda.simt.forward.fp32, tiles 64 x 32, workspace 1,024 bytes; no tensor cores"
    )


def test_explain_agrees_for_tensors_and_arrays():
    q, bias = torch.zeros(1, 30, 2, 16), torch.zeros(2, 1, 30)
    options = dict(window=(3, 0), softcap=2.0, dropout_p=0.5, deterministic=True)
    tensors = tilewise.explain(q, q, q, bias=bias, sinks=torch.zeros(2), **options)
    arrays = tilewise.explain(
        q.numpy(), q.numpy(), q.numpy(), bias=bias.numpy(), sinks=np.zeros(2, np.float32), **options
    )
    assert tensors.problem == arrays.problem
    assert tensors.forward.kernel == arrays.forward.kernel
    for word in ("window (3, 0)", "softcap 2", "bias", "sinks", "dropout 0.5", "deterministic"):
        assert word in tensors.problem


def test_explain_of_sequences_and_pages():
    starts = torch.tensor([0, 3, 9], dtype=torch.int32)
    q, pages = torch.zeros(9, 2, 16), torch.zeros(4, 8, 2, 16)
    table = torch.zeros(2, 3, dtype=torch.int32)
    text = str(tilewise.explain(q, q, q, cu_seqlens_q=starts, cu_seqlens_k=starts))
    assert "variable length" in text
    text = str(tilewise.explain(q, pages, pages, cu_seqlens_q=starts, block_table=table))
    assert "pages of 8" in text and "x 24 keys" in text


@BOTH
def test_explain_of_a_cache(kind):
    q, cache = kind(torch.zeros(2, 1, 4, 16)), kind(torch.zeros(3, 40, 2, 16))
    lengths, rows = kind(torch.tensor([9, 20])), kind(torch.tensor([2, 0]))
    given = tilewise.explain(
        q, cache, cache, cache_seqlens=lengths, cache_batch_idx=rows, cache_leftpad=lengths
    )
    for words in ("batch 2, 1 rows x 40 keys", "4 heads over 2", "keys in use per sequence",
                  "left padding", "cache rows by index"):  # fmt: skip
        assert words in given.problem
    assert given.forward.kernel.startswith("cpu.")
    assert given.backward == "attention_with_kvcache has no gradient"
    pages = kind(torch.zeros(2, 3, dtype=torch.int32))
    paged = tilewise.explain(q, cache, cache, cache_seqlens=7, block_table=pages)
    assert "pages of 40" in paged.problem and "x 120 keys" in paged.problem
    with pytest.raises(ValueError, match="k_cache has batch size 3"):
        tilewise.explain(q, cache, cache, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="num_splits is given, but belongs to cache_seqlens"):
        tilewise.explain(q, q, q, num_splits=2)
    with pytest.raises(ValueError, match="q has shape"):  # packed queries have rank 3
        tilewise.explain(q, cache, cache, cache_seqlens=lengths, cu_seqlens_q=pages[0])


@BOTH
@pytest.mark.parametrize(
    ("name", "value"),
    [("dropout_p", 0.5), ("deterministic", True), ("layout", "bhsd"),
     ("cu_seqlens_k", torch.tensor([0, 40])), ("seqused_k", torch.tensor([9, 20])),
     ("max_seqlen_k", 40)],
)  # fmt: skip
def test_explain_of_a_cache_refuses_arguments_of_other_functions(kind, name, value):
    q, cache = kind(torch.zeros(2, 1, 4, 16)), kind(torch.zeros(2, 40, 2, 16))
    value = kind(value) if isinstance(value, torch.Tensor) else value
    for given in (dict(cache_seqlens=7), dict(cache_batch_idx=kind(torch.tensor([1, 0])))):
        with pytest.raises(ValueError, match=f"{name} is given, but attention_with_kvcache has no"):
            tilewise.explain(q, cache, cache, **given, **{name: value})


@BOTH
def test_explain_of_selected_keys(kind):
    """The problem that runs: each row of q is a sequence, whose pages are single rows."""
    pages, starts = kind(torch.zeros(5, 8, 1, 16)), kind(torch.tensor([0, 2, 6]))
    q = kind(torch.zeros(2, 3, 4, 16))
    indices = kind(torch.zeros(2, 3, 7, dtype=torch.int32))
    for given in (
        dict(q=q, indices=indices),
        dict(q=q.reshape(6, 4, 16), indices=indices.reshape(6, 7), cu_seqlens_q=starts),
    ):
        plan = tilewise.explain(k=pages, head_dim_v=8, **given)
        for words in ("batch 6, 1 rows x 7 keys", "head dim 16 and 8", "pages of 1"):
            assert words in plan.problem
        assert plan.forward.kernel.startswith("cpu.")
    with pytest.raises(ValueError, match="causal or window and indices are both given"):
        tilewise.explain(q, pages, pages, indices=indices, causal=True)
    with pytest.raises(ValueError, match=r"indices has shape \[2, 2, 7\]"):
        tilewise.explain(q, pages, pages, indices=indices[:, :2])


@BOTH
def test_explain_checks_the_layout_of_every_form(kind):
    q, starts = kind(torch.zeros(9, 2, 16)), kind(torch.tensor([0, 3, 9], dtype=torch.int32))
    dense, varlen = q[None], dict(cu_seqlens_q=starts, cu_seqlens_k=starts)
    for x, given in ((dense, {}), (dense, dict(cache_seqlens=7)), (q, varlen)):
        with pytest.raises(ValueError, match="layout is 'junk', but must be 'bshd' or 'bhsd'"):
            tilewise.explain(x, x, x, layout="junk", **given)
    with pytest.raises(ValueError, match="layout is given, but attention_varlen has no such"):
        tilewise.explain(q, q, q, layout="bhsd", **varlen)
    with pytest.raises(ValueError, match="check is given, but attention has no such argument"):
        tilewise.explain(dense, dense, dense, check=True)


def test_explain_names_a_backward_only_where_one_exists():
    """Paged tensors have a gradient; attention_backward, which takes arrays, has no block_table."""
    starts, table = torch.tensor([0, 3, 9]).int(), torch.zeros(2, 3).int()
    q, pages = torch.zeros(9, 2, 16), torch.zeros(4, 8, 2, 16)
    given = dict(cu_seqlens_q=starts, block_table=table)
    assert isinstance(tilewise.explain(q, pages, pages, **given).backward, tilewise.Plan)
    arrays = {name: value.numpy() for name, value in given.items()}
    explanation = tilewise.explain(q.numpy(), pages.numpy(), pages.numpy(), **arrays)
    assert isinstance(explanation.forward, tilewise.Plan)
    assert "takes no block_table" in explanation.backward
    taken = inspect.signature(tilewise.attention_backward).parameters
    assert "cu_seqlens_q" in taken and "block_table" not in taken


def test_explain_does_not_advance_random_generators():
    q = torch.zeros(1, 4, 1, 8)
    torch.manual_seed(1)
    wanted = torch.rand(3)
    torch.manual_seed(1)
    tilewise.explain(q, q, q, dropout_p=0.5)
    assert torch.equal(torch.rand(3), wanted)
    np.random.seed(1)
    wanted = np.random.rand(3)
    np.random.seed(1)
    tilewise.explain(q.numpy(), q.numpy(), q.numpy(), dropout_p=0.5)
    assert np.array_equal(np.random.rand(3), wanted)


def test_explain_saves_no_generator_of_another_device(monkeypatch):
    """PyTorch saves those of all GPUs if it is not told which, and warns that it does."""
    saved = []
    fork_rng = torch.random.fork_rng

    def recorded(devices=None, **options):
        saved.append(devices)
        return fork_rng(devices, **options)

    monkeypatch.setattr(torch.random, "fork_rng", recorded)
    q = torch.zeros(1, 4, 1, 8)
    tilewise.explain(q, q, q, dropout_p=0.5)
    assert saved == [[]]


def test_explain_of_cuda_tensors_without_kernels_gives_the_reason():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    q = torch.zeros(1, 4, 1, 8, device="cuda")
    assert "tilewise" in str(tilewise.explain(q, q, q))


def test_capabilities():
    rows = tilewise.capabilities()
    assert rows
    names = [(row.name, row.dtype) for row in rows]
    assert len(names) == len(set(names))
    for row in rows:
        assert re.fullmatch(r"[a-z0-9_.]+", row.name)
        assert row.device in ("cpu", "cuda") and row.dtype in _abi.DTYPES
        assert row.max_head_dim >= 1 and row.requires
    portable = [row for row in rows if row.name == "cpu.portable"]
    assert len(portable) == 3
    assert all(row.available and row.forward and row.backward for row in portable)


def test_gpu_family_requirements_name_the_oldest_code_of_the_build(monkeypatch):
    """A family may require less than the architectures that builds are compiled for, as simt
    does."""
    code = [
        {"table": table, "sm": sm, "ptx": ptx}
        for table, sm, ptx in ((0, 75, False), (0, 90, False), (80, 80, True), (901, 90, False))
    ]
    monkeypatch.setattr(_capabilities, "cuda_code", lambda: code)
    for row in tilewise.capabilities():
        oldest = {"cuda.simt": 75, "cuda.mma_sync": 80, "cuda.wgmma": 90}.get(row.name)
        words = f"; its oldest code in this build is for sm_{oldest}"
        assert row.requires.endswith(words) == (oldest is not None), row
        assert "this build" in row.requires or row.device == "cpu"
    monkeypatch.setattr(_capabilities, "cuda_code", list)
    for row in tilewise.capabilities():
        missing = row.device == "cuda" and not row.available
        assert row.requires.endswith("; this build has no code for it") == missing, row


@BOTH
def test_ranges_far_beyond_the_sequences(kind):
    """The tiles that are counted are those that a call can have, not those of the ranges."""
    q, starts = torch.zeros(300, 2, 8), torch.tensor([0, 100, 300], dtype=torch.int32)
    far = torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)
    mask = masks.Ranges(kind(far), kind(far))
    x, packed = kind(q), dict(cu_seqlens_q=kind(starts), cu_seqlens_k=kind(starts))
    text = tilewise.explain(x, x, x, **packed, mask=mask).mask
    assert text.startswith("9 tiles of 128 x 128 of the mask, without the band: 0 skipped, 9 full")
    bounds = dict(max_seqlen_q=200, max_seqlen_k=128)
    assert tilewise.explain(x, x, x, **packed, **bounds, mask=mask).mask.startswith("2 tiles ")
    cache = kind(torch.zeros(4, 64, 2, 8))
    table = kind(torch.zeros(1, 3, dtype=torch.int32))
    length = kind(torch.tensor([150], dtype=torch.int32))
    paged = tilewise.explain(
        kind(q[None, :5]), cache, cache, cache_seqlens=length, block_table=table, mask=mask
    )
    assert paged.mask.startswith("2 tiles ")
