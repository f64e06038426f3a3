"""Family lint: outside its folder, only the list of families names a kernel family.

A CUDA family is a folder of src/cuda with a family.cpp; src/dispatch/families.cpp lists them. A new
family then needs a folder and a line there. Code is checked, comments are not. Run:
python tools/lint_families.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lint_common import CXX_SUFFIXES, Finding, read_text, run_lint

_LIST = PurePosixPath("src/dispatch/families.cpp")
_CHECKED = ("src", "include", "bindings", "cmake", "python")

# Folders and files that may name a family, with the reason.
ALLOWED = {
    "src/cuda/ptx": "the family has the name of the PTX instruction that it is built on",
    "src/cuda/arch": "tile tables are data, in the types of the kernels they are for",
    # The C ABI does not say which family a tile table belongs to.
    "python/tilewise/_capabilities.py": "says which families have a single tile table",
    "python/tilewise/cli/provenance.py": "says which families a run on a GPU has tested",
}

_CXX_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_HASH_COMMENT = re.compile(r'#[^\n]*|"""(?:(?!""").)*"""', re.DOTALL)


def families(root: Path) -> list[str]:
    """Names of the CUDA families: the folders that export a row."""
    return sorted(path.parent.name for path in root.glob("src/cuda/*/family.cpp"))


def pattern_of(names: list[str]) -> re.Pattern[str]:
    """Matches a family's name alone, or in camel case inside of an identifier (kWgmmaRows)."""
    camel = ("".join(part.capitalize() for part in name.split("_")) for name in names)
    alone = "|".join(map(re.escape, names))
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{alone})(?![A-Za-z0-9_])|{'|'.join(camel)}")


def without_comments(text: str, path: PurePosixPath) -> str:
    """The text with comments blanked; lines keep their numbers."""
    cxx = path.suffix in CXX_SUFFIXES or path.suffix == ".in"
    comment = _CXX_COMMENT if cxx else _HASH_COMMENT
    return comment.sub(lambda match: "\n" * match.group().count("\n"), text)


def is_allowed(path: PurePosixPath, names: list[str]) -> bool:
    """Whether the file belongs to a family, is the list, or has an allowance."""
    if path == _LIST or any(path.is_relative_to(f"src/cuda/{name}") for name in names):
        return True
    return any(path.is_relative_to(allowed) for allowed in ALLOWED)


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    path = PurePosixPath(file.as_posix())
    names = families(root)
    code = path.suffix in CXX_SUFFIXES | {".in", ".py", ".cmake"} or path.name == "CMakeLists.txt"
    if not names or path.parts[0] not in _CHECKED or not code or is_allowed(path, names):
        return
    text = without_comments(read_text(root / file) or "", path)
    for match in pattern_of(names).finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Finding(
            str(path),
            line,
            f"names the family {match.group()}: only its folder and {_LIST} may; "
            "use a field of FamilyRow",
        )


if __name__ == "__main__":
    sys.exit(run_lint("family lint", check))
