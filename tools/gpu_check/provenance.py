"""The provenance of a result: the kernel sources, the machine and its software."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels_hash import kernels_hash

from .processes import ROOT

KERNEL_SOURCES = ("src/cuda", "src/attention", "src/base")
RESULTS = ROOT / "docs" / "results"


# Matches a string, which is kept, or a comment or white space, which is dropped.
LAYOUT = re.compile(rb'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/|\s+', re.DOTALL)


def source_hash(root: Path = ROOT, without: Iterable[Path] = ()) -> str:
    """Hash of the names and code of the kernel sources, except those in the folders `without`;
    comments and layout do not count.
    """
    digest = hashlib.sha256()
    for source in KERNEL_SOURCES:
        for path in sorted((root / source).rglob("*")):
            left_out = any(path.is_relative_to(folder) for folder in without)
            if path.is_file() and not path.name.startswith(".") and not left_out:
                digest.update(path.relative_to(root).as_posix().encode() + b"\0")
                digest.update(LAYOUT.sub(rb"\1", path.read_bytes()) + b"\0")
    return digest.hexdigest()[:16]


def family_hashes(root: Path = ROOT) -> dict[str, str]:
    """The hash of each CUDA family: of all kernel sources but those of the other families."""
    folders = {path.parent.name: path.parent for path in root.glob("src/cuda/*/family.cpp")}
    return {
        name: source_hash(root, [folder for other, folder in folders.items() if other != name])
        for name in sorted(folders)
    }


def _first_line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def gpu() -> dict[str, str]:
    """The first GPU as nvidia-smi describes it; empty if there is none."""
    names = "name,compute_cap,driver_version,memory.total"
    line = _first_line("nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader")
    fields = [x.strip() for x in line.split(",")]
    if len(fields) != 4 or not re.fullmatch(r"\d+\.\d", fields[1]):
        return _gpu_of_torch()
    return dict(zip(("name", "compute_capability", "driver", "memory"), fields, strict=True))


def _gpu_of_torch() -> dict[str, str]:
    """The same from torch, where nvidia-smi is not in PATH."""
    try:
        import torch
    except ImportError:
        return {}
    if not torch.cuda.is_available():
        return {}
    facts = torch.cuda.get_device_properties(0)
    return {
        "name": facts.name,
        "compute_capability": f"{facts.major}.{facts.minor}",
        "driver": "unknown",
        "memory": f"{facts.total_memory // 2**20} MiB",
    }


def versions() -> dict[str, str]:
    """Versions of the tools that build and run."""
    found = {"python": platform.python_version()}
    for name in ("torch", "numpy", "triton", "jax"):
        try:
            module = __import__(name)
        except ImportError:
            continue
        found[name] = module.__version__
    nvcc = subprocess_text("nvcc", "--version")
    release = re.search(r"release ([\d.]+)", nvcc)
    if release:
        found["nvcc"] = release.group(1)
    found["compiler"] = _first_line("c++", "--version")
    header = (ROOT / "include" / "tilewise" / "version.h").read_text()
    found["tilewise"] = ".".join(re.findall(r"define TILEWISE_VERSION_\w+\s+(\d+)", header)[:3])
    found["commit"] = _first_line("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    return {name: text for name, text in found.items() if text}


def subprocess_text(*command: str) -> str:
    """The output of a command; empty if it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def slug(name: str) -> str:
    """A GPU's name for use in file names: NVIDIA H200 becomes h200."""
    words = re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-")
    return words or "unknown"


def write(result: dict[str, Any], path: Path) -> None:
    """Writes atomically: an interrupted run leaves the previous complete file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def verify() -> list[str]:
    """One line per committed result: whether it was measured with the present kernels.

    Either the kernel sources or the machine code (`kernels_hash`) must be the same, so names,
    comments and host code make no result stale.
    """
    now, code = source_hash(), kernels_hash()
    lines = []
    for path in sorted(RESULTS.glob("gpu-*.json")):
        try:
            result = json.loads(path.read_text())
            where = f"{result['gpu']['name']}, {result['date']}"
            passed = "all stages passed" if result["passed"] else "NOT all stages passed"
            stages = result["stages"].items()
            not_run = [name for name, stage in stages if "not_run" in stage]
            not_run += [x for _, stage in stages for x in stage.get("left_out", ())]
            passed += f", NOT run: {'; '.join(not_run)}" if not_run else ""
            sources, machine_code = result["sources"], result.get("kernels")
        except (ValueError, KeyError, TypeError) as error:
            lines.append(f"{path.name}: not readable ({error})")
            continue
        if sources == now:
            lines.append(f"{path.name}: CURRENT kernel sources ({now}) on {where}: {passed}")
        elif machine_code == code:
            lines.append(f"{path.name}: CURRENT machine code ({code}) on {where}: {passed}")
        else:
            lines.append(
                f"{path.name}: OLDER kernel sources ({sources}, now {now}) on {where}: {passed}"
            )
    return lines or [f"no GPU result is committed; the kernel sources are {now}"]
