"""Import lint: the imports of python/tilewise form no cycle, and no module sets another's globals.

An arrow goes from a module to each module of the package that it imports. It ends at the deepest
module that the statement names: ``from tilewise import _check`` points to ``tilewise._check``,
``from tilewise import attention`` to ``tilewise``. Imports inside functions count, because a
function that imports a module depends on it as much as a file that does so at its top. Three kinds
of import do not count: those under ``if TYPE_CHECKING:``, which never run; the packages above a
module, which Python imports first whatever the statement says; and calls of ``importlib``, with
which ``__getattr__`` of a package imports a name that its user asks for.

Only a module itself assigns its globals. ``other.name = value`` is a finding if ``other`` is a
module of the package that the file imports. So are ``+=``, ``del`` and every other statement that
binds or deletes such a name, and ``setattr`` and ``delattr``. Run: python tools/lint_imports.py
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

from lint_common import Finding, project_files, read_text, run_lint

_SOURCES = PurePosixPath("python")
_PACKAGE = "tilewise"


def module_of(file: PurePosixPath) -> str | None:
    """The dotted name of a file of the package, None for any other file."""
    if file.suffix != ".py" or not file.is_relative_to(_SOURCES / _PACKAGE):
        return None
    parts = file.relative_to(_SOURCES).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def _modules(root: Path) -> dict[str, PurePosixPath]:
    """The files of the package by the names of their modules."""
    files = (PurePosixPath(file.as_posix()) for file in project_files(root))
    return {name: file for file in files if (name := module_of(file)) is not None}


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below this one, except those under ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and _is_type_checking(child.test):
            for other in child.orelse:
                yield other
                yield from _running(other)
        else:
            yield child
            yield from _running(child)


class _Imports:
    """The imports of one file: what it depends on, and the local names of modules."""

    def __init__(self, root: Path, file: PurePosixPath) -> None:
        self._all = _modules(root)
        self._name = module_of(file) or ""
        self._is_package = file.name == "__init__.py"
        self.tree = ast.parse(read_text(root / file) or "")
        self.arrows: dict[str, int] = {}  # imported module: line of the first import
        self._locals: dict[str, str] = {}  # local name: module
        for node in _running(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add_import(alias, node.lineno)
            elif isinstance(node, ast.ImportFrom):
                self._add_from(node)
        self.arrows.pop(self._name, None)

    def _add_import(self, alias: ast.alias, line: int) -> None:
        if alias.name not in self._all:
            return
        self.arrows.setdefault(alias.name, line)
        if alias.asname is not None:
            self._locals[alias.asname] = alias.name
        else:
            self._locals[_PACKAGE] = _PACKAGE  # "import a.b" binds a

    def _add_from(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level > 0:
            parts = self._name.split(".")
            above = node.level - self._is_package
            parts = parts[: len(parts) - above]
            base = ".".join((*parts, node.module) if node.module else parts)
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            if inner in self._all:
                self.arrows.setdefault(inner, node.lineno)
                self._locals[alias.asname or alias.name] = inner
            elif base in self._all:
                self.arrows.setdefault(base, node.lineno)

    def module(self, value: ast.expr) -> str | None:
        """The module of the package that an expression such as ``tilewise._torch`` names."""
        if isinstance(value, ast.Name):
            return self._locals.get(value.id)
        if isinstance(value, ast.Attribute):
            above = self.module(value.value)
            inner = f"{above}.{value.attr}"
            return inner if above is not None and inner in self._all else None
        return None


@functools.cache
def _cycles(root: Path) -> dict[PurePosixPath, list[Finding]]:
    """The findings of cycles, by the file whose import closes each of them."""
    imports = {name: _Imports(root, file).arrows for name, file in _modules(root).items()}
    left = {name: sorted(arrows) for name, arrows in imports.items()}
    findings: dict[PurePosixPath, list[Finding]] = {}
    while True:
        try:
            TopologicalSorter(left).prepare()
            return findings
        except CycleError as error:
            cycle = error.args[1][::-1]  # each module imports the next one
        start = cycle.index(min(cycle))
        cycle = [*cycle[start:-1], *cycle[: start + 1]]
        first, second = cycle[:2]
        file = _modules(root)[first]
        message = f"import cycle: {' -> '.join(cycle)}"
        findings.setdefault(file, []).append(Finding(str(file), imports[first][second], message))
        left[first].remove(second)  # so that the next search finds another cycle


def _assignments(imports: _Imports) -> Iterator[tuple[int, str]]:
    """Line and text of each place that sets or deletes a global of another module."""
    for node in _running(imports.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            changed, name = node.value, node.attr
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("setattr", "delattr")
            and len(node.args) >= 2
        ):
            changed, name = node.args[0], ast.unparse(node.args[1])
        else:
            continue
        module = imports.module(changed)
        if module is not None:
            yield node.lineno, f"sets {name} of {module}: only that module may assign its globals"


def check(root: Path, file: Path) -> Iterator[Finding]:
    """Findings of one file."""
    path = PurePosixPath(file.as_posix())
    if module_of(path) is None:
        return
    yield from _cycles(root).get(path, [])
    for line, message in _assignments(_Imports(root, path)):
        yield Finding(str(path), line, message)


if __name__ == "__main__":
    sys.exit(run_lint("import lint", check))
