"""The results file; an interrupted sweep continues from it."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

STATES = ("equal", "no attention", "refused", "failed", "not built")
INTEGRATION = (
    Path(__file__).resolve().parent.parent.parent / "python/tilewise/integrations/transformers"
)
_EVERY = 5.0  # seconds between writes


def sources() -> str:
    """A hash of the integration's code; results from other versions are stale.

    Comments, docstrings and layout do not count.
    """
    found = hashlib.sha256()
    for path in sorted(INTEGRATION.glob("*.py")):
        found.update(_code(path.read_text()).encode())
    return found.hexdigest()[:12]


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


class Results:
    """Results by class. ``versions`` are those of the installed packages, ``stored`` the file's."""

    def __init__(self, path: Path, fresh: bool = False) -> None:
        self._path = path
        self._written = time.monotonic()
        self._sources = sources()
        self.classes: dict[str, dict[str, Any]] = {}
        self.versions = {
            "transformers": metadata.version("transformers"),
            "torch": metadata.version("torch").partition("+")[0],
            "python": platform.python_version(),
        }
        self.stored: dict[str, str] = {}
        if path.exists() and not fresh:
            stored = json.loads(path.read_text())
            self.stored = stored["versions"]
            if self.stored["transformers"] == self.versions["transformers"]:
                self.classes = stored["classes"]

    def keep(self, names: Iterable[str]) -> None:
        """Drops classes with other names."""
        known = set(names)
        self.classes = {name: value for name, value in self.classes.items() if name in known}

    def stale(self) -> list[str]:
        """The classes whose results are from other versions of the integration."""
        now = sources()
        return [name for name, value in self.classes.items() if value.get("sources") != now]

    def put(self, name: str, result: dict[str, Any]) -> None:
        """Adds a new result; the file is written periodically."""
        self.classes[name] = {**result, "sources": self._sources}
        if time.monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """Writes the whole file atomically."""
        lines = ",\n".join(
            f"  {json.dumps(name)}: {json.dumps(_rounded(value), sort_keys=True)}"
            for name, value in sorted(self.classes.items())
        )
        text = f'{{"versions": {json.dumps(self.versions)},\n"classes": {{\n{lines}\n}}}}\n'
        new = self._path.with_suffix(".new")
        new.write_text(text)
        new.replace(self._path)
        self._written = time.monotonic()


def _rounded(value: Any) -> Any:
    """Numbers rounded to two significant digits."""
    if isinstance(value, float):
        return float(f"{value:.2g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
