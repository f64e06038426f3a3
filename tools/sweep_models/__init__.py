"""Every model class of Transformers' auto-mappings, tiny and random: Tilewise compared with eager.

`make sweep-models` runs it; docs/integrations/models.md is the page it writes.
"""
