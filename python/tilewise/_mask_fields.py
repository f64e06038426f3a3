"""Fields of masks: arrays and numbers, checked."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ._block_lists import Array
from ._check import is_tensor

KINDS = ("full", "causal", "inverse_causal", "both")  # of ranges, numbered as in mask.h


def number(name: str, value: Any, least: int = 0, most: int | None = 2**31 - 1) -> int:
    """The value as an int, which must be at least `least` and at most `most`."""
    try:
        checked = operator.index(value)
    except TypeError:
        kind = type(value).__name__
        raise TypeError(f"{name} is of type {kind}, but must be an integer") from None
    if checked < least:
        raise ValueError(f"{name} is {checked}, but must be at least {least}")
    if most is not None and checked > most:
        raise ValueError(f"{name} is {checked}, but must be at most {most}")
    return checked


def host(array: Any) -> Array:
    if not is_tensor(array):
        return np.asarray(array)
    copied: Array = array.detach().cpu().numpy()
    return copied


def as_tensor(array: Any) -> Any:
    """The tensor itself, or one that shares the memory of a NumPy array if that is writable."""
    import torch

    if isinstance(array, torch.Tensor):
        return array
    if not torch.compiler.is_compiling() and not array.flags.writeable:
        array = array.copy()  # PyTorch warns of tensors in read-only memory
    return torch.from_numpy(array)


def owned(array: Any) -> Any:
    """A copy, which stays what it is when the caller changes the array that was given."""
    return array.clone() if is_tensor(array) else array.copy()


def int32(name: str, value: Any, dims: Sequence[int | None], like: Any) -> Any:
    """The value as an int32 array, or as a tensor on the device of `like` if that is one."""
    if is_tensor(value):
        import torch

        if value.dtype != torch.int32:
            raise TypeError(f"{name} has dtype {value.dtype}, but must be torch.int32")
        array: Any = value.detach().contiguous()
        if array.device != like.device:
            raise ValueError(f"{name} is on {array.device}, but must be on {like.device}")
    else:
        try:
            given = np.asarray(value)
        except ValueError:  # lists of different lengths
            raise ValueError(
                f"{name} has rows of different lengths, but must be an array"
            ) from None
        allowed = "i" if isinstance(value, np.ndarray) else "if"  # an empty list is of floats
        if given.dtype.kind not in allowed:
            raise TypeError(f"{name} has dtype {given.dtype}, but must be int32")
        with np.errstate(invalid="ignore"):  # NaN is refused without a warning
            whole = (given == given.astype(np.int32)).all()
        if not whole:
            raise TypeError(f"{name} has numbers that int32 cannot represent")
        array = np.asarray(given, dtype=np.int32, order="C")
        empty = [0 if dim is None else dim for dim in dims]
        if array.size == 0 and len(dims) > 1 and 0 in empty:
            array = array.reshape(empty)
    shape = tuple(array.shape)
    if len(shape) != len(dims) or any(d not in (None, n) for d, n in zip(dims, shape, strict=True)):
        wanted = ["n" if dim is None else dim for dim in dims]
        raise ValueError(f"{name} has shape {list(shape)}, but must be {wanted}")
    if is_tensor(like):
        array = as_tensor(array).to(like.device)
    return array


def vector(values: list[int], like: Any) -> Any:
    """int32 [n]; a tensor on the device of `like` if that is one, so that a graph can be traced."""
    if not is_tensor(like):
        return np.array(values, np.int32)
    import torch

    return torch.tensor(values, dtype=torch.int32, device=like.device)


def check_kinds(numbers: Any) -> None:
    """Refuses numbers of no kind, as far as they can be read here without waiting for a GPU."""
    if is_tensor(numbers) and not _is_readable(numbers):
        return
    given = host(numbers)
    bad = (given < 0) | (given >= len(KINDS))
    if bad.any():
        i = int(bad.argmax())
        allowed = ", ".join(f"{n} ({name})" for n, name in enumerate(KINDS))
        raise ValueError(f"kinds[{i}] is {given[i]}, but must be one of {allowed}")


def _is_readable(tensor: Any) -> bool:
    import torch

    from ._autograd import is_transformed

    plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not is_transformed()


def kind_numbers(kinds: Any, count: int, like: Any) -> Any:
    """The kinds as numbers; names are looked up."""
    if isinstance(kinds, str):
        return vector([_kind_number(kinds)], like).repeat(count)
    if is_tensor(kinds) or isinstance(kinds, np.ndarray):
        return kinds
    if not isinstance(kinds, Iterable):
        raise TypeError(
            f"kinds is of type {type(kinds).__name__}, but must be a name, a list or an int32 array"
        )
    return [_kind_number(kind) if isinstance(kind, str) else kind for kind in kinds]


def _kind_number(name: str) -> int:
    if name not in KINDS:
        raise ValueError(f"kinds has {name!r}, but must be one of {', '.join(KINDS)}")
    return KINDS.index(name)
