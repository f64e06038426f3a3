"""What parts of the package need beside it, said in one sentence where it is missing."""

from __future__ import annotations

import importlib
from typing import NamedTuple


class Package(NamedTuple):
    """A distribution that is imported under the name it is asked for by."""

    title: str
    oldest: tuple[int, int]  # pyproject.toml says the same

    @property
    def version(self) -> str:
        return ".".join(str(part) for part in self.oldest)


PACKAGES = {
    "numpy": Package("NumPy", (1, 24)),
    "torch": Package("PyTorch", (2, 10)),
    # Before it packed sequences and continuous batching are described differently.
    "transformers": Package("Transformers", (5, 20)),
}


def is_older(name: str, version: str) -> bool:
    """Whether this version of a package is too old for ours."""
    return tuple(int(part) for part in version.split(".")[:2]) < PACKAGES[name].oldest


def require(what: str, *names: str) -> None:
    """Imports packages that something needs.

    Args:
        what: The subject of the sentence.
        names: Keys of PACKAGES.

    Raises:
        ModuleNotFoundError: the first of them that is not installed.
    """
    for name in names:
        title, version = PACKAGES[name].title, PACKAGES[name].version
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:  # it is there, and lacks something itself
                raise
            raise ModuleNotFoundError(
                f"{what} needs {title} {version} or newer, which is not installed: "
                f"pip install '{name}>={version}'",
                name=name,
            ) from None


def require_version(what: str, name: str) -> None:
    """Refuses a package that is installed, but too old.

    Args:
        what: The subject of the sentence.
        name: Of PACKAGES.

    Raises:
        ImportError: naming both versions.
    """
    installed = importlib.import_module(name).__version__
    if is_older(name, installed):
        title, version = PACKAGES[name].title, PACKAGES[name].version
        raise ImportError(
            f"{what} needs {title} {version} or newer, and this is {installed}: pip install -U "
            f"'{name}>={version}'"
        )
