"""The command line: `tilewise doctor` and `tilewise bench` (also `python -m tilewise`)."""

from __future__ import annotations

from tilewise.cli.command import main

__all__ = ["main"]
