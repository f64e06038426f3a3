"""Every CUDA kernel of the library has run somewhere (tools/kernels_run.py)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import cuda_ledger
import kernels_run
from test_cuda_ledger import FORWARD, SMALL

TURING = ("mma_sync", "forward", "Sm75", "F16", "64x1", "plain")
AMPERE = ("mma_sync", "forward", "Sm86", "F16", "96x1", "plain")
HOPPER = ("wgmma", "forward", "-", "BF16", "192x128", "plain")
SIMT = ("simt", "forward", "-", "F32", "512", "-")
APPEND = ("common", "append", "-", "BF16", "-", "-")
ALL = [TURING, AMPERE, HOPPER, SIMT, APPEND]


def test_every_kernel_has_run_somewhere():
    found = kernels_run.places()
    assert len(found) > 900
    nowhere = [" ".join(kernel) for kernel, places in found.items() if not places]
    assert nowhere == [], "neither the emulator's preset nor a result of gpu-check has them"


def test_every_tile_table_runs_in_the_emulator():
    of_table: dict[str, bool] = {}
    for kernel, places in kernels_run.places().items():
        in_emulator = kernels_run.EMULATOR in places
        of_table[kernel[2]] = of_table.get(kernel[2], False) or in_emulator
    assert of_table == dict.fromkeys(["-", "Sm75", "Sm80", "Sm86", "Sm90", "Sm120"], True)


def of_preset(**options: str) -> list[kernels_run.Kernel]:
    names = {f"TILEWISE_CUDA_{name}": value for name, value in options.items()}
    return list(kernels_run.of_preset({"cacheVariables": names}, ALL))


def test_kernels_that_a_preset_builds():
    assert of_preset() == ALL
    assert of_preset(HEAD_DIMS="64;512") == [TURING, SIMT, APPEND]
    assert of_preset(HEAD_DIMS="mma_sync:96;wgmma:192") == [AMPERE, HOPPER, APPEND]
    assert of_preset(HEAD_DIMS="192;Sm86:96") == [AMPERE, HOPPER, APPEND]
    assert of_preset(ELEMENTS="F16;wgmma:BF16") == [TURING, AMPERE, HOPPER, APPEND]
    assert of_preset(ELEMENTS="F32;Sm75:F16;Sm90:BF16") == [TURING, SIMT, APPEND]
    assert of_preset(TABLES="Sm75;Sm90a") == [TURING, HOPPER, SIMT, APPEND]


def of_result(capability: str = "9.0", **tests: object) -> list[kernels_run.Kernel]:
    result = {"gpu": {"compute_capability": capability}, "stages": {"tests": tests}}
    return list(kernels_run.of_result(result, ALL))


PASSED = {"passed": 9, "failed": 0}


def test_kernels_that_a_result_has_run():
    assert of_result(native=PASSED) == [HOPPER, SIMT, APPEND]
    assert of_result("8.0", native=PASSED) == [SIMT, APPEND]
    with_forced = {"forced-75": PASSED, "forced-86": {"passed": 9, "failed": 1}}
    assert of_result("8.0", native=PASSED, **with_forced) == [TURING, SIMT, APPEND]


def test_result_with_a_launch_list_has_run_the_listed_kernels():
    assert of_result(native=PASSED, launched=[" ".join(AMPERE)]) == [AMPERE]


def test_launched_kernels_are_compared_with_the_library(tmp_path, monkeypatch):
    """A GPU records symbols; the emulator records addresses, which the library's table resolves."""
    kernels = {kernels_run.named(SMALL), kernels_run.named(FORWARD)}
    table = {0x1A2B: SMALL, 0x3C: FORWARD, 0x40: "_ZN8tilewise8emulator5fiberEv"}
    monkeypatch.setattr(kernels_run, "known", lambda: kernels)
    monkeypatch.setattr(kernels_run, "symbols", lambda _: table)
    (tmp_path / "17").write_text("+0x1a2b\n+0x1a2b\n+0x999\n")
    library = Path("libtilewise.so")
    assert kernels_run.inside(library) == kernels
    left = " ".join(kernels_run.named(FORWARD))
    assert kernels_run.not_launched(library, tmp_path) == [left]
    (tmp_path / "18").write_text(FORWARD + "\n")
    assert kernels_run.not_launched(library, tmp_path) == []
    # So has a kernel that is newer than the ledger.
    monkeypatch.setattr(kernels_run, "known", lambda: {kernels_run.named(SMALL)})
    assert kernels_run.launched(tmp_path, library) == kernels


def test_reading_machine_code_needs_cuobjdump(monkeypatch):
    def nowhere() -> str:
        raise cuda_ledger.LedgerError("cuobjdump is not found")

    monkeypatch.setattr(kernels_run, "symbols", lambda _: {})
    monkeypatch.setattr(cuda_ledger, "find_cuobjdump", nowhere)
    with pytest.raises(cuda_ledger.LedgerError):
        kernels_run.inside(Path("libtilewise.so"))
