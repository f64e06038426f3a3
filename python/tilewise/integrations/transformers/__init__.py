"""Tilewise as an attention implementation of Hugging Face Transformers 5.

    import tilewise.integrations.transformers

    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

The import registers an attention function and a mask function under the name "tilewise". With them
models generate and train on CPU and CUDA, with causal and bidirectional attention, sliding windows,
GQA, softcap, sinks, padding on either side, packed sequences, dynamic and static caches and
continuous batching. None of these needs a dense mask [rows, keys]; a custom 4-D mask is applied
unchanged. A request that cannot be computed exactly raises an error that says why.

Output rows of padding tokens are 0 (eager attention computes arbitrary numbers there, which models
ignore).
"""

from tilewise._requirements import require, require_version

require("tilewise.hf", "torch", "transformers")
require_version("tilewise.hf", "transformers")

from ._attention import attention
from ._masks import create_mask
from ._register import NAME, register

__all__ = ["NAME", "attention", "create_mask", "register"]

register()
