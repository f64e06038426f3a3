#!/usr/bin/env python3
"""What ptxas says of warpgroup products that it does not leave as they are, in the log of a build.

  python tools/ptxas_notices.py build/cuda/build.log build/cuda    status 1 when there is any

C7510 and its neighbours are information to ptxas, which neither -Werror nor a warning level stops:
products are serialised, or a fence or a wait is put among them. Either is a kernel that is slower
than its source says.

ptxas speaks once, when a unit is compiled. So the objects that it spoke about are removed from the
folder of the build: the next one compiles them, and fails, again.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

NOTICE = re.compile(r"\(C75\d\d\)")
# Ninja prints what a command says below this line; it runs several, and shows them one by one.
STEP = re.compile(r"\s*\[\d+/\d+\] (?:Building CUDA object (\S+))?")
MOST = 12


def notices(log: str) -> list[tuple[str, str]]:
    """(object, line) of each; the object is empty where the log does not tell it."""
    found, current = [], ""
    for line in log.splitlines():
        if step := STEP.match(line):
            current = step[1] or ""
        elif NOTICE.search(line):
            found.append((current, line.strip()))
    return found


def check(log: Path, build: Path) -> list[str]:
    """A line for each notice; removes the objects that they are about."""
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
