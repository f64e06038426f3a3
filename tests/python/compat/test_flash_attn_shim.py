"""The shim distribution that provides flash_attn from Tilewise: built, installed and imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import devices
import tilewise.compat.flash_attn as ours
from paths import ROOT, SUPPORT

SHIM = ROOT / "packages" / "flash-attn-shim"
MODULES = ["flash_attn_interface", "bert_padding", "layers.rotary", "modules.mha",
           "ops.triton.rotary"]  # fmt: skip

pytest.importorskip("torch")
pytest.importorskip("setuptools", reason="needs setuptools, which builds the wheel")


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed."""
    import shutil

    folder = tmp_path_factory.mktemp("shim")
    source = folder / "source"  # a build writes files beside its sources
    shutil.copytree(
        SHIM, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    )
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder / "dist", source)
    (wheel,) = (folder / "dist").iterdir()
    assert wheel.name == "flash_attn-2.8.4+tilewise-py3-none-any.whl"
    pip("install", "-q", "--no-deps", "--no-index", "--target", folder / "site", wheel)
    return folder / "site"


def run(program: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program that sees these folders before all others."""
    path = os.pathsep.join([*map(str, folders), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )


def test_version_matches_the_interface(installed: Path) -> None:
    (found,) = importlib.metadata.distributions(name="flash-attn", path=[str(installed)])
    assert found.version == f"{ours.__version__}+tilewise"
    assert found.read_text("top_level.txt").split() == ["flash_attn"]


def test_shim_names_are_those_of_compat(installed: Path) -> None:
    imports = "\n".join(
        f"import flash_attn.{name}, tilewise.compat.flash_attn.{name}\n"
        f"assert flash_attn.{name} is tilewise.compat.flash_attn.{name}"
        for name in MODULES
    )
    done = run(
        f"{imports}\n"
        "import torch\n"
        "for name in tilewise.compat.flash_attn.__all__:\n"
        "    assert getattr(flash_attn, name) is getattr(tilewise.compat.flash_attn, name)\n"
        "q = torch.randn(1, 5, 2, 8)\n"
        "assert flash_attn.flash_attn_func(q, q, q, causal=True).shape == q.shape\n"
        "print(flash_attn.__version__)",
        installed,
    )
    assert done.stdout.strip() == ours.__version__, done.stderr


def test_every_compat_module_has_an_alias() -> None:
    folder = Path(ours.__file__).parent
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if not path.name.startswith("_")
    }
    assert modules == set(MODULES)


def test_import_beside_real_flash_attn_fails(installed: Path, tmp_path: Path) -> None:
    real = tmp_path / "flash_attn-2.8.3.dist-info"
    real.mkdir()
    (real / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    done = run("import flash_attn", installed, tmp_path)
    assert "ImportError: flash_attn is Tilewise's stand-in" in done.stderr
    assert f"but there is also flash-attn 2.8.3 in {tmp_path}" in done.stderr
    (real / "METADATA").unlink()
    real.rmdir()
    (tmp_path / "flash_attn_2_cuda.py").write_text("")
    done = run("import flash_attn", installed, tmp_path)
    assert "but there is also the kernels flash_attn_2_cuda" in done.stderr


def test_build_over_real_flash_attn_fails(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("refusing_backend", SHIM / "refusing_backend.py")
    assert spec is not None and spec.loader is not None
    backend = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(backend)
    backend._refuse_to_replace([str(tmp_path)])
    info = tmp_path / "flash_attn-2.8.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n")
    with pytest.raises(SystemExit, match=r"flash-attn 2.8.3 is installed in .* would remove it"):
        backend._refuse_to_replace([str(tmp_path)])


@pytest.mark.models
@pytest.mark.tensors
def test_transformers_trains_and_generates_with_the_shim(
    installed: Path, device: devices.Device
) -> None:
    why = "needs transformers>=5.20: `make test-models` installs it"
    pytest.importorskip("transformers", minversion="5.20", reason=why)
    tests = SUPPORT / "flash_attention_2.py"
    program = f"import pytest; raise SystemExit(pytest.main(['-q', {str(tests)!r}]))"
    done = run(program, installed, TILEWISE_TEST_DEVICES=device.name)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed in", done.stdout, re.MULTILINE), done.stdout[-2000:]
