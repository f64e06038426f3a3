"""Text to learn from: a file, or the source code of Python's own standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# Large parts of the library that are tables or tests rather than programs.
SKIP = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}
HELD_OUT = 0.05
# Tokens are bytes, but four spaces are one token: programs are full of them. The byte that stands
# for them does not occur in text.
INDENT, INDENT_TOKEN = b"    ", b"\x01"


def encode(text: bytes) -> Tensor:
    """Tokens [row], int64, of a text."""
    return torch.frombuffer(bytearray(text.replace(INDENT, INDENT_TOKEN)), dtype=torch.uint8).long()


def decode(tokens: Tensor) -> str:
    """The text of tokens [row]; bytes that are no UTF-8 are shown as such."""
    return bytes(tokens.tolist()).replace(INDENT_TOKEN, INDENT).decode(errors="replace")


@dataclass
class Corpus:
    """Tokens to train on and tokens held out, [row] int64 each, and where they came from."""

    train: Tensor
    held_out: Tensor
    source: str

    def batch(self, step: int, seed: int, size: int, rows: int) -> tuple[Tensor, Tensor]:
        """Batch number `step`: tokens and targets [size, rows].

        It depends on (seed, step) alone, so an interrupted run continues with the same batches.
        """
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        return _windows(self.train, generator, size, rows)

    def held_out_batch(self, size: int, rows: int) -> tuple[Tensor, Tensor]:
        """The same windows of held-out text every time."""
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
    """Reads the text and holds the last twentieth out.

    Args:
        text: a file; None for the standard library.
        rows: the length of a training window.

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
            f"{source} has {len(tokens)} tokens; windows of {rows} need at least {needed}{hint}"
        )
    cut = int(len(tokens) * (1 - HELD_OUT))
    return Corpus(tokens[:cut], tokens[cut:], f"{source}, {len(data) / 1e6:.1f} MB")
