"""The GPU benchmark without a GPU: its points, its evaluation of timings, and one run on the
CPU."""

from __future__ import annotations

import json
import sys
import time
import types

import pytest

from paths import ROOT

pytest.importorskip("torch")
sys.path.insert(0, str(ROOT / "bench"))

import torch

import bench_gpu
import gpu_cases
import gpu_contestants
import gpu_peers
import gpu_power
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
    assert {(c.heads, c.kv_heads) for c in cases if c.heads != c.kv_heads} == {
        (32, 8),
        (64, 8),
    }
    assert all(c.batch * c.seqlen == gpu_cases.TOKENS for c in cases)


def test_points_are_selected_by_words():
    options = bench_gpu.parse(["--points", "bf16 bwd D128 causal GQA", "--points", "fp32 D64"])
    names = [c.name for c in bench_gpu.choose(options)]
    assert names and all("GQA" in n or n.startswith("fp32") for n in names)


def test_fp16_is_among_the_main_points_and_selectable():
    assert sum(c.dtype == "fp16" for c in gpu_cases.main_cases()) == 4
    options = bench_gpu.parse(["--points", "fp16 fwd D64 S1024 MHA"])
    assert [c.causal for c in bench_gpu.choose(options)] == [False, True]
    names = [c.name for c in bench_gpu.choose(bench_gpu.parse(["--points", "64/8 D64 S1024"]))]
    assert names[0] == "bf16 fwd D64 S1024 full 64/8" and len(names) == 4


def test_flop_count_follows_flash_attention():
    assert CASE.flop == 4 * 4 * 32 * 4096 * 4096 * 64 / 2
    assert gpu_cases.Case("bf16", "bwd", 64, 4096, True, 32, 32).flop == 2.5 * CASE.flop


def test_bar_of_a_row_depends_on_its_peer():
    good, bad = row(), row(peer=0.9)
    assert good["ratio"]["fa2"] == pytest.approx(1.2)
    assert good["met"] and good["right"] and not bad["met"]
    assert good["tflops"]["tilewise"] == pytest.approx(CASE.flop / 1e9)
    assert not row(error=5e-3)["right"]
    assert not row(error=float("inf"))["right"]


def test_wgmma_is_compared_with_its_best_peer():
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


def test_largest_spread_of_ours_and_of_the_peers_is_reported():
    case = gpu_cases.Case("bf16", "fwd", 128, 4096, True, 16, 16)
    moving = gpu_report.make_row(
        case, {"tilewise": Timing([1.0, 1.0, 1.2, 1.4]), "fa2": Timing([1.0, 1.5, 1.5, 1.5])},
        {"tilewise": {"out": 1e-3}, "fa2": {"out": 1e-3}}, {}, {},
    )  # fmt: skip
    largest = gpu_report.summary([row(), moving, row()])["largest_spread"]
    assert largest["ours"] == {"spread": moving["spread"]["tilewise"], "name": "tilewise",
                               "point": case.name}  # fmt: skip
    assert largest["peers"]["name"] == "fa2" and largest["peers"]["spread"] > 0.05


def test_bar_uses_the_nearest_measured_length():
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


def test_fp32_less_exact_than_sdpa_efficient_is_reported():
    case = gpu_cases.Case("fp32", "fwd", 64, 1024, False, 32, 32)
    s = gpu_report.summary([row(case, peer=2.0, error=2e-3, name="efficient")])
    assert s["less_exact_than_efficient"] == [case.name]
    assert s["missed"] == []


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("causal", [False, True])
def test_reference_agrees_with_autograd_in_double(direction, causal, monkeypatch):
    monkeypatch.setattr(
        gpu_reference, "ROWS", 24
    )  # several chunks, of which the last one is shorter
    case = gpu_cases.Case("fp32", direction, 16, 64, causal, 4, 2, tokens=128)
    x = gpu_contestants.draw(case, "cpu")
    x = gpu_contestants.Inputs(*(t.double() for t in (x.q, x.k, x.v, x.dout)))
    results = gpu_contestants.prepare("sdpa", case, x)()
    errors = gpu_reference.errors(case, results, gpu_reference.reference(case, x))
    assert set(errors) == ({"out"} if direction == "fwd" else {"dq", "dk", "dv"})
    assert max(errors.values()) < 1e-12


def test_missing_or_refusing_peer_is_reported_as_a_sentence():
    case = gpu_cases.Case("bf16", "fwd", 64, 32, False, 4, 2, tokens=32)
    x = gpu_contestants.draw(case, "cpu")
    assert isinstance(gpu_contestants.prepare("fa3", case, x), str)
    assert "grouped" in gpu_contestants.prepare("efficient", case, x)


def results_on_the_cpu(tmp_path, *arguments, words="full"):
    path = tmp_path / "results.json"
    always = ["--device", "cpu", "--tokens", "512", "--no-overhead", "--json", str(path)]
    assert bench_gpu.main([*always, "--points", f"bf16 S512 D256 MHA {words}", *arguments]) == 0
    return json.loads(path.read_text())


def test_a_run_on_the_cpu(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--rounds", "1")
    assert [r["name"] for r in found["rows"]] == [
        "bf16 fwd D256 S512 full MHA",
        "bf16 bwd D256 S512 full MHA",
    ]
    assert all(r["right"] and r["kernel"]["name"].startswith("cpu.") for r in found["rows"])
    assert "points at or above their bar" in capsys.readouterr().out


def test_back_to_back_each_contestant_runs_twice():
    order = []
    calls = {
        "quick": lambda: order.append("quick"),
        "slow": lambda: (order.append("slow"), sleep()),
    }
    found = Clock("cpu").back_to_back(calls, 0.02)
    changes = [b for a, b in zip(["", *order], order, strict=False) if a != b]
    assert changes == [
        "quick",
        "slow",
        "quick",
    ]  # slow comes last in the first pass and first in the second
    assert len(found["quick"].rounds) == len(found["slow"].rounds) == 2
    assert min(found["slow"].rounds) >= 1.0 > max(found["quick"].rounds)
    with pytest.raises(SystemExit):
        bench_gpu.parse(["--back-to-back", "-1"])


def test_a_back_to_back_run(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--back-to-back", "0.001", words="fwd full")
    assert found["back_to_back"] == 0.001
    assert all(r["tflops"]["tilewise"] > 0 for r in found["rows"])
    printed = capsys.readouterr().out
    assert "0.001 s back to back, twice" in printed
    assert "    tilewise - W - MHz - pJ/flop; sdpa - W - MHz - pJ/flop" in printed


def test_points_beyond_the_time_limit_are_listed(tmp_path, capsys):
    found = results_on_the_cpu(tmp_path, "--time-limit", "1e-9")
    assert len(found["not_measured"]) == 2 and not found["rows"]
    assert "out of time: 2" in capsys.readouterr().out


class Library(types.ModuleType):
    """pynvml for a GPU that draws 500 W at 1400 MHz; its counter advances every 30 milliseconds."""

    NVML_CLOCK_SM = 1

    def __init__(self):
        super().__init__("pynvml")
        self.counts, self.gpus = True, 1

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        assert index == 0 and self.gpus == 1
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1234" and self.gpus == 2
        return "handle"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        assert handle == "handle"
        if not self.counts:
            raise RuntimeError("Not Supported")
        return int(500e3 * 0.03 * (time.perf_counter() // 0.03))

    def nvmlDeviceGetClockInfo(self, handle, clock):
        assert (handle, clock) == ("handle", 1)
        return 1400


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    facts = types.SimpleNamespace(uuid="1234")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: facts)
    return fake


@pytest.mark.parametrize("gpus", [1, 2])
def test_power_is_measured_over_the_later_part_of_a_run(library, gpus):
    library.gpus = gpus
    clock = Clock("cpu")
    clock.meter = gpu_power.Meter("cuda")
    timings = clock.back_to_back({"tilewise": sleep, "fa2": sleep}, 0.4)
    assert [len(t.power) for t in timings.values()] == [2, 2]
    for reading in timings["tilewise"].power:
        assert reading.watts == pytest.approx(500, rel=0.25) and reading.sm_mhz == 1400
    errors = {name: {"out": 1e-3} for name in timings}
    made = gpu_report.make_row(CASE, timings, errors, {}, {})
    joules = made["watts"]["tilewise"] * made["milliseconds"]["tilewise"] / 1e3
    assert made["pj_per_flop"]["tilewise"] == pytest.approx(1e12 * joules / CASE.flop)
    assert " W 1400 MHz " in gpu_report.power_line(made)


def test_means_are_taken_between_counter_steps():
    def sample(at, joules, mhz):
        return gpu_power._Sample(at, joules, mhz)

    samples = [sample(0.0, 0.0, 9000), sample(1.0, 90.0, 2000), sample(1.5, 100.0, 1000),
               sample(2.0, 100.0, 1000), sample(2.5, 300.0, 1000)]  # fmt: skip
    assert gpu_power.mean(samples, 1.0) == gpu_power.Reading(200.0, 1250.0)
    assert gpu_power.mean(samples, 1.6) is None  # only one step


@pytest.mark.parametrize("counts", [False, None])
def test_missing_power_readings_are_shown_as_dashes(library, counts, monkeypatch):
    """Covers a GPU without an energy counter and a machine without the NVML library."""
    library.counts = counts
    if counts is None:
        monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    clock = Clock("cpu")
    clock.meter = gpu_power.Meter("cuda")
    timings = clock.back_to_back({"tilewise": sleep}, 0.01)
    made = gpu_report.make_row(CASE, timings, {"tilewise": {"out": 1e-3}}, {}, {})
    assert timings["tilewise"].power == [] and "watts" not in made
    assert gpu_report.power_line(made) == "    tilewise - W - MHz - pJ/flop"


def test_launch_in_a_cuda_graph_is_measured(capsys):
    options = bench_gpu.parse(["--device", "cpu", "--rounds", "1"])
    rows = bench_gpu.graph_latency(Clock("cpu"), options)
    points = [f"{d} D128 S32 {mask} MHA" for d in ("fwd", "bwd") for mask in ("full", "causal")]
    assert [r["name"] for r in rows] == [f"B1 H16 bf16 {point}" for point in points]
    assert all(set(r["microseconds"]) == {"tilewise", "sdpa"} for r in rows)
    rows.append({"name": "other", "microseconds": {}, "left_out": {"cudnn": "not captured"}})
    summary = gpu_report.summary([row()])
    gpu_report.show_summary({"summary": summary, "graph_latency": rows, "not_measured": []})
    printed = capsys.readouterr().out
    assert "One call in a CUDA graph" in printed and points[0] in printed
    assert "other: cudnn does not support it: not captured" in printed
    assert "largest distance between quartiles, ours: 0.0 % (tilewise, bf16 fwd D64" in printed
