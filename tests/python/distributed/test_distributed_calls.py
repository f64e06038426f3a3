"""Calls of distributed attention: the choice of a method, agreement of the ranks, refusals, other
forms of the arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")
if not torch.distributed.is_gloo_available():
    pytest.skip("torch has no gloo", allow_module_level=True)

import tilewise  # noqa: E402
import tilewise.distributed as td  # noqa: E402
from distributed_ranks import Pool, device  # noqa: E402
from tilewise.distributed.keys import span_of, visible_pairs  # noqa: E402
from tilewise.distributed.transport import VARIABLE as TRANSPORT  # noqa: E402
from tilewise.distributed.ulysses import key_heads, query_heads  # noqa: E402

METHODS = ("ulysses", "allgather", "ring")
MESSAGES = {TRANSPORT: "messages"}
EXAMPLE = ROOT / "examples" / "train_distributed.py"


def tensors(rows=24, heads=4, heads_kv=2, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, rows, heads, 8), *[(batch, rows, heads_kv, 8)] * 2]
    return [torch.randn(shape, generator=generator).to(device(), dtype) for shape in shapes]


def zeros(*shape):
    return torch.zeros(shape, device=device())


def shards_of(group, xs, layout="zigzag", dim=1):
    return [td.shard(x, dim, layout=layout, group=group).clone().requires_grad_() for x in xs]


# --- what needs no ranks --------------------------------------------------------------------------


def seen(size_q, size_k, window, diagonal=0):
    left, right = window
    aligned = torch.arange(size_q).view(-1, 1) + size_k - size_q + diagonal
    key = torch.arange(size_k).view(1, -1)
    mask = torch.ones(size_q, size_k, dtype=torch.bool)
    if left is not None:
        mask &= key >= aligned - left
    if right is not None:
        mask &= key <= aligned + right
    return mask


@pytest.mark.parametrize("window", [(None, None), (None, 0), (3, 0), (2, 5), (None, 4), (6, None)])
def test_spans_and_pairs_are_those_of_the_mask(window):
    for size_q, size_k in ((9, 9), (7, 12), (12, 7), (1, 8), (8, 1)):
        mask = seen(size_q, size_k, window)
        for begin in range(size_q):
            for end in range(begin + 1, size_q + 1):
                span = span_of((begin, end), size_q, size_k, window)
                local = seen(end - begin, span.end - span.begin, window, span.diagonal)
                whole = torch.zeros(end - begin, size_k, dtype=torch.bool)
                whole[:, span.begin : span.end] = local
                assert torch.equal(whole, mask[begin:end]), (size_q, size_k, begin, end)
                pairs = visible_pairs((begin, end), size_q, size_k, window)
                assert pairs == int(mask[begin:end].sum())


def test_heads_of_ranks_fit_the_groups():
    for heads_kv in (1, 2, 3, 8):
        for group in (1, 2, 3, 5):
            for world in (1, 2, 3, 4, 7, 64):
                ranks = query_heads(heads_kv * group, world)
                assert [h for heads in ranks for h in heads] == list(range(heads_kv * group))
                for heads in ranks:
                    keys = key_heads(heads, group)
                    if heads:
                        each = len(heads) // len(keys)
                        assert each * len(keys) == len(heads)
                        assert all(keys[i // each] == h // group for i, h in enumerate(heads))
                    else:
                        assert keys == ()
    assert key_heads((0, 1), 4) == (0,)
    assert key_heads((2, 3, 4), 4) == (0, 0, 1)
    assert key_heads((4, 5, 6, 7), 2) == (2, 3)


def test_one_process_is_the_ordinary_call():
    q, k, v = tensors()
    torch.manual_seed(3)
    expected = tilewise.attention(q, k, v, causal=True, dropout_p=0.2, return_lse=True)
    torch.manual_seed(3)
    got = td.attention(q, k, v, causal=True, dropout_p=0.2, return_lse=True)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    assert td.explain(q, k, v, dropout_p=0.2, return_max_logits=True).method == "local"
    packed = [x[0].clone() for x in (q, k, v)]
    for x in packed:  # tensors that know of ranks are refused only where there are several
        x.to_local = None
    assert td.explain(*packed, cu_seqlens_q=[0, len(packed[0])]).method == "local"
    expected = tilewise.attention(q, k, v, causal=True, return_max_logits=True)
    got = td.attention(q, k, v, causal=True, return_max_logits=True)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
    with pytest.raises(
        ValueError, match="method is 'rings', but must be 'auto', 'ulysses', 'allgather'"
    ):
        td.attention(q, k, v, method="rings")
    with pytest.raises(ValueError, match="layout is 'bshd', but must be 'zigzag' or"):
        td.attention(q, k, v, layout="bshd")
    for name in ("softcp", "shard", "check"):
        with pytest.raises(TypeError, match=f"{name} is given, but the options are causal, window"):
            td.explain(q, k, v, **{name: 1.0})


def dropped(group, method):
    """Whether this rank's rows are those of the unsharded call after the seed of rank 0."""
    whole = tensors()
    torch.manual_seed(3)
    expected = tilewise.attention(*whole, dropout_p=0.4)
    following = torch.rand(1, device=device())
    torch.manual_seed(3 + torch.distributed.get_rank(group))
    out = td.attention(*shards_of(group, whole), dropout_p=0.4, method=method, group=group)
    same = torch.equal(torch.rand(1, device=device()), following)
    rows = td.shard(expected, 1, layout="zigzag", group=group)
    first = torch.distributed.get_rank(group) == 0
    return same == first and torch.allclose(out, rows, atol=1e-5)


def test_dropout_follows_the_seed_of_rank_0(pool):
    for method in METHODS:
        assert pool.run(3, dropped, method) == [True] * 3


# --- forms of the arguments -----------------------------------------------------------------------


def heads_first(group, method):
    q, k, v = shards_of(group, tensors())
    options = {"group": group, "method": method, "causal": True, "deterministic": True}
    expected = td.attention(q, k, v, **options)
    (expected**2).sum().backward()
    grads = [x.grad for x in (q, k, v)]
    turned = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = td.attention(*turned, tensor_layout="bhsd", **options)
    (out**2).sum().backward()
    same = [torch.equal(x.grad.transpose(1, 2), g) for x, g in zip(turned, grads, strict=True)]
    return torch.equal(out.transpose(1, 2), expected) and all(same)


def frozen_keys(group, method):
    """Only q has a gradient, then none has one."""
    q, k, v = shards_of(group, tensors())
    with torch.no_grad():
        expected = td.attention(q, k, v, group=group, method=method)
    k, v = k.detach(), v.detach()
    out = td.attention(q, k, v, group=group, method=method)
    out.sum().backward()
    return torch.equal(out, expected) and q.grad is not None and k.grad is None


def unused_lse(group, method):
    """Ranks may use different results: one uses lse only, the others out only."""
    q, k, v = shards_of(group, tensors())
    out, lse = td.attention(q, k, v, group=group, method=method, return_lse=True)
    (lse.sum() if torch.distributed.get_rank(group) == 0 else out.sum()).backward()
    return all(bool(x.grad.isfinite().all()) for x in (q, k, v))


def autocast(group, method):
    q, k, v = shards_of(group, tensors())
    with torch.autocast(device().type, torch.bfloat16):
        out = td.attention(q, k, v, group=group, method=method)
    out.sum().backward()
    return out.dtype == torch.bfloat16 and q.grad.dtype == torch.float32


def by_mesh(group, method):
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, device().type)
    q, k, v = shards_of(group, tensors())
    expected = td.attention(q, k, v, group=group, method=method)
    return torch.equal(td.attention(q, k, v, mesh=mesh, method=method), expected)


def on_a_mesh_of_one_rank(group):
    ranks = torch.distributed.get_process_group_ranks(group)
    mesh = SimpleNamespace(ndim=2, mesh=torch.tensor([ranks]), get_group=lambda dim: group)
    q, k, v = tensors()
    where = {"group": group, "mesh": mesh, "method": "ulysses+ring"}
    out = td.attention(q, k, v, **where)
    packed = td.attention_varlen(q[0], k[0], v[0], [0, 24], **where)
    expected = tilewise.attention(q, k, v)
    torch.testing.assert_close(packed, expected[0])
    return torch.equal(out, expected) and td.explain(q, k, v, **where).method == "local"


def test_a_mesh_of_one_rank_takes_the_methods_of_meshes(pool):
    assert pool.run(1, on_a_mesh_of_one_rank) == [True]


@pytest.mark.parametrize("job", [heads_first, frozen_keys, unused_lse, autocast, by_mesh])
def test_forms(pool, job):
    for method in METHODS:
        assert pool.run(3, job, method) == [True] * 3


def checkpointed(group, method):
    """Activation checkpointing repeats the forward, with its exchanges, inside the backward."""
    from torch.utils.checkpoint import checkpoint

    def attend(q, k, v):
        return td.attention(
            q, k, v, group=group, method=method, causal=True, dropout_p=0.3, deterministic=True
        )

    results = []
    for run in (attend, lambda *x: checkpoint(attend, *x, use_reentrant=False)):
        torch.manual_seed(3)
        q, k, v = shards_of(group, tensors())
        (run(q, k, v) ** 2).sum().backward()
        results.append((q.grad, k.grad, v.grad))
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_checkpointing(pool):
    for method in METHODS:
        assert pool.run(2, checkpointed, method) == [True] * 2


def replicated(group, method, reduce):
    q, k, v = shards_of(group, tensors(heads=2, heads_kv=1))  # fewer heads than ranks
    scale = torch.tensor(0.3, device=device(), requires_grad=True)
    sinks = torch.linspace(-1, 1, 2, device=device()).requires_grad_()
    bias = torch.linspace(-1, 1, 24, device=device()).requires_grad_()
    out = td.attention(q, k, v, group=group, method=method, causal=True, scale=scale, sinks=sinks,
                       bias=bias, reduce_replicated=reduce, deterministic=True)  # fmt: skip
    (out**2).sum().backward()
    return [x.grad.cpu() for x in (scale, sinks, bias)]


def test_gradients_of_replicated_inputs(pool):
    for method in METHODS:
        parts = pool.run(4, replicated, method, False)
        totals = pool.run(4, replicated, method, True)
        for i in range(3):
            expected = ((parts[0][i] + parts[1][i]) + parts[2][i]) + parts[3][i]
            assert all(torch.equal(total[i], expected) for total in totals)


# --- the choice -----------------------------------------------------------------------------------


def explained(group, rows, heads, heads_kv, options):
    # Of CPUs, also where the tests run over GPUs, for which the costs are others.
    q, k, v = shards_of(group, [x.cpu() for x in tensors(rows, heads, heads_kv)])
    choice = td.explain(q, k, v, group=group, **options)
    return choice.method, str(choice), choice.estimates


def test_choice_by_cost(pool):
    # With many key heads, exchanging heads moves less; with one, gathering the keys does.
    for heads, heads_kv, method in ((16, 16, "ulysses"), (32, 1, "allgather")):
        for got, text, _ in pool.run(4, explained, 4096, heads, heads_kv, {"causal": True}):
            assert got == method
            assert text.startswith(f"method: {method} (the lower predicted time)")
            assert "ulysses:" in text and "allgather:" in text and "MB received in" in text


def test_predicted_bytes_are_those_that_move(pool):
    def bytes_of(method, options):
        results = pool.run(3, counted, method, options)
        assert len({estimate for estimate, _ in results}) == 1
        return results[0][0], max(moved for _, moved in results)

    for method in METHODS:
        for options in ({"causal": True}, {"window": (5, 2), "return_lse": True}, {}):
            predicted, moved = bytes_of(method, options)
            assert predicted == moved, (method, options)


def counted(group, method, options, dtype=torch.float32, differentiable=True):
    """The predicted bytes of a call and those that its exchanges receive from other ranks."""
    from tilewise.distributed import exchange

    q, k, v = shards_of(group, tensors(rows=32))
    q, k, v = (x.detach().to(dtype).requires_grad_(differentiable) for x in (q, k, v))
    estimate = td.explain(q, k, v, group=group, **options).estimates[method].bytes
    total, original = 0, exchange.start

    def start(table, published, received, ranks, what):
        nonlocal total
        total += exchange.received_bytes(table, received, ranks)
        return original(table, published, received, ranks, what)

    # Copies between GPUs move the same pieces, but not through this function.
    with mock.patch.object(exchange, "start", start), mock.patch.dict(os.environ, MESSAGES):
        result = td.attention(q, k, v, group=group, method=method, **options)
        if differentiable:
            sum(x.sum() for x in (result if options.get("return_lse") else (result,))).backward()
    return estimate, total


def packed_calls(group):
    """Places, shards and one-rank calls of a packed batch, and what it refuses."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    cu = [0, 5, 5, 24]
    x = torch.arange(24.0, device=device())
    where = {"layout": "zigzag", "group": group, "cu_seqlens": torch.tensor(cu)}
    local = td.shard(x, 0, **where)
    assert torch.equal(td.unshard(local, 0, size=24, **where), x)
    place = td.positions(24, device=device(), **where)
    assert torch.equal(place.double(), torch.where(local < 5, local, local - 5).double())
    q, k, v = (y[0].clone() for y in tensors())
    shards = [td.shard(y, 0, **where) for y in (q, k, v)]
    common = {"group": group, "causal": True}
    out = td.attention_varlen(*shards, cu, **common)
    lengths = torch.tensor(cu, dtype=torch.int32, device=device())
    expected = tilewise.attention_varlen(q, k, v, lengths, lengths, causal=True)
    assert torch.allclose(out, td.shard(expected, 0, **where), atol=1e-5)
    text = str(td.explain(*shards, cu_seqlens_q=cu, **common))
    assert ("ulysses:" in text and "allgather:" in text) == (world > 1)
    calls = (
        lambda: td.attention_varlen(*shards, [0, 5, 24 + rank], **common),
        lambda: td.attention_varlen(*shards, [1, 24], **common),
        lambda: td.attention_varlen(*shards, cu, [0, 24], **common),
        lambda: td.attention_varlen(*shards, "ab", **common),
        lambda: td.shard(x, 0, **{**where, "cu_seqlens": [0, 23]}),
        lambda: td.attention_varlen(*shards, cu, bias=zeros(18, 19), **common),
    )
    return [error_of(call) for call in calls]


def error_of(call):
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return "no error"


def test_packed_calls(pool):
    assert "no error" not in pool.run(1, packed_calls)[0][1:2]
    for messages in pool.run(3, packed_calls):
        assert "was refused: q on rank 1 has 8 rows" in messages[0] or "q on rank" in messages[0]
        assert "cu_seqlens_q is [1, 24], but must begin with 0 and not decrease" in messages[1]
        assert "cu_seqlens_k has 2 entries, but must have 4 like cu_seqlens_q" in messages[2]
        assert "cu_seqlens_q is 'ab', but must be a sequence of integers" in messages[3]
        assert "cu_seqlens ends with 23, but there are 24 rows" in messages[4]
        assert "[1, 1, 18, 19] with 18 rows, but the longest sequence has 19" in messages[5]


# --- refusals and ranks that differ ---------------------------------------------------------------


def refused(group, kind):
    rank = torch.distributed.get_rank(group)
    q, k, v = shards_of(group, tensors())
    options: dict = {"causal": True}
    if kind == "dtensor":
        mesh = torch.distributed.device_mesh.DeviceMesh.from_group(group, device().type)
        q = torch.distributed.tensor.distribute_tensor(q.detach(), mesh)
    elif kind == "descale":
        options["k_descale"] = zeros(1, 3)
    elif kind == "bias keys":
        options["bias"] = zeros(12, 12)
    elif rank == 1:
        if kind == "causal":
            options["causal"] = False
        elif kind == "dropout":
            options["dropout_p"] = 0.1
        elif kind == "softcap":
            options["softcap"] = 2.0
        elif kind == "method":
            options["method"] = "ulysses"
        elif kind == "heads":
            q = torch.cat([q, q], 2)
        elif kind == "dtype":
            q, k, v = q.half(), k.half(), v.half()
        elif kind == "gradient":
            k = k.detach()
        elif kind == "rows":
            q = q[:, :-1]
        elif kind == "mistake":
            v = v[..., :3].double()
        elif kind == "bias rows":
            options["bias"] = zeros(12, 24)
        elif kind == "unknown method":
            options["method"] = "rings"
    if kind == "bias rows" and rank != 1:
        options["bias"] = zeros(1, 24)
    if kind == "other call" and rank == 1:
        call = lambda: td.unshard(q, 1, layout="zigzag", size=24, group=group)  # noqa: E731
    else:
        call = lambda: td.attention(q, k, v, group=group, **options)  # noqa: E731
    transport = "copies" if kind == "transport" and rank == 1 else "messages"
    with mock.patch.dict(os.environ, {TRANSPORT: transport}):
        return error_of(call)


REFUSALS = {
    "dropout": "dropout_p is 0.1 on rank 1, but 0.0 on rank 0",
    "dtensor": "q is a DTensor, but must be a tensor of this rank's rows: pass q.to_local()",
    "descale": "k_descale is given, but belongs to float8_e4m3 keys and values",
    "bias keys": "bias has 12 keys, but must have 1 or the 24 keys of the whole sequence",
    "causal": "window with causal is (-1, -1) on rank 1, but (-1, 0) on rank 0",
    "transport": "TRANSPORT is copies on rank 1, but messages on rank 0",
    "softcap": "softcap is 2.0 on rank 1, but 0.0 on rank 0",
    "method": "method is 'ulysses' on rank 1, but 'auto' on rank 0",
    "heads": "shape of q is [2, 'rows', 8, 8] on rank 1, but [2, 'rows', 4, 8] on rank 0",
    "dtype": "dtype of q is torch.float16 on rank 1, but torch.float32 on rank 0",
    "gradient": "requires_grad of k is False on rank 1, but True on rank 0",
    "rows": "q on rank 0 has 12 rows (on all ranks [12, 11]), but layout 'zigzag' of these 23 rows",
    "mistake": "v has dtype torch.float64, but must have torch.float32 like q",
    "bias rows": "bias on rank 1 has 12 rows, but must have 1 on all ranks, or each rank's rows",
    "unknown method": "method is 'rings', but must be 'auto', 'ulysses', 'allgather' or 'ring'",
    "other call": "rank 1 calls unshard, but rank 0 calls attention",
}


def test_refusals_reach_all_ranks(pool):
    for kind, words in REFUSALS.items():
        for rank, text in enumerate(pool.run(2, refused, kind)):
            assert words in text, (kind, rank)
            if kind == "mistake" and rank == 0:
                assert "rank 1 was refused" in text


def stop_before_the_backward(group):
    q, k, v = shards_of(group, tensors())
    out = td.attention(q, k, v, group=group, method="allgather")
    if torch.distributed.get_rank(group) == 1:
        os._exit(1)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_rank_that_dies_before_the_backward():
    pool = Pool(2)
    try:
        pool.start([0, 1], 2, stop_before_the_backward)
        good, text = pool.reply(0, wait=100)
        assert good and "rank 0 of 2 could not exchange k and v for the backward" in text
    finally:
        pool.close()


def test_the_example_trains_as_one_process_does():
    command = [sys.executable, str(EXAMPLE), "--ranks", "2", "--steps", "2", "--rows", "61"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "largest difference" in result.stdout and "on 2 ranks" in result.stdout


def test_the_long_example_trains(tmp_path):
    text = tmp_path / "text"
    text.write_text("\n".join(f"line {i % 7} of a text" for i in range(2000)))
    command = [sys.executable, str(EXAMPLE.parent / "train_long.py"), "--ranks", "2", "--tokens",
               "203", "--steps", "3", "--text", str(text), "--out", str(tmp_path)]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert "step 3/3: loss" in result.stdout and "tokens/s" in result.stdout
    record = json.loads((tmp_path / "long.json").read_text())
    assert record["ranks"] == 2 and len(record["steps"]) == 3
