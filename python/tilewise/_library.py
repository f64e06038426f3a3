"""Finds and loads the two shared libraries: the C ABI, and the PyTorch adapter over it."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import sys
from pathlib import Path

from . import _abi
from ._requirements import PACKAGES, is_older

DIRECTORY_VARIABLE = "TILEWISE_LIBRARY_DIR"
_SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


class LibraryNotFoundError(ImportError):
    """A shared library of Tilewise is not where it is looked for, or cannot be loaded."""


def library_directory() -> Path:
    """Directory that holds the libraries: $TILEWISE_LIBRARY_DIR, else ``lib/`` of the package."""
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


# What the loader says, in words that tell what to do.
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
     "this PyTorch is not one that it can run with: tilewise needs PyTorch 2.10 or newer"),
)  # fmt: skip


def _check_whole(path: Path) -> None:
    """The loader maps a file that was cut short, and the process dies where it ends."""
    with path.open("rb") as file:
        head = file.read(64)
    if len(head) < 64 or head[:5] != b"\x7fELF\x02":
        return  # the loader says so itself
    (sections,) = struct.unpack_from("<Q", head, 40)
    size, count = struct.unpack_from("<HH", head, 58)
    if path.stat().st_size < sections + size * count:
        raise LibraryNotFoundError(f"{path} is damaged, its end is missing: reinstall tilewise")


def _load_error(path: Path, error: OSError) -> LibraryNotFoundError:
    """One sentence: what failed, what the loader says of it, what to do."""
    said = error.__cause__ or error  # torch keeps to itself what the loader said
    for pattern, reason in _REASONS:
        if re.search(pattern, str(said)):
            return LibraryNotFoundError(f"{path} cannot be loaded, {reason} ({said})")
    return LibraryNotFoundError(f"{path} cannot be loaded: {said}")


def _check_abi(path: Path, library: ctypes.CDLL) -> None:
    """Before any other function is called: in another ABI it may mean anything."""
    version = getattr(library, "tilewise_abi_version", None)
    if version is None:
        raise LibraryNotFoundError(f"{path} is no library of tilewise: no tilewise_abi_version")
    version.restype, version.argtypes = ctypes.c_uint32, []
    found = version()
    if found != _abi.ABI_VERSION:
        raise LibraryNotFoundError(
            f"{path} has ABI version {found}, but these Python files need {_abi.ABI_VERSION}: "
            "they come from different versions of tilewise."
        )


@functools.cache
def c_library() -> ctypes.CDLL:
    """The C library, loaded once, with the signatures of tilewise.h.

    Raises:
        LibraryNotFoundError: it is missing, cannot be loaded, or has another ABI version.
    """
    path = _path_of("libtilewise")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _load_error(path, error) from None
    _check_abi(path, library)
    _abi.declare(library)
    return library


@functools.cache
def load_torch_adapter() -> None:
    """Loads the adapter, which registers the kernels of ``torch.ops.tilewise``.

    Raises:
        LibraryNotFoundError: it is missing or cannot be loaded, or this PyTorch is older than 2.10.
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
            f"{error} It is built when PyTorch's headers are there at build time: reinstall with "
            "'pip install --no-build-isolation .' in an environment that has PyTorch."
        ) from None
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise _load_error(path, error) from None
