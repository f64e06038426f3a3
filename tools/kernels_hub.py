#!/usr/bin/env python3
"""Lays a wheel of Tilewise out as a kernel repository of the Hugging Face Hub.

  python tools/kernels_hub.py WHEEL... FOLDER

FOLDER/build/VARIANT/ gets the package, an ``__init__.py`` (packages/kernels-hub) and
``metadata.json``. A variant is the oldest PyTorch of the stable ABI, the backend and the processor:
``torch-stable-abi210-cpu-x86_64-linux``. A wheel with GPU code becomes two variants, for PyTorch
with CUDA and for PyTorch without.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
INIT = ROOT / "packages" / "kernels-hub" / "kernel.py"
KERNEL_VERSION = 1  # of the repository; it increases with every published change
OLDEST_KERNELS = "0.17.0"  # older versions of `kernels` do not know the variants of the stable ABI
WHEEL = re.compile(r"tilewise-(?P<version>[^-]+)-py3-none-\w+linux_2_\d+_(?P<processor>\w+)\.whl")
# A program that imports the kernel has no use for these.
LEFT_OUT = re.compile(r"tilewise/(include|lib/(cmake|pkgconfig))/|\.dist-info/")


def stated(file: str, pattern: str) -> str:
    """The number that a file of the project states."""
    found = re.search(pattern, (ROOT / file).read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit(f"{file} has no line {pattern!r}")
    return found[1].replace(".", "")


def backends(library: bytes) -> dict[str, str]:
    """The backends of the library, by their names in variants."""
    found = {"cpu": "cpu"}
    if b".nv_fatbin" in library:
        found["cu" + stated("tools/setup.sh", r"^readonly cuda_release=([\d.]+)$")] = "cuda"
    return found


def digest(variant: Path) -> dict[str, object]:
    """The hashes of all files but metadata.json, which contains them."""
    files = sorted(x for x in variant.rglob("*") if x.is_file() and x.name != "metadata.json")
    return {
        "algorithm": "sha256",
        "files": {
            file.relative_to(variant).as_posix(): base64.b64encode(
                hashlib.sha256(file.read_bytes()).digest()
            ).decode()
            for file in files
        },
    }


def lay_out(wheel: Path, folder: Path) -> list[Path]:
    """Writes the variants of a wheel; returns their folders."""
    name = WHEEL.fullmatch(wheel.name)
    if name is None:
        raise SystemExit(f"{wheel} is not a wheel of Tilewise for Linux")
    abi = stated("pyproject.toml", r'^torch = \["torch>=([\d.]+)"\]$')
    made = []
    with zipfile.ZipFile(wheel) as archive:
        members = [x for x in archive.namelist() if not LEFT_OUT.search(x)]
        for short, backend in backends(archive.read("tilewise/lib/libtilewise.so")).items():
            variant = folder / "build" / f"torch-stable-abi{abi}-{short}-{name['processor']}-linux"
            shutil.rmtree(variant, ignore_errors=True)
            archive.extractall(variant, members)
            shutil.copy(INIT, variant / "__init__.py")
            (variant / "version.txt").write_text(name["version"] + "\n")
            metadata = {
                "id": f"_tilewise_{backend}_v{KERNEL_VERSION}",
                "name": "tilewise",
                "version": KERNEL_VERSION,
                "kernels-minver": OLDEST_KERNELS,
                "license": "BSD-3-Clause",
                "python-depends": [],
                "backend": {"type": backend},
                "digest": digest(variant),
            }
            (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
            made.append(variant)
    return made


def main() -> int:
    """Runs the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path, nargs="+")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    for wheel in options.wheel:
        print("\n".join(map(str, lay_out(wheel, options.folder))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
