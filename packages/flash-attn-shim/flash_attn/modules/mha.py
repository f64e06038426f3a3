"""Makes this module an alias of Tilewise's, with all of its names, private ones included."""

import sys

import tilewise.compat.flash_attn.modules.mha

sys.modules[__name__] = tilewise.compat.flash_attn.modules.mha
