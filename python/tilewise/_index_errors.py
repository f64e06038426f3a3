"""The faults that GPU kernels have found in index tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from . import _abi, _check
from ._library import c_library


@dataclass(frozen=True)
class IndexFault:
    """An entry of an index tensor that is out of range for its call.

    Attributes:
        tensor: The name of the tensor in the C ABI ("cu_seqlens_q", "seqused_k",
            "block_table", ...), or of the bound that a length exceeds ("max_seqlen_q",
            "max_seqlen_k", "rotary_rows").
        index: The sequence of the entry; for a cu_seqlens, the index of the entry itself.
        entry: For "block_table", the column within the row of that sequence; otherwise 0.
        value: The entry, or the length.
        allowed: The bound that it violates.
        sentence: The fault in words.
    """

    tensor: str
    index: int
    entry: int
    value: int
    allowed: int
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def last_index_error(device: int = 0) -> IndexFault | None:
    """Returns and clears the first index fault that kernels on a GPU have met since the last call.

    Index tensors on a GPU (``cu_seqlens``, ``seqused``, ``block_table``, ``cache_seqlens``, ...)
    are read only by the kernels. They do not follow an entry that is out of range: nothing outside
    the tensors is read or written, and the rows of its sequence become NaN. This function waits for
    the GPU, so do not call it while a stream is being captured. Calls with ``check=True`` raise for
    the same faults before anything is launched.

    Args:
        device: Index of the GPU.

    Returns:
        The fault, or None if there was none.

    Raises:
        TypeError: device is not an integer.
        ValueError: there is no such GPU.
        NotImplementedError: there is no GPU at all, or this build has no CUDA.
    """
    device = _check.integer("device", device, "an integer, the index of a GPU")
    library = c_library()
    error = _abi.sized(_abi.IndexFault)
    _abi.check(library, library.tilewise_last_index_error(device, ctypes.byref(error)))
    if not error.found:
        return None
    return IndexFault(
        error.array.decode(), error.index, error.entry, error.value, error.allowed,
        error.sentence.decode(),
    )  # fmt: skip
