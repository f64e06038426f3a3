"""FlopCounterMode counts Tilewise's attention like PyTorch's own, on every path of a call."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import tilewise

pytestmark = pytest.mark.tensors


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def inputs(heads_kv=4, rows=9, keys=13, columns=16, columns_v=16, dtype=torch.float32):
    shapes = ((2, 4, rows, columns), (2, heads_kv, keys, columns), (2, heads_kv, keys, columns_v))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}], ids=["plain", "general"])
def test_dense_count_matches_pytorch(options):
    """Forward and backward together and separately, including the backward of an uncounted
    forward."""
    q, k, v = inputs()

    def ours():
        return tilewise.attention(q, k, v, layout="bhsd", **options).sum()

    forward = sdpa_flop_count(q.shape, k.shape, v.shape)
    backward = sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert counted(ours) == forward == 2 * 2 * 4 * 9 * 13 * (16 + 16)
    assert counted(lambda: ours().backward()) == forward + backward
    loss = ours()
    assert counted(loss.backward) == backward == 2 * 2 * 4 * 9 * 13 * (3 * 16 + 2 * 16)


def test_grouped_heads_and_columns_of_values():
    q, k, v = inputs(heads_kv=2, columns_v=8)
    forward = 2 * 2 * 4 * 9 * 13 * (16 + 8)
    assert counted(lambda: tilewise.attention(q, k, v, layout="bhsd")) == forward
    # The band is not subtracted: PyTorch counts causal attention in full as well.
    assert counted(lambda: tilewise.attention(q, k, v, layout="bhsd", causal=True)) == forward


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


# Rows times keys summed over the sequences, for tensors of 10 rows and (except pages) 13 keys.
SEQUENCES = {
    "lengths": (dict(cu_seqlens_k=int32(0, 9, 13)), 4 * 9 + 6 * 4),
    "used": (
        dict(cu_seqlens_k=int32(0, 9, 13), seqused_q=int32(3, 1), seqused_k=int32(2, 4)),
        3 * 2 + 1 * 4,
    ),
    "pages": (dict(cu_seqlens_k=None, block_table=int32(0, 1, 2, 0).view(2, 2)), 10 * 16),
    "used pages": (
        dict(
            cu_seqlens_k=None, block_table=int32(0, 1, 2, 0).view(2, 2), seqused_k=int32(5, 16)
        ),
        4 * 5 + 6 * 16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", SEQUENCES)
def test_flops_of_varlen_follow_the_lengths(name, gradients):
    options, pairs = SEQUENCES[name]
    options = {x: y if y is None else y.to(torch.get_default_device()) for x, y in options.items()}
    q = torch.randn(10, 4, 16, requires_grad=gradients)
    k = torch.randn(3, 8, 2, 16) if "block_table" in options else torch.randn(13, 2, 16)
    starts = int32(0, 4, 10)

    def call():
        return tilewise.attention_varlen(q, k, k, starts, **options)

    assert counted(call) == 2 * 4 * pairs * 32
    if gradients:
        assert counted(call().sum().backward) == 2 * 4 * pairs * 80


def test_flops_of_a_cache_count_the_keys_in_use():
    q, cache = torch.randn(2, 3, 4, 16), torch.randn(2, 32, 2, 16)
    new = torch.randn(2, 3, 2, 16)
    lengths, leftpad = int32(7, 20), int32(2, 0)

    def call(*new_keys):
        return tilewise.attention_with_kvcache(
            q, cache, cache, *new_keys, cache_seqlens=lengths, cache_leftpad=leftpad
        )

    assert counted(call) == 2 * 4 * 3 * (5 + 20) * 32
    assert counted(lambda: call(new, new)) == 2 * 4 * 3 * (8 + 23) * 32


def test_unknown_lengths_count_as_the_largest_possible():
    with FakeTensorMode():
        q, k = torch.empty(10, 4, 16), torch.empty(13, 4, 16)
        starts = torch.empty(3, dtype=torch.int32)
        dense = torch.empty(2, 9, 4, 16)
        assert counted(lambda: tilewise.attention(dense, dense, dense)) == 2 * 4 * 2 * 81 * 32
        assert (
            counted(lambda: tilewise.attention_varlen(q, k, k, starts, starts))
            == 2 * 4 * 10 * 13 * 32
        )
        bounded = dict(max_seqlen_q=6, max_seqlen_k=9)
        assert (
            counted(lambda: tilewise.attention_varlen(q, k, k, starts, starts, **bounded))
            == 2 * 4 * 10 * 9 * 32
        )


def test_flops_are_counted_per_module():
    block = tilewise.nn.MultiheadAttention(32, 4)
    x = torch.randn(1, 5, 32)
    with FlopCounterMode(display=False) as counter:
        block(x)
    by_module = counter.get_flop_counts()["Global"]
    assert by_module[torch.ops.tilewise.forward] == 2 * 4 * 25 * 16


def printed(program: str) -> str:
    """The output of a new process, in which nothing has been imported yet."""
    done = subprocess.run(
        [sys.executable, "-c", "import torch, tilewise\n" + program], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


IMPORT = "from torch.utils.flop_counter import FlopCounterMode\n"


def test_counter_entered_before_the_first_call():
    program = (
        IMPORT + "x = torch.zeros(1, 2, 3, 8)\n"
        "with FlopCounterMode(display=False) as counter:\n"
        "    tilewise.attention(x, x, x)\n"
        "print(counter.get_total_flops())\n"
    )
    assert printed(program) == f"{2 * 3 * 2 * 2 * 16}"


def test_counter_imported_after_the_first_call():
    program = (
        "import sys\n"
        "x = torch.zeros(1, 2, 3, 8, requires_grad=True)\n"
        "out = tilewise.attention(x, x, x)\n"
        "print('torch.utils.flop_counter' in sys.modules)\n" + IMPORT +
        "with FlopCounterMode(display=False) as counter:\n"
        "    {}\n"
        "print(counter.get_total_flops())\n"
    )  # fmt: skip
    product = 2 * 3 * 2 * 2 * 8
    assert printed(program.format("out.sum().backward()")) == f"False\n{5 * product}"
    assert printed(program.format("tilewise.attention(x, x, x)")) == f"False\n{2 * product}"


def test_tangents_and_second_derivatives():
    """Products of a row and a key: 5 for the tangents, 10 for the gradients of a loss of them.
    What is not given is not counted."""
    x = tuple(y.detach().transpose(1, 2) for y in inputs(columns_v=8))
    pairs = 2 * 2 * 4 * 9 * 13
    forward, tangents = pairs * (16 + 8), pairs * (3 * 16 + 2 * 8)
    assert counted(lambda: torch.func.jvp(tilewise.attention, x, x)) == forward + tangents

    def of_q():
        torch.func.jvp(lambda q: tilewise.attention(q, *x[1:]), x[:1], x[:1])

    assert counted(of_q) == forward + pairs * (2 * 16 + 8)
    leaves = [y.requires_grad_() for y in x]
    tangent = torch.func.jvp(tilewise.attention, tuple(leaves), tuple(y.detach() for y in x))[1]
    assert counted(tangent.sum().backward) == pairs * (7 * 16 + 3 * 8)
