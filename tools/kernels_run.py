#!/usr/bin/env python3
"""Where each CUDA kernel of the library has run.

  python tools/kernels_run.py                       lists them by family, table and place
  python tools/kernels_run.py LIBRARY FOLDER        whether every kernel inside this library is
                                                    among those that processes with
                                                    TILEWISE_LAUNCH_LIST=FOLDER launched,
                                                    or that a GPU has run

The kernels are those of docs/results/cuda-ledger.txt; a kernel with machine code for several GPUs
counts once. A kernel has run in the emulator if the emulator's preset builds it, because .ci/run
emulator fails if a kernel of its build was launched neither there nor on a GPU. A kernel has run on
a GPU if a result of gpu-check lists it; results that predate such lists count for all kernels of
the tile tables whose tests passed.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cuda_ledger
from cuda_ledger import ROOT

EMULATOR = "emulator"
RESULTS = ROOT / "docs" / "results"
PRESETS = ROOT / "CMakePresets.json"
# Families whose kernels the native tests of these GPUs alone run; no GPU has run those of tcgen05.
NATIVE: dict[str, set[str]] = {"wgmma": {"90"}, "tcgen05": set()}
OURS = "_ZN8tilewise4cuda"  # how symbols of the namespace tilewise::cuda begin
# A kernel as the ledger names it: family, kernel, table, element, D, form.
Kernel = tuple[str, ...]


def named(mangled: str) -> Kernel:
    """Parses the symbol of a kernel."""
    return tuple(cuda_ledger.key_of(mangled, 0).cells()[1:])


def known() -> set[Kernel]:
    """Every kernel of the library."""
    ledger, _ = cuda_ledger.parse_text(cuda_ledger.LEDGER.read_text())
    return {tuple(key.cells()[1:]) for key in ledger}


def symbols(library: Path) -> dict[int, str]:
    """The functions of a library by address."""
    lines = cuda_ledger.output_of("nm", str(library))
    found = re.findall(r"^([0-9a-f]+) [tTwW] (\S+)$", lines, re.MULTILINE)
    return {int(address, 16): name for address, name in found}


def launched(folder: Path, library: Path) -> set[Kernel]:
    """The kernels that processes have recorded in the folder (src/cuda/launch_list.h), also those
    that the ledger does not have yet.
    """
    lines = {x for path in folder.iterdir() if path.is_file() for x in path.read_text().split()}
    addresses = {x for x in lines if x.startswith("+")}
    functions = symbols(library) if addresses else {}
    names = {functions.get(int(x[1:], 16), x) if x in addresses else x for x in lines}
    return {named(x) for x in names if x.startswith(OURS)}


def inside(library: Path) -> set[Kernel]:
    """The kernels of a library: machine code, or functions of the emulator.

    Raises:
        LedgerError: cuobjdump is not found, or there are no kernels.
    """
    functions = symbols(library).values()
    if not any("8emulator" in name for name in functions):
        found = cuda_ledger.costs(library, cuda_ledger.find_cuobjdump())
        return {named(name) for _, name, _ in found}
    ours = {named(name) for name in functions if name.startswith(OURS)}
    return ours & known()


def not_launched(library: Path, folder: Path) -> list[str]:
    """Kernels inside the library that no process has launched."""
    return sorted(" ".join(k) for k in inside(library) - launched(folder, library))


def of_preset(preset: dict[str, Any], kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Kernels that the emulator's preset builds (for the options see TilewiseCuda.cmake)."""
    options = preset["cacheVariables"]

    def chosen(option: str, value: str, family: str, table: str) -> bool:
        named = {value, f"{family}:{value}", f"{table}:{value}"}
        values = options.get(option, "").split(";")
        return values == [""] or not named.isdisjoint(values)

    for kernel in kernels:
        family, _, table, element, dim, _ = kernel
        of_instance = dim != "-"  # the others are in every build
        head_dim = dim.partition("x")[0]
        if of_instance and not (
            chosen("TILEWISE_CUDA_HEAD_DIMS", head_dim, family, table)
            and chosen("TILEWISE_CUDA_ELEMENTS", element, family, table)
        ):
            continue
        if family != "mma_sync" or chosen("TILEWISE_CUDA_TABLES", table, family, table):
            yield kernel


def of_result(result: dict[str, Any], kernels: Iterable[Kernel]) -> Iterator[Kernel]:
    """Kernels that a result of gpu-check has run."""
    tests = result["stages"].get("tests", {})
    if "launched" in tests:
        yield from (tuple(line.split()) for line in tests["launched"])
        return
    # Reports are named "native", or "forced-80" where the tables of another GPU were forced.
    passed = {
        name.removeprefix("forced-")
        for name, report in tests.items()
        if isinstance(report, dict) and report.get("passed") and not report.get("failed")
    }
    sm = result["gpu"]["compute_capability"].replace(".", "")
    for family, *rest in kernels:
        table = rest[1].removeprefix("Sm")
        unforced = "native" in passed and table == "-" and sm in NATIVE.get(family, {sm})
        if unforced or table in passed:
            yield (family, *rest)


def on_gpus(kernels: set[Kernel]) -> dict[str, set[Kernel]]:
    """Kernels that each GPU of a committed result has run."""
    results = (json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu-*.json")))
    return {result["gpu"]["name"]: set(of_result(result, kernels)) for result in results}


def places() -> dict[Kernel, list[str]]:
    """Where each kernel of the library has run."""
    kernels = known()
    found: dict[Kernel, list[str]] = {kernel: [] for kernel in sorted(kernels)}
    presets = json.loads(PRESETS.read_text())["configurePresets"]
    preset = next(p for p in presets if p["name"] == "cuda-emulator")
    ran = {EMULATOR: set(of_preset(preset, kernels)), **on_gpus(kernels)}
    for place, kernels_there in ran.items():
        for kernel in kernels_there & kernels:
            found[kernel].append(place)
    return found


def report() -> list[str]:
    """How many kernels of each family and table have run where, and all that have run nowhere."""
    counts: dict[tuple[str, str], Counter] = {}
    found = places()
    for (family, _, table, *_), ran in found.items():
        counts.setdefault((family, table), Counter()).update(["kernels", *ran])
    lines = []
    for (family, table), count in sorted(counts.items()):
        where = ", ".join(f"{n} {place}" for place, n in count.items() if place != "kernels")
        lines.append(f"{family:9} {table:6} {count['kernels']:4} kernels: {where or 'nowhere'}")
    return lines + [f"has run nowhere: {' '.join(k)}" for k, ran in found.items() if not ran]


def main(arguments: list[str]) -> int:
    """Prints the list, or checks a build."""
    if not arguments:
        lines = report()
        print("\n".join(lines))
        return int(any(line.startswith("has run nowhere") for line in lines))
    if len(arguments) != 2:
        print((__doc__ or "").split("\n\n")[1], file=sys.stderr)
        return 2
    library, folder = map(Path, arguments)
    left = not_launched(library, folder)
    print(f"kernels: {len(inside(library))} inside {library.name}, {len(left)} not launched")
    of_gpus = {" ".join(kernel) for kernels in on_gpus(known()).values() for kernel in kernels}
    nowhere = [line for line in left if line not in of_gpus]
    for line in left:
        elsewhere = "and has run on no GPU" if line in nowhere else "but has run on a GPU"
        print(f"not launched, {elsewhere}: {line}")
    return int(bool(nowhere))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
