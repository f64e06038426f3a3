"""The parametrised cases of a test file, without pytest's collection: a file has up to 300,000."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple


class Axis(NamedTuple):
    """One ``pytest.mark.parametrize``: argument names, and the values they take together."""

    names: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]


class Function(NamedTuple):
    """A test function; cases are numbered, with the last axis counting fastest."""

    name: str
    call: Any
    axes: tuple[Axis, ...]
    skipped: str  # the reason of a mark that skips all cases, or ""

    @property
    def total(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)

    def case(self, index: int) -> dict[str, Any]:
        """The arguments of a case."""
        arguments: dict[str, Any] = {}
        for axis in reversed(self.axes):
            index, position = divmod(index, len(axis.values))
            arguments.update(zip(axis.names, axis.values[position], strict=True))
        return arguments


def _axis(names: Any, values: Any) -> Axis:
    if isinstance(names, str):
        names = [name.strip() for name in names.split(",") if name.strip()]
    rows = []
    for value in values:
        marked = hasattr(value, "marks") and hasattr(value, "values")  # made by pytest.param
        row = value.values if marked else value if len(names) > 1 else (value,)
        rows.append(tuple(row))
    return Axis(tuple(names), tuple(rows))


def _function(name: str, call: Any) -> Function:
    axes, skipped = [], ""
    for mark in getattr(call, "pytestmark", []):
        if mark.name == "parametrize":
            axes.append(_axis(*mark.args[:2]))
        elif mark.name == "skip" or (mark.name == "skipif" and mark.args[0]):
            skipped = mark.kwargs.get("reason", mark.name)
    return Function(name, call, tuple(axes), skipped)


def functions(module: Any) -> list[Function]:
    """The test functions of a module, in the order of the file."""
    return [
        _function(name, call)
        for name, call in vars(module).items()
        if name.startswith("test_") and callable(call)
    ]


def sample(name: str, total: int, count: int, seed: int) -> list[int]:
    """Case numbers drawn without replacement; the same for the same seed."""
    return random.Random(f"{seed} {name}").sample(range(total), min(count, total))
