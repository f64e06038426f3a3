"""The text to train on: a file, or the source code of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Large parts of the library that are not programs, but tables or tests.
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
HELD_OUT = 0.05
# A token is a byte, but four spaces, which are frequent in programs, are one token. The byte that
# represents them does not occur in text.
INDENT, INDENT_TOKEN = b"    ", b"\x01"


def encode(text: bytes) -> Tensor:
    """The tokens [row], int64, of a text."""
    return torch.frombuffer(bytearray(text.replace(INDENT, INDENT_TOKEN)), dtype=torch.uint8).long()


def decode(tokens: Tensor) -> str:
    """The text of tokens [row]; bytes that are not UTF-8 become replacement characters."""
    return bytes(tokens.tolist()).replace(INDENT_TOKEN, INDENT).decode(errors="replace")


@dataclass
class Corpus:
    """Training tokens and held-out tokens, [row] int64 each, and a description of their source."""

    train: Tensor
    held_out: Tensor
    source: str

    def batch(self, step: int, seed: int, size: int, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [size, rows] of batch number `step`.

        It depends only on (seed, step), so an interrupted run continues with the same batches.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _windows(self.train, generator, size, rows)

    def held_out_batch(self, size: int, rows: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets [size, rows] of held-out text, the same in every call."""
        return _windows(self.held_out, torch.Generator().manual_seed(0), size, rows)


def _windows(
    text: Tensor, generator: torch.Generator, size: int, rows: int
) -> tuple[Tensor, Tensor]:
    starts = torch.randint(0, text.shape[0] - rows, (size,), generator=generator)
    windows = text[starts[:, None] + torch.arange(rows + 1)]
    return windows[:, :-1], windows[:, 1:]


def standard_library(directory: Path | None = None) -> list[Path]:
    """The source files of the running Python's standard library, in a fixed order."""
    directory = directory or Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in directory.rglob("*.py") if not SKIP & set(p.relative_to(directory).parts))
    return sorted(files, key=lambda p: p.relative_to(directory).as_posix())


def load(text: Path | None, rows: int) -> Corpus:
    """Reads the text and holds out its last twentieth.

    Args:
        text: A file, or None for the standard library.
        rows: Length of a training window.

    Raises:
        ValueError: the file cannot be read or is too short.
    """
    if text is None:
        files = standard_library()
        data = b"\n".join(p.read_bytes() for p in files)
        source = f"the source of Python's standard library: {len(files)} files"
        hint = "; give another text with --text FILE"
    else:
        try:
            data = text.read_bytes()
        except OSError as error:
            raise ValueError(f"--text {text}: {error.strerror}") from None
        source, hint = str(text), ""
    needed = int((rows + 2) / HELD_OUT) + 1
    tokens = encode(data) if data else torch.zeros(0, dtype=torch.int64)
    if len(tokens) < needed:
        raise ValueError(
            f"{source} has {len(tokens)} tokens, but windows of {rows} need at least {needed}{hint}"
        )
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Corpus(tokens[:cut], tokens[cut:], f"{source}, {len(data) / 1e6:.1f} MB")
