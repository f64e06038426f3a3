"""Build backend of the Python package: scikit-build-core, plus the search for PyTorch and jaxlib.

The PyTorch adapter needs PyTorch's headers, and installing PyTorch just for them costs a download
of hundreds of megabytes (gigabytes where its version range is open). The order is therefore:
1. PyTorch >= 2.10 that the build can import (``--no-build-isolation``): used.
2. PyTorch >= 2.10 in the environment that ``pip install .`` installs into: its headers are used,
   although the build itself is isolated from that environment.
3. Otherwise an isolated build installs exactly one version, ``torch==2.13.0``, for itself.

``TILEWISE_TORCH=OFF`` in the environment builds without the adapter: NumPy arrays, C and C++ work,
tensors do not. One binary serves every PyTorch from 2.10 on, whichever one it was built with.

The JAX adapter needs headers that jaxlib ships. It is built if jaxlib is installed in one of the
same two places, and never installed for a build. ``TILEWISE_JAX=OFF`` builds without it.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_sdist as build_sdist,
)
from scikit_build_core.build import (
    get_requires_for_build_sdist as get_requires_for_build_sdist,
)

_MINIMUM = (2, 10)
_REQUIREMENT = "torch==2.13.0"

Settings = dict[str, Any]


def _wanted(adapter: str = "TORCH") -> bool:
    return os.environ.get(f"TILEWISE_{adapter}", "ON").upper() not in ("OFF", "0", "NO")


def _recent(package: Path) -> bool:
    """Whether ``package`` is the directory of a PyTorch with a stable ABI to build against."""
    version = package / "version.py"
    if not version.is_file() or not (package / "include/torch/csrc/stable/library.h").is_file():
        return False
    found = re.search(r"""__version__ = ['"](\d+)\.(\d+)""", version.read_text())
    return found is not None and (int(found[1]), int(found[2])) >= _MINIMUM


def _importable() -> bool:
    spec = importlib.util.find_spec("torch")
    return spec is not None and spec.origin is not None and _recent(Path(spec.origin).parent)


def _sites() -> Iterator[Path]:
    """The directories of packages outside of pip's isolated build."""
    for base in dict.fromkeys((sys.prefix, sys.base_prefix)):
        for kind in ("purelib", "platlib"):
            yield Path(sysconfig.get_path(kind, vars={"base": base, "platbase": base}))


def _outside() -> Path | None:
    """The site-packages outside of pip's isolated build that has a usable PyTorch, if any."""
    return next((site for site in _sites() if _recent(site / "torch")), None)


def _xla_headers() -> Path | None:
    """The headers of an installed jaxlib, if any."""
    spec = importlib.util.find_spec("jaxlib")
    packages = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    for package in (*packages, *(site / "jaxlib" for site in _sites())):
        if (package / "include/xla/ffi/api/ffi.h").is_file():
            return package / "include"
    return None


def _lend(site: Path) -> None:
    """Lets the interpreter that CMake starts import PyTorch from ``site``.

    pip's isolation removes that directory from the module path by name, so it is added by another
    name.
    """
    directory = tempfile.mkdtemp(prefix="tilewise-build-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    link = Path(directory) / "site-packages"
    link.symlink_to(site, target_is_directory=True)
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(link)) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def _with_torch(settings: Settings | None) -> Settings:
    """The settings, with TILEWISE_BUILD_TORCH decided unless the caller did."""
    settings = dict(settings or {})
    name = "cmake.define.TILEWISE_BUILD_TORCH"
    if name in settings:
        return settings
    build = _wanted() and _importable()
    if _wanted() and not build:
        site = _outside()
        if site is not None:
            _lend(site)
            build = True
    if not build:
        print("tilewise: building without the PyTorch adapter: tensors will not work", flush=True)
    settings[name] = "ON" if build else "OFF"
    return settings


def _with_adapters(settings: Settings | None) -> Settings:
    """The settings, with both adapters decided unless the caller did."""
    settings = _with_torch(settings)
    name = "cmake.define.TILEWISE_XLA_INCLUDE"
    if name not in settings:
        headers = _xla_headers() if _wanted("JAX") else None
        if headers is None:
            print("tilewise: building without the JAX adapter: tilewise.jax will not work")
        settings[name] = "" if headers is None else str(headers)
    return settings


def _torch_requirement() -> list[str]:
    have = not _wanted() or _importable() or _outside() is not None
    return [] if have else [_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """The packages that an isolated build installs: scikit-build-core, and PyTorch if needed."""
    return [*_build.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """The same as for a wheel."""
    return [*_build.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Builds the wheel, with the adapters whose headers are found."""
    return _build.build_wheel(wheel_directory, _with_adapters(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """The same as for a wheel."""
    settings = _with_adapters(config_settings)
    return _build.build_editable(wheel_directory, settings, metadata_directory)
