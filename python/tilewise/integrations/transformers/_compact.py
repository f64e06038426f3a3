"""Masks that are stored as a description: padding, spans, boundaries and a band; or ranges.

To a model, a ``CompactMask`` is the dense mask [batch, 1, rows, keys] of eager attention: 0 where a
row sees a key, and the most negative number elsewhere. It has the shape and dtype of that mask, and
the first tensor operation on it computes that mask. The attention function reads only the
description, so models that merely pass their mask on never need memory for rows times keys.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tilewise import masks
from tilewise._check import UNBOUNDED, Window
from tilewise._mask import rebuilt

from .._masks import prefers_masks

_aten = torch.ops.aten
_is_composite = torch._C._dispatch_has_kernel_for_dispatch_key
# Operators whose result has the memory of the mask, and is equal to it if the shape is the same.
_ALIASES = frozenset(
    (
        _aten.detach.default, _aten.alias.default, _aten.view.default, _aten.expand.default,
        _aten._unsafe_view.default, _aten.lift_fresh.default,
    )
)  # fmt: skip


class Band(NamedTuple):
    """The arguments of ``tilewise.attention`` that limit keys by their distance from the row."""

    causal: bool
    window: Window = UNBOUNDED


CAUSAL, FULL = Band(True), Band(False)


class Terms(NamedTuple):
    """The description of a mask without tensors and shape, for which graphs are specialised."""

    band: Band  # causality and window, relative to the position of each row among the keys
    dtype: torch.dtype
    device: torch.device
    hidden: float  # added to the score of a key that is not seen
    flagged: bool = False  # visible keys are not spans, so `visible` is applied as a bias
    leftpad: bool = False  # a span may begin after key 0


class CompactMask(Tensor):
    """A mask [batch, 1, rows, keys] that is stored as a description.

    Attributes:
        terms: The description without tensors.
        visible: bool [batch, keys], False for padding. None means that there is no padding.
        spans: int32 [3, batch], the first key, the end of the keys and the number of rows in use of
            each sequence, whose last row is aligned with the last key. None means all rows and
            keys, with the last row aligned with the last key.
        boundaries: int32 [sequences + 1], of sequences that are packed end to end into the rows.
        entries: int32 [n, 5], the ranges of ``masks.Ranges``. A mask of ranges has no other
            tensor than `first`, and its band is unlimited. None means another kind of mask.
        first: int32 [batch + 1], the first range of each sequence.
        offset: int [], position of row 0 among the keys. None means keys - rows.
        placeholder: [0], only if all tensors above are None, because a compiled graph needs one.
    """

    terms: Terms
    visible: Tensor | None
    spans: Tensor | None
    boundaries: Tensor | None
    entries: Tensor | None
    first: Tensor | None
    offset: Tensor | None
    placeholder: Tensor | None
    _dense: list[Tensor]  # the dense mask once an operation has needed it; aliases share the list

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls: type[CompactMask], shape: Any, terms: Terms, **_: Tensor | None
    ) -> CompactMask:
        # An inference tensor has no version counter, which detects writes to it.
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
        entries: Tensor | None = None,
        first: Tensor | None = None,
        offset: Tensor | None = None,
        placeholder: Tensor | None = None,
    ) -> None:
        self.terms = terms
        self.visible = visible
        self.spans = spans
        self.boundaries = boundaries
        self.entries = entries
        self.first = first
        self.offset = offset
        if visible is spans is boundaries is entries is offset is placeholder is None:
            placeholder = torch.empty(0, device=terms.device)
        self.placeholder = placeholder
        self._dense = []

    def is_band(self) -> bool:
        """Whether the band alone is the mask."""
        return self.visible is self.spans is self.boundaries is self.entries is None

    def ranges(self) -> masks.Ranges | None:
        """The ranges of a mask that is made of these."""
        if self.entries is None:
            return None
        return rebuilt(masks.Ranges, [self.entries, self.first], ())

    # --- the dense mask ---------------------------------------------------------------------------

    def dense(self) -> Tensor:
        """The mask [batch, 1, rows, keys] that ``masking_utils.eager_mask`` would make."""
        if not self._dense:
            with torch.inference_mode(False):
                self._dense.append(self._expanded())
        return self._dense[0]

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
        ranges = self.ranges()
        if ranges is not None:
            seen = seen & torch.from_numpy(ranges.to_bool(rows, keys)).to(self.device)
        if self.visible is not None:
            seen = seen & self.visible[:, None, None]
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(seen, zero, self.terms.hidden).expand(batch, 1, rows, keys).contiguous()

    def is_changed(self) -> bool:
        """Whether the dense mask was written to, so that the description no longer holds."""
        return bool(self._dense) and self._version > 0

    # --- operations -------------------------------------------------------------------------------

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], CompactMask) and not args[0].is_changed():
            result = args[0]._compact_result(operator, args, kwargs)
            if result is not None:
                return result
            if _is_composite(operator.name(), "CompositeImplicitAutograd"):  # in inference mode
                return operator.decompose(*args, **kwargs)
        writes = operator._schema.is_mutable
        if writes and torch.compiler.is_compiling():
            raise NotImplementedError(
                f"{operator} writes to an attention mask of tilewise inside a compiled graph: "
                "write to a copy, mask.clone()"
            )
        masks = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, CompactMask)]
        dense_masks = [mask.dense() for mask in masks]

        def to_dense(x: Any) -> Any:
            return x.dense() if isinstance(x, CompactMask) else x

        def to_compact(x: Any) -> Any:
            return next((m for m, d in zip(masks, dense_masks, strict=True) if x is d), x)

        out = operator(*pytree.tree_map(to_dense, args), **pytree.tree_map(to_dense, kwargs))
        return pytree.tree_map(to_compact, out) if writes else out

    def _compact_result(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The compact result of an operator that moves, copies or aliases the mask, or None."""
        if operator in _ALIASES:
            shape = args[1] if len(args) > 1 else self.shape
            return self._copy() if tuple(shape) == tuple(self.shape) else None
        if operator is _aten.slice.Tensor:
            given = args[1:]
            dim, start, end, step = given + (0, None, None, 1)[len(given) :]
            size = self.shape[dim]
            everything = (start or 0) in (0, -size) and (end is None or end >= size) and step == 1
            return self._copy() if everything else None
        if operator is _aten.clone.default:
            return self._copy(shared=False)
        if operator is _aten._to_copy.default:
            dtype, device = kwargs.get("dtype") or self.dtype, kwargs.get("device") or self.device
            takes_ranges = self.entries is None or prefers_masks(device, dtype)
            strided = kwargs.get("layout") in (None, torch.strided)
            if dtype.is_floating_point and strided and takes_ranges:
                return self._copy(dtype, device, kwargs.get("non_blocking", False), shared=False)
        return None

    def _copy(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        non_blocking: bool = False,
        shared: bool = True,
    ) -> CompactMask:
        """The same mask, on another device or in another dtype; shared: with one dense mask."""
        names, terms = self.__tensor_flatten__()
        inner = {name: getattr(self, name) for name in names}
        if device is not None:
            inner = {k: v.to(device, non_blocking=non_blocking) for k, v in inner.items()}
            terms = terms._replace(device=torch.device(device))
        if dtype is not None and dtype != self.dtype:
            hidden = torch.tensor(terms.hidden, dtype=self.dtype, device="cpu").to(dtype)
            terms = terms._replace(dtype=dtype, hidden=float(hidden))
        copied = CompactMask(self.shape, terms, **inner)
        if shared:
            copied._dense = self._dense
        return copied

    # --- protocols that bypass operators ----------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], Terms]:
        if self.is_changed():
            raise ValueError(
                "an attention mask of tilewise was written to and is then passed to a compiled "
                "graph, but only an unchanged mask is allowed: pass mask.clone()"
            )
        names = ("visible", "spans", "boundaries", "entries", "first", "offset", "placeholder")
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
