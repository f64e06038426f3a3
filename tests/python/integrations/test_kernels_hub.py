"""The kernel repository that tools/kernels_hub.py makes of a wheel, loaded by `kernels`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paths import ROOT

pytest.importorskip("torch")

from packages import real_package
from tilewise import __file__ as package_file
from tilewise import __version__
from tilewise._library import library_directory

PROGRAM = """
import sys
from pathlib import Path

import torch
from kernels import get_local_kernel

kernel = get_local_kernel(Path(sys.argv[1]))
q, k, v = (torch.randn(2, 9, 4, 16) for _ in range(3))
s = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4
expected = torch.einsum("bhqk,bkhd->bqhd", torch.softmax(s, -1), v)
torch.testing.assert_close(kernel.attention(q, k, v), expected)
torch.testing.assert_close(kernel.flash_attn_func(q, k, v), expected)
cu = torch.tensor([0, 9, 18], dtype=torch.int32)
packed = kernel.flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), cu, cu, 9, 9)
torch.testing.assert_close(packed, expected.flatten(0, 1))
assert all(hasattr(kernel, name) for name in kernel.__all__)
assert get_local_kernel(Path(sys.argv[1])) is kernel

import tilewise
print(tilewise.__file__)
tilewise.__version__ = "0.0.0"
copy = Path(sys.argv[1]).with_name("copy")
try:
    get_local_kernel(copy)
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The variant of a wheel with these Python files and the libraries that are being tested."""
    folder = tmp_path_factory.mktemp("hub")
    wheel = folder / f"tilewise-{__version__}-py3-none-manylinux_2_28_x86_64.whl"
    package = Path(package_file).parent
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in package.rglob("*.py"):
            archive.write(file, Path("tilewise") / file.relative_to(package))
        for library in library_directory().glob("libtilewise*.so"):
            archive.write(library, f"tilewise/lib/{library.name}")
        archive.writestr("tilewise/include/tilewise/tilewise.h", "")
        archive.writestr(f"tilewise-{__version__}.dist-info/METADATA", "")
    made = subprocess.run(
        [sys.executable, ROOT / "tools" / "kernels_hub.py", wheel, folder / "repository"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return Path(made[0])


def test_layout(variant: Path) -> None:
    assert variant.name == "torch-stable-abi210-cpu-x86_64-linux"
    assert {x.name for x in variant.iterdir()} == {
        "__init__.py", "metadata.json", "tilewise", "version.txt",
    }  # fmt: skip
    assert not (variant / "tilewise" / "include").exists()
    metadata = json.loads((variant / "metadata.json").read_text())
    assert metadata["backend"] == {"type": "cpu"}
    assert "tilewise/lib/libtilewise.so" in metadata["digest"]["files"]


def test_metadata_is_that_of_kernels(variant: Path) -> None:
    real = real_package("kernels._rust")
    metadata = real.Metadata.read_from_file(variant / "metadata.json")
    assert metadata.name.python_name == "tilewise"
    metadata.digest.validate(real.Digest.hash_variant(real.DigestAlgorithm.SHA256, variant))


def test_get_local_kernel(variant: Path, tmp_path: Path) -> None:
    """In a process that finds no other Tilewise, and has no network."""
    real_package("kernels")
    repository = variant.parents[1]
    copy = repository.with_name("copy")
    if not copy.exists():
        copy.symlink_to(repository)
    # Packages of the environments, but not this Tilewise, which may be on the path as sources.
    paths = [x for x in sys.path if "site-packages" in x]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path), "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    environment.pop("TILEWISE_LIBRARY_DIR", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, repository],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    file, sentence = done.stdout.splitlines()[-2:]
    assert Path(file) == variant / "tilewise" / "__init__.py"
    assert sentence.startswith(
        f"this kernel is Tilewise {__version__}, but 0.0.0 is already imported from"
    )
