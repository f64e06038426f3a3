"""The points of `make bench-gpu`, and the bars: how much faster than the peers they should be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

TOKENS = 16384
HIDDEN = 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MAIN_LENGTHS = (1024, 4096, 16384)
HEAD_DIMS = (64, 128, 256)
OTHER_HEAD_DIMS = (80, 96, 192)
GROUPED = ((32, 8), (64, 8))  # query heads, key/value heads

# Ratio to the peer at every point, and the geometric mean over all points of a direction. "best" is
# the best of cuDNN, FA-3 and FA-4, with which the wgmma kernels are compared.
POINT_BAR = {"fa2": 1.0, "efficient": 1.5, "best": 1.0}
MEAN_BAR = {
    ("fwd", "fa2"): 1.12,
    ("bwd", "fa2"): 1.07,
    ("fwd", "best"): 1.04,
    ("bwd", "best"): 1.05,
}
FP32 = "fp32"


@dataclass(frozen=True)
class Case:
    """Self-attention over `seqlen` rows; the batch size follows from the number of tokens."""

    dtype: str
    direction: str  # "fwd" or "bwd"
    head_dim: int
    seqlen: int
    causal: bool
    heads: int
    kv_heads: int
    tokens: int = TOKENS

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return max(1, self.tokens // self.seqlen)

    @property
    def name(self) -> str:
        """The name that --points matches, such as "bf16 fwd D128 S4096 causal MHA". The first of
        GROUPED is called GQA, the others are named by their heads.
        """
        mask = "causal" if self.causal else "full"
        heads = "MHA" if self.heads == self.kv_heads else "GQA"
        if heads == "GQA" and (self.heads, self.kv_heads) != GROUPED[0]:
            heads = f"{self.heads}/{self.kv_heads}"
        return f"{self.dtype} {self.direction} D{self.head_dim} S{self.seqlen} {mask} {heads}"

    @property
    def flop(self) -> float:
        """Two products forward, five backward, over the visible pairs (half of them when
        causal).
        """
        forward = 4.0 * self.batch * self.heads * self.seqlen * self.seqlen * self.head_dim
        return forward * (2.5 if self.direction == "bwd" else 1.0) * (0.5 if self.causal else 1.0)

    def judged_by(self, kernel: str) -> str:
        """The peer with which the bar compares a kernel."""
        if self.dtype == FP32:
            return "efficient"
        return "best" if kernel.startswith("cuda.wgmma") else "fa2"

    def to_json(self) -> dict[str, object]:
        """The fields, for a result file."""
        return {"name": self.name, **asdict(self), "batch": self.batch}


def _cases(
    dtypes: tuple[str, ...],
    head_dims: tuple[int, ...],
    lengths: tuple[int, ...],
    grouped: tuple[int, int] | None,
    tokens: int,
) -> Iterator[Case]:
    for dtype in dtypes:
        for direction in ("fwd", "bwd"):
            for head_dim in head_dims:
                heads, kv_heads = grouped or (HIDDEN // head_dim,) * 2
                for causal in (False, True):
                    for seqlen in (n for n in lengths if n <= tokens):
                        yield Case(
                            dtype, direction, head_dim, seqlen, causal, heads, kv_heads, tokens
                        )


def main_cases(tokens: int = TOKENS) -> list[Case]:
    """The points that a short run measures."""
    return [
        *_cases(("bf16",), HEAD_DIMS, MAIN_LENGTHS, None, tokens),
        *_cases(("bf16",), (128,), (4096,), GROUPED[0], tokens),
        *_cases(("fp16",), (128,), (4096,), None, tokens),
        *_cases((FP32,), (64,), (4096,), None, tokens),
    ]


def all_cases(tokens: int = TOKENS) -> list[Case]:
    """The whole grid, main points first, so that a run that exceeds its time has measured those."""
    few, many = GROUPED
    cases = [
        *main_cases(tokens),
        *_cases(("bf16",), HEAD_DIMS, LENGTHS, None, tokens),
        *_cases((FP32,), HEAD_DIMS, MAIN_LENGTHS, None, tokens),
        *_cases(("bf16",), HEAD_DIMS, LENGTHS, few, tokens),
        *_cases(("bf16",), (64, 128), MAIN_LENGTHS, many, tokens),
        *_cases(("bf16",), OTHER_HEAD_DIMS, MAIN_LENGTHS, None, tokens),
        *_cases(("fp16",), HEAD_DIMS, LENGTHS, None, tokens),
        *_cases(("fp16",), HEAD_DIMS, LENGTHS, few, tokens),
    ]
    return list(dict.fromkeys(cases))
