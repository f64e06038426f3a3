"""Modules of ``flash_attn.modules`` that are about attention."""
