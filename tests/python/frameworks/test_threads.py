"""Threads of one Python process, with a global interpreter lock and without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from paths import ROOT, SUPPORT
from tilewise import _library

sys.path.insert(0, str(ROOT / "tools"))

import check_wheel


def test_numpy_from_many_threads():
    command = [sys.executable, "-W", "error", str(SUPPORT / "many_threads.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert " calls in 8 threads" in done.stdout


def test_no_library_uses_the_c_api_of_python():
    """An extension module that uses it would turn the GIL of a free-threaded Python on."""
    if shutil.which("readelf") is None:
        pytest.skip("needs binutils")
    libraries = list(_library.library_directory().glob("libtilewise*.so"))
    assert libraries
    for library in libraries:
        assert check_wheel.python_api(library) == [], library.name
