"""tools/run_peer_suites.py, run on a small test file in place of another package's tests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from paths import ROOT

torch = pytest.importorskip("torch")

sys.path.insert(0, str(ROOT / "tools"))

from peer_suites import cases, known  # noqa: E402

FILE = """
import os

import pytest
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import USE_TRITON_ROCM, _get_block_size_n
from flash_attn_interface import flash_attn_func as flash_attn_3_func

assert torch.cuda.get_device_capability("cuda")[0] >= 8


def normalize_flash_attn_S(probabilities, *others, **more):
    raise AssertionError("replaced")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows,keys", [(1, 9), (9, 1), (5, 5)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0)])
def test_agree(rows, keys, window, causal):
    q, k, v = (torch.randn(2, n, 2, 16, device="cuda") for n in (rows, keys, keys))
    if rows > keys:
        pytest.skip("more rows than keys")
    one = flash_attn_func(q, k, v, causal=causal, window_size=torch.tensor(window))
    other = flash_attn_3_func(q, k, v, causal=causal, window_size=window)
    assert torch.equal(one, other)
    assert normalize_flash_attn_S(one, 1, causal=causal) is one


@pytest.mark.parametrize("n", [3, pytest.param(40, id="large"), 5])
def test_wrong(n):
    assert n != 5, "five"


@pytest.mark.skipif(True, reason="never")
def test_marked():
    raise AssertionError


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_types(dtype):
    q = torch.randn(1, 4, 1, 64, dtype=dtype)
    flash_attn_3_func(q, q, q.repeat(1, 1, 1, 9), qv=q.repeat(1, 1, 1, 9))


def test_memory():
    raise torch.OutOfMemoryError("there is no room")


def test_ends_its_process():
    os._exit(1)
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peers")
    file, result = folder / "test_flash_attn.py", folder / "result.json"
    file.write_text(FILE)
    command = [sys.executable, str(ROOT / "tools" / "run_peer_suites.py"), str(file)]
    command += ["--device", "cpu", "--largest", "9", "--processes", "2", "--seconds", "300"]
    done = subprocess.run(
        [*command, "--result", str(result)], capture_output=True, text=True, timeout=500
    )
    assert result.exists(), done.stderr[-2000:]
    return done, json.loads(result.read_text())


WANTED = {
    "test_agree": dict(cases=12, sample=12, passed=8, skipped=4),
    "test_wrong": dict(cases=3, passed=1, failed=1, deselected=1),
    "test_marked": dict(cases=1, skipped=1),
    "test_types": dict(cases=2, deselected=1, refused=1),
    "test_memory": {"cases": 1, "out of memory": 1},
    "test_ends_its_process": dict(cases=1, failed=1),
}


@pytest.mark.parametrize("name", WANTED)
def test_every_case_is_counted_once(outcome, name):
    _, result = outcome
    row = result["files"][0]["functions"][name]
    counts = ("passed", "failed", "skipped", "refused", "deselected", "out of memory", "not run")
    wanted = dict.fromkeys(counts, 0) | WANTED[name]
    assert {key: row[key] for key in wanted} == wanted
    assert sum(row[key] for key in counts) == row["sample"]


def test_reasons_and_failures_are_reported(outcome):
    done, result = outcome
    functions = result["files"][0]["functions"]
    assert done.returncode == 1
    assert "AssertionError: five" in functions["test_wrong"]["failures"][0]["why"]
    assert "(line " in functions["test_wrong"]["failures"][0]["why"]
    reasons = functions["test_types"]["reasons"]
    assert reasons["deselected: float8: its cases have not been run"] == 1
    assert any("qv makes a score of 64 + 576" in x for x in reasons)
    assert functions["test_marked"]["reasons"] == {"skipped: never": 1}
    for line in ("test_agree", "AssertionError: five", "deselected: larger than 9"):
        assert line in done.stdout
    assert set(result["adapted"]) == set(known.ADAPTED)


def test_sample_is_fixed_by_its_seed_and_has_every_case_once():
    drawn = cases.sample("test_x", 1000, 300, seed=5)
    assert drawn == cases.sample("test_x", 1000, 300, seed=5) and len(set(drawn)) == 300
    assert drawn != cases.sample("test_x", 1000, 300, seed=6)
    assert sorted(cases.sample("test_x", 7, 300, seed=5)) == list(range(7))


def test_cases_are_the_product_of_the_axes():
    @pytest.mark.parametrize("a", [1, 2])
    @pytest.mark.parametrize(["b", "c"], [(3, 4), pytest.param(5, 6)])
    def test_it(a, b, c):
        pass

    class Module:
        pass

    module = Module()
    module.test_it = test_it
    (function,) = cases.functions(module)
    assert function.total == 4
    found = [tuple(function.case(i)[name] for name in "abc") for i in range(4)]
    assert sorted(found) == [(1, 3, 4), (1, 5, 6), (2, 3, 4), (2, 5, 6)]
