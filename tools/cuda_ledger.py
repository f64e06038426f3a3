#!/usr/bin/env python3
"""The ledger of the CUDA kernels: registers, stack, shared memory and code size of each.

  python tools/cuda_ledger.py build/libtilewise.so           writes docs/results/cuda-ledger.txt
  python tools/cuda_ledger.py build/libtilewise.so --part    writes the rows of its kernel
                                                             instances, and keeps all other rows
  python tools/cuda_ledger.py build/libtilewise.so --check   compares; status 1 on a difference
  python tools/cuda_ledger.py build/libtilewise.so --check --part   compares only its kernel
                                                                    instances

The tool reads the machine code in a library, or in object files, with cuobjdump, which is searched
for in $CUOBJDUMP, PATH, beside nvcc, and in Python's packages (pip install nvidia-cuda-cuobjdump).
No GPU is needed.

For wgmma kernels the ledger also counts the R2UR (a value moved to a uniform register) and WARPSYNC
instructions in their main loops, where products wait for them. This needs nvdisasm in PATH or
beside cuobjdump; without it they are neither written nor compared.

--check reports a changed number of registers or R2UR, an added or removed kernel, code 5 % larger
or smaller, a library of 56 MB or more, and 8 MB or more of wgmma in it (whose machine code is
compressed there). Fast-path kernels should not use the stack, where spilled registers go: the end
of the file lists those that do, and --check reports any other kernel or any more bytes. With
--ninja-log FILE the compile times of the instances are printed as well. Dynamic shared memory is
not in the machine code: it follows from the tiles of src/cuda/arch/tables.h, and `tilewise_plan`
reports it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine_code import bytes_inside, code_bytes, main_loop

ROOT = Path(__file__).resolve().parents[1]
LEDGER = ROOT / "docs" / "results" / "cuda-ledger.txt"
LARGEST_LIBRARY = 56_000_000
CODE_TOLERANCE = 0.05
LARGEST_FAMILY = {"wgmma": 8_000_000}
# Goal for a family on two cores, in seconds: reported, but not enforced, since the machine may have
# had other work.
LONGEST_FAMILY = {"wgmma": 180}
VARIANTS = {"Phase": "-decode", "TileSize": "-small"}  # by the enumeration whose value is 1
ELEMENTS = ("BF16", "F16", "Tf32", "F32", "E4M3")
HEAD = ("sm", "family", "kernel", "table", "element", "D", "form",
        "registers", "stack", "shared", "code", "R2UR", "WARPSYNC")  # fmt: skip


class LedgerError(Exception):
    """The message is meant for the user."""


@dataclass(frozen=True, order=True)
class Key:
    """Identifies a kernel and the GPU it is compiled for."""

    sm: int
    family: str
    kernel: str
    table: str
    element: str
    head_dim: int
    head_dim_v: int  # wgmma only; 0: equal to head_dim
    form: str

    def instance(self) -> tuple[object, ...]:
        """The kernels that are compiled together with this one."""
        return (self.sm, self.family, self.table, self.element, self.head_dim, self.head_dim_v)

    def cells(self) -> list[str]:
        """The columns of the file."""
        dims = [str(d) for d in (self.head_dim, self.head_dim_v) if d]
        return [str(self.sm), self.family, self.kernel, self.table, self.element,
                "x".join(dims) or "-", self.form]  # fmt: skip

    def __str__(self) -> str:
        return " ".join(self.cells())


@dataclass(frozen=True)
class Cost:
    """The resources of a kernel, in bytes except registers and instructions of the main loops."""

    registers: int
    stack: int
    shared: int
    code: int
    r2ur: int | None = None  # None: no loop with wgmma, or no disassembler
    warpsync: int | None = None


Ledger = dict[Key, Cost]


@dataclass
class Family:
    """The machine code files of a family: their number, bytes, and compressed bytes in the
    library.
    """

    files: int = 0
    code: int = 0
    inside: int = 0


Families = dict[str, Family]


def identifiers(mangled: str) -> list[str]:
    """The nested name at the start of a mangled one: ["tilewise", "cuda", "simt", "forward"]."""
    names, rest = [], mangled.removeprefix("_ZN")
    while found := re.match(r"\d+", rest):
        end = found.end() + int(found.group())
        names.append(rest[found.end() : end])
        rest = rest[end:]
    return names


def key_of(mangled: str, sm: int) -> Key:
    """Parses the name of a kernel."""
    names = identifiers(mangled)
    arguments = mangled[mangled.find("I", sum(len(n) + len(str(len(n))) for n in names) + 3) :]
    element = next((e for e in ELEMENTS if re.search(rf"\d{e}E", arguments)), "-")
    table = re.search(r"\d(Sm\d+)E", arguments)
    dims = [int(d) for d in re.findall(r"Li(\d+)E", arguments)] + [0, 0]
    form = re.search(r"FormE(\d)E", arguments)
    variant = re.search(r"(Phase|TileSize)E1E", arguments)
    name = (
        ("plain", "general", "masked", "paged", "tma", "tma-paged")[int(form[1])] if form else "-"
    )
    if row := re.search(r"\d(Split|Chunk)RowE", arguments):  # whose partial results are combined
        name = row[1].lower() + "s"
    return Key(
        sm=sm,
        family=names[-2] if len(names) > 1 else "-",
        kernel=names[-1] if names else mangled,
        table=table[1] if table else "-",
        element=element,
        head_dim=dims[0],
        head_dim_v=dims[1] if dims[1] != dims[0] else 0,
        form=name + (VARIANTS[variant[1]] if variant else ""),
    )


def find_cuobjdump() -> str:
    """The path of cuobjdump.

    Raises:
        LedgerError: It is not found.
    """
    candidates = [os.environ.get("CUOBJDUMP"), shutil.which("cuobjdump")]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().with_name("cuobjdump")))
    candidates.append("/usr/local/cuda/bin/cuobjdump")
    packages = Path(sysconfig.get_paths()["purelib"])
    candidates += [str(p) for p in sorted(packages.glob("nvidia/cu*/bin/cuobjdump"))]
    for candidate in candidates:
        if candidate and Path(candidate).is_file():
            return candidate
    raise LedgerError("cuobjdump is not found: pip install nvidia-cuda-cuobjdump, or set CUOBJDUMP")


def beside(program: str) -> dict[str, str]:
    """An environment in which the program finds nvdisasm in its own folder."""
    return {**os.environ, "PATH": f"{Path(program).parent}{os.pathsep}{os.environ['PATH']}"}


def output_of(*command: str, folder: Path | None = None, env: dict[str, str] | None = None) -> str:
    """The output of a command.

    Raises:
        LedgerError: The command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise LedgerError(f"{command[0]} {command[-1]}: {''.join(last) or 'failed'}")
    return done.stdout


def resources(text: str) -> Iterator[tuple[int, str, dict[str, int]]]:
    """(sm, mangled name, numbers) of each kernel of `cuobjdump --dump-resource-usage`."""
    sm, name = 0, ""
    for line in text.splitlines():
        if found := re.match(r"arch = sm_(\d+)", line):
            sm = int(found[1])
        elif found := re.match(r"\s*Function (\S+):", line):
            name = found[1]
        elif name and "REG:" in line:
            yield sm, name, {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}
            name = ""


def main_loops(cubin: Path, cuobjdump: str) -> dict[str, tuple[int, int]]:
    """`main_loop` of each kernel that has one; empty without a disassembler."""
    env = beside(cuobjdump)
    if shutil.which("nvdisasm", path=env["PATH"]) is None:
        return {}
    text = output_of(cuobjdump, "--dump-sass", str(cubin), env=env)
    loops = {}
    for function in text.split("Function : ")[1:]:
        name, _, code = function.partition("\n")
        if (counts := main_loop(code)) is not None:
            loops[name.strip()] = counts
    return loops


def number_of(cubin: Path) -> int:
    """The index of a cubin in the library: the third-last part of its file name."""
    return int(cubin.name.split(".")[-3])


def read(paths: Sequence[Path], cuobjdump: str) -> tuple[Ledger, Families]:
    """The kernels inside libraries or objects.

    Raises:
        LedgerError: There are none.
    """
    ledger: Ledger = {}
    families: Families = {}
    for path in paths:
        sizes: dict[tuple[int, str], int] = {}
        loops: dict[str, tuple[int, int]] = {}
        with tempfile.TemporaryDirectory() as folder:
            output_of(cuobjdump, "--extract-elf", "all", str(path.resolve()), folder=Path(folder))
            cubins = sorted(Path(folder).iterdir(), key=number_of)
            for cubin, inside in zip(cubins, bytes_inside(path.read_bytes()), strict=True):
                found = re.search(r"\.sm_(\d+)[a-z]?\.cubin$", cubin.name)
                if cubin.name.endswith("a.cubin"):  # architecture-specific code, which has wgmma
                    loops |= main_loops(cubin, cuobjdump)
                code = code_bytes(cubin.read_bytes())
                for name, size in code.items():
                    sizes[int(found[1]) if found else 0, name] = size
                for family in {key_of(name, 0).family for name in code}:
                    all_of = families.setdefault(family, Family())
                    all_of.files += 1
                    all_of.code += cubin.stat().st_size
                    all_of.inside += inside
        for sm, name, cost in costs(path, cuobjdump):
            cost = replace(
                cost,
                code=sizes.get((sm, name), 0),
                r2ur=loops[name][0] if name in loops else None,
                warpsync=loops[name][1] if name in loops else None,
            )
            if ledger.setdefault(key_of(name, sm), cost) != cost:
                raise LedgerError(f"{name} for sm_{sm} occurs twice with different costs")
    if not ledger:
        raise LedgerError(f"{', '.join(map(str, paths))}: no CUDA machine code inside")
    return ledger, families


def costs(path: Path, cuobjdump: str) -> Iterator[tuple[int, str, Cost]]:
    """(sm, mangled name, cost) of the kernels inside, without code sizes."""
    text = output_of(cuobjdump, "--dump-resource-usage", str(path.resolve()))
    for sm, name, numbers in resources(text):
        stack = numbers["STACK"] + numbers.get("LOCAL", 0)
        yield sm, name, Cost(numbers["REG"], stack, numbers["SHARED"], 0)


def compiler() -> str:
    """The version of nvcc: registers are only compared within one version."""
    nvcc = shutil.which("nvcc")
    found = re.search(r"V([\d.]+)", output_of(nvcc, "--version")) if nvcc else None
    return found[1] if found else "unknown"


def of_families(families: Families) -> list[str]:
    """One line per family."""
    return [
        f"{name}: {f.files} files of machine code, {f.code} bytes, {f.inside} inside the library"
        + (f" (at most {LARGEST_FAMILY[name] - 1} are allowed)" if name in LARGEST_FAMILY else "")
        for name, f in sorted(families.items())
    ]


def compile_times(log: str) -> list[str]:
    """One line per family from a build's .ninja_log: the seconds that its instances took."""
    seconds: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        cells = line.split("\t")
        instance = re.search(
            r"/cuda/(wgmma|mma_sync|simt)_\w+\.cu\.o$", cells[3] if cells[3:] else ""
        )
        if instance:  # the last line of an instance is the newest
            seconds.setdefault(instance[1], {})[cells[3]] = (int(cells[1]) - int(cells[0])) / 1e3
    return [
        f"{family}: {len(instances)} instances, {sum(instances.values()):.0f} s of compiling"
        + (f" (goal of all: {LONGEST_FAMILY[family]} s on two cores)"
           if family in LONGEST_FAMILY else "")
        for family, instances in sorted(seconds.items())
    ]  # fmt: skip


def of_library(library_bytes: int, families: Families) -> list[str]:
    """The lines about the whole library."""
    return [f"library {library_bytes} bytes", *of_families(families)]


def text_of(ledger: Ledger, nvcc: str, of_whole: Sequence[str]) -> str:
    """The text of the ledger file. `of_whole`: the lines about the whole library."""
    rows = [list(HEAD)]
    for key in sorted(ledger):
        cost = ledger[key]
        numbers = ("-" if x is None else str(x) for x in astuple(cost))
        rows.append([*key.cells(), *numbers])
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = [
        "# Kernels of the library: written by tools/cuda_ledger.py, compared by CI.",
        "# stack, shared (static) and code in bytes; R2UR, WARPSYNC: in a main loop of wgmma;",
        "# sm: the GPU that the machine code is for.",
        f"# nvcc {nvcc}",
        *(f"# {line}" for line in of_whole),
    ]
    for row in rows:
        left = (cell.ljust(w) for cell, w in zip(row[:7], widths[:7], strict=True))
        right = (cell.rjust(w) for cell, w in zip(row[7:], widths[7:], strict=True))
        lines.append("  ".join((*left, *right)).rstrip())
    debt = spilling(ledger)
    lines.append(f"# plain kernels that use the stack: {len(debt) or 'none'}")
    lines += [f"#   {key}: {cost.stack} bytes" for key, cost in debt]
    return "\n".join(lines) + "\n"


def parse_text(text: str) -> tuple[Ledger, str]:
    """Parses the output of `text_of` into kernels and the version of nvcc."""
    ledger: Ledger = {}
    nvcc = "unknown"
    for line in text.splitlines():
        cells = line.split()
        if line.startswith("# nvcc"):
            nvcc = cells[2]
        if line.startswith("#") or not cells or cells[0] == HEAD[0]:
            continue
        sm, family, kernel, table, element, head_dim, form = cells[:7]
        dims = [int(d) for d in head_dim.replace("-", "0").split("x")] + [0]
        key = Key(int(sm), family, kernel, table, element, dims[0], dims[1], form)
        numbers: list[Any] = [None if x == "-" else int(x) for x in cells[7:]]
        ledger[key] = Cost(*numbers)
    return ledger, nvcc


def with_part(now: Ledger, nvcc: str, text: str) -> str:
    """The text of a ledger file in which the instances of `now` are replaced. The lines about the
    whole library stay as they are.

    Raises:
        LedgerError: The file is of another compiler.
    """
    before, their_nvcc = parse_text(text)
    if their_nvcc != nvcc:
        raise LedgerError(f"the ledger is of nvcc {their_nvcc}, but this is nvcc {nvcc}")
    instances = {key.instance() for key in now}
    kept = {key: cost for key, cost in before.items() if key.instance() not in instances}
    of_whole = re.findall(r"^# ((?:library|\w+:) .* bytes\b.*)$", text, re.MULTILINE)
    return text_of({**kept, **now}, nvcc, of_whole)


def spilling(ledger: Ledger) -> list[tuple[Key, Cost]]:
    """Fast-path kernels that use the stack."""
    return [(k, c) for k, c in sorted(ledger.items()) if k.form.startswith("plain") and c.stack > 0]


def faults(now: Ledger, before: Ledger, library_bytes: int, families: Families) -> list[str]:
    """Faults that do not depend on the compiler of the committed file."""
    found = [
        f"{key}: {cost.stack} bytes of stack in a plain kernel (spilled registers)"
        for key, cost in spilling(now)
        if key not in before or cost.stack > before[key].stack
    ]
    if library_bytes >= LARGEST_LIBRARY:
        allowed = LARGEST_LIBRARY - 1
        found.append(f"the library has {library_bytes} bytes, at most {allowed} are allowed")
    found += [
        f"{name} has {families[name].inside} bytes of the library, "
        f"at most {largest - 1} are allowed"
        for name, largest in LARGEST_FAMILY.items()
        if name in families and families[name].inside >= largest
    ]
    return found


def differences(now: Ledger, before: Ledger, *, part: bool = False) -> list[str]:
    """One line per difference; only GPUs (with `part`, instances) that `now` has code for are
    compared.
    """
    found = []
    gpus, instances = {key.sm for key in now}, {key.instance() for key in now}
    for key in sorted({*now, *before}):
        if key.sm not in gpus or (part and key.instance() not in instances):
            continue
        if key not in now or key not in before:
            found.append(f"{key}: {'gone' if key not in now else 'new'}")
            continue
        new, old = now[key], before[key]
        for name in ("registers", "stack", "shared", "r2ur", "warpsync"):
            a, b = getattr(new, name), getattr(old, name)
            if a != b and None not in (a, b):
                found.append(f"{key}: {name} {b} -> {a}")
        if abs(new.code - old.code) > CODE_TOLERANCE * old.code:
            found.append(f"{key}: code {old.code} -> {new.code} bytes")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="the library, or object files")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--part", action="store_true", help="only some instances are in the files")
    parser.add_argument("--ledger", type=Path, default=LEDGER, metavar="FILE")
    parser.add_argument("--ninja-log", type=Path, metavar="FILE", help=".ninja_log of the build")
    options = parser.parse_args(arguments)
    try:
        (now, families), nvcc = read(options.files, find_cuobjdump()), compiler()
        times = compile_times(options.ninja_log.read_text()) if options.ninja_log else []
    except (LedgerError, OSError) as error:
        print(f"cuda_ledger: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in options.files)
    print("\n".join([*of_families(families), *times]))
    if not options.check:
        options.ledger.parent.mkdir(parents=True, exist_ok=True)
        try:
            text = (
                with_part(now, nvcc, options.ledger.read_text())
                if options.part
                else text_of(now, nvcc, of_library(size, families))
            )
        except (LedgerError, OSError) as error:
            print(f"cuda_ledger: {error}", file=sys.stderr)
            return 2
        options.ledger.write_text(text)
        spills = len(spilling(now))
        print(f"{len(now)} kernels in {options.ledger}, {spills} plain ones use the stack")
        return 0
    if not options.ledger.exists():
        print(f"{options.ledger} does not exist: write it by leaving --check out")
        return 1
    before, their_nvcc = parse_text(options.ledger.read_text())
    same = their_nvcc == nvcc
    if not same:
        print(f"Registers NOT compared: the ledger is of nvcc {their_nvcc}, this is nvcc {nvcc}")
    found = faults(now, before if same else now, size, families) + (
        differences(now, before, part=options.part) if same else []
    )
    print("\n".join(found) or f"{len(now)} kernels, {size} bytes: nothing to object to")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
