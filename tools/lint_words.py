"""Word lint: no traces of the machine on which a file was written, and no leftovers.

Absolute paths of a user or a checkout, addresses of private networks, secrets, conflict markers,
and TODOs without a reason have no place in a published tree. Run: python tools/lint_words.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lint_common import Finding, read_text, run_lint

MAX_KILOBYTES = 1024

_RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), message)
    for pattern, message in (
        (r"(?<![\w.$~])/(?:home|Users|root|work|mnt|scratch)/\w[\w.-]*", "path of one machine"),
        (r"\b[A-Z]:\\(?:Users|Work)\\", "path of one machine"),
        (r"(?<![\w.])/tmp/\w[\w.-]*", "path in a shared temporary folder"),
        (r"\b(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}\b", "private address"),
        (r"https?://[\w.-]+\.(?:local|lan|internal|intranet|corp)\b", "private host"),
        (r"https?://[^/\s\"']+:[^/\s\"']+@", "credentials in an address"),
        (r"-----BEGIN [A-Z ]*PRIVATE KEY-----", "private key"),
        (r"^(?:<{7}|>{7}) ", "conflict marker"),
        (r"\b(?:TODO|FIXME|XXX|HACK)\b(?!\(|: \w)", "TODO without a reason"),
    )
)

# This file and its test contain the words that they look for.
_EXEMPT = frozenset({"tools/lint_words.py", "tests/python/tools/test_lint.py"})


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    path = file.as_posix()
    kilobytes = (root / file).stat().st_size // 1024
    if kilobytes > MAX_KILOBYTES:
        yield Finding(path, 1, f"{kilobytes} KB; at most {MAX_KILOBYTES} in the tree")
    text = read_text(root / file)
    if text is None or path in _EXEMPT:
        return
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, message in _RULES:
            found = pattern.search(line)
            if found:
                yield Finding(path, number, f"{message}: {found.group()!r}")


if __name__ == "__main__":
    sys.exit(run_lint("word lint", check))
