"""The rotary embedding of ``flash_attn.ops``, its only operator that attention needs."""
