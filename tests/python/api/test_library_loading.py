"""A broken installation gets one sentence: no crash, and no traceback of the loader."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT
from tilewise import _abi, _library, _requirements

NAME = f"libtilewise{_library._SUFFIX}"
ADAPTER = f"libtilewise_torch{_library._SUFFIX}"
ASK = "import tilewise; print(tilewise.__version__)"
ASK_NUMPY = "import numpy, tilewise; q = numpy.ones((1, 2, 1, 8), 'f'); tilewise.attention(q, q, q)"
ASK_TORCH = "import tilewise, torch; q = torch.ones(1, 2, 1, 8); tilewise.attention(q, q, q)"


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh Python that uses the libraries of a folder."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, _library.DIRECTORY_VARIABLE: str(folder)},
        capture_output=True,
        text=True,
    )


def refused(program: str, folder: Path) -> str:
    """The sentence of the ImportError with which the program ends."""
    done = run(program, folder)
    last = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
    assert done.returncode == 1, f"status {done.returncode}: {done.stderr[-2000:]}"
    kind, _, sentence = last.partition(": ")
    assert kind in ("ImportError", "tilewise._library.LibraryNotFoundError"), done.stderr[-2000:]
    assert str(folder) in sentence, "the sentence does not name the file"
    return sentence


def compile_library(path: Path, code: str) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build small libraries")
    source = path.with_suffix(".cpp")
    source.write_text(f'extern "C" {{ {code} }}')
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(source)]
    subprocess.run(command, check=True, capture_output=True)


def libraries(folder: Path) -> Path:
    """Copies of the libraries in use, of which a test damages one."""
    for name in (NAME, ADAPTER):
        source = _library.library_directory() / name
        if source.is_file():
            # The adapter looks for the name that the library records in itself.
            for file in {name, *(p.name for p in source.parent.glob(f"{name}.*"))}:
                shutil.copy(source, folder / file)
    return folder


def abi(version: int) -> str:
    return f"unsigned tilewise_abi_version() {{ return {version}; }}"


def test_copied_libraries_work(tmp_path):
    done = run(ASK, libraries(tmp_path))
    assert done.returncode == 0, done.stderr


def test_no_library(tmp_path):
    sentence = refused(ASK, tmp_path)
    assert f"{NAME} is not in" in sentence and _library.DIRECTORY_VARIABLE in sentence


@pytest.mark.parametrize("kept", [0, 3, 40, 64, 4096, 0.5, 0.99])
def test_truncated_library(tmp_path, kept):
    """A full disk leaves such a file. The loader would map half of it, and the process would
    die."""
    file = libraries(tmp_path) / NAME
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept if kept > 1 else kept * len(whole))])
    assert "damaged" in refused(ASK, tmp_path)


def test_file_that_is_not_a_library(tmp_path):
    (tmp_path / NAME).write_text("version https://git-lfs.github.com/spec/v1\n" * 20)
    assert "damaged" in refused(ASK, tmp_path)


def test_library_for_another_processor(tmp_path):
    file = libraries(tmp_path) / NAME
    code = bytearray(file.read_bytes())
    code[18:20] = (243).to_bytes(2, "little")  # e_machine: RISC-V
    file.write_bytes(code)
    assert "cannot be loaded" in refused(ASK, tmp_path)


def test_library_of_another_abi_version(tmp_path):
    other = _abi.ABI_VERSION + 1
    compile_library(tmp_path / NAME, abi(other) + "int tilewise_plan() { __builtin_trap(); }")
    sentence = refused(ASK_NUMPY, tmp_path)
    assert f"ABI version {other}" in sentence and f"need {_abi.ABI_VERSION}" in sentence


def test_foreign_library_of_the_same_name(tmp_path):
    compile_library(tmp_path / NAME, "int something_else() { return 1; }")
    assert "is not a tilewise library" in refused(ASK, tmp_path)


def test_older_library_of_the_same_abi(tmp_path):
    """Functions added later are reported by name when they are called."""
    compile_library(tmp_path / NAME, abi(_abi.ABI_VERSION))
    sentence = refused(ASK, tmp_path)
    assert "has no tilewise_version" in sentence and "older version" in sentence


def test_undefined_symbol(tmp_path):
    compile_library(tmp_path / NAME, f"int nowhere(); int call = nowhere(); {abi(1)}")
    assert "undefined symbol: nowhere" in refused(ASK, tmp_path)


def test_library_for_a_newer_system(tmp_path):
    """A wheel with the wrong tag fails like this on an old system."""
    file = libraries(tmp_path) / NAME
    code = file.read_bytes()
    assert b"\0GLIBC_2.14\0" in code
    file.write_bytes(code.replace(b"\0GLIBC_2.14\0", b"\0GLIBC_9.14\0"))
    hashed = refused(ASK, tmp_path)
    assert "newer system" in hashed and "GLIBC_9.14" in hashed


def test_doctor_reports_it_in_one_line(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tilewise", "doctor"],
        env={**os.environ, _library.DIRECTORY_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1 and NAME in done.stderr


# --- packages that are not installed -------------------------------------------------------------

NEEDED = {
    ("tilewise.hf", "torch"): "tilewise.hf needs PyTorch 2.10 or newer",
    ("tilewise.hf", "transformers"): "tilewise.hf needs Transformers 5.20 or newer",
    ("tilewise.integrations.transformers", "transformers"): "tilewise.hf needs Transformers 5.20",
    ("tilewise.integrations.sdpa", "torch"): "tilewise.integrations.sdpa needs PyTorch 2.10",
    ("tilewise.serving", "torch"): "tilewise.serving needs PyTorch 2.10",
    ("tilewise.serving", "transformers"): "tilewise.serving needs Transformers 5.20",
    ("tilewise.serving.engine", "torch"): "tilewise.serving needs PyTorch 2.10",
    ("tilewise.nn", "torch"): "tilewise.nn needs PyTorch 2.10 or newer",
    ("tilewise.compat", "torch"): "tilewise.compat needs PyTorch 2.10 or newer",
    ("tilewise.compat.flash_attn.bert_padding", "torch"): "tilewise.compat needs PyTorch 2.10",
    ("tilewise.compat.flash_attn_interface", "torch"): "tilewise.compat needs PyTorch 2.10",
}
CALLS = {
    "tilewise.attention([1.0], [1.0], [1.0])",
    "tilewise.attention_varlen([1.0], [1.0], [1.0], [0], [0])",
    "tilewise.attention_with_kvcache([1.0], [1.0], [1.0])",
    "tilewise.merge_states([1.0], [1.0], [1.0], [1.0])",
    "tilewise.attention_backward",
    "tilewise.attention_jvp",
    "tilewise.attention_second",
    "tilewise.explain([1.0], [1.0], [1.0])",
}


def missed(program: str, absent: str) -> str:
    """The sentence with which a program ends when a package is not installed."""
    done = run(
        f"import sys; sys.modules[{absent!r}] = None\n{program}", _library.library_directory()
    )
    assert done.returncode == 1, f"status {done.returncode}: {done.stderr[-2000:]}"
    assert "During handling" not in done.stderr and "direct cause" not in done.stderr
    kind, _, sentence = done.stderr.strip().splitlines()[-1].partition(": ")
    assert kind == "ModuleNotFoundError", done.stderr[-2000:]
    assert f", which is not installed: pip install '{absent}>=" in sentence
    return sentence


@pytest.mark.parametrize(("module", "absent"), NEEDED)
def test_module_without_its_requirement(module, absent):
    if absent != "torch":
        pytest.importorskip("torch")
    sentence = missed(f"import {module}", absent)
    assert sentence.startswith(NEEDED[module, absent])
    if module in ("tilewise.nn", "tilewise.compat"):  # as an attribute as well
        assert missed(f"import tilewise; {module}", absent) == sentence


@pytest.mark.parametrize("call", sorted(CALLS))
def test_arrays_without_numpy(call):
    sentence = missed(f"import tilewise; {call}", "numpy")
    assert sentence.startswith("tilewise on arrays needs NumPy 1.24 or newer")


def test_missing_dependency_of_a_package_is_not_relabelled():
    """PyTorch is installed, but something that it imports is not."""
    pytest.importorskip("torch")
    done = run("import sys; sys.modules['typing_extensions'] = None\nimport tilewise.nn",
               _library.library_directory())  # fmt: skip
    assert done.returncode == 1 and "typing_extensions" in done.stderr
    assert "tilewise.nn needs" not in done.stderr


@pytest.mark.parametrize("module", ["tilewise.hf", "tilewise.serving"])
def test_older_transformers(module):
    pytest.importorskip("torch")
    fake = "types.ModuleType('transformers'); sys.modules['transformers'].__version__ = '4.57.1'"
    program = f"import sys, types; sys.modules['transformers'] = {fake}\nimport {module}"
    done = run(program, _library.library_directory())
    assert done.stderr.strip().splitlines()[-1] == (
        f"ImportError: {module} needs Transformers 5.20 or newer, but 4.57.1 is installed: "
        "pip install -U 'transformers>=5.20'"
    )


def test_required_versions_match_pyproject():
    """The versions in the extras, which pip uses, match those in the sentences."""
    project = (ROOT / "pyproject.toml").read_text()
    for name, package in _requirements.PACKAGES.items():
        stated = set(re.findall(rf'"{name}>=([\d.]+)"', project))
        assert stated == {package.version}, name


def test_versions_of_any_form_are_compared():
    older, newer = ("2.9", "2.9.1+cu128", "1.13rc1", "2"), ("2.10", "2.11.0+cu130", "3.0rc1", "3")
    assert all(_requirements.is_older("torch", version) for version in older)
    assert not any(_requirements.is_older("torch", version) for version in newer)


# --- the adapter of PyTorch ----------------------------------------------------------------------


def adapter_or_skip(folder: Path) -> Path:
    pytest.importorskip("torch")
    if not (libraries(folder) / ADAPTER).is_file():
        pytest.skip("this build has no adapter")
    return folder / ADAPTER


def test_no_adapter(tmp_path):
    adapter_or_skip(tmp_path).unlink()
    sentence = refused(ASK_TORCH, tmp_path)
    assert f"{ADAPTER} is not in" in sentence and "PyTorch's headers" in sentence
    assert run(ASK_NUMPY, tmp_path).returncode == 0, "arrays need no adapter"


def test_adapter_of_another_version(tmp_path):
    compile_library(
        adapter_or_skip(tmp_path),
        "int tilewise_of_tomorrow(); int call = tilewise_of_tomorrow();",
    )
    sentence = refused(ASK_TORCH, tmp_path)
    assert "different versions of tilewise" in sentence and "tilewise_of_tomorrow" in sentence


def test_adapter_for_another_torch(tmp_path):
    compile_library(
        adapter_or_skip(tmp_path), "int aoti_torch_tomorrow(); int call = aoti_torch_tomorrow();"
    )
    sentence = refused(ASK_TORCH, tmp_path)
    assert "it does not fit this PyTorch" in sentence and "aoti_torch_tomorrow" in sentence


def test_supported_torch_versions(tmp_path):
    """Versions that are too old are named; local and development versions are understood."""
    folder = adapter_or_skip(tmp_path).parent
    old = ["2.9.1+cu128", "1.13.0", "2.9.0a0+git123"]
    new = ["2.10.0", "2.10.0a0+nv25.12", "2.14.0.dev20261120", "3.0.0"]
    program = f"""
import torch
from tilewise import _library
for version in {old + new!r}:
    torch.__version__ = version
    _library.load_torch_adapter.cache_clear()
    try:
        _library.load_torch_adapter()
        print(version, "loads")
    except ImportError as error:
        print(error)
"""
    done = run(program, folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for version, line in zip(old, lines, strict=False):
        assert line.startswith("tilewise needs PyTorch 2.10 or newer") and version in line
    assert lines[len(old) :] == [f"{version} loads" for version in new]
