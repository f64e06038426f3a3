"""Include lint: each layer includes only lower ones (docs/architecture.md).

    base <- attention <- { cpu, cuda/ptx <- cuda/tile <- kernels <- cuda <- families } <- dispatch
      <- capi <- bindings

Families (cpu and the folders of src/cuda that hold kernels) never include each other. The host code
of a CUDA family (family.*, plan.*, instances.h and sources) uses the planners' and launchers'
shared code in src/cuda; its kernels do not. Layers below the kernels include neither CUDA headers
nor intrinsics. Run: python tools/lint_includes.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from lint_common import CXX_SUFFIXES, Finding, read_text, run_lint

CUDA_FAMILIES = ("cuda/simt", "cuda/mma_sync", "cuda/wgmma", "cuda/tcgen05")
_HOSTS = tuple(f"{family}/host" for family in CUDA_FAMILIES)
# Headers of a family's folder for host code; its sources (.cpp) are host code as well.
_HOST_HEADERS = ("family.h", "instances.h", "plan.h")
_BELOW_FAMILIES = (
    "base",
    "attention",
    "cuda/params",
    "cuda/ptx",
    "cuda/tile",
    "cuda/arch",
    "cuda/common",
)
# Headers of src/cuda that kernels and host code share; the others there belong to host code.
_SHARED = (
    "cta_placement",
    "element",
    "form",
    "params",
    "pdl_trigger",
    "stream_k_tail",
    "tensor_map",
    "tile_descriptor",
    "tile_order",
)
_SHARED_WITH_KERNELS = tuple(f"{name}.h" for name in _SHARED)
# Layers with an emulated half: tests/emulator runs a CTA on the host instead of a GPU.
_EMULATOR_USERS = ("cuda/ptx", "cuda")

# The layers that a layer may include besides itself and the public header. A folder that is not
# listed here is an error, so a new one must be given its place first.
ALLOWED: dict[str, tuple[str, ...]] = {
    "base": (),
    "attention": ("base",),
    "cpu": ("base", "attention"),
    "cuda/params": ("base", "attention"),
    "cuda/ptx": ("base", "cuda/params"),
    "cuda/arch": ("base",),
    "cuda/tile": ("base", "attention", "cuda/params", "cuda/ptx", "cuda/arch"),
    "cuda/common": ("base", "attention", "cuda/params", "cuda/ptx", "cuda/arch", "cuda/tile"),
    **dict.fromkeys(CUDA_FAMILIES, _BELOW_FAMILIES),
    "cuda": _BELOW_FAMILIES,
    **{f"{family}/host": (family, "cuda", *_BELOW_FAMILIES) for family in CUDA_FAMILIES},
    "dispatch": ("cpu", "cuda", *_HOSTS, *_BELOW_FAMILIES),
    "capi": ("dispatch", "cpu", "cuda", "base", "attention"),
    "public": (),
    "bindings": (),
    "examples": (),
}

_HARDWARE = re.compile(
    r"^(cuda|cuComplex|cooperative_groups|cutlass|cute/|cub/|thrust/|mma\.h|nv/|nvtx"
    r"|\w*intrin\.h|x86gprintrin|cpuid\.h|arm_(neon|sve|acle)|altivec)"
)
_FRAMEWORK = re.compile(r"^(torch/|ATen/|c10/|Python\.h|pybind11|numpy/)")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)


def layer_of(path: PurePosixPath) -> str | None:
    """The layer of a file, None for one that is free to include anything (tests, bench, tools)."""
    top, *rest = path.parts
    if top == "include":
        return "public"
    if top in ("bindings", "examples"):
        return top
    if top != "src":
        return None
    folders = rest[:-1]
    if not folders:
        return "?"
    if folders == ["cuda"]:
        return "cuda/params" if rest[-1] in _SHARED_WITH_KERNELS else "cuda"
    if folders == ["cuda", "common"] and rest[-1].startswith("kernels."):
        return "cuda"  # the table of launches, not a kernel
    if folders[0] == "cuda":
        layer = "/".join(folders[:2])
        host = path.suffix == ".cpp" or path.name in _HOST_HEADERS
        return f"{layer}/host" if host and layer in CUDA_FAMILIES else layer
    return folders[0]


def resolve(root: Path, including: PurePosixPath, name: str) -> PurePosixPath | None:
    """The file of the checkout that `#include "name"` means; None for one from outside."""
    for folder in (including.parent, PurePosixPath("src"), PurePosixPath("include")):
        parts: list[str] = []
        for part in (folder / name).parts:
            if part == ".." and parts:
                parts.pop()
            elif part != ".":
                parts.append(part)
        candidate = PurePosixPath(*parts)
        if (root / candidate).is_file():
            return candidate
    return None


def _broken_rule(layer: str, target: PurePosixPath) -> str | None:
    other = layer_of(target)
    if other in (layer, "public"):
        return None
    if other is None:
        return f"{layer} includes {target}: tests, benchmarks and tools are not part of the library"
    if other not in ALLOWED[layer]:
        allowed = ", ".join((*ALLOWED[layer], "itself", "include/tilewise"))
        return f"{layer} includes {target} of {other}; allowed: {allowed}"
    return None


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    path = PurePosixPath(file.as_posix())
    layer = layer_of(path) if path.suffix in CXX_SUFFIXES else None
    if layer is None:
        return
    if layer not in ALLOWED:
        yield Finding(
            str(path), 1, f"{path.parent} is not a layer that tools/lint_includes.py knows"
        )
        return
    text = read_text(root / file) or ""
    for match in _INCLUDE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        name = match.group(2)
        target = resolve(root, path, name)
        if target is not None:
            broken = _broken_rule(layer, target)
            if broken:
                yield Finding(str(path), line, broken)
        elif layer in ("base", "attention", "public") and _HARDWARE.match(name):
            yield Finding(str(path), line, f"{layer} includes {name}: plain C++20 only")
        elif layer not in ("bindings", "examples") and _FRAMEWORK.match(name):
            yield Finding(str(path), line, f"{layer} includes {name}: frameworks stay in bindings/")
        elif name.startswith("emulator/") and layer in _EMULATOR_USERS:
            continue
        elif match.group(1) == '"' and layer != "bindings":
            yield Finding(str(path), line, f'"{name}" is not a file of this project')


if __name__ == "__main__":
    sys.exit(run_lint("include lint", check))
