"""Tilewise under the name flash_attn: everything here is from ``tilewise.compat.flash_attn``."""

from importlib import metadata, util


def _refuse_to_shadow() -> None:
    """Raises if a real flash-attn is installed: this code must not be mixed with its kernels."""
    others = [
        f"flash-attn {found.version} in {found.locate_file('')}"
        for found in metadata.distributions(name="flash-attn")
        if "+tilewise" not in found.version
    ]
    if util.find_spec("flash_attn_2_cuda") is not None:
        others.append("the kernels flash_attn_2_cuda of a real flash-attn")
    if others:
        raise ImportError(
            f"flash_attn is Tilewise's stand-in ({__file__}), but there is also {others[0]}; keep "
            "one: `pip uninstall flash-attn` until none is left, then install the one you want"
        )


_refuse_to_shadow()

from tilewise.compat.flash_attn import *  # noqa: E402, F403
from tilewise.compat.flash_attn import __version__ as __version__  # noqa: E402
