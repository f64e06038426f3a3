"""The layers of ``flash_attn.layers`` that attention needs."""
