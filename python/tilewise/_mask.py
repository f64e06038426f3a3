"""What the masks of ``tilewise.masks`` have in common: fields, copies, tiles, pictures."""

from __future__ import annotations

import sys
import threading
from typing import Any

from ._requirements import require

require("tilewise.masks", "numpy")

import numpy as np

from ._block_lists import BLOCK, Array, Strip, blocks_of
from ._mask_fields import as_tensor, host, number


class Mask:
    """The base of ``Ranges``, ``Blocks`` and ``Tree``.

    Attributes:
        batch: Sequences of the mask; 1: the same mask for every sequence.
        heads: Query heads of the mask; 1: the same mask for every head.
    """

    batch: int
    heads: int

    _ARRAYS: tuple[str, ...] = ()
    _NUMBERS: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        _kinds.append(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name} cannot be set: a mask is immutable")

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        register_pytrees()

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuilt, (type(self), self._arrays(), self._numbers())

    def _arrays(self) -> list[Any]:
        return [getattr(self, name) for name in self._ARRAYS]

    def _numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in self._NUMBERS)

    def arguments(self) -> list[Any]:
        """The arrays in the order of ``tilewise_mask`` (mask.h): first, entries, bits."""
        raise NotImplementedError

    def numbers(self) -> dict[str, int]:
        """The numbers of ``tilewise_mask`` that the arrays do not give."""
        return {}

    def to(self, device: Any) -> Any:
        """The mask with its tensors on a device of PyTorch; arrays become tensors."""
        arrays = [as_tensor(x).to(device) for x in self._arrays()]
        return rebuilt(type(self), arrays, self._numbers())

    def on_host(self) -> Any:
        """The mask with NumPy arrays. A mask on a GPU is copied, which waits for the GPU."""
        return rebuilt(type(self), [host(x) for x in self._arrays()], self._numbers())

    def _shape(self, seqlen_q: int | None, seqlen_k: int | None) -> tuple[int, int]:
        raise NotImplementedError

    def _strip(self, keys: int) -> Strip:
        raise NotImplementedError

    def tiles(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Array:
        """How much of every block of 128 rows and 128 keys is visible.

        Args:
            seqlen_q: Rows; None: those of the mask, or the end of its last range.
            seqlen_k: Keys; likewise.

        Returns:
            int8 [batch, heads, row blocks, key blocks]: 0 nothing, 1 a part, 2 everything. A block
            that only several ranges together make visible counts as a part.
        """
        raise NotImplementedError

    def density(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> float:
        """The share of the pairs that are visible; the arguments are those of ``tiles``."""
        rows, keys = self._shape(seqlen_q, seqlen_k)
        total = self.batch * self.heads * rows * keys
        return self._visible_pairs(rows, keys) / total if total else 0.0

    def _visible_pairs(self, rows: int, keys: int) -> int:
        strip, total = self.on_host()._strip(keys), 0
        for b, h, block in np.ndindex(self.batch, self.heads, blocks_of(rows)):
            total += int(strip(b, h, block * BLOCK, min((block + 1) * BLOCK, rows)).sum())
        return total

    def _picture(self, rows: int, keys: int) -> Array:
        """What ``plot`` draws: states of tiles."""
        return self.tiles(rows, keys)

    def to_bool(self, seqlen_q: int | None = None, seqlen_k: int | None = None) -> Array:
        """All pairs: bool [batch, heads, seqlen_q, seqlen_k]; the arguments are those of ``tiles``.

        It takes memory for every pair, so it is for short sequences.
        """
        rows, keys = self._shape(seqlen_q, seqlen_k)
        strip = self.on_host()._strip(keys)
        dense = np.zeros((self.batch, self.heads, rows, keys), bool)
        for b, h, block in np.ndindex(self.batch, self.heads, blocks_of(rows)):
            at = slice(block * BLOCK, min((block + 1) * BLOCK, rows))
            dense[b, h, at] = strip(b, h, at.start, at.stop)
        return dense

    def plot(
        self, seqlen_q: int | None = None, seqlen_k: int | None = None, *, batch: int = 0,
        head: int = 0, ax: Any = None,
    ) -> Any:  # fmt: skip
        """Draws the tiles of one sequence and head with matplotlib.

        Args:
            seqlen_q: As in ``tiles``.
            seqlen_k: As in ``tiles``.
            batch: The sequence.
            head: The head.
            ax: The axes to draw in; None: new ones.

        Returns:
            The axes.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: batch or head is not one of the mask, or a length is not one that it has.
        """
        for name, index, count in (("batch", batch, self.batch), ("head", head, self.heads)):
            if number(name, index) >= count:
                raise ValueError(f"{name} is {index}, but must be less than {count}")
        try:
            from matplotlib import colors, patches
            from matplotlib import pyplot as plt
        except ModuleNotFoundError as error:
            if error.name != "matplotlib":  # one of its own imports is missing
                raise
            raise ModuleNotFoundError(
                "mask.plot() needs matplotlib, which is not installed: pip install matplotlib",
                name="matplotlib",
            ) from None

        rows, keys = self._shape(seqlen_q, seqlen_k)
        grid = self._picture(rows, keys)[batch, head]
        ax = plt.subplots()[1] if ax is None else ax
        shades = ["#f2f2f2", "#f5b041", "#2e86c1"]
        ax.imshow(
            grid, cmap=colors.ListedColormap(shades), vmin=0, vmax=2, interpolation="nearest",
            extent=(0, keys, rows, 0), aspect="equal" if rows == keys else "auto",
        )  # fmt: skip
        ax.set_xlabel("key")
        ax.set_ylabel("row")
        names = ("nothing", "a part", "everything")
        handles = [patches.Patch(color=c, label=n) for c, n in zip(shades, names, strict=True)]
        ax.legend(handles=handles, title="visible", loc="upper left", bbox_to_anchor=(1.02, 1))
        return ax


def rebuilt(kind: type[Mask], arrays: list[Any], numbers: tuple[int, ...]) -> Any:
    """A mask from its fields, which are not checked: PyTorch's pytrees also rebuild masks of
    other objects.
    """
    mask = object.__new__(kind)
    fields = dict(zip(kind._ARRAYS, arrays, strict=True))
    mask._set(**fields, **dict(zip(kind._NUMBERS, numbers, strict=True)))
    return mask


def common_count(name: str, a: Mask, b: Mask) -> int:
    """The batch or heads of two masks that are combined."""
    counts = sorted(getattr(m, name) for m in (a, b))
    if counts[0] not in (1, counts[1]):
        raise ValueError(
            f"the masks have {name} {counts[0]} and {counts[1]}, but must have the same, or one of "
            "them 1"
        )
    return int(counts[1])


_kinds: list[type[Mask]] = []
_with_pytrees: list[type[Mask]] = []
_registration = threading.Lock()


def register_pytrees() -> None:
    """Registers masks with PyTorch's pytrees, once PyTorch has been imported."""
    if "torch" not in sys.modules or len(_with_pytrees) == len(_kinds):
        return
    with _registration:  # PyTorch refuses a second registration
        for kind in _kinds[len(_with_pytrees) :]:
            _register(kind)
            _with_pytrees.append(kind)


def _register(kind: type[Mask]) -> None:
    from torch.utils import _pytree

    keys = [_pytree.GetAttrKey(name) for name in kind._ARRAYS]
    _pytree.register_pytree_node(
        kind,
        lambda mask: (mask._arrays(), mask._numbers()),
        lambda arrays, numbers: rebuilt(kind, list(arrays), numbers),
        # For torch.export, which names the arrays and writes the numbers as JSON.
        serialized_type_name=f"tilewise.masks.{kind.__name__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=lambda mask: (
            list(zip(keys, mask._arrays(), strict=True)), mask._numbers(),
        ),
    )  # fmt: skip
