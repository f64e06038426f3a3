#!/usr/bin/env python3
"""Checks that a wheel of Tilewise is complete and installable.

  python tools/check_wheel.py dist/tilewise-*.whl             checks contents and dependencies
  python tools/check_wheel.py dist/tilewise-*.whl --run DIR   installs it in a new environment DIR
                                                              and computes there, without a compiler

Contents: one tag for every Python, below 56 MB, the library and its adapters, headers and CMake
package, and no build files. Dependencies: the C++ runtime, and PyTorch for the adapter;
`auditwheel` checked the versions of their symbols when it assigned the tag. With CUDA: machine code
or PTX of every kernel for every GPU of src/cuda/arch/limits.h.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 56_000_000
TAG = re.compile(r"tilewise-(?P<version>[^-]+)-py3-none-manylinux_2_\d+_\w+\.whl")
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


def dynamic(library: Path) -> tuple[list[str], list[str]]:
    """The libraries that a library needs, and its search path."""
    text = run("readelf", "--dynamic", "--wide", library)
    return (re.findall(r"\(NEEDED\).*\[(.*)\]", text),
            re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", text))  # fmt: skip


def faults(wheel: Path) -> Iterator[str]:
    """Everything that is wrong with the file."""
    if not TAG.fullmatch(wheel.name):
        yield "the name is not tilewise-VERSION-py3-none-manylinux_2_N_MACHINE.whl"
    size = wheel.stat().st_size
    if size >= LARGEST:
        yield f"has {size} bytes, at most {LARGEST - 1} are allowed"
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        yield from (f"lacks {name}" for name in WANTED if name not in names)
        yield from (f"must not contain {name}" for name in names if UNWANTED.search(name))
        for name in names:
            if not re.search(r"\.so(\.|$)", name):
                continue
            needed, paths = dynamic(Path(archive.extract(name, folder)))
            allowed = [SYSTEM, *ADAPTERS.get(Path(name).name, ())]
            for library in needed:
                if not any(pattern.match(library) for pattern in allowed):
                    yield f"{name} needs {library}"
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


def compute(wheel: Path, folder: Path) -> Iterator[str]:
    """Everything wrong with the wheel in a fresh environment; prints the doctor's report."""
    venv.create(folder, clear=True, with_pip=True)
    commands = folder / "bin"
    run(commands / "pip", "install", "--quiet", wheel, "numpy", **os.environ)
    bare = {"PATH": str(commands.resolve()), "HOME": str(folder.resolve())}  # no compiler
    version = run(commands / "python", "-c", PROGRAM, **bare).strip()
    found = TAG.fullmatch(wheel.name)
    if found and version != found["version"]:
        yield f"tilewise.__version__ is {version}"
    facts = json.loads(run(commands / "tilewise", "doctor", "--json", **bare))
    if not facts["passed"]:
        yield "the doctor's self-test fails"
    yield from gpus_without_code(facts["cuda_code"])
    print(run(commands / "tilewise", "doctor", "--no-test", **bare).partition("\n\n")[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--run", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    try:
        found = list(faults(options.wheel))
        if options.run:
            found += compute(options.wheel.resolve(), options.run)
    except (WheelError, OSError, zipfile.BadZipFile) as error:
        print(f"check_wheel: {error}", file=sys.stderr)
        return 2
    print("\n".join(found) or f"{options.wheel.name}: {options.wheel.stat().st_size} bytes, good")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
