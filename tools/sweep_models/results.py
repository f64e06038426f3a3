"""The file of results, which a sweep that was interrupted goes on with."""

from __future__ import annotations

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
    """A hash of the integration's files: results of others are stale."""
    found = hashlib.sha256()
    for path in sorted(INTEGRATION.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Results:
    """By class. ``versions`` says with what they were made."""

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
        self.stored: dict[str, str] = {}  # the versions in the file
        if path.exists() and not fresh:
            stored = json.loads(path.read_text())
            self.stored = stored["versions"]
            if self.stored["transformers"] == self.versions["transformers"]:
                self.classes = stored["classes"]

    def keep(self, names: Iterable[str]) -> None:
        """Forgets classes of other names."""
        known = set(names)
        self.classes = {name: value for name, value in self.classes.items() if name in known}

    def stale(self) -> list[str]:
        """The classes whose results are of other sources of the integration."""
        now = sources()
        return [name for name, value in self.classes.items() if value.get("sources") != now]

    def put(self, name: str, result: dict[str, Any]) -> None:
        """A new result; written now and then."""
        self.classes[name] = {**result, "sources": self._sources}
        if time.monotonic() - self._written > _EVERY:
            self.write()

    def write(self) -> None:
        """The whole file, at once."""
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
    """Numbers with two digits, which is what they are good for."""
    if isinstance(value, float):
        return float(f"{value:.2g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
