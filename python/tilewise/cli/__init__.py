"""The `tilewise` command (also `python -m tilewise`), with `doctor` and `bench`."""

from __future__ import annotations

from tilewise.cli.command import main

__all__ = ["main"]
