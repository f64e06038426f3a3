"""Code blocks of README.md and of the C page run unchanged, and the tables are complete."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
import torch_versions
from paths import ROOT
from tilewise._library import library_directory

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ("README.md", "docs/c-api.md", "docs/api.md", "docs/distributed.md", "docs/mla.md")
BLOCKS = [block for page in PAGES for block in BLOCK.findall((ROOT / page).read_text())]


def blocks(language: str) -> list[str]:
    return [code for name, code in BLOCKS if name == language]


def run(command: list[str | Path]) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, f"{command[0]}:\n{result.stdout}{result.stderr}"
    return result


def test_every_block_is_known():
    assert {name for name, _ in BLOCKS} == {"python", "cpp", "c"}


@pytest.mark.parametrize("index", range(len(blocks("python"))))
def test_python(index: int, tmp_path: Path):
    if "integrations.sdpa" in blocks("python")[index]:
        torch_versions.require_switch()
    program = tmp_path / "block.py"
    program.write_text(blocks("python")[index])
    run([sys.executable, program])


@pytest.mark.parametrize(
    ("language", "compiler"), [("cpp", ["c++", "-std=c++20"]), ("c", ["cc", "-std=c11"])]
)
def test_compiled(language: str, compiler: list[str], tmp_path: Path):
    (code,) = blocks(language)
    source = tmp_path / f"block.{language}"
    source.write_text(code)
    folder = library_directory()  # the one with the libtilewise that Python uses
    run(
        [*compiler, "-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Werror"]
        + [f"-I{ROOT / 'include'}", source, "-o", tmp_path / "block"]
        + [f"-L{folder}", "-ltilewise", f"-Wl,-rpath,{folder}"]
    )
    result = run([tmp_path / "block"])
    expected = {"cpp": r"0\.5\n", "c": r"cpu\.\w+\.forward\.f32: ok\n"}[language]
    assert re.fullmatch(expected, result.stdout), result.stdout


def test_every_option_is_in_the_table():
    text = (ROOT / "docs" / "options.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)", text, re.MULTILINE))
    parameters = inspect.signature(tilewise.attention).parameters.values()
    options = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert options <= documented, f"not in docs/options.md: {options - documented}"


def test_every_public_name_is_in_the_api_page():
    text = (ROOT / "docs" / "api.md").read_text()
    callables = [name for name in tilewise.__all__ if name[0].islower()]  # classes are result types
    assert len(callables) >= 8
    assert not [name for name in callables if f"`{name}" not in text]


def test_links_have_targets():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"
