"""Layers of ``flash_attn.layers`` that attention needs."""
