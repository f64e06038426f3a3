"""The ledger of the CUDA kernels: parsing names, reading files back, finding differences."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import pytest

import cuda_ledger as tool
import ptxas_notices
from kernels_hash import kernels_hash

FORWARD = (
    "_ZN8tilewise4cuda8mma_sync7forwardINS1_6ConfigINS0_4arch4Sm90ENS0_3F16ELi64E"
    "LNS1_4FormE0EEEEEvNS0_13ForwardParamsE"
)
ROWS = (
    "_ZN8tilewise4cuda4simt13backward_rowsINS1_6ConfigINS0_4BF16ELi512EEEEEvNS0_14BackwardParamsE"
)
SMALL = (
    "_ZN8tilewise4cuda5wgmma7forwardINS1_6ConfigINS0_4BF16ELi192ELi128ELNS1_4FormE0E"
    "LNS0_4arch8TileSizeE1EEEEEvNS0_16TmaForwardParamsE"
)
CHECK = "_ZN8tilewise4cuda6common5checkENS1_11CheckParamsE"

FAMILIES = {"simt": tool.Family(3, 900, 300), "wgmma": tool.Family(12, 13_000_000, 7_999_999)}

USAGE = f"""
Fatbin elf code:
================
arch = sm_90
Resource usage:
 Common:
  GLOBAL:0
 Function {FORWARD}:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1256 TEXTURE:0 SURFACE:0 SAMPLER:0
Fatbin elf code:
================
arch = sm_75
 Function {CHECK}:
  REG:46 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:904 TEXTURE:0 SURFACE:0 SAMPLER:0
"""


def ledger():
    return {
        tool.key_of(FORWARD, 90): tool.Cost(168, 0, 1024, 10000),
        tool.key_of(SMALL, 90): tool.Cost(168, 0, 1024, 10000),
        tool.key_of(ROWS, 90): tool.Cost(123, 0, 1024, 20000),
        tool.key_of(CHECK, 75): tool.Cost(46, 8, 0, 3000),
    }


def test_mangled_name_is_parsed():
    key = tool.key_of(FORWARD, 90)
    assert key == tool.Key(90, "mma_sync", "forward", "Sm90", "F16", 64, 0, "plain")
    assert tool.key_of(SMALL, 90).cells()[-2:] == ["192x128", "plain-small"]
    usual = tool.key_of(SMALL.replace("TileSizeE1", "TileSizeE0").replace("Li192", "Li128"), 90)
    assert usual.cells()[-2:] == ["128", "plain"]
    for number, name in ((1, "general"), (2, "masked")):
        other = tool.key_of(FORWARD.replace("FormE0E", f"FormE{number}E"), 90)
        assert other == replace(key, form=name)
    for number, name in ((2, "masked"), (3, "paged"), (4, "tma"), (5, "tma-paged")):
        phase = FORWARD.replace("LNS1_4FormE0E", f"LNS0_4FormE{number}ELNS1_5PhaseE1E")
        assert tool.key_of(phase, 90) == replace(key, form=f"{name}-decode")
    float8 = FORWARD.replace("3F16E", "4E4M3E")
    assert tool.key_of(float8, 90) == replace(key, element="E4M3")
    assert tool.key_of(ROWS, 75) == tool.Key(75, "simt", "backward_rows", "-", "BF16", 512, 0, "-")
    assert tool.key_of(CHECK, 75) == tool.Key(75, "common", "check", "-", "-", 0, 0, "-")


def test_resource_usage_is_read_per_architecture():
    found = list(tool.resources(USAGE))
    assert [(sm, name) for sm, name, _ in found] == [(90, FORWARD), (75, CHECK)]
    assert found[0][2]["REG"] == 168
    assert found[1][2]["STACK"] + found[1][2]["LOCAL"] == 24


def test_ledger_file_round_trip():
    text = tool.text_of(ledger(), "13.0", tool.of_library(123, FAMILIES))
    assert tool.parse_text(text) == (ledger(), "13.0")
    assert text == tool.text_of(
        dict(reversed(ledger().items())), "13.0", tool.of_library(123, FAMILIES)
    )  # the order is stable


LOOPS = """
        /*0100*/                   R2UR UR4, R5 ;                /* 0x1 */
        /*0110*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11] ;
        /*0120*/              @!P0 BRA 0x01d0 ;
        /*0130*/                   R2UR UR6, R7 ;
        /*0140*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ ;
        /*0150*/               @P1 BRA 0x0110 ;
        /*0160*/                   WARPSYNC.ALL ;
        /*0170*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ ;
        /*0180*/               @P1 BRA 0x0160 ;
        /*0190*/               @P2 BRA 0x0100 ;
        /*01a0*/                   EXIT ;
        /*01d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R11] ;
        /*01e0*/              @!P0 BRA 0x01d0 ;
        /*01f0*/                   BRA 0x0130 ;
"""


def test_main_loops_are_the_innermost_loops_with_mma():
    assert tool.main_loop(LOOPS) == (1, 1)
    assert tool.main_loop(LOOPS.replace("HGMMA", "HMMA")) is None


def test_main_loop_counts_are_compared_where_both_exist():
    now, before = ledger(), ledger()
    key = tool.key_of(SMALL, 90)
    now[key] = replace(now[key], r2ur=5, warpsync=0)
    assert tool.differences(now, before) == []
    before[key] = replace(before[key], r2ur=4, warpsync=0)
    assert tool.differences(now, before) == [f"{key}: r2ur 4 -> 5"]
    assert tool.parse_text(tool.text_of(now, "13.0", tool.of_library(123, FAMILIES))) == (
        now,
        "13.0",
    )


def test_differences_are_found():
    now, before = ledger(), ledger()
    assert tool.differences(now, before) == []
    key = tool.key_of(FORWARD, 90)
    now[key] = replace(now[key], registers=169, code=10400)  # 4 % more code is tolerated
    assert tool.differences(now, before) == [f"{key}: registers 168 -> 169"]
    now[key] = replace(before[key], code=10600)
    assert tool.differences(now, before) == [f"{key}: code 10000 -> 10600 bytes"]
    del now[key]
    assert tool.differences(now, before) == [f"{key}: gone"]
    assert tool.differences(before, now) == [f"{key}: new"]


def test_a_part_replaces_its_kernels_and_keeps_the_rest():
    whole = tool.text_of(ledger(), "13.0", tool.of_library(123, FAMILIES))
    some = {tool.key_of(FORWARD, 90): tool.Cost(160, 0, 1024, 9000)}
    text = tool.with_part(some, "13.0", whole)
    assert tool.parse_text(text) == (ledger() | some, "13.0")
    assert [x for x in text.splitlines() if x not in whole.splitlines()] == [
        x for x in text.splitlines() if "160" in x
    ]
    with pytest.raises(tool.LedgerError, match="this is nvcc 12"):
        tool.with_part(some, "12.9", whole)


def test_architectures_missing_from_the_build_are_ignored():
    now = {key: cost for key, cost in ledger().items() if key.sm == 90}
    assert tool.differences(now, ledger()) == []


def test_partial_build_does_not_report_other_kernels_as_gone():
    some = {tool.key_of(FORWARD, 90): tool.Cost(168, 0, 1024, 10000)}
    assert tool.differences(some, ledger(), part=True) == []
    assert len(tool.differences(some, ledger())) == 2
    backward = tool.key_of(FORWARD.replace("7forward", "8backward"), 90)
    before = ledger() | {backward: tool.Cost(1, 0, 0, 1)}
    assert tool.differences(some, before, part=True) == [f"{backward}: gone"]


def test_fast_path_stack_growth_and_a_large_library_are_faults():
    now = ledger()
    assert tool.faults(now, ledger(), 39_999_999, FAMILIES) == []
    assert len(tool.faults(now, ledger(), 56_000_000, FAMILIES)) == 1
    key = tool.key_of(FORWARD, 90)
    now[key] = replace(now[key], stack=16)
    spilled = [f"{key}: 16 bytes of stack in a plain kernel (spilled registers)"]
    assert tool.faults(now, ledger(), 1, {}) == spilled
    assert tool.faults(now, {}, 1, {}) == spilled
    less = {key: replace(now[key], stack=15)}
    assert tool.faults(now, less, 1, {}) == spilled
    assert tool.faults(now, {key: now[key]}, 1, {}) == []
    assert f"{key}: 16 bytes" in tool.text_of(now, "13", tool.of_library(1, {}))


def test_family_has_a_size_limit():
    large = FAMILIES | {"wgmma": tool.Family(12, 13_000_000, 8_000_000)}
    wrong = ["wgmma has 8000000 bytes of the library, at most 7999999 are allowed"]
    assert tool.faults(ledger(), ledger(), 1, large) == wrong
    line = "wgmma: 12 files of machine code, 13000000 bytes, 7999999 inside the library"
    assert f"# {line} (at most 7999999 are allowed)\n" in tool.text_of(
        ledger(), "13", tool.of_library(1, FAMILIES)
    )


def elf(*sections: tuple[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections, and one that holds their names."""
    names = b"\0".join(name.encode() for name, _ in sections) + b"\0.names\0"
    header, parts, at = [], b"", 64
    for name, data in (*sections, (".names", names)):
        header.append(struct.pack("<IIQQQQ24x", names.index(name.encode()), 1, 0, 0, at, len(data)))
        parts, at = parts + data, at + len(data)
    counts = struct.pack("<HHH", 64, len(header), len(sections))
    return (
        b"\x7fELF"
        + bytes(36)
        + struct.pack("<Q", at)
        + bytes(10)
        + counts
        + parts
        + b"".join(header)
    )


def test_family_bytes_are_those_of_its_fat_binaries():
    def image(kind: int, payload: int) -> bytes:
        return struct.pack("<HHIQ", kind, 257, 64, payload) + bytes(48 + payload)

    def container(*images: bytes) -> bytes:
        inside = b"".join(images)
        return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(inside)) + inside

    fat = container(image(2, 24), image(1, 40), image(2, 8)) + bytes(16) + container(image(2, 56))
    library = elf((".text", b"\1" * 40), (".nv_fatbin", fat))
    assert tool.bytes_inside(library) == [24, 8, 56]
    assert tool.code_bytes(elf((".text.f", bytes(48)), (".nv.info", bytes(8)))) == {"f": 48}


def test_compile_times_use_the_last_build_of_each_instance():
    log = "# ninja log v5\n"
    for begin, end, name in ((0, 9000, "wgmma_sm90a_f16_d64"), (0, 4000, "mma_sync_sm90_f16_d64"),
                             (500, 3000, "wgmma_sm90a_f16_d64"), (0, 4500, "wgmma_sm90a_f16_d96"),
                             (0, 800, "common")):  # fmt: skip
        log += f"{begin}\t{end}\t1\tCMakeFiles/x.dir/cuda/{name}.cu.o\tabc\n"
    assert tool.compile_times(log) == [
        "mma_sync: 1 instances, 4 s of compiling",
        "wgmma: 2 instances, 7 s of compiling (goal of all: 180 s on two cores)",
    ]


LOG = """[1/4] Building CUDA object CMakeFiles/a.dir/cuda/one.cu.o
  [2/4] Building CUDA object CMakeFiles/a.dir/cuda/two.cu.o
  ptxas info    : (C7519) warpgroup.arrive is injected in around line 75 by compiler
  ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
[3/4] Building CXX object CMakeFiles/a.dir/three.cpp.o
ptxas info    : (C7518) something
[4/4] Linking CXX shared library x.so
"""


def test_serialised_wgmma_notices_are_found_and_objects_rebuilt(tmp_path, capsys, monkeypatch):
    objects = [tmp_path / f"CMakeFiles/a.dir/cuda/{name}.cu.o" for name in ("one", "two")]
    objects[0].parent.mkdir(parents=True)
    for path in objects:
        path.write_text("")
    log = tmp_path / "build.log"

    def status(text: str) -> int:
        log.write_text(text)
        monkeypatch.setattr(sys, "argv", ["ptxas_notices.py", str(log), str(tmp_path)])
        return ptxas_notices.main()

    assert status(LOG.replace("C75", "C74")) == 0
    assert all(path.exists() for path in objects) and not capsys.readouterr().out
    assert status(LOG) == 1
    assert [path.exists() for path in objects] == [True, False]
    printed = capsys.readouterr().out
    assert "(C7510)" in printed and "(C7518)" in printed and "3 notices in" in printed


def test_file_without_machine_code_is_refused(tmp_path, capsys, monkeypatch):
    fake = tmp_path / "cuobjdump"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    monkeypatch.setenv("CUOBJDUMP", str(fake))
    library = tmp_path / "library.so"
    library.write_bytes(b"nothing")
    assert tool.main([str(library), "--check"]) == 2
    assert "no CUDA machine code inside" in capsys.readouterr().err


def test_code_hash_ignores_comments_and_layout(tmp_path):
    from gpu_check.provenance import source_hash

    def hash_of(code: str) -> str:
        file = tmp_path / "src" / "cuda" / "kernel.h"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
        return source_hash(tmp_path)

    before = hash_of('int a = 1;  // one\nasm("add; // x");\n')
    assert hash_of('/* two\n lines */ int a\n= 1;\nasm("add; // x");') == before
    assert hash_of('int a = 2;\nasm("add; // x");\n') != before
    assert hash_of('int a = 1;\nasm("add; // y");\n') != before


def test_hash_of_a_family_follows_its_own_and_shared_code(tmp_path):
    from gpu_check.provenance import family_hashes

    def hashes_with(path: str) -> dict[str, str]:
        file = tmp_path / "src" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("int changed;")
        return family_hashes(tmp_path)

    hashes_with("cuda/simt/family.cpp")
    before = hashes_with("cuda/wgmma/family.cpp")
    assert list(before) == ["simt", "wgmma"]
    changed = hashes_with("cuda/wgmma/forward.h")
    assert changed["simt"] == before["simt"] and changed["wgmma"] != before["wgmma"]
    shared = hashes_with("attention/band.h")
    assert shared["simt"] != changed["simt"] and shared["wgmma"] != changed["wgmma"]


def test_hash_of_the_kernels_ignores_names_and_follows_machine_code(tmp_path):
    def hashed(kernels):
        path = tmp_path / "ledger.txt"
        path.write_text(tool.text_of(kernels, "13.0.88", tool.of_library(1000, FAMILIES)))
        return kernels_hash(path)

    kernels = ledger()
    before = hashed(kernels)
    renamed = {replace(k, kernel=f"new_{k.kernel}", form="other"): c for k, c in kernels.items()}
    assert hashed(renamed) == before
    first = next(iter(kernels))
    for change in (dict(registers=169), dict(code=10016), dict(stack=8)):
        assert hashed({**kernels, first: replace(kernels[first], **change)}) != before
    assert hashed({k: c for k, c in kernels.items() if k != first}) != before
