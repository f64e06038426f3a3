"""An alias of Tilewise's module, so that it has all of its names."""

import sys

import tilewise.compat.flash_attn.bert_padding

sys.modules[__name__] = tilewise.compat.flash_attn.bert_padding
