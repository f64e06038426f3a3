"""The stage of compute-sanitizer: every tool, every tile table, all at once, because most of the
time goes into patching kernels on the CPU.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import cuda_ledger

from .processes import TIMED_OUT, Ended, run_all, say
from .reports import known, reports
from .setup import Report, Setup, driver, driver_environment, label
from .shapes import problems

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# What racecheck sees of a forced tile table: one dtype, which all of them have.
RACED = "fp16"
FOUND = 9  # exit status of a process with reports
# A report is known by what is printed of it, so all of them are, of the tool that has known ones.
PRINTED = {"synccheck": "100000"}
# Of the limit, after which no process takes another problem: what it has begun is to be judged.
TAKING = 0.85


def errors_of(output: str) -> int:
    """What compute-sanitizer counts; -1 when it has not said."""
    counted = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(a or b) for a, b in counted) if counted else -1


def machine_code(library: Path) -> Callable[[str], str]:
    """Of a kernel by its symbol, disassembled once."""

    @functools.cache
    def sass(symbol: str) -> str:
        try:
            program = cuda_ledger.find_cuobjdump()
            return cuda_ledger.output_of(
                program, "--dump-sass", "--function", symbol, str(library),
                env=cuda_ledger.beside(program),
            )  # fmt: skip
        except cuda_ledger.LedgerError as error:
            say(f"  no known report can be told: {error}")
            return ""

    return sass


def problems_ended(output: str) -> set[str]:
    """Those whose kernel a tool has ended, and the process with it."""
    return set(re.findall(r"^ended (\S+):", output, re.MULTILINE))


def ended_by_report(ended: Ended) -> bool:
    """Whether others are left to a process that is not to blame: it is started again."""
    last = ended.output().rpartition("========= COMPUTE-SANITIZER")[2]
    return ended.status == FOUND and bool(problems_ended(last))


def judge(tool: str, mine: list[Ended], wanted: list[str], sass: Callable[[str], str]) -> Report:
    """One tool on one tile table, whose problems several processes shared."""
    outputs = [e.output() for e in mine]
    judged = [e.status != TIMED_OUT and errors_of(o) >= 0
              for e, o in zip(mine, outputs, strict=True)]  # fmt: skip
    expected: Counter = Counter()
    errors, bad, ran, cut = 0, 0, set(), set()
    for ended, output, is_judged in zip(mine, outputs, judged, strict=True):
        found = [known(tool, x, sass) for x in reports(output)]
        titles = [x.title for x in found if x is not None]
        expected.update(titles)
        new = max(errors_of(output), 0) - len(titles)
        errors += max(new, 0)
        ran |= set(re.findall(r"\bran (\S+):", output)) if is_judged else set()
        cut |= problems_ended(output)
        right = ended.status == 0 or (ended.status == FOUND and titles and new == 0)
        bad += not right or bool(re.search(r"^failed \S+:", output, re.MULTILINE))
    left = [name for name in wanted if name not in ran]
    report: Report = {
        "errors": errors,
        "problems": len(wanted),
        "unfinished": len(left),
        "known": dict(expected),
        "cut": len(cut),
    }
    report["passed"] = errors == 0 and bad == 0 and report["unfinished"] == 0
    if not report["passed"]:
        said = (line for output in outputs for line in output.splitlines())
        where = Counter(x for x in said if re.search(r" access at |=  {3,}at |error detected", x))
        report["first"] = [f"{n} x {x}" for x, n in where.most_common(24)]
        report["first"] += [f"not judged: {', '.join(left[:24])}"] if left else []
        report["first"] = report["first"] or mine[0].tail(8)
    return report


def in_words(name: str, report: Report) -> str:
    """A line of the result, also of one that an older version of this file has written."""
    text = f"{name}: {report['errors']} errors"
    for title, times in report.get("known", {}).items():
        text += f", 1 known report ({title}; {times} times)"
    if report.get("cut"):
        text += f", {report['cut']} problems ended by the tool"
    if report.get("unfinished"):
        of = f" of {report['problems']} problems" if "problems" in report else " parts"
        text += f", {report['unfinished']}{of} NOT judged"
    return text


def processes_of(setup: Setup, tool: str, architecture: str) -> int:
    """How many share the problems of a tool: racecheck takes five times as long."""
    if tool != "racecheck":
        return max(1, setup.jobs // 8)
    return max(1, setup.jobs // 4 if architecture else setup.jobs * 3 // 4)


def commands_of(
    setup: Setup, program: str, tool: str, architecture: str, limit: float
) -> dict[str, list[str]]:
    """Processes of a tool on a tile table by name."""
    options = ["--tool", tool, "--print-limit", PRINTED.get(tool, "100")]
    options += ["--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        options += ["--padding", "64"]
    name = f"{label(architecture)}-{tool}"
    queue = setup.logs / "sanitizer" / f"{name}.queue"
    shutil.rmtree(queue, ignore_errors=True)
    queue.mkdir(parents=True)
    work = ["--queue", str(queue), "--until", f"{time.time() + TAKING * limit:.0f}"]
    work += ["--only", only(tool, architecture)]
    return {
        f"{name}-{i}": [program, *options, *driver(*work)]
        for i in range(processes_of(setup, tool, architecture))
    }


def only(tool: str, architecture: str) -> str:
    """What the names of the problems contain that a tool sees."""
    return RACED if tool == "racecheck" and architecture else ""


def sanitizer(setup: Setup, limit: float) -> Report:
    """The small problems under each tool, with the GPU's own choice and every forced table."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return {"passed": False, "why": "no compute-sanitizer"}
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    report: Report = {"passed": True, "version": version.stdout.split("Version ")[-1].strip()}
    say(f"  compute-sanitizer {report['version']}")
    commands: dict[str, list[str]] = {}
    env: dict[str, dict[str, str]] = {}
    parts = [(tool, a) for a in setup.architectures for tool in TOOLS]
    names: dict[tuple[str, str], list[str]] = {}
    for tool, architecture in parts:
        mine = commands_of(setup, program, tool, architecture, limit)
        names[tool, architecture] = list(mine)
        commands |= mine
        env |= dict.fromkeys(mine, driver_environment(setup, architecture))
    ended = run_all(commands, limit, setup.logs / "sanitizer", env, ended_by_report)
    sass = machine_code(setup.build / "libtilewise.so")
    for tool, architecture in parts:
        done = [ended[name] for name in names[tool, architecture]]
        wanted = list(problems(only(tool, architecture)))
        part = f"{tool} {label(architecture)}"
        found = report[part] = judge(tool, done, wanted, sass)
        report["passed"] &= found["passed"]
        say(f"  {in_words(part, found)}, {max(e.seconds for e in done):.0f} s")
        for line in found.get("first", []):
            say(f"    {line}")
    return report
