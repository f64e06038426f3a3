"""Finds and loads the two shared libraries: the C ABI, and the PyTorch adapter over it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path

from . import _abi

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
    return path


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
        raise LibraryNotFoundError(f"{path} cannot be loaded: {error}") from error
    _abi.declare(library)
    found = library.tilewise_abi_version()
    if found != _abi.ABI_VERSION:
        raise LibraryNotFoundError(
            f"{path} has ABI version {found}, but these Python files need {_abi.ABI_VERSION}: "
            "they come from different versions of tilewise."
        )
    return library


@functools.cache
def load_torch_adapter() -> None:
    """Loads the adapter, which registers the kernels of ``torch.ops.tilewise``.

    Raises:
        LibraryNotFoundError: it is missing, or this PyTorch is older than 2.10.
    """
    import torch

    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < (2, 10):
        raise LibraryNotFoundError(
            f"tilewise needs PyTorch 2.10 or newer for tensors, but {torch.__version__} is "
            "installed. NumPy arrays work without it."
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
        raise LibraryNotFoundError(f"{path} cannot be loaded: {error}") from error
