"""Problems of forward mode and second derivatives as NumPy arrays, for the NumPy functions and for
the oracle."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

import oracle
import tilewise
from tilewise import Tangents, masks

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SEED = 71
BATCH, ROWS, KEYS, HEADS, HEADS_KV, DIM, DIM_V = 2, 37, 150, 4, 2, 16, 24

# Options of the call, and the inputs that have a tangent.
CASES = {
    "plain": ({}, "qkv"),
    "causal, scale": ({"causal": True, "scale": 0.3}, "qkv scale"),
    "window, keys alone": ({"window": (40, 3)}, "k"),
    "softcap, bias, sinks": (
        {"softcap": 2.0, "bias": (2, 1, ROWS, KEYS), "sinks": True}, "qkv bias sinks scale"
    ),
    "alibi, values alone": ({"slopes": True, "bias": (1, HEADS, 1, KEYS)}, "v"),
    "dropout, softcap": ({"dropout_p": 0.3, "softcap": 3.0, "causal": True}, "qkv scale"),
    "queries alone, sinks": ({"sinks": True, "window": (9, 0)}, "q"),
    "mask, bias": ({"mask": True, "bias": (1, 1, ROWS, KEYS), "window": (140, 20)}, "qkv bias"),
    "ranges": ({"ranges": True, "window": (120, 30)}, "qkv scale"),
    "varlen": ({"lengths": True, "causal": True}, "qv"),
    "varlen, no key in one sequence": (
        {"lengths": True, "no_key": True, "sinks": True}, "qkv sinks scale"
    ),
    # More rows and keys than a tile has, in the kernels for 64 and for 128 columns.
    "many tiles, causal": ({"size": (300, 350), "dims": (128, 96), "causal": True}, "qkv"),
    "many tiles, window": (
        {"size": (290, 350), "dims": (64, 40), "window": (200, 20), "sinks": True},
        "qkv scale sinks",
    ),
    "many tiles, narrow window": (
        {"size": (150, 200), "dims": (40, 64), "window": (9, 2), "sinks": True}, "qkv sinks"
    ),
    "many tiles, v and scale": ({"size": (150, 200), "dims": (64, 128), "scale": -0.1}, "v scale"),
    # GPU kernels are compiled for 64, 128, 256 and 512 columns.
    **{f"{dims}, bias, dropout": (
        {"dims": dims, "bias": (1, HEADS, ROWS, KEYS), "dropout_p": 0.2, "softcap": 4.0},
        "qkv bias scale") for dims in ((100, 72), (140, 200), (512, 290))},
}  # fmt: skip


class Case:
    """A problem in float64 whose numbers the dtype represents, and its arrays."""

    def __init__(self, name: str, dtype: str) -> None:
        given, self.moving = CASES[name]
        given = dict(given)
        self.dtype = dtype
        self.dim, self.dim_v = given.pop("dims", (DIM, DIM_V))
        self.rows, self.keys = given.pop("size", (ROWS, KEYS))
        self.rng = np.random.default_rng(SEED)
        self.q = self.draw(BATCH * self.rows, HEADS, self.dim)
        self.k = self.draw(BATCH * self.keys, HEADS_KV, self.dim)
        self.v = self.draw(BATCH * self.keys, HEADS_KV, self.dim_v)
        lengths = {}
        if given.pop("lengths", False):
            lengths = {
                "cu_seqlens_q": [0, 20, BATCH * ROWS], "cu_seqlens_k": [0, 130, BATCH * KEYS],
                "seqused_q": [20, 50], "seqused_k": [100, 170],
            }  # fmt: skip
        if given.pop("no_key", False):
            lengths["seqused_k"] = [0, 170]
        self.lengths = {n: np.array(x, np.int32) for n, x in lengths.items()}
        self.sequences = oracle.sequences_of(BATCH, self.rows, self.keys, **lengths)
        self.bias = self.draw(*given["bias"]) if "bias" in given else None
        self.sinks = self.draw(HEADS, dtype="fp32") if given.pop("sinks", False) else None
        slopes = self.rng.uniform(0, 0.2, (BATCH, HEADS)).astype(np.float32)
        slopes = slopes if given.pop("slopes", False) else None
        shown = None
        if given.pop("mask", False):
            # Some pairs, all keys from 64 to 127 of half of the rows, and nothing of row 5.
            shown = self.rng.random((1, HEADS, ROWS, KEYS)) < 0.3
            shown[:, :, : ROWS // 2, 64:128] = True
            shown[:, :, 5] = False
            given["mask"] = masks.from_bool(shown)
        if given.pop("ranges", False):  # tiles that no row sees, and rows that see nothing
            given["mask"] = masks.Ranges(
                [[0, 9], [12, ROWS], [20, 31]], [[0, 40], [90, KEYS], [70, 80]],
                ["full", "causal", "inverse_causal"],
            )  # fmt: skip
            shown = given["mask"].to_bool(ROWS, KEYS)
        self.scale = given.get("scale", self.dim**-0.5)
        self.options = {
            **given, **{n: x for n, x in (("alibi_slopes", slopes), ("sinks", self.sinks))
                        if x is not None},
        }  # fmt: skip
        if self.bias is not None:
            self.options["bias"] = self.low(self.bias)
        np.random.seed(SEED)
        seed, offset = np.random.randint(0, 2**62, 2, dtype=np.int64)
        left, right = given.get("window", (None, None))
        right = 0 if given.get("causal") else right
        self.oracle_options = oracle.Options(
            scale=self.scale, window=(-1 if left is None else left, -1 if right is None else right),
            softcap=given.get("softcap", 0.0), bias=self.bias, mask=shown,
            slopes=None if slopes is None else slopes.astype(np.float64), sinks=self.sinks,
            dropout_p=given.get("dropout_p", 0.0), seed=int(seed), offset=int(offset),
        )  # fmt: skip
        self.tangents = self.direction()
        rows = (BATCH * self.rows, HEADS)
        self.dout, self.dout_t = (self.draw(*rows, self.dim_v) for _ in range(2))
        self.dlse, self.dlse_t = self.draw(*rows, dtype="fp32"), self.draw(*rows, dtype="fp32")

    def draw(self, *shape: int, dtype: str | None = None) -> np.ndarray:
        numbers = self.rng.standard_normal(shape)
        return numbers.astype(DTYPES[dtype or self.dtype]).astype(np.float64)

    def direction(self) -> oracle.Tangents:
        moving = {n: self.draw(*getattr(self, n).shape) for n in self.moving.split()[0]}
        for name in self.moving.split()[1:]:
            number = name in ("sinks", "scale")
            shape = () if name == "scale" else getattr(self, name).shape
            moving[name] = self.draw(*shape, dtype="fp32" if number else None)
        if "scale" in moving:
            moving["scale"] = float(moving["scale"])
        return oracle.Tangents(**moving)

    def low(self, x: np.ndarray) -> np.ndarray:
        return x.astype(DTYPES[self.dtype])

    def shaped(self, x: np.ndarray) -> np.ndarray:
        """Flat rows as the call takes them: by sequence, unless lengths are given."""
        x = self.low(x)
        return x if self.lengths else x.reshape(BATCH, -1, *x.shape[1:])

    def by_row(self, lse: np.ndarray) -> np.ndarray:
        """lse [N, Hq] as the call takes it."""
        lse = lse.astype(np.float32)
        if self.lengths:
            return np.ascontiguousarray(lse.T)
        return np.ascontiguousarray(lse.reshape(BATCH, self.rows, HEADS).swapaxes(1, 2))

    def call(self, function, *given, **options):
        np.random.seed(SEED)
        return function(*given, **self.options, **options, **self.lengths)

    def given_tangents(self, t: oracle.Tangents) -> Tangents:
        moved = {n: self.shaped(x) for n in "qkv" if (x := getattr(t, n)) is not None}
        if t.bias is not None:
            moved["bias"] = self.low(t.bias)
        return Tangents(**moved, sinks=t.sinks, scale=t.scale)

    def forward(self) -> None:
        self.arrays = [self.shaped(x) for x in (self.q, self.k, self.v)]
        np.random.seed(SEED)
        if self.lengths:
            starts = [self.lengths[n] for n in ("cu_seqlens_q", "cu_seqlens_k")]
            used = {n: x for n, x in self.lengths.items() if "used" in n}
            call = tilewise.attention_varlen
            self.out, self.lse = call(*self.arrays, *starts, return_lse=True, **used,
                                      **self.options)  # fmt: skip
        else:
            self.out, self.lse = tilewise.attention(*self.arrays, return_lse=True, **self.options)

    def jvp(self, t: oracle.Tangents):
        given = self.given_tangents(t)
        return self.call(tilewise.attention_jvp, given, *self.arrays, self.out, self.lse)

    def second(self, t: oracle.Tangents, out_t, lse_t, dout_t, dlse_t=None, **results):
        return self.call(
            tilewise.attention_second, self.given_tangents(t), out_t, lse_t, self.shaped(dout_t),
            *self.arrays, self.out, self.lse,
            dlse_tangent=None if dlse_t is None else self.by_row(dlse_t), **results,
        )  # fmt: skip

    def flat(self, x: np.ndarray) -> np.ndarray:
        return np.asarray(x, np.float64).reshape(-1, *x.shape[-2:])

    def flat_lse(self, lse: np.ndarray) -> np.ndarray:
        return lse.T if self.lengths else lse.swapaxes(1, 2).reshape(-1, HEADS)
