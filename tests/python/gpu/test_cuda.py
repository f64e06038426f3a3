"""Tensors on a GPU: streams, graphs, several GPUs, comparison with torch's own kernels."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import devices
import tilewise
from bounds import FORWARD_FACTOR

pytestmark = pytest.mark.tensors("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(dtype=torch.float32, rows=130, keys=170, heads=4, heads_kv=2, dim=64):
    shapes = ((rows, heads), (keys, heads_kv), (keys, heads_kv))
    return [torch.randn(2, n, h, dim, dtype=dtype, requires_grad=True) for n, h in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_of_a_training_step(dtype):
    """Forward and backward are captured by torch's CUDA graphs and replayed on new numbers."""
    q, k, v = inputs(dtype)
    dout = torch.randn_like(q)

    def step():
        out = tilewise.attention(q, k, v, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    with devices.captured() as graph:
        captured = step()
    for _ in range(2):
        with torch.no_grad():
            for x in (q, k, v, dout):
                x.copy_(torch.randn_like(x))
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert torch.equal(got, want)


def test_dropout_in_a_graph_draws_new_bits():
    q, k, v = (x.detach() for x in inputs())
    tilewise.attention(q, k, v, dropout_p=0.5)
    with devices.captured() as graph:
        out = tilewise.attention(q, k, v, dropout_p=0.5)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert first.isfinite().all() and not torch.equal(first, out)


def test_varlen_decode_graphs_on_two_streams():
    """The last CTA of a tile is found by a counter, which must start at zero in each launch."""
    q = torch.randn(70, 1, 8, 128, dtype=torch.bfloat16)
    cache = [torch.randn(70, 1024, 2, 128, dtype=torch.bfloat16) for _ in "kv"]
    lengths = torch.ones(70, dtype=torch.int32)
    captured = []
    for i in range(2):
        stream = torch.cuda.Stream()
        tilewise.attention_with_kvcache(q + i, *cache, cache_seqlens=lengths)
        torch.cuda.synchronize()
        with devices.captured(stream) as graph:
            outs = [
                tilewise.attention_with_kvcache(q + i, *cache, cache_seqlens=lengths)
                for _ in range(4)
            ]
        captured.append((stream, graph, outs))
    for turn in range(12):
        new = (torch.rand(70) ** (1 + turn % 4) * 1024).int()
        lengths.copy_(new)
        want = [tilewise.attention_with_kvcache(q + i, *cache, cache_seqlens=new) for i in (0, 1)]
        torch.cuda.synchronize()
        for stream, graph, _ in captured:
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        for (_, _, outs), right in zip(captured, want, strict=True):
            assert all(torch.equal(out, right) for out in outs)


def test_checks_are_refused_during_capture_and_capture_continues():
    q, cache = torch.randn(2, 1, 4, 64), torch.randn(2, 32, 2, 64)
    packed, keys = torch.randn(10, 4, 64), torch.randn(10, 2, 64)
    starts = torch.tensor([0, 4, 10], dtype=torch.int32)
    lengths = torch.tensor([3, 30], dtype=torch.int32)

    def results(check):
        yield lambda: tilewise.attention_varlen(packed, keys, keys, starts, starts, check=check)
        yield lambda: tilewise.attention_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, check=check
        )

    want = [call() for call in results(True)]
    with devices.captured() as graph:
        for call in results(True):
            with pytest.raises(ValueError, match=r"check is .* while the stream is being captured"):
                call()
        got = [call() for call in results(False)]
    graph.replay()
    for x, y in zip(got, want, strict=True):
        assert torch.equal(x, y)


def test_torch_current_stream_is_used():
    q, k, v = (x.detach() for x in inputs())
    want = tilewise.attention(q, k, v)
    right, stream = k.clone(), torch.cuda.Stream()
    k.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        k.copy_(right)
        got = tilewise.attention(q, k, v)
    stream.synchronize()
    assert torch.equal(got, want)


def test_deterministic_is_bitwise_with_other_work_on_the_gpu():
    q, k, v = inputs(torch.bfloat16, rows=900, keys=900)
    dout, other = torch.randn_like(q), torch.cuda.Stream()
    results = []
    for turn in range(8):
        with torch.cuda.stream(other):
            busy = torch.randn(256 + 300 * turn, 2048)
            for _ in range(3):
                busy = torch.tanh(busy @ busy.T) @ busy
        out = tilewise.attention(q, k, v, causal=True, deterministic=True)
        results.append((out, *torch.autograd.grad(out, (q, k, v), dout)))
    torch.cuda.synchronize()
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))


def test_torch_deterministic_algorithms_are_honoured():
    q, k, v = inputs(torch.float16)
    dout = torch.randn_like(q)
    with_option = torch.autograd.grad(
        tilewise.attention(q, k, v, deterministic=True), (q, k, v), dout
    )
    torch.use_deterministic_algorithms(True)
    try:
        with_torch = torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(with_option, with_torch, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_error_is_near_that_of_torch_flash_attention(dtype, causal):
    """In long rows, where errors add up, the average error against float64 is at most 1.2 times
    that of torch's kernel.

    The largest of a million errors is that of one element, which either kernel may have rounded the
    wrong way; it has to meet the usual bound, a multiple of a plain computation's error in this
    dtype.
    """
    q, k, v = (x.detach().transpose(1, 2) for x in inputs(dtype, 2048, 2048, 4, 4, 128))
    want = sdpa(*(x.double() for x in (q, k, v)), is_causal=causal)
    ours = tilewise.attention(q, k, v, causal=causal, layout="bhsd").double() - want
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        theirs = sdpa(q, k, v, is_causal=causal).double() - want
    assert ours.abs().mean() <= 1.2 * theirs.abs().mean()
    scores = q @ k.mT / math.sqrt(128)
    if causal:
        scores.masked_fill_(torch.ones(2048, 2048, dtype=torch.bool).triu(1), -math.inf)
    plain = (torch.softmax(scores, dim=-1) @ v).double() - want
    assert ours.abs().max() <= FORWARD_FACTOR * plain.abs().max()


def test_fp32_is_as_exact_as_torch_and_tf32_is_opt_in():
    q, k, v = (x.detach().transpose(1, 2) for x in inputs(torch.float32, 1500, 1500, 4, 4, 64))
    want = sdpa(*(x.double() for x in (q, k, v)))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        theirs = (sdpa(q, k, v).double() - want).abs().max()
    ours = (tilewise.attention(q, k, v, layout="bhsd").double() - want).abs().max()
    rounded = (tilewise.attention(q, k, v, layout="bhsd", tf32=True).double() - want).abs().max()
    assert ours <= theirs, (ours, theirs)
    assert ours < 0.1 * rounded < 0.01 * want.abs().max()


def test_gpu_other_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    here = inputs(torch.bfloat16)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    want, got = (tilewise.attention(*x, causal=True) for x in (here, there))
    assert got.device.index == 1 and torch.equal(want.cpu(), got.cpu())
    with pytest.raises(ValueError, match="cuda:1"):
        tilewise.attention(here[0], there[1], there[2])
    assert torch.cuda.current_device() == 0


def test_tensors_on_two_devices_are_refused():
    q, k, v = (x.detach() for x in inputs())
    with pytest.raises(ValueError, match=r"\bk\b.*cpu"):
        tilewise.attention(q, k.cpu(), v)


def test_more_than_2_31_elements(much_memory):
    """q, k, v and out in bf16 have more than 2^31 elements each: rows from both ends are compared
    with small problems."""
    rows, heads, dim = 2**31 // (64 * 128) + 1000, 64, 128
    much_memory(5 * 2 * rows * heads * dim)
    q, k, v = (torch.empty(1, rows, heads, dim, dtype=torch.bfloat16) for _ in range(3))
    for x in (q, k, v):
        x.normal_()
    out = tilewise.attention(q, k, v, window=(20, 0))
    for first in (0, rows // 2, rows - 300):
        part = slice(first, first + 300)
        want = tilewise.attention(q[:, part], k[:, part], v[:, part], window=(20, 0))
        start = 0 if first == 0 else 20  # earlier rows see keys outside of the slice
        largest = (out[:, part] - want)[:, start:].abs().max()
        assert largest <= 2**-7 * want.abs().max(), first


def test_memory_is_linear():
    """Peak of torch's allocator over one training step, relative to the size of the tensors."""
    q, k, v = inputs(torch.bfloat16, rows=16384, keys=16384, heads=4, heads_kv=4)
    tensors = q.numel() * 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tilewise.attention(q, k, v, causal=True).sum().backward()
    # out, dout, dq, dk and dv in 16 bits, the fp32 sums of dq, lse and delta: far less than the
    # scores of one row of tiles.
    assert torch.cuda.max_memory_allocated() - before < 9 * tensors


def test_autocast_on_a_gpu():
    q, k, v = inputs()
    with torch.autocast("cuda", dtype=torch.float16):
        out = tilewise.attention(q, k, v)
        assert out.dtype == torch.float16
    with torch.autocast("cuda"):
        assert tilewise.attention(q, k, v).dtype == torch.float16  # autocast's own choice
    assert tilewise.attention(q, k, v).dtype == torch.float32


def test_explain_names_the_gpu():
    q, k, v = inputs(torch.bfloat16)
    explained = tilewise.explain(q, k, v, causal=True)
    assert explained.forward.kernel.startswith("cuda.") and "cuda" in str(explained)
    major, minor = torch.cuda.get_device_capability()
    assert f"sm_{major}{minor}" in explained.forward.why or explained.forward.why


def test_lse_of_empty_rows():
    q, k, v = inputs(torch.bfloat16, rows=20, keys=7)
    out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
    assert not out[:, :13].any() and (lse[:, :, :13] == -math.inf).all()
