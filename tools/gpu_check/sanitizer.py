"""The compute-sanitizer stage: every tool and every tile table in parallel, because most of the
time goes into patching kernels on the CPU.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from .processes import TIMED_OUT, Ended, run_all, say
from .setup import FOREIGN, Report, Setup, driver, driver_environment, label
from .shapes import problems

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The dtype to which racecheck is limited for a forced tile table; all tables support it. For tables
# of other GPUs initcheck and synccheck have the same limit: their code differs only in tile sizes.
RACECHECK_DTYPE = "fp16"
FOUND = 9  # exit status of a process with reports
# Fraction of the limit after which no process takes another problem, so that it can finish.
LAST_START = 0.85


def errors_of(output: str) -> int:
    """The number of errors that compute-sanitizer reports; -1 if it reported none."""
    counted = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    return sum(int(a or b) for a, b in counted) if counted else -1


def problems_ended(output: str) -> set[str]:
    """Problems during which a tool has ended the kernel, and with it the process."""
    return set(re.findall(r"^ended (\S+):", output, re.MULTILINE))


def ended_by_report(ended: Ended) -> bool:
    """Whether a tool ended the process because of a faulty kernel, so that another process must run
    the remaining problems.
    """
    last = ended.output().rpartition("========= COMPUTE-SANITIZER")[2]
    return ended.status == FOUND and bool(problems_ended(last))


def judged_before(earlier: Report, wanted: list[str]) -> set[str]:
    """The problems that a resumed run need not repeat, because an earlier run has judged them and
    found no error.
    """
    if not earlier.get("passed") and not earlier.get("left"):
        return set()
    return set(wanted) - set(earlier.get("left", ()))


def judge(processes: list[Ended], wanted: list[str], before: Collection[str] = ()) -> Report:
    """The report of one tool on one tile table, whose problems several processes shared; problems
    of `before` have been judged earlier.
    """
    outputs = [e.output() for e in processes]
    errors, bad, slow, ran, cut = 0, 0, 0, set(before), set()
    for ended, output in zip(processes, outputs, strict=True):
        errors += max(errors_of(output), 0)
        if ended.status != TIMED_OUT and errors_of(output) >= 0:
            ran |= set(re.findall(r"\bran (\S+):", output))
        cut |= problems_ended(output)
        slow += ended.status == TIMED_OUT
        bad += ended.status not in (0, TIMED_OUT)
        bad += bool(re.search(r"^failed \S+:", output, re.MULTILINE))
    left = [name for name in wanted if name not in ran]
    report: Report = {
        "errors": errors,
        "problems": len(wanted),
        "unfinished": len(left),
        "cut": len(cut),
    }
    clean = errors == 0 and bad == 0
    report["passed"] = clean and slow == 0 and report["unfinished"] == 0
    if clean and left:
        report["left"] = left
    if not report["passed"]:
        said = (line for output in outputs for line in output.splitlines())
        where = Counter(x for x in said if re.search(r" access at |=  {3,}at |error detected", x))
        report["first"] = [f"{n} x {x}" for x, n in where.most_common(24)]
        report["first"] += [f"not judged: {', '.join(left[:24])}"] if left else []
        report["first"] = report["first"] or [x for e in processes[:1] for x in e.tail(8)]
    return report


def in_words(name: str, report: Report) -> str:
    """One line of the result."""
    text = f"{name}: {report['errors']} errors"
    if report.get("cut"):
        text += f", {report['cut']} problems ended by the tool"
    if report.get("unfinished"):
        text += f", {report['unfinished']} of {report['problems']} problems NOT judged"
    return text


def processes_of(setup: Setup, tool: str, architecture: str) -> int:
    """How many processes share the problems of a tool: racecheck takes ten times as long, and with
    the GPU's own choice it is the last to finish.
    """
    if tool != "racecheck":
        return max(1, setup.jobs // 8)
    return max(1, setup.jobs // 4 if architecture else setup.jobs)


def commands_of(
    setup: Setup, program: str, tool: str, architecture: str, limit: float,
    before: Collection[str] = (),
) -> dict[str, list[str]]:  # fmt: skip
    """The processes of a tool on a tile table, by name; they leave out the problems of `before`."""
    options = ["--tool", tool, "--print-limit", "100", "--error-exitcode", str(FOUND)]
    if tool == "memcheck":
        options += ["--padding", "64"]
    name = f"{label(architecture)}-{tool}"
    queue = setup.logs / "sanitizer" / f"{name}.queue"
    shutil.rmtree(queue, ignore_errors=True)
    queue.mkdir(parents=True)
    for problem in before:
        (queue / problem).touch()  # as if another process had taken it
    work = ["--queue", str(queue), "--until", f"{time.time() + LAST_START * limit:.0f}"]
    work += ["--only", only(tool, architecture)]
    return {
        f"{name}-{i}": [program, *options, *driver(*work)]
        for i in range(processes_of(setup, tool, architecture))
    }


def only(tool: str, architecture: str) -> str:
    """The substring of the names of the problems that a tool checks."""
    limited = architecture and (tool == "racecheck" or architecture in FOREIGN)
    return RACECHECK_DTYPE if limited and tool != "memcheck" else ""


def sanitizer(setup: Setup, limit: float) -> Report:
    """Runs the small problems under each tool, with the GPU's own choice and every forced table."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        return {"passed": False, "why": "no compute-sanitizer"}
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    report: Report = {"passed": True, "version": version.stdout.split("Version ")[-1].strip()}
    say(f"  compute-sanitizer {report['version']}")
    commands: dict[str, list[str]] = {}
    env: dict[str, dict[str, str]] = {}
    runs = {(tool, a): f"{tool} {label(a)}" for a in setup.architectures for tool in TOOLS}
    wanted = {run: list(problems(only(*run))) for run in runs}
    earlier = setup.earlier.get("sanitizer", {})
    before = {run: judged_before(earlier.get(runs[run], {}), wanted[run]) for run in runs}
    names: dict[tuple[str, str], list[str]] = {}
    for run in runs:
        of_run = {}
        if before[run] != set(wanted[run]):
            of_run = commands_of(setup, program, *run, limit, before[run])
        names[run] = list(of_run)
        commands |= of_run
        env |= dict.fromkeys(of_run, driver_environment(setup, run[1]))
    ended = run_all(commands, limit, setup.logs / "sanitizer", env, ended_by_report)
    for run, run_name in runs.items():
        done = [ended[name] for name in names[run]]
        found = report[run_name] = judge(done, wanted[run], before[run])
        report["passed"] &= found["passed"]
        seconds = max((e.seconds for e in done), default=0)
        say(f"  {in_words(run_name, found)}, {seconds:.0f} s")
        for line in found.get("first", []):
            say(f"    {line}")
    return report
