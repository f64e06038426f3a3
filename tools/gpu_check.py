#!/usr/bin/env python3
"""Tests a build on this machine's GPU and writes one result file.

  tools/gpu_check.py                          every stage; forced tile tables keep the tests
                                              that passed on the same code of their family
  tools/gpu_check.py --everything             every stage, and all tests again
  tools/gpu_check.py --stages build,tests     some of them
  tools/gpu_check.py --stages tests --resume  only the tests that have not passed yet; the same
                                              for the problems of the stage sanitizer
  tools/gpu_check.py --stages models --wheels DIR   installs packages that the machine lacks
  tools/gpu_check.py --verify                 whether the committed results match these sources

The check needs CUDA, PyTorch, CMake, Ninja, pytest and hypothesis, and no network. Every stage has
a time limit, and the result is written after each one; several GPUs run stages at once. Stages that
an earlier run on the same sources and GPU has passed stay in the file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_check import lanes, provenance
from gpu_check.processes import ROOT, say
from gpu_check.sanitizer import in_words
from gpu_check.setup import FORCED_FAMILY, Setup
from gpu_check.stages import STAGES, is_green

RESUMED = ("tests", "sanitizer")  # stages that --resume continues; their times add up
SHOWN = 12  # objections of a stage that the text of a result has; its JSON has all
NO_GPU = {"name": "no GPU", "compute_capability": "0.0", "driver": "none", "memory": "none"}


def outcome(stage: dict[str, Any]) -> str:
    """The outcome of a stage; one that lacks its requirements counts as not run."""
    return "passed" if stage["passed"] else "NOT run" if "not_run" in stage else "FAILED"


def by_kernel(served: dict[str, int]) -> str:
    """How many random problems each family has run, per direction."""
    directions: dict[str, list[str]] = {}
    for kernel, count in sorted(served.items(), key=lambda x: -x[1]):
        family, _, direction = kernel.removeprefix("cuda.").rpartition(".")
        directions.setdefault(direction, []).append(f"{family} {count}")
    order = sorted(directions.items(), reverse=True)  # forward first
    return "; ".join(f"{direction} {', '.join(families)}" for direction, families in order)


def details(stage: dict[str, Any]) -> list[str]:
    """The lines below a stage's own line."""
    lines = [stage[key] for key in ("why", "not_run") if isinstance(stage.get(key), str)]
    lines += [f"NOT run: {x}" for x in stage.get("left_out", ())]
    objections = stage.get("objections", ())
    lines += objections[:SHOWN]
    lines += [f"and {len(objections) - SHOWN} more"] if len(objections) > SHOWN else []
    for part, value in stage.items():
        if isinstance(value, dict) and "not_run" in value:
            counted = ", ".join(f"{n.replace('_', ' ')} {c}" for n, c in value.items()
                                if isinstance(c, int))  # fmt: skip
            lines.append(f"{part}: {counted}")
            if value.get("served"):
                lines.append(f"  random problems: {by_kernel(value['served'])}")
        elif isinstance(value, dict) and "errors" in value:
            lines.append(in_words(part, value))
    return [f"  {line}" for line in lines]


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    gpu, lines = result["gpu"], []
    lines.append(f"{gpu['name']}, driver {gpu['driver']}, sources {result['sources']}")
    lines.append(", ".join(f"{name} {text}" for name, text in result["versions"].items()))
    lines.append("")
    for name, stage in result["stages"].items():
        lines.append(f"{name:11} {outcome(stage):7}{stage['seconds']:5} s")
        lines += details(stage)
    left_out = [name for name in STAGES if name not in result["stages"]]
    if left_out:
        lines.append(f"NOT run: {', '.join(left_out)}")
    return "\n".join(lines) + "\n"


def read(path: Path, gpu: dict[str, str]) -> dict[str, Any]:
    """The existing result if it is of this GPU, else an empty one."""
    try:
        before = json.loads(path.read_text())
        return before if before["gpu"]["name"] == gpu["name"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def unchanged_tables(before: dict[str, Any]) -> dict[str, Any]:
    """Test results of forced tile tables whose family has the same code now, each with its date."""
    code = before.get("families", {}).get(FORCED_FAMILY)
    if code is None or code != provenance.family_hashes()[FORCED_FAMILY]:
        return {}
    tests = before.get("stages", {}).get("tests", {})
    return {
        name: {"date": before["date"], **found}
        for name, found in tests.items()
        if name.startswith("forced-") and is_green(found)
    }


def fresh(before: dict[str, Any], gpu: dict[str, str]) -> dict[str, Any]:
    """The result to continue: the existing one if its sources are the same. Equal machine code is
    not enough: the ledger, which says so, may be older than sources that are being changed.
    """
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "gpu": gpu,
        "versions": provenance.versions(),
        "sources": provenance.source_hash(),
        "kernels": provenance.kernels_hash(),
        "families": provenance.family_hashes(),
        "passed": False,
        "stages": {},
    }
    if before.get("sources") == result["sources"]:
        result["stages"] = before["stages"]
    return result


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tests a build on the GPU of this machine.")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--verify", action="store_true", help="only check the committed results")
    parser.add_argument("--result", type=Path, help="default: docs/results/gpu-<name>.json")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "gpu-check")
    parser.add_argument("--budget", type=float, default=1200, help="seconds for all stages")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--arch", help="compute capability to build for, 90; default: this GPU's")
    parser.add_argument("--cmake", action="append", default=[], help="option for the build")
    parser.add_argument(
        "--pytest", action="append", default=[], help="arguments of pytest in the tests stage"
    )
    parser.add_argument("--resume", action="store_true",
                        help="keep tests that passed on the same kernel sources")  # fmt: skip
    parser.add_argument("--everything", action="store_true",
                        help="run the tests of unchanged families again")  # fmt: skip
    parser.add_argument("--wheels", type=Path, help="folder of packages for the models stage")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda",
                        help="cpu tests the models stage itself")  # fmt: skip
    given = parser.parse_args()
    if given.resume and given.pytest:
        parser.error("--resume is for all tests: omit --pytest")
    if given.device == "cpu" and (given.stages != "models" or not given.result):
        parser.error("--device cpu is for --stages models with a --result of its own")
    return given


def run_stage(setup: Setup, name: str, limit: float) -> dict[str, Any]:
    """The report of one stage."""
    limit = min(STAGES[name][1], limit)
    say(f"== {name} (at most {limit:.0f} s)")
    started = time.monotonic()
    try:
        report = STAGES[name][0](setup, limit)
    except Exception as error:  # the next stages should still run
        report = {"passed": False, "why": f"{type(error).__name__}: {error}"}
        say(f"  {report['why']}")
    report["seconds"] = round(time.monotonic() - started)
    if name in RESUMED:
        report["seconds"] += setup.earlier.get(name, {}).get("seconds", 0)
    return report


def lane_options(given: argparse.Namespace, architecture: str, limit: float) -> list[str]:
    """The options of the processes that run lanes."""
    jobs = max(2, round(given.jobs * lanes.JOBS))
    options = ["--build", str(given.build), "--arch", architecture, "--jobs", str(jobs)]
    options += ["--budget", f"{limit:.0f}", *(f"--pytest={x}" for x in given.pytest)]
    options += ["--resume"] if given.resume else []
    options += ["--everything"] if given.everything else []
    return options + (["--wheels", str(given.wheels)] if given.wheels else [])


def record(result: dict[str, Any], reports: dict[str, dict[str, Any]], path: Path) -> None:
    """Adds the reports of stages to the result, and writes it."""
    stages = result["stages"] | reports
    result["stages"] = {name: stages[name] for name in STAGES if name in stages}
    result["passed"] = len(stages) == len(STAGES) and all(
        outcome(stage) != "FAILED" for stage in stages.values()
    )
    provenance.write(result, path)
    path.with_suffix(".txt").write_text(table(result))
    for name, report in reports.items():
        say(f"== {name}: {outcome(report)} in {report['seconds']} s")


def main() -> int:
    """Runs the chosen stages in order; with several GPUs, some of them at once."""
    given = parse()
    if given.verify:
        print("\n".join(f"gpu-check: {line}" for line in provenance.verify()))
        return 0
    stages = [name for name in given.stages.split(",") if name]
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        allowed = ", ".join(STAGES)
        print(f"--stages names {unknown[0]!r}, but must name stages of {allowed}", file=sys.stderr)
        return 2
    gpu = provenance.gpu() if given.device == "cuda" else dict(NO_GPU)
    if not gpu:
        print("gpu-check: nvidia-smi names no GPU here", file=sys.stderr)
        return 2
    architecture = given.arch or gpu["compute_capability"].replace(".", "")
    path = given.result or provenance.RESULTS / f"gpu-{provenance.slug(gpu['name'])}.json"
    memory = re.match(r"\d+", gpu["memory"])
    setup = Setup(given.build.resolve(), given.jobs, architecture, given.cmake, given.pytest,
                  wheels=given.wheels, device=given.device,
                  memory=int(memory[0]) if memory else 0)  # fmt: skip
    setup.build.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    before = read(path, gpu)
    result = fresh(before, gpu)
    if not given.everything:
        setup.unchanged = unchanged_tables(before)
    if given.resume:
        setup.earlier = result["stages"]
    say(f"{gpu['name']} (sm_{architecture}), driver {gpu['driver']}, sources {result['sources']}")
    devices = lanes.gpus() if given.device == "cuda" else []
    for group in lanes.groups(stages, devices):
        left = given.budget - (time.monotonic() - begin)
        names = [name for lane in group for name in lane]
        if left < 5:
            say(f"== {', '.join(names)}: NOT run, the {given.budget:.0f} s are used up")
            continue
        if len(group) == 1:
            reports = {names[0]: run_stage(setup, names[0], left)}
        else:
            say(f"== at once: {'; '.join(', '.join(lane) for lane in group)}")
            options = lane_options(given, architecture, left)
            reports = lanes.run(group, devices, options, before, setup.logs / "lanes", left)
        record(result, reports, path)
        if "why" in reports.get("build", {}):  # there is no library to test
            break
    say("\n" + table(result) + f"\n{path}")
    ran = [result["stages"].get(name, {"passed": False}) for name in stages]
    # If the packages of the models were given, the models must run.
    optional = {n for n in stages if n != "models" or given.wheels is None}
    right = all(
        s["passed"] or ("not_run" in s and name in optional)
        for name, s in zip(stages, ran, strict=True)
    )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
