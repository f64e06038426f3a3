"""Tilewise as a kernel of the Hugging Face Hub.

tools/kernels_hub.py copies this file beside the package, as ``__init__.py``. The package is
imported under its own name, because its operators, ``torch.ops.tilewise``, exist once in a process.
A process can therefore have only one version of Tilewise.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).resolve().parent


def _package() -> ModuleType:
    """The package ``tilewise`` beside this file, or the one that is already imported.

    Raises:
        ImportError: another version of Tilewise is already imported.
    """
    if "tilewise" not in sys.modules:
        file = _HERE / "tilewise" / "__init__.py"
        spec = importlib.util.spec_from_file_location("tilewise", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules["tilewise"] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["tilewise"]
            raise
    package, wanted = sys.modules["tilewise"], (_HERE / "version.txt").read_text().strip()
    if package.__version__ != wanted:
        raise ImportError(
            f"this kernel is Tilewise {wanted}, but {package.__version__} is already imported from "
            f"{package.__file__}: a process can have one version"
        )
    return package


_tilewise = _package()

attention = _tilewise.attention
attention_varlen = _tilewise.attention_varlen
attention_with_kvcache = _tilewise.attention_with_kvcache
merge_states = _tilewise.merge_states

# Transformers looks for these names in a kernel.
from tilewise.compat.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_states",
]
