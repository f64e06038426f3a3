"""The GPU benchmark without a GPU: its points, what it makes of times, and one run on the CPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import bench_gpu
import gpu_cases
import gpu_contestants
import gpu_peers
import gpu_reference
import gpu_report
from gpu_timing import Clock, Timing

CASE = gpu_cases.Case("bf16", "fwd", 64, 4096, True, 32, 32)


def row(case=CASE, ours=1.0, peer=1.2, error=1e-3, name="fa2"):
    timings = {"tilewise": Timing([ours] * 3), name: Timing([peer] * 3)}
    errors = {"tilewise": {"out": error}, name: {"out": 1e-3}}
    return gpu_report.make_row(case, timings, errors, {}, {})


def sleep():
    time.sleep(1e-3)


def test_points_are_distinct_and_the_main_ones_come_first():
    cases = gpu_cases.all_cases()
    assert len({c.name for c in cases}) == len(cases)
    main = gpu_cases.main_cases()
    assert cases[: len(main)] == main
    assert {c.head_dim for c in cases} == {64, 80, 96, 128, 192, 256}
    assert {c.seqlen for c in cases} == set(gpu_cases.LENGTHS)
    assert {(c.heads, c.kv_heads) for c in cases if c.heads != c.kv_heads} == {(32, 8)}
    assert all(c.batch * c.seqlen == gpu_cases.TOKENS for c in cases)


def test_words_choose_points():
    options = bench_gpu.parse(["--points", "bf16 bwd D128 causal GQA", "--points", "fp32 D64"])
    names = [c.name for c in bench_gpu.choose(options)]
    assert names and all("GQA" in n or n.startswith("fp32") for n in names)


def test_operations_are_counted_as_the_field_does():
    assert CASE.flop == 4 * 4 * 32 * 4096 * 4096 * 64 / 2
    assert gpu_cases.Case("bf16", "bwd", 64, 4096, True, 32, 32).flop == 2.5 * CASE.flop


def test_a_row_is_judged_by_its_peer():
    good, bad = row(), row(peer=0.9)
    assert good["ratio"]["fa2"] == pytest.approx(1.2)
    assert good["met"] and good["right"] and not bad["met"]
    assert good["tflops"]["tilewise"] == pytest.approx(CASE.flop / 1e9)
    assert not row(error=5e-3)["right"]
    assert not row(error=float("inf"))["right"]


def test_wgmma_is_judged_by_the_best_of_its_peers():
    def judged(**peers):
        times = {"tilewise": 1.0, **peers}
        timings = {name: Timing([t] * 3) for name, t in times.items()}
        errors = {name: {"out": 1e-3} for name in times}
        kernel = {"name": "cuda.wgmma.forward.bf16"}
        return gpu_report.make_row(CASE, timings, errors, {}, kernel)

    assert judged(cudnn=1.3, fa3=1.1, fa2=2.0)["ratio"]["best"] == pytest.approx(1.1)
    assert not judged(cudnn=1.3, fa4=0.9)["met"]
    by_cudnn = judged(cudnn=1.3)
    share = gpu_peers.best_over_cudnn(CASE)
    assert share > 1.0 and by_cudnn["ratio"]["best"] == pytest.approx(1.3 / share)
    assert by_cudnn["judged_by"] == "best"
    assert "met" not in judged(fa2=2.0)
    rows = [by_cudnn, judged(cudnn=1.0)]
    assert "bar" in gpu_report.summary(rows)["means"]["fwd over best"]


def test_the_nearest_measured_length_stands_for_a_point():
    def share(seqlen, head_dim=128):
        return gpu_peers.best_over_cudnn(
            gpu_cases.Case("bf16", "bwd", head_dim, seqlen, False, 16, 16)
        )

    assert share(256) == share(512) and share(32768) == share(16384)
    assert share(1024, head_dim=80) == 1.0


def test_summary_counts_bars_and_means():
    s = gpu_report.summary([row(), row(peer=0.9), row(error=1.0)])
    assert (s["points"], s["points_met"]) == (3, 2)
    assert s["missed"] == [f"{CASE.name} (0.90)"]
    assert s["wrong"] == [CASE.name]
    mean = s["means"]["fwd over fa2"]
    assert mean["geometric_mean"] == pytest.approx((1.2 * 0.9 * 1.2) ** (1 / 3))
    assert not mean["met"]


def test_fp32_is_to_be_no_less_exact_than_efficient():
    case = gpu_cases.Case("fp32", "fwd", 64, 1024, False, 32, 32)
    s = gpu_report.summary([row(case, peer=2.0, error=2e-3, name="efficient")])
    assert s["less_exact_than_efficient"] == [case.name]
    assert s["missed"] == []


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_agrees_with_autograd_in_double(direction, causal, monkeypatch):
    monkeypatch.setattr(gpu_reference, "ROWS", 24)  # several chunks, the last one short
    case = gpu_cases.Case("fp32", direction, 16, 64, causal, 4, 2, tokens=128)
    x = gpu_contestants.draw(case, "cpu")
    x = gpu_contestants.Inputs(*(t.double() for t in (x.q, x.k, x.v, x.dout)))
    results = gpu_contestants.prepare("sdpa", case, x)()
    errors = gpu_reference.errors(case, results, gpu_reference.reference(case, x))
    assert set(errors) == ({"out"} if direction == "fwd" else {"dq", "dk", "dv"})
    assert max(errors.values()) < 1e-12


def test_a_peer_that_is_missing_or_refuses_is_a_sentence():
    case = gpu_cases.Case("bf16", "fwd", 64, 32, False, 4, 2, tokens=32)
    x = gpu_contestants.draw(case, "cpu")
    assert isinstance(gpu_contestants.prepare("fa3", case, x), str)
    assert "grouped" in gpu_contestants.prepare("efficient", case, x)


def results_on_the_cpu(tmp_path, *arguments):
    path = tmp_path / "results.json"
    always = ["--device", "cpu", "--tokens", "512", "--no-overhead", "--json", str(path)]
    assert bench_gpu.main([*always, "--points", "bf16 S512 D256 MHA full", *arguments]) == 0
    return json.loads(path.read_text())


def test_a_run_on_the_cpu(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--rounds", "1")
    assert [r["name"] for r in found["rows"]] == [
        "bf16 fwd D256 S512 full MHA",
        "bf16 bwd D256 S512 full MHA",
    ]
    assert all(r["right"] and r["kernel"]["name"].startswith("cpu.") for r in found["rows"])
    assert "points at or above their bar" in capsys.readouterr().out


def test_without_rest_everybody_calls_in_a_row_twice():
    order = []
    calls = {
        "quick": lambda: order.append("quick"),
        "slow": lambda: (order.append("slow"), sleep()),
    }
    found = Clock("cpu").without_rest(calls, 0.02)
    changes = [b for a, b in zip(["", *order], order, strict=False) if a != b]
    assert changes == ["quick", "slow", "quick"]  # slow is the last one, and the first one back
    assert len(found["quick"].rounds) == len(found["slow"].rounds) == 2
    assert min(found["slow"].rounds) >= 1.0 > max(found["quick"].rounds)
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--without-rest", "-1"])


def test_a_run_without_rest(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--without-rest", "0.001")
    assert found["without_rest"] == 0.001
    assert all(r["tflops"]["tilewise"] > 0 for r in found["rows"])
    assert "0.001 s without rest, twice" in capsys.readouterr().out


def test_what_is_out_of_time_is_listed(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--time-limit", "1e-9")
    assert len(found["not_measured"]) == 2 and not found["rows"]
    assert "out of time: 2" in capsys.readouterr().out
