#!/usr/bin/env python3
"""Checks that a wheel of Tilewise is complete and installable.

  python tools/check_wheel.py dist/tilewise-*.whl             checks contents and dependencies
  python tools/check_wheel.py dist/tilewise-*.whl --run DIR   installs it in a new environment DIR
                                                              and computes there, without a compiler
  ... --run DIR --python "COMMAND"    unpacks it into DIR and computes with this interpreter, which
                                      has NumPy, such as one of another architecture under QEMU
  ... --glibc 2.28                    also requires that it loads on systems with this glibc

Contents: one tag for every Python, below 56 MB, the library and its adapters, headers and CMake
package, and no build files; all machine code is of the architecture in the name. Dependencies: the
C++ runtime, and PyTorch for the adapter, but not Python's C API; `auditwheel` checked the versions
of their symbols when it assigned the tag. With CUDA: machine code or PTX of every kernel for every
GPU of src/cuda/arch/limits.h.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import manylinux_stubs

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 56_000_000
TAG = re.compile(
    r"tilewise-(?P<version>[^-]+)-py3-none-manylinux_2_(?P<glibc>\d+)_(?P<machine>\w+)\.whl"
)
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}  # as readelf says
WANTED = (
    "tilewise/lib/libtilewise.so",
    "tilewise/lib/libtilewise_torch.so",
    "tilewise/lib/libtilewise_jax.so",
    "tilewise/lib/cmake/tilewise/tilewise-config.cmake",
    *(f"tilewise/{header.relative_to(ROOT)}" for header in ROOT.glob("include/tilewise/*")),
    "tilewise/cli/provenance.json",
)
UNWANTED = re.compile(r"\.(cu|cuh|o|a|cpp|pyc|map|s)$|^tests/|/build/")
SYSTEM = re.compile(r"(libc|libm|libdl|libpthread|librt|libgcc_s|libstdc\+\+|ld-linux[\w-]*)\.so")
CORE = re.compile(r"libtilewise\.so")
TORCH = re.compile(r"lib(torch|torch_cpu|c10)\.so")
ADAPTERS = {"libtilewise_torch.so": [CORE, TORCH], "libtilewise_jax.so": [CORE]}
PROGRAM = """
import sys

import numpy as np

import tilewise

q, k, v = (np.random.default_rng(i).standard_normal((2, 40, 4, 32), np.float32) for i in range(3))
out, lse = tilewise.attention(q, k, v, causal=True, return_lse=True)
gradients = tilewise.attention_backward(out, q, k, v, out, lse, causal=True)
s = np.einsum("bihd,bjhd->bhij", q.astype(float), k) / np.sqrt(32)
s[..., np.triu(np.ones((40, 40), bool), 1)] = -np.inf
p = np.exp(s - s.max(-1, keepdims=True))
want = np.einsum("bhij,bjhd->bihd", p / p.sum(-1, keepdims=True), v)
np.testing.assert_allclose(out, want, atol=2e-6)
assert all(np.isfinite(g).all() and g.any() for g in gradients[:3])
assert "torch" not in sys.modules
print(tilewise.__version__)
"""


class WheelError(Exception):
    """A check could not run; the message is for the user."""


def run(*command: str | Path, **environment: str) -> str:
    """The output of a command in an environment with these variables and no others; if none are
    given, in that of this process.

    Raises:
        WheelError: The command failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, env=environment or None)
    if done.returncode != 0:
        raise WheelError(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def machine(library: Path) -> str:
    """The architecture of a library, in the words of readelf."""
    found = re.search(r"Machine:\s+(.*)", run("readelf", "--file-header", library))
    return found[1].strip() if found else "unknown"


def dynamic(library: Path) -> tuple[list[str], list[str]]:
    """The libraries that a library needs, and its search path."""
    text = run("readelf", "--dynamic", "--wide", library)
    return (re.findall(r"\(NEEDED\).*\[(.*)\]", text),
            re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text))  # fmt: skip


def faults(wheel: Path, glibc: str | None = None) -> Iterator[str]:
    """Everything that is wrong with the file, which should load on systems with `glibc`."""
    tag = TAG.fullmatch(wheel.name)
    if not tag:
        yield "the name is not tilewise-VERSION-py3-none-manylinux_2_N_MACHINE.whl"
    elif glibc and int(tag["glibc"]) > int(glibc.partition(".")[2]):
        yield f"needs glibc 2.{tag['glibc']}: at most {glibc} is allowed"
    size = wheel.stat().st_size
    if size >= LARGEST:
        yield f"has {size} bytes, at most {LARGEST - 1} are allowed"
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        yield from (f"lacks {name}" for name in WANTED if name not in names)
        yield from (f"must not contain {name}" for name in names if UNWANTED.search(name))
        wanted = MACHINES.get(tag["machine"], "none") if tag else ""
        for name in names:
            with archive.open(name) as file:
                if file.read(4) != b"\x7fELF":
                    continue
            yield from library_faults(name, Path(archive.extract(name, folder)), wanted)


def python_api(library: Path) -> list[str]:
    """The functions and objects of Python's C API that a library uses. It should use none: then it
    serves every Python, and a free-threaded one does not turn its GIL on to load it.
    """
    text = run("readelf", "--dyn-syms", "--wide", library)
    return re.findall(r"\bUND (_?Py\w+)", text)


def library_faults(name: str, library: Path, wanted: str) -> Iterator[str]:
    """Everything that is wrong with a library, whose machine code should be of `wanted`, unless
    that is empty.
    """
    found = machine(library)
    if wanted and found != wanted:
        yield f"{name} has machine code of {found}, not of {wanted}"
    if used := python_api(library):
        yield f"{name} uses Python's C API: {', '.join(used)}"
    needed, paths = dynamic(library)
    allowed = [SYSTEM, *ADAPTERS.get(Path(name).name, ())]
    for each in needed:
        if not any(pattern.match(each) for pattern in allowed):
            yield f"{name} needs {each}"
    if [path for path in paths if path != "$ORIGIN"]:
        yield f"{name} looks for libraries in {paths}: only $ORIGIN is allowed"


def runs_on(sm: int, code: dict[str, int]) -> bool:
    """The rule of `runs_on` in src/cuda/kernel_set.h."""
    if code["ptx"]:
        return code["sm"] <= sm
    return code["sm"] // 10 == sm // 10 and code["sm"] <= sm


def gpus_without_code(code: Sequence[dict[str, int]]) -> Iterator[str]:
    """GPUs for which a build with CUDA lacks kernels; none for a build without CUDA."""
    text = (ROOT / "src" / "cuda" / "arch" / "limits.h").read_text()
    for sm, table in re.findall(r"Limits\{\.sm = (\d+), \.table = (\d+),", text):
        for wanted in (0, int(table)):
            rows = [row for row in code if row["table"] == wanted]
            if code and not any(runs_on(int(sm), row) for row in rows):
                yield f"no code of {f'tile table sm_{wanted}' if wanted else 'simt'} for sm_{sm}"


def install(wheel: Path, folder: Path) -> tuple[list[str | Path], dict[str, str]]:
    """Installs the wheel in a new environment with NumPy: (its interpreter, variables without
    which the machine's compilers would be found).
    """
    venv.create(folder, clear=True, with_pip=True)
    commands = folder / "bin"
    run(commands / "pip", "install", "--quiet", wheel, "numpy", **os.environ)
    bare = {"PATH": str(commands.resolve()), "HOME": str(folder.resolve())}
    run(commands / "tilewise", "--version", **bare)
    return [commands / "python"], bare


def unpack(wheel: Path, folder: Path, command: str) -> tuple[list[str | Path], dict[str, str]]:
    """Unpacks the wheel for an interpreter of another environment: (its words, variables)."""
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    variables = {name: value for name, value in os.environ.items() if "TILEWISE" not in name}
    return [*shlex.split(command)], {**variables, "PYTHONPATH": str(folder.resolve())}


def compute(wheel: Path, python: Sequence[str | Path], variables: dict[str, str]) -> Iterator[str]:
    """Everything wrong with the wheel in this interpreter; prints the doctor's report."""
    version = run(*python, "-c", PROGRAM, **variables).strip()
    found = TAG.fullmatch(wheel.name)
    if found and version != found["version"]:
        yield f"tilewise.__version__ is {version}"
    doctor = (*python, "-m", "tilewise", "doctor")
    facts = json.loads(run(*doctor, "--json", **variables))
    if not facts["passed"]:
        yield "the doctor's self-test fails"
    yield from gpus_without_code(facts["cuda_code"])
    print(run(*doctor, "--no-test", **variables).partition("\n\n")[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--run", type=Path, metavar="DIR")
    parser.add_argument("--python", metavar="COMMAND")
    parser.add_argument("--glibc", choices=manylinux_stubs.POLICIES)
    options = parser.parse_args(arguments)
    try:
        found = list(faults(options.wheel, options.glibc))
        if options.run:
            wheel = options.wheel.resolve()
            if options.python:
                found += compute(wheel, *unpack(wheel, options.run, options.python))
            else:
                found += compute(wheel, *install(wheel, options.run))
    except (WheelError, OSError, zipfile.BadZipFile) as error:
        print(f"check_wheel: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"{options.wheel.name}: {options.wheel.stat().st_size} bytes, good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
