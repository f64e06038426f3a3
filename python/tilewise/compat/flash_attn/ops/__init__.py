"""The operator of ``flash_attn.ops`` that attention needs: rotary embedding."""
