"""The rotary embedding at its import path in ``flash_attn``; this one does not use Triton."""
