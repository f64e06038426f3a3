#!/usr/bin/env python3
"""Libraries to link against, so that the result loads on systems older than the one that builds it.

  python tools/manylinux_stubs.py 2.28 FOLDER [COMPILER]

A program that is linked here asks for the newest version of each symbol that this glibc and this
libstdc++ have, and nothing older loads it. FOLDER, given to the linker by -L before the system's
own, holds libraries without code that have of each symbol the newest version which a system of
manylinux_2_28 has (https://peps.python.org/pep-0600/). What a newer libstdc++ added is taken from
its static library.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Newest version that a system of a manylinux policy has: those of Python wheels, by glibc.
POLICIES = {
    "2.28": {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)},
    "2.34": {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13)},
}
MERGED = (2, 34)  # glibc that took these libraries into libc; the beginnings of their names:
MOVED = {
    "libdl.so.2": ("dl",),
    "libpthread.so.0": ("pthread_", "sem_"),
    "librt.so.1": ("shm_", "timer_", "mq_", "aio_", "lio_"),
}
# An optimisation of one thread that libstdc++ asks for since glibc 2.32; 0: "there may be more".
SINGLE_THREADED = "char __libc_single_threaded = 0;\n"

Symbols = dict[str, tuple[str, str]]  # name: (type, version)


class StubError(Exception):
    """A sentence for the user."""


def run(*command: str) -> str:
    """What a command prints.

    Raises:
        StubError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise StubError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def number(version: str) -> tuple[int, ...]:
    """GLIBCXX_3.4.9 as (3, 4, 9)."""
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
    """The symbols that an old system has; second: those that a library of MOVED holds there."""
    versions: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, kind, version in exported(library):
        versions[name].append((kind, version))
    own: Symbols = {}
    moved: Symbols = {}
    for name, found in versions.items():
        allowed = [each for each in found
                   if number(each[1]) <= limits.get(each[1].partition("_")[0], (0,))]  # fmt: skip
        if not allowed:
            continue
        merged = limits["GLIBC"] < MERGED and any(v == "GLIBC_2.34" for _, v in found)
        to = moved if merged else own
        to[name] = max(allowed, key=lambda each: number(each[1]))
    return own, moved


def write_stub(path: Path, soname: str, symbols: Symbols, compiler: str) -> None:
    """A shared library with these symbols and nothing behind them."""
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
    """Everything that the linker is to find before the system's own.

    Raises:
        StubError: a tool failed.
    """

    def system(name: str) -> str:
        return run(compiler, f"-print-file-name={name}").strip()

    libc, moved = newest_allowed(system("libc.so.6"), limits)
    write_stub(folder / "libc.so.6", "libc.so.6", libc, compiler)
    for soname, beginnings in MOVED.items():
        own = {name: each for name, each in moved.items() if name.startswith(beginnings)}
        write_stub(folder / soname.rpartition(".")[0], soname, own, compiler)
    for soname, file in (("libm.so.6", "libm.so"), ("libstdc++.so.6", "libstdc++.so.6")):
        own, _ = newest_allowed(system(soname), limits)
        write_stub(folder / file, soname, own, compiler)
    source, compiled = folder / "compatible.c", folder / "compatible.o"
    source.write_text(SINGLE_THREADED)
    run(compiler, "-x", "c", "-fPIC", "-fvisibility=hidden", "-c", str(source), "-o", str(compiled))
    run("ar", "rcs", str(folder / "libcompatible.a"), str(compiled))
    # The system's libc.so names the shared library, the rest of it that is linked statically, and
    # the loader; only the first has an old form.
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
