"""The packages that parts of tilewise need, and the errors if they are missing or too old."""

from __future__ import annotations

import importlib
import re
from typing import NamedTuple


class Package(NamedTuple):
    """A package whose distribution and import name are the same."""

    title: str
    oldest: tuple[int, int]  # must agree with pyproject.toml

    @property
    def version(self) -> str:
        return ".".join(str(part) for part in self.oldest)


PACKAGES = {
    "numpy": Package("NumPy", (1, 24)),
    "jax": Package("JAX", (0, 10)),
    "torch": Package("PyTorch", (2, 10)),
    # Older versions describe packed sequences and continuous batching differently.
    "transformers": Package("Transformers", (5, 20)),
    "diffusers": Package("Diffusers", (0, 42)),
}


def is_older(name: str, version: str) -> bool:
    """Whether this version of a package is older than the oldest that works."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < PACKAGES[name].oldest


def require(what: str, *names: str) -> None:
    """Imports the packages that a part of tilewise needs.

    Args:
        what: The name of that part, which begins the error message.
        names: Keys of PACKAGES.

    Raises:
        ModuleNotFoundError: a package is not installed; the message names the first of them.
    """
    for name in names:
        title, version = PACKAGES[name].title, PACKAGES[name].version
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # the package is installed, but one of its own imports is not
                raise
            raise ModuleNotFoundError(
                f"{what} needs {title} {version} or newer, which is not installed: "
                f"pip install '{name}>={version}'",
                name=name,
            ) from None


def require_version(what: str, name: str) -> None:
    """Refuses a package that is installed, but too old.

    Args:
        what: The part of tilewise that needs it, which begins the error message.
        name: A key of PACKAGES.

    Raises:
        ImportError: the package is too old; the message names both versions.
    """
    installed = importlib.import_module(name).__version__
    if is_older(name, installed):
        title, version = PACKAGES[name].title, PACKAGES[name].version
        raise ImportError(
            f"{what} needs {title} {version} or newer, but {installed} is installed: "
            f"pip install -U '{name}>={version}'"
        )
