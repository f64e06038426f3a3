"""Packages that only `make test-integrations` installs."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest

REQUIRED = "TILEWISE_TEST_INTEGRATIONS"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignores warnings: these packages warn about optional packages that are missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def real_package(name: str) -> ModuleType:
    """The module; without it the test is skipped, or fails if `make test-integrations` runs it."""
    with quiet():
        if os.environ.get(REQUIRED):
            return importlib.import_module(name)
        return pytest.importorskip(name, reason="`make test-integrations` installs it")
