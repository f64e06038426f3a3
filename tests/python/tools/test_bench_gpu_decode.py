"""The decoding benchmark without a GPU: its points, its evaluation of timings, one run on the
CPU."""

from __future__ import annotations

import json
import sys

import pytest

from paths import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "bench"))

import bench_gpu_decode
import gpu_decode_cases as cases

CASE = cases.Case(8, 1024, 32, 8)
TIMES = {
    "dense": 10.0,
    "lengths": 10.0,
    "page16": 10.4,
    "page1": 12.0,
    "lognormal": 4.0,
    "cudnn": 9.0,
}


def row(errors=2e-3, **times):
    graph = TIMES | times
    shares = {n: 0.25 if "lognormal" in n else 1.0 for n in graph}
    eager = {n: t + 3 for n, t in graph.items()}
    wrong = dict.fromkeys(graph, errors)
    return bench_gpu_decode.make_row(CASE, eager, graph, wrong, shares, {"fa2": "no"})


def test_points_are_distinct_fit_and_the_main_ones_come_first():
    points = cases.all_cases()
    assert len({c.name for c in points}) == len(points)
    main = cases.main_cases()
    assert points[: len(main)] == main
    assert all(c.bytes <= cases.MAX_BYTES for c in points)
    assert {(c.heads, c.kv_heads) for c in points} == set(cases.HEADS)
    assert {c.batch for c in points} == set(cases.BATCHES)
    assert {c.keys for c in points} == set(cases.KEYS)
    assert all(c.keys % max(cases.PAGES) == 0 and c.launches >= c.copies for c in points)


def test_rotating_caches_exceed_l2():
    assert all(
        c.copies * c.bytes >= min(cases.COPIES_BYTES, cases.MAX_COPIES * c.bytes)
        for c in cases.all_cases()
    )


def test_row_is_compared_with_best_peer_and_contiguous_keys():
    r = row()
    assert r["gb_s"]["dense"] == pytest.approx(CASE.bytes / 10.0 / 1e3)
    assert r["ratio"]["cudnn"]["dense"] == pytest.approx(0.9)
    assert r["ratio"]["cudnn"]["lognormal"] == pytest.approx(0.25 * 9 / 4)
    assert r["of_contiguous"] == pytest.approx({"page16": 1.04, "page1": 1.2})
    missed = ["dense 0.90 of cuDNN", "lengths 0.90 of cuDNN", "page1 1.20 of contiguous"]
    assert sorted(r["missed"]) == missed
    assert row(cudnn=10.0, page1=11.0)["missed"] == []
    assert row(cudnn=10.0, page1=11.0, fa3=11.0)["missed"] == []
    missed = row(cudnn=10.0, page1=11.0, fa3=9.5)["missed"]
    assert missed == ["dense 0.95 of FA-3", "lengths 0.95 of FA-3"]
    assert "dense" in row(errors=float("inf"))["wrong"] and not r["wrong"]


def test_lengths_and_pages_are_compared_with_peers_that_support_them():
    r = row(cudnn=10.0, page1=11.0, **{"cudnn lognormal": 3.8, "cudnn page16": 11.0})
    assert r["ratio"]["cudnn lognormal"] == pytest.approx({"lognormal": 0.95})
    assert r["ratio"]["cudnn page16"] == pytest.approx({"page16": 11 / 10.4})
    assert r["missed"] == ["lognormal 0.95 of cuDNN's"]
    means = bench_gpu_decode.summary([r])["means"]
    assert means["lognormal over cuDNN's lognormal"] == pytest.approx(0.95)
    assert "cudnn lognormal" in bench_gpu_decode.HEAD
    peer_only = row(**{"cudnn page64": 9.0})  # Tilewise did not run
    assert peer_only["ratio"]["cudnn page64"] == {}
    assert "page64 over cuDNN's page64" not in bench_gpu_decode.summary([peer_only])["means"]


def test_float8_is_compared_with_bf16_of_the_same_length():
    r = row(**{"float8": 6.0, "float8 page16": 6.24})
    assert r["of_bf16"] == pytest.approx({"float8": 0.6, "float8 page16": 0.6})
    line = dict(zip(bench_gpu_decode.HEAD, bench_gpu_decode.cells(r), strict=True))
    assert line["float8 page16"] == "6.2 (0.60)" and line["float8 page64"] == "-"
    means = bench_gpu_decode.summary([r])["means"]
    assert means["float8 over bf16, time"] == pytest.approx(0.6)


def test_table_and_summary():
    rows = [row(), row(cudnn=10.0)]
    line = dict(zip(bench_gpu_decode.HEAD, bench_gpu_decode.cells(rows[0]), strict=True))
    assert line["point"] == "B8 S1024 32/8" and line["dense"] == "10.0 (0.90)"
    assert line["page16"] == "10.4 (1.04)" and line["cuDNN"] == "9.0" and line["FA-2"] == "-"
    eager = bench_gpu_decode.cells(bench_gpu_decode.eager_only(rows[0]))
    assert eager[1] == "13.0"
    s = bench_gpu_decode.summary(rows)
    assert s["means"]["dense over cuDNN"] == pytest.approx((0.9 * 1.0) ** 0.5)
    assert s["means"]["page1 over contiguous, time"] == pytest.approx(1.2)
    assert len(s["missed"]) == 2 and s["not_run"][0] == "B8 S1024 32/8: fa2: no"


def test_arguments_and_points():
    options = bench_gpu_decode.parse(["--quick"])
    assert options.rounds == 5 and bench_gpu_decode.choose(options) == cases.main_cases()
    options = bench_gpu_decode.parse(["--points", "B1 16/1", "--points", "S4096 32/32"])
    names = [c.name for c in bench_gpu_decode.choose(options)]
    assert "B1 S1024 16/1" in names and "B64 S4096 32/32" in names and "B1 S1024 32/8" not in names
    small = bench_gpu_decode.choose(bench_gpu_decode.parse(["--most-gb", "0.01"]))
    assert 0 < len(small) < len(cases.all_cases())
    assert [c.bytes for c in small] == sorted(c.bytes for c in small) and small[-1].bytes <= 1e7
    for wrong in (
        ["--rounds", "0"],
        ["--time-limit", "-1"],
        ["--most-gb", "0"],
        ["--only", "nobody"],
    ):
        with pytest.raises(SystemExit):
            bench_gpu_decode.parse(wrong)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cases, "main_cases", lambda: [cases.Case(2, 512, 4, 2)])
    monkeypatch.setattr(cases, "MAX_COPIES", 2)


def test_all_contestants_attend_to_the_same_keys(small):
    case = cases.main_cases()[0]
    x = cases.draw(case, "cpu")
    found = {
        contestant.name: cases.error(case, x, contestant)
        for contestant in cases.contestants(case, x)
    }
    assert {*bench_gpu_decode.OURS, "sdpa"} == set(found)
    assert int(x.inside[0]) % 16 and int(x.inside[0]) < case.keys
    assert max(found.values()) < bench_gpu_decode.WRONG


def test_a_run_on_the_cpu(small, tmp_path, capsys):
    path = tmp_path / "results.json"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--json", str(path)]
    assert bench_gpu_decode.main(arguments) == 0
    found = json.loads(path.read_text())
    assert [r["name"] for r in found["rows"]] == ["B2 S512 4/2"]
    assert found["rows"][0]["of_contiguous"].keys() == cases.PAGE_BARS.keys()
    assert found["rows"][0]["of_bf16"].keys() == cases.FLOAT8.keys()
    assert "page256" in capsys.readouterr().out


def test_only_selected_contestants_run(small, tmp_path):
    path = tmp_path / "results.json"
    arguments = ["--quick", "--device", "cpu", "--rounds", "1", "--json", str(path)]
    assert bench_gpu_decode.main([*arguments, "--only", "inside", "--only", "sdpa"]) == 0
    (found,) = json.loads(path.read_text())["rows"]
    assert found["eager_us"].keys() == {"inside", "sdpa"} == found["errors"].keys()


def test_points_beyond_the_time_limit_are_listed(small, capsys):
    arguments = ["--quick", "--device", "cpu", "--time-limit", "1e-9"]
    assert bench_gpu_decode.main(arguments) == 0
    assert "not measured:\n  B2 S512 4/2" in capsys.readouterr().out
