"""Masks that are kept as what describes them: padding, spans, boundaries, a band.

To a model, a ``CompactMask`` is the mask [batch, 1, rows, keys] that eager attention would be
given: 0 where a row sees a key, and the most negative number elsewhere. Its shape and dtype are
that mask's, and any tensor operation on it computes with that mask, which is made at the first such
operation. The attention function reads the description instead, so that models which only hand
their mask on never pay for rows times keys.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewise.api import _UNBOUNDED

_aten = torch.ops.aten
_is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
# Operators whose result on an unchanged mask of the same shape is that mask, sharing its memory.
_ALIASES = frozenset(
    (
        _aten.detach.default, _aten.alias.default, _aten.view.default, _aten.expand.default,
        _aten._unsafe_view.default, _aten.lift_fresh.default,
    )
)  # fmt: skip


class Band(NamedTuple):
    """Which keys a row sees for its position alone: the arguments of ``tilewise.attention``."""

    causal: bool
    window: tuple[int | None, int | None] = _UNBOUNDED


class Terms(NamedTuple):
    """What describes a mask besides tensors and its shape; a compiled graph is made for it."""

    band: Band  # causality and window, about the position that each row has among the keys
    dtype: torch.dtype
    device: torch.device
    hidden: float  # what is added to the score of a key that is not seen
    flagged: bool = False  # spans do not express what is visible, which is applied key by key
    leftpad: bool = False  # a span may begin behind key 0


class CompactMask(Tensor):
    """A mask [batch, 1, rows, keys], described by what follows.

    Attributes:
        terms: See there.
        visible: bool [batch, keys], False for padding; None: all keys are tokens.
        spans: int32 [3, batch], the first key, the end of the keys and the number of rows in use of
            each sequence; the last such row is aligned with the last such key. None: all rows and
            keys, the last row aligned with the last key.
        boundaries: int32 [sequences + 1], of sequences packed into the rows, laid end to end.
        offset: int [], position of row 0 among the keys; None: keys - rows.
        nothing: [0], where all of the above are None: a compiled graph needs a tensor to take.
    """

    terms: Terms
    visible: Tensor | None
    spans: Tensor | None
    boundaries: Tensor | None
    offset: Tensor | None
    nothing: Tensor | None
    _whole: list[Tensor]  # the mask itself once an operation has asked for it; aliases share it

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: type[CompactMask], shape: Any, terms: Terms, **_: Tensor | None
    ) -> CompactMask:
        # An inference tensor could not tell whether somebody has written to it.
        with torch.inference_mode(False):
            mask: CompactMask = torch.Tensor._make_wrapper_subclass(
                cls, shape, dtype=terms.dtype, device=terms.device
            )
        return mask

    def __init__(
        self,
        _shape: Any,
        terms: Terms,
        visible: Tensor | None = None,
        spans: Tensor | None = None,
        boundaries: Tensor | None = None,
        offset: Tensor | None = None,
        nothing: Tensor | None = None,
    ) -> None:
        self.terms = terms
        self.visible = visible
        self.spans = spans
        self.boundaries = boundaries
        self.offset = offset
        if visible is spans is boundaries is offset is nothing is None:
            nothing = torch.empty(0, device=terms.device)
        self.nothing = nothing
        self._whole = []

    # --- what it stands for -----------------------------------------------------------------------

    def dense(self) -> Tensor:
        """[batch, 1, rows, keys], as ``masking_utils.eager_mask`` makes it."""
        if not self._whole:
            with torch.inference_mode(False):
                self._whole.append(self._expanded())
        return self._whole[0]

    def _expanded(self) -> Tensor:
        batch, _, rows, keys = self.shape
        key = torch.arange(keys, device=self.device)
        offset = keys - rows if self.offset is None else self.offset
        row = torch.arange(rows, device=self.device)[:, None] + offset
        seen = torch.ones((), dtype=torch.bool, device=self.device)
        left, right = self.terms.band.window
        if self.terms.band.causal:
            right = 0
        if left is not None:
            seen = seen & (key >= row - left)
        if right is not None:
            seen = seen & (key <= row + right)
        if self.boundaries is not None:
            token = torch.arange(batch * rows, device=self.device)
            segment = torch.bucketize(token, self.boundaries[1:], right=True)
            segment = segment.view(batch, 1, rows)
            seen = seen & (segment[..., None] == segment[:, :, None])
        if self.visible is not None:
            seen = seen & self.visible[:, None, None]
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(seen, zero, self.terms.hidden).expand(batch, 1, rows, keys).contiguous()

    def is_changed(self) -> bool:
        """Whether somebody has written to the mask, whose description then no longer holds."""
        return bool(self._whole) and self._version > 0

    # --- operations -------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], CompactMask) and not args[0].is_changed():
            kept = args[0]._kept(operator, args, kwargs)
            if kept is not None:
                return kept
            if _is_composite(operator.name(), "CompositeImplicitAutograd"):  # in inference mode
                return operator.decompose(*args, **kwargs)
        writes = operator._schema.is_mutable
        if writes and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{operator} writes to an attention mask of tilewise inside a compiled graph: "
                "write to a copy, mask.clone()"
            )
        masks = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, CompactMask)]
        wholes = [mask.dense() for mask in masks]

        def whole(x: Any) -> Any:
            return x.dense() if isinstance(x, CompactMask) else x

        def given_back(x: Any) -> Any:
            return next((m for m, w in zip(masks, wholes, strict=True) if x is w), x)

        out = operator(*pytree.tree_map(whole, args), **pytree.tree_map(whole, kwargs))
        return pytree.tree_map(given_back, out) if writes else out

    def _kept(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator that only moves, copies or names the mask; None: of others."""
        if operator in _ALIASES:
            shape = args[1] if len(args) > 1 else self.shape
            return self._again() if tuple(shape) == tuple(self.shape) else None
        if operator is _aten.slice.Tensor:
            given = args[1:]
            dim, start, end, step = given + (0, None, None, 1)[len(given) :]
            size = self.shape[dim]
            everything = (start or 0) in (0, -size) and (end is None or end >= size) and step == 1
            return self._again() if everything else None
        if operator is _aten.clone.default:
            return self._again(shared=False)
        if operator is _aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or self.dtype, kwargs.get("device") or self.device
            if dtype.is_floating_point and kwargs.get("layout") in (None, torch.strided):
                return self._again(dtype, device, kwargs.get("non_blocking", False), shared=False)
        return None

    def _again(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        shared: bool = True,
    ) -> CompactMask:
        """The same mask, elsewhere or in another dtype; shared: one memory if there comes to be."""
        names, terms = self.__tensor_flatten__()
        inner = {name: getattr(self, name) for name in names}
        if device is not None:
            inner = {k: v.to(device, non_blocking=non_blocking) for k, v in inner.items()}
            terms = terms._replace(device=torch.device(device))
        if dtype is not None and dtype != self.dtype:
            hidden = torch.tensor(terms.hidden, dtype=self.dtype, device="cpu").to(dtype)
            terms = terms._replace(dtype=dtype, hidden=float(hidden))
        again = CompactMask(self.shape, terms, **inner)
        if shared:
            again._whole = self._whole
        return again

    # --- what passes operators by -----------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Terms]:
        if self.is_changed():
            raise ValueError(
                "a compiled graph is given an attention mask of tilewise that was written to: "
                "pass mask.clone()"
            )
        names = ("visible", "spans", "boundaries", "offset", "nothing")
        return [name for name in names if getattr(self, name) is not None], self.terms

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], terms: Terms, size: Any, _stride: Any
    ) -> CompactMask:
        return CompactMask(size, terms, **inner)

    def __repr__(self, **_: Any) -> str:
        return f"CompactMask({self.dense()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self.dense(), memo)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().__array__(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dense().__dlpack__(*args, **kwargs)

    def numpy(self, **kwargs: Any) -> Any:
        return self.dense().numpy(**kwargs)

    def tolist(self) -> Any:
        return self.dense().tolist()

    def data_ptr(self) -> int:
        return self.dense().data_ptr()

    def _typed_storage(self) -> Any:
        return self.dense()._typed_storage()

    def storage(self) -> Any:
        return self.dense().storage()
