"""The stages: each returns what goes into the result file, with `passed`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import suite
from .processes import PYTHON, ROOT, TIMED_OUT, Ended, python_environment, run, run_all, say
from .shapes import DTYPES

Report = dict[str, Any]
# What TILEWISE_FORCE_ARCH is set to: tile tables of mma_sync.
FORCED = ("80", "75")
# Random problems per dtype: forced, native (10,000 in three dtypes).
RANDOM = ("160", "3400")
# What racecheck sees of a forced tile table: one dtype, which all of them have.
RACED = ("--only", "fp16")
# Tests of the benchmarks' scripts: they need no GPU.
NOT_HERE = ("tests/python/test_cli_bench.py", "tests/python/test_bench_gpu.py")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass
class Setup:
    """What the stages share."""

    build: Path
    jobs: int
    architecture: str  # "90"
    cmake: list[str] = field(default_factory=list)
    pytest: list[str] = field(default_factory=list)
    earlier: Report = field(default_factory=dict)  # stages to be resumed

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def forced(self) -> tuple[str, ...]:
        """On Hopper mma_sync has to be asked for: the GPU's own choice is wgmma."""
        return ("90", *FORCED) if self.architecture == "90" else FORCED

    @property
    def architectures(self) -> tuple[str, ...]:
        """What runs: the GPU's own choice first."""
        return ("", *self.forced)

    def python(self, architecture: str = "") -> dict[str, str]:
        env = python_environment(self.build)
        env["TILEWISE_TEST_DEVICES"] = "cuda"
        env["CUDA_CACHE_PATH"] = str(self.build / "ptx-cache")
        env["CUDA_CACHE_MAXSIZE"] = str(2**32 - 2**20)
        if architecture:
            env["TILEWISE_FORCE_ARCH"] = architecture
        return env


def failed(ended: Ended, lines: int = 15) -> Report:
    """The report of a command that did not succeed."""
    why = "took too long" if ended.status == TIMED_OUT else f"status {ended.status}"
    for line in ended.tail(lines):
        say(f"    {line}")
    return {"passed": False, "why": why, "tail": ended.tail(lines)}


def build(setup: Setup, limit: float) -> Report:
    """For this GPU only, with the PyTorch adapter beside the library."""
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(setup.build), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DTILEWISE_CUDA=ON", "-DTILEWISE_BUILD_TORCH=ON",
        f"-DTILEWISE_CUDA_ARCHITECTURES={setup.architecture}", "-DTILEWISE_BUILD_TESTS=OFF",
        f"-DPython3_EXECUTABLE={PYTHON}", *setup.cmake,
    ]  # fmt: skip
    env = {}
    toolkit = Path("/usr/local/cuda/bin/nvcc")
    if not shutil.which("nvcc") and "CUDACXX" not in os.environ and toolkit.is_file():
        env["CUDACXX"] = str(toolkit)
    ended = run(configure, min(limit, 90), setup.logs / "configure.log", env)
    for line in ended.output().splitlines():
        if "tilewise:" in line:
            say(f"  {line}")
    if ended.status != 0:
        return failed(ended)
    command = ["cmake", "--build", str(setup.build), "-j", str(setup.jobs)]
    compiled = run(command, limit - ended.seconds, setup.logs / "build.log")
    if compiled.status != 0:
        lines = [x for x in compiled.output().splitlines() if re.search(r"error|FAILED", x)]
        for line in lines[:20]:
            say(f"    {line}")
        return failed(compiled) | {"errors": lines[:20]}
    library = setup.build / "libtilewise.so"
    megabytes = library.stat().st_size / 1e6
    say(f"  {library.name}: {megabytes:.1f} MB in {compiled.seconds:.0f} s")
    return {"passed": True, "compile_seconds": round(compiled.seconds), "megabytes": megabytes}


def driver(share: str, *more: str) -> list[str]:
    """The small problems without PyTorch."""
    return [PYTHON, "-m", "gpu_check.sanitized", "--share", share, *more]


def driver_environment(setup: Setup, architecture: str) -> dict[str, str]:
    """Of a module of this package."""
    env = setup.python(architecture)
    env["PYTHONPATH"] += f":{ROOT / 'tools'}"
    return env


def architecture_of(name: str) -> str:
    """The tile table in the name of a process."""
    found = re.match(r"forced-(\d+)", name)
    return found.group(1) if found else ""


def label(architecture: str) -> str:
    """How the report names a tile table."""
    return f"forced-{architecture}" if architecture else "native"


def tile_names(architecture: str) -> list[str]:
    """Beginnings of the names of shapes, one per compiled unit of a tile table: what its driver
    compiles from PTX when it is forced takes a while and is kept in a cache, so each unit is first
    used by one process.
    """
    dtypes = ("fp16",) if architecture == "75" else DTYPES
    dims = {2: (64, 96, 128, 192, 256), 4: (64, 128, 256)}
    return [f"{t}-d{d}" for t in dtypes for d in dims[2 if t in ("fp16", "bf16") else 4]]


def smoke(setup: Setup, limit: float) -> Report:
    """Each small problem once: what does not launch, and what hangs, is known after seconds."""
    begin = time.monotonic()
    first = {
        f"{label(a)} {name}": driver("0/1", "--only", name)
        for a in setup.forced
        for name in tile_names(a)
    }
    env = {name: driver_environment(setup, architecture_of(name)) for name in first}
    warmed = run_all(first, limit, setup.logs / "smoke", env)
    parts = max(1, setup.jobs // 4)
    second = {
        f"{label(a)} {i}": driver(f"{i}/{parts}", "--list")
        for a in setup.architectures
        for i in range(parts)
    }
    env = {name: driver_environment(setup, architecture_of(name)) for name in second}
    left = max(20, limit - (time.monotonic() - begin))
    ended = run_all(second, left, setup.logs / "smoke", env)
    chosen = {k for e in ended.values() for k in re.findall(r"cuda\.\S+ tile \S+", e.output())}
    kernels = sorted({k.split()[0] for k in chosen})
    report: Report = {"passed": True, "kernels": kernels, "tiles": sorted(chosen)}
    for name, each in {**warmed, **ended}.items():
        if each.status != 0:
            say(f"  {name}:")
            report[name] = failed(each, 8)
            report["passed"] = False
    seconds = max((e.seconds for e in warmed.values()), default=0)
    say(f"  compiling the PTX of forced tile tables took {seconds:.0f} s")
    for a in setup.architectures:
        mine = [e for n, e in ended.items() if n.startswith(label(a))]
        run_here = sum(int(x) for e in mine for x in re.findall(r"(\d+) of \d+ shapes", e.output()))
        say(f"  {label(a)}: {run_here} shapes run")
        report[f"shapes {label(a)}"] = run_here
    return report


def is_green(found: Report) -> bool:
    """Whether all tests of a tile table ran and none failed."""
    return found.get("passed", 0) > 0 and not found.get("failed") and not found.get("not_run")


def failed_tests(found: Report) -> list[str]:
    """Those of a tile table whose other tests all passed; none, where that is not known."""
    failures = [f["test"] for f in found.get("failures", [])]
    known = len(failures) == found.get("failed", 0) and not found.get("not_run")
    return failures if known else []


def tests(setup: Setup, limit: float) -> Report:
    """The suite on the GPU, and what calls kernels directly once more per forced tile table. What
    passed in a run that is resumed stays: of a tile table whose tests all ran, only those that
    failed are run again.
    """
    shares = []
    folder = setup.logs / "tests"
    everything = setup.pytest or ["tests/python", *(f"--ignore={x}" for x in NOT_HERE)]
    processes = max(2, setup.jobs - 2)
    of_forced = max(1, setup.jobs // 4)
    earlier = setup.earlier.get("tests", {})
    report: Report = {label(a): earlier.get(label(a), {}) for a in setup.architectures}
    for name in report:
        if is_green(report[name]):
            say(f"  {name}: {report[name]['passed']} passed before, not run again")
            continue
        of, arguments = processes, everything
        if name != "native":
            of, arguments = of_forced, ["-m", "abi", *everything]
        again = failed_tests(report[name])
        env = setup.python("" if name == "native" else name.removeprefix("forced-"))
        env["TILEWISE_TEST_EXAMPLES_PER_DTYPE"] = RANDOM[name == "native"]
        of = min(of, len(again) or of)
        shares += [suite.Share(name, i, of, folder, env, again or arguments) for i in range(of)]
    suite.run_shares(shares, limit=limit, each=min(150, limit / 2))
    for name in dict.fromkeys(s.name for s in shares):
        mine = [s for s in shares if s.name == name]
        found = suite.counts(mine)
        say(f"  {name}: {suite.summary(found)}")
        before = report[name] if failed_tests(report[name]) else {}
        report[name] = {n.replace(" ", "_"): count for n, count in found.items()}
        if before:
            report[name]["run_again"] = before["failed"]
            report[name]["passed"] = found["passed"] + before["passed"]
            report[name]["skipped"] = found["skipped"] + before["skipped"]
        report[name]["failures"] = suite.failures(mine)
        report[name]["skips"] = before.get("skips") or suite.skips(mine)
        for failure in report[name]["failures"][:12]:
            say(f"    FAILED {failure['test']}")
    return {"passed": all(is_green(found) for found in report.values()), **report}


def errors_of(output: str) -> int:
    """What compute-sanitizer counts; -1 when it has not said."""
    counted = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(a or b) for a, b in counted) if counted else -1


def judge(mine: list[Ended]) -> Report:
    """One tool on one tile table, which several processes shared."""
    counted = [errors_of(e.output()) for e in mine]
    done = [e.status != TIMED_OUT and c >= 0 for e, c in zip(mine, counted, strict=True)]
    report: Report = {
        "errors": sum(max(c, 0) for c in counted),
        "unfinished": done.count(False),
        "passed": all(done) and not any(counted) and all(e.status == 0 for e in mine),
    }
    if not report["passed"]:
        said = (line for e in mine for line in e.output().splitlines())
        where = Counter(x for x in said if re.search(r" access at |=  {3,}at |error detected", x))
        report["first"] = [f"{n} x {x}" for x, n in where.most_common(24)] or mine[0].tail(8)
    return report


def sanitizer(setup: Setup, limit: float) -> Report:
    """compute-sanitizer over the small problems: every tool, every tile table, all at once, because
    most of the time goes into patching kernels on the CPU.
    """
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return {"passed": False, "why": "no compute-sanitizer"}
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    report: Report = {"passed": True, "version": version.stdout.split("Version ")[-1].strip()}
    say(f"  compute-sanitizer {report['version']}")
    commands, env = {}, {}
    for tool in TOOLS:
        options = ["--tool", tool, "--print-limit", "100", "--error-exitcode", "9"]
        if tool == "memcheck":
            options += ["--padding", "64"]
        for architecture in setup.architectures:
            shares = max(1, setup.jobs // 8)
            if tool == "racecheck":  # five times as slow
                shares = max(1, setup.jobs // (4 if architecture else 2))
            some = RACED if tool == "racecheck" and architecture else ()
            for share in range(shares):
                name = f"{label(architecture)}-{tool}-{share}"
                commands[name] = [program, *options, *driver(f"{share}/{shares}", *some)]
                env[name] = driver_environment(setup, architecture)
    ended = run_all(commands, limit, setup.logs / "sanitizer", env)
    for architecture in setup.architectures:
        for tool in TOOLS:
            name = f"{label(architecture)}-{tool}-"
            mine = [e for n, e in ended.items() if n.startswith(name)]
            found = judge(mine)
            report[f"{tool} {label(architecture)}"] = found
            report["passed"] &= found["passed"]
            seconds = max(e.seconds for e in mine)
            unfinished = f", {found['unfinished']} of {len(mine)} parts unfinished"
            say(
                f"  {tool} {label(architecture)}: {found['errors']} errors in {seconds:.0f} s"
                f"{unfinished if found['unfinished'] else ''}"
            )
            for line in found.get("first", []):
                say(f"    {line}")
    return report


def train(setup: Setup, limit: float) -> Report:
    """The demo's GPT: the losses of the GPU are those of the CPU."""
    result = setup.logs / "train.json"
    result.unlink(missing_ok=True)
    env = driver_environment(setup, "")
    env.pop("OMP_NUM_THREADS")
    command = [PYTHON, "-m", "gpu_check.train", str(result)]
    ended = run(command, limit, setup.logs / "train.log", env)
    for line in ended.tail(8):
        say(f"  {line}")
    if not result.is_file():
        return failed(ended, 6)
    return json.loads(result.read_text())


def bench(setup: Setup, limit: float) -> Report:
    """Side by side with the peers that are importable here."""
    result = setup.logs / "bench.json"
    result.unlink(missing_ok=True)
    command = [PYTHON, "bench/bench_gpu.py", "--quick", "--json", str(result)]
    command += ["--time-limit", str(int(max(20, limit - 30)))]
    ended = run(command, limit, setup.logs / "bench.log", setup.python())
    for line in ended.tail(40):
        say(f"  {line}")
    if not result.is_file():
        return failed(ended, 6)
    return {"passed": ended.status == 0, "results": json.loads(result.read_text())}


# Name: (function, seconds that it may take).
STAGES = {
    "build": (build, 240),
    "smoke": (smoke, 120),
    "tests": (tests, 300),
    "sanitizer": (sanitizer, 300),
    "train": (train, 60),
    "bench": (bench, 120),
}
