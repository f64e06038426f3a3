"""The lints find what they look for, and nothing in a clean tree."""

import subprocess
import sys
from pathlib import Path

import pytest

from paths import ROOT

TOOLS = ROOT / "tools"
LONG_FUNCTION = "int f() {\n" + "  g();\n" * 79 + "}\n"

BAD = {
    "attention includes cpu": (
        "includes",
        {"src/attention/a.h": '#include "cpu/b.h"\n', "src/cpu/b.h": "\n"},
        "src/attention/a.h:1: attention includes src/cpu/b.h of cpu",
    ),
    "base includes attention": (
        "includes",
        {"src/base/a.h": '\n#include "attention/b.h"\n', "src/attention/b.h": "\n"},
        "src/base/a.h:2: base includes src/attention/b.h",
    ),
    "a family includes another": (
        "includes",
        {"src/cuda/wgmma/a.cu": '#include "../mma_sync/b.h"\n', "src/cuda/mma_sync/b.h": "\n"},
        "cuda/wgmma includes src/cuda/mma_sync/b.h",
    ),
    "cpu includes a CUDA family": (
        "includes",
        {"src/cpu/a.cpp": '#include "cuda/simt/b.h"\n', "src/cuda/simt/b.h": "\n"},
        "cpu includes src/cuda/simt/b.h",
    ),
    "cpu includes dispatch": (
        "includes",
        {"src/cpu/generic/a.h": '#include "dispatch/b.h"\n', "src/dispatch/b.h": "\n"},
        "cpu includes src/dispatch/b.h of dispatch",
    ),
    "bindings see the inside": (
        "includes",
        {"bindings/torch/a.cpp": '#include "../../src/base/b.h"\n', "src/base/b.h": "\n"},
        "bindings includes src/base/b.h",
    ),
    "intrinsics in the algorithm": (
        "includes",
        {"src/attention/a.h": "#include <immintrin.h>\n"},
        "attention includes immintrin.h: plain C++20 only",
    ),
    "CUDA in the algorithm": (
        "includes",
        {"src/base/a.h": "#include <cuda_runtime.h>\n"},
        "base includes cuda_runtime.h",
    ),
    "torch in the library": (
        "includes",
        {"src/capi/a.cpp": "#include <torch/torch.h>\n"},
        "frameworks stay in bindings/",
    ),
    "tests in the library": (
        "includes",
        {"src/cpu/a.cpp": '#include "../../tests/b.h"\n', "tests/b.h": "\n"},
        "are not part of the library",
    ),
    "a header that does not exist": (
        "includes",
        {"src/cpu/a.cpp": '#include "cpu/gone.h"\n'},
        '"cpu/gone.h" is not a file of this project',
    ),
    "a folder without a place": ("includes", {"src/extra/a.h": "\n"}, "src/extra is not a layer"),
    "kernels include the planner": (
        "includes",
        {"src/cuda/wgmma/a.cuh": '#include "cuda/plan.h"\n', "src/cuda/plan.h": "\n"},
        "cuda/wgmma includes src/cuda/plan.h of cuda",
    ),
    "the planner includes a family": (
        "includes",
        {"src/cuda/a.cpp": '#include "cuda/simt/family.h"\n', "src/cuda/simt/family.h": "\n"},
        "cuda includes src/cuda/simt/family.h of cuda/simt/host",
    ),
    "the planner names a family": (
        "families",
        {"src/cuda/toy/family.cpp": "\n", "src/cuda/a.cpp": "// toy\nif (&row == &toy::kRow);\n"},
        "src/cuda/a.cpp:2: names the family toy",
    ),
    "a constant names a family": (
        "families",
        {"src/cuda/big_toy/family.cpp": "\n", "src/cuda/a.h": "int kBigToyRows;\n"},
        "src/cuda/a.h:1: names the family BigToy",
    ),
    "the build names a family": (
        "families",
        {"src/cuda/toy/family.cpp": "\n", "cmake/a.cmake": 'if(family STREQUAL "toy")\n'},
        "cmake/a.cmake:1: names the family toy",
    ),
    "Python modules import each other": (
        "imports",
        {"python/tilewise/a.py": "from . import b\n", "python/tilewise/b.py": "from .a import x\n"},
        "python/tilewise/a.py:1: import cycle: tilewise.a -> tilewise.b -> tilewise.a",
    ),
    "a cycle through an import in a function": (
        "imports",
        {
            "python/tilewise/__init__.py": "from .a import f\n",
            "python/tilewise/a.py": "def f():\n    import tilewise.inner.b\n",
            "python/tilewise/inner/__init__.py": "\n",
            "python/tilewise/inner/b.py": "from ..c import x\n",
            "python/tilewise/c.py": "from tilewise import f\n",
        },
        "python/tilewise/__init__.py:1: import cycle: "
        "tilewise -> tilewise.a -> tilewise.inner.b -> tilewise.c -> tilewise",
    ),
    "a module sets a global of another": (
        "imports",
        {"python/tilewise/a.py": "\nfrom . import b\nb.fast = 1\n", "python/tilewise/b.py": "\n"},
        "python/tilewise/a.py:3: sets fast of tilewise.b: only that module may assign its globals",
    ),
    "a function sets a global by the whole name of its module": (
        "imports",
        {
            "python/tilewise/__init__.py": "\n",
            "python/tilewise/a.py": "import tilewise.b\ndef f():\n    tilewise.b.n += 1\n",
            "python/tilewise/b.py": "n = 1\n",
        },
        "python/tilewise/a.py:3: sets n of tilewise.b",
    ),
    "setattr of another module": (
        "imports",
        {
            "python/tilewise/a.py": "import tilewise.b as c\nsetattr(c, 'n', 1)\n",
            "python/tilewise/b.py": "n = 1\n",
        },
        "python/tilewise/a.py:2: sets 'n' of tilewise.b",
    ),
    "long file": ("size", {"src/a.h": "\n" * 501}, "src/a.h:501: 501 lines; at most 500"),
    "long line": ("size", {"a.py": "# " + "x" * 99 + "\n"}, "a.py:1: 101 columns; at most 100"),
    "long function": ("size", {"a.cpp": "\n" + LONG_FUNCTION}, "a.cpp:2: f: 81 lines; at most 80"),
    "long member of a template": (
        "size",
        {"a.h": "template <class T>\nstruct S {\n  int x = 1;\n  " + LONG_FUNCTION + "};\n"},
        "a.h:4: f: 81 lines; at most 80",
    ),
    "long Python function": (
        "size",
        {"a.py": "class A:\n    def f(self):\n" + "        x = 1\n" * 80},
        "a.py:2: f: 81 lines; at most 80",
    ),
    "assembly in a kernel": (
        "size",
        {"src/cuda/wgmma/a.cu": 'void f() {\n  asm volatile("nop;");\n}\n'},
        "src/cuda/wgmma/a.cu:2: asm outside src/cuda/ptx/",
    ),
    "path of a user": ("words", {"a.md": "see\n/home/someone/x\n"}, "a.md:2: path of one machine"),
    "private address": ("words", {"a.py": 'HOST = "192.168.1.20"\n'}, "private address"),
    "private host": ("words", {"a.toml": "url = 'http://mirror.internal/x'\n"}, "private host"),
    "credentials": ("words", {"a": "https://me:secret@example.org/\n"}, "credentials"),
    "conflict marker": ("words", {"a.md": "<<<<<<< ours\n"}, "conflict marker"),
    "unfinished": ("words", {"a.cpp": "// TODO\n"}, "TODO without a reason"),
    "wide page": (
        "phrases",
        {"a.md": "# " + "x " * 60 + "\n\nA line of " + "word " * 20 + "\n"},
        "a.md:3: 110 columns; at most 100",
    ),
    "large file": ("words", {"a.bin": "x" * (1025 * 1024)}, "1025 KB; at most 1024"),
}

# Comments of C++, and the phrase that the finding quotes.
PHRASES = {
    "// The warp that waits is woken by whoever arrives last.": "whoever",
    "// A tile computes its sums himself.": "himself",
    "// Nobody reads the stage.": "Nobody",
    "// Somebody else fills it.": "Somebody",
    "// The warp who reads it.": "who",
    "// Who is done takes the next one.": "Who",
    "// The producer and his stages.": "his",
    "// Read by everybody.": "everybody",
    "// This had better be in cache.": "had better",
    "// The rows, all of which are to be stored.": "are to be",
    "// The value is to be read once.": "is to be",
    "// Tiles are taken as they come.": "as they come",
    "// All splits that there are.": "that there are",
    "// All but for the first one.": "but for",
    "// Loads that are on their way.": "on their way",
    "// Of a sequence, the first row.": "Of",
    "// The last tile is masked, too.": ", too",
    "// One block a multiprocessor.": "a multiprocessor",
    "// As many blocks as multiprocessors.": "multiprocessors",
    "// The dealing warp finds the next tile.": "dealing warp",
    "// Read by math warps.": "math warps",
    "// Written by the loading warp.": "loading warp",
    "// Keys of a stranger.": "stranger",
    "// Rows that NaN has spoilt.": "spoilt",
    "// Rows that it may_spoil.": "may_spoil",
    "// Keys that we foresee.": "foresee",
    "// As let_next_in does.": "let_next_in",
    "// Where Form::boxes reads them.": "Form::boxes",
    "// When lengths are alike.": "lengths are alike",
    "// Tiles of the last round of a grid.": "last round",
    "// What a block finds.": "What a block finds.",
    "// The rest had\n// better wait.": "had better",
    "/* Stages\n * that nobody reads. */": "nobody",
    "int a;  // Of a row.": "Of",
}
CLEAN = {
    "include/tilewise/tilewise.h": "#include <stdint.h>\n",
    "src/base/math.h": '#pragma once\n#include <cstdint>\n#include "tilewise/tilewise.h"\n',
    "src/attention/band.h": '#include "base/math.h"\n',
    "src/cpu/isa/avx2/float32.cpp": '#include <immintrin.h>\n#include "attention/band.h"\n',
    "src/cuda/ptx/mma.h": 'inline void f() { asm volatile("nop;"); }\n',
    "src/cuda/wgmma/forward.cuh": '#include "cuda/ptx/mma.h"\n#include "attention/band.h"\n',
    "src/dispatch/planner.cpp": '#include "cpu/backend.h"\n',
    "src/cpu/backend.h": "namespace tilewise {\n" + "int f();\n" * 100 + "}\n",
    "src/capi/table.cpp": "constexpr int table[] = {\n" + "  f(1),\n" * 100 + "};\n",
    "src/capi/long_text.cpp": "// asm volatile(\n" + "int f() {\n" + "  g();\n" * 78 + "}\n",
    "bindings/torch/a.cpp": '#include <torch/csrc/stable/library.h>\n#include "b.h"\n',
    "bindings/torch/b.h": '#include "tilewise/tilewise.h"\n',
    "python/a.py": 'def f():\n    """One\n' + "    more\n" * 79 + '    """\n    return 1\n',
    "python/tilewise/__init__.py": "from .c import f\n\n\ndef __getattr__(name):\n"
    "    return importlib.import_module('.d', __name__)\n",
    "python/tilewise/c.py": "import torch\nfrom typing import TYPE_CHECKING\n\nfrom . import e\n\n"
    "if TYPE_CHECKING:\n    from .d import D\n\n\ndef f(d: D):\n    d.e = e.x\n    torch.x = 1\n",
    "python/tilewise/d.py": "import tilewise\n\nfrom .c import f\n\n\nclass D:\n"
    "    def __init__(self):\n        self.f = f\n",
    "python/tilewise/e.py": "x = 1\n",
    "README.md": "https://example.org/home/page, ratio 10.5, version 2.13.0\n",
    "src/cpu/plain.cpp": "// The warp that comes last, too, combines; rows whose keys end.\n"
    'const char* a = "// nobody is to be told";  // Official, "Of" is a word.\n'
    "/* The user is to be a person. */ int who = 1'000;\n",
    "python/b.py": 'TEXT = "as they come"\n\n\ndef who():\n    """Returns itself."""\n',
    "docs/a.md": "People who read this, too.\n\n    nobody "
    + "x" * 100
    + "\n\n```\nnobody\n```\n\n"
    "| " + "a cell " * 20 + "|\n\n- [" + "a " * 50 + "](b.md)\n",
    "docs/lab/a.md": "Nobody knew.\n",
    "docs/decisions/001-a.md": "As they come, whoever they are. " * 5 + "\n",
}


def lint(name: str, root: Path, files: dict[str, str]) -> subprocess.CompletedProcess[str]:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    subprocess.run(["git", "init", "-q", root], check=True)
    return subprocess.run(
        [sys.executable, TOOLS / f"lint_{name}.py", root], capture_output=True, text=True
    )


@pytest.mark.parametrize("case", BAD)
def test_finds(case: str, tmp_path: Path):
    name, files, message = BAD[case]
    result = lint(name, tmp_path, files)
    assert result.returncode == 1, result.stdout + result.stderr
    assert message in result.stdout
    assert "1 findings" in result.stdout


@pytest.mark.parametrize("comment", PHRASES)
def test_finds_phrases(comment: str, tmp_path: Path):
    result = lint("phrases", tmp_path, {"src/a.cpp": f"\n{comment}\n"})
    assert result.returncode == 1, result.stdout + result.stderr
    assert f": {PHRASES[comment]!r}: write " in result.stdout


@pytest.mark.parametrize("phrase", ["Whoever reads", "it had better be", "loads on their way"])
def test_finds_phrases_in_docstrings_and_pages(phrase: str, tmp_path: Path):
    files = {
        "a.py": f'def f():\n    """Does.\n\n    {phrase} it.\n    """\n',
        "a.md": f"{phrase}.\n",
    }
    result = lint("phrases", tmp_path, files)
    assert "a.py:4: " in result.stdout, result.stdout + result.stderr
    assert "a.md:1: " in result.stdout


@pytest.mark.parametrize("name", ["families", "imports", "includes", "phrases", "size", "words"])
def test_clean_tree_passes(name: str, tmp_path: Path):
    result = lint(name, tmp_path, CLEAN)
    assert result.returncode == 0, result.stdout + result.stderr
