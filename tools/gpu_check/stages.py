"""The stages: each returns its entry of the result file, with `passed`."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import cuda_ledger
import kernels_run
import ptxas_notices

from . import suite
from .distributed import distributed
from .models import models
from .processes import PYTHON, ROOT, run, run_all, say
from .sanitizer import sanitizer
from .setup import FORCED, UNPROVED, Report, Setup, driver, driver_environment, failed, label
from .shapes import DTYPES

# Random problems per dtype, with a forced tile table and with the GPU's own choice: over any
# kernels and, on Hopper, as many again over wgmma. Tests of single options draw a share of this
# number.
RANDOM = ("80", "1200")
# Tests that run for a forced tile table: those that call kernels directly, to compare every kernel
# with the oracle or its sums from run to run. Other tests do not depend on the table.
FORCED_TESTS = tuple(
    f"tests/python/{folder}/test_{name}.py"
    for folder, names in (
        ("attention", ("determinism", "gradients", "layouts", "nonfinite", "properties")),
        ("cache", ("decode", "decode_splits", "float8_cache", "float8_queries")),
    )
    for name in names
)
# The same for a family that is not proved, and its own tests.
UNPROVED_TESTS = ("tests/python/gpu/test_tcgen05.py",)
# Tests of the benchmark scripts, which need no GPU.
TESTS_WITHOUT_GPU = tuple(
    f"tests/python/tools/test_{name}.py"
    for name in ("cli_bench", "bench_derivatives", "bench_float8", "bench_gpu", "bench_masks")
)


def build(setup: Setup, limit: float) -> Report:
    """Builds for this GPU only, with the adapters of PyTorch and JAX beside the library."""
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(setup.build), "-G", "Ninja",
        "-DCMAKE_BUILD_TYPE=Release", "-DTILEWISE_CUDA=ON", "-DTILEWISE_BUILD_TORCH=ON",
        f"-DTILEWISE_CUDA_ARCHITECTURES={setup.architecture}", "-DTILEWISE_BUILD_TESTS=OFF",
        f"-DTILEWISE_CUDA_FORCED_TABLES={';'.join(f'Sm{t}' for t in setup.foreign)}",
        f"-DPython3_EXECUTABLE={PYTHON}", f"-DTILEWISE_XLA_INCLUDE={xla_include(setup)}",
        *setup.cmake,
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
    shutil.rmtree(setup.launch_list, ignore_errors=True)  # it belongs to another library
    command = ["cmake", "--build", str(setup.build), "-j", str(setup.jobs)]
    compiled = run(command, limit - ended.seconds, setup.logs / "build.log")
    notices = ptxas_notices.check(compiled.log, setup.build)
    if compiled.status != 0:
        lines = [x for x in compiled.output().splitlines() if re.search(r"error|FAILED", x)]
        for line in lines[:20]:
            say(f"    {line}")
        return failed(compiled) | {"errors": lines[:20]}
    library = setup.build / "libtilewise.so"
    megabytes = library.stat().st_size / 1e6
    say(f"  {library.name}: {megabytes:.1f} MB in {compiled.seconds:.0f} s")
    objections = [*notices, *spilled(library)]
    for line in objections[:20]:
        say(f"    {line}")
    report: Report = {"passed": not objections, "compile_seconds": round(compiled.seconds)}
    return report | {"megabytes": megabytes, "objections": objections[:60]}


def xla_include(setup: Setup) -> str:
    """The folder of jaxlib's headers, which the JAX adapter is built from; empty without JAX."""
    command = [PYTHON, "-c", "import jax; print('headers:', jax.ffi.include_dir())"]
    ended = run(command, 60, setup.logs / "jax.log")
    found = re.search(r"^headers: (.+)$", ended.output(), re.MULTILINE)
    if found is None:
        say("  no JAX here: its adapter is neither built nor tested")
    return found[1] if found else ""


def spilled(library: Path) -> list[str]:
    """Fast-path wgmma kernels that use the stack, where spilled registers go."""
    try:
        found = list(cuda_ledger.costs(library, cuda_ledger.find_cuobjdump()))
    except cuda_ledger.LedgerError as error:
        return [f"spills NOT checked: {error}"]
    costs = [(cuda_ledger.key_of(name, sm), cost) for sm, name, cost in found]
    return [
        f"{key}: {cost.stack} bytes of stack in a plain kernel (spilled registers)"
        for key, cost in costs
        if key.family == "wgmma" and key.form.startswith("plain") and cost.stack > 0
    ]


def architecture_of(name: str) -> str:
    """The tile table in the name of a process, or UNPROVED; empty for the GPU's own choice."""
    if name.startswith(UNPROVED):
        return UNPROVED
    found = re.match(r"forced-(\d+)", name)
    return found.group(1) if found else ""


def tile_names(architecture: str) -> list[str]:
    """Prefixes of shape names, one per kernel instance of a tile table. When a table is forced, the
    driver compiles its PTX, which takes a while and is cached, so one process alone runs each
    instance before the others do.
    """
    dtypes = ("fp16",) if architecture == "75" else DTYPES
    wide = () if architecture == "75" else (320, 512)
    dims = {2: (64, 96, 128, 192, 256, *wide), 4: (64, 128, 256)}
    names = [f"{t}-d{d}" for t in dtypes for d in dims[2 if t in ("fp16", "bf16") else 4]]
    latent = [f"{t}-latent" for t in dtypes if wide and t in ("fp16", "bf16")]
    return names + latent + [f"fp16-f8-d{d}" for d in dims[4]]


def smoke(setup: Setup, limit: float) -> Report:
    """Runs each small problem once: launch failures and hangs are found within seconds."""
    begin = time.monotonic()
    setup.launch_list.mkdir(parents=True, exist_ok=True)
    by_ptx = [a for a in setup.forced if a in FORCED]
    first = {f"{label(a)} {name}": driver("--only", name) for a in by_ptx for name in tile_names(a)}
    env = {name: driver_environment(setup, architecture_of(name)) for name in first}
    warmed = run_all(first, limit, setup.logs / "smoke", env)
    parts = max(1, setup.jobs // 4)
    second = {
        f"{label(a)} {i}": driver("--share", f"{i}/{parts}")
        for a in setup.architectures
        for i in range(parts)
    }
    env = {name: driver_environment(setup, architecture_of(name)) for name in second}
    for environment in env.values():
        environment["TILEWISE_LAUNCH_LIST"] = str(setup.launch_list)
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
        of_table = [e for n, e in ended.items() if n.startswith(label(a))]
        run_here = sum(
            int(x) for e in of_table for x in re.findall(r"(\d+) of \d+ shapes", e.output())
        )
        say(f"  {label(a)}: {run_here} shapes run")
        report[f"shapes {label(a)}"] = run_here
    return report


def is_green(found: Report) -> bool:
    """Whether all tests of a tile table ran and none failed."""
    return found.get("passed", 0) > 0 and not found.get("failed") and not found.get("not_run")


def tests_left(found: Report) -> list[str]:
    """The failed tests of a tile table and those that did not run; none if they are not known."""
    failures = [f["test"] for f in found.get("failures", [])]
    left = found.get("left", [])
    known = len(failures) == found.get("failed", 0) and len(left) == found.get("not_run", 0)
    return failures + left if known else []


def shared_out(setup: Setup) -> tuple[int, int]:
    """Number of processes for the GPU's own choice, and for each forced tile table, with fewer
    tests.
    """
    per_table = max(1, setup.jobs // 4)
    while per_table > 1 and setup.processes(per_table * len(setup.forced)) < 4 * per_table:
        per_table -= 1
    return setup.processes(per_table * len(setup.forced)), per_table


def tests(setup: Setup, limit: float) -> Report:
    """The test suite on the GPU, and the tests that call kernels directly again per forced tile
    table. A resumed run keeps what passed, and runs only tests that failed or did not run. A table
    whose family has not changed since its tests passed keeps that result.
    """
    shares = []
    setup.launch_list.mkdir(parents=True, exist_ok=True)
    folder = setup.logs / "tests"
    everything = setup.pytest or ["tests/python", *(f"--ignore={x}" for x in TESTS_WITHOUT_GPU)]
    processes, per_table = shared_out(setup)
    earlier = setup.earlier.get("tests", {})
    report: Report = {
        label(a): earlier.get(label(a)) or setup.unchanged.get(label(a), {})
        for a in setup.architectures
    }
    for name in report:
        if is_green(report[name]):
            when = f" on {report[name]['date']}" if "date" in report[name] else ""
            say(f"  {name}: {report[name]['passed']} passed before{when}, not run again")
            continue
        count, arguments = processes, ["-m", "not models", *everything]
        if name != "native":
            own = UNPROVED_TESTS if name == UNPROVED else ()
            count, arguments = per_table, ["-m", "abi", *(setup.pytest or (*FORCED_TESTS, *own))]
        again = tests_left(report[name])
        env = setup.python("" if name == "native" else name.removeprefix("forced-"))
        env["TILEWISE_TEST_EXAMPLES_PER_DTYPE"] = RANDOM[name == "native"]
        env["TILEWISE_LAUNCH_LIST"] = str(setup.launch_list)
        count = min(count, len(again) or count)
        shares += [
            suite.Share(name, i, count, folder, env, again or arguments) for i in range(count)
        ]
    suite.run_shares(shares, limit=limit, each=min(150, limit / 2))
    for name in dict.fromkeys(s.name for s in shares):
        of_suite = [s for s in shares if s.name == name]
        found = suite.counts(of_suite)
        say(f"  {name}: {suite.summary(found)}")
        before = report[name] if tests_left(report[name]) else {}
        report[name] = {n.replace(" ", "_"): count for n, count in found.items()}
        if before:
            report[name]["run_again"] = before["failed"] + before.get("run_again", 0)
            report[name]["passed"] = found["passed"] + before["passed"]
            report[name]["skipped"] = found["skipped"] + before["skipped"]
        served = sum((s.served for s in of_suite), Counter(before.get("served", {})))
        report[name]["served"] = dict(sorted(served.items()))
        report[name]["failures"] = suite.failures(of_suite)
        if left := suite.left(of_suite):
            report[name]["left"] = left
        report[name]["skips"] = dict(Counter(before.get("skips", {})) + suite.skips(of_suite))
        for failure in report[name]["failures"][:12]:
            say(f"    FAILED {failure['test']}")
    passed = all(is_green(found) for found in report.values())
    return {"passed": passed, **report, **launched(setup)}


def launched(setup: Setup) -> Report:
    """The kernels that processes of this build, or of an earlier one whose result is resumed, have
    launched, and those that none has: every stage of small problems and tests adds to the list.
    """
    library = setup.build / "libtilewise.so"
    earlier = setup.earlier.get("tests", {}).get("launched", ())
    try:
        ran = kernels_run.launched(setup.launch_list, library)
        ran |= {tuple(line.split()) for line in earlier}
        left = sorted(" ".join(k) for k in kernels_run.inside(library) - ran)
    except (OSError, cuda_ledger.LedgerError) as error:
        return {"objections": [f"launches NOT checked: {error}"]}
    say(f"  {len(ran)} kernels launched, {len(left)} not")
    report: Report = {"launched": sorted(" ".join(k) for k in ran)}
    return report | {"objections": [f"not launched: {line}" for line in left]}


def prove(setup: Setup, limit: float) -> Report:
    """Runs `tilewise doctor --prove` as a user would, except that its record stays in the build
    folder.
    """
    if not setup.unproved:
        return {"passed": True, "why": f"every family that sm_{setup.architecture} runs is proved"}
    env = {**setup.python(), "XDG_CACHE_HOME": str(setup.build / "cache")}
    del env["TILEWISE_UNPROVED"]
    command = [PYTHON, "-m", "tilewise", "doctor", "--prove", "--json"]
    ended = run(command, limit, setup.logs / "prove.log", env)
    try:
        report = json.loads(ended.output())
    except ValueError:
        return failed(ended, 6)
    for row in report["states"]:
        say(f"  {row['state']}")
    return {"why": "; ".join(row["state"] for row in report["states"]), **report}


def train(setup: Setup, limit: float) -> Report:
    """Trains the demo's GPT: the losses on the GPU must equal those on the CPU."""
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
    """Benchmarks Tilewise and the peers that can be imported here."""
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


# Name: (function, time limit in seconds).
STAGES = {
    "build": (build, 420),
    "smoke": (smoke, 150),
    "tests": (tests, 720),
    "prove": (prove, 240),
    "sanitizer": (sanitizer, 540),
    "train": (train, 120),
    "models": (models, 480),
    "bench": (bench, 120),
    "distributed": (distributed, 420),
}
