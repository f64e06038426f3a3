"""Tilewise's module itself, with all of its names."""

import sys

import tilewise.compat.flash_attn.bert_padding

sys.modules[__name__] = tilewise.compat.flash_attn.bert_padding
