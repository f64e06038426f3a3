"""Where the sequences of a block-diagonal mask lie, with the names that xFormers gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from operator import index
from typing import Any, Optional, Union

import torch
from torch import Tensor

Device = Union[torch.device, str, None]


def integers(name: str, values: Iterable[int]) -> list[int]:
    """The lengths or starts of sequences as a list; tensors are refused, as in xFormers."""
    if isinstance(values, Tensor):
        raise TypeError(f"{name} is a Tensor, but must be a list of integers: pass {name}.tolist()")
    try:
        return [index(value) for value in values]
    except TypeError:
        raise TypeError(f"{name} is {values!r}, but must be a list of integers") from None


def _int32(numbers: Iterable[int], device: Device) -> Tensor:
    return torch.tensor(list(numbers), dtype=torch.int32, device=_device(device))


def _device(device: Device) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def _starts(lengths: Iterable[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts


@dataclass
class _SeqLenInfo:
    """Sequences that lie end to end: seqstart is int32 [sequences + 1], seqstart_py its values."""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Sequence[int], *, device: Device = None) -> _SeqLenInfo:
        starts = _starts(seqlens)
        bounds = max(seqlens, default=0), min(seqlens, default=0)
        return cls(_int32(starts, device), *bounds, starts)

    def to(self, device: Device) -> Any:
        moved = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **moved)

    def intervals(self) -> Iterable[tuple[int, int]]:
        """(first, last + 1) of each sequence."""
        lengths = getattr(self, "seqlen_py", None)
        for i, (first, end) in enumerate(pairwise(self.seqstart_py)):
            yield first, end if lengths is None else first + lengths[i]

    def split(self, x: Tensor, batch_sizes: Optional[Sequence[int]] = None) -> list[Tensor]:
        """The tensors that x [1, total, ...] consists of, each of batch_sizes[i] sequences."""
        sizes = [1] * (len(self.seqstart_py) - 1) if batch_sizes is None else batch_sizes
        edges = [self.seqstart_py[end] for end in _starts(sizes)]
        if x.shape[0] != 1 or x.shape[1] != edges[-1]:
            raise ValueError(
                f"the tensor has shape {list(x.shape)}, but must start with [1, {edges[-1]}]"
            )
        lengths = [end - first for first, end in pairwise(edges)]
        return [  # with -1 instead of the quotient, reshape would refuse empty parts
            part.reshape(size, part.shape[1] // max(size, 1), *x.shape[2:])
            for size, part in zip(sizes, x.split(lengths, dim=1), strict=True)
        ]


@dataclass
class _PaddedSeqLenInfo(_SeqLenInfo):
    """Sequences in slots of `padding` keys; sequence b uses the first seqlen[b] of its slot."""

    seqlen: Tensor
    seqlen_py: list[int]
    padding: int

    @classmethod
    def from_seqlens_padded(
        cls, seqlens: Sequence[int], padding: int, *, device: Device = None
    ) -> _PaddedSeqLenInfo:
        if max(seqlens, default=0) > padding:
            raise ValueError(
                f"kv_seqlen contains {max(seqlens)}, but a slot holds only {padding} keys"
            )
        starts = _starts([padding] * len(seqlens))
        lengths = list(seqlens)
        return cls(
            _int32(starts, device), max(lengths, default=0), min(lengths, default=0), starts,
            _int32(lengths, device), lengths, padding,
        )  # fmt: skip


@dataclass
class _GappySeqInfo(_SeqLenInfo):
    """Sequences that start at seqstart and have seqlen keys.

    With pages, seqstart and seqlen are the first key and the end of the keys, both counted from the
    beginning of the first page of the sequence.
    """

    seqlen: Tensor
    seqlen_py: list[int]

    @classmethod
    def from_seqlens_gappy(
        cls, seqstarts: Sequence[int], seqlens: Sequence[int], paged: bool, *, device: Device
    ) -> _GappySeqInfo:
        starts, lengths = list(seqstarts), list(seqlens)
        bounds = max(lengths, default=0), min(lengths, default=0)
        count = len(lengths) if paged else len(lengths) + 1
        if len(starts) != count:
            raise ValueError(
                f"kv_seqstarts has {len(starts)} entries, but must have {count}: the start of each "
                f"sequence{'' if paged else ', and the number of keys'}"
            )
        if paged:
            lengths = [first + length for first, length in zip(starts, lengths, strict=True)]
            starts.append(-1)
        return cls(_int32(starts, device), *bounds, starts, _int32(lengths, device), lengths)
