"""Where callers of ``flash_attn`` look for rotary embedding; it needs no Triton."""
