"""The part of ``flash_attn.ops`` that attention needs: the rotary embedding."""
