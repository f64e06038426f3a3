"""bench/compare_decode.py: alternating runs of two builds, tested without a GPU."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "bench"))

import compare_decode
from tilewise._library import library_directory


@pytest.fixture
def builds(tmp_path):
    for build in ("old", "new"):
        (tmp_path / build).mkdir()
        (tmp_path / build / "libtilewise.so").touch()
    return tmp_path


def test_medians_of_runs_are_compared():
    turns = {
        "old": [{"a": {"lengths": 10.0, "cudnn": 9.0}, "b": {"lengths": 4.0}}] * 2,
        "new": [
            {"a": {"lengths": 8.0, "cudnn": 9.0}},
            {"a": {"lengths": 12.0, "cudnn": 9.0, "dense": 1.0}, "b": {"lengths": 4.0}},
        ],
    }
    result = compare_decode.compare(turns)
    (row,) = result["rows"]  # the other point is missing in one run
    assert row["name"] == "a" and row["new"] == {"lengths": 10.0, "cudnn": 9.0}
    assert result["means"] == pytest.approx({"lengths": 1.0, "cudnn": 1.0})


def test_builds_alternate(builds, monkeypatch, capsys):
    calls = []

    def turn(library, rest):
        calls.append((library.name, tuple(rest)))
        return {"B1 S1024 32/8": {"lengths": 6.0 if library.name == "old" else 5.0}}

    monkeypatch.setattr(compare_decode, "turn", turn)
    path = builds / "result.json"
    arguments = [str(builds / "old"), str(builds / "new"), "--json", str(path), "--", "--quick"]
    assert compare_decode.main(arguments) == 0
    assert [name for name, _ in calls] == ["old", "new", "new", "old"]
    assert {rest for _, rest in calls} == {("--quick",)}
    assert "6.0 -> 5.0 (1.20)" in capsys.readouterr().out
    found = json.loads(path.read_text())
    assert found["means"] == {"lengths": pytest.approx(1.2)} and found["arguments"] == ["--quick"]


def test_invalid_arguments_are_refused(builds, capsys):
    folders = [str(builds / "old"), str(builds / "new")]
    for wrong, said in (
        ([*folders, "--turns", "0"], "--turns is 0, but must be 1 to 100"),
        ([folders[0], str(builds)], f"NEW is {builds}: no libtilewise.so in it"),
    ):
        with pytest.raises(SystemExit):
            compare_decode.main(wrong)
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit, match="a turn failed"):
        compare_decode.main([*folders, "--", "--rounds", "0"])


def test_each_turn_runs_the_benchmark():
    library = library_directory()
    arguments = ["--device", "cpu", "--points", "B1 S1024 16/1", "--rounds", "1"]
    found = compare_decode.turn(library, [*arguments, "--only", "lengths", "--only", "sdpa"])
    assert found.keys() == {"B1 S1024 16/1"}
    assert found["B1 S1024 16/1"].keys() == {"lengths", "sdpa"}
