"""The rotary embedding in the place that it has in ``flash_attn``; it needs no Triton here."""
