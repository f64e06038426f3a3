"""A call of packed sequences: the order of its rows and keys, and the place of its part of each
sequence.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._options import Options
from .core import Gradients, Local, Method, Result, diagonals, with_diagonal
from .layout import Run, Starts

if TYPE_CHECKING:
    from .mask_parts import MaskPart


def sizes_of(starts: Starts) -> list[int]:
    """The length of each sequence."""
    return [end - begin for begin, end in itertools.pairwise(starts)]


_WIDE = torch.complex128  # 16 bytes, the most that a thread of a GPU moves at once


class Order:
    """Rows in another order: row i of the result is row ``index[i]``; all rows, or some of them.

    The index is int64 [picked rows] in CPU memory.
    """

    def __init__(self, index: Tensor, rows: int, device: torch.device) -> None:
        self._index = index.to(device)
        self._rows = rows
        self._inverse = index.argsort().to(device) if len(index) == rows else None

    def pick(self, x: Tensor) -> Tensor:
        """[1, rows, ...] as [picked rows, ...]."""
        return _rows_at(self._index, x[0])

    def put(self, y: Tensor) -> Tensor:
        """[picked rows, ...] as [1, rows, ...]; rows that were not picked get 0."""
        if self._inverse is not None:
            return _rows_at(self._inverse, y).unsqueeze(0)
        x = y.new_zeros((self._rows, *y.shape[1:]))
        target, source = _in_wide(x, y.contiguous())
        target.index_copy_(0, self._index, source)
        return x.unsqueeze(0)


def _rows_at(index: Tensor, x: Tensor) -> Tensor:
    """The rows of x [rows, ...] that the index names, in its order."""
    return _in_wide(x)[0].index_select(0, index).view(x.dtype)


def _in_wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same rows [rows, ..., columns] with wide columns, if those of all tensors are parts of
    such. PyTorch's kernels for indices compute integer divisions for each element.
    """
    wide = all(_is_wide(x) for x in tensors)
    return tuple(x.view(_WIDE) for x in tensors) if wide else tensors


def _is_wide(x: Tensor) -> bool:
    # PyTorch counts the offset from the storage, whose own address may be any.
    steps = (x.shape[-1], *x.stride()[:-1], x.storage_offset())
    if x.stride(-1) != 1 or x.data_ptr() % _WIDE.itemsize:
        return False
    return not any(n * x.element_size() % _WIDE.itemsize for n in steps)


class SequenceParts(NamedTuple):
    """Which rows and keys of each sequence a call has, and the diagonals (see ``keys.Span``)."""

    places: tuple[tuple[Run, Run], ...]
    diagonals: tuple[int, ...]


class _Step(NamedTuple):
    """One call of the operator, with the options that it replaces; None: all rows, all keys."""

    rows: Run | None
    keys: Run | None
    replaced: dict[str, Any]


class PackedCall(Local):
    """A call of packed sequences whose rows and keys come in another order; without a part, it has
    all rows and keys.
    """

    def __init__(
        self, orders: tuple[Order | None, Order], starts_q: Starts, starts_k: Starts,
        device: torch.device, part: SequenceParts | None, mask: MaskPart | None,
    ) -> None:  # fmt: skip
        super().__init__(mask)
        (self._rows, self._keys), self._part = orders, part
        self._diagonal = None if part is None else diagonals(part.diagonals, device)
        self._starts, self._device = (starts_q, starts_k), device
        self._cu_q, self._cu_k = (
            torch.tensor(x, dtype=torch.int32).to(device) for x in (starts_q, starts_k)
        )
        self._most = [max(sizes_of(x), default=0) for x in (starts_q, starts_k)]

    def options(self, options: Options) -> Options:
        """The options with the sequences of the call, their places and parts of the bias."""
        if options.bias is not None:
            options = options._replace(bias=self._part_of_bias(options.bias))
        return with_diagonal(options, self._diagonal)._replace(
            cu_seqlens_q=self._cu_q, cu_seqlens_k=self._cu_k,
            max_seqlen_q=self._most[0], max_seqlen_k=self._most[1],
        )  # fmt: skip

    def _pairs_of_bias(self, whole: Tensor, part: Tensor) -> list[tuple[Tensor, Tensor]]:
        """For each sequence: its place in the whole bias, and in that of the call."""
        assert self._part is not None
        pairs = []
        for i, ((first, last), (begin, end)) in enumerate(self._part.places):
            own = whole[i if whole.shape[0] > 1 else 0, ..., begin:end]
            mine = part[i, ..., : end - begin]
            if whole.shape[2] > 1:
                own, mine = own[:, first:last], mine[:, : last - first]
            pairs.append((own, mine))
        return pairs

    def _part_of_bias(self, bias: Tensor) -> Tensor:
        if self._part is None:
            return bias
        rows = self._most[0] if bias.shape[2] > 1 else 1
        shape = (len(self._part.places), bias.shape[1], rows, self._most[1])
        part = bias.new_zeros(shape)
        for own, mine in self._pairs_of_bias(bias, part):
            mine.copy_(own)
        return part

    def add_bias(self, sums: Tensor, grad: Tensor) -> None:
        """See ``Local``."""
        if self._part is None:
            sums += grad
            return
        for own, mine in self._pairs_of_bias(sums, grad):
            own += mine

    def _steps(self, options: Options) -> list[_Step]:
        """One call, or with dropout one per sequence: a call has one offset of rows and keys, and
        the parts of the sequences have different ones. Other sequences are empty in such a call, so
        that sequences keep their numbers.
        """
        steps = []
        if options.dropout_p > 0.0 and self._part is not None:
            starts_q, starts_k = self._starts
            for i, (rows, keys) in enumerate(self._part.places):
                own = tuple((x[i], x[i + 1]) for x in self._starts)
                if starts_q[i] == starts_q[i + 1]:
                    continue
                alone = [
                    torch.tensor([0] * (i + 1) + [x[i + 1] - x[i]] * (len(x) - 1 - i),
                                 dtype=torch.int32).to(self._device)
                    for x in (starts_q, starts_k)
                ]  # fmt: skip
                steps.append(_Step(own[0], own[1], {
                    "cu_seqlens_q": alone[0], "cu_seqlens_k": alone[1],
                    "row_offset": rows[0], "key_offset": keys[0],
                }))  # fmt: skip
        return steps or [_Step(None, None, {})]

    def _pick_rows(self, x: Tensor) -> Tensor:
        return x[0] if self._rows is None else self._rows.pick(x)

    def _put_rows(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0) if self._rows is None else self._rows.put(x)

    def _lse_out(self, lse: Tensor) -> Tensor:
        return self._put_rows(lse.transpose(0, 1)).transpose(1, 2)

    def lse_pair(self, lse: Tensor) -> Tensor:
        """See ``Local``."""
        return lse.unsqueeze(1)

    def lse_given(self, lse: Tensor) -> Tensor:
        """See ``Local``."""
        return lse.squeeze(0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """See ``Local``."""
        q, k, v = self._pick_rows(q), self._keys.pick(k), self._keys.pick(v)
        options = self.options_of_heads(options, q)
        parts = [
            self.call(
                _part(q, s.rows), _part(k, s.keys), _part(v, s.keys),
                options._replace(**s.replaced), max_logits,
            )
            for s in self._steps(options)
        ]  # fmt: skip
        out, lse = _cat([x.out for x in parts], 0), _cat([x.lse for x in parts], -1)
        state = [q, k, v, out, _cat([x.state[-1] for x in parts], -1)]
        return Result(self._put_rows(out), self._lse_out(lse), state)

    def state_of(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
        """See ``Local``."""
        keys = self._keys.pick(k), self._keys.pick(v)
        return [self._pick_rows(q), *keys, self._pick_rows(out), lse]

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """See ``Method``."""
        dout = self._pick_rows(dout)
        if dlse is not None:
            dlse = self._pick_rows(dlse.transpose(1, 2)).transpose(0, 1)
        q, k, v, out, lse = state
        options = self.options_of_heads(options, q)
        steps = self._steps(options)
        parts = [
            self.call_backward(
                [_part(q, s.rows), _part(k, s.keys), _part(v, s.keys), _part(out, s.rows),
                 _part(lse, s.rows, -1).contiguous()],
                _part(dout, s.rows), None if dlse is None else _part(dlse, s.rows, -1),
                options._replace(**s.replaced), wanted,
            )
            for s in steps
        ]  # fmt: skip
        grads = _joined(parts, steps, state)
        for i, put in enumerate((self._put_rows, self._keys.put, self._keys.put)):
            x = grads[i]
            grads[i] = None if x is None else put(x)
        return grads


def _part(x: Tensor, run: Run | None, dim: int = 0) -> Tensor:
    return x if run is None else x.narrow(dim, run[0], run[1] - run[0])


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _joined(parts: list[Gradients], steps: list[_Step], state: list[Tensor]) -> Gradients:
    """The gradients of all steps; keys of sequences without rows get 0."""
    if steps[0].keys is None:
        return parts[0]
    joined: Gradients = []
    for i, of_steps in enumerate(zip(*parts, strict=True)):
        present = [x for x in of_steps if x is not None]
        if not present:
            joined.append(None)
        elif i == 0:
            joined.append(_cat(present, 0))
        elif i < 3:
            whole = torch.zeros_like(state[i])
            for step, x in zip(steps, present, strict=True):
                _part(whole, step.keys).copy_(x)
            joined.append(whole)
        else:
            joined.append(torch.stack(present).sum(0))
    return joined


class InOrder:
    """A method for rows and keys that come in another order; see ``core.Method``."""

    def __init__(self, inner: Method, orders: tuple[Order, Order]) -> None:
        self._inner, (self._rows, self._keys) = inner, orders

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, max_logits: Tensor | None
    ) -> Result:
        """See ``Method``."""
        q, k, v = self._rows.pick(q), self._keys.pick(k), self._keys.pick(v)
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        out, lse, state = self._inner.forward(q, k, v, options, max_logits)
        return Result(self._rows.put(out[0]), self._rows.put(lse[0].T).transpose(1, 2), state)

    def backward(
        self, state: list[Tensor], dout: Tensor, dlse: Tensor | None, options: Options, wanted: int
    ) -> Gradients:
        """See ``Method``."""
        dout = self._rows.pick(dout).unsqueeze(0)
        if dlse is not None:
            dlse = self._rows.pick(dlse.transpose(1, 2)).T.unsqueeze(0)
        grads = self._inner.backward(state, dout, dlse, options, wanted)
        for i, order in enumerate((self._rows, self._keys, self._keys)):
            x = grads[i]
            grads[i] = None if x is None else order.put(x[0])
        return grads
