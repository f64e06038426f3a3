#!/usr/bin/env python3
"""Finds notices of ptxas in a build log about wgmma products that it serialised or fenced.

  python tools/ptxas_notices.py build/cuda/build.log build/cuda    status 1 if there are any

C7510 and related notices are information to ptxas, which neither -Werror nor a warning level turns
into an error: products are serialised, or a fence or a wait is inserted between them. Either makes
a kernel slower than its source suggests.

ptxas prints the notice only when a unit is compiled. The objects concerned are therefore removed
from the build folder, so that the next build compiles them, and fails, again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NOTICE = re.compile(r"\(C75\d\d\)")
# Ninja prints a command's output below this line; it runs several commands and prints them in turn.
STEP = re.compile(r"\s*\[\d+/\d+\] (?:Building CUDA object (\S+))?")
MOST = 12


def notices(log: str) -> list[tuple[str, str]]:
    """(object, line) of each notice; the object is empty where the log does not name it."""
    found, current = [], ""
    for line in log.splitlines():
        if step := STEP.match(line):
            current = step[1] or ""
        elif NOTICE.search(line):
            found.append((current, line.strip()))
    return found


def check(log: Path, build: Path) -> list[str]:
    """One line per notice; removes the objects concerned."""
    found = notices(log.read_text(errors="replace"))
    for name in {name for name, _ in found if name}:
        (build / name).unlink(missing_ok=True)
    return [line for _, line in found]


def main() -> int:
    """Command line entry."""
    if len(sys.argv) != 3:
        print("ptxas_notices.py LOG BUILD_FOLDER", file=sys.stderr)
        return 2
    found = check(Path(sys.argv[1]), Path(sys.argv[2]))
    for line in found[:MOST]:
        print(f"ptxas_notices: {line}")
    if found:
        print(
            f"ptxas_notices: {len(found)} notices in {sys.argv[1]}: products are not asynchronous"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
