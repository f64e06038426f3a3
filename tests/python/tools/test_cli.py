"""The command line: doctor, bench, and the modules they are built from."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import pytest

np = pytest.importorskip("numpy")

import tilewise  # noqa: E402
from tilewise._check import MAX_HEAD_DIM  # noqa: E402
from tilewise.cli import arrays, doctor, oracle, provenance, selftest, system, tables  # noqa: E402
from tilewise.cli.command import main  # noqa: E402


def test_doctor_names_the_instruction_set_in_use(capsys):
    assert main(["doctor", "--no-test"]) == 0
    text = capsys.readouterr().out
    assert f"in use: {system.current_isa()}" in text
    for dtype in doctor.DTYPES:
        assert dtype in text
    assert system.versions()["tilewise"] in text


def test_doctor_json_of_one_instruction_set(capsys):
    before = system.current_isa()
    assert main(["doctor", "--json", "--isa", "portable"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["passed"] and facts["in_use"] == before == system.current_isa()
    ran = {(c["dtype"], c["setting"]) for c in facts["self_test"]}
    assert ran == set(itertools.product(selftest.BOUNDS, (s.name for s in selftest.SETTINGS)))
    for check in facts["self_test"]:
        assert check["isa"] == "portable" and "portable" in check["kernel"]
        assert set(check["errors"]) == {"out", "lse", "dq", "dk", "dv"}


def test_doctor_lists_a_kernel_for_every_head_dim():
    rows = doctor.planned_kernels()
    for dtype in doctor.DTYPES:
        of_dtype = [r for r in rows if r["dtype"] == dtype]
        assert of_dtype[0]["from_head_dim"] == 1
        assert of_dtype[-1]["to_head_dim"] == MAX_HEAD_DIM
        for a, b in itertools.pairwise(of_dtype):
            assert b["from_head_dim"] == a["to_head_dim"] + 1
        assert all("forward" in r["forward"] and "backward" in r["backward"] for r in of_dtype)
        assert all(r["why"] for r in of_dtype)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_self_test_detects_a_wrong_result(monkeypatch, name):
    right = oracle.attention

    def wrong(*arguments):
        result = right(*arguments)
        setattr(result, name, getattr(result, name) + 1e-2)
        return result

    with system.forced_isa("portable"):
        assert selftest.check("portable", "float32", selftest.SETTINGS[1]).passed
        monkeypatch.setattr(oracle, "attention", wrong)
        check = selftest.check("portable", "float32", selftest.SETTINGS[1])
    assert not check.passed and check.failure.startswith(f"{name}: error")


def test_doctor_fails_when_a_check_fails(monkeypatch, capsys):
    bounds = {"float32": {"out": 0.0, "lse": 1.0, "dq": 1.0, "dk": 1.0, "dv": 1.0}}
    monkeypatch.setattr(selftest, "BOUNDS", bounds)
    assert main(["doctor", "--isa", "portable"]) == 1
    text = capsys.readouterr().out
    assert "FAILED portable float32 full: out: error" in text


def test_doctor_refuses_an_unknown_instruction_set(capsys):
    assert main(["doctor", "--isa", "abacus"]) == 2
    assert "--isa is 'abacus'" in capsys.readouterr().err


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_doctor_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tilewise.cli.command import main\n"
        "sys.exit(main(['doctor', '--json', '--isa', 'portable']))"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["passed"] and facts["device"]["cuda"] is None


def test_bench_without_torch_says_so():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tilewise.cli.command import main\n"
        "sys.exit(main(['bench']))"
    )
    done = run_python(code)
    assert done.returncode == 2 and "PyTorch, which is not installed" in done.stderr


def test_doctor_without_the_library(tmp_path):
    code = "import sys; from tilewise.cli.command import main; sys.exit(main(['doctor']))"
    done = run_python(code, TILEWISE_LIBRARY_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "libtilewise" in done.stderr and "Traceback" not in done.stderr


def test_doctor_fails_when_nothing_can_run():
    code = (
        "import sys; from tilewise.cli.command import main; sys.exit(main(['doctor', '--no-test']))"
    )
    done = run_python(code, TILEWISE_CPU="abacus")
    assert done.returncode == 1
    assert 'in use: none, TILEWISE_CPU is "abacus"' in done.stdout


@pytest.mark.parametrize(
    ("file", "sentence"),
    [("nowhere/p.json", "there is no folder"), ("p.txt", "is not a file of provenance records")],
)
def test_doctor_checks_the_file_before_it_tests(file, sentence, tmp_path, monkeypatch, capsys):
    (tmp_path / "p.txt").write_text("something else")
    monkeypatch.setattr(doctor, "self_test", None)
    assert main(["doctor", "--record", str(tmp_path / file)]) == 2
    assert sentence in capsys.readouterr().err


def test_module_and_help():
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "doctor" in done.stdout and "bench" in done.stdout


# --- provenance -----------------------------------------------------------------------------------


def test_record_then_provenance(tmp_path, monkeypatch, capsys):
    file = tmp_path / "provenance.json"
    assert main(["doctor", "--isa", "portable", "--json", "--record", str(file)]) == 0
    (record,) = provenance.load(file)
    assert record["kernel"] == "cpu.portable" and record["machine"] == system.cpu_name()
    assert record["checks"] == len(selftest.SETTINGS) * len(selftest.BOUNDS)
    capsys.readouterr()
    monkeypatch.setattr(doctor.provenance.load, "__defaults__", (file,))
    assert main(["doctor", "--provenance", "--json"]) == 0
    states = {r["kernel"]: r["state"] for r in json.loads(capsys.readouterr().out)}
    assert states.pop("cpu.portable") == "run"
    assert states and set(states.values()) <= {"only compiled", "not in this build"}


def test_failed_instruction_set_is_not_recorded(tmp_path):
    good = selftest.Check("portable", "float32", "full")
    bad = selftest.Check("avx2", "float32", "full", failure="out: error 1, allowed 0")
    file = tmp_path / "provenance.json"
    assert provenance.record(file, [good, bad]) == 1
    assert [r["kernel"] for r in provenance.load(file)] == ["cpu.portable"]


def test_packaged_records_name_kernels_of_this_build():
    known = {row["kernel"] for row in system.kernels()}
    for record in provenance.load():
        assert record["kernel"] in known and record["machine"] and record["checks"] > 0


# --- the self-test's own oracle -------------------------------------------------------------------


def test_oracle_agrees_with_autograd():
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    q, k, v, dout = (
        torch.randn(2, rows, heads, 8, dtype=torch.float64, generator=generator)
        for rows, heads in ((5, 4), (7, 2), (7, 2), (5, 4))
    )
    slopes, bias, sinks = (
        torch.rand(4).double(),
        torch.randn(5, 7).double(),
        torch.randn(4).double(),
    )
    options = oracle.Options(3, 1, 1.3, slopes.numpy(), bias.numpy(), sinks.numpy())
    found = oracle.attention(*(t.numpy() for t in (q, k, v, dout)), 0.4, options)

    leaves = [t.requires_grad_() for t in (q, k, v)]
    qh, kh, vh = (t.transpose(1, 2).repeat_interleave(4 // t.shape[2], 1) for t in leaves)
    distance = torch.arange(7) - (torch.arange(5)[:, None] + 2)
    s = 1.3 * torch.tanh(0.4 * qh @ kh.mT / 1.3) - slopes[:, None, None] * distance.abs() + bias
    s = s.masked_fill((distance > 1) | (distance < -3), -torch.inf)
    lse = torch.logsumexp(torch.cat([s, sinks[:, None, None].expand(2, 4, 5, 1)], -1), -1)
    out = ((s - lse[..., None]).exp() @ vh).transpose(1, 2)
    wanted = [out, lse, *torch.autograd.grad(out, leaves, dout)]
    for a, b in zip((found.out, found.lse, found.dq, found.dk, found.dv), wanted, strict=True):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_oracle_of_a_row_without_visible_keys():
    q, k = np.ones((1, 3, 1, 2)), np.ones((1, 1, 1, 2))
    found = oracle.attention(q, k, k, q, 1.0, oracle.Options(right=0))
    assert np.isneginf(found.lse[0, 0, :2]).all() and found.lse[0, 0, 2] == 2.0
    assert (found.out[0, :2] == 0).all() and (found.dq[0, :2] == 0).all()


def test_bf16_encoding_rounds_to_even():
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.1415927, 1e-30], np.float32)
    stored = arrays.decode(arrays.encode(values, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(stored[:3], [1.0, 1.0, 1 + 2**-6])
    np.testing.assert_allclose(stored, values, rtol=2**-8)


# --- helpers -------------------------------------------------------------------------------------


def test_plain_table_is_aligned():
    text = tables.plain(["a", "name"], [["1", "x"], ["100", "longer"]], left=(1,))
    assert text.splitlines() == ["  a  name", "  1  x", "100  longer"]


def test_progress_without_tqdm(monkeypatch, capsys):
    from tilewise.cli.progress import Progress

    monkeypatch.setitem(sys.modules, "tqdm", None)
    with Progress(3, "work") as bar:
        for i in range(3):
            bar.update(loss=i)
    text = capsys.readouterr().err
    assert "work" in text and "3/3" in text


@pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak memory mark cannot be reset"
)
def test_peak_memory_of_a_known_allocation():
    code = (
        "import numpy\n"
        "from tilewise.cli import memory\n"
        "memory._return_blocks_at_once()\n"
        "numpy.ones(40_000_000, dtype=numpy.uint8)\n"
        "print(memory.peak(lambda: numpy.ones(100_000_000, dtype=numpy.uint8)))\n"
        "print(memory.peak(lambda: None))"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    large, nothing = map(int, done.stdout.split())
    assert 95e6 < large < 110e6 and nothing < 5e6


def test_device_is_announced_once(capsys):
    system.training_device.cache_clear()
    devices = {system.training_device("auto") for _ in range(3)}
    text = capsys.readouterr().out
    if devices == {"cpu"}:
        assert text.count("running on the CPU") == 1
    else:
        assert devices == {"cuda"} and not text


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"tilewise {tilewise.__version__}\n"


@pytest.mark.parametrize("option", ["--isa", "--record"])
@pytest.mark.parametrize("flag", ["--provenance", "--prove", "--no-test"])
def test_options_of_the_self_test_are_refused_without_it(flag, option, capsys):
    assert main(["doctor", flag, option, "given"]) == 2
    sentence = (
        f"{option} is 'given', but is allowed only with the self-test, which {flag} leaves out"
    )
    assert sentence in capsys.readouterr().err
