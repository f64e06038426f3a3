"""Size lint: limits that keep code readable.

Files of code up to 500 lines, functions up to 80 (150 in a kernel), lines up to 100 columns;
inside the library, inline assembly only in src/cuda/ptx. Run: python tools/lint_size.py
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from lint_common import CXX_SUFFIXES, PYTHON_SUFFIXES, Finding, read_text, run_lint

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150  # of a kernel: .cuh
MAX_COLUMNS = 100
ASM_FOLDER = "src/cuda/ptx/"

_NOISE = re.compile(
    r'R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)"'  # raw string
    r"|//[^\n]*|/\*.*?\*/"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'"  # a character, not a digit separator
    r"|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*",  # preprocessor directive with its continuations
    re.DOTALL | re.MULTILINE,
)
_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\b\s*(?:volatile|__volatile__|goto)?\s*\(")
_NO_FUNCTION = re.compile(r"\b(?:namespace|class|struct|union|enum|extern|concept)\b")
_NAME = re.compile(r"([~\w:]+|operator\s*\S+)\s*\(")


def blank_noise(text: str) -> str:
    """The text without comments, strings and directives, every line still in its place."""
    return _NOISE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def cxx_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and last line of every outermost function body in `text`."""
    code = blank_noise(text)
    depth_of_body = None  # brace depth at which the current function body opened
    depth = 0
    head_begin = 0
    begin = 0
    name = ""
    for match in re.finditer(r"[{};]", code):
        token, at = match.group(), match.start()
        if token == "{":
            head = code[head_begin:at]
            if depth_of_body is None and _opens_function(head):
                depth_of_body = depth
                begin = head_begin + len(head) - len(head.lstrip())
                found = _NAME.search(head)
                name = found.group(1) if found else "function"
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == depth_of_body:
                depth_of_body = None
                yield name, code.count("\n", 0, begin) + 1, code.count("\n", 0, at) + 1
        if depth_of_body is None:
            head_begin = at + 1


def _opens_function(head: str) -> bool:
    if head.rstrip().endswith(("=", ",", "(")):  # an initialiser
        return False
    without_template = re.sub(r"\btemplate\s*<[^{}]*?>\s*(?=[\w\[])", "", head)
    if ")" not in without_template:
        return False
    before_arguments = without_template.split("(", 1)[0]
    if re.search(r"\b(?:operator)\b", before_arguments):
        return True
    return not (_NO_FUNCTION.search(before_arguments) or "=" in before_arguments)


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Name, first line and last line of every function in `text`.

    Decorators and docstrings do not count: they describe the function to its callers.
    """
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        end = node.end_lineno or node.lineno
        if ast.get_docstring(node) is not None:
            docstring = node.body[0]
            end -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
        yield node.name, node.lineno, end


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    is_cxx, is_python = file.suffix in CXX_SUFFIXES, file.suffix in PYTHON_SUFFIXES
    if not (is_cxx or is_python):
        return
    path = file.as_posix()
    text = read_text(root / file) or ""
    lines = text.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield Finding(path, len(lines), f"{len(lines)} lines; at most {MAX_FILE_LINES} in a file")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            yield Finding(path, number, f"{len(line)} columns; at most {MAX_COLUMNS}")
    for name, begin, end in cxx_functions(text) if is_cxx else python_functions(text):
        length = end - begin + 1
        limit = MAX_KERNEL_LINES if path.endswith(".cuh") else MAX_FUNCTION_LINES
        if length > limit:
            yield Finding(path, begin, f"{name}: {length} lines; at most {limit}")
    if is_cxx and path.startswith("src/") and not path.startswith(ASM_FOLDER):
        code = blank_noise(text)
        for match in _ASM.finditer(code):
            yield Finding(path, code.count("\n", 0, match.start()) + 1, f"asm outside {ASM_FOLDER}")


if __name__ == "__main__":
    sys.exit(run_lint("size lint", check))
