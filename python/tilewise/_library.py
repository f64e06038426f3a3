"""Finds and loads the shared libraries: the C ABI, and its adapters for PyTorch and JAX."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import sys
from pathlib import Path

from . import _abi, _proofs
from ._requirements import PACKAGES, is_older

DIRECTORY_VARIABLE = "TILEWISE_LIBRARY_DIR"
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class LibraryNotFoundError(ImportError):
    """A shared library of Tilewise was not found, or cannot be loaded."""


def library_directory() -> Path:
    """The directory of the libraries: $TILEWISE_LIBRARY_DIR, or else ``lib/`` in the package."""
    given = os.environ.get(DIRECTORY_VARIABLE)
    return Path(given).resolve() if given else Path(__file__).resolve().parent / "lib"


def _path_of(stem: str) -> Path:
    path = library_directory() / f"{stem}{_SUFFIX}"
    if not path.is_file():
        raise LibraryNotFoundError(
            f"{path.name} is not in {path.parent}. An installed tilewise has it in its own 'lib' "
            f"directory; for a build tree, set {DIRECTORY_VARIABLE} to the directory that holds it."
        )
    _check_whole(path)
    return path


# Messages of the loader, and what each of them means to the user.
_REASONS = (
    (r"file too short|invalid ELF header|not a mach-o", "the file is damaged: reinstall tilewise"),
    (r"version `(GLIBC|GLIBCXX|CXXABI)_[\d.]+' not found",
     "it was built for a newer system than this one: build it here, with 'pip install --no-binary "
     "tilewise tilewise'"),
    (r"wrong ELF class|ELF file's phentsize|incompatible architecture",
     "it was built for another kind of processor"),
    (r"undefined symbol: tilewise_", "it and libtilewise beside it come from different versions of "
     "tilewise: reinstall tilewise"),
    (r"undefined symbol: \w*(torch|aoti|c10)|libtorch|libc10",
     "it does not fit this PyTorch: tilewise needs PyTorch 2.10 or newer"),
)  # fmt: skip


def _check_whole(path: Path) -> None:
    """Refuses a truncated file: the loader would map it, and reading past its end would crash."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return  # the loader reports this case itself
    (sections,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    if path.stat().st_size < sections + size * count:
        raise LibraryNotFoundError(f"{path} is damaged (its end is missing): reinstall tilewise")


def _load_error(path: Path, error: OSError) -> LibraryNotFoundError:
    """One sentence that says what failed, what the user can do, and what the loader reported."""
    detail = error.__cause__ or error  # torch's own error does not repeat the loader's message
    for pattern, reason in _REASONS:
        if re.search(pattern, str(detail)):
            return LibraryNotFoundError(f"{path} cannot be loaded because {reason} ({detail})")
    return LibraryNotFoundError(f"{path} cannot be loaded: {detail}")


def _check_abi(path: Path, library: ctypes.CDLL) -> None:
    """Refuses another ABI version before any other function is called with the wrong signature."""
    version = getattr(library, "tilewise_abi_version", None)
    if version is None:
        raise LibraryNotFoundError(
            f"{path} is not a tilewise library: it has no tilewise_abi_version"
        )
    version.restype, version.argtypes = ctypes.c_uint32, []
    found = version()
    if found != _abi.ABI_VERSION:
        raise LibraryNotFoundError(
            f"{path} has ABI version {found}, but these Python files need {_abi.ABI_VERSION}: "
            "they come from different versions of tilewise"
        )


@functools.cache
def c_library() -> ctypes.CDLL:
    """The C library, loaded once, with the signatures of tilewise.h.

    Raises:
        LibraryNotFoundError: the library is missing, cannot be loaded, or has another ABI version.
    """
    path = _path_of("libtilewise")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _load_error(path, error) from None
    _check_abi(path, library)
    _abi.declare(library)
    _proofs.apply_records(library, path)
    return library


@functools.cache
def load_torch_adapter() -> None:
    """Loads the adapter, which registers the kernels of ``torch.ops.tilewise``.

    Raises:
        LibraryNotFoundError: the adapter is missing or cannot be loaded, or PyTorch is older than
            2.10.
    """
    import torch

    if is_older("torch", torch.__version__):
        raise LibraryNotFoundError(
            f"tilewise needs PyTorch {PACKAGES['torch'].version} or newer for tensors, but "
            f"{torch.__version__} is installed. NumPy arrays work without it."
        )
    c_library()  # a missing core is reported as such, not as an unresolved symbol of the adapter
    try:
        path = _path_of("libtilewise_torch")
    except LibraryNotFoundError as error:
        raise LibraryNotFoundError(
            f"{error} It is built only if PyTorch's headers are installed: reinstall with "
            "'pip install --no-build-isolation .' in an environment that has PyTorch."
        ) from None
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise _load_error(path, error) from None


@functools.cache
def jax_adapter() -> ctypes.CDLL:
    """The adapter with the handlers of XLA's foreign function interface, loaded once.

    Raises:
        LibraryNotFoundError: the adapter is missing or cannot be loaded.
    """
    c_library()
    try:
        path = _path_of("libtilewise_jax")
    except LibraryNotFoundError as error:
        raise LibraryNotFoundError(
            f"{error} It is built only if jaxlib's headers are installed: reinstall with "
            "'pip install --no-build-isolation .' in an environment that has jaxlib."
        ) from None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise _load_error(path, error) from None
