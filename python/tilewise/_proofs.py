"""Records of `tilewise doctor --prove`, which turn on families that no GPU has proved.

Such a family is off. `tilewise doctor --prove` compares it with exact results on the GPU at hand
and writes a record into the user's cache directory. When this package loads the library, it passes
the records on to it. A record holds for one library, one driver, and GPUs of one name.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from . import _abi


@dataclass(frozen=True)
class Record:
    """The outcome of one proof; `passed` says whether all checks were right."""

    family: str  # "cuda.tcgen05"
    gpu: str
    sm: int
    cuda: int  # the newest CUDA version of the driver, as tilewise_cuda_versions returns it
    driver: str | None  # its release
    library: str  # SHA-256 of the file
    version: str  # of tilewise
    date: str
    passed: bool
    reason: str = ""  # why it did not pass
    checks: int = 0  # that passed
    head_dims: list[int] = field(default_factory=list)  # of tiles that were faster in every timing
    timings: list[dict[str, Any]] = field(default_factory=list)

    def is_of(self, library: str, driver: str | None) -> bool:
        """Whether it was made with this library (`file_hash`) and this driver."""
        return (self.library, self.driver) == (library, driver)


def file() -> Path:
    """The file of the records, in $XDG_CACHE_HOME or ~/.cache.

    Raises:
        RuntimeError: the user has no home directory.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "tilewise" / "proofs.json"


def load() -> list[Record]:
    """All records; none from a file that is missing, damaged or of another version."""
    names = {f.name for f in fields(Record)}
    try:
        rows = json.loads(file().read_text())["records"]
        return [Record(**{k: v for k, v in row.items() if k in names}) for row in rows]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return []


def add(record: Record) -> None:
    """Writes a record, which replaces those of the same family and GPU.

    Raises:
        OSError: the file cannot be written.
        RuntimeError: the user has no home directory.
    """
    same = (record.family, record.gpu, record.sm)
    others = [r for r in load() if (r.family, r.gpu, r.sm) != same]
    path = file()
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"records": [asdict(r) for r in [*others, record]]}, indent=1)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(text + "\n")
    part.replace(path)  # at once: a process that reads it meanwhile sees the old file


def file_hash(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def driver_release(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The release of the loaded kernel module, such as 580.95.05; None if there is none."""
    try:
        found = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text())
    except OSError:
        return None
    return found[1] if found else None


def set_proof(library: ctypes.CDLL, record: Record, head_dims: Sequence[int]) -> None:
    """Turns the record's family on for its GPU, for the tiles of these head dimensions.

    Without head dimensions it turns the family off there.
    """
    proof = _abi.sized(_abi.Proof)
    proof.sm, proof.driver = record.sm, record.cuda
    proof.gpu_name, proof.family = record.gpu.encode(), record.family.encode()
    proof.head_dims_count = len(head_dims)
    proof.head_dims = (ctypes.c_int32 * len(head_dims))(*head_dims)
    _abi.check(library, library.tilewise_set_proof(ctypes.byref(proof)))


def apply_records(library: ctypes.CDLL, path: Path) -> None:
    """Turns families on in a library that was loaded from `path`, where records allow it.

    A record that the library refuses, because it is of another version, is left out.
    """
    records = [record for record in load() if record.passed and record.head_dims]
    if not records:
        return  # nearly always: the library is hashed only if there is a record of a success
    this = file_hash(path), driver_release()
    for record in records:
        if not record.is_of(*this):
            continue
        try:
            set_proof(library, record, record.head_dims)
        except (ImportError, ValueError, TypeError, AttributeError):
            continue
