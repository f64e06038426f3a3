"""One call of distributed attention after all ranks have agreed on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import _check, _mask_tensors, _torch
from .._options import Options
from .._request import Request
from . import cost
from .agreement import Description, agree
from .core import Local
from .dense import DenseCut
from .grid import Grid, grid_of
from .layout import Runs, Starts, check_layout, lengths, runs_of, short, starts_of
from .packed import PackedCut
from .packed_call import sizes_of
from .ranks import Ranks, all_gather, sum_dtype
from .transport import AUTO, check_transport
from .transport import VARIABLE as TRANSPORT

if TYPE_CHECKING:
    from .mask_parts import WholeMask

METHODS = ("ulysses", "allgather")
BOTH, BOTH_RING = "ulysses+allgather", "ulysses+ring"  # of a mesh of two dimensions


def check_method(method: str, grid: Grid | None = None) -> str:
    """The given method, after a check that it is "auto" or possible on the mesh."""
    if grid is not None:
        if method not in ("auto", BOTH, BOTH_RING):
            raise ValueError(
                f"method is {method!r}, but must be 'auto', {BOTH!r} or {BOTH_RING!r} on a mesh of "
                "two dimensions"
            )
        return method
    if not isinstance(method, str) or method not in ("auto", *METHODS, "ring"):
        raise ValueError(
            f"method is {method!r}, but must be 'auto', 'ulysses', 'allgather' or 'ring'"
        )
    return method


class Cut(cost.Cut, Protocol):
    """How the sequences of a call are sharded across the ranks.

    ``row_runs`` and ``key_runs`` number rows and keys in the order in which "ulysses" computes; the
    calls of "allgather" may use another order.
    """

    @property
    def row_runs(self) -> tuple[Runs, ...]:
        """The runs of rows of each rank."""

    @property
    def key_runs(self) -> tuple[Runs, ...]:
        """The runs of keys of each rank."""

    def whole(self, device: torch.device, /) -> Local:
        """The call of all rows."""

    def local(self, rank: int, device: torch.device, /) -> list[Local]:
        """The calls of a rank."""

    def of_hosts(self, grid: Grid, /) -> Cut:
        """The cut for the rows of a mesh of two dimensions."""

    def by_chunk(self) -> Cut:
        """See ``cost.Cut``."""

    def local_of(self, call: Any, device: torch.device, /) -> Local:
        """The call of a meeting."""


class Problem(NamedTuple):
    """This rank's rows in "bshd" order, and what is known of the whole sequence.

    The request has no bias, and its window includes causal.
    """

    ranks: Ranks
    q: Tensor  # [B, rows of this rank, Hq, D]
    k: Tensor
    v: Tensor
    bias: Tensor | None  # [B or 1, Hq or 1, rows of this rank or 1, Sk]
    bias_has_rows: bool  # else its one row is the same for all rows, on all ranks
    request: Request
    cut: Cut
    sequences: int  # number of sequences of the whole call
    grid: Grid | None = None  # of a mesh of two dimensions

    @property
    def size_q(self) -> int:
        return sum(self.cut.rows)

    @property
    def longest_k(self) -> int:
        """The keys of the longest sequence."""
        if isinstance(self.cut, PackedCut):
            return max(sizes_of(self.cut.starts_k), default=0)
        return sum(self.cut.keys)

    @property
    def heads(self) -> tuple[int, int]:
        return self.q.shape[2], self.k.shape[2]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of out for the caller."""
        return _torch.returned_dtype(self.q, self.request)

    @property
    def differentiable(self) -> bool:
        tensors = (self.q, self.k, self.v, self.bias, self.request.sinks, self.request.scale)
        return torch.is_grad_enabled() and any(_requires_grad(x) for x in tensors)


class Replicated(torch.autograd.Function):
    """The same tensor; the backward adds up the parts that the ranks have of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, what: str) -> Tensor:
        """Returns x itself."""
        ctx.plan = ranks, what
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        """Adds in rank order, in float32 or wider."""
        ranks, what = ctx.plan
        wide = dx.to(sum_dtype(dx.dtype)).unsqueeze(0)
        parts = all_gather(wide, [1] * ranks.world, ranks, f"the gradient of {what}")
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total[0].to(dx.dtype), None, None


def _requires_grad(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


class Call(NamedTuple):
    """The arguments of a call that all of its forms have, before any check."""

    function: str  # its name, for messages
    q: Any
    k: Any
    v: Any
    ranks: Ranks
    mesh: Any
    layout: str
    method: str
    request: Request
    reduce_replicated: bool
    unknown: tuple[str, ...] = ()  # names of options that do not exist

    def check(self) -> Grid | None:
        """The grid of the mesh, after the checks that all forms share."""
        if self.unknown:
            known = ", ".join(name for name in Request().arguments() if name != "check")
            raise TypeError(f"{self.unknown[0]} is given, but the options are {known}")
        grid = grid_of(self.mesh, self.ranks)
        check_layout(self.layout)
        check_method(self.method, grid)
        if self.ranks.world > 1:
            check_transport(getattr(self.q, "device", None))
            _refuse_dtensors(self.q, self.k, self.v)
        return grid


def prepare(call: Call, tensor_layout: str) -> Problem:
    """Checks this rank's arguments and compares them with those of the other ranks.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, device or range, or the ranks differ.
    """
    q, k, v, ranks, request = call.q, call.k, call.v, call.ranks, call.request
    local: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
    grid: Grid | None = None

    def describe() -> Description:
        nonlocal grid
        grid = call.check()
        _check.dropout(request.dropout_p)
        bias = _torch._autocast(q, k, v, request.bias)[3]
        *tensors, options = _torch.prepare_dense(
            q, k, v, tensor_layout, request._replace(bias=None, dropout_p=0.0, mask=None)
        )
        rows, heads = tensors[0].shape[1:3]
        if bias is not None:
            _torch._check_bias(bias, tensors[0], _torch.returned_dtype(tensors[0], request))
            _check.bias(bias, tensors[0].shape[0], heads, rows, None)
            bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
        local.append((tensors[0], tensors[1], tensors[2], bias))
        _check_heads(*tensors)
        _check_mask(request.mask, tensors[0], tensors[0].shape[0])
        _check.flag("return_max_logits", request.return_max_logits)
        same = _same(call, local[0], (options.window_left, options.window_right), False)
        same |= {
            "tensor_layout": repr(tensor_layout), "hosts of mesh": str(grid and grid.between.world),
        }  # fmt: skip
        return Description(same, (rows, tensors[1].shape[1], 0 if bias is None else bias.shape[2]))

    numbers = agree(ranks, call.function, describe)
    q, k, v, bias = local[0]
    rows = _runs("q", [row[0] for row in numbers], call.layout)
    keys = _runs("k and v", [row[1] for row in numbers], call.layout)
    if request.mask is not None:
        from .. import masks  # needs NumPy

        masks.check(request.mask, q.shape[0], q.shape[2], (sum(lengths(rows)), sum(lengths(keys))))
    has_rows = _bias_has_rows(bias, [row[2] for row in numbers], rows, sum(lengths(keys)))
    left, right = _check.window_bounds(request.causal, request.window)
    request = request._replace(
        bias=None, causal=False, window=(None if left < 0 else left, None if right < 0 else right)
    )
    if call.reduce_replicated:
        request = request._replace(
            sinks=_reduced(request.sinks, ranks, "sinks"),
            scale=_reduced(request.scale, ranks, "scale"),
        )
        bias = bias if has_rows else _reduced(bias, ranks, "bias")
    cut = DenseCut(
        tuple(rows), tuple(keys), request.window, q.shape[0], _by_place(request), _mask_of(request)
    )
    request = request._replace(mask=None)
    return Problem(ranks, q, k, v, bias, has_rows, request, cut, q.shape[0], grid)


def prepare_varlen(call: Call, cu_seqlens: tuple[Any, Any]) -> Problem:
    """As ``prepare``, for packed sequences whose ends all ranks know."""
    q, k, v, ranks, request = call.q, call.k, call.v, call.ranks, call.request
    local: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []
    cuts: list[PackedCut] = []
    grid: Grid | None = None

    def describe() -> Description:
        nonlocal grid
        grid = call.check()
        left, right = _check.window_bounds(request.causal, request.window)
        window = (None if left < 0 else left, None if right < 0 else right)
        starts = starts_of("cu_seqlens_q", cu_seqlens[0]), starts_of("cu_seqlens_k", cu_seqlens[1])
        if len(starts[0]) != len(starts[1]):
            raise ValueError(
                f"cu_seqlens_k has {len(starts[1])} entries, but must have {len(starts[0])} like "
                "cu_seqlens_q"
            )
        _check.dropout(request.dropout_p)
        *tensors, bias = _torch._autocast(q, k, v, request.bias)
        _torch.check_tensors(*tensors)
        _check.varlen(tensors[0], tensors[1], tensors[2], False)
        batch = len(starts[0]) - 1
        options = _torch.score_options(tensors[0], batch, request._replace(dropout_p=0.0))
        _torch.with_descale(options, tensors[0], tensors[1], request, batch)
        _check_mask(request.mask, tensors[0], batch)
        _check.flag("return_max_logits", request.return_max_logits)
        out_dtype = _torch.returned_dtype(tensors[0], request)
        bias = _packed_bias(bias, tensors[0], starts, out_dtype)
        cut = PackedCut(
            *starts, call.layout, ranks.world, window, _by_place(request), _mask_of(request)
        )
        for name, x, counts in (("q", q, cut.rows), ("k", k, cut.keys)):
            if x.shape[0] != counts[ranks.rank]:
                raise ValueError(
                    f"{name} on rank {ranks.rank} has {x.shape[0]} rows, but layout "
                    f"{call.layout!r} of cu_seqlens over {ranks.world} ranks gives it "
                    f"{counts[ranks.rank]}"
                )
        local.append((*(x.unsqueeze(0) for x in tensors), bias))
        _check_heads(*tensors)
        cuts.append(cut)
        same = _same(call, local[0], (left, right), True)
        same |= {
            "cu_seqlens_q": short(starts[0]), "cu_seqlens_k": short(starts[1]),
            "hosts of mesh": str(grid and grid.between.world),
        }  # fmt: skip
        return Description(same)

    agree(ranks, call.function, describe)
    (cut,) = cuts
    request = request._replace(bias=None, causal=False, window=cut.window, mask=None)
    q, k, v, bias = local[0]
    if call.reduce_replicated:
        request = request._replace(
            sinks=_reduced(request.sinks, ranks, "sinks"),
            scale=_reduced(request.scale, ranks, "scale"),
        )
        bias = _reduced(bias, ranks, "bias")
    return Problem(ranks, q, k, v, bias, False, request, cut, len(cut.starts_q) - 1, grid)


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses heads that no kernel computes: a rank without heads would not run into it."""
    largest = _check.max_head_dim(q.device.type)
    _check.head_sizes(q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1], largest)


def _packed_bias(
    bias: Tensor | None, q: Tensor, starts: tuple[Starts, Starts], out_dtype: torch.dtype
) -> Tensor | None:
    """The bias with four dimensions, after its checks."""
    if bias is None:
        return None
    _torch._check_bias(bias, q, out_dtype)
    _check.bias(bias, len(starts[0]) - 1, q.shape[1], None, None)
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    _check.varlen_bias(bias.shape, *(max(sizes_of(x), default=0) for x in starts))
    return bias


def _by_place(request: Request) -> bool:
    """Whether results depend on the places of rows and keys. A bias for sequences of equal length
    does not count and is no longer in the request: its rows are those of the rank.
    """
    given = request.alibi_slopes, request.mask, request.bias
    return request.dropout_p > 0.0 or any(x is not None for x in given)


def _check_mask(mask: Any, q: Tensor, batch: int) -> None:
    if mask is None:
        return
    _mask_tensors.with_mask(Options(), q, batch, mask, None)


def _mask_of(request: Request) -> WholeMask | None:
    if request.mask is None:
        return None
    from .mask_parts import whole_mask  # needs NumPy

    return whole_mask(request.mask)


def _reduced(x: Any, ranks: Ranks, what: str) -> Any:
    return Replicated.apply(x, ranks, what) if _requires_grad(x) else x


def _refuse_dtensors(q: Any, k: Any, v: Any) -> None:
    """Refuses tensors of PyTorch that know of ranks themselves."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if hasattr(x, "to_local"):
            raise TypeError(
                f"{name} is a {type(x).__name__}, but must be a tensor of this rank's rows: pass "
                f"{name}.to_local()"
            )


def _same(
    call: Call, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None], window: tuple[int, int],
    packed: bool,
) -> dict[str, str]:  # fmt: skip
    """The values that must be the same on all ranks, by name."""
    request = call.request
    given = {**dict(zip(("q", "k", "v", "bias"), tensors, strict=True)), "sinks": request.sinks,
             "alibi_slopes": request.alibi_slopes, "q_descale": request.q_descale,
             "k_descale": request.k_descale, "v_descale": request.v_descale}  # fmt: skip
    rows_at = {"q": 1, "k": 1, "v": 1} | ({} if packed else {"bias": 2})
    same: dict[str, str] = {
        "window with causal": str(window), "device": tensors[0].device.type,
        TRANSPORT: os.environ.get(TRANSPORT, AUTO), "layout": repr(call.layout),
        "method": repr(call.method),
        "reduce_replicated": str(_check.flag("reduce_replicated", call.reduce_replicated)),
    }  # fmt: skip
    for name, x in given.items():
        if x is None:
            same[name] = "None"
            continue
        shape: list[int | str] = list(x.shape)
        if name in rows_at:
            shape[rows_at[name]] = "rows"
        same[f"shape of {name}"] = str(shape)
        same[f"dtype of {name}"] = str(x.dtype)
        differentiable = torch.is_grad_enabled() and x.requires_grad
        same[f"requires_grad of {name}"] = str(differentiable)
    scale = request.scale
    same["scale"] = "a tensor" if isinstance(scale, Tensor) else repr(scale)
    same["requires_grad of scale"] = str(torch.is_grad_enabled() and _requires_grad(scale))
    same["mask"] = str(_mask_of(request))
    for name in ("softcap", "dropout_p", "return_lse", "return_max_logits", "deterministic", "tf32",
                 "batch_invariant", "out_dtype", "precise_backward"):  # fmt: skip
        same[name] = str(getattr(request, name))
    return same


def _runs(name: str, counts: list[int], layout: str) -> list[Runs]:
    """The runs of each rank, from the number of rows that each has given."""
    runs = runs_of(sum(counts), layout, len(counts))
    expected = lengths(runs)
    for rank, (have, want) in enumerate(zip(counts, expected, strict=True)):
        if have != want:
            raise ValueError(
                f"{name} on rank {rank} has {have} rows (on all ranks {counts}), but layout "
                f"{layout!r} of these {sum(counts)} rows gives it {want} ({expected})"
            )
    return runs


def _bias_has_rows(bias: Tensor | None, counts: list[int], rows: list[Runs], keys: int) -> bool:
    """Whether the bias of each rank has that rank's rows; else it has one row for all."""
    if bias is None:
        return False
    if bias.shape[3] not in (1, keys):
        raise ValueError(
            f"bias has {bias.shape[3]} keys, but must have 1 or the {keys} keys of the whole "
            "sequence: each rank gives its rows of the bias with all keys"
        )
    if counts == lengths(rows):
        return True
    for rank, count in enumerate(counts):
        if count != 1:
            raise ValueError(
                f"bias on rank {rank} has {count} rows, but must have 1 on all ranks, or each "
                f"rank's rows: {lengths(rows)}"
            )
    return False
