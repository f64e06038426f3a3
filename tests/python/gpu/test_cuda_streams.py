"""Two streams at once, overlapping launches, calls that must not synchronise, and graphs of caches
that grow.

On the CPU there are no streams: the same calls run one after another, so the code that is written
here for a GPU is exercised without one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import devices
import tilewise

pytestmark = pytest.mark.tensors
DIM, FLOAT8 = 128, torch.float8_e4m3fn


def on_gpu() -> bool:
    return devices.current().name == "cuda"


def synchronize() -> None:
    if on_gpu():
        torch.cuda.synchronize()


class Stream:
    """A CUDA stream, or nothing on the CPU."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream() if on_gpu() else None

    def __enter__(self) -> None:
        self.context = torch.cuda.stream(self.stream) if on_gpu() else contextlib.nullcontext()
        self.context.__enter__()

    def __exit__(self, *error: object) -> None:
        self.context.__exit__(*error)

    def delay(self) -> None:
        """Keeps the GPU busy for some milliseconds: calls that the CPU queues meanwhile overlap."""
        if on_gpu():
            with self:
                torch.cuda._sleep(20_000_000)


def captured(call: Callable[[], list[Tensor]], stream: Stream) -> tuple[Callable, list[Tensor]]:
    """(function that replays a graph of the call, the call's results)."""
    synchronize()
    with stream:
        call()
    synchronize()
    if on_gpu():
        with devices.captured(stream.stream) as graph:
            results = call()
        return graph.replay, results
    results = call()

    def replay() -> None:
        for old, new in zip(results, call(), strict=True):
            old.copy_(new)

    return replay, results


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape).to(dtype)


# --- two streams ----------------------------------------------------------------------------------


class Training:
    """Forward and backward of varlen sequences, which wgmma runs on Hopper."""

    def __init__(self, deterministic: bool, lengths: tuple[int, ...], dim: int) -> None:
        lengths = lengths if on_gpu() else tuple(-(-n // 8) for n in lengths)
        self.deterministic = deterministic
        self.cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        rows = sum(lengths)
        self.leaves = [normal(rows, h, dim).requires_grad_() for h in (8, 2, 2)]
        self.dout = normal(rows, 8, dim)
        self.options = dict(causal=True, deterministic=deterministic, max_seqlen_q=max(lengths),
                            max_seqlen_k=max(lengths))  # fmt: skip
        plans = tilewise.explain(
            *self.leaves, cu_seqlens_q=self.cu, cu_seqlens_k=self.cu, **self.options
        )
        forced = "TILEWISE_FORCE_ARCH" in os.environ
        if on_gpu() and not forced and torch.cuda.get_device_capability() == (9, 0):
            for plan in (plans.forward, plans.backward):
                assert plan.kernel.startswith("cuda.wgmma"), plan

    def __call__(self) -> list[Tensor]:
        """out, lse, dq, dk, dv."""
        out, lse = tilewise.attention_varlen(
            *self.leaves, self.cu, self.cu, return_lse=True, **self.options
        )
        grads = torch.autograd.grad(out, self.leaves, self.dout)
        return [out.detach(), lse.detach(), *grads]

    def check(self, got: list[Tensor], want: list[Tensor]) -> None:
        """Compare bitwise, except gradients whose summation order is not fixed."""
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            same = torch.equal if i < 2 or self.deterministic else devices.equal
            assert same(a, b), ("out", "lse", "dq", "dk", "dv")[i]


def pair(first: bool, second: bool) -> list[tuple[Training, Stream, list[Tensor]]]:
    """Two problems, each with its stream and the result of running it by itself."""
    problems = [
        Training(first, (700, 3, 1025, 260, 512), 128),
        Training(second, (64, 1500, 300, 129, 1), 64),
    ]
    made = [(problem, Stream(), problem()) for problem in problems]
    synchronize()
    return made


KINDS = pytest.mark.parametrize(
    "deterministic", [(True, True), (True, False), (False, False)],
    ids=["deterministic", "one deterministic", "plain"],
)  # fmt: skip


@KINDS
def test_training_on_two_streams_at_once(deterministic):
    both = pair(*deterministic)
    for _ in range(10 if on_gpu() else 1):
        for _, stream, _ in both:
            stream.delay()
        got = []
        for _ in range(3):
            for problem, stream, _ in both:
                with stream:
                    got.append(problem())
        synchronize()
        for i, results in enumerate(got):
            problem, _, want = both[i % 2]
            problem.check(results, want)


@KINDS
def test_graphs_of_training_on_two_streams_at_once(deterministic):
    both = [(*run, *captured(run[0], run[1])) for run in pair(*deterministic)]
    for _ in range(10 if on_gpu() else 1):
        for *_, results in both:
            for x in results:
                x.fill_(torch.nan)
        synchronize()
        for _, stream, *_ in both:
            stream.delay()
        for _ in range(3 if on_gpu() else 1):
            for _, stream, _, replay, _ in both:
                with stream:
                    replay()
        synchronize()
        for problem, _, want, _, results in both:
            problem.check(results, want)


# --- caches that grow, in graphs ------------------------------------------------------------------


class Decoding:
    """A decoding step with a bf16 or float8 cache, contiguous or paged."""

    BATCH, HEADS, HEADS_KV, CAPACITY, PAGE = 3, 8, 2, 256, 16

    def __init__(
        self, new: int = 0, rotary: str = "", pages: bool = False, leftpad: bool = False,
        index: bool = False, float8: bool = False, rows: int = 1, **options: object,
    ) -> None:  # fmt: skip
        batch, room, kind = self.BATCH, self.CAPACITY, FLOAT8 if float8 else torch.bfloat16
        self.q = normal(batch, rows, self.HEADS, DIM)
        self.new = [normal(batch, new, self.HEADS_KV, DIM) for _ in "kv"] if new else []
        self.lengths = torch.tensor([200, 1, 77], dtype=torch.int32)
        slots = (batch * room // self.PAGE + 2, self.PAGE) if pages else (batch + index, room)
        self.caches = [normal(*slots, self.HEADS_KV, DIM).to(kind) for _ in "kv"]
        self.options = dict(options, causal=True, return_lse=True)
        if pages:
            table = torch.randperm(slots[0])[: batch * room // self.PAGE]
            self.options["block_table"] = table.int().reshape(batch, -1)
        if leftpad:
            self.options["cache_leftpad"] = torch.tensor([2, 0, 5], dtype=torch.int32)
        if index:
            self.options["cache_batch_idx"] = torch.tensor([3, 0, 2], dtype=torch.int32)
        if rotary:
            angle = torch.rand(room + 8, 32) * 6.3
            tables = dict(rotary_cos=angle.cos().bfloat16(), rotary_sin=angle.sin().bfloat16())
            self.options |= dict(tables, rotary_interleaved=rotary == "interleaved")
        if float8:
            for name in ("k_descale", "v_descale"):
                self.options[name] = torch.rand(batch, self.HEADS_KV) + 0.5

    def __call__(self) -> list[Tensor]:
        """Returns out and lse, and writes new keys into the caches."""
        new = self.new or [None, None]
        return list(
            tilewise.attention_with_kvcache(
                self.q, *self.caches, *new, cache_seqlens=self.lengths, **self.options
            )
        )

    def change(self, turn: int) -> None:
        """Other numbers and lengths in the same memory."""
        for x in (self.q, *self.new, *self.caches):
            x.copy_(torch.randn(x.shape).to(x.dtype))
        self.lengths.copy_(torch.tensor([[3, 250, 31], [120, 60, 5], [240, 7, 64]][turn % 3]))

    def stored(self) -> list[Tensor]:
        """The bytes of the caches."""
        return [x.view(torch.uint8).clone() for x in self.caches]


STEPS = {
    "dense": {},
    "append": dict(new=1),
    "append of four": dict(new=4, rows=4),
    "append, rotary": dict(new=1, rotary="interleaved"),
    "append, rotary by halves, window": dict(new=2, rows=2, rotary="halves", window=(64, 0)),
    "append, rotary, pages": dict(new=1, rotary="halves", pages=True),
    "pages, left padding": dict(pages=True, leftpad=True),
    "append, rotary, pages, left padding": dict(new=1, rotary="halves", pages=True, leftpad=True),
    "append, batch index": dict(new=1, index=True),
    "splits": dict(new=1, num_splits=3),
    "float8": dict(float8=True),
    "float8, append": dict(float8=True, new=1),
    "float8, append, rotary, pages": dict(float8=True, new=1, rotary="interleaved", pages=True),
    "float8, pages, left padding": dict(float8=True, pages=True, leftpad=True),
}
STEP = pytest.mark.parametrize("step", STEPS)


@STEP
def test_graph_of_a_decoding_step(step):
    decoding, stream = Decoding(**STEPS[step]), Stream()
    replay, results = captured(decoding, stream)
    for turn in range(4):
        decoding.change(turn)
        before = [x.clone() for x in decoding.caches]
        want = decoding()
        grown = decoding.stored()
        for cache, old in zip(decoding.caches, before, strict=True):
            cache.copy_(old)
        if decoding.new:
            assert not all(torch.equal(a, b) for a, b in zip(decoding.stored(), grown, strict=True))
        for x in results:
            x.fill_(torch.nan)
        synchronize()
        with stream:
            replay()
        synchronize()
        for got, right in zip([*results, *decoding.stored()], [*want, *grown], strict=True):
            assert torch.equal(got, right), turn


# --- launches that overlap ------------------------------------------------------------------------


class Chain:
    """Decoding steps, each of which reads what the operation right before it wrote: another step, a
    kernel, a copy, a fill, an append, or work on another stream.
    """

    def __init__(self, batch: int, keys: int, heads: int, heads_kv: int, page: int) -> None:
        batch, keys = (batch, keys) if on_gpu() else (min(batch, 3), keys // 16)
        self.q = normal(batch, 1, heads, DIM)
        self.rows = [normal(batch, keys, heads_kv, DIM) for _ in "kv"]
        self.lengths = torch.randint(keys // 2, keys - 8, (batch,), dtype=torch.int32)
        self.shape = (batch * keys // page, page, heads_kv, DIM) if page else self.rows[0].shape
        self.options = {}
        if page:
            table = torch.randperm(batch * keys // page).int().view(batch, -1)
            self.options["block_table"] = table
        self.other = Stream()

    def elsewhere(self, x: Tensor) -> Tensor:
        """Twice x, computed on another stream."""
        if not on_gpu():
            return x * 2
        here = torch.cuda.current_stream()
        self.other.stream.wait_stream(here)
        with self.other:
            twice = x * 2
        here.wait_stream(self.other.stream)
        twice.record_stream(here)
        return twice

    def __call__(self, pause: Callable[[], None] = lambda: None) -> list[Tensor]:
        """The result of each step; `pause` runs between any two operations."""
        k, v = caches = [x.clone() for x in self.rows]
        x, lengths, results = self.q, self.lengths.clone(), []

        def step(new: Tensor | None = None) -> Tensor:
            pause()
            out = tilewise.attention_with_kvcache(
                x, *(c.view(self.shape) for c in caches), new, new,
                cache_seqlens=lengths, **self.options,
            )  # fmt: skip
            pause()
            results.append(out)
            return out

        x = step()
        x = step()
        k[:, -1:].mul_(2.0)
        x = step()
        v.copy_(self.rows[0])
        x = step()
        k[0].zero_()
        x = step()
        lengths.add_(3)
        x = step()
        x = step(x[:, :, : k.shape[2]].contiguous())
        x = step(self.elsewhere(x[:, :, : k.shape[2]].contiguous()))
        x = self.elsewhere(x)
        step()
        return results


# These shapes cover clusters with one and with two CTAs per SM, a combine kernel, and splits and
# chunks that fit in one wave or need several (cuda/plan_decode.cpp, choose_pdl_trigger).
CHAINS = [(1, 1024, 32, 8), (4, 4096, 32, 8), (2, 8192, 32, 8), (16, 1024, 32, 8),
          (48, 512, 32, 8), (128, 512, 16, 1)]  # fmt: skip


@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("shape", CHAINS, ids=str)
def test_step_waits_for_its_predecessor(shape, page):
    chain, stream = Chain(*shape, page), Stream()
    want = chain(synchronize)
    assert all(bool(x.isfinite().all()) and float(x.abs().max()) > 0 for x in want)
    replay, results = captured(chain, stream)
    stream.delay()
    with stream:
        queued = chain()
    for x in results:
        x.fill_(torch.nan)
    synchronize()
    with stream:
        replay()
        replay()
    synchronize()
    for i, (eager, graph, right) in enumerate(zip(queued, results, want, strict=True)):
        assert torch.equal(eager, right), i
        assert torch.equal(graph, right), i


# --- no synchronisation --------------------------------------------------------------------------

READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal}


class NoReads(TorchDispatchMode):
    """Refuses operations that would wait for a GPU if the tensors were on one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_synchronisation(reads_block_table: bool = False) -> Iterator[None]:
    """A block in which waiting for the device raises an exception.

    Args:
        reads_block_table: The call is an append, which on the CPU validates the pages it writes to.
    """
    if not on_gpu():
        with contextlib.nullcontext() if reads_block_table else NoReads():
            yield
        return
    synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the debug mode warns that it does not catch everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients_of(out: Tensor, leaves: list[Tensor]) -> None:
    torch.autograd.grad(out, leaves, torch.ones_like(out))


def leaves_of(rows: int = 100, batch: int = 2) -> list[Tensor]:
    return [normal(batch, rows, h, 64).requires_grad_() for h in (4, 2, 2)]


def attention_call(**options: object) -> Callable[[], None]:
    leaves = leaves_of()
    return lambda: gradients_of(tilewise.attention(*leaves, **options), leaves)


def varlen_call(bounds: bool = True, **options: object) -> Callable[[], None]:
    leaves = [x[0].detach().requires_grad_() for x in leaves_of(230)]
    cu = torch.tensor([0, 100, 100, 229], dtype=torch.int32)
    if bounds:
        options |= dict(max_seqlen_q=129, max_seqlen_k=129)
    return lambda: gradients_of(tilewise.attention_varlen(*leaves, cu, cu, **options), leaves)


CALLS: dict[str, Callable[[], Callable[[], object]]] = {
    "attention": lambda: attention_call(causal=True),
    "deterministic": lambda: attention_call(causal=True, deterministic=True),
    "score": lambda: attention_call(
        softcap=20.0, alibi_slopes=torch.rand(4), bias=normal(1, 4, 100, 100),
        sinks=torch.zeros(4), window=(40, 10),
    ),
    "dropout": lambda: attention_call(dropout_p=0.1),
    "learned scale": lambda: attention_call(scale=torch.tensor(0.2)),
    "batch invariant": lambda: attention_call(batch_invariant=True),
    "varlen": lambda: varlen_call(causal=True),
    "varlen without bounds": lambda: varlen_call(bounds=False),
    "varlen, in use": lambda: varlen_call(
        seqused_q=torch.tensor([50, 0, 100], dtype=torch.int32),
        seqused_k=torch.tensor([60, 0, 129], dtype=torch.int32),
    ),
    "one length for all": lambda: with_a_number(200),
    **{f"cache: {name}": lambda step=step: Decoding(**step) for name, step in STEPS.items()},
}  # fmt: skip


def with_a_number(length: int) -> Callable[[], object]:
    """A step whose cache_seqlens is an int."""
    decoding = Decoding(new=1)
    decoding.lengths = length  # type: ignore[assignment]
    return decoding


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_synchronise(name):
    call = CALLS[name]()
    call()  # loads code and modules
    with no_synchronisation(reads_block_table="append" in name and "pages" in name):
        for _ in range(2):
            call()


def test_synchronisation_would_be_detected():
    x = torch.ones(3)
    with pytest.raises((RuntimeError, AssertionError)), no_synchronisation():
        float(x.sum())
    assert float(x.sum()) == 3.0
