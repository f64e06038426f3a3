"""The sanitizer stage of tools/gpu_check.py, with stubs instead of compute-sanitizer."""

from __future__ import annotations

import sys
import time

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import sanitizer
from gpu_check.processes import TIMED_OUT, Ended
from gpu_check.setup import Setup
from gpu_check.shapes import GROUP_SIZE, groups, problems


def test_groups_hold_every_problem_once_and_few_kernels():
    found = groups()
    assert sorted(name for group in found for name in group) == sorted(problems())
    assert all(0 < len(group) <= GROUP_SIZE for group in found)
    known = problems()
    for group in found:
        shapes = [known[name] for name in group]
        assert len({s and (s.dtype, s.head_dim, s.float8) for s in shapes}) == 1
    assert {name for group in groups("fp16") for name in group} == set(problems("fp16"))


def test_processes_share_the_problems_of_a_queue(tmp_path):
    sanitized = pytest.importorskip("gpu_check.sanitized")
    first = sanitized.taken(tmp_path, "bf16", 1e12)
    begun = [next(first)]
    second = list(sanitized.taken(tmp_path, "bf16", 1e12))
    assert sorted([*begun, *first, *second]) == sorted(problems("bf16"))
    assert begun[0] not in second
    (tmp_path / "late").mkdir()
    assert list(sanitized.taken(tmp_path / "late", "bf16", time.time() - 1)) == []


REPORT = """========= Barrier error detected. Divergent thread(s) in block.
=========     at void tilewise::cuda::wgmma::forward<...>(tilewise::cuda::TmaForwardParams)+0x119d0
=========     by thread (64,0,0)
"""


@pytest.mark.parametrize(
    ("tool", "table", "sees"),
    [
        ("racecheck", "", ""),
        ("racecheck", "80", "fp16"),
        ("initcheck", "80", ""),
        ("initcheck", "86", "fp16"),
        ("memcheck", "120", ""),
    ],
)
def test_which_tools_check_a_table(tool, table, sees):
    assert sanitizer.only(tool, table) == sees


def ended(tmp_path, text: str, status: int = 0, names=("bf16-d64",)) -> Ended:
    log = tmp_path / f"{len(list(tmp_path.iterdir()))}.log"
    log.write_text("".join(f"ran {name}: kernel\n" for name in names) + text)
    return Ended(status, 1.0, log)


def judged(*processes: Ended, names=("bf16-d64",)) -> dict:
    return sanitizer.judge(list(processes), list(names))


def summary(errors: int) -> str:
    return f"========= ERROR SUMMARY: {errors} error{'s' * (errors != 1)}\n"


def test_any_report_is_an_error(tmp_path):
    report = judged(ended(tmp_path, REPORT + summary(1), status=9))
    assert not report["passed"] and report["errors"] == 1
    assert report["first"] == [f"1 x {REPORT.splitlines()[i]}" for i in (0, 1)]
    assert sanitizer.in_words("synccheck native", report) == "synccheck native: 1 errors"


def test_failures_are_not_hidden(tmp_path):
    """A kernel that failed and a process that died are both reported."""
    assert judged(ended(tmp_path, summary(0)))["passed"]
    assert not judged(ended(tmp_path, summary(0), status=9))["passed"]
    assert not judged(ended(tmp_path, "failed bf16-d96: no\n" + summary(0)))["passed"]
    assert not judged(ended(tmp_path, ""))["passed"]


def test_process_continues_after_a_problem_that_a_report_ended(tmp_path):
    names = ("bf16-d64", "bf16-d96", "bf16-d128")
    head = "========= COMPUTE-SANITIZER\n"
    first = ended(tmp_path, "ended bf16-d96: CUDA error 719\n" + REPORT + summary(1), status=9)
    first.log.write_text(head + first.output())
    assert sanitizer.ended_by_report(first)
    assert not sanitizer.ended_by_report(Ended(1, 1.0, first.log))
    with first.log.open("a") as log:  # what its next process appends
        log.write(head + "ran bf16-d128: kernel\n" + summary(0))
    again = Ended(0, 2.0, first.log)
    assert not sanitizer.ended_by_report(again)
    report = judged(again, names=names)
    assert report["errors"] == 1 and report["cut"] == 1 and not report["passed"]
    assert report["first"][-1] == "not judged: bf16-d96"
    line = sanitizer.in_words("synccheck native", report)
    assert line == (
        "synccheck native: 1 errors, 1 problems ended by the tool, 1 of 3 problems NOT judged"
    )


def test_problems_of_a_killed_process_are_not_judged(tmp_path):
    clean = summary(0)
    cut = ended(tmp_path, "", TIMED_OUT, names=("bf16-d96",))
    both = ("bf16-d64", "bf16-d96")
    report = judged(ended(tmp_path, clean), cut, names=both)
    assert not report["passed"] and report["unfinished"] == 1
    line = sanitizer.in_words("racecheck native", report)
    assert line == "racecheck native: 0 errors, 1 of 2 problems NOT judged"
    assert report["first"] == ["not judged: bf16-d96"]
    assert judged(ended(tmp_path, clean, names=both), names=both)["passed"]
    hazards = "========= RACECHECK SUMMARY: 3 hazards displayed (2 errors, 1 warnings)\n"
    assert judged(ended(tmp_path, hazards, 9))["errors"] == 3


def test_sanitizer_processes_share_a_queue(tmp_path):
    commands = sanitizer.commands_of(Setup(tmp_path, 4, "80"), "tool", "racecheck", "80", 100)
    assert list(commands) == ["forced-80-racecheck-0"]
    command = " ".join(commands["forced-80-racecheck-0"])
    assert "--tool racecheck" in command and "--only fp16" in command
    until = float(command.partition("--until ")[2].split()[0])
    assert until == pytest.approx(time.time() + 85, abs=5)
    assert (tmp_path / "logs/sanitizer/forced-80-racecheck.queue").is_dir()


def test_a_resumed_sanitizer_runs_problems_that_were_not_judged(tmp_path):
    names = ("bf16-d64", "bf16-d96")
    cut = ended(tmp_path, "", TIMED_OUT, names=names[1:])
    first = judged(ended(tmp_path, summary(0)), cut, names=names)
    assert first["left"] == ["bf16-d96"]
    before = sanitizer.judged_before(first, list(names))
    assert before == {"bf16-d64"}
    sanitizer.commands_of(Setup(tmp_path, 4, "80"), "tool", "racecheck", "80", 100, before)
    queue = tmp_path / "logs/sanitizer/forced-80-racecheck.queue"
    assert [path.name for path in queue.iterdir()] == ["bf16-d64"]
    second = ended(tmp_path, summary(0), names=names[1:])
    assert sanitizer.judge([second], list(names), before)["passed"]
    assert sanitizer.judge([], list(names), names)["passed"], "nothing was left"
    # A table with an error is checked again as a whole.
    failed = judged(ended(tmp_path, REPORT + summary(1), status=9), cut, names=names)
    assert not sanitizer.judged_before(failed, list(names))
    assert not sanitizer.judged_before({}, list(names))


def test_the_stage_runs_only_tools_with_problems_left(tmp_path, monkeypatch):
    started = {}

    def run_all(commands, *_rest):
        started.update(commands)
        problem = ended(tmp_path, summary(0), names=("bf16-d64",))
        return dict.fromkeys(commands, problem)

    monkeypatch.setattr(sanitizer, "run_all", run_all)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda _: sys.executable)
    given = Setup(tmp_path, 4, "75")
    whole = {"passed": True}
    given.earlier = {"sanitizer": {
        f"{tool} {table}": whole for tool in sanitizer.TOOLS
        for table in ("native", "forced-80", "forced-75")
    }}  # fmt: skip
    given.earlier["sanitizer"]["memcheck native"] = {"passed": False, "left": ["bf16-d64"]}
    report = sanitizer.sanitizer(given, 10)
    assert list(started) == ["native-memcheck-0"]
    assert report["passed"] and report["memcheck native"]["unfinished"] == 0
