#!/usr/bin/env python3
"""Writes stub libraries to link against, so that the result loads on systems older than the
build's.

  python tools/manylinux_stubs.py 2.28 FOLDER [COMPILER]

A linked program asks for the newest version of each symbol that this glibc and libstdc++ have, so
older systems cannot load it. FOLDER, passed to the linker with -L before the system's own folders,
gets libraries without code, whose symbols have the newest versions that a manylinux_2_28 system has
(https://peps.python.org/pep-0600/). Newer additions to libstdc++ are linked from its static
library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# The newest symbol versions that each manylinux policy allows in Python wheels, by its glibc.
POLICIES = {
    "2.28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)},
    "2.34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)},
}
MERGED = (2, 34)  # the glibc that merged the libraries of MOVED into libc
MOVED = {  # library: prefixes of the names of its symbols
    "libdl.so.2": ("dl",),
    "libpthread.so.0": ("pthread_", "sem_"),
    "librt.so.1": ("shm_", "timer_", "mq_", "aio_", "lio_"),
}
# Since glibc 2.32, libstdc++ reads this variable, which older systems lack; 0 means that the
# process may have several threads.
SINGLE_THREADED = "char __libc_single_threaded = 0;\n"

Symbols = dict[str, tuple[str, str]]  # name: (type, version)


class StubError(Exception):
    """The message is meant for the user."""


def run(*command: str) -> str:
    """The output of a command.

    Raises:
        StubError: The command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise StubError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def number(version: str) -> tuple[int, ...]:
    """Parses GLIBCXX_3.4.9 into (3, 4, 9)."""
    return tuple(int(part) for part in version.partition("_")[2].split("."))


def exported(library: str) -> Iterator[tuple[str, str, str]]:
    """(name, type, version) of each versioned symbol of a shared library."""
    line = re.compile(
        r"\s*\d+:\s+\S+\s+\S+\s+(FUNC|IFUNC|OBJECT|TLS)\s+(?:GLOBAL|WEAK|UNIQUE)\s+\S+\s+"
        r"(?!UND)\S+\s+([^@\s]+)@@?((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)$"
    )
    for text in run("readelf", "--dyn-syms", "--wide", library).splitlines():
        if found := line.match(text):
            yield found[2], found[1], found[3]


def newest_allowed(library: str, limits: dict[str, tuple[int, ...]]) -> tuple[Symbols, Symbols]:
    """The symbols that stay in the library on an old system, and those that a library of MOVED has
    there.
    """
    versions: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, kind, version in exported(library):
        versions[name].append((kind, version))
    kept: Symbols = {}
    moved: Symbols = {}
    for name, found in versions.items():
        allowed = []
        for kind, version in found:
            newest = limits.get(version.partition("_")[0], (0,))
            if number(version) <= newest:
                allowed.append((kind, version))
        if not allowed:
            continue
        merged = limits["GLIBC"] < MERGED and any(v == "GLIBC_2.34" for _, v in found)
        to = moved if merged else kept
        to[name] = max(allowed, key=lambda symbol: number(symbol[1]))
    return kept, moved


def write_stub(path: Path, soname: str, symbols: Symbols, compiler: str) -> None:
    """Writes a shared library with these symbols and no code."""
    kinds = {"FUNC": "function", "IFUNC": "function", "OBJECT": "object", "TLS": "tls_object"}
    code, nodes = [], defaultdict(list)
    for name, (kind, version) in sorted(symbols.items()):
        section = '.section .tdata,"awT",@progbits' if kind == "TLS" else ".data"
        code.append(f"{section}\n.globl {name}\n.type {name}, @{kinds[kind]}\n{name}: .quad 0\n"
                    f".size {name}, 8")  # fmt: skip
        nodes[version].append(name)
    source, script = path.with_suffix(".s"), path.with_suffix(".map")
    source.write_text("\n".join([*code, '.section .note.GNU-stack,"",@progbits', ""]))
    script.write_text("".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in nodes.items()))
    run(compiler, "-shared", "-nostdlib", f"-Wl,-soname,{soname}",
        f"-Wl,--version-script,{script}", "-o", str(path), str(source))  # fmt: skip


def write_folder(folder: Path, limits: dict[str, tuple[int, ...]], compiler: str) -> None:
    """Writes everything that the linker should find before the system's own.

    Raises:
        StubError: A tool failed.
    """

    def system(name: str) -> str:
        return run(compiler, f"-print-file-name={name}").strip()

    libc, moved = newest_allowed(system("libc.so.6"), limits)
    write_stub(folder / "libc.so.6", "libc.so.6", libc, compiler)
    for soname, beginnings in MOVED.items():
        symbols = {name: version for name, version in moved.items() if name.startswith(beginnings)}
        write_stub(folder / soname.rpartition(".")[0], soname, symbols, compiler)
    for soname, file in (("libm.so.6", "libm.so"), ("libstdc++.so.6", "libstdc++.so.6")):
        kept, _ = newest_allowed(system(soname), limits)
        write_stub(folder / file, soname, kept, compiler)
    source, compiled = folder / "compatible.c", folder / "compatible.o"
    source.write_text(SINGLE_THREADED)
    run(compiler, "-x", "c", "-fPIC", "-fvisibility=hidden", "-c", str(source), "-o", str(compiled))
    run("ar", "rcs", str(folder / "libcompatible.a"), str(compiled))
    # The system's libc.so names the shared library, the parts that are linked statically, and the
    # loader; only the first has an old version.
    old = ["libc.so.6", *(soname.rpartition(".")[0] for soname in MOVED), "libcompatible.a"]
    script = Path(system("libc.so")).read_text()
    script = re.sub(r"\S+/libc\.so\.6", " ".join(str(folder / name) for name in old), script)
    (folder / "libc.so").write_text(script)
    standard = f"{folder}/libstdc++.so.6 {system('libstdc++.a')}"
    (folder / "libstdc++.so").write_text(f"INPUT ( {standard} )\n")


def main(arguments: list[str]) -> int:
    """Command line entry."""
    if len(arguments) not in (2, 3) or arguments[0] not in POLICIES:
        print(f"{__doc__}\nglibc is one of {', '.join(POLICIES)}", file=sys.stderr)
        return 2
    folder = Path(arguments[1]).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_folder(folder, POLICIES[arguments[0]], (arguments[2:] or ["c++"])[0])
    except (StubError, OSError) as error:
        print(f"manylinux_stubs: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
