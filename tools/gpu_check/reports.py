"""What compute-sanitizer reports, and which of it is known.

A known report has this tool, this sentence, this kernel and this place in it; how often it comes
does not matter, and anything else is an error. The place is what the machine code does there: an
address moves with every change of the sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

BARRIER = "Barrier error detected. Divergent thread(s) in block."


@dataclass(frozen=True)
class Kernel:
    """Its name as compute-sanitizer prints it, and in the library."""

    name: str
    symbol: str


@dataclass(frozen=True)
class Known:
    """A report that has been explained."""

    title: str
    tool: str
    says: str
    kernels: tuple[Kernel, ...]
    place: str


@dataclass(frozen=True)
class Found:
    """One that was printed."""

    says: str
    kernel: str
    offset: int


def _plain_forward(element: str, head_dim: int, cut: int) -> Kernel:
    """A forward of the Hopper kernels."""
    config = (
        f"tilewise::cuda::wgmma::Config<tilewise::cuda::{element}, (int){head_dim}, "
        f"(int){head_dim}, (tilewise::cuda::wgmma::Form)0, (tilewise::cuda::arch::Cut){cut}>"
    )
    return Kernel(
        f"void tilewise::cuda::wgmma::forward<{config}>(tilewise::cuda::TmaForwardParams)",
        f"_ZN8tilewise4cuda5wgmma7forwardINS1_6ConfigINS0_{len(element)}{element}"
        f"ELi{head_dim}ELi{head_dim}ELNS1_4FormE0ELNS0_4arch3CutE{cut}EEEEEv"
        "NS0_16TmaForwardParamsE",
    )


# docs/kernels-hopper.md, "Proof and result", says why they are no errors.
KNOWN = (
    Known(
        title="two idle warps pass the first barrier of a block elsewhere than the others",
        tool="synccheck",
        says=BARRIER,
        # A role comes to this barrier in code of its own, and idle warps before those that look
        # for the first work.
        kernels=tuple(
            _plain_forward(element, head_dim, cut)
            for element in ("BF16", "F16")
            for head_dim, cut in ((64, 1), (96, 0), (128, 0), (192, 0), (256, 0))
        ),
        place="BAR.SYNC.DEFER_BLOCKING 0x0; EXIT",
    ),
)


def reports(output: str) -> list[Found]:
    """Those that say where they are, in the output of a process."""
    found, says = [], ""
    for line in output.splitlines():
        if title := re.match(r"={9} (\S.*)", line):
            says = title[1].strip()
        elif at := re.match(r"={9} +at (.+)\+0x([0-9a-f]+)", line):
            found.append(Found(says, at[1], int(at[2], 16)))
    return found


def instructions(sass: str) -> dict[int, str]:
    """A disassembled kernel by address."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]*);", sass)
    return {int(address, 16): text.strip() for address, text in found}


def place(code: dict[int, str], offset: int) -> str:
    """The instruction there and the one that follows it when the thread goes on."""
    order = sorted(code)
    after = dict(pairwise(order))
    path: list[str] = []
    at: int | None = offset
    seen: set[int] = set()
    while at in code and at not in seen and len(path) < 2:
        seen.add(at)
        jump = re.fullmatch(r"BRA(?:\.U)? 0x([0-9a-f]+)", code[at])
        if not jump and not re.match(r"BSYNC |NOP", code[at]):
            path.append(code[at])
        at = int(jump[1], 16) if jump else after.get(at)
    return "; ".join(path)


def known(tool: str, found: Found, sass: Callable[[str], str]) -> Known | None:
    """The known report that it is; None when it is a new one.

    Args:
        sass: The machine code of a kernel as text, by its symbol.
    """
    for each in KNOWN:
        names = {kernel.name: kernel.symbol for kernel in each.kernels}
        alike = each.tool == tool and each.says == found.says and found.kernel in names
        if alike and place(instructions(sass(names[found.kernel])), found.offset) == each.place:
            return each
    return None
