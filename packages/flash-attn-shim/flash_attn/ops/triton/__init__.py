"""The submodules mirror those of ``tilewise.compat.flash_attn``."""
