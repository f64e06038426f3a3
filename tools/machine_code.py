"""Reads what cuobjdump does not print: sizes of machine code, and the main loops of disassembly."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator


def sections(elf: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset, size) of the sections of a 64-bit little-endian ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    found = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    for section in found:
        begin = found[names_at][4] + section[0]
        yield elf[begin : elf.index(b"\0", begin)].decode(), section[4], section[5]


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Sizes of the .text sections, by kernel."""
    texts = ((n, size) for n, _, size in sections(cubin) if n.startswith(".text."))
    return {name.removeprefix(".text."): size for name, size in texts}


def bytes_inside(library: bytes) -> list[int]:
    """The size of each machine code file in a library or an object, in cuobjdump's order.

    Fat binaries follow one another: a 16-byte header that ends in the size of what follows, then
    images, each with its kind (2: machine code), the size of its header and its own size.
    """
    found = []
    for name, at, size in sections(library) if library.startswith(b"\x7fELF") else ():
        end = at + size if name == ".nv_fatbin" else at
        while at < end:
            magic, _, header, total = struct.unpack_from("<IHHQ", library, at)
            if magic != 0xBA55ED50:  # padding between two of them
                at += 8
                continue
            image, at = at + header, at + header + total
            while image < at:
                kind, _, header, payload = struct.unpack_from("<HHIQ", library, image)
                found += [payload] if kind == 2 else []
                image += header + payload
    return found


def main_loop(code: str) -> tuple[int, int] | None:
    """(R2UR, WARPSYNC) of the innermost loops with wgmma in a disassembled kernel: the maximum over
    the loops. A loop ends in a conditional backward branch; waits outside of the loop body return
    with an unconditional one.
    """
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;/]*);", code)
    lines = [(int(address, 16), text) for address, text in found]
    loops = []
    for end, text in lines:
        back = re.match(r"@\S+\s+BRA\S*\s+(?:\S+,\s*)?0x([0-9a-f]+)", text)
        if back and int(back[1], 16) < end:
            begin = int(back[1], 16)
            body = [t for address, t in lines if begin <= address <= end]
            if any("HGMMA" in t for t in body):
                loops.append((begin, end, body))
    inner = [
        body for begin, end, body in loops
        if not any((b, e) != (begin, end) and begin <= b and e <= end for b, e, _ in loops)
    ]  # fmt: skip
    if not inner:
        return None
    counts = [[sum(name in t for t in body) for name in ("R2UR", "WARPSYNC")] for body in inner]
    return max(c[0] for c in counts), max(c[1] for c in counts)
