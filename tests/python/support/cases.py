"""One attention problem as a value (`Case`), its guarded buffers (`Built`), and the comparison of
a kernel's results with the oracle."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, fields

import numpy as np
import torch

import capi
import devices
import mask_cases
import oracle
from bounds import check_gradients, check_lse, check_out
from capi import DTYPES, Guarded, guarded

GRADIENTS = ("q", "k", "v", "bias", "sinks", "scale")


@dataclass(frozen=True, repr=False)
class Case:
    """Everything that defines a problem. `rows` and `keys` hold one length per sequence; without
    varlen all lengths are equal, and paged lengths are rounded up to whole pages."""

    dtype: str = "fp32"
    rows: tuple[int, ...] = (5,)
    keys: tuple[int, ...] = (7,)
    heads_kv: int = 1
    group: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    latent: bool = False  # v is the first head_dim_v columns of k, in the same memory
    varlen_q: bool = False
    varlen_k: bool = False  # with pages, cu_seqlens_k says how many keys each sequence has
    tail_q: int = 0  # rows past the last cu_seqlens_q entry
    tail_k: int = 0
    page_size: int = 0  # 0: not paged
    share_pages: bool = False  # the sequences' first pages are the same page
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    leftpad: tuple[int, ...] | None = None
    kv_idx: tuple[int, ...] | None = None
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None  # None: 1 / sqrt(head_dim)
    scale_ptr: bool = False
    softcap: float = 0.0
    alibi: str = ""  # "", "h" or "bh"
    bias: str | None = None  # dimensions of "bhr" that are not broadcast
    bias_own_dtype: bool = False  # else fp32
    bias_hides: bool = False  # some entries are -inf
    sinks: bool = False
    dropout_p: float = 0.0
    dropout_state: bool = False  # seed and offset behind a pointer
    splits: int = 0
    diagonal: tuple[int, ...] | None = None  # of a shard, like the fields below
    row_offset: int = 0
    key_offset: int = 0
    batch_offset: int = 0
    head_offset: int = 0
    more_heads: int = 0  # query heads of the larger problem beyond those of the shard
    mask_ranges: tuple[tuple[mask_cases.Range, ...], ...] | None = None  # per sequence, or one
    mask_blocks: str | None = None  # dimensions of "bh" that are not shared; the blocks are random
    max_logits: bool = False
    float32_out: bool = False  # also where q is not
    deterministic: bool = False
    tf32: bool = False
    dlse: bool = False
    wanted: frozenset[str] = frozenset(GRADIENTS)
    order: tuple[int, ...] = (0, 1, 2, 3)  # outermost to innermost dimension in memory
    pad: int = 0  # unused elements after every row, head and batch
    shift: int = 0  # elements off the allocation's alignment
    expand: str = ""  # e.g. "k0" or "v2": that tensor is broadcast (stride 0) along that dimension
    spread: float = 1.0  # standard deviation of q
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    def __repr__(self) -> str:
        values = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return f"Case({', '.join(f'{n}={v!r}' for n, v, default in values if v != default)})"

    def _repr_pretty_(self, printer: object, cycle: bool) -> None:
        printer.text(repr(self))  # type: ignore[attr-defined]  # how hypothesis prints examples


def offsets(lengths: tuple[int, ...]) -> list[int]:
    return [0, *np.cumsum(lengths, dtype=int).tolist()]


def int32(values: object) -> torch.Tensor:
    """Metadata followed by large guard values, so that a read past its end is noticed."""
    t = torch.as_tensor(np.asarray(values), dtype=torch.int32)
    g = guarded(t.shape, torch.int32)
    g.base.fill_(2**30)
    g.view.copy_(t)
    return g.view


class Built:
    """The buffers of a case, its ABI structs, and its description for the oracle."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.dtype = DTYPES[case.dtype]
        self.rng = np.random.default_rng(case.seed)
        self.keep: list[object] = []  # keeps alive what the structs point at
        self.device = devices.current()
        devices.fits(case)
        self.batch = len(case.rows)
        self._metadata()
        self.q = self._input("q", self._shape_q(case.head_dim))
        self.k = self._input("k", self._shape_k(case.head_dim))
        if case.latent:
            self.v = self.k[..., : case.head_dim_v]
        else:
            self.v = self._input("v", self._shape_k(case.head_dim_v))
        self._score_inputs()
        out_dtype = torch.float32 if case.float32_out else None
        self.out = self._buffer(self._shape_q(case.head_dim_v), out_dtype)
        lead = () if case.varlen_q else (self.batch,)
        self.lse_shape = (*lead, case.heads, self.seqlen_q)
        self.lse = guarded(self.lse_shape, torch.float32, pad=self._pad(self.lse_shape))
        self.lse_low = guarded(self.lse_shape, torch.float32, pad=self._pad(self.lse_shape))
        self.max_logits = guarded((self.batch, case.heads), torch.float32)
        self.attention = self._attention()
        self._mask()
        self._gradient_inputs()
        self._poison_unused()

    # Metadata -----------------------------------------------------------------------------------

    def _metadata(self) -> None:
        c = self.case
        cu_q, cu_k = offsets(c.rows), offsets(c.keys)
        self.seqlen_q = cu_q[-1] + c.tail_q if c.varlen_q else c.rows[0] if c.rows else 4
        self.seqlen_k = cu_k[-1] + c.tail_k if c.varlen_k else c.keys[0] if c.keys else 4
        self.meta: dict[str, torch.Tensor] = {}
        self.where: dict[str, object] = {}
        named = {
            "cu_seqlens_q": cu_q if c.varlen_q else None,
            "cu_seqlens_k": cu_k if c.varlen_k else None,
            "seqused_q": c.used_q,
            "seqused_k": c.used_k,
            "leftpad_k": c.leftpad,
            "kv_batch_idx": c.kv_idx,
        }
        for name, values in named.items():
            if values is not None:
                self.meta[name] = int32(values)
                self.where[name] = list(values)
        self.kv_batch = max(self.batch, max(c.kv_idx, default=0) + 1) if c.kv_idx else self.batch
        self.pages = self.width = 0
        if c.page_size:
            self.width = max([-(-n // c.page_size) for n in c.keys], default=0)
            self.pages = self.batch * self.width + 2
            table = self.rng.permutation(self.pages)[: self.batch * self.width]
            table = table.reshape(self.batch, self.width)
            if c.share_pages and self.width:
                table[:, 0] = table[0, 0]
            self.meta["block_table"] = int32(table)
            self.where |= {"block_table": table, "page_size": c.page_size}
            self.seqlen_k = self.width * c.page_size
        self.sequences = oracle.sequences_of(self.batch, self.seqlen_q, self.seqlen_k, **self.where)

    def _shape_q(self, dim: int) -> tuple[int, ...]:
        c = self.case
        lead = (self.seqlen_q,) if c.varlen_q else (self.batch, self.seqlen_q)
        return (*lead, c.heads, dim)

    def _shape_k(self, dim: int) -> tuple[int, ...]:
        c = self.case
        if c.page_size:
            return (self.pages, c.page_size, c.heads_kv, dim)
        lead = (self.seqlen_k,) if c.varlen_k else (self.kv_batch, self.seqlen_k)
        return (*lead, c.heads_kv, dim)

    # Buffers ------------------------------------------------------------------------------------

    def _pad(self, shape: tuple[int, ...]) -> list[int]:
        return [self.case.pad] * len(shape)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Guarded:
        order = self.case.order
        if len(shape) == 3:
            order = tuple(d - 1 for d in order if d > 0)
        return guarded(
            shape, dtype or self.dtype, order=order, pad=self._pad(shape), shift=self.case.shift
        )

    def normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32))

    def _input(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = list(shape)
        if self.case.expand.startswith(name) and shape[int(self.case.expand[1])] > 0:
            stored[int(self.case.expand[1])] = 1
        g = self._buffer(tuple(stored))
        spread = self.case.spread if name == "q" else 1.0
        g.view.copy_(self.normal(tuple(stored)) * spread)
        return g.view.expand(shape)

    def _small(self, shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        """fp32 parameters whose values the low-precision yardstick can also represent."""
        g = guarded(shape, torch.float32, pad=[0, self.case.pad][: len(shape)])
        g.view.copy_(values.to(torch.bfloat16).float())
        return g.view

    def _score_inputs(self) -> None:
        c = self.case
        self.slopes = self.sinks = self.bias = None
        if c.alibi:
            shape = (c.heads,) if c.alibi == "h" else (self.batch, c.heads)
            # Scores stay below 8: beyond that, their rounding in fp32 alone would exceed 1e-6.
            far = max([*c.rows, *c.keys, 8]) + max((abs(d) for d in c.diagonal or ()), default=0)
            values = self.rng.uniform(0.2, 1, shape).astype(np.float32) * 8 / far
            self.slopes = self._small(shape, torch.from_numpy(values))
        if c.sinks:
            self.sinks = self._small((c.heads,), self.normal((c.heads,)))
        if c.bias is not None:
            rows = max(c.rows, default=1) if c.varlen_q else self.seqlen_q
            keys = max(c.keys, default=1) if not self.batched_k else self.seqlen_k
            full = {"b": self.batch, "h": c.heads, "r": rows}
            shape = tuple(n if d in c.bias else 1 for d, n in full.items()) + (keys,)
            values = self.normal(shape)
            if c.bias_hides:
                values[torch.from_numpy(self.rng.random(shape) < 0.2)] = -torch.inf
            g = guarded(
                shape, self.dtype if c.bias_own_dtype else torch.float32, pad=[0, 0, 0, c.pad]
            )
            g.view.copy_(values.to(self.dtype))
            self.bias = g.view

    def _attention(self) -> capi.Attention:
        c = self.case
        a = capi.Attention(
            struct_size=ctypes.sizeof(capi.Attention), device=self.device.code,
            device_index=self.device.index, dtype=capi.DTYPE_CODES[self.dtype], batch=self.batch,
            seqlen_q=self.seqlen_q, seqlen_k=0 if c.page_size else self.seqlen_k, heads_q=c.heads,
            heads_kv=c.heads_kv, head_dim=c.head_dim, head_dim_v=c.head_dim_v,
            window_left=c.window[0], window_right=c.window[1], scale=self.scale, softcap=c.softcap,
            dropout_p=c.dropout_p, num_splits=c.splits, deterministic=c.deterministic, tf32=c.tf32,
        )  # fmt: skip
        if c.diagonal is not None:
            self.diagonal = int32(c.diagonal)
            a.diagonal = self.diagonal.data_ptr()
        a.row_offset, a.key_offset = c.row_offset, c.key_offset
        a.batch_offset, a.head_offset = c.batch_offset, c.head_offset
        a.heads_q_total = c.heads + c.head_offset + c.more_heads
        a.q = capi.tensor(self.q, batched=not c.varlen_q)
        a.k = capi.tensor(self.k, batched=self.batched_k)
        a.v = capi.tensor(self.v, batched=self.batched_k)
        a.out = capi.tensor(self.out.view, batched=not c.varlen_q)
        a.lse, a.lse_low = self.lse.pointer, self.lse_low.pointer
        a.lse_stride_batch = 0 if c.varlen_q else self.lse.view.stride(0)
        a.lse_stride_head = self.lse.view.stride(-2)
        a.max_logits = self.max_logits.pointer if c.max_logits else None
        a.out_dtype = capi.OUT_FLOAT32 if c.float32_out else capi.OUT_DEFAULT
        for name, values in self.meta.items():
            setattr(a, name, values.data_ptr())
        if c.kv_idx:
            a.kv_batch = self.kv_batch
        if c.page_size:
            table = self.meta["block_table"]
            a.block_table_stride, a.block_table_width = table.stride(0), self.width
            a.page_size, a.pages = c.page_size, self.pages
        if c.scale_ptr:
            a.scale_ptr = self._pointer(torch.tensor([self.scale], dtype=torch.float32))
            a.scale = 123.0  # must not be read
        seed, offset = (int(x) for x in self.rng.integers(0, 2**63, 2))
        self.seed_offset = seed, offset
        if c.dropout_state:
            state = np.array([seed, offset], np.uint64)
            a.dropout_state = self._pointer(torch.from_numpy(state.view(np.int64)))
        else:
            a.dropout_seed, a.dropout_offset = seed, offset
        if self.slopes is not None:
            a.alibi_slopes = self.slopes.data_ptr()
            a.alibi_stride_batch = self.slopes.stride(0) if c.alibi == "bh" else 0
        if self.sinks is not None:
            a.sinks = self.sinks.data_ptr()
        if self.bias is not None and c.bias is not None:
            a.bias, a.bias_dtype = self.bias.data_ptr(), capi.DTYPE_CODES[self.bias.dtype]
            for dim, letter, name in zip(range(3), "bhr", ("batch", "head", "row"), strict=True):
                stride = self.bias.stride(dim) if letter in c.bias else 0
                setattr(a, f"bias_stride_{name}", stride)
        return a

    def _mask(self) -> None:
        c = self.case
        self.mask: np.ndarray | None = None
        rows, keys = self.seqlen_q, self.seqlen_k
        if c.mask_ranges is not None:
            self.mask = np.array(
                [[mask_cases.dense_of_ranges(ranges, rows, keys)] for ranges in c.mask_ranges]
            ).reshape(len(c.mask_ranges), 1, rows, keys)
            struct = mask_cases.ranges_struct(c.mask_ranges)
        elif c.mask_blocks is not None:
            full = {"b": max(1, self.batch), "h": c.heads}
            lead = tuple(n if d in c.mask_blocks else 1 for d, n in full.items())
            self.mask = mask_cases.random_dense(self.rng, (*lead, rows, keys))
            struct = mask_cases.blocks_struct(self.mask, self.rng)
            struct.struct.batch = self.batch if "b" in c.mask_blocks else 1
        else:
            return
        self.mask_struct = struct
        self.attention.mask = struct.address

    def _pointer(self, t: torch.Tensor) -> int:
        t = t.to(self.device.memory)
        self.keep.append(t)
        return t.data_ptr()

    def _poison_unused(self) -> None:
        """NaN in every row and key that no sequence uses: unused memory of a cache is not zero."""
        c = self.case
        used = {
            "rows": np.concatenate([np.zeros(0, int), *(p.rows for p in self.sequences)]),
            "keys": np.concatenate([np.zeros(0, int), *(p.keys for p in self.sequences)]),
        }
        for name, which in (("q", "rows"), ("dout", "rows"), ("k", "keys"), ("v", "keys")):
            x = getattr(self, name)
            if c.expand.startswith(name):
                continue
            lead = x.shape[:-2]
            free = np.ones(int(np.prod(lead)), bool)
            free[used[which]] = False
            x[torch.from_numpy(free.reshape(lead)).to(x.device)] = torch.nan

    def _gradient_inputs(self) -> None:
        c = self.case
        self.dout = self._buffer(self._shape_q(c.head_dim_v)).view
        self.dout.copy_(self.normal(tuple(self.dout.shape)))
        self.dlse = None
        if c.dlse:
            self.dlse = guarded(self.lse_shape, torch.float32, pad=self._pad(self.lse_shape)).view
            self.dlse.copy_(self.normal(self.lse_shape))

    @property
    def scale(self) -> float:
        c = self.case
        return float(np.float32(c.head_dim**-0.5 if c.scale is None else c.scale))

    @property
    def batched_k(self) -> bool:
        """Whether k and v have a leading dimension (sequences or pages)."""
        return not self.case.varlen_k or bool(self.case.page_size)

    @property
    def keys_per_sequence(self) -> bool:
        """Whether dk and dv have separate rows per sequence, because k and v may be shared."""
        return bool(self.case.page_size) or self.case.kv_idx is not None

    def gradients(self) -> capi.Gradients:
        """Fresh poisoned gradient buffers (in self.grads) and the struct that points at them."""
        c = self.case
        fp32 = torch.float32
        dk_shape, dv_shape = self._shape_k(c.head_dim), self._shape_k(c.head_dim_v)
        if self.keys_per_sequence:
            dk_shape = (self.batch, self.seqlen_k, *dk_shape[2:])
            dv_shape = (self.batch, self.seqlen_k, *dv_shape[2:])
        g = capi.Gradients(struct_size=ctypes.sizeof(capi.Gradients))
        g.dout = capi.tensor(self.dout, batched=not c.varlen_q)
        self.grads: dict[str, Guarded] = {}
        shapes = {"q": self._shape_q(c.head_dim), "k": dk_shape, "v": dv_shape}
        for name in c.wanted & set("qkv"):
            self.grads[name] = self._buffer(shapes[name])
            batched = not c.varlen_q if name == "q" else self.batched_k
            setattr(g, f"d{name}", capi.tensor(self.grads[name].view, batched=batched))
        if self.dlse is not None:
            g.dlse = self.dlse.data_ptr()
            g.dlse_stride_batch = 0 if c.varlen_q else self.dlse.stride(0)
            g.dlse_stride_head = self.dlse.stride(-2)
        if self.bias is not None and c.bias is not None and "bias" in c.wanted:
            self.grads["bias"] = guarded(self.bias.shape, fp32, pad=[0, 0, 0, c.pad])
            g.dbias = self.grads["bias"].pointer
            for dim, letter, name in zip(range(3), "bhr", ("batch", "head", "row"), strict=True):
                stride = self.grads["bias"].view.stride(dim) if letter in c.bias else 0
                setattr(g, f"dbias_stride_{name}", stride)
            g.dbias_rows, g.dbias_keys = self.bias.shape[2], self.bias.shape[3]
        if self.sinks is not None and "sinks" in c.wanted:
            self.grads["sinks"] = guarded((c.heads,), fp32)
            g.dsinks = self.grads["sinks"].pointer
        if "scale" in c.wanted:
            self.grads["scale"] = guarded((1,), fp32)
            g.dscale = self.grads["scale"].pointer
        return g

    # The oracle's view --------------------------------------------------------------------------

    def options(self) -> oracle.Options:
        c = self.case
        slopes = None
        if self.slopes is not None:
            slopes = float64(self.slopes.expand(self.batch, c.heads))
        seed, offset = self.seed_offset
        return oracle.Options(
            scale=self.scale, window=c.window, softcap=float(np.float32(c.softcap)), slopes=slopes,
            bias=None if self.bias is None else float64(self.bias),
            sinks=None if self.sinks is None else float64(self.sinks),
            dropout_p=c.dropout_p, seed=seed, offset=offset,
            shard=oracle.Shard(
                c.diagonal, c.row_offset, c.key_offset, c.batch_offset, c.head_offset,
                c.heads + c.head_offset + c.more_heads,
            ),
            mask=self.mask,
        )  # fmt: skip

    def by_row(self, per_head: torch.Tensor) -> np.ndarray:
        """[B, Hq, Sq] or [Hq, T] to the oracle's [N, Hq]."""
        return float64(per_head.transpose(-1, -2).reshape(-1, self.case.heads))

    def expected(self) -> oracle.Result:
        grad_keys = self.batch * self.seqlen_k if self.keys_per_sequence else None
        dlse = None if self.dlse is None else self.by_row(self.dlse)
        return oracle.attention(
            flat(self.q), flat(self.k), flat(self.v), self.sequences, self.options(),
            flat(self.dout), dlse, grad_keys,
        )  # fmt: skip


def float64(x: torch.Tensor) -> np.ndarray:
    """A copy on the host."""
    return x.detach().to("cpu", torch.float64, copy=True).numpy()


def flat(x: torch.Tensor) -> np.ndarray:
    """[..., H, D] to float64 [N, H, D]."""
    return float64(x.reshape(-1, *x.shape[-2:]))


@dataclass
class Outcome:
    """The results of one forward (and backward), as copies in float64."""

    out: np.ndarray
    lse: np.ndarray
    lse_low: np.ndarray
    max_logits: np.ndarray  # without the option, NaN
    grads: dict[str, np.ndarray] = field(default_factory=dict)
    kernels: list[str] = field(default_factory=list)


def run(b: Built, *, backward: bool = True, hook: capi.Parallel | None = None) -> Outcome:
    """Forward and backward into poisoned buffers; the test fails when anything else is written."""
    b.attention.parallel = ctypes.addressof(hook) if hook is not None else None
    b.attention.stream = b.device.stream
    b.out.poison()
    b.lse.poison()
    b.lse_low.poison()
    b.max_logits.poison()
    info = capi.forward(b.attention)
    assert b.out.stray_writes() == 0, "forward wrote outside out"
    assert b.lse.stray_writes() == 0, "forward wrote outside lse"
    assert b.lse_low.stray_writes() == 0, "forward wrote outside lse_low"
    assert b.max_logits.stray_writes() == 0, "forward wrote outside max_logits"
    result = Outcome(
        flat(b.out.view), b.by_row(b.lse.view), b.by_row(b.lse_low.view),
        float64(b.max_logits.view),
        kernels=[info.kernel.decode()],
    )  # fmt: skip
    if backward:
        gradients = b.gradients()
        info = capi.backward(b.attention, gradients)
        result.kernels.append(info.kernel.decode())
        for name, g in b.grads.items():
            assert g.stray_writes() == 0, f"backward wrote outside d{name}"
            result.grads[name] = flat(g.view) if name in "qkv" else float64(g.view)
        assert np.array_equal(flat(b.out.view), result.out, equal_nan=True), "backward changed out"
    b.attention.parallel = None
    return result


def check(case: Case, *, backward: bool = True) -> list[str]:
    """Compares the case with the oracle on the device (on a CPU, for every instruction set that it
    has). Returns the kernels that ran; on a CPU, those of the last instruction set."""
    b = Built(case)
    want = b.expected()
    yard = None
    if b.dtype != torch.float32:
        import yardstick

        yard = yardstick.errors(b, want)
    for target in capi.targets():
        with capi.on(target):
            got = run(b, backward=backward)
        where = f"{target} {got.kernels} {case}"
        check_out(got.out, want, case.dtype, yard, where)
        check_lse(got.lse, want.lse, case.dtype, yard, where)
        if case.max_logits:
            check_lse(got.max_logits, want.max_logits, case.dtype, yard, where, "max_logits")
        # Also in rows that are not in use, so that all results are defined.
        assert not got.lse_low[np.isneginf(want.lse)].any(), f"lse_low without keys: {where}"
        if backward:
            check_gradients(got.grads, want, b, yard, where)
    return got.kernels
