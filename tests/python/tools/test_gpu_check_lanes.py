"""Stages of tools/gpu_check.py that run at once, on a GPU each."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from gpu_check import lanes, provenance, stages

# What a lane does instead of testing: it reports its GPU for its stages, except for `fails`, during
# which it ends.
PROGRAM = """
import json, os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
path = given["--result"]
result = json.load(open(path)) if os.path.exists(path) else {"stages": {}}
print("== at work")
for name in given["--stages"].split(","):
    if name == given.get("--fails"):
        sys.exit(9)
    gpu, jobs = os.environ["CUDA_VISIBLE_DEVICES"], given.get("--jobs")
    result["stages"][name] = {"passed": True, "seconds": 1, "gpu": gpu, "jobs": jobs}
    json.dump(result, open(path, "w"))
"""


def test_stages_run_at_once_where_there_are_gpus():
    everything = list(stages.STAGES)
    one_by_one = [[[name]] for name in everything]
    assert lanes.groups(everything, ["0"]) == one_by_one
    assert lanes.groups(["build", "tests", "train"], ["0", "1"]) == [
        [["build"]], [["tests"]], [["train"]],
    ]  # fmt: skip
    grouped = lanes.groups(everything, ["0", "1", "2"])
    assert grouped[:2] == [[["build"]], [["smoke"]]] and grouped[-1] == [["distributed"]]
    assert grouped[2] == [["tests", "prove", "train", "models", "bench"], ["sanitizer"]]
    flat = [name for group in grouped for lane in group for name in lane]
    assert sorted(flat) == sorted(everything)


def test_gpus_are_those_that_the_process_may_use(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    assert lanes.gpus() == ["3", "GPU-5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(provenance, "subprocess_text", lambda *_: "0\n1\n")
    assert lanes.gpus() == ["0", "1"]


@pytest.fixture
def program(tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "tools").mkdir(parents=True)
    (root / "tools" / "gpu_check.py").write_text(PROGRAM)
    monkeypatch.setattr(lanes, "ROOT", root)


def test_each_lane_has_a_gpu_of_its_own(program, tmp_path, capsys):
    chosen = [["tests", "bench"], ["sanitizer"]]
    reports = lanes.run(chosen, ["4", "5", "6"], ["--jobs", "7"], {}, tmp_path / "lanes", 60)
    assert {name: report["gpu"] for name, report in reports.items()} == {
        "tests": "4", "bench": "4", "sanitizer": "5",
    }  # fmt: skip
    assert all(report["jobs"] == "7" for report in reports.values())
    assert capsys.readouterr().out == "== at work\n== at work\n"


def test_a_lane_that_ends_keeps_the_stages_it_has_finished(program, tmp_path):
    old = {"passed": True, "seconds": 2, "gpu": "old"}
    before = {"stages": dict.fromkeys(("tests", "train", "bench", "sanitizer"), old)}
    chosen = [["tests", "train", "bench"], ["sanitizer"]]
    options = ["--fails", "train"]
    reports = lanes.run(chosen, ["0", "1"], options, before, tmp_path / "lanes", 60)
    assert reports["tests"]["gpu"] == "0" and reports["sanitizer"]["gpu"] == "1"
    for name in ("train", "bench"):
        assert not reports[name]["passed"] and reports[name]["why"].endswith("status 9")


def test_the_result_has_the_stages_of_all_lanes(program, tmp_path, monkeypatch):
    path = Path(stages.__file__).parents[1] / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check_main", path)
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    gpu = {"name": "GPU", "compute_capability": "9.0", "driver": "1", "memory": "1 MiB"}
    monkeypatch.setattr(provenance, "gpu", lambda: gpu)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for name in ("build", "distributed"):
        limit = main.STAGES[name][1]
        monkeypatch.setitem(main.STAGES, name, (lambda *_: {"passed": True}, limit))
    result = tmp_path / "result.json"
    chosen = "build,tests,sanitizer,distributed"
    arguments = ["--stages", chosen, "--result", str(result), "--build", str(tmp_path / "build")]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments, "--jobs", "10"])
    assert main.main() == 0
    found = json.loads(result.read_text())["stages"]
    assert list(found) == ["build", "tests", "sanitizer", "distributed"]
    assert (found["tests"]["gpu"], found["sanitizer"]["gpu"]) == ("0", "1")
    assert found["tests"]["jobs"] == "6"
    assert "sanitizer   passed" in result.with_suffix(".txt").read_text()
