"""What kernels on a GPU have found wrong with index tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from . import _abi
from ._library import c_library


@dataclass(frozen=True)
class IndexFault:
    """An entry of an index tensor that did not fit its call.

    Attributes:
        tensor: Its name as in ``tilewise.h``: "cu_seqlens_q", "seqused_k", "block_table", ...; or
            the bound that a length exceeds: "max_seqlen_q", "max_seqlen_k", "rotary_rows".
        index: Sequence of the entry; of a cu_seqlens the entry itself.
        entry: For "block_table", the entry in the row of that sequence; otherwise 0.
        value: What the tensor holds there, or the length.
        allowed: The bound that it breaks.
        sentence: All of it in words.
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
    """The first fault of an index tensor that kernels of a GPU have met since the last call.

    Index tensors (``cu_seqlens``, ``seqused``, ``block_table``, ``cache_seqlens``, ...) are read by
    the kernels alone. An entry that does not fit is not followed: nothing outside of the tensors is
    read or written, and the rows of its sequence become NaN. This function says which entry it was,
    and forgets it. It waits for the GPU: do not call it while a stream is captured. Calls with
    ``check=True`` raise for the same faults before anything is launched.

    Args:
        device: Index of the GPU.

    Returns:
        The fault, or None when there was none.

    Raises:
        ValueError: there is no such GPU.
        NotImplementedError: there is no GPU at all, or this build has no CUDA.
    """
    library = c_library()
    error = _abi.sized(_abi.IndexFault)
    _abi.check(library, library.tilewise_last_index_error(device, ctypes.byref(error)))
    if not error.found:
        return None
    return IndexFault(
        error.array.decode(), error.index, error.entry, error.value, error.allowed,
        error.sentence.decode(),
    )  # fmt: skip
