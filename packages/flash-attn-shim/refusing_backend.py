"""setuptools' build backend, changed to refuse environments that have a real flash-attn."""

from __future__ import annotations

import sysconfig
from importlib import metadata
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist as build_sdist,
)
from setuptools.build_meta import (
    get_requires_for_build_sdist as get_requires_for_build_sdist,
)
from setuptools.build_meta import (
    get_requires_for_build_wheel as get_requires_for_build_wheel,
)


def _refuse_to_replace(folders: list[str]) -> None:
    """Raises if these package folders contain a flash-attn that is not this one."""
    for found in metadata.distributions(name="flash-attn", path=folders):
        if "+tilewise" not in found.version:
            raise SystemExit(
                f"flash-attn {found.version} is installed in {found.locate_file('')}, and "
                "installing Tilewise's stand-in would remove it; to do so, first run: pip "
                "uninstall flash-attn"
            )


def build_wheel(directory: str, *arguments: Any, **settings: Any) -> str:
    """Builds the wheel. Even in an isolated build, sysconfig names the environment's folders."""
    _refuse_to_replace([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    return build_meta.build_wheel(directory, *arguments, **settings)
