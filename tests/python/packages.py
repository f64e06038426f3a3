"""Packages that only `make test-integrations` installs."""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType

import pytest

REQUIRED = "TILEWISE_TEST_INTEGRATIONS"


def real_package(name: str) -> ModuleType:
    """The module; without it the test is skipped, or fails if `make test-integrations` runs it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what else these packages would like to have
        if os.environ.get(REQUIRED):
            return importlib.import_module(name)
        return pytest.importorskip(name, reason="`make test-integrations` installs it")
