"""Threads of one Python process, with a global interpreter lock and without one."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import tilewise
from paths import ROOT, SUPPORT
from tilewise import _backend, _library, _mask

sys.path.insert(0, str(ROOT / "tools"))

import check_wheel


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_many_threads(framework):
    program = str(SUPPORT / "many_threads.py")
    command = [sys.executable, "-W", "error", program, framework]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert " calls in 8 threads" in done.stdout


@pytest.mark.parametrize("name", ["_torch", "_numpy", "_kvcache_torch", "_kvcache_numpy"])
def test_backend_whose_import_another_thread_finishes(name, monkeypatch):
    """Python makes a module importable before it becomes an attribute of its package."""
    module = importlib.import_module(f"tilewise.{name}")
    monkeypatch.delattr(tilewise, name)
    choose = _backend.cache_backend if "kvcache" in name else _backend.attention_backend
    array = torch.zeros(1) if name.endswith("torch") else np.zeros(1)
    assert choose(array) is module


def test_threads_register_each_kind_of_mask_once(monkeypatch):
    registered = []

    def register(kind):
        time.sleep(0.01)
        registered.append(kind)

    monkeypatch.setattr(_mask, "_register", register)
    monkeypatch.setattr(_mask, "_with_pytrees", [])
    start = threading.Barrier(4)

    def make_mask(_):
        start.wait()
        _mask.register_pytrees()
        return list(registered)

    with ThreadPoolExecutor(4) as pool:
        after = list(pool.map(make_mask, range(4)))
    assert registered == _mask._kinds
    assert all(found == registered for found in after)  # before its mask is used


def test_no_library_uses_the_c_api_of_python():
    """An extension module that uses it would turn the GIL of a free-threaded Python on."""
    if shutil.which("readelf") is None:
        pytest.skip("needs binutils")
    libraries = list(_library.library_directory().glob("libtilewise*.so"))
    assert libraries
    for library in libraries:
        assert check_wheel.python_api(library) == [], library.name
