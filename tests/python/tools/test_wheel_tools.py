"""The stubs that make a wheel load on older systems, and the tool that checks a wheel."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import check_wheel
import manylinux_stubs

MACHINE = platform.machine()
NAME = f"tilewise-0.1.0-py3-none-manylinux_2_28_{MACHINE}.whl"
# Code that newer systems affect: symbols that moved into libc, versions in libm, new functions in
# libstdc++.
CODE = """
#include <cmath>
#include <dlfcn.h>
#include <memory>
#include <mutex>
#include <sstream>
#include <thread>
extern "C" int compute(double x) {
  std::stringstream text;
  text << std::exp(x) << (dlsym(RTLD_DEFAULT, "compute") != nullptr);
  auto one = std::make_shared<int>(1), same = one;
  std::once_flag flag;
  std::call_once(flag, [&] { *same = 41; });
  std::thread([&] { ++*one; }).join();
  return std::move(text).str().empty() ? 0 : *one;
}
"""


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++") or shutil.which("c++")
    if found is None or shutil.which("readelf") is None:
        pytest.skip("needs g++ and binutils to build small libraries")
    return found


def build(compiler: str, path: Path, code: str, *options: str) -> Path:
    source = path.with_suffix(".cpp")
    source.write_text(code)
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return path


def newest(library: Path) -> dict[str, tuple[int, ...]]:
    """The newest versions of glibc and libstdc++ that a library requires."""
    text = subprocess.run(
        ["readelf", "--version-info", "--wide", str(library)], capture_output=True, text=True
    ).stdout
    found: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI)_([\d.]+) ", text):
        found[name] = max(found.get(name, ()), tuple(map(int, version.split("."))))
    return found


def test_nothing_newer_than_the_policy_is_required(compiler, tmp_path):
    stubs = tmp_path / "stubs"
    assert manylinux_stubs.main(["2.28", str(stubs), compiler]) == 0
    options = [f"-L{stubs}", "-Wl,-z,defs", "-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]
    library = build(compiler, tmp_path / "libold.so", CODE, *options)
    needed, limits = newest(library), manylinux_stubs.POLICIES["2.28"]
    assert needed and all(needed[name] <= limits[name] for name in needed), needed
    program = f"import ctypes; print(ctypes.CDLL({str(library)!r}).compute(ctypes.c_double(1)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "42\n", done.stderr


def test_unknown_policy_is_refused(tmp_path, capsys):
    assert manylinux_stubs.main(["2.27", str(tmp_path)]) == 2
    assert "2.28" in capsys.readouterr().err


def wheel(folder: Path, name: str = NAME, **contents: bytes) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for each in check_wheel.WANTED:
            archive.writestr(each, contents.pop(Path(each).name, b""))
        for each, data in contents.items():
            archive.writestr(each, data)
    return path


def test_wheel_is_checked(compiler, tmp_path, capsys):
    plain = build(compiler, tmp_path / "plain.so", "int x;", "-Wl,-rpath,$ORIGIN").read_bytes()
    build(compiler, tmp_path / "libcuda.so", "int cuInit() { return 0; }")
    code = "int cuInit(); int x = cuInit();"
    options = [f"-L{tmp_path}", "-lcuda", "-Wl,-rpath,/opt/cuda"]
    bad = build(compiler, tmp_path / "bad.so", code, *options).read_bytes()
    libraries = ("libtilewise.so", "libtilewise_torch.so", "libtilewise_jax.so")
    good = dict.fromkeys(libraries, plain)
    path = wheel(tmp_path, **good)
    assert list(check_wheel.faults(path)) == [] and check_wheel.main([str(path)]) == 0
    assert "good" in capsys.readouterr().out
    path = wheel(tmp_path, f"tilewise-0.1.0-py3-none-linux_{MACHINE}.whl",
                 **{**good, "libtilewise.so": bad, "tilewise/kernel.cu": b""})  # fmt: skip
    assert list(check_wheel.faults(path)) == [
        "the name is not tilewise-VERSION-py3-none-manylinux_2_N_MACHINE.whl",
        "must not contain tilewise/kernel.cu",
        "tilewise/lib/libtilewise.so needs libcuda.so",
        "tilewise/lib/libtilewise.so looks for libraries in ['/opt/cuda']: only $ORIGIN is allowed",
    ]
    assert check_wheel.main([str(path)]) == 1
    (tmp_path / NAME).write_bytes(b"no archive")
    assert check_wheel.main([str(tmp_path / NAME)]) == 2


def test_code_of_another_machine_or_for_newer_systems_is_refused(compiler, tmp_path):
    plain = build(compiler, tmp_path / "plain.so", "int x;").read_bytes()
    libraries = dict.fromkeys(
        ("libtilewise.so", "libtilewise_torch.so", "libtilewise_jax.so", "tilewise/tool"), plain
    )
    other = next(name for name in check_wheel.MACHINES if name != MACHINE)
    path = wheel(tmp_path, NAME.replace("2_28", "2_34").replace(MACHINE, other), **libraries)
    found = list(check_wheel.faults(path, "2.28"))
    assert found[0] == "needs glibc 2.34: at most 2.28 is allowed"
    words = (check_wheel.MACHINES[MACHINE], check_wheel.MACHINES[other])
    assert found[1:] == [
        f"{name} has machine code of {words[0]}, not of {words[1]}"
        for name in (*(f"tilewise/lib/{each}" for each in list(libraries)[:3]), "tilewise/tool")
    ]
    assert list(check_wheel.faults(wheel(tmp_path, **libraries), "2.28")) == []


def test_wheel_is_unpacked_for_another_interpreter(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWISE_LIBRARY_DIR", "/elsewhere")
    path = wheel(tmp_path, **{"tilewise/data": b"x"})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").touch()
    words, variables = check_wheel.unpack(path, tmp_path / "folder", "qemu -L '/a root' python3")
    assert words == ["qemu", "-L", "/a root", "python3"]
    assert (tmp_path / "folder/tilewise/data").read_bytes() == b"x"
    assert not (tmp_path / "folder/old").exists()
    assert variables["PYTHONPATH"] == str(tmp_path / "folder")
    assert "TILEWISE_LIBRARY_DIR" not in variables and variables["PATH"]


def test_python_c_api_is_refused(compiler, tmp_path):
    code = 'extern "C" { extern int PyGILState_Ensure(), _Py_Dealloc(); void f_PyX(); }'
    code += "int x = PyGILState_Ensure() + _Py_Dealloc() + (f_PyX(), 0);"
    library = build(compiler, tmp_path / "bad.so", code)
    assert list(check_wheel.library_faults("bad.so", library, "")) == [
        "bad.so uses Python's C API: PyGILState_Ensure, _Py_Dealloc"
    ]


def test_large_wheel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(check_wheel, "LARGEST", 1000)
    monkeypatch.setattr(check_wheel, "WANTED", ())
    path = wheel(tmp_path, **{"tilewise/data": b"x" * 1000})
    assert list(check_wheel.faults(path)) == [
        f"has {path.stat().st_size} bytes, at most 999 are allowed",
    ]


def test_every_gpu_architecture_has_code():
    def row(table: int, sm: int, ptx: bool = False) -> dict[str, int]:
        return {"table": table, "sm": sm, "ptx": ptx}

    code = [row(0, 75, ptx=True), *(row(sm, sm) for sm in (75, 80, 86, 90, 120))]
    assert list(check_wheel.gpus_without_code(code)) == [
        f"no code of tile table sm_90 for sm_{sm}" for sm in (100, 103, 110)
    ]
    assert list(check_wheel.gpus_without_code([*code, row(90, 90, ptx=True)])) == []
    assert len(list(check_wheel.gpus_without_code(code[1:]))) == 10 + 3
    assert list(check_wheel.gpus_without_code([])) == [], "a build without CUDA"
