"""Shared by the lints: the files of the checkout, and how findings are printed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CXX_SUFFIXES = frozenset({".h", ".hpp", ".c", ".cpp", ".cu", ".cuh", ".inl"})
PYTHON_SUFFIXES = frozenset({".py", ".pyi"})


@dataclass(frozen=True)
class Finding:
    """One rule broken at one place; `line` counts from 1."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def project_files(root: Path) -> list[Path]:
    """Files of the checkout at `root`, relative to it: tracked, or new and not ignored."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = sorted({name for name in listing.split("\0") if name})
    return [Path(name) for name in names if (root / name).is_file()]


def read_text(path: Path) -> str | None:
    """The text of a file, or None for a binary one."""
    data = path.read_bytes()
    if b"\0" in data:
        return None
    return data.decode("utf-8", errors="replace")


def run_lint(name: str, check: Callable[[Path, Path], Iterator[Finding]]) -> int:
    """Runs `check(root, file)` over the checkout named on the command line (default: here).

    Prints every finding and a closing line; returns the exit status.
    """
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent
    files = project_files(root)
    findings = [finding for file in files for finding in check(root, file)]
    for finding in findings:
        print(finding)
    print(f"{name}: {len(files)} files, {len(findings)} findings")
    return 1 if findings else 0
