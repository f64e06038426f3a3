"""Small problems that reach every kernel: each dtype, head-dim tile, form and direction, and
everything else with a kernel of its own (splits, pages, index checks, gradients of bias and sinks,
NaN recompute, appending to a cache).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

DTYPES = ("bf16", "fp16", "fp32", "tf32")
APPENDS = [
    f"append-{dtype}-{cache}-{rotary}"
    for dtype in ("bf16", "fp16", "fp32")
    for cache in ("dense", "paged", "indexed")
    for rotary in ("plain", "halves", "pairs")
] + [f"append-{t}-float8-{r}" for t in ("bf16", "fp16") for r in ("plain", "pairs")]
OPTIONS = ("softcap", "alibi", "bias", "dropout")
GROUP_SIZE = 6  # problems


@dataclass(frozen=True)
class Shape:
    """One problem; lengths and heads as in the tests' Case."""

    name: str
    dtype: str
    head_dim: int = 64
    head_dim_v: int = 0  # 0: head_dim
    latent: bool = False  # v is the first head_dim_v columns of k, in the same memory
    rows: tuple[int, ...] = (150,)
    keys: tuple[int, ...] = (170,)
    heads_kv: int = 2
    group: int = 2
    varlen: bool = False
    tail: int = 0  # rows past the last sequence
    used: bool = False  # seqused_q and seqused_k below the lengths
    varlen_decode: bool = False  # seqused_k only, with one long sequence among short ones
    leftpad: bool = False
    page_size: int = 0
    window: tuple[int, int] = (-1, 0)
    general: bool = False  # all of OPTIONS
    option: str = ""  # only one of them
    bias_broadcast: bool = False
    sinks: bool = False
    splits: int = 0
    deterministic: bool = False
    check: bool = False
    nan: bool = False
    float8: bool = False  # keys and values
    float8_queries: bool = False  # q as well; out is bf16
    backward: bool = True
    mask: str = ""  # "ranges" or "blocks"
    tangents: bool = False  # also forward mode and second derivatives
    float32_out: bool = False
    max_logits: bool = False

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def options(self) -> tuple[str, ...]:
        return OPTIONS if self.general else (self.option,) if self.option else ()


def shapes() -> Iterator[Shape]:
    """Problems for every tile and form."""
    for dtype in DTYPES:
        for dim in (64, 96, 128, 192, 256, 320, 512):
            plain = Shape(f"{dtype}-d{dim}", dtype, dim, sinks=True)
            if dim > 256:
                plain = replace(plain, rows=(70,), keys=(100,), group=1)
            general = replace(plain, name=f"{plain.name}-general", general=True, sinks=False)
            yield plain
            yield replace(plain, name=f"{plain.name}-deterministic", deterministic=True)
            yield general
            yield replace(general, name=f"{general.name}-deterministic", deterministic=True)
            yield replace(plain, name=f"{plain.name}-masked", mask="ranges")
    for dtype in DTYPES:
        yield from options(dtype)
    for dtype in ("bf16", "fp16", "fp32"):
        yield from masks(dtype)
        yield from tangents(dtype)
    for dtype in ("bf16", "fp16"):
        yield from few_rows_and_pages(dtype)
        yield from latent_caches(dtype)
        yield from over_float8(dtype)


def few_rows_and_pages(dtype: str) -> Iterator[Shape]:
    """Decoding and paged kernels of every head-dim tile: contiguous keys and whole pages use TMA
    where the GPU has it, pages of 3 keys never do.
    """
    for dim in (64, 96, 128, 192, 256, 320, 512):
        few = Shape(f"{dtype}-few-d{dim}", dtype, dim, rows=(1, 1), keys=(300, 300), group=8,
                    backward=False)  # fmt: skip
        yield few
        yield replace(few, name=f"{few.name}-general", option="softcap")
        yield replace(few, name=f"{few.name}-masked", mask="ranges")
        yield replace(few, name=f"{few.name}-paged", page_size=64)
        yield replace(few, name=f"{few.name}-odd-pages", page_size=3)
        yield replace(few, name=f"{dtype}-pages-d{dim}", rows=(150,), keys=(170,), group=2,
                      page_size=16)  # fmt: skip


def latent_caches(dtype: str) -> Iterator[Shape]:
    """Caches of 576 columns, of which 512 are the values: tiles of few and of many rows."""
    few = Shape(f"{dtype}-latent", dtype, 576, 512, latent=True, rows=(1, 1), keys=(100, 100),
                heads_kv=1, group=16, backward=False)  # fmt: skip
    for shape in (few, replace(few, name=f"{few.name}-rows", rows=(3,), keys=(70,))):
        yield shape
        yield replace(shape, name=f"{shape.name}-paged", page_size=16)
    yield replace(few, name=f"{few.name}-splits", splits=3, used=True)
    yield replace(few, name=f"{few.name}-nan", rows=(2,), keys=(80,), group=8, nan=True)


def over_float8(dtype: str) -> Iterator[Shape]:
    """float8 caches with 16-bit queries: by TMA, also paged, and in the general form."""
    for dim in (64, 128, 256):
        general = Shape(f"{dtype}-f8-d{dim}", dtype, dim, float8=True, sinks=True, backward=False)
        few = replace(general, rows=(1, 1, 1), keys=(500, 500, 500), group=8)
        yield general
        yield replace(few, name=f"{general.name}-decode", splits=3, used=True)
        yield replace(few, name=f"{general.name}-decode-paged", page_size=64)
        yield replace(general, name=f"{general.name}-masked", mask="ranges")
        yield replace(few, name=f"{general.name}-decode-masked", mask="ranges")
        yield replace(few, name=f"{general.name}-odd", page_size=3, leftpad=True, sinks=False,
                      general=True)  # fmt: skip
        yield replace(general, name=f"{general.name}-queries", float8_queries=True)
    nan = Shape(f"{dtype}-f8-nan", dtype, nan=True, float8=True, backward=False)
    yield nan
    yield replace(nan, name=f"{dtype}-f8-odd", head_dim=37, head_dim_v=51, check=True)
    if dtype == "bf16":  # products in float8 on Hopper, whatever 16-bit type out has
        for dim in (64, 128, 192):
            products = replace(general, name=f"f8-products-d{dim}", head_dim=dim, group=1,
                               head_dim_v=min(dim, 128), float8_queries=True)  # fmt: skip
            yield products
            yield replace(products, name=f"{products.name}-nan", nan=True)
            yield replace(products, name=f"{products.name}-varlen", rows=(3, 0, 130, 170),
                          keys=(90, 20, 0, 140), varlen=True, window=(-1, -1))  # fmt: skip
    yield replace(nan, name=f"{dtype}-f8-simt", head_dim=300, rows=(40,), keys=(80,), heads_kv=1)


def masks(dtype: str) -> Iterator[Shape]:
    """Masks of blocks, and masks with other options. The head-dim tiles are among the others."""
    masked = Shape(f"{dtype}-blocks", dtype, rows=(300,), keys=(300,), mask="blocks",
                   window=(-1, -1))  # fmt: skip
    yield masked
    yield replace(masked, name=f"{dtype}-blocks-general", general=True, sinks=True)
    yield replace(masked, name=f"{dtype}-ranges-nan", mask="ranges", nan=True, window=(-1, 0))
    yield replace(masked, name=f"{dtype}-ranges-varlen", mask="ranges", rows=(3, 0, 130, 70),
                  keys=(90, 20, 0, 140), varlen=True)  # fmt: skip
    for dim in (64, 96, 128):  # enough rows for the masked forms of wgmma; 2100 take the large tile
        rows = replace(masked, name=f"{dtype}-rows-d{dim}", head_dim=dim, mask="ranges", sinks=True)
        yield replace(rows, name=f"{rows.name}-masked", window=(-1, 0))
        yield replace(rows, name=f"{rows.name}-masked-nan", nan=True)
    yield replace(rows, name=f"{dtype}-many-rows-masked", head_dim=64, rows=(2100,), keys=(70,),
                  heads_kv=1, backward=False)  # fmt: skip
    yield Shape(f"{dtype}-blocks-pages", dtype, rows=(2, 2), keys=(300, 300), group=4,
                mask="blocks", page_size=16, used=True, backward=False)  # fmt: skip


def tangents(dtype: str) -> Iterator[Shape]:
    """Forward mode (the plain form of 16 bits has tensor cores) and second derivatives; and largest
    logits and out in float32.
    """
    for dim in (64, 128, 256, 512):
        plain = Shape(f"{dtype}-tangents-d{dim}", dtype, dim, rows=(70,), keys=(90,), tangents=True)
        yield plain
    for dim in (64, 128):
        general = replace(plain, name=f"{dtype}-tangents-general-d{dim}", head_dim=dim)
        yield replace(general, general=True, sinks=True)
    yield replace(plain, name=f"{dtype}-tangents-nan", head_dim=128, sinks=True, nan=True,
                  keys=(170,), rows=(150,))  # fmt: skip
    for dim in (64, 128):
        results = Shape(f"{dtype}-results-d{dim}", dtype, dim, sinks=True, max_logits=True,
                        float32_out=dtype != "fp32")  # fmt: skip
        yield results
        if dtype != "fp32":
            yield replace(results, name=f"{dtype}-float32-out-d{dim}", max_logits=False)
    yield replace(results, name=f"{dtype}-results-decode", rows=(1, 1), keys=(500, 500), group=8,
                  splits=3, backward=False)  # fmt: skip


def options(dtype: str) -> Iterator[Shape]:
    """Problems that do not depend on the head dimension."""
    base = Shape(dtype, dtype)
    lengths = dict(rows=(3, 0, 130, 70), keys=(90, 20, 0, 140), varlen=True)
    cache = dict(rows=(1, 1, 1), keys=(500, 500, 500), group=8, backward=False)
    kinds = {
        "full": dict(window=(-1, -1), head_dim_v=40),
        "window": dict(window=(30, 5), rows=(200,), keys=(200,)),
        "odd": dict(head_dim=37, head_dim_v=51, window=(9, 9)),
        "varlen": dict(**lengths, tail=9, check=True),
        "varlen-deterministic": dict(**lengths, deterministic=True, sinks=True),
        "used": dict(rows=(100, 100), keys=(120, 120), used=True, leftpad=True),
        "bias-broadcast": dict(general=True, bias_broadcast=True, rows=(60, 60), keys=(70, 70)),
        "general-varlen": dict(**lengths, general=True),
        "paged": dict(rows=(20, 20), keys=(96, 96), page_size=16, used=True, check=True),
        "paged-odd": dict(rows=(20, 20), keys=(96, 96), page_size=3, leftpad=True, group=4),
        "decode": dict(**cache),
        "decode-splits": dict(**cache, splits=3, used=True),
        "decode-paged-splits": dict(**cache, splits=4, page_size=64, sinks=True, head_dim=128),
        "decode-varlen": dict(  # more tiles than SMs: the last CTA combines chunks
            rows=(1,) * 70, keys=(400,) * 70, group=4, varlen_decode=True, backward=False
        ),
        **{option: dict(option=option, head_dim=128) for option in OPTIONS},
        "nan": dict(nan=True),
        "nan-deterministic": dict(nan=True, deterministic=True, window=(40, 3), head_dim=128),
        "empty-rows": dict(rows=(0, 0), keys=(9, 9)),
        "empty-keys": dict(rows=(9, 9), keys=(0, 0), sinks=True),
    }
    for kind, changes in kinds.items():
        yield replace(base, name=f"{dtype}-{kind}", **changes)  # type: ignore[arg-type]


def problems(only: str = "") -> dict[str, Shape | None]:
    """All problems whose name contains `only`; None stands for a problem of append.py."""
    named: dict[str, Shape | None] = {s.name: s for s in shapes()}
    return {n: s for n, s in (named | dict.fromkeys(APPENDS)).items() if only in n}


def groups(only: str = "") -> list[list[str]]:
    """Names of problems that share kernels, in small groups, those with the most code first.

    A process under compute-sanitizer patches each kernel that it encounters, which takes longer
    than running it.
    """

    def kernels(problem: tuple[str, Shape | None]) -> tuple[int, str]:
        name, shape = problem
        if shape is None:
            return 0, name.split("-")[1]
        return -shape.head_dim, f"{shape.dtype}{'-f8' if shape.float8 else ''}"

    found = []
    for _, members in groupby(sorted(problems(only).items(), key=kernels), key=kernels):
        names = [name for name, _ in members]
        found += [names[i : i + GROUP_SIZE] for i in range(0, len(names), GROUP_SIZE)]
    return found
