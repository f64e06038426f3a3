"""Stages on several GPUs at once: a lane is a process of tools/gpu_check.py that sees one GPU."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import provenance
from .processes import PYTHON, ROOT, run_all, say

# Stages of which each needs one GPU and no result of the other lane. The sanitizer takes about as
# long as the others together, most of it on the CPU.
LANES = (("tests", "prove", "train", "models", "bench"), ("sanitizer",))
REPORTED = (0, 1)  # exit statuses of a process that has reported on all its stages
JOBS = 0.6  # of all jobs for each lane, which at times waits for its GPU


def gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        command = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
        return provenance.subprocess_text(*command).split()
    return [name for name in visible.split(",") if name]


def groups(stages: Sequence[str], devices: Sequence[str]) -> list[list[list[str]]]:
    """The stages as groups, one after the other, of lanes that run at once."""
    lanes = [own for lane in LANES if (own := [name for name in stages if name in lane])]
    if len(lanes) < 2 or len(devices) < len(lanes):
        return [[[name]] for name in stages]
    first = min(stages.index(lane[0]) for lane in lanes)
    alone = [(i, name) for i, name in enumerate(stages) if not any(name in lane for lane in lanes)]
    earlier = [[[name]] for i, name in alone if i < first]
    return [*earlier, lanes, *([[name]] for i, name in alone if i > first)]


def run(
    lanes: list[list[str]], devices: Sequence[str], options: list[str], before: dict[str, Any],
    folder: Path, limit: float,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Runs the lanes at once, each on a GPU of its own.

    Args:
        options: Those of tools/gpu_check.py that every lane gets.
        before: The result from which the lanes continue; empty if there is none.
        folder: For the results and logs of the lanes.

    Returns:
        The reports of the stages.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {lane[0]: folder / f"{lane[0]}.json" for lane in lanes}
    for file in files.values():
        file.unlink(missing_ok=True)
        if before:
            file.write_text(json.dumps(before))
    program = [PYTHON, str(ROOT / "tools" / "gpu_check.py"), *options]
    commands = {
        lane[0]: [*program, "--stages", ",".join(lane), "--result", str(files[lane[0]])]
        for lane in lanes
    }
    env = {
        lane[0]: {"CUDA_VISIBLE_DEVICES": device}
        for lane, device in zip(lanes, devices, strict=False)
    }
    ended = run_all(commands, limit, folder, env)
    reports: dict[str, dict[str, Any]] = {}
    for lane in lanes:
        process, file = ended[lane[0]], files[lane[0]]
        for line in process.output().splitlines():
            if line.startswith(("  ", "==")):
                say(line)
        found = json.loads(file.read_text())["stages"] if file.is_file() else {}
        old = {} if process.status in REPORTED else before.get("stages", {})
        why = {"passed": False, "seconds": round(process.seconds),
               "why": f"its process ended with status {process.status}"}  # fmt: skip
        for name in lane:
            finished = name in found and found[name] != old.get(name)
            reports[name] = found[name] if finished else why
    return reports
