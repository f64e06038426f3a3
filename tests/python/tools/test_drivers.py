"""The reasons that a library with CUDA code gives on machines without a driver that it can use.

The CUDA runtime loads libcuda.so.1; a small one with a given version and status takes the place of
the driver. The runtime asks a driver that starts for tables that have no documentation, so a stub
cannot show a GPU: doctor's words about one that is too old are tested without a driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")

from tilewise.cli import doctor, gpu

STUB = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
int cuDriverGetVersion(int* version) { *version = STUB_VERSION; return 0; }
int cuInit(unsigned flags) { (void)flags; return STUB_STATUS; }
int cuGetExportTable(const void** table, const void* id) { (void)table; (void)id; return 500; }
static int not_found(void) { return 500; }
int cuGetProcAddress(const char* name, void** entry, int version, unsigned long long flags) {
  Dl_info self;
  (void)version, (void)flags;
  dladdr((void*)cuInit, &self);
  *entry = dlsym(dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD), name);
  if (*entry == 0) *entry = (void*)not_found;
  return 0;
}
int cuGetProcAddress_v2(const char* name, void** entry, int version, unsigned long long flags,
                        int* status) {
  if (status != 0) *status = 0;
  return cuGetProcAddress(name, entry, version, flags);
}
"""
NO_DEVICE, MISMATCH = 100, 803  # CUDA_ERROR_NO_DEVICE, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH


def has_cuda() -> bool:
    return gpu.cuda_versions()["runtime"] is not None


def stub(folder: Path, version: int, status: int = 0) -> Path:
    """A driver that supports CUDA up to `version` and answers cuInit with `status`."""
    compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("needs a C compiler to build a driver's stub")
    (folder / "stub.c").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", f"-DSTUB_VERSION={version}"]
    command += [f"-DSTUB_STATUS={status}", "-Wl,-soname,libcuda.so.1"]
    command += ["-o", str(folder / "libcuda.so.1"), str(folder / "stub.c"), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def facts(folder: Path, **variables: str) -> dict:
    """The facts that doctor finds in a process whose driver is in `folder`."""
    if not has_cuda():
        pytest.skip("this library has no CUDA runtime")
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "doctor", "--no-test", "--json"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_driver(tmp_path):
    (tmp_path / "libcuda.so.1").write_text("no library")
    found = facts(tmp_path)
    assert found["cuda"]["driver"] is None and found["cuda"]["runtime"] is not None
    assert found["device"]["no_gpu"] == (
        "there is no GPU: this machine has no NVIDIA driver: libcuda.so.1 cannot be loaded"
    )


@pytest.mark.parametrize("version", ["11.8", "12.2", "12.9"])
def test_driver_older_than_the_runtime(version, tmp_path):
    number = 1000 * int(version.partition(".")[0]) + 10 * int(version.partition(".")[2])
    found = facts(stub(tmp_path, number))
    runtime = found["cuda"]["runtime"]
    if version.partition(".")[0] == runtime.partition(".")[0]:
        pytest.skip(f"CUDA {runtime} runs on every driver of its major version")
    assert found["cuda"]["driver"] == version
    assert found["device"]["no_gpu"] == (
        f"there is no GPU: this machine's driver supports CUDA up to {version}, but this library "
        f"was built with CUDA {runtime}: a newer driver is needed, or a build from source with an "
        "older nvcc"
    )


@pytest.mark.parametrize(
    ("status", "variables", "sentence"),
    [
        (NO_DEVICE, {"CUDA_VISIBLE_DEVICES": "-1"}, 'detected (CUDA_VISIBLE_DEVICES is "-1")'),
        (MISMATCH, {}, "unsupported display driver / cuda driver combination"),
    ],
)
def test_driver_that_does_not_start(status, variables, sentence, tmp_path):
    found = facts(stub(tmp_path, 99000, status), **variables)
    assert found["cuda"]["driver"] == "99.0"
    assert found["device"]["no_gpu"].startswith("there is no GPU: ")
    assert found["device"]["no_gpu"].endswith(sentence)


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ((None, None, None), "no runtime in this build"),
        (("13.0", None, None), "runtime 13.0; no driver"),
        (("13.0", "12.2", "535.104.05"), "runtime 13.0; driver 535.104.05, up to CUDA 12.2"),
        (("12.9", "13.1", None), "runtime 12.9; driver up to CUDA 13.1"),
    ],
)
def test_versions_in_words(versions, text):
    names = ("runtime", "driver", "driver_release")
    assert doctor.cuda_text(dict(zip(names, versions, strict=True))) == text


def test_driver_release(tmp_path):
    file = tmp_path / "version"
    for kind in ("NVIDIA UNIX x86_64 Kernel Module ", "NVIDIA UNIX Open Kernel Module for x86_64"):
        file.write_text(f"NVRM version: {kind} 535.104.05  Sat Aug 19 2023\nGCC version: 12\n")
        assert gpu.driver_release(file) == "535.104.05"
    assert gpu.driver_release(tmp_path / "none") is None


def test_gpu_older_than_the_code_of_the_library():
    device = {
        "index": 0, "name": "GPU", "sm": 61, "multiprocessors": 20, "shared_bytes": 98304,
        "l2_bytes": 2 << 20, "memory_bytes": 8_000_000_000, "table": 0, "tensor_cores": False,
        "plain_cores": False,
    }  # fmt: skip
    code = [{"table": 0, "sm": sm, "ptx": sm == 75} for sm in (75, 80, 90, 75)]
    versions = {"runtime": "13.0", "driver": "13.0", "driver_release": None}
    found = {"device": {"gpus": [device], "no_gpu": ""}, "cuda_code": code, "cuda": versions}
    found["proofs"] = [{"state": "cuda.tcgen05 on GPU: off"}]
    lines = [line.strip() for line in doctor.gpu_lines(found)]
    assert "NOT USED: this library has no code for sm_61, only for sm_75, sm_80, sm_90" in lines
    assert "cuda.tcgen05 on GPU: off" in lines
    device["plain_cores"] = True
    assert not any("NOT USED" in line for line in doctor.gpu_lines(found))
