"""The cases of `make bench-cpu`, and the bars: how much faster than PyTorch they should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

DTYPES = ("fp32", "bf16", "fp16")
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
LENGTHS = (512, 1024, 2048, 8192)
HEAD_DIMS = (64, 128)
HEADS = 8

# PyTorch skips masked keys only in blocks of 512, so at N = 512 its causal attention does as much
# work as the full one. Tilewise skips them at every length.
SHORT_CAUSAL_BAR = 1.8
# Decoding reads every key and value once: the bar is this fraction of the speed of a plain read.
DECODE_BAR = 0.9
LONG_CACHE = 131072  # keys


@dataclass(frozen=True)
class Case:
    """One attention problem: B = 1, self-attention over `length` rows."""

    dtype: str
    length: int
    head_dim: int
    causal: bool
    backward: bool
    heads: int = HEADS

    @property
    def name(self) -> str:
        """The name that --filter matches, such as "bf16 D64 N2048 causal backward"."""
        mask = "causal" if self.causal else "full"
        which = "backward" if self.backward else "forward"
        return f"{self.dtype} D{self.head_dim} N{self.length} {mask} {which}"

    @property
    def flop(self) -> float:
        """Two products forward, five backward, over the visible pairs (half of them when
        causal).
        """
        forward = 4.0 * self.heads * self.length * self.length * self.head_dim
        return forward * (2.5 if self.backward else 1.0) * (0.5 if self.causal else 1.0)

    @property
    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        return 3 * self.heads * self.length * self.head_dim * BYTES[self.dtype]

    def to_json(self) -> dict[str, object]:
        """The fields, for a result file."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Decode:
    """One query row per sequence against a cache of `length` keys (batch 1)."""

    dtype: str
    heads: int
    kv_heads: int
    length: int = 8192
    head_dim: int = 128

    @property
    def name(self) -> str:
        """For example "bf16 decode 32/8 heads N8192 D128"."""
        heads = f"{self.heads}/{self.kv_heads} heads"
        return f"{self.dtype} decode {heads} N{self.length} D{self.head_dim}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, all of which have to be read."""
        return 2 * self.kv_heads * self.length * self.head_dim * BYTES[self.dtype]

    def to_json(self) -> dict[str, object]:
        """The fields, for a result file."""
        return {"name": self.name, **asdict(self)}


def attention_cases(lengths: tuple[int, ...] = LENGTHS) -> Iterator[Case]:
    """The grid, grouped as the table prints it."""
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for backward in (False, True):
                for length in lengths:
                    for causal in (False, True):
                        yield Case(dtype, length, head_dim, causal, backward)


def decode_cases(longest: int = LONG_CACHE) -> Iterator[Decode]:
    """Caches of 8 heads with one, four and eight query heads each, and one of `longest` keys if
    that is more than the others have.
    """
    for head_dim in HEAD_DIMS:
        for dtype in DTYPES:
            for group in (1, 4, 8):
                yield Decode(dtype, 8 * group, 8, head_dim=head_dim)
    if longest > Decode.length:
        yield Decode("bf16", 32, 8, longest)


def bar(case: Case, isa: str) -> float | None:
    """How many times PyTorch's speed this case must reach on `isa`; None where no bar is set."""
    value = _isa_bar(case, isa)
    if value is not None and case.causal and case.length <= 512:
        return max(value, SHORT_CAUSAL_BAR)
    return value


def _isa_bar(case: Case, isa: str) -> float | None:
    if isa == "amx":
        if case.dtype == "fp32":
            return 1.1
        if case.dtype == "fp16":
            return 3.0
        if case.backward:
            return 2.0
        return 1.8 if case.head_dim <= 64 else 1.5
    if isa == "avx512_bf16":
        if case.dtype == "fp32":
            return 1.3 if case.causal else 1.1
        if case.dtype == "fp16":
            return 8.0 if case.backward else 2.0
        return 1.3 if case.backward else 1.7
    return None
