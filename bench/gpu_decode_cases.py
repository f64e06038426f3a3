"""The points, caches and contestants of bench_gpu_decode.py."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import gpu_decode_cudnn
import tilewise
from gpu_contestants import fa3_installed

HEAD_DIM = 128
HEADS = ((32, 8), (32, 32), (64, 8), (16, 1))  # query heads, key/value heads
# Includes numbers that are not powers of two and so leave the last wave of CTAs partly empty.
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
KEYS = tuple(1024 * 2**i for i in range(8))
PAGES = (1, 16, 64, 256)
MAX_BYTES = 20e9
# Keys and values of all copies together, so that no call finds its cache in L2.
COPIES_BYTES = 200 << 20
MAX_COPIES = 40

# Targets: least ratio to the best peer, and longest time relative to contiguous full caches.
PEER_BAR = 1.0
PAGE_BARS = {"page1": 1.15, "page16": 1.05, "page64": 1.05, "page256": 1.05}
# float8_e4m3 caches (half the bytes), each with the bf16 contestant that reads the same keys.
FLOAT8 = {"float8": "lengths", "float8 page16": "page16", "float8 page64": "page64"}
# Log-normal lengths, contiguous and in pages of this many keys.
LOG_NORMAL = {"lognormal": 0, "lognormal page1": 1, "lognormal page16": 16}
# Peers, each with the contestant of Tilewise that has the same lengths and pages.
SAME_CACHE_PEERS = {
    f"cudnn {n}": n
    for n in ("lengths", "inside", "lognormal", "page16", "page64", "lognormal page16")
}
# Full lengths are whole tiles of every kernel; real lengths end anywhere in a tile.
LEFT_OUT_INSIDE = 24  # keys that the lengths of "inside" leave out

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """One query per sequence against caches of `keys` keys; bf16."""

    batch: int
    keys: int
    heads: int
    kv_heads: int

    @property
    def name(self) -> str:
        """The name that --points matches, such as "B8 S4096 32/8"."""
        return f"B{self.batch} S{self.keys} {self.heads}/{self.kv_heads}"

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values of a call."""
        return 2 * self.batch * self.keys * self.kv_heads * HEAD_DIM * 2

    @property
    def copies(self) -> int:
        """Number of caches to rotate through."""
        return max(1, min(MAX_COPIES, math.ceil(COPIES_BYTES / self.bytes)))

    @property
    def launches(self) -> int:
        """Calls in a graph: more of them where they are short."""
        wanted = 12 if self.bytes > 256 << 20 else 20 if self.bytes > 64 << 20 else 40
        return max(self.copies, wanted)

    def to_json(self) -> dict[str, object]:
        """The fields, for a result file."""
        return {"name": self.name, **asdict(self), "bytes": self.bytes}


def main_cases() -> list[Case]:
    """The points of a short run."""
    points = [(1, 1024), (1, 8192), (1, 131072), (8, 1024), (12, 8192), (16, 8192), (64, 4096)]
    return [*(Case(b, n, 32, 8) for b, n in points), Case(1, 32768, 64, 8), Case(4, 16384, 16, 1)]


def all_cases() -> list[Case]:
    """The whole grid, main points first, so that a run that exceeds its time has measured those."""
    grid = (Case(b, n, *heads) for heads in HEADS for n in KEYS for b in BATCHES)
    return list(dict.fromkeys([*main_cases(), *(c for c in grid if c.bytes <= MAX_BYTES)]))


@dataclass
class Inputs:
    """q [batch, 1, head, column]; caches [batch, key, head, column], used in rotation."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    float8: list[tuple[Tensor, Tensor]]  # the same caches, rounded to float8
    full: Tensor  # lengths: all keys
    inside: Tensor  # lengths: all but a few keys, so that they end inside a tile
    lognormal: Tensor  # lengths: log-normal, like those of requests
    tables: dict[int, Tensor]  # block tables by page size, with pages in random order


def draw(case: Case, device: str) -> Inputs:
    """Draws the inputs, with standard normal entries."""
    generator = torch.Generator(device).manual_seed(case.keys + case.batch)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    def cache() -> Tensor:
        return normal(case.batch, case.keys, case.kv_heads, HEAD_DIM)

    spread = torch.randn(case.batch, generator=generator, device=device)
    lengths = ((spread - 1.5).exp() * case.keys).clamp(1, case.keys)
    tables = {}
    for size in PAGES:
        pages = case.batch * case.keys // size
        order = torch.randperm(pages, generator=generator, device=device)
        tables[size] = order.int().view(case.batch, -1)
    caches = [(cache(), cache()) for _ in range(case.copies)]
    return Inputs(
        normal(case.batch, 1, case.heads, HEAD_DIM),
        caches,
        [(k.to(torch.float8_e4m3fn), v.to(torch.float8_e4m3fn)) for k, v in caches],
        full := torch.full((case.batch,), case.keys, device=device, dtype=torch.int32),
        full - LEFT_OUT_INSIDE,
        lengths.int(),
        tables,
    )


# The output [batch, 1, head, column] with cache number `copy`.
Call = Callable[[int], Tensor]


@dataclass
class Contestant:
    """A contestant: its call, and the lengths and pages it attends to."""

    name: str
    call: Call
    lengths: Tensor  # keys per sequence
    page_size: int = 0  # 0: contiguous
    float8: bool = False

    def share(self, case: Case) -> float:
        """The fraction of the bytes of bf16 caches that it reads."""
        return float(self.lengths.double().mean()) / case.keys * (0.5 if self.float8 else 1.0)


def contestants(case: Case, x: Inputs) -> Iterator[Contestant]:
    """Tilewise with every layout of the cache, then the peers."""

    def ours(lengths: Tensor, size: int = 0, float8: bool = False) -> Call:
        options = {"cache_seqlens": lengths}
        shape = (-1, size, case.kv_heads, HEAD_DIM) if size else x.caches[0][0].shape
        if size:
            options["block_table"] = x.tables[size]
        whole = x.float8 if float8 else x.caches
        caches = [(k.view(shape), v.view(shape)) for k, v in whole]
        return lambda copy: tilewise.attention_with_kvcache(x.q, *caches[copy], **options)

    yield Contestant("dense", lambda copy: tilewise.attention(x.q, *x.caches[copy]), x.full)
    yield Contestant("lengths", ours(x.full), x.full)
    yield Contestant("inside", ours(x.inside), x.inside)
    for size in PAGES:
        yield Contestant(f"page{size}", ours(x.full, size), x.full, size)
    for name, size in zip(FLOAT8, (0, 16, 64), strict=True):
        yield Contestant(name, ours(x.full, size, float8=True), x.full, size, float8=True)
    if case.batch > 1:
        for name, size in LOG_NORMAL.items():
            yield Contestant(name, ours(x.lognormal, size), x.lognormal, size)
    q = x.q.transpose(1, 2)
    heads_first = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in x.caches]
    if x.q.is_cuda:
        yield Contestant("cudnn", _cudnn(q, heads_first), x.full)
        yield Contestant("fa2", _fa2(q, heads_first), x.full)
        if gpu_decode_cudnn.installed():
            for name, same in SAME_CACHE_PEERS.items():
                if case.batch == 1 and "lognormal" in same:
                    continue
                special = {"lognormal": x.lognormal, "inside": x.inside}
                lengths = special.get(same.split()[0], x.full)
                size = int(same.partition("page")[2] or 0)
                yield Contestant(name, _cudnn_varlen(x, lengths, size), lengths, size)
        if fa3_installed():
            yield Contestant("fa3", _fa3(x), x.full)
    else:
        yield Contestant("sdpa", _sdpa(q, heads_first), x.full)


def _cudnn(q: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Call:
    attend = aten._scaled_dot_product_cudnn_attention
    return lambda copy: attend(q, *caches[copy], None, False, 0.0, False, False)[0].transpose(1, 2)


def _cudnn_varlen(x: Inputs, lengths: Tensor, size: int) -> Call:
    shape = (-1, size, *x.caches[0][0].shape[2:]) if size else x.caches[0][0].shape
    caches = [(k.view(shape), v.view(shape)) for k, v in x.caches]
    made: list[gpu_decode_cudnn.Decode] = []

    def call(copy: int) -> Tensor:
        if not made:
            made.append(gpu_decode_cudnn.Decode(x.q, caches[0][0], lengths, x.tables.get(size)))
        return made[0](x.q, *caches[copy])

    return call


def _fa2(q: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Call:
    attend = aten._scaled_dot_product_flash_attention
    scale = HEAD_DIM**-0.5
    return lambda copy: attend(q, *caches[copy], 0.0, False, False, scale=scale)[0].transpose(1, 2)


def _fa3(x: Inputs) -> Call:
    attend = importlib.import_module("flash_attn_interface").flash_attn_with_kvcache
    return lambda copy: attend(x.q, *x.caches[copy])


def _sdpa(q: Tensor, caches: list[tuple[Tensor, Tensor]]) -> Call:
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda copy: attend(q, *caches[copy], enable_gqa=True).transpose(1, 2)


def error(case: Case, x: Inputs, contestant: Contestant) -> float:
    """Error of the last sequence and key/value head of the first cache, against attention in double
    precision: norm of the difference over norm of the reference; infinite for a NaN.
    """
    group = case.heads // case.kv_heads
    rows = torch.arange(int(contestant.lengths[-1]), device=x.q.device)
    rows_of = {}
    for name, cache in zip("kv", (x.float8 if contestant.float8 else x.caches)[0], strict=True):
        flat = cache[..., -1, :].reshape(-1, HEAD_DIM)
        at = (case.batch - 1) * case.keys + rows
        if contestant.page_size:
            at = (
                x.tables[contestant.page_size][-1, rows // contestant.page_size].long()
                * contestant.page_size
            )
            at = at + rows % contestant.page_size
        rows_of[name] = flat[at].double()
    scores = x.q[-1, 0, -group:].double() @ rows_of["k"].T * HEAD_DIM**-0.5
    truth = scores.softmax(-1) @ rows_of["v"]
    found = float((contestant.call(0)[-1, 0, -group:].double() - truth).norm() / truth.norm())
    return found if found == found else math.inf
