"""doctor's report about GPUs, and the provenance records made from results of gpu-check."""

from __future__ import annotations

import ctypes
import json
import re

import pytest

from paths import ROOT

pytest.importorskip("numpy")

from tilewise import _abi
from tilewise._capabilities import cuda_code
from tilewise._library import c_library
from tilewise.cli import doctor, gpu, provenance, selftest, system
from tilewise.cli.command import main


def result(**tests):
    return {
        "date": "2026-11-21",
        "gpu": {"name": "NVIDIA H200", "compute_capability": "9.0", "driver": "580"},
        "versions": {"torch": "2.11"},
        "sources": "0123456789abcdef",
        "stages": {
            "smoke": {
                "kernels": [
                    "cuda.mma_sync.backward.f16",
                    "cuda.mma_sync.forward.bf16",
                    "cuda.simt.forward.f32",
                ]
            },
            "tests": {"passed": True, **tests},
        },
    }


def counted(**counts):
    return {"passed": 10, "failures": [], "skips": {}, **counts}


def test_records_from_a_result():
    records = provenance.from_gpu_check(result(**{"native": counted(), "forced-75": counted()}))
    found = {(r["kernel"], r["table"]): r for r in records}
    assert set(found) == {("cuda.mma_sync", 90), ("cuda.mma_sync", 75), ("cuda.simt", 0)}
    assert found["cuda.mma_sync", 90]["dtypes"] == ["bfloat16", "float16"]
    assert found["cuda.mma_sync", 75]["dtypes"] == ["float16"]
    assert found["cuda.mma_sync", 75]["machine"] == "NVIDIA H200, by PTX"
    assert found["cuda.simt", 0]["checks"] == 10


def test_a_wgmma_gpu_runs_mma_sync_only_when_forced():
    report = result(**{"native": counted(), "forced-90": counted(), "forced-75": counted()})
    report["stages"]["smoke"]["kernels"].append("cuda.wgmma.forward.bf16")
    records = provenance.from_gpu_check(report)
    assert {(r["kernel"], r["table"], r["machine"]) for r in records} == {
        ("cuda.wgmma", 901, "NVIDIA H200"),
        ("cuda.mma_sync", 90, "NVIDIA H200"),
        ("cuda.mma_sync", 75, "NVIDIA H200, by PTX"),
        ("cuda.simt", 0, "NVIDIA H200"),
    }
    del report["stages"]["tests"]["forced-90"]
    assert ("cuda.mma_sync", 90) not in {
        (r["kernel"], r["table"]) for r in provenance.from_gpu_check(report)
    }


def test_a_family_that_is_not_proved_is_recorded_from_its_own_run():
    report = result(native=counted(passed=7), unproved=counted(passed=5))
    report["gpu"]["compute_capability"] = "10.0"
    report["stages"]["smoke"]["kernels"].append("cuda.tcgen05.forward.bf16")
    found = {r["kernel"]: (r["table"], r["checks"]) for r in provenance.from_gpu_check(report)}
    assert found == {"cuda.tcgen05": (1001, 5), "cuda.mma_sync": (90, 7), "cuda.simt": (0, 7)}


@pytest.mark.parametrize("changes", [{"failed": 1}, {"not_run": 3}, {"passed": 0}])
def test_incomplete_run_yields_no_records(changes):
    report = result(**{"native": counted(), "forced-80": counted(**changes)})
    assert {r["table"] for r in provenance.from_gpu_check(report)} == {90, 0}


def test_gpu_records_are_replaced_and_cpu_records_kept(tmp_path, capsys):
    path, source = tmp_path / "provenance.json", tmp_path / "gpu-h200.json"
    cpu = {"kernel": "cpu.avx2", "device": "cpu", "machine": "a CPU"}
    old = {"kernel": "cuda.simt", "device": "cuda", "table": 0, "machine": "an old GPU"}
    path.write_text(json.dumps({"records": [cpu, old]}))
    source.write_text(json.dumps(result(native=counted())))
    assert provenance.main([str(source)], path) == 0
    records = provenance.load(path)
    assert cpu in records and old not in records
    assert sum(r["device"] == "cuda" for r in records) == 2
    assert provenance.main([], path) == 2
    capsys.readouterr()


def test_status_distinguishes_tables_that_ran_from_compiled_only(monkeypatch):
    inside = [{"table": t, "sm": t or 75, "ptx": False} for t in (0, 86, 90, 901)]
    names = ("cpu.avx2", "cuda.simt", "cuda.mma_sync", "cuda.wgmma")
    families = [{"kernel": name} for name in names]
    monkeypatch.setattr(provenance, "cuda_code", lambda: inside)
    monkeypatch.setattr(provenance.system, "kernels", lambda: families)
    rows = provenance.status(provenance.from_gpu_check(result(native=counted())))
    assert {r["kernel"]: r["state"] for r in rows} == {
        "cpu.avx2": "only compiled",
        "cuda.simt": "run",
        "cuda.mma_sync tiles of sm_86": "only compiled",
        "cuda.mma_sync tiles of sm_90": "run",
        "cuda.wgmma tiles of sm_90a": "only compiled",
    }


def test_status_names_the_tables_that_ran_in_other_builds(monkeypatch):
    families = [{"kernel": name} for name in ("cuda.simt", "cuda.mma_sync", "cuda.wgmma")]
    monkeypatch.setattr(provenance, "cuda_code", list)
    monkeypatch.setattr(provenance.system, "kernels", lambda: families)
    ran = provenance.from_gpu_check(result(**{"native": counted(), "forced-75": counted()}))
    rows = provenance.status(ran)
    assert {r["kernel"]: [run["table"] for run in r["runs"]] for r in rows} == {
        "cuda.simt": [0],
        "cuda.mma_sync tiles of sm_75": [75],
        "cuda.mma_sync tiles of sm_90": [90],
        "cuda.wgmma": [],
    }
    assert {r["state"] for r in rows} == {"not in this build"}


def test_provenance_names_the_code_inside(monkeypatch, capsys):
    code = [{"table": t, "sm": t or 75, "ptx": t == 80} for t in (0, 80, 90)]
    monkeypatch.setattr(doctor, "cuda_code", lambda: code)
    assert main(["doctor", "--provenance"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "CUDA code in this library: without tensor cores: SASS 75; tiles of sm_80: PTX 80; "
        "tiles of sm_90: SASS 90"
    )


def test_gpus_are_listed_or_their_absence_explained():
    gpus, why = gpu.gpus()
    assert bool(gpus) != bool(why)
    assert doctor.collect([])["device"]["no_gpu"] == why
    for row in gpus:
        assert row["sm"] >= 50 and row["name"]
    info = _abi.sized(_abi.GpuInfo)
    status = c_library().tilewise_gpu(len(gpus), ctypes.byref(info))
    assert status == (_abi.INVALID_ARGUMENT if gpus else _abi.UNSUPPORTED)


def test_library_without_cuda_says_how_to_build_one_with_cuda():
    """It must not claim that there is no GPU: the machine may have one."""
    if doctor.cuda_code():
        pytest.skip("this library has CUDA code")
    why = gpu.gpus()[1]
    assert why.startswith("no GPU is used: this library was built without CUDA; ")
    options = re.findall(r"TILEWISE_\w+", why)
    packaging = (ROOT / "docs" / "packaging.md").read_text()
    assert options and all(f"| `{option}` |" in packaging for option in options)


def test_packaged_code_listing_ends_with_a_status():
    rows = cuda_code()
    info = _abi.sized(_abi.CudaCodeInfo)
    status = c_library().tilewise_cuda_code(len(rows), ctypes.byref(info))
    assert status == (_abi.INVALID_ARGUMENT if rows else _abi.UNSUPPORTED)
    assert c_library().tilewise_cuda_code(-1, ctypes.byref(info)) != _abi.OK
    info.struct_size = 4
    assert c_library().tilewise_cuda_code(0, ctypes.byref(info)) == _abi.INVALID_ARGUMENT


def test_kernel_table_has_a_row_per_problem_and_gpu():
    for row in gpu.gpus()[0]:
        rows = gpu.planned_kernels(row["index"])
        for dtype in gpu.DTYPES:
            for case in gpu.CASES:
                dims = [
                    d for r in rows if (r["dtype"], r["case"]) == (dtype, case)
                    for d in r["head_dims"]
                ]  # fmt: skip
                assert dims == list(gpu.HEAD_DIMS)
        assert all(r["forward"]["why"] for r in rows)


def test_code_text_lists_sass_and_ptx_by_table():
    rows = [
        {"table": 0, "sm": 75, "ptx": True},
        {"table": 90, "sm": 90, "ptx": False},
        {"table": 90, "sm": 100, "ptx": False},
        {"table": 90, "sm": 90, "ptx": True},
    ]
    expected = "without tensor cores: PTX 75; tiles of sm_90: SASS 90 100, PTX 90"
    assert doctor.code_text(rows) == expected
    assert doctor.code_text([]) == "none in this build"


def test_self_test_of_a_gpu_runs_on_it():
    gpus = gpu.gpus()[0]
    if not gpus or (gpus[0]["memory_bytes"] and not system.cuda_device()):
        pytest.skip("no GPU whose memory this process can use")
    check = selftest.check("gpu0", "float16", selftest.SETTINGS[0])
    if "has no CUDA kernel" in check.failure:
        pytest.skip(check.failure)
    assert check.passed, check.failure
    assert check.kernel.startswith("cuda.")


def test_missing_gpu_cannot_be_tested(capsys):
    assert main(["doctor", "--isa", "gpu99"]) == 2
    assert "gpu99" in capsys.readouterr().err
