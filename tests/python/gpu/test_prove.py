"""`tilewise doctor --prove` and its records, with the kernels of an emulated datacenter Blackwell.

Each command is a process of its own, as for a user, whose cache directory is that of the test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from paths import ROOT

pytest.importorskip("numpy")

from tilewise.cli import prove, prove_checks

pytestmark = pytest.mark.abi("emulator")

FAMILY = "cuda.tcgen05"
GPU = "emulated GPU (sm_100)"
PLAN = (
    "from tilewise import _abi; from tilewise.cli import gpu\n"
    "for d in {dims}:\n"
    "    p = gpu.plan(0, 'bfloat16', d, 'plain', _abi.FORWARD); print(p['kernel'], '|', p['why'])"
)


@pytest.fixture
def blackwell(device, tmp_path, monkeypatch):
    """Processes see an emulated sm_100 and an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_EMULATOR_SM", "100")
    monkeypatch.delenv("TILEWISE_UNPROVED", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "python"))
    return tmp_path / "tilewise" / "proofs.json"


def python(*arguments, **environment) -> subprocess.CompletedProcess:
    environment = {**os.environ, **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=280
    )


def doctor(*flags, **environment) -> tuple[int, dict]:
    done = python("-m", "tilewise", "doctor", "--json", *flags, **environment)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def plans(*dims, **environment) -> list[tuple[str, str]]:
    """The forward kernel and the reason for each head dimension, in a new process."""
    done = python("-c", PLAN.format(dims=dims), **environment)
    assert done.returncode == 0, done.stderr
    return [tuple(line.split(" | ")) for line in done.stdout.splitlines()]


def change(file, **fields) -> None:
    """Changes fields of the only record."""
    (record,) = json.loads(file.read_text())["records"]
    file.write_text(json.dumps({"records": [{**record, **fields}]}))


def test_a_proved_family_is_on_until_driver_or_library_change(blackwell):
    ((kernel, why),) = plans(64)
    assert not kernel.startswith(FAMILY)
    assert f"{FAMILY} is in the library, but not proved on this GPU" in why
    status, report = doctor("--prove")
    assert status == 0 and report["passed"]
    (row,) = report["states"]
    record = row["record"]
    assert record["passed"] and record["gpu"] == GPU and record["sm"] == 100
    assert record["checks"] == 16
    assert {t["head_dim"] for t in record["timings"]} == set(prove_checks.HEAD_DIMS)
    # Its speed on the emulator says nothing; these are the places where it was faster.
    change(blackwell, head_dims=[64, 128])
    found = plans(64, 80, 96, 128)
    assert [kernel.startswith(FAMILY) for kernel, _ in found] == [True, False, False, True]
    assert "it has proved itself on this GPU and was faster" in found[0][1]
    assert f"{FAMILY} was not faster on this GPU for head_dim 96" in found[2][1]
    facts = doctor("--no-test")[1]
    assert "on for tiles of head dim 64, 128" in facts["proofs"][0]["state"]
    (off,) = plans(64, TILEWISE_UNPROVED="0")
    assert not off[0].startswith(FAMILY)
    for name, value in (("TILEWISE_UNPROVED", "0"), ("TILEWISE_FORCE_ARCH", "80")):
        refused = python("-m", "tilewise", "doctor", "--prove", **{name: value})
        assert refused.returncode == 2 and f"{name} is {value}, which" in refused.stderr
    for stale in ({"driver": "1.2"}, {"cuda": 12080}, {"library": "0" * 64}, {"gpu": "B200"}):
        good = blackwell.read_text()
        change(blackwell, **stale)
        ((kernel, why),) = plans(64)
        assert not kernel.startswith(FAMILY), stale
        assert "not proved on this GPU" in why
        assert ": off, because " in doctor("--no-test")[1]["proofs"][0]["state"]
        blackwell.write_text(good)
    assert plans(64)[0][0].startswith(FAMILY)


@pytest.mark.parametrize("text", ["", "{", '{"records": 3}', '{"records": [{"family": 1}]}'])
def test_a_damaged_file_of_records_is_no_record(text, blackwell):
    blackwell.parent.mkdir()
    blackwell.write_text(text)
    assert not plans(64)[0][0].startswith(FAMILY)


def test_a_fault_of_the_kernel_is_a_refusal(blackwell):
    """In strict mode the emulator stops at the order of products that the ISA does not promise."""
    status, report = doctor("--prove", TILEWISE_EMULATOR_STRICT="1")
    assert status == 1 and not report["passed"]
    (row,) = report["states"]
    assert not row["record"]["passed"] and row["record"]["head_dims"] == []
    assert "off, because it failed on" in row["state"]
    assert "head dim" in row["record"]["reason"]  # the step
    assert not plans(64)[0][0].startswith(FAMILY)


CHILDREN = {
    "hang": ("import time; print('{\"steps\": 1}', flush=True); time.sleep(60)", "did not end"),
    "crash": ('import os; print(\'{"step": "x"}\', flush=True); os.abort()', "status -6"),
    "exception": ("raise SystemError('no luck')", "SystemError: no luck"),
    "noise": ("print('hello')", "a line that is no report: hello"),
    "wrong": ('print(\'{"step": "x"}\\n{"failed": "out differs"}\')', "out differs (x)"),
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_child_that_does_not_finish_gives_the_reason(kind, blackwell):
    code, reason = CHILDREN[kind]
    outcome = prove.watch([sys.executable, "-c", code], quiet=True, limit=60, step_limit=3)
    assert reason in outcome.reason and outcome.faster is None


def test_wrong_results_fail_the_checks(blackwell):
    code = (
        "import json\nfrom tilewise.cli import selftest\nfrom tilewise.cli.prove_checks import *\n"
        "for dtype in DTYPES: selftest.BOUNDS[dtype]['out'] = 0.0\n"
        f"run(Checks('{FAMILY}', 0, EMULATED), lambda e: print(json.dumps(e)))"
    )
    done = python("-c", code)
    assert "out differs from double precision by" in done.stdout.splitlines()[-1], done.stderr


def test_every_tile_of_the_family_is_timed(blackwell):
    """With proofs for the timed head dimensions, every head dimension of the family uses it."""
    code = (
        "from tilewise import _abi; from tilewise.cli import gpu; from tilewise.cli.prove_checks "
        f"import *\nChecks('{FAMILY}', 0, EMULATED).use(True)\n"
        "print([d for d in range(8, 129, 8) if not gpu.plan(0, 'bfloat16', d, 'plain', "
        f"_abi.FORWARD)['kernel'].startswith('{FAMILY}')])"
    )
    assert python("-c", code).stdout.strip() == "[]"
