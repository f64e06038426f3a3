"""`tilewise bench` and the benchmark behind `make bench-cpu`."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

from tilewise.cli import cost, memory, timing  # noqa: E402
from tilewise.cli.command import main  # noqa: E402
from tilewise.cli.contestants import ATTEND, ON_DEVICE, Problem, prepare  # noqa: E402

BENCH = ROOT / "bench"
sys.path.insert(0, str(BENCH))
import bench_cpu  # noqa: E402
import cpu_cases as cases  # noqa: E402
import peaks  # noqa: E402

# --- timing ---------------------------------------------------------------------------------------


def test_disturbed_repetitions_are_discarded():
    t = timing.Timing()
    for seconds, share in ((1.0, 2.0), (1.1, 1.97), (0.9, 1.99), (9.0, 0.4), (7.0, 1.2)):
        t.add(seconds, seconds * share)
    assert sorted(t.kept) == [0.9, 1.0, 1.1] and t.median == 1.0 and t.best == 0.9
    assert t.to_json()["repetitions"] == 5 and t.to_json()["kept"] == 3


def test_all_repetitions_count_when_too_few_are_undisturbed():
    t = timing.Timing()
    for seconds, share in ((1.0, 2.0), (2.0, 1.0), (3.0, 0.5)):
        t.add(seconds, seconds * share)
    assert t.median == 2.0


@pytest.mark.parametrize(("slow", "calls"), [(0.5, 11), (5.0, 4), (50.0, 1)])
def test_interleave_bounds_a_slow_contestant(monkeypatch, slow, calls):
    cost_of = {"quick": 0.1, "slow": slow}
    made = []

    def once(call, repetition):
        made.append(call(repetition))
        return cost_of[made[-1]], cost_of[made[-1]]

    monkeypatch.setattr(timing, "_once", once)
    contestants = {name: (lambda _, name=name: name) for name in cost_of}
    found = timing.interleave(contestants, seconds=5.0 if slow == 0.5 else 1.0, maximum=50)
    assert made.count("slow") == calls
    assert found["slow"].median == pytest.approx(slow)
    assert found["quick"].median == pytest.approx(0.1)


def test_interleave_alternates_contestants():
    order = []
    contestants = {name: (lambda _, name=name: order.append(name)) for name in "ab"}
    timing.interleave(contestants, seconds=10.0, maximum=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"


# --- tilewise bench -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ON_DEVICE["cpu"])
@pytest.mark.parametrize("causal", [False, True])
def test_contestants_compute_the_same_result(backend, causal):
    problem = Problem(heads=4, kv_heads=2, length=70, head_dim=16, causal=causal)
    q, k, v = problem.inputs()
    wide = [t.double() for t in (q, k, v)]
    torch.testing.assert_close(
        ATTEND[backend](q, k, v, causal).double(), ATTEND["naive"](*wide, causal), rtol=0, atol=2e-6
    )


def test_backward_is_timed_with_gradients():
    problem = Problem(length=64, backward=True)
    gradients = prepare("tilewise", problem, problem.inputs())(0)
    assert [g.shape for g in gradients] == [(1, 8, 64, 64)] * 3


def test_bench_writes_table_json_and_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {"--json": tmp_path / "b.json", "--plot": tmp_path / "b.png"}
    arguments = ["bench", "--seqlens", "64,128", "--seconds", "0.02", "--head-dim", "32"]
    for name, path in files.items():
        arguments += [name, str(path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    rows = json.loads(files["--json"].read_text())["rows"]
    assert {(r["length"], r["backend"]) for r in rows} == {
        (n, b) for n in (64, 128) for b in ON_DEVICE["cpu"]
    }
    for row in rows:
        assert row["seconds"] > 0 and row["rate"] > 0 and row["peak_bytes"] >= 0
        assert row["backend"] in text
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")


def test_bench_skips_problems_that_exceed_memory(monkeypatch):
    monkeypatch.setattr("tilewise.cli.memory.available", lambda: 10_000)
    rows = cost.measure(Problem(length=64), [64], ["tilewise", "naive"], seconds=0.01, memory=False)
    assert "rate" in rows[0] and "GB of score matrices" in rows[1]["left_out"]


def test_bench_leaves_out_a_backend_that_raises_an_error_without_a_message(monkeypatch):
    def refuse(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setitem(ATTEND, "naive", refuse)
    (row,) = cost.measure(Problem(length=64), [64], ["naive"], seconds=0.01, memory=False)
    assert row["left_out"] == "NotImplementedError"


def test_peak_memory_is_unknown_after_the_measuring_process_has_died(monkeypatch):
    """The operating system may end it while it reads a job, or between two jobs."""

    class Child:
        def __init__(self, *_: object, **__: object) -> None:
            self.stdin, self.stdout, self.jobs = self, io.StringIO("7\n"), 0

        def write(self, _line: str) -> None:
            self.jobs += 1

        def flush(self) -> None:
            if self.jobs > 1:
                raise BrokenPipeError

        close = flush

        def poll(self) -> None:
            """It seems to run."""

        def kill(self) -> None:
            pass

        wait = kill

    monkeypatch.setattr(subprocess, "Popen", Child)
    assert [*memory.measure([{}, {}, {}], 1)] == [7, None, None]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seqlens", "0"], "'0' given, but must be an integer of at least 1"),
        (["--seqlens", "a,b"], "'a' given"),
        (["--heads", "-3"], "'-3' given"),
        (["--seconds", "0"], "'0' given, but must be above 0"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (
            ["--heads", "8", "--kv-heads", "3"],
            "--kv-heads is 3, but must divide --heads, which is 8",
        ),
        (["--backends", "tilewise,abacus"], "--backends names 'abacus'"),
        (["--json", "/nowhere/at/all.json"], "there is no folder"),
        (["--json", "/"], "/ is a folder, but must be a file"),
        (["--plot", "bench.foo"], "--plot is bench.foo, but must end in .png, .svg, .pdf"),
        (["--causal", "--full"], "not allowed with"),
    ],
)
def test_bench_refuses(arguments, sentence, capsys):
    try:
        status = main(["bench", *arguments])
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert sentence in capsys.readouterr().err


def test_bench_on_a_missing_device(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main(["bench", "--device", "cuda"]) == 2
    assert "there is no CUDA device here" in capsys.readouterr().err


# --- make bench-cpu -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("isa", "name", "bar"),
    [
        ("amx", "bf16 D64 N2048 full forward", 1.8),
        ("amx", "bf16 D128 N2048 causal forward", 1.5),
        ("amx", "bf16 D128 N512 causal forward", 1.8),
        ("amx", "bf16 D64 N8192 full backward", 2.0),
        ("amx", "fp16 D64 N2048 full forward", 3.0),
        ("amx", "fp16 D64 N2048 full backward", 3.0),
        ("amx", "fp32 D64 N2048 causal forward", 1.1),
        ("avx512_bf16", "bf16 D64 N2048 full forward", 1.7),
        ("avx512_bf16", "bf16 D64 N2048 full backward", 1.3),
        ("avx512_bf16", "fp16 D128 N2048 full forward", 2.0),
        ("avx512_bf16", "fp16 D128 N512 causal backward", 8.0),
        ("avx512_bf16", "fp32 D128 N2048 full forward", 1.1),
        ("avx512_bf16", "fp32 D128 N2048 causal backward", 1.3),
        ("avx512_bf16", "fp32 D128 N512 causal forward", 1.8),
        ("avx2", "fp32 D64 N2048 full forward", None),
    ],
)
def test_bars(isa, name, bar):
    (case,) = (c for c in cases.attention_cases() if c.name == name)
    assert cases.bar(case, isa) == bar


def test_grid_is_complete():
    grid = list(cases.attention_cases())
    assert len(grid) == len({c.name for c in grid}) == 3 * 2 * 4 * 2 * 2
    case = cases.Case("bf16", 2048, 64, causal=False, backward=False)
    assert case.flop == 4 * 8 * 2048 * 2048 * 64
    causal = cases.Case("bf16", 2048, 64, causal=True, backward=True)
    assert causal.flop == 1.25 * case.flop
    assert cases.Decode("bf16", 32, 8).cache_bytes == 2 * 8 * 8192 * 128 * 2


def test_filter_matches_whole_words():
    name = "bf16 D64 N512 causal forward"
    for text in ("bf16", "D64 causal", "N5*", "forward bf16"):
        assert bench_cpu.matches(name, [text])
    for text in ("D6", "N51", "fp16", "bf16 backward"):
        assert not bench_cpu.matches(name, [text])
    assert bench_cpu.matches(name, []) and bench_cpu.matches(name, ["fp32", "N512"])


def test_limits_exist_for_every_instruction_set():
    """Also for those that this machine's architecture does not have."""
    backend = (ROOT / "src" / "cpu" / "backend.h").read_text()
    names = re.search(r"kIsaNames = \{([^}]*)\}", backend)
    assert names and list(peaks.LIMITS) == re.findall(r'"(\w+)"', names[1])
    for limits in peaks.LIMITS.values():
        assert set(limits) == set(cases.DTYPES)
    measured = re.findall(r'flops\("([\w.]+)"', peaks.SOURCE.read_text())
    assert {name for limits in peaks.LIMITS.values() for name in limits.values()} == set(measured)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seconds", "0"], "--seconds is 0.0"),
        (["--threads", "-1"], "--threads is -1"),
        (["--filter", "abacus"], "matches no case"),
        (["--threads", "100000"], "--threads is 100000"),
    ],
)
def test_bench_cpu_refuses(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as exit_:
        bench_cpu.main(arguments)
    assert sentence in str(exit_.value.code) + capsys.readouterr().err


def test_bench_cpu_runs(tmp_path):
    import shutil

    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler to measure the peaks with")
    file = tmp_path / "bench.json"
    command = [sys.executable, str(BENCH / "bench_cpu.py"), "--quick", "--no-pin"]
    command += ["--threads", "1", "--seconds", "0.01", "--json", str(file)]
    command += ["--filter", "fp32 D64 N512 full", "--filter", "bf16 decode 8/8 D128"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert result["peaks"]["flops"]["portable.fma"]["best"] > 1e8
    assert len(result["attention"]) == 2 and len(result["decode"]) == 1
    for row in [*result["attention"], *result["decode"]]:
        assert row["ratio"] > 0 and row["tilewise"]["rate"] > 0 and row["torch"]["rate"] > 0
    assert result["decode"][0]["read"]["rate"] > 1e8 and result["decode"][0]["share"] > 0
    assert "measured peaks" in done.stdout and "of read" in done.stdout
